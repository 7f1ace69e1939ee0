# SPDX-License-Identifier: LGPL-2.1-or-later
"""Programs that write their own XML, under `virt-vgpu exec`, with a real libvirt and QEMU."""

from __future__ import annotations

import re
import sys
import time
from typing import TYPE_CHECKING

import pytest

from tests.lab.guest import (
    CLAIMS,
    PROFILE,
    PROFILE_ID,
    TRIGGER,
    VF1,
    VF2,
    Answer,
    assert_free,
    claim,
    domain_xml,
    holds,
    let_go,
    run,
    start,
    sync,
    type_of,
    until,
    uuid_of,
    virsh,
)
from tests.lab.test_cli import hostdevs

if TYPE_CHECKING:
    from pathlib import Path

# With metadata alone: the request, and no hostdev.
ASKS = re.sub(r"<hostdev.*</hostdev>", "", domain_xml("web1", VF1), flags=re.DOTALL)

PROGRAM = """\
import os, sys
import libvirt

connection = libvirt.open("qemu:///system")
assert type(connection) is libvirt.virConnect
document = sys.stdin.read()
try:
    if sys.argv[1] == "createXML":
        domain = connection.createXML(document, 0)
    else:
        connection.defineXML(document)
        domain, = connection.listAllDomains(libvirt.VIR_CONNECT_LIST_DOMAINS_INACTIVE)
        domain.create()
except libvirt.libvirtError as error:
    print(error.get_error_code() == libvirt.VIR_ERR_CONFIG_UNSUPPORTED, error)
    sys.exit(1)
print(domain.ID(), domain.XMLDesc())
"""


# What the program attaches points at a VF that another domain has.
PLUGS = """\
import sys
import libvirt

domain = libvirt.open("qemu:///system").lookupByName("web1")
document = sys.stdin.read()
live = libvirt.VIR_DOMAIN_AFFECT_LIVE
if sys.argv[1] == "attach":
    namespace = "urn:vgpu-libvirt:domain:1"
    element = "<devices><device alias='ua-vgpu0' profile='NVIDIA FAKE24-4Q'/></devices>"
    kind = libvirt.VIR_DOMAIN_METADATA_ELEMENT
    domain.setMetadata(kind, element, "vgpu", namespace, live)
    domain.attachDeviceFlags(document, flags=live)
else:
    domain.detachDeviceAlias("ua-vgpu0", live)
"""
PORTS = "".join(
    f"<controller type='pci' index='{number}' model='pcie-root-port'/>" for number in range(1, 4)
)


def program(tmp_path: Path, call: str, document: str = ASKS, text: str = PROGRAM) -> Answer:
    path = tmp_path / "program.py"
    path.write_text(text)
    return run("virt-vgpu", "exec", "--", sys.executable, str(path), call, stdin=document)


def vf_of(name: str) -> str:
    """The VF that a running domain has."""
    live = virsh("dumpxml", name)
    (parts,) = re.findall(
        r"<source>\s*<address domain='0x(\w+)' bus='0x(\w+)' slot='0x(\w+)' function='0x(\w)'", live
    )
    return "{}:{}:{}.{}".format(*parts)


def assert_has_its_vgpu(name: str) -> str:
    vf = vf_of(name)
    assert type_of(vf) == PROFILE_ID
    assert holds(name, vf)
    mine = claim(vf)
    assert mine is not None
    assert (mine["domain_name"], mine["alias"], mine["phase"]) == (name, "ua-vgpu0", "running")
    return vf


def test_a_document_with_a_request_alone_is_created_with_its_vgpu(
    tmp_path: Path, bystander: None
) -> None:
    assert "<hostdev" not in ASKS
    done = program(tmp_path, "createXML")
    assert done.status == 0, done.output
    vf = assert_has_its_vgpu("web1")
    assert virsh("list", "--transient", "--name").split() == ["web1"]
    virsh("destroy", "web1")
    assert_free(vf)


