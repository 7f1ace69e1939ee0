# SPDX-License-Identifier: LGPL-2.1-or-later
"""The command line against a real libvirt, real sysfs and domains that really run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from lxml import etree

from tests.lab.guest import (
    OTHER_GPU_VF,
    PROFILE,
    PROFILE_ID,
    VF1,
    VF2,
    Answer,
    claim,
    define,
    holds,
    run,
    start,
    type_of,
    uuid_of,
    virsh,
)

NAMESPACES = {"vgpu": "urn:vgpu-libvirt:domain:1", "other": "urn:somebody:else"}
REQUESTS = "metadata/vgpu:devices/vgpu:device"


def vgpu(*arguments: str) -> str:
    """Run virt-vgpu, which must succeed; return its output."""
    answer = run("virt-vgpu", *arguments)
    assert answer.status == 0, f"virt-vgpu {' '.join(arguments)}: {answer.output}"
    return answer.output


def refused(*arguments: str) -> str:
    """Run virt-vgpu, which must fail with one line; return it."""
    answer: Answer = run("virt-vgpu", *arguments)
    assert answer.status == 1, f"virt-vgpu {' '.join(arguments)}: {answer}"
    assert answer.output.count("\n") == 1
    assert answer.output.startswith("virt-vgpu: error: ")
    return answer.output


def definition(name: str) -> etree._Element:
    return etree.fromstring(virsh("dumpxml", "--inactive", name))


def requests(name: str) -> list[dict[str, str]]:
    return [dict(each.attrib) for each in definition(name).findall(REQUESTS, NAMESPACES)]


def hostdevs(name: str) -> dict[str, str]:
    """Alias -> address of a domain's hostdevs."""
    found = {}
    for element in definition(name).findall("devices/hostdev"):
        address = element.find("source/address")
        alias = element.find("alias")
        assert address is not None
        assert alias is not None
        assert element.get("managed") == "no"
        numbers = [int(address.get(key, ""), 16) for key in ("domain", "bus", "slot", "function")]
        found[alias.get("name", "")] = "{:04x}:{:02x}:{:02x}.{:x}".format(*numbers)
    return found


def status() -> Any:
    return json.loads(vgpu("status", "--json"))


def test_attach_start_destroy_detach() -> None:
    define("web1")
    before = virsh("dumpxml", "--inactive", "web1")
    said = vgpu("attach", "web1", "--profile", "FAKE24-4Q")
    assert requests("web1") == [{"alias": "ua-vgpu0", "profile": PROFILE}]
    (vf,) = hostdevs("web1").values()
    assert f"is at {vf} " in said

    virsh("start", "web1")
    assert (type_of(vf), holds("web1", vf)) == (PROFILE_ID, True)
    (device,) = [d for gpu in status()["gpus"] for d in gpu["devices"] if d["address"] == vf]
    assert (device["state"], device["profile"]["name"]) == ("in-use", PROFILE)
    assert (device["claim"]["domain_name"], device["claim"]["phase"]) == ("web1", "running")
    (row,) = [line for line in vgpu("list").splitlines() if line.strip().startswith(f"{vf} ")]
    cells = re.split(r"\s{2,}", row.strip())
    assert cells == [vf, PROFILE, "in-use", "web1", "ua-vgpu0", "running"]
    assert "alive: " in vgpu("status")

    virsh("destroy", "web1")
    assert (type_of(vf), claim(vf)) == ("0", None)
    vgpu("detach", "web1")
    assert (requests("web1"), hostdevs("web1")) == ([], {})
    after = virsh("dumpxml", "--inactive", "web1")
    # libvirt keeps the PCIe root port that it added for the hostdev, and an empty <metadata/>.
    assert "urn:vgpu-libvirt" not in after
    assert "hostdev" not in after
    assert before.splitlines()[:3] == after.splitlines()[:3]


