# SPDX-License-Identifier: LGPL-2.1-or-later
"""PCI addresses: what people, sysfs and libvirt write, and what none of them may mean."""

from __future__ import annotations

import random

import pytest

from vgpu_libvirt.address import PciAddress
from vgpu_libvirt.errors import AddressError


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("0000:3d:00.4", (0, 0x3D, 0, 4)),
        ("0000:3D:00.4", (0, 0x3D, 0, 4)),
        ("  0000:3d:00.4\n", (0, 0x3D, 0, 4)),
        ("0001:c8:00.0", (1, 0xC8, 0, 0)),
        ("0001:04:01.4", (1, 4, 1, 4)),  # ARI: the ninth VF and those after it spill into slots
        ("10001:80:05.0", (0x10001, 0x80, 5, 0)),  # Intel VMD
        ("fffffFFF:ff:1f.7", (0xFFFFFFFF, 0xFF, 0x1F, 7)),
        ("00000000:00:00.0", (0, 0, 0, 0)),
    ],
)
def test_an_address_as_people_write_it(text: str, address: tuple[int, ...]) -> None:
    assert PciAddress.parse(text) == address


@pytest.mark.parametrize(
    "text",
    [
        "",
        "3d:00.4",  # lspci's short form: which domain?
        "000:3d:00.4",
        "000000000:3d:00.4",
        "0000:3d:00",
        "0000:3d:00.8",  # functions end at 7, with ARI too
        "0000:3d:00.04",
        "0000:3d:20.0",
        "0000:13d:00.4",
        "0000:3d:0.4",
        "0000-3d-00.4",
        "0x0000:3d:00.4",
        "0000:3g:00.4",
        "0000:3d:00.4 0000:3d:00.5",
        "0000:3d:00.4/../0000:3d:00.5",
        "0000:3d:00.\u0664",  # a digit four, but not an ASCII one
        "pci_0000_3d_00_4",
    ],
)
def test_anything_else_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(AddressError) as caught:
        PciAddress.parse(text)
    assert str(caught.value) == (
        f"'{text}' is not a PCI address; write it as 0000:3d:00.4, domain included"
    )


@pytest.mark.parametrize(
    ("address", "text"),
    [
        ((0, 0x3D, 0, 4), "0000:3d:00.4"),
        ((1, 4, 1, 4), "0001:04:01.4"),
        ((0x10001, 0x80, 5, 0), "10001:80:05.0"),
        ((0xFFFFFFFF, 0xFF, 0x1F, 7), "ffffffff:ff:1f.7"),
    ],
)
def test_it_prints_as_sysfs_names_it(address: tuple[int, int, int, int], text: str) -> None:
    assert str(PciAddress(*address)) == text
    assert PciAddress.parse(text) == address


@pytest.mark.parametrize(
    ("value", "number"),
    [
        ("0x1f", 31),
        ("0X1F", 31),
        ("31", 31),
        ("017", 15),  # octal, as C has it
        ("0", 0),
        ("00", 0),
        ("0x0000000000000010", 16),
        (" 5", 5),
        ("+5", 5),
    ],
)
def test_numbers_in_xml_are_read_in_base_0(value: str, number: int) -> None:
    assert PciAddress.from_xml({"bus": value}) == (0, number, 0, 0)


@pytest.mark.parametrize(
    "value",
    ["", " ", "0x", "08", "019", "1f", "x1f", "-1", "5 ", "5.0", "1_0", "\u0665", "0o17", "0b1"],
)
def test_numbers_that_libvirt_refuses_are_refused(value: str) -> None:
    with pytest.raises(AddressError) as caught:
        PciAddress.from_xml({"bus": value})
    assert str(caught.value) == f"bus='{value}' is no part of a PCI address"


@pytest.mark.parametrize(
    ("name", "top"), [("domain", 2**32 - 1), ("bus", 0xFF), ("slot", 0x1F), ("function", 7)]
)
def test_each_part_has_its_range(name: str, top: int) -> None:
    assert getattr(PciAddress.from_xml({name: str(top)}), name) == top
    for beyond in (hex(top + 1), str(2**64), "9" * 5000):
        with pytest.raises(AddressError, match=f"^{name}='"):
            PciAddress.from_xml({name: beyond})


def test_absent_parts_are_0_and_other_attributes_none_of_its_business() -> None:
    assert PciAddress.from_xml({}) == (0, 0, 0, 0)
    attributes = {"type": "pci", "bus": "0x3d", "function": "0x4", "multifunction": "on"}
    assert str(PciAddress.from_xml(attributes)) == "0000:3d:00.4"


def test_addresses_are_ordered_by_number_not_by_text() -> None:
    names = ["0000:3d:00.4", "0000:3d:01.0", "0001:04:01.4", "ffff:00:00.0", "10000:00:00.0"]
    shuffled = random.Random(1).sample(names, len(names))
    assert [str(address) for address in sorted(map(PciAddress.parse, shuffled))] == names
    assert sorted(names) != names


@pytest.mark.parametrize(
    ("text", "placeholder"),
    [
        ("0000:00:00.0", True),
        ("ffff:ff:1f.7", True),
        ("0000:00:00.1", False),
        ("0000:00:01.0", False),
        ("ffff:ff:1f.6", False),
        ("ffffffff:ff:1f.7", False),
    ],
)
def test_placeholders(text: str, placeholder: bool) -> None:
    assert PciAddress.parse(text).is_placeholder is placeholder