def test_a_definition_with_a_request_alone_is_started_with_its_vgpu(tmp_path: Path) -> None:
    done = program(tmp_path, "create")
    assert done.status == 0, done.output
    vf = assert_has_its_vgpu("web1")
    assert hostdevs("web1") == {"ua-vgpu0": vf}
    virsh("destroy", "web1")
    assert_free(vf)


@pytest.mark.promise(2)
def test_a_document_that_points_at_a_taken_device_gets_another(
    tmp_path: Path, bystander: None
) -> None:
    start("first", VF1)
    done = program(tmp_path, "createXML", domain_xml("web1", VF1))
    assert done.status == 0, done.output
    assert assert_has_its_vgpu("web1") != VF1
    assert holds("first", VF1)


def test_what_cannot_be_served_is_a_libvirt_error_with_our_sentence(tmp_path: Path) -> None:
    done = program(tmp_path, "createXML", ASKS.replace(PROFILE, "NVIDIA FAKE24-99Q"))
    assert done.status == 1
    assert done.output.startswith("True vgpu-libvirt: ")
    assert "NVIDIA FAKE24-99Q" in done.output
    assert not list(CLAIMS.glob("*.json"))


@pytest.mark.promise(2)
def test_a_qemu_that_fails_leaves_nothing(tmp_path: Path) -> None:
    broken = ASKS.replace(
        "<devices>", "<devices><disk type='file'><source file='/nosuch'/><target dev='vda'/></disk>"
    )
    done = program(tmp_path, "createXML", broken)
    assert done.status == 1
    assert "/nosuch" in done.output
    assert not list(CLAIMS.glob("*.json"))
    assert type_of(VF1) == "0"


@pytest.mark.promise(6)
def test_a_domain_that_asks_for_nothing_starts_as_ever(tmp_path: Path) -> None:
    done = program(tmp_path, "create", domain_xml("web1"))
    assert done.status == 0, done.output
    assert hostdevs("web1") == {}


def test_virt_install_creates_and_starts_a_domain_with_a_vgpu() -> None:
    # virt-install knows no namespaces, but writes attributes as they are told, `xmlns` too.
    request = "./metadata/devices"
    options = [
        f"{request}/@xmlns=urn:vgpu-libvirt:domain:1",
        f"{request}/device/@alias=ua-vgpu0",
        f"{request}/device/@profile={PROFILE}",
    ]
    done = run(
        *["virt-vgpu", "exec", "--", "virt-install", "--connect", "qemu:///system"],
        *["--name", "web1", "--uuid", uuid_of("web1"), "--import", "--disk", "none"],
        *["--osinfo", "generic", "--memory", "64", "--virt-type", "qemu", "--machine", "q35"],
        *["--graphics", "none", "--network", "none", "--noautoconsole"],
        *(word for option in options for word in ("--xml", option)),
    )
    assert done.status == 0, done.output
    assert until(lambda: "running" in virsh("domstate", "web1"))
    vf = assert_has_its_vgpu("web1")
    virsh("destroy", "web1")
    assert_free(vf)
    # the definition that it left can be started by anybody
    virsh("start", "web1")
    assert_has_its_vgpu("web1")


@pytest.mark.promise(2, 3)
def test_a_hostdev_that_is_attached_to_what_runs_gets_a_vgpu_and_gives_it_back(
    tmp_path: Path, bystander: None
) -> None:
    start("web1", devices=PORTS)
    (hostdev,) = re.findall("<hostdev.*</hostdev>", domain_xml("web1", VF2), flags=re.DOTALL)
    done = program(tmp_path, "attach", hostdev, PLUGS)
    assert done.status == 0, done.output
    vf = assert_has_its_vgpu("web1")
    assert vf != VF2
    TRIGGER.unlink()
    done = program(tmp_path, "detach", "", PLUGS)
    assert done.status == 0, done.output
    assert TRIGGER.exists()
    sync()
    assert type_of(vf) == PROFILE_ID, "the guest has it still"

    def lets_go() -> bool:
        let_go("web1")
        time.sleep(1)
        return not holds("web1", vf)

    assert until(lets_go)
    assert until(lambda: sync()["released"] == [vf])
    assert_free(vf)
