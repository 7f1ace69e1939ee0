# SPDX-License-Identifier: LGPL-2.1-or-later
"""`attach` and `detach`: what they write into a definition, and what they refuse."""

from __future__ import annotations

from typing import TYPE_CHECKING

import libvirt
import pytest

from tests.unit.desk import pointed, requests
from tests.unit.fake_libvirt import error
from tests.unit.golden import check
from tests.unit.host import WEB1, WEB2, domain_xml, web1, web2
from vgpu_libvirt.devices import catalogue
from vgpu_libvirt.domain.model import Request

if TYPE_CHECKING:
    from tests.unit.desk import Desk

PLAIN = domain_xml(number=None)
ASKED = Request("ua-vgpu0", "NVIDIA L40S-8Q")


@pytest.mark.parametrize("name", ["web1", WEB1, WEB1.upper(), WEB1.replace("-", "")])
@pytest.mark.parametrize("profile", ["NVIDIA L40S-8Q", "L40S-8Q", "1152"])
def test_attach(desk: Desk, name: str, profile: str) -> None:
    domain = desk.define(PLAIN)
    said = desk.do("attach", name, "--profile", profile)
    assert requests(domain) == (ASKED,)
    assert pointed(domain) == {"ua-vgpu0": desk.vfs[0]}
    assert domain.writes == ["setMetadata", "attachDeviceFlags"]
    assert said == (
        f"'ua-vgpu0' of domain 'web1' ({WEB1}) is at 0000:3d:00.4 of GPU 0000:3d:00.0, and gets "
        "NVIDIA L40S-8Q when the domain starts. Why there: only GPU 0000:3d:00.0 can take it now.\n"
    )


def test_what_attach_wrote_starts(desk: Desk) -> None:
    domain = desk.define(PLAIN)
    desk.do("attach", "web1", "--profile", "L40S-8Q")
    document = domain.XMLDesc(libvirt.VIR_DOMAIN_XML_INACTIVE)
    assert desk.host.hook("prepare", document) == (0, "", "")
    assert desk.host.type_of(desk.vfs[0]) == "1152"


def test_attach_and_detach_leave_what_was_there(desk: Desk) -> None:
    domain = desk.define(PLAIN)
    desk.do("attach", "web1", "--profile", "L40S-8Q")
    desk.do("attach", "web1", "--profile", "L40S-8Q")
    assert pointed(domain) == {"ua-vgpu0": desk.vfs[0], "ua-vgpu1": desk.vfs[1]}
    desk.do("detach", "web1", "--alias", "ua-vgpu0")
    assert requests(domain) == (Request("ua-vgpu1", "NVIDIA L40S-8Q"),)
    assert desk.do("detach", "web1") == f"domain 'web1' ({WEB1}) has no vGPU 'ua-vgpu1' any more.\n"
    assert (requests(domain), pointed(domain)) == ((), {})
    assert "urn:vgpu-libvirt" not in domain.XMLDesc(libvirt.VIR_DOMAIN_XML_INACTIVE)


def test_the_first_free_alias_is_taken(desk: Desk) -> None:
    other = "<interface><alias name='ua-vgpu1'/></interface>"
    domain = desk.define(domain_xml(requests={"ua-vgpu0": "1152"}, hostdevs=other))
    desk.do("attach", "web1", "--profile", "1152")
    assert [request.alias for request in requests(domain)] == ["ua-vgpu0", "ua-vgpu2"]


def test_a_pin_is_written_down(desk: Desk) -> None:
    desk.host.gpu("0000:5e:00.0")
    domain = desk.define(PLAIN)
    desk.do("attach", "web1", "--profile", "1152", "--gpu", "0000:5E:00.0", "--alias", "ua-x")
    assert str(requests(domain)[0].gpu) == "0000:5e:00.0"
    assert pointed(domain) == {"ua-x": "0000:5e:00.4"}


