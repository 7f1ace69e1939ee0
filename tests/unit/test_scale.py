# SPDX-License-Identifier: LGPL-2.1-or-later
"""Twice the host costs twice the work: counted, not timed. `bench/` has the times."""

from __future__ import annotations

import random
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

import libvirt
import pytest
from click.testing import CliRunner

from bench import libvirt_double
from bench.host import Guest, LargeHost, Size
from tests.unit.host import BOOT, Host, domain_xml
from vgpu_libvirt import choosing, libvirt_api, placement, repoint
from vgpu_libvirt.claims import inventory, witnesses
from vgpu_libvirt.claims.handles import Handles
from vgpu_libvirt.claims.model import Namespaces, Process
from vgpu_libvirt.cli.main import main
from vgpu_libvirt.domain.read import parse_domain
from vgpu_libvirt.survey import look

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

SIZES = (Size(1, 5, 7), Size(2, 10, 14), Size(4, 20, 28))
LINEAR = 2.1  # how much more each doubling may add than the one before; 4 would be quadratic
FEW = 20  # calls of a function more or less that prove nothing
MOVES = 3


def count(work: Callable[[], object]) -> Counter[str]:
    """How often WORK calls each function of Python, and all those that are written in C."""
    calls: Counter[str] = Counter()

    def note(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call":
            calls[f"{frame.f_globals.get('__name__')}.{frame.f_code.co_qualname}"] += 1
        elif event == "c_call":
            calls["C"] += 1

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


def ours(counted: Counter[str], function: str) -> int:
    """How often a function of the package was called, named by its module and itself."""
    return counted[f"vgpu_libvirt.{function}"]


def check_linear(small: Counter[str], middle: Counter[str], large: Counter[str]) -> None:
    """Check that no function's calls grow faster than the host: what is there always cancels."""
    assert {
        name: (small[name], middle[name], many)
        for name, many in large.items()
        if many - middle[name] > LINEAR * (middle[name] - small[name]) + FEW
    } == {}


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> list[LargeHost]:
    """Hosts at rest, each twice as large as the one before."""
    return [LargeHost(tmp_path_factory.mktemp("host"), size) for size in SIZES]


def sync(host: LargeHost, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(libvirt, "open", libvirt_double.connect)
    done = CliRunner().invoke(main, ["sync"], env=host.environment)
    assert done.exit_code == 0, done.output
    return done.output


def test_a_sync_that_changes_nothing(
    hosts: list[LargeHost], monkeypatch: pytest.MonkeyPatch
) -> None:
    sync(hosts[0], monkeypatch)  # imports, and fills caches
    counts = [count(lambda host=host: sync(host, monkeypatch)) for host in hosts]
    check_linear(*counts)
    for host, counted in zip(hosts, counts, strict=True):
        assert ours(counted, "domain.read.parse_status") <= 2 * host.size.running
        assert ours(counted, "devices.vendor_vfio.discover") == 1


def test_a_sync_that_points_as_many_definitions_as_before(
    hosts: list[LargeHost], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = []
    for host in hosts:
        host.point_at_taken(MOVES)
        assert sync(host, monkeypatch).count(" was pointed at ") == MOVES
        counts.append(count(lambda host=host: sync(host, monkeypatch)))
        host.point_right()
    check_linear(*counts)


@pytest.mark.parametrize("operation", ["prepare", "release", "reconnect"])
def test_a_hook(hosts: list[LargeHost], operation: str) -> None:
    def work(host: LargeHost) -> None:
        done = host.host.hook(operation, host.newcomers()[0].document())
        assert done.status == 0, done.stderr

    counts = []
    for host in [hosts[0], *hosts]:  # the first fills caches
        if operation == "release":
            host.host.hook("prepare", host.newcomers()[0].document())
        counts.append(count(lambda host=host: work(host)))
        assert ours(counts[-1], "domain.read.parse_status") <= host.size.running
        assert ours(counts[-1], "claims.model.parse") <= 4, "no claims but its own are understood"
        host.host.hook("release", host.newcomers()[0].document())
        assert host.host.claim(host.free[0]) is None
    check_linear(*counts[1:])


@pytest.mark.parametrize("number", [10, 1000])
def test_a_look_up_costs_the_same_however_many_there_are(number: int) -> None:
    guests = [Guest(each, f"0000:3d:{each // 8:02x}.{each % 8}") for each in range(number)]
    domains = [
        inventory.LiveDomain(
            one.uuid,
            one.name,
            one.number,
            Process(one.pid, 1),
            one.monitor,
            frozenset({one.vf}),
            parse_domain(one.document()),
        )
        for one in guests[:1]
    ]
    domains += [
        domains[0]._replace(uuid=one.uuid, devices=frozenset({one.vf})) for one in guests[1:]
    ]
    world = witnesses.World(
        BOOT,
        1.0,
        Namespaces(None, None),
        inventory.LiveDomains(tuple(domains), ()),
        Handles({}, ()),
        tuple(one.monitor for one in guests),
    )
    last = guests[-1]

    def look_up() -> object:
        assert world.domains.by_uuid(last.uuid) == world.domains.using(last.vf) == domains[-1]
        assert world.listens(last.monitor)
        return world.monitor_in(f"domain-{last.number}-{last.name}")

    assert look_up() == last.monitor  # and the indexes are made
    steps = 0

    def step(frame: FrameType, event: str, _argument: object) -> Any:
        nonlocal steps
        frame.f_trace_opcodes = True
        steps += event == "opcode"
        return step

    sys.settrace(step)
    try:
        look_up()
    finally:
        sys.settrace(None)
    assert 0 < steps < 300


@pytest.mark.promise(1)
def test_one_look_at_the_domains_for_all_devices_but_a_fresh_one_at_files_before_each_write(
    host: Host,
) -> None:
    first, second, third, *_ = host.gpu()
    devices = {"ua-a": first, "ua-b": second, "ua-c": third}
    xml = domain_xml(requests=dict.fromkeys(devices, "NVIDIA L40S-8Q"), hostdevs=devices)
    counted = count(lambda: host.hook("prepare", xml))
    assert [host.type_of(vf) for vf in devices.values()] == ["1152"] * 3
    assert ours(counted, "claims.inventory.live_domains") == 1
    assert ours(counted, "claims.handles.scan") == 3


def test_libvirt_is_asked_once_for_the_list_and_once_for_each_domain(
    hosts: list[LargeHost], monkeypatch: pytest.MonkeyPatch
) -> None:
    host = hosts[0]
    monkeypatch.setenv("VGPU_LIBVIRT_CONFIG", host.environment["VGPU_LIBVIRT_CONFIG"])
    connection = libvirt_double.connect("")
    before = libvirt_double.calls()
    found = libvirt_api.definitions(connection)
    assert libvirt_double.calls() - before == 1 + len(found)
    assert {one.name: one.is_active for one in found} == {
        **{guest.name: True for guest in host.running},
        **{guest.name: False for guest in host.inactive},
    }
    assert all(one.is_persistent for one in found)
    assert {one.document for one in found} == {
        guest.document() for guest in (*host.running, *host.inactive)
    }


def wanting(number: int, requests: dict[str, str], hostdevs: dict[str, str]) -> repoint.Wanting:
    guest = Guest(number, "")
    return repoint.Wanting(
        parse_domain(domain_xml(guest.name, guest.uuid, requests, hostdevs, number=None)),
        frozenset(),
    )


@pytest.mark.parametrize("seed", range(40))
def test_what_stays_is_told_by_its_own_gpus_alone(
    host: Host, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan is the one that a look at all GPUs for every definition would make."""
    dice = random.Random(seed)
    vfs = [vf for bus in ("3d", "5e", "a1") for vf in host.gpu(f"0000:{bus}:00.0", vfs=4)]
    for number in range(4):  # some have claims, and are left as dead owners leave them
        guest = Guest(number, dice.choice(vfs))
        profile = dice.choice(["L40S-8Q", "L40S-24Q"])
        xml = domain_xml(guest.name, guest.uuid, {"ua-a": profile}, {"ua-a": guest.vf})
        host.hook("prepare", xml)
    definitions = []
    for number in range(8):
        aliases = ["ua-a", "ua-b"][: dice.choice([1, 1, 2])]
        places = dice.sample([*vfs, "0000:99:00.4"], len(aliases))
        requests = {alias: dice.choice(["L40S-8Q", "L40S-24Q", "L40S-9Q"]) for alias in aliases}
        definitions.append(wanting(number, requests, dict(zip(aliases, places, strict=True))))
    seen = look(host.config).host
    dirty = frozenset(dice.sample(sorted(seen.claims.readable), dice.randint(0, 2)))
    busy = frozenset(dice.sample(vfs, 2)) - dirty
    seen = seen._replace(busy=busy, dirty=dirty, cordoned=frozenset(dice.sample(vfs, 1)))
    quick = repoint.plan(definitions, "spread", seen)
    monkeypatch.setattr(repoint, "_staying", lambda *_: None)
    for module in (choosing, placement):
        monkeypatch.setattr(module, "narrowed", lambda host, _: host)
    assert quick == repoint.plan(definitions, "spread", seen)


def test_the_first_of_several_is_found(host: Host) -> None:
    vf = host.gpu()[0]
    for number in (1, 2):
        guest = Guest(number, vf)
        host.run_domain(guest.name, guest.uuid, guest.pid, guest.document())
    live = inventory.live_domains(host.paths)
    assert live.using(vf) == live.by_uuid(Guest(1, vf).uuid) == live.domains[0]
