# SPDX-License-Identifier: LGPL-2.1-or-later
"""Trying other devices where one refuses; which one it was, the sentence tells."""

from __future__ import annotations

from .records import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .devices.model import Device
    from .errors import VgpuError

MOST_TRIES = 4  # devices that may refuse; each may cost a whole start of QEMU


def names(error: VgpuError, device: str) -> bool:
    """Whether a sentence is about DEVICE, so that another may do better."""
    import re  # which a start that goes well does without

    return bool(re.search(rf"(?<![0-9a-f]){re.escape(device)}\b", str(error)))


def to_blame(error: VgpuError, devices: Iterable[Device]) -> list[str]:
    """Those of DEVICES that a sentence is about, in whose place others may do better.

    No mediated one: `prepare` has tried for it wherever it could be made.
    """
    return [each.name for each in devices if not each.is_mdev and names(error, each.name)]


def with_tried(failure: VgpuError, refused: Iterable[str]) -> VgpuError:
    """FAILURE, with those devices that REFUSED before it."""
    tried = [device for device in refused if not names(failure, device)]
    if not tried:
        return failure
    told = type(failure)(f"{failure} (before that, {', '.join(tried)} failed)")
    told.__cause__ = failure
    return told