def test_all_wishes_are_written_down_and_kept(desk: Desk) -> None:
    desk.host.gpu("0000:5e:00.0", node=1)
    pinned = "<numatune><memory mode='strict' nodeset='1'/></numatune>"
    domain = desk.define(domain_xml(number=None, extra=pinned))
    arguments = ("attach", "web1", "--profile", "1152")
    desk.do(*arguments)
    desk.do(*arguments, "--apart", "--placement", "pack", "--numa", "ignore")
    first, second = requests(domain)
    assert (first, second) == (
        ASKED,
        Request("ua-vgpu1", "NVIDIA L40S-8Q", placement="pack", numa="ignore", apart="gpu"),
    )
    assert pointed(domain) == {"ua-vgpu0": "0000:5e:00.4", "ua-vgpu1": "0000:3d:00.4"}
    reason = desk.refused(*arguments, "--together", "--numa", "require")
    assert (
        "0000:3d:00.0 is on NUMA node 0, and the domain lives on 1; 0000:5e:00.0 is not that"
        in reason
    )


def test_pinned_vcpus_count_as_nodes(desk: Desk) -> None:
    desk.host.gpu("0000:5e:00.0", node=1)
    domain = desk.define(PLAIN.replace("<devices>", "<vcpu cpuset='4-5'>2</vcpu><devices>"))
    arguments = ("attach", "web1", "--profile", "1152")
    assert "can't be read" in desk.refused(*arguments, "--numa", "require")
    for node, cpus in ((0, "0-3"), (1, "4-7")):
        desk.host.write(desk.host.sysfs / f"devices/system/node/node{node}/cpulist", cpus + "\n")
    desk.do(*arguments)
    assert pointed(domain) == {"ua-vgpu0": "0000:5e:00.4"}
    desk.host.write(desk.host.sysfs / "devices/system/node/node0/cpulist", "odd\n")
    assert "can't be understood: 'odd" in desk.refused(*arguments, "--numa", "require")


def test_two_vgpus_of_a_domain_share_the_room(desk: Desk) -> None:
    desk.host.gpu("0000:5e:00.0")
    domain = desk.define(PLAIN)
    for _ in range(2):
        desk.do("attach", "web1", "--profile", "L40S-48Q", "--placement", "pack")
    assert pointed(domain) == {"ua-vgpu0": desk.vfs[0], "ua-vgpu1": "0000:5e:00.4"}
    reason = desk.refused("attach", "web1", "--profile", "L40S-48Q")
    assert "0000:3d:00.0 has no room for it (1 VF for the domain's other vGPUs)" in reason


def test_a_profile_that_a_full_gpu_lists_no_more_is_still_known(desk: Desk) -> None:
    desk.define(PLAIN)
    assert desk.host.hook("prepare", web2(desk.vfs[0], "L40S-48Q")).status == 0
    for vf in desk.vfs:
        desk.host.set_list(vf, "")
    reason = desk.refused("attach", "web1", "--profile", "L40S-8Q")
    assert "no device for L40S-8Q: 0000:3d:00.0 is full (owners web2)" in reason
    (desk.host.state / "catalogue.json").unlink()
    reason = desk.refused("attach", "web1", "--profile", "L40S-8Q")
    assert "'L40S-8Q' is unknown, or doesn't fit now: the host offers NVIDIA L40S-48Q" in reason


def test_attach_learns_what_an_idle_host_has(desk: Desk) -> None:
    desk.define(PLAIN)
    desk.do("attach", "web1", "--profile", "1152")
    assert catalogue.read(desk.host.paths.state).complete == {"L40S"}
    assert desk.host.hook("prepare", web2(desk.vfs[0], "L40S-48Q")).status == 0
    for vf in desk.vfs:
        desk.host.set_list(vf, "")
    reason = desk.refused("attach", "web1", "--profile", "A40-8Q")
    assert "profile 'A40-8Q' is unknown on this host, which has NVIDIA L40S-1B (1145)" in reason


def test_who_can_not_write_the_catalogue_can_attach(desk: Desk) -> None:
    domain = desk.define(PLAIN)
    desk.host.write(desk.host.state / "lock/in-the-way", "")
    desk.do("attach", "web1", "--profile", "1152")
    assert pointed(domain) == {"ua-vgpu0": desk.vfs[0]}
    assert not (desk.host.state / "catalogue.json").exists()


