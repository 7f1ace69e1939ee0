# SPDX-License-Identifier: LGPL-2.1-or-later
"""Sets of numbers, as libvirt and sysfs write them: `0-3,^2,8`."""

from __future__ import annotations

import re

_NUMBER = re.compile(r"[0-9]{1,19}", re.ASCII)
_MOST_NUMBERS = 65536  # in one range; Linux has far fewer cpus


def number(text: str) -> int | None:
    """The number that TEXT is in plain digits, or None."""
    return int(text) if _NUMBER.fullmatch(text) else None


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
