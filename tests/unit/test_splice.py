# SPDX-License-Identifier: LGPL-2.1-or-later
"""A document on its way through libvirt's filter: the address of our hostdev changes, no more."""

from __future__ import annotations

import pytest

from vgpu_libvirt.address import PciAddress
from vgpu_libvirt.domain import splice
from vgpu_libvirt.errors import DomainXmlError

HERE = PciAddress(0x10001, 0x3D, 0x1F, 7)

# Whatever XML allows beside the four values: other hostdevs, comments, CDATA, quotes, blanks,
# entities, other namespaces, a look-alike in the metadata and one in a comment.
DOCUMENT = """\
<?xml version="1.0" encoding='utf-8'?>
<!-- <hostdev><source><address domain='0x0000' bus='0x01' slot='0x10' function='0x0'/></source> -->
<domain type='kvm' xmlns:qemu="http://libvirt.org/schemas/domain/qemu/1.0">
\t<name>w\u00e9b &amp; \u2603</name>
  <metadata><x:y xmlns:x="urn:x"><hostdev><alias name="ua-vgpu0"/><source>
     <address domain='0x0000' bus='0x01' slot='0x10' function='0x0'/></source></hostdev></x:y>
    <vgpu:devices xmlns:vgpu='urn:vgpu-libvirt:domain:1'><!-- mine --></vgpu:devices></metadata>
  <devices>
    <hostdev mode='subsystem' type='pci'>
      <source><address bus='0x02'/></source><alias name='ua-nic'/></hostdev>
    <hostdev mode='subsystem' type='pci' managed='no'>
      <source >
        <address  {address}  />
      </source><![CDATA[ <address bus='0x03'/> ]]>
      <alias name="ua-vgpu0"/>
      <address type='pci' domain='0x0000' bus='0x00' slot='0x05' function='0x0'/>
    </hostdev>
  </devices>
  <qemu:commandline><qemu:arg value='-x="domain=&apos;0x0000&apos;"'/></qemu:commandline>
</domain>
<!-- the end -->

"""

SPELLINGS = {
    "as libvirt writes it": (
        "domain='0x0000' bus='0x01' slot='0x10' function='0x0'",
        "domain='0x10001' bus='0x3d' slot='0x1f' function='0x7'",
    ),
    "other quotes and order, with blanks": (
        'function = "0"\n  slot="16" bus\t="1" domain="0" xmlns:a=\'b>\'',
        'function = "0x7"\n  slot="0x1f" bus\t="0x3d" domain="0x10001" xmlns:a=\'b>\'',
    ),
    "without a domain": (
        "bus='0x01' slot='0x10' function='0x0'",
        "bus='0x3d' slot='0x1f' function='0x7' domain='0x10001'",
    ),
    "by character references": (
        "domain='&#48;' bus='&#x31;' slot='0x10' function='0'",
        "domain='0x10001' bus='0x3d' slot='0x1f' function='0x7'",
    ),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_only_the_four_values_change(spelling: str) -> None:
    before, after = SPELLINGS[spelling]
    was = DOCUMENT.replace("{address}", before).encode()
    will_be = DOCUMENT.replace("{address}", after).encode()
    assert splice.repointed(was, {"ua-vgpu0": HERE}) == will_be


def test_another_encoding_stays_one() -> None:
    was = DOCUMENT.replace("{address}", SPELLINGS["as libvirt writes it"][0])
    was = was.replace("utf-8", "iso-8859-1").replace("\u2603", "")
    done = splice.repointed(was.encode("iso-8859-1"), {"ua-vgpu0": HERE})
    assert b"w\xe9b" in done
    assert done.decode("iso-8859-1").count("0x10001") == 1


def test_lines_may_end_as_they_like() -> None:
    was = DOCUMENT.replace("{address}", SPELLINGS["as libvirt writes it"][0]).replace("\n", "\r\n")
    will_be = DOCUMENT.replace("{address}", SPELLINGS["as libvirt writes it"][1])
    assert splice.repointed(was.encode(), {"ua-vgpu0": HERE}).decode() == will_be.replace(
        "\n", "\r\n"
    )


def test_several_hostdevs_each_get_their_own() -> None:
    was = DOCUMENT.replace("{address}", SPELLINGS["as libvirt writes it"][0]).encode()
    there = PciAddress(0, 2, 0, 1)
    done = splice.repointed(was, {"ua-vgpu0": HERE, "ua-nic": there}).decode()
    assert "<address bus='0x02' domain='0x0000' slot='0x00' function='0x1'/>" in done
    assert "<address  domain='0x10001' bus='0x3d' slot='0x1f' function='0x7'  />" in done


def test_nothing_to_do_gives_back_the_same_bytes() -> None:
    was = DOCUMENT.replace("{address}", SPELLINGS["as libvirt writes it"][0]).encode()
    assert splice.repointed(was, {}) == was


@pytest.mark.parametrize(
    ("document", "says"),
    [
        ("<domain><devices><hostdev/></devices></domain>", "no hostdev 'ua-vgpu0' with a source"),
        ("<domain><devices>", "not well-formed XML"),
        ("", "not well-formed XML"),
    ],
)
def test_what_is_not_there_is_said(document: str, says: str) -> None:
    with pytest.raises(DomainXmlError, match=says):
        splice.repointed(document.encode(), {"ua-vgpu0": HERE})


def test_an_encoding_with_other_bytes_is_refused() -> None:
    was = DOCUMENT.replace("{address}", SPELLINGS["as libvirt writes it"][0])
    with pytest.raises(DomainXmlError, match="encoding in which bytes can't be counted"):
        splice.repointed(was.replace("utf-8", "utf-16").encode("utf-16"), {"ua-vgpu0": HERE})