@pytest.mark.parametrize("target", ["0000:3d:00.4", "0000:3d:00.0"])
def test_nothing_goes_to_what_is_cordoned(desk: Desk, target: str) -> None:
    domain = desk.define(PLAIN)
    desk.do("cordon", target)
    arguments = ("attach", "web1", "--profile", "1152")
    if target.endswith(".0"):
        assert "0000:3d:00.0 is cordoned;" in desk.refused(*arguments)
    else:
        desk.do(*arguments)
        assert pointed(domain) == {"ua-vgpu0": desk.vfs[1]}


def test_a_device_that_no_other_definition_points_at_comes_first(desk: Desk) -> None:
    desk.define(web1(desk.vfs[0], number=None))
    domain = desk.define(domain_xml("web2", WEB2, number=None))
    desk.do("attach", "web2", "--profile", "1152")
    assert pointed(domain) == {"ua-vgpu0": desk.vfs[1]}


def test_a_definition_that_cannot_be_read_is_no_obstacle(desk: Desk) -> None:
    desk.define("<domain><name>odd</name><uuid/></domain>")
    desk.define(PLAIN)
    desk.do("attach", "web1", "--profile", "1152")


@pytest.mark.promise(9)
@pytest.mark.parametrize("verb", ["attach", "detach"])
def test_a_dry_run(desk: Desk, verb: str) -> None:
    domain = desk.define(PLAIN if verb == "attach" else web1(desk.vfs[2], number=None))
    before = desk.host.tree()
    arguments = ["--profile", "1152"] if verb == "attach" else []
    check(f"cli/{verb}-dry-run.txt", desk.do(verb, "web1", *arguments, "--dry-run"), desk.host.root)
    assert domain.writes == []
    assert desk.host.tree() == before


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (
            ["--profile", "L40S-9Q"],
            "profile 'L40S-9Q' is unknown on this host, which has NVIDIA L40S",
        ),
        (["--profile", "1152", "--gpu", "0000:5e:00.0"], "GPU 0000:5e:00.0 is not on this host"),
    ],
)
def test_what_is_not_there_is_refused(desk: Desk, arguments: list[str], reason: str) -> None:
    desk.define(PLAIN)
    assert reason in desk.refused("attach", "web1", *arguments)


def test_what_does_not_fit_is_refused_with_the_owners(desk: Desk) -> None:
    desk.define(PLAIN)
    assert desk.host.hook("prepare", web2(desk.vfs[0])).status == 0
    for vf in desk.vfs:
        desk.host.set_list(vf, "ID    : vGPU Name\n1152  : NVIDIA L40S-8Q\n")
    desk.host.set_list(desk.vfs[0], "")
    desk.host.gpu("0000:5e:00.0", lists="ID : vGPU Name\n1150 : NVIDIA L40S-4Q\n")
    reason = desk.refused("attach", "web1", "--profile", "1150", "--gpu", "0000:3d:00.0")
    assert "no device for L40S-4Q: 0000:3d:00.0 runs 8 GB profiles (owners web2)" in reason


@pytest.mark.parametrize("alias", ["vgpu0", "ua-", "ua-a b", "ua-ä"])
def test_an_alias_that_libvirt_would_drop_is_wrong_usage(desk: Desk, alias: str) -> None:
    desk.define(PLAIN)
    result = desk.call("attach", "web1", "--profile", "1152", "--alias", alias)
    assert result.exit_code == 2
    assert "is no alias that libvirt keeps" in result.output


def test_an_address_that_is_none_is_wrong_usage(desk: Desk) -> None:
    desk.define(PLAIN)
    assert desk.call("attach", "web1", "--profile", "1152", "--gpu", "3d:00.0").exit_code == 2


def test_an_alias_that_is_taken_is_refused(desk: Desk) -> None:
    desk.define(web1(desk.vfs[0], number=None))
    arguments = ("attach", "web1", "--profile", "1152", "--alias", "ua-vgpu0")
    assert "asks for a vGPU at 'ua-vgpu0' already" in desk.refused(*arguments)


