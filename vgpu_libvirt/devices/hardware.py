# SPDX-License-Identifier: LGPL-2.1-or-later
"""All that a host has, by whichever way each of its GPUs gives vGPUs; a host may have several."""

from __future__ import annotations

from ..records import TYPE_CHECKING
from . import mdev_slots, vendor_vfio
from .model import Inventory, location_order

if TYPE_CHECKING:
    from ..address import PciAddress


def discover(sysfs: str, exclude: tuple[PciAddress, ...] = ()) -> Inventory:
    """Find all GPUs and their devices, but for those in EXCLUDE (devices or GPUs).

    What can't be read costs itself, stands in `problems`, and is never taken for something else.
    """
    found = vendor_vfio.discover(sysfs, exclude), mdev_slots.discover(sysfs, exclude)
    gpus = [gpu for inventory in found for gpu in inventory.gpus]
    gpus.sort(key=lambda gpu: (location_order(gpu.address), gpu.backend))
    return Inventory(tuple(gpus), tuple(p for inventory in found for p in inventory.problems))
