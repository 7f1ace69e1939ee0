# SPDX-License-Identifier: LGPL-2.1-or-later
"""`virt-vgpu start` and `fix-xml` against a real libvirt: what they leave really runs."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from lxml import etree

from tests.lab.guest import (
    CLAIMS,
    OTHER_GPU_VF,
    PROFILE,
    PROFILE_ID,
    VF1,
    VF2,
    assert_free,
    claim,
    define,
    domain_xml,
    holds,
    hook,
    is_running,
    start,
    type_of,
    virsh,
)
from tests.lab.test_cli import hostdevs, refused, requests, vgpu


def guest_address(name: str) -> dict[str, str]:
    """Where the guest sees its hostdev."""
    root = etree.fromstring(virsh("dumpxml", "--inactive", name))
    address = root.find("devices/hostdev/address")
    assert address is not None
    return dict(address.attrib)


@pytest.mark.promise(2)
def test_a_taken_device_is_followed_by_a_free_one(bystander: None) -> None:
    define("web1", VF2)
    place = guest_address("web1")
    dry = vgpu("start", "web1", "--dry-run")
    assert hostdevs("web1") == {"ua-vgpu0": VF2}
    said = vgpu("start", "web1")
    (vf,) = hostdevs("web1").values()
    assert vf not in (VF1, VF2)  # of the GPU that has more room
    assert f"'ua-vgpu0' ({PROFILE}) at {vf} of GPU 0000:02:00.0, since GPU 0000:02" in said
    assert f"at {vf} of" in dry
    assert (type_of(vf), holds("web1", vf)) == (PROFILE_ID, True)
    assert guest_address("web1") == place
    assert "<rom bar='off'/>" in virsh("dumpxml", "--inactive", "web1")
    mine = claim(vf)
    assert mine is not None
    assert (mine["phase"], mine["domain_name"]) == ("running", "web1")
    assert "runs already" in refused("start", "web1")
    virsh("destroy", "web1")
    assert_free(vf)


@pytest.mark.promise(2)
def test_domains_at_one_device_that_start_at_once() -> None:
    names = ["web1", "web2", "web3"]
    for name in names:
        define(name, VF1)
    starts = [
        subprocess.Popen(["virt-vgpu", "start", name], stdout=subprocess.PIPE, stderr=-2, text=True)
        for name in names
    ]
    said = {name: each.communicate()[0] for name, each in zip(names, starts, strict=True)}
    assert [each.returncode for each in starts] == [0, 0, 0], said
    places = [next(iter(hostdevs(name).values())) for name in names]
    assert len(set(places)) == 3
    assert all(holds(name, vf) for name, vf in zip(names, places, strict=True))


def test_a_missing_hostdev_is_added_and_the_guest_may_wait() -> None:
    define("web1", VF1)
    hostdev = "/tmp/hostdev.xml"
    root = etree.fromstring(virsh("dumpxml", "--inactive", "web1"))
    Path(hostdev).write_text(etree.tostring(root.find("devices/hostdev"), encoding="unicode"))
    virsh("detach-device", "web1", hostdev, "--config")
    assert hostdevs("web1") == {}
    assert "is started, and paused, with 'ua-vgpu0'" in vgpu("start", "web1", "--paused")
    (vf,) = hostdevs("web1").values()
    assert virsh("domstate", "web1").strip() == "paused"
    virsh("resume", "web1")
    assert holds("web1", vf)


def test_a_device_that_refuses_is_followed_by_the_next() -> None:
    """Between our reservation and prepare somebody else writes to the device."""
    define("web1", VF1)
    hook(
        "40-thief",
        f"#!/bin/sh\ncat >/dev/null\n[ \"$1 $2\" = 'web1 prepare' ] && [ ! -e /tmp/stolen ] && "
        f"echo 917 >/sys/bus/pci/devices/{VF1}/nvidia/current_vgpu_type && >/tmp/stolen\nexit 0\n",
    )
    Path("/tmp/stolen").unlink(missing_ok=True)
    said = vgpu("start", "web1")
    (vf,) = hostdevs("web1").values()
    assert vf.startswith("0000:02:")  # this size fits beside 917 only there
    assert f"at {vf} of" in said
    assert holds("web1", vf)
    assert (type_of(VF1), claim(VF1)) == ("917", None)


@pytest.mark.promise(4)
def test_a_start_that_fails_leaves_nothing(bystander: None) -> None:
    disk = "<disk type='file'><source file='/gone.img'/><target dev='sda' bus='sata'/></disk>"
    define("web1", VF1, devices=disk)
    said = refused("start", "web1")
    assert "can't be started: Cannot access storage file '/gone.img'" in said
    assert_free(VF1)
    assert hostdevs("web1") == {"ua-vgpu0": VF1}
    assert [path.stem for path in CLAIMS.glob("*.json")] == [VF2]
    assert not is_running("web1")


def test_what_virt_manager_and_hands_write_is_corrected_and_starts() -> None:
    text = domain_xml("web1", VF1, managed="yes", profile=None)
    text = text.replace("<alias name='ua-vgpu0'/>", "").replace(
        "<metadata>",
        "<metadata><o:thing xmlns:o='urn:somebody:else'/>"
        "<v:devices xmlns:v='urn:vgpu-libvirt:domain:2'><v:device alias='gpu' type='4q'/>"
        "</v:devices>",
    )
    Path("/tmp/web1.xml").write_text(text)
    virsh("define", "/tmp/web1.xml")
    place = guest_address("web1")
    before = virsh("dumpxml", "--inactive", "web1")
    assert "Nothing was written." in vgpu("fix-xml", "web1", "--dry-run")
    assert virsh("dumpxml", "--inactive", "web1") == before
    said = vgpu("fix-xml", "web1")
    assert '+    <hostdev mode="subsystem" type="pci" managed="no">' in said
    assert requests("web1") == [{"alias": "ua-gpu", "profile": PROFILE}]
    assert hostdevs("web1") == {"ua-gpu": VF1}
    assert guest_address("web1") == place
    after = virsh("dumpxml", "--inactive", "web1")
    assert "urn:vgpu-libvirt:domain:2" not in after
    assert "urn:somebody:else" in after
    assert "<rom bar='off'/>" in after
    assert "needs no correction" in vgpu("fix-xml", "web1")
    virsh("start", "web1")
    assert holds("web1", VF1)
    start("web2", OTHER_GPU_VF)  # nothing of it stands in another's way