@pytest.mark.parametrize("verb", [["attach", "web1", "--profile", "1152"], ["detach", "web1"]])
def test_running_transient_and_unknown_domains_are_refused(desk: Desk, verb: list[str]) -> None:
    assert "there is no domain 'web1' at qemu:///system; 'virsh list --all'" in desk.refused(*verb)
    domain = desk.define(web1(desk.vfs[0]), active=True)
    assert f"domain 'web1' ({WEB1}) runs; say --live to change what runs" in desk.refused(*verb)
    domain.persistent = False
    assert "has no definition to edit; use --live alone" in desk.refused(*verb)
    domain.active = False
    assert "has no definition to edit; ask for the vGPU in the XML" in desk.refused(*verb)


def test_metadata_that_cannot_be_understood_is_refused(desk: Desk) -> None:
    desk.define(domain_xml(requests='<vgpu:device alias="ua-a" profile="1" colour="red"/>'))
    reason = desk.refused("attach", "web1", "--profile", "1152")
    assert "unknown attribute 'colour'" in reason
    assert reason.endswith("; run 'virt-vgpu fix-xml web1'\n")
    desk.do("detach", "web1")


def test_which_of_several_must_be_said(desk: Desk) -> None:
    both = {"ua-a": desk.vfs[0], "ua-b": desk.vfs[1]}
    desk.define(domain_xml(requests=dict.fromkeys(both, "1152"), hostdevs=both))
    assert "several vGPUs: ua-a, ua-b; say which with --alias" in desk.refused("detach", "web1")
    assert "has no vGPU 'ua-c'; it asks for ua-a, ua-b" in desk.refused(
        "detach", "web1", "--alias", "ua-c"
    )


def test_a_request_without_hostdev_and_a_hostdev_without_request(desk: Desk) -> None:
    half = desk.define(domain_xml(requests={"ua-a": "1152"}))
    desk.do("detach", "web1")
    assert (requests(half), half.writes) == ((), ["setMetadata"])
    other = desk.define(domain_xml("web2", WEB2, hostdevs={"ua-b": desk.vfs[0]}))
    assert "asks for no vGPU; a hostdev" in desk.refused("detach", "web2")
    desk.do("detach", "web2", "--alias", "ua-b")
    assert (pointed(other), other.writes) == ({}, ["detachDeviceFlags"])


@pytest.mark.parametrize("address", ["0000:3d:00.0", "0000:77:00.0"])
def test_a_hostdev_that_is_no_vgpu_is_left_alone(desk: Desk, address: str) -> None:
    desk.define(domain_xml(hostdevs={"ua-nic": address}))
    assert "points at no VF for vGPUs" in desk.refused("detach", "web1", "--alias", "ua-nic")


def test_metadata_goes_back_when_the_hostdev_is_refused(desk: Desk) -> None:
    domain = desk.define(domain_xml(requests={"ua-a": "1152"}))
    domain.refuses = ("attachDeviceFlags",)
    reason = desk.refused("attach", "web1", "--profile", "1152")
    assert (
        f"domain 'web1' ({WEB1}): the hostdev can't be attached: attachDeviceFlags fails" in reason
    )
    assert domain.writes == ["setMetadata", "setMetadata"]
    assert requests(domain) == (Request("ua-a", "1152"),)


def test_metadata_that_cannot_go_back_is_told(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    domain = desk.define(PLAIN)

    def fail(_text: str, _flags: int) -> None:
        domain.refuses = ("setMetadata",)
        raise error(libvirt.VIR_ERR_OPERATION_FAILED, "no room")

    monkeypatch.setattr(domain, "attachDeviceFlags", fail)
    result = desk.call("attach", "web1", "--profile", "1152")
    assert result.exit_code == 1
    assert "no room; and what was written can't be undone" in result.output


def test_a_libvirt_that_is_not_there(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_uri: str) -> None:
        raise error(libvirt.VIR_ERR_SYSTEM_ERROR, "Failed to connect socket")

    monkeypatch.setattr(libvirt, "open", fail)
    assert desk.refused("attach", "web1", "--profile", "1152") == (
        "libvirt can't be reached at qemu:///system: Failed to connect socket; "
        "see that libvirtd or virtqemud runs, and that you may use it\n"
    )
