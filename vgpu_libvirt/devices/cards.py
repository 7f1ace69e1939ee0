# SPDX-License-Identifier: LGPL-2.1-or-later
"""What a profile's name says about the card it is for; sysfs tells a GPU's framebuffer nowhere."""

from __future__ import annotations

import functools

from ..records import TYPE_CHECKING
from .model import split

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .model import Profile

# The framebuffer of the largest profile in GiB, by card as profile names spell it. A GPU shows that
# profile only while nothing runs on it; so this serves a host whose only GPU of a kind is in use.
_LARGEST_GIB = {
    "A2": 16,
    "A10": 24,
    "A16": 16,
    "A30": 24,
    "A40": 48,
    "A100": 40,
    "A100D": 80,
    "B200X": 180,
    "H100": 80,
    "H100L": 94,
    "H100XM": 80,
    "H200": 141,
    "H200X": 141,
    "L4": 24,
    "L40": 48,
    "L40S": 48,
    "RTX Pro 6000 Blackwell DC": 96,
    "RTX5000-Ada": 32,
    "RTX6000-Ada": 48,
    "RTXA6000": 48,
}


@functools.lru_cache(maxsize=1024)  # few profiles, and each is asked for with every device
def card_of(profile: Profile) -> str:
    """The card that PROFILE is for: `L40S` of `NVIDIA L40S-8Q`."""
    return split(profile.short_name)[0]


def framebuffer_mib(card: str) -> int | None:
    """The framebuffer of a CARD, where we know it."""
    return _LARGEST_GIB[card] * 1024 if card in _LARGEST_GIB else None


def largest_mib(profiles: Iterable[Profile]) -> int:
    """The largest framebuffer that a name among PROFILES tells; 0 where none does."""
    return max((profile.framebuffer_mib or 0 for profile in profiles), default=0)
