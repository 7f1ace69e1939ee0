# SPDX-License-Identifier: LGPL-2.1-or-later
"""Remembers the profiles that lists show, for later, when the lists are empty.

Only those who write anyway come here: starts, `attach`, `sync`. Nothing depends on it.
"""

from __future__ import annotations

import time

from ..claims import locks
from ..devices import catalogue, vendor_vfio
from ..errors import VgpuError
from ..records import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ..config import Config, Paths
    from ..devices.model import Inventory, Profile

_LONGEST_WAIT = 1.0  # seconds for the lock: whoever comes next can learn it as well


def from_lists(paths: Paths, seen: Iterable[Profile], idle: Iterable[Profile] = ()) -> str | None:
    """Put what was SEEN into the catalogue; IDLE: what GPUs list on which nothing runs.

    Return why it can't be. Where there is nothing new, that costs one small read.
    """
    # Mediated devices' types stand in sysfs at all times, so of them there is nothing to remember.
    seen, idle = (tuple(p for p in found if isinstance(p.id, int)) for found in (seen, idle))
    try:
        old = catalogue.read(paths.state)
        if catalogue.learned(old, seen, idle) == old:
            return None
        with locks.host(paths.state, time.monotonic() + _LONGEST_WAIT):
            old = catalogue.read(paths.state)
            catalogue.write(paths.state, catalogue.learned(old, seen, idle))
    except VgpuError as error:
        return str(error)
    return None


def from_inventory(config: Config, inventory: Inventory) -> str | None:
    """Put all that the host shows into the catalogue; return why it can't be."""
    sysfs = config.paths.sysfs
    idle = [gpu for gpu in inventory.gpus if all(device.type_id == 0 for device in gpu.devices)]
    # What runs on an excluded VF shortens lists as well, and isn't in the inventory.
    if any(vendor_vfio.is_vgpu_vf(sysfs, address) for address in config.policy.exclude):
        idle = []
    return from_lists(
        config.paths,
        inventory.profiles,
        (profile for gpu in idle for device in gpu.devices for profile in device.creatable or ()),
    )
