# SPDX-License-Identifier: LGPL-2.1-or-later
"""A domain that comes from elsewhere gets devices of this host: the hooks `migrate`, `restore`."""

from __future__ import annotations

import re
import shutil
import time
from typing import TYPE_CHECKING

import pytest

from tests.unit.host import LIBVIRTD, WEB1, WEB2, domain_xml, web1, web2
from vgpu_libvirt import fs, sync, trigger
from vgpu_libvirt.address import PciAddress
from vgpu_libvirt.claims import cordons, store
from vgpu_libvirt.claims.model import Phase, Process
from vgpu_libvirt.domain.read import parse_domain

if TYPE_CHECKING:
    from tests.unit.gpus import Gpus
    from tests.unit.host import Host

ELSEWHERE = "0000:af:00.7"  # where the domain had its vGPU: no device of this host
OPERATIONS = ("migrate", "restore")
both = pytest.mark.parametrize("operation", OPERATIONS)


def incoming(device: str = ELSEWHERE, **more: object) -> str:
    """web1 as the filters get it: without an id."""
    return web1(device, number=None, **more)


def device_of(document: str, alias: str = "ua-vgpu0") -> str:
    hostdev = parse_domain(document).hostdev(alias)
    assert hostdev is not None
    return str(hostdev.address or hostdev.uuid)


def settle(host: Host) -> None:
    """A sync, once reservations have lapsed."""
    host.set_policy(reserve_timeout=0.001)
    time.sleep(0.01)
    sync.reconcile(host.context(), time.monotonic() + 10)


@both
@pytest.mark.promise(2, 3)
def test_it_gets_a_device_of_this_host_and_the_rest_stays(host: Host, operation: str) -> None:
    first = host.gpu()[0]
    document = incoming() + "<!-- the end -->\n\n"
    result = host.hook(operation, document)
    assert (result.status, result.stderr) == (0, "")
    assert device_of(result.stdout) == first
    there = result.stdout.replace(f"bus='{0x3D:#04x}' slot='0x00' function='0x4'", "HERE")
    assert there == document.replace(f"bus='{0xAF:#04x}' slot='0x00' function='0x7'", "HERE")
    claim = host.claim(first)
    assert claim is not None
    assert (claim.phase, claim.domain_uuid, claim.alias) == (Phase.RESERVED, WEB1, "ua-vgpu0")
    assert claim.daemon == Process(LIBVIRTD, 4242)
    assert host.type_of(first) == "1152"


@both
@pytest.mark.promise(6)
@pytest.mark.parametrize("hostdevs", [{}, {"ua-nic": ELSEWHERE}])
def test_one_that_asks_for_nothing_passes_unseen(
    host: Host, operation: str, hostdevs: dict[str, str]
) -> None:
    host.gpu()
    before = host.tree()
    assert host.hook(operation, domain_xml(hostdevs=hostdevs)) == (0, "", "")
    assert host.tree() == before


@both
@pytest.mark.promise(2)
def test_the_prepare_that_follows_takes_the_reservation_over(
    host: Host, gpus: Gpus, operation: str
) -> None:
    document = host.hook(operation, incoming(gpus.elsewhere())).stdout
    first = device_of(document)
    reserved = host.claim(first)
    assert reserved is not None
    assert host.hook("prepare", document).status == 0
    claim = host.claim(first)
    assert claim is not None
    assert claim.phase is Phase.CONFIGURED
    assert claim.claim_id != reserved.claim_id


@both
@pytest.mark.promise(3)
def test_where_nothing_follows_the_device_comes_back(
    host: Host, gpus: Gpus, operation: str
) -> None:
    first = device_of(host.hook(operation, incoming(gpus.elsewhere())).stdout)
    assert gpus.type_of(first) == 1152
    sync.reconcile(host.context(), time.monotonic() + 10)
    assert host.claim(first) is not None, "not before reserve_timeout is over"
    settle(host)
    assert (host.claim(first), gpus.type_of(first)) == (None, 0)


@both
def test_a_sync_is_asked_for(host: Host, gpus: Gpus, operation: str) -> None:
    """Other definitions may point at the device."""
    host.hook(operation, incoming(gpus.elsewhere()))
    assert trigger.is_set(host.paths)


@pytest.mark.promise(3)
def test_a_second_try_takes_no_second_device(host: Host, gpus: Gpus) -> None:
    document = incoming(gpus.elsewhere())
    first = device_of(host.hook("migrate", document).stdout)
    assert device_of(host.hook("migrate", document).stdout) == first
    assert list(store.read_all(host.paths.state).readable) == [first]
    assert gpus.type_of(first) == 1152


def test_a_device_that_does_stays(host: Host) -> None:
    _, second, *_ = host.gpu()
    assert device_of(host.hook("restore", incoming(second)).stdout) == second