def test_the_domain_may_be_named_by_uuid() -> None:
    define("web1")
    vgpu("attach", uuid_of("web1"), "--profile", PROFILE_ID)
    assert requests("web1") == [{"alias": "ua-vgpu0", "profile": PROFILE}]
    vgpu("detach", uuid_of("web1").upper(), "--alias", "ua-vgpu0")
    assert requests("web1") == []


def test_several_vgpus_have_aliases_and_devices_of_their_own() -> None:
    define("web1")
    vgpu("attach", "web1", "--profile", PROFILE)
    vgpu("attach", "web1", "--profile", PROFILE)
    vgpu("attach", "web1", "--profile", PROFILE, "--alias", "ua-third", "--gpu", "0000:02:00.0")
    assert [each["alias"] for each in requests("web1")] == ["ua-vgpu0", "ua-vgpu1", "ua-third"]
    assert requests("web1")[2]["gpu"] == "0000:02:00.0"
    assert len(set(hostdevs("web1").values())) == 3
    assert hostdevs("web1")["ua-third"].startswith("0000:02:")
    assert "ua-vgpu0, ua-vgpu1, ua-third" in refused("detach", "web1")
    vgpu("detach", "web1", "--alias", "ua-vgpu1")
    assert list(hostdevs("web1")) == ["ua-vgpu0", "ua-third"]
    assert [each["alias"] for each in requests("web1")] == ["ua-vgpu0", "ua-third"]


def test_definitions_get_devices_of_their_own_spread_over_the_gpus() -> None:
    places = []
    for name in ("web1", "web2", "web3", "web4"):
        define(name)
        vgpu("attach", name, "--profile", PROFILE)
        places += hostdevs(name).values()
    assert len(set(places)) == 4
    assert sorted(place[:7] for place in places) == ["0000:01", "0000:01", "0000:02", "0000:02"]


def test_what_stands_in_the_metadata_stays() -> None:
    path = Path("/tmp/web1.xml")
    define("web1")
    text = path.read_text().replace(
        "<metadata>",
        """<metadata>
          <other:thing xmlns:other='urn:somebody:else' key='value'/>
          <devices xmlns='urn:vgpu-libvirt:domain:1'>
            <!-- by hand -->
            <device alias='ua-mine' profile='914' numa='prefer'/>
          </devices>""",
    )
    path.write_text(text)
    virsh("define", str(path))
    vgpu("attach", "web1", "--profile", PROFILE)
    mine = {"alias": "ua-mine", "profile": "914", "numa": "prefer"}
    assert requests("web1") == [mine, {"alias": "ua-vgpu0", "profile": PROFILE}]
    assert "<!-- by hand -->" in virsh("dumpxml", "--inactive", "web1")
    vgpu("detach", "web1", "--alias", "ua-vgpu0")
    assert requests("web1") == [mine]
    vgpu("detach", "web1")  # a request without its hostdev
    assert requests("web1") == []
    assert definition("web1").find("metadata/other:thing", NAMESPACES) is not None


def test_a_namespace_that_virsh_metadata_declared_twice_is_mended() -> None:
    """`virsh metadata --set` with a namespace of its own leaves two declarations."""
    define("web1")
    element = (
        '<devices xmlns="urn:vgpu-libvirt:domain:1"><device alias="ua-a" profile="914"/></devices>'
    )
    uri = NAMESPACES["vgpu"]
    virsh("metadata", "web1", "--config", "--uri", uri, "--key", "vgpu", "--set", element)
    vgpu("attach", "web1", "--profile", PROFILE)
    assert [each["alias"] for each in requests("web1")] == ["ua-a", "ua-vgpu0"]
    vgpu("attach", "web1", "--profile", PROFILE)
    assert len(requests("web1")) == 3


def test_a_hostdev_without_request_can_be_detached() -> None:
    define("web1", VF1, profile=None)
    assert "asks for no vGPU" in refused("detach", "web1")
    assert "choose another alias" in refused(
        "attach", "web1", "--profile", PROFILE, "--alias", "ua-vgpu0"
    )
    vgpu("detach", "web1", "--alias", "ua-vgpu0")
    assert hostdevs("web1") == {}


