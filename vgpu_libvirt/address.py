# SPDX-License-Identifier: LGPL-2.1-or-later
"""PCI addresses, as libvirt's XML, the kernel and people write them."""

from __future__ import annotations

import functools

from . import sets
from .errors import AddressError
from .records import NamedTuple

_C_BLANKS = " \t\n\r\f\v"
# Python refuses to convert thousands of digits, by another exception than ours.
_MOST_DIGITS = 32


class PciAddress(NamedTuple):
    """A PCI function; compares by number, prints as the kernel names it in sysfs."""

    domain: int
    bus: int
    slot: int
    function: int

    def __str__(self) -> str:
        return _text_of(self)

    @classmethod
    def parse(cls, text: str) -> PciAddress:
        """Read an address as people write it: hex in any case, 4 to 8 domain digits.

        Raises AddressError for anything else.
        """
        domain, _, rest = text.strip().partition(":")
        bus, _, rest = rest.partition(":")
        slot, _, function = rest.partition(".")
        # Domains of more than four digits are real: Intel VMD numbers its own from 0x10000.
        lengths = 4 <= len(domain) <= 8 and (len(bus), len(slot), len(function)) == (2, 2, 1)
        address = None
        if lengths and sets.is_hex(domain + bus + slot + function):
            address = cls(int(domain, 16), int(bus, 16), int(slot, 16), int(function, 16))
        if address is None or address.slot > 0x1F or address.function > 7:
            raise AddressError(
                f"'{text}' is not a PCI address; write it as 0000:3d:00.4, domain included"
            )
        return address

    @classmethod
    def from_xml(cls, attributes: dict[str, str]) -> PciAddress:
        """Read the attributes of libvirt's `<address>`: base 0 as in C, absent means 0.

        Raises AddressError for a number that libvirt would refuse.
        """
        parts = {}
        for name, top in (("domain", 2**32 - 1), ("bus", 0xFF), ("slot", 0x1F), ("function", 7)):
            value = _c_number(attributes.get(name, "0"))
            if value is None or value > top:
                raise AddressError(f"{name}='{attributes[name]}' is no part of a PCI address")
            parts[name] = value
        return cls(**parts)

    def to_xml(self) -> dict[str, str]:
        """The attributes of an `<address>`, as libvirt writes them."""
        return {
            "domain": f"0x{self.domain:04x}",
            "bus": f"0x{self.bus:02x}",
            "slot": f"0x{self.slot:02x}",
            "function": f"0x{self.function:x}",
        }

    @property
    def is_placeholder(self) -> bool:
        """Whether this is one of the addresses people write where they have none yet.

        libvirt defines both, and starts neither: QEMU dies with "the cause is unknown".
        """
        return self in ((0, 0, 0, 0), (0xFFFF, 0xFF, 0x1F, 7))


# Where a device is: most are at an address; what mediated devices are made on may only have a name.
Location = PciAddress | str


def location(name: str) -> Location:
    """The address that NAME is, as sysfs writes it, else NAME itself."""
    try:
        return PciAddress.parse(name)
    except AddressError:
        return name


@functools.lru_cache(maxsize=16384)  # a device is looked up by its name again and again
def _text_of(address: PciAddress) -> str:
    return f"{address.domain:04x}:{address.bus:02x}:{address.slot:02x}.{address.function:x}"


def _c_number(text: str) -> int | None:
    """What strtoul(3) makes of TEXT in base 0, as libvirt calls it; None where it refuses."""
    text = text.lstrip(_C_BLANKS).removeprefix("+")
    if text[:2] in ("0x", "0X"):
        digits = text[2:]
        return int(digits, 16) if len(digits) <= _MOST_DIGITS and sets.is_hex(digits) else None
    if len(text) > _MOST_DIGITS or not sets.is_decimal(text):
        return None
    if text[0] == "0" and len(text) > 1:
        return int(text, 8) if not set(text) & {"8", "9"} else None
    return int(text)