@pytest.mark.promise(1, 2)
def test_a_device_that_another_has_by_now_is_left_to_it(host: Host) -> None:
    first, second, *_ = host.gpu()
    host.hook("prepare", web2(first))
    assert device_of(host.hook("restore", incoming(first)).stdout) == second
    claim = host.claim(first)
    assert claim is not None
    assert claim.domain_uuid == WEB2


@pytest.mark.promise(2)
def test_several_devices_are_all_found_or_none(host: Host) -> None:
    first, second, *_ = host.gpu(vfs=2)
    requests = {"ua-vgpu0": "L40S-8Q", "ua-vgpu1": "L40S-8Q"}
    hostdevs = {"ua-vgpu0": ELSEWHERE, "ua-vgpu1": "0000:af:01.0"}
    document = domain_xml(requests=requests, hostdevs=hostdevs, number=None)
    answer = host.hook("migrate", document).stdout
    assert {device_of(answer), device_of(answer, "ua-vgpu1")} == {first, second}
    settle(host)
    host.hook("prepare", web2(first))
    result = host.hook("migrate", document)
    assert (result.status, result.stdout) == (1, "")
    assert host.claim(second) is None


@both
@pytest.mark.promise(1, 3)
def test_a_domain_that_runs_here_is_refused(host: Host, gpus: Gpus, operation: str) -> None:
    device = gpus.device()
    gpus.set_type(device, 1152)
    host.run_domain("web1", WEB1, 4001, web1(device), opens=(host.nodes(device)[0],))
    result = host.hook(operation, incoming(device))
    assert (result.status, result.stdout) == (1, "")
    assert f"domain 'web1' ({WEB1}) runs on this host already" in result.stderr


@pytest.mark.promise(1, 4)
def test_a_leftover_that_is_not_provably_dead_stays_and_another_device_is_chosen(
    host: Host,
) -> None:
    first, second, *_ = host.gpu()
    host.hook("prepare", web1(first))
    claim = host.claim(first)
    host.process(812, "libvirtd")  # another than that which began to start it
    result = host.hook("restore", incoming(first), parent=812)
    assert device_of(result.stdout) == second
    assert host.claim(first) == claim
    assert host.type_of(first) == "1152"


@both
@pytest.mark.promise(3)
def test_where_there_is_no_device_it_says_why_and_nothing_is_kept(
    host: Host, operation: str
) -> None:
    (only,) = host.gpu(vfs=1)
    host.hook("prepare", web2(only))
    result = host.hook(operation, incoming())
    assert (result.status, result.stdout) == (1, "")
    assert result.stderr.startswith("vgpu-libvirt: no device for L40S-8Q: 0000:3d:00.0 ")
    assert "owners web2" in result.stderr


@pytest.mark.promise(3)
def test_where_the_driver_refuses_a_device_the_next_is_tried(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, *_ = host.gpu()
    write = fs.write_attribute

    def refuses(path: str, text: str) -> None:
        if first in path:
            raise OSError(5, "Input/output error")
        write(path, text)

    monkeypatch.setattr(fs, "write_attribute", refuses)
    assert device_of(host.hook("restore", incoming()).stdout) == second
    assert host.claim(first) is None


def test_a_cordoned_gpu_is_left_out(host: Host, gpus: Gpus) -> None:
    gpus.add("0000:5e:00.0")
    cordons.write(
        host.paths.state, cordons.Cordon(PciAddress.parse("0000:3d:00.0"), "root", time.time())
    )
    claim = host.claim(device_of(host.hook("migrate", incoming(gpus.elsewhere())).stdout))
    assert claim is not None
    assert claim.gpu == "0000:5e:00.0"


@both
@pytest.mark.parametrize(
    ("document", "says"),
    [
        (incoming(managed="yes"), "managed='yes'"),
        (domain_xml(requests={"ua-vgpu0": "L40S-8Q"}), "comes without a hostdev of that alias"),
        (incoming(profile="L40S-7Q"), "profile 'L40S-7Q' is unknown on this host"),
        (
            domain_xml(requests='<vgpu:device alias="ua-vgpu0" profile="x" colour="red"/>'),
            "can't be understood: unknown attribute 'colour'",
        ),
    ],
)
def test_what_can_not_be_served_is_refused_in_a_sentence(
    host: Host, operation: str, document: str, says: str
) -> None:
    host.gpu()
    before = host.tree()
    result = host.hook(operation, document)
    assert (result.status, result.stdout) == (1, "")
    assert says in result.stderr
    assert re.fullmatch(r"vgpu-libvirt: .+\n", result.stderr)
    shutil.rmtree(host.paths.runtime)  # that a sync is asked for
    assert host.tree() == before


@pytest.mark.promise(5)
def test_no_device_is_found_where_the_host_can_not_be_read(host: Host) -> None:
    host.gpu()
    host.write(host.state / "claims", "no directory")
    result = host.hook("migrate", incoming())
    assert (result.status, result.stdout) == (1, "")