def test_a_hostdev_that_is_no_vgpu_is_left_alone() -> None:
    define("web1", "0000:00:1f.2", profile=None)  # the guest's SATA controller
    assert "virsh detach-device" in refused("detach", "web1", "--alias", "ua-vgpu0")
    assert list(hostdevs("web1")) == ["ua-vgpu0"]


def test_a_dry_run_writes_nothing() -> None:
    define("web1")
    before = virsh("dumpxml", "--inactive", "web1")
    said = vgpu("attach", "web1", "--profile", PROFILE, "--dry-run")
    assert virsh("dumpxml", "--inactive", "web1") == before
    assert '<vgpu:device alias="ua-vgpu0" profile="NVIDIA FAKE24-4Q"/>' in said
    vgpu("attach", "web1", "--profile", PROFILE)
    before = virsh("dumpxml", "--inactive", "web1")
    vgpu("detach", "web1", "--dry-run")
    assert virsh("dumpxml", "--inactive", "web1") == before


def test_a_running_and_a_transient_domain_are_refused() -> None:
    start("web1", VF1)
    assert "runs; say --live" in refused("attach", "web1", "--profile", PROFILE)
    assert "runs; say --live" in refused("detach", "web1")
    virsh("undefine", "web1")
    assert "is transient" in refused("attach", "web1", "--profile", PROFILE)


def test_profiles_that_cannot_be_had_are_refused() -> None:
    define("web1")
    assert "unknown on this host, which has NVIDIA FAKE24" in refused(
        "attach", "web1", "--profile", "L40S-8Q"
    )
    assert "no domain 'nobody'" in refused("attach", "nobody", "--profile", PROFILE)
    start("web2", VF1)
    start("web3", OTHER_GPU_VF)
    reason = refused("attach", "web1", "--profile", "FAKE24-8Q")
    # The driver lists it nowhere any more, but the starts have kept what it listed before.
    assert "no device for FAKE24-8Q: 0000:01:00.0 runs 4 GB profiles (owners web2)" in reason
    assert "0000:01:00.0 runs 4 GB profiles (owners web2)" in reason
    assert "0000:02:00.0 runs 4 GB profiles (owners web3)" in reason
    virsh("destroy", "web3")
    pinned = ("attach", "web1", "--profile", "FAKE24-8Q", "--gpu", "0000:01:00.0")
    assert "no device for FAKE24-8Q: 0000:01:00.0 runs 4 GB profiles" in refused(*pinned)
    assert requests("web1") == []


def test_profiles_counts_what_fits() -> None:
    def startable(profile: str, gpu: str) -> int:
        found = json.loads(vgpu("profiles", "--json"))
        return next((r["startable"] for r in found if (r["name"], r["gpu"]) == (profile, gpu)), -1)

    gpu = "0000:01:00.0"
    assert startable("NVIDIA FAKE24-24Q", gpu) == 1  # listed by seven VFs
    assert startable(PROFILE, gpu) == 6
    start("web1", VF1)
    assert startable(PROFILE, gpu) == 5
    start("web2", VF2)
    assert startable(PROFILE, gpu) == 4
    assert startable("NVIDIA FAKE24-24Q", gpu) in (0, -1)
    assert startable("NVIDIA FAKE24-24Q", "0000:02:00.0") == 1


def test_an_undo_after_a_hostdev_that_libvirt_refuses() -> None:
    """A second hostdev at the same address is refused; the metadata is then as it was."""
    define("web1", VF1, profile=None)
    # Hidden from us by its alias alone: virt-vgpu keeps off what the domain has, so break that.
    script = (
        "import sys; sys.argv = ['virt-vgpu', 'attach', 'web1', '--profile', '914'];"
        "from vgpu_libvirt import choosing; choosing.pointed_by = lambda domains: frozenset();"
        "from vgpu_libvirt.cli.main import main; main()"
    )
    answer = run("/usr/bin/python3", "-c", script)
    assert answer.status == 1
    assert "the hostdev can't be attached" in answer.output
    assert requests("web1") == []
