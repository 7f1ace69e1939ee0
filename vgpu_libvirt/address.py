# SPDX-License-Identifier: LGPL-2.1-or-later
"""PCI addresses, as libvirt's XML, the kernel and people write them."""

from __future__ import annotations

import functools
import re
from typing import NamedTuple

from .errors import AddressError

# Domains of more than four digits are real: Intel VMD numbers its own from 0x10000.
_TEXT = re.compile(
    r"(?P<domain>[0-9a-f]{4,8}):(?P<bus>[0-9a-f]{2}):(?P<slot>[0-9a-f]{2})\.(?P<function>[0-7])",
    re.IGNORECASE | re.ASCII,
)
# Python refuses to convert thousands of digits, by another exception than ours.
_C_NUMBER = re.compile(r"\s*\+?(0[xX][0-9a-fA-F]{1,32}|[0-9]{1,32})", re.ASCII)


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
        match = _TEXT.fullmatch(text.strip())
        address = cls(*(int(part, 16) for part in match.groups())) if match else None
        if address is None or address.slot > 0x1F:
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
    match = _C_NUMBER.fullmatch(text)
    if not match:
        return None
    text = match[1]
    if text[:2].lower() == "0x":
        return int(text, 16)
    if text[0] == "0" and len(text) > 1:
        return int(text, 8) if not set(text) & {"8", "9"} else None
    return int(text)
