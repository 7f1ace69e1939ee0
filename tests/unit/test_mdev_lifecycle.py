# SPDX-License-Identifier: LGPL-2.1-or-later
"""What is so of mediated devices alone in the life of an assignment.

All that they share with VFs is told where `gpus` is taken: see test_lifecycle.py and its like.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from tests.unit.desk import pointed
from tests.unit.fake_libvirt import Domain
from tests.unit.gpus import GPU, of_mdevs, refusing
from tests.unit.host import WEB1, WEB2, domain_xml, hostdev_xml, web1, web2
from tests.unit.mdev_host import A2, P40, Type
from tests.unit.test_arrive import settle
from tests.unit.test_lifecycle import start
from tests.unit.test_pointing import point
from tests.unit.test_sync import reconcile
from vgpu_libvirt import report
from vgpu_libvirt.address import PciAddress
from vgpu_libvirt.claims import cordons
from vgpu_libvirt.claims.model import Phase
from vgpu_libvirt.devices import backend
from vgpu_libvirt.devices.mdev_life import mdev_uuid
from vgpu_libvirt.survey import look

if TYPE_CHECKING:
    from tests.unit.desk import Desk
    from tests.unit.gpus import Mdevs
    from tests.unit.host import Host

pytestmark = of_mdevs

MINE = mdev_uuid(WEB1, "ua-vgpu0")
SECOND = mdev_uuid(WEB1, "ua-vgpu1")
THEIRS = mdev_uuid(WEB2, "ua-vgpu0")
SOMEBODYS = "35ceae7f-eea5-4f28-b7f3-7b12a3e62d3c"
OTHER = "0000:5e:00.0"
TWO = {"ua-vgpu0": "L40S-8Q", "ua-vgpu1": "L40S-8Q"}


def asking(attributes: str = "", hostdevs: dict[str, str] | None = None, extra: str = "") -> str:
    """web1 with two vGPUs, of which the first says more."""
    return domain_xml(
        requests=f'<vgpu:device alias="ua-vgpu0" profile="L40S-8Q" {attributes}/>'
        '<vgpu:device alias="ua-vgpu1" profile="L40S-8Q"/>',
        hostdevs=hostdevs or {"ua-vgpu0": MINE, "ua-vgpu1": SECOND},
        extra=extra,
    )


def creates(gpus: Mdevs) -> int:
    """How often the driver was asked to make one."""
    return sum(line.startswith("create") for line in gpus.driver.log)


def gpu_of(host: Host, device: str) -> str:
    claim = host.claim(device)
    assert claim is not None
    return claim.gpu


# --- where it is made ---


@pytest.mark.promise(3)
def test_where_a_parent_refuses_the_next_is_tried(
    host: Host, gpus: Mdevs, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusing(monkeypatch, *gpus.places[:2])
    assert host.hook("prepare", web1(MINE)) == (0, "", "")
    assert gpus.parent_of(MINE) == gpus.places[2]
    assert gpu_of(host, MINE) == GPU


@pytest.mark.promise(3)
def test_a_parent_that_takes_many_is_tried_once(
    host: Host, gpus: Mdevs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is one thing that refuses, in however many slots it has room."""
    for gpu in ("0000:08:00.0", "0000:09:00.0"):
        gpus.sysfs.parent(gpu, P40)
    refusing(monkeypatch, "0000:08:00.0")
    assert host.hook("prepare", web1(MINE, "GRID P40-2B")) == (0, "", "")
    assert (gpus.parent_of(MINE), gpu_of(host, MINE)) == ("0000:09:00.0", "0000:09:00.0")


