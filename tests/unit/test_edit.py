# SPDX-License-Identifier: LGPL-2.1-or-later
"""Edits of a definition: what is asked for changes, everything else stays."""

from __future__ import annotations

import pytest

from tests.unit.host import domain_xml, hostdev_xml
from vgpu_libvirt.address import PciAddress
from vgpu_libvirt.domain import edit
from vgpu_libvirt.domain.model import Request
from vgpu_libvirt.domain.read import parse_domain
from vgpu_libvirt.errors import DomainXmlError

FIRST = Request("ua-vgpu0", "NVIDIA L40S-8Q")
SECOND = Request("ua-vgpu1", "1152", gpu=PciAddress(0, 0x3D, 0, 0), placement="pack")

ONE = """\
<vgpu:devices xmlns:vgpu="urn:vgpu-libvirt:domain:1">
  <vgpu:device alias="ua-vgpu0" profile="NVIDIA L40S-8Q"/>
</vgpu:devices>"""

TWO = """\
<vgpu:devices xmlns:vgpu="urn:vgpu-libvirt:domain:1">
  <vgpu:device alias="ua-vgpu0" profile="NVIDIA L40S-8Q"/>
  <vgpu:device alias="ua-vgpu1" profile="1152" gpu="0000:3d:00.0" placement="pack"/>
</vgpu:devices>"""

ODD = """\
<vgpu:devices xmlns:x="urn:x" xmlns:vgpu="urn:vgpu-libvirt:domain:1" later="1">
  <!-- by hand -->
  <vgpu:device alias="ua-a" profile="1152" x:note="mine"/>
  <x:more>text</x:more>
</vgpu:devices>"""


def inside(metadata: str) -> str:
    return f"<domain xmlns:qemu='urn:q'>\n  <metadata>{metadata}</metadata>\n</domain>"


def test_the_first_request() -> None:
    assert edit.with_request(None, FIRST) == ONE


def test_another_request() -> None:
    assert edit.with_request(ONE, SECOND) == TWO


def test_what_is_written_is_what_is_read() -> None:
    document = domain_xml().replace("<metadata></metadata>", f"<metadata>{TWO}</metadata>")
    assert parse_domain(document).requests == (FIRST, SECOND)


def test_removing_one_request() -> None:
    assert edit.without_request(TWO, "ua-vgpu1") == ONE


def test_removing_the_last_request_removes_the_element() -> None:
    assert edit.without_request(ONE, "ua-vgpu0") is None
    assert edit.without_request(ODD, "ua-a") is None


def test_a_request_twice_goes_twice() -> None:
    assert edit.without_request(edit.with_request(ONE, FIRST), "ua-vgpu0") is None


def test_what_is_unknown_stays() -> None:
    added = edit.with_request(ODD, FIRST)
    assert added.startswith(ODD.removesuffix("</vgpu:devices>"))
    assert edit.without_request(added, "ua-vgpu0") == ODD


@pytest.mark.parametrize(
    "written",
    [
        ONE,
        ONE.replace("vgpu:", "v:").replace(":vgpu=", ":v="),
        ONE.replace("vgpu:", "").replace("xmlns:vgpu=", "xmlns=").replace("xmlns:=", "xmlns="),
        # as a `virsh metadata --set` with a declaration of its own leaves it
        ONE.replace("vgpu:", "")
        .replace("xmlns:vgpu=", "xmlns=")
        .replace("<devices", '<devices xmlns:vgpu="urn:vgpu-libvirt:domain:1"'),
    ],
    ids=["our prefix", "another prefix", "default namespace", "declared twice"],
)
def test_every_way_to_write_the_namespace_reads_the_same(written: str) -> None:
    written = written.replace('xmlns="urn', 'xmlns="urn').replace("xmlns:v=", "xmlns:v=")
    assert edit.metadata(inside(written)) == ONE


def test_an_odd_element_is_read_as_it_is() -> None:
    assert edit.metadata(inside(ODD)) == ODD


@pytest.mark.parametrize("metadata", ["", "<other xmlns='urn:x'/>", "<devices/>"])
def test_no_element_of_ours(metadata: str) -> None:
    assert edit.metadata(inside(metadata)) is None
    assert edit.metadata("<domain/>") is None


def test_libvirt_gets_no_namespace_of_ours() -> None:
    assert edit.for_libvirt(ONE) == (
        '<devices>\n  <device alias="ua-vgpu0" profile="NVIDIA L40S-8Q"/>\n</devices>'
    )
    odd = edit.for_libvirt(ODD)
    assert odd.startswith('<devices xmlns:x="urn:x" later="1">\n  <!-- by hand -->')
    assert "vgpu" not in odd


def test_requested_aliases() -> None:
    assert edit.requested_aliases(None) == ()
    assert edit.requested_aliases(edit.with_request(TWO, FIRST)) == ("ua-vgpu0", "ua-vgpu1")


def test_hostdev() -> None:
    address = PciAddress.parse("10001:c8:1f.7")
    text = edit.hostdev("ua-vgpu0", address)
    assert text == (
        '<hostdev mode="subsystem" type="pci" managed="no">\n'
        "  <source>\n"
        '    <address domain="0x10001" bus="0xc8" slot="0x1f" function="0x7"/>\n'
        "  </source>\n"
        '  <alias name="ua-vgpu0"/>\n'
        "</hostdev>"
    )
    (read,) = parse_domain(domain_xml(hostdevs=text)).hostdevs
    assert (read.alias, read.address, read.managed) == ("ua-vgpu0", address, False)


def test_a_hostdev_is_found_whole() -> None:
    hostdevs = hostdev_xml("ua-a", "0000:3d:00.4") + hostdev_xml("ua-b", "0000:3d:00.5")
    document = domain_xml(hostdevs=hostdevs + "<controller><alias name='ua-c'/></controller>")
    found = edit.find_hostdev(document, "ua-b")
    assert found is not None
    assert 'function="0x5"' in found
    assert 'bus="0x05"' in found  # the guest's address
    assert found.startswith("<hostdev ")
    assert found.endswith("</hostdev>")
    assert edit.find_hostdev(document, "ua-c") is None
    assert edit.device_aliases(document) == {"ua-a", "ua-b", "ua-c"}


def test_entities_are_not_expanded() -> None:
    bomb = '<!DOCTYPE domain [<!ENTITY a "aaaa">]><domain><metadata>&a;</metadata></domain>'
    assert edit.metadata(bomb) is None


def test_no_xml() -> None:
    with pytest.raises(DomainXmlError, match="not well-formed"):
        edit.metadata("<domain>")
