# SPDX-License-Identifier: LGPL-2.1-or-later
"""Numbers, and sets of them, as libvirt and sysfs write them: `0-3,^2,8`.

Not by regular expressions: hooks wait for their compilation, and for that of the module.
"""

from __future__ import annotations

_HEX = frozenset("0123456789abcdefABCDEF")
_MOST_DIGITS = 19
_MOST_NUMBERS = 65536  # in one range; Linux has far fewer cpus


def is_decimal(text: str) -> bool:
    """Whether TEXT is digits, and no others than those of ASCII."""
    return text.isascii() and text.isdigit()


def is_hex(text: str) -> bool:
    """Whether TEXT is hexadecimal digits."""
    return bool(text) and _HEX.issuperset(text)


def is_uuid(text: str) -> bool:
    """Whether TEXT is a UUID as the kernel and libvirt write it: lower case, with hyphens."""
    parts = text.split("-")
    return (
        [len(part) for part in parts] == [8, 4, 4, 4, 12]
        and is_hex("".join(parts))
        and text == text.lower()
    )


def number(text: str, most_digits: int = _MOST_DIGITS) -> int | None:
    """The number that TEXT is in plain digits, MOST_DIGITS of them, or None."""
    return int(text) if is_decimal(text) and len(text) <= most_digits else None


def parse(text: str) -> set[int]:
    """Read a set. Raises ValueError, with a sentence."""
    found: set[int] = set()
    for part in filter(None, map(str.strip, text.split(","))):
        low, dash, high = map(str.strip, part.removeprefix("^").partition("-"))
        first, last = number(low), number(high if dash else low)
        if first is None or last is None:
            raise ValueError(f"'{text:.60}' is no set of numbers")
        if last - first >= _MOST_NUMBERS:
            raise ValueError(f"'{text:.60}' is too large a set")
        (found.difference_update if part[0] == "^" else found.update)(range(first, last + 1))
    return found