@pytest.mark.promise(3)
def test_where_all_refuse_it_is_told_and_nothing_is_kept(
    host: Host, gpus: Mdevs, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusing(monkeypatch, MINE)
    refused = host.hook("prepare", web1(MINE))
    assert refused.status == 1
    assert f"did not make mdev {MINE} as nvidia-1152 on {gpus.places[3]}" in refused.stderr
    assert f"(before that, {', '.join(gpus.places[:3])} failed)" in refused.stderr
    assert (host.claim(MINE), gpus.type_of(MINE)) == (None, 0)


def test_a_start_of_ours_leaves_the_choice_of_parents_to_prepare(desk: Desk, gpus: Mdevs) -> None:
    """`virt-vgpu start` tries no more devices than `virsh start` does."""
    desk.define(web1(MINE, number=None))
    gpus.driver.answers = [5] * 100
    said = desk.fails("start", "web1")
    assert f"did not make mdev {MINE} as nvidia-1152 on {gpus.places[3]}" in said
    assert creates(gpus) == 4
    assert desk.claims() == ()


def test_it_is_called_by_its_uuid_wherever_it_is_made(desk: Desk, gpus: Mdevs) -> None:
    gpus.sysfs.parent("0000:08:00.0", P40)
    for name, uuid in (("web1", WEB1), ("web2", WEB2)):
        desk.define(domain_xml(name, uuid, {"ua-vgpu0": "P40-2B"}, number=None))
    for name, device in (("web1", MINE), ("web2", THEIRS)):
        assert f"'ua-vgpu0' (GRID P40-2B) at {device} of GPU 0000:08:00.0" in desk.do("start", name)


def test_a_slot_is_called_by_its_parent_where_it_must_be(host: Host, gpus: Mdevs) -> None:
    gpus.sysfs.parent("0000:08:00.0", P40)
    wants = dict.fromkeys(("ua-a", "ua-b", "ua-c"), "P40-12C")
    document = domain_xml(requests=wants, number=None)
    (problem,) = point(host, Domain(document)).problems
    assert "beside 'ua-a' at 0000:08:00.0, 'ua-b' at 0000:08:00.0, and no other way" in problem


@pytest.mark.promise(3)
def test_vgpus_of_two_sizes_find_a_gpu_each(host: Host, gpus: Mdevs) -> None:
    gpus.add(OTHER)
    xml = domain_xml(
        requests={"ua-vgpu0": "L40S-8Q", "ua-vgpu1": "L40S-24Q"},
        hostdevs={"ua-vgpu0": MINE, "ua-vgpu1": SECOND},
    )
    assert host.hook("prepare", xml) == (0, "", "")
    assert {gpu_of(host, MINE), gpu_of(host, SECOND)} == {GPU, OTHER}


@pytest.mark.promise(3)
def test_what_the_gpu_runs_leaves_room_for_its_size_alone(host: Host, gpus: Mdevs) -> None:
    assert host.hook("prepare", web2(THEIRS, "L40S-24Q")).status == 0
    refused = host.hook("prepare", web1(MINE))
    assert refused.status == 1
    assert f"no device for L40S-8Q: {GPU} runs 24 GB profiles (owners web2)" in refused.stderr
    assert host.hook("prepare", web1(MINE, "L40S-24Q")).status == 0
    assert "is full" in host.hook("prepare", domain_xml(
        "web3", WEB1[:-1] + "3", {"ua-vgpu0": "L40S-24Q"},
        {"ua-vgpu0": mdev_uuid(WEB1[:-1] + "3", "ua-vgpu0")},
    )).stderr  # fmt: skip


@pytest.mark.parametrize(
    ("wish", "same"), [('apart="gpu"', False), ('together="gpu"', True), (f'gpu="{OTHER}"', False)]
)
def test_wishes_of_one_domain(host: Host, gpus: Mdevs, wish: str, same: bool) -> None:
    gpus.add(OTHER)
    assert host.hook("prepare", asking(wish)) == (0, "", "")
    assert (gpu_of(host, MINE) == gpu_of(host, SECOND)) is same


@pytest.mark.parametrize("wish", ['apart="gpu"', f'gpu="{OTHER}"'])
def test_wishes_that_cannot_be_granted(host: Host, gpus: Mdevs, wish: str) -> None:
    refused = host.hook("prepare", asking(wish))
    assert (refused.status, "no device for L40S-8Q" in refused.stderr) == (1, True)
    assert host.typed() == []


@pytest.mark.parametrize("numa", ["require", "prefer"])
def test_the_domains_numa_node(host: Host, gpus: Mdevs, numa: str) -> None:
    gpus.add(OTHER)
    for gpu, node in ((GPU, 0), (OTHER, 1)):
        gpus.sysfs.gpu(gpu, node)
        host.write(host.sysfs / f"devices/system/node/node{node}/cpulist", f"{node}\n")
    tuned = "<numatune><memory mode='strict' nodeset='1'/></numatune>"
    assert host.hook("prepare", asking(f'numa="{numa}"', extra=tuned)).status == 0
    assert gpu_of(host, MINE) == OTHER


@pytest.mark.promise(3)
def test_not_on_a_cordoned_parent(host: Host, gpus: Mdevs) -> None:
    for place in gpus.places[:3]:
        cordons.write(
            host.paths.state, cordons.Cordon(PciAddress.parse(place), "root", time.time())
        )
    assert host.hook("prepare", web1(MINE)).status == 0
    assert gpus.parent_of(MINE) == gpus.places[3]


# --- how many ---

A40 = {1: 32, 2: 24, 3: 16, 4: 12, 6: 8, 8: 6, 12: 4, 16: 3, 24: 2, 48: 1}  # as NVIDIA tells them


def counts(host: Host, gpu: str) -> dict[str, tuple[int, str]]:
    """What `profiles` says of a GPU."""
    found = (each for each in report.capacities(look(host.config)) if str(each.gpu.address) == gpu)
    return {each.profile.short_name: (each.startable, each.bound) for each in found}


@pytest.mark.parametrize("size", A40)
def test_as_many_of_each_size_as_the_vendor_says(host: Host, gpus: Mdevs, size: int) -> None:
    made = Type("nvidia-558", f"NVIDIA A40-{size}Q", "1", f"framebuffer={size * 1024}M")
    told = made._replace(description=f"{made.description}, max_instance={A40[size]}")
    for number in range(32):
        gpus.sysfs.parent(f"0000:af:{number // 8:02x}.{number % 8}", [told], gpu="0000:ae:00.0")
    assert counts(host, "0000:ae:00.0") == {f"A40-{size}Q": (A40[size], "")}


def test_a_gpu_without_vfs_tells_how_many_itself(host: Host, gpus: Mdevs) -> None:
    gpus.sysfs.parent("0000:08:00.0", P40)
    told = {str(each.name).removeprefix("GRID "): (int(each.available), "") for each in P40}
    assert counts(host, "0000:08:00.0") == told


def test_what_is_listed_as_none_beside_another_size(host: Host, gpus: Mdevs) -> None:
    """A recorded A2, on which somebody's 4 GB run."""
    for vf in ("0000:08:01.5", "0000:08:01.6", "0000:08:01.7"):
        gpus.sysfs.parent(vf, A2, gpu="0000:08:00.0")
    gpus.sysfs.mdev(SOMEBODYS, "0000:08:01.5", "nvidia-746")
    found = counts(host, "0000:08:00.0")
    assert {name: number for name, (number, _) in found.items() if number} == {
        "A2-4A": 3, "A2-4C": 3, "A2-4Q": 3,
    }  # fmt: skip
    refused = host.hook("prepare", web1(MINE, "A2-8Q"))
    assert (
        "no device for A2-8Q: 0000:08:00.0 runs 4 GB profiles (1 place with a type that nobody "
        "claimed)"
    ) in refused.stderr
    assert host.hook("prepare", web1(MINE, "A2-4Q")) == (0, "", "")


# --- parameters ---

PARAMS = domain_xml(
    requests='<vgpu:device alias="ua-vgpu0" profile="L40S-8Q" params="frame_rate_limiter=0"/>',
    hostdevs={"ua-vgpu0": MINE},
)


def with_parameters(gpus: Mdevs, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is made has parameters, as NVIDIA's have."""
    real = gpus.sysfs.mdev

    def make(uuid: str, parent: str, type_id: str, group: int = 23) -> object:
        place = real(uuid, parent, type_id, group)
        gpus.host.write(place / "nvidia/vgpu_params", "\n")
        return place

    monkeypatch.setattr(gpus.sysfs, "mdev", make)


def test_parameters_are_set_before_anybody_opens_it(
    host: Host, gpus: Mdevs, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_parameters(gpus, monkeypatch)
    assert host.hook("prepare", PARAMS) == (0, "", "")
    assert gpus.driver.log == [f"create <- {MINE}", "vgpu_params <- frame_rate_limiter=0\n"]
    assert (host.place(MINE) / "nvidia/vgpu_params").read_text() == "frame_rate_limiter=0\n"


@pytest.mark.promise(3)
def test_one_that_takes_no_parameters_is_removed_again(host: Host, gpus: Mdevs) -> None:
    refused = host.hook("prepare", PARAMS)
    assert refused.status == 1
    assert "the driver did not take 'frame_rate_limiter=0'" in refused.stderr
    assert creates(gpus) == 1
    assert (host.claim(MINE), host.typed()) == (None, [])


# --- its end ---


@pytest.mark.promise(3)
@pytest.mark.parametrize("got_as_far", ["started", "QEMU"])
def test_one_that_its_driver_removes_itself_is_not_removed_by_us(
    host: Host, gpus: Mdevs, monkeypatch: pytest.MonkeyPatch, got_as_far: str
) -> None:
    """A QEMU that dies before `started` may have had it open as well."""
    xml = web1(MINE)
    if got_as_far == "started":
        start(host, MINE)
        host.end_domain("web1", 4001)
    else:
        host.hook("prepare", xml)
        host.hook("start", xml)
    monkeypatch.setattr(backend, "_OWN_CLEANING", 60.0)  # as long as the release may take
    sleep = time.sleep
    monkeypatch.setattr(time, "sleep", lambda seconds: (sleep(seconds), gpus.set_type(MINE, 0)))
    gpus.driver.log.clear()
    assert host.hook("release", xml) == (0, "", "")
    assert (gpus.driver.log, host.claim(MINE)) == ([], None)


@pytest.mark.promise(3)
def test_one_that_its_driver_leaves_is_removed_when_its_time_is_over(
    host: Host, gpus: Mdevs, monkeypatch: pytest.MonkeyPatch
) -> None:
    xml = start(host, MINE)
    host.end_domain("web1", 4001)
    monkeypatch.setattr(backend, "_OWN_CLEANING", 60.0)
    assert host.hook("release", xml) == (0, "", "")
    assert (gpus.driver.log[-1], host.claim(MINE)) == ("remove <- 1", None)


@pytest.mark.promise(5)
def test_an_incomplete_list_of_running_domains_stops_no_removal(host: Host, gpus: Mdevs) -> None:
    start(host, MINE)
    host.end_domain("web1", 4001)
    host.write(host.status_file("other"), "<domstatus")
    assert reconcile(host).released == (MINE,)
    assert host.hook("prepare", web1(MINE)).status == 0
    assert host.hook("release", web1(MINE)).stderr == ""
    assert host.typed() == []


@pytest.mark.promise(1, 3)
def test_an_mdev_that_is_not_ours_stays(host: Host, gpus: Mdevs) -> None:
    gpus.set_type(SOMEBODYS, 1152)
    host.set_policy(foreign="reset")
    xml = start(host, MINE)
    assert gpus.parent_of(MINE) != gpus.parent_of(SOMEBODYS)
    host.end_domain("web1", 4001)
    host.hook("release", xml)
    reconcile(host)
    host.hook("prepare", web2(SOMEBODYS))
    assert host.typed() == [SOMEBODYS]


@pytest.mark.promise(1, 3)
def test_one_that_was_made_on_another_gpu_is_somebody_elses(host: Host, gpus: Mdevs) -> None:
    xml = web1(MINE)
    host.hook("prepare", xml)
    there = gpus.add(OTHER)[0]
    gpus.set_type(MINE, 0)
    gpus.sysfs.mdev(MINE, there, "nvidia-1152")
    assert "somebody else made it" in host.hook("release", xml).stderr
    assert gpus.parent_of(MINE) == there
    claim = host.claim(MINE)
    assert claim is not None
    assert claim.phase is Phase.RELEASE_PENDING


def test_one_that_is_gone_takes_its_claim_along(host: Host, gpus: Mdevs) -> None:
    start(host, MINE)
    host.end_domain("web1", 4001)
    gpus.set_type(MINE, 0)
    assert reconcile(host).released == (MINE,)
    assert gpus.driver.log == [f"create <- {MINE}"]


# --- what names it, and shouldn't ---


def test_another_uuid_than_its_own_is_refused(host: Host, gpus: Mdevs) -> None:
    refused = host.hook("prepare", web1(SOMEBODYS))
    assert refused == (
        1,
        "",
        "vgpu-libvirt: the hostdev 'ua-vgpu0' of domain 'web1' names the mediated device "
        f"{SOMEBODYS}, not {MINE}, which is made for it; run 'virt-vgpu sync'\n",
    )
    assert creates(gpus) == 0


@pytest.mark.parametrize("operation", ["migrate", "restore"])
def test_one_that_comes_with_another_uuid_is_refused_at_once(
    host: Host, gpus: Mdevs, operation: str
) -> None:
    """`prepare` would refuse it, when the reservation stands."""
    refused = host.hook(operation, web1(SOMEBODYS, number=None))
    assert (refused.status, refused.stdout) == (1, "")
    assert f"{SOMEBODYS}, not {MINE}, which is made for it" in refused.stderr
    assert (creates(gpus), host.claim(MINE)) == (0, None)


@pytest.mark.parametrize("managed", ["yes", "no"])
def test_managed_means_nothing_to_it(host: Host, gpus: Mdevs, managed: str) -> None:
    """virt-manager writes managed='yes'; libvirt binds no driver to a mediated device."""
    assert host.hook("prepare", web1(MINE, managed=managed)) == (0, "", "")


@pytest.mark.promise(1, 2)
@pytest.mark.parametrize("place", ["its parent", "its GPU"])
def test_a_pci_hostdev_at_what_has_somebodys_mdev_is_refused(
    host: Host, gpus: Mdevs, place: str
) -> None:
    assert host.hook("prepare", web2(THEIRS)).status == 0
    at = GPU if place == "its GPU" else gpus.parent_of(THEIRS)
    assert at is not None
    refused = host.hook("prepare", domain_xml(hostdevs={"ua-x": at}))
    assert refused.status == 3
    assert f"points at {at}, which has the vGPU of domain 'web2' ({WEB2}) on it" in refused.stderr
    free = gpus.places[3]
    assert host.hook("prepare", domain_xml(hostdevs={"ua-x": free})) == (0, "", "")


# --- arrivals ---


@pytest.mark.promise(2, 3)
@pytest.mark.parametrize("operation", ["migrate", "restore"])
def test_a_document_is_left_as_it_is_and_the_device_is_made(
    host: Host, gpus: Mdevs, operation: str
) -> None:
    document = web1(MINE, number=None) + "<!-- the end -->\n\n"
    assert host.hook(operation, document) == (0, document, "")
    claim = host.claim(MINE)
    assert claim is not None
    assert (claim.phase, claim.alias, gpus.type_of(MINE)) == (Phase.RESERVED, "ua-vgpu0", 1152)
    settle(host)
    assert (host.claim(MINE), host.typed()) == (None, [])


@pytest.mark.promise(1, 4)
def test_a_leftover_that_is_not_provably_dead_stops_an_arrival(host: Host, gpus: Mdevs) -> None:
    """There is no other of its name."""
    host.hook("prepare", web1(MINE))
    before = host.claim(MINE)
    host.process(812, "libvirtd")
    refused = host.hook("restore", web1(MINE, number=None), parent=812)
    assert (refused.status, refused.stdout) == (1, "")
    assert f"domain 'web1' still has {MINE} from an earlier run" in refused.stderr
    assert (host.claim(MINE), gpus.type_of(MINE)) == (before, 1152)


# --- hosts that have both, or had the other ---


@pytest.mark.promise(2, 3)
def test_both_kinds_in_one_domain(host: Host, gpus: Mdevs) -> None:
    vf = host.gpu(OTHER)[0]
    xml = domain_xml(requests=TWO, hostdevs={"ua-vgpu0": MINE, "ua-vgpu1": vf})
    assert host.hook("prepare", xml) == (0, "", "")
    assert host.typed() == sorted([vf, MINE])
    assert (host.type_of(vf), host.type_of(MINE)) == ("1152", "nvidia-1152")
    assert host.hook("start", xml) == (0, "", "")
    host.hook("release", xml)
    assert host.typed() == []


@pytest.mark.promise(3)
@pytest.mark.parametrize("bad", ["vf", "mdev"])
def test_of_both_kinds_all_or_none_stay(
    host: Host, gpus: Mdevs, monkeypatch: pytest.MonkeyPatch, bad: str
) -> None:
    vf = host.gpu(OTHER)[0]
    refusing(monkeypatch, vf if bad == "vf" else MINE)
    xml = domain_xml(requests=TWO, hostdevs={"ua-vgpu0": MINE, "ua-vgpu1": vf})
    assert host.hook("prepare", xml).status == 1
    assert host.typed() == []
    assert host.claim(MINE) is host.claim(vf) is None


@pytest.mark.parametrize(("wish", "granted"), [("apart", True), ("together", False)])
def test_wishes_of_both_kinds_in_one_domain(
    host: Host, gpus: Mdevs, wish: str, granted: bool
) -> None:
    vf = host.gpu(OTHER)[0]
    for first, second in ((MINE, vf), (vf, SECOND)):
        xml = asking(f'{wish}="gpu"', {"ua-vgpu0": first, "ua-vgpu1": second})
        assert (host.hook("prepare", xml).status == 0) is granted
        host.hook("release", xml)
    assert host.typed() == []


def defined(*hostdevs: str) -> Domain:
    """web1's definition, with a hostdev at each of these."""
    xml = "".join(hostdev_xml(f"ua-vgpu{n}", each) for n, each in enumerate(hostdevs))
    return Domain(domain_xml(requests={"ua-vgpu0": "L40S-8Q"}, hostdevs=xml, number=None))


def test_where_its_gpus_are_gone_it_is_pointed_at_a_vf_and_back(host: Host, gpus: Mdevs) -> None:
    (vf,) = host.gpu(OTHER, vfs=1)
    domain = defined(MINE)
    assert point(host, domain).repointed == ()
    gpus.sysfs.bus.rename(host.root / "away")
    assert [move.goes for move in point(host, domain).repointed] == [vf]
    assert pointed(domain)["ua-vgpu0"] == vf
    assert point(host, domain).repointed == ()
    (host.root / "away").rename(gpus.sysfs.bus)
    (host.pci(vf) / "nvidia").rename(host.root / "nvidia")
    assert [move.goes for move in point(host, domain).repointed] == [MINE]
    assert pointed(domain)["ua-vgpu0"] == MINE


def test_a_wrong_uuid_is_mended_by_sync(host: Host, gpus: Mdevs) -> None:
    domain = defined(SOMEBODYS)
    assert [(m.came, m.goes) for m in point(host, domain).repointed] == [(SOMEBODYS, MINE)]
    assert point(host, domain).repointed == ()


def test_a_hostdev_whose_request_is_gone_goes_only_if_it_was_ours(host: Host, gpus: Mdevs) -> None:
    domain = defined(MINE, SECOND)
    assert [(m.alias, m.goes) for m in point(host, domain).repointed] == [("ua-vgpu1", None)]
    domain = defined(MINE, SOMEBODYS)
    assert point(host, domain).repointed == ()


@pytest.mark.promise(6)
def test_a_whole_gpu_that_could_make_some_may_be_passed_through(host: Host, gpus: Mdevs) -> None:
    gpus.sysfs.parent("0000:08:00.0", P40)
    domain = defined(MINE, "0000:08:00.0")
    assert point(host, domain).repointed == ()


def test_definitions_that_want_more_than_there_is_room_for_all_stay(
    host: Host, gpus: Mdevs
) -> None:
    """Whoever starts first gets it; there is nothing to point elsewhere."""
    both = {"web1": (WEB1, MINE), "web2": (WEB2, THEIRS)}
    domains = [
        Domain(domain_xml(name, uuid, {"ua-vgpu0": "L40S-48Q"}, {"ua-vgpu0": device}, number=None))
        for name, (uuid, device) in both.items()
    ]
    outcome = point(host, *domains)
    assert (outcome.repointed, outcome.problems) == ((), ())
