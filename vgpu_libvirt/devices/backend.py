# SPDX-License-Identifier: LGPL-2.1-or-later
"""What the life of an assignment asks of a device, whichever way its GPU gives vGPUs.

A VF has a type, which is set and cleared; a mediated device is made and removed, and has "type 0"
while it doesn't exist. A device's name tells which it is. What mediated devices need is imported
where there is one, since most hosts have none and hooks wait for every import.
"""

from __future__ import annotations

import time

from ..address import PciAddress, location
from ..errors import AddressError, DeviceError
from ..records import TYPE_CHECKING
from . import vendor_vfio
from .model import Device

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..address import Location
    from .model import Profile

# Seconds that NVIDIA's driver has to remove an mdev itself once QEMU closed it: one that is removed
# before is left broken until the host boots again.
_OWN_CLEANING = 2.0


def is_mdev(device: str) -> bool:
    """Whether DEVICE is called as mediated devices are, by a UUID."""
    return ":" not in device


def name_of(device: str) -> str:
    """The backend of DEVICE."""
    if not is_mdev(device):
        return vendor_vfio.BACKEND
    from . import mdev

    return mdev.BACKEND


def vfio_nodes(sysfs: str, device: str) -> frozenset[str]:
    """The VFIO nodes of DEVICE below `<dev>`. Raises DeviceError where they can't be told."""
    if is_mdev(device):
        from . import mdev

        return mdev.vfio_nodes(sysfs, device)
    return vendor_vfio.vfio_nodes(sysfs, _address(device))


def exists(sysfs: str, device: str) -> bool:
    """Whether the host has DEVICE at all. Raises DeviceError where it can't be told."""
    if is_mdev(device):
        from . import mdev

        return mdev.read_mdev(sysfs, device) is not None
    return vendor_vfio.exists(sysfs, _address(device))


def read_device(sysfs: str, device: str) -> Device:
    """Read DEVICE. What can't be read is None, with the reason. Raises DeviceError for no GPU."""
    if not is_mdev(device):
        return vendor_vfio.read_device(sysfs, _address(device))
    from . import mdev

    there = mdev.read_mdev(sysfs, device)
    if there is None:
        return Device(device, device, 0, (), slot=0, uuid=device)
    if there.parent is None:
        return Device(device, device, None, (), there.error, slot=0, uuid=device)
    gpu = location(mdev.gpu_of(sysfs, there.parent))
    parent = location(there.parent)
    return Device(parent, gpu, there.type_id, (), there.error, slot=0, uuid=device)


def read_type(sysfs: str, device: str) -> int | str:
    """The id of the profile of DEVICE now; 0: none. Raises DeviceError."""
    if not is_mdev(device):
        return vendor_vfio.read_current(sysfs, _address(device))
    from . import mdev

    there = mdev.read_mdev(sysfs, device)
    if there and there.type_id is None:
        raise DeviceError(f"mdev {device} can't be read: {there.error}")
    return there.type_id or 0 if there else 0


def program(
    sysfs: str,
    device: str,
    where: Location,
    profile: Profile,
    params: str | None,
    guard: Callable[[], None],
) -> None:
    """Put PROFILE on DEVICE, a mediated one on the parent WHERE, and read it back.

    PARAMS: a mediated device's `vgpu_params`; where they can't be set, it stays without, for the
    caller to remove. GUARD is called right before each write, and raises to stop it.
    Raises DeviceError.
    """
    if not is_mdev(device):
        vendor_vfio.program(sysfs, _address(device), profile, guard)
        return
    from . import mdev_life

    mdev_life.create(sysfs, str(where), str(profile.id), device, guard)
    if params is not None:
        set_params(sysfs, device, params, guard)


def set_params(sysfs: str, device: str, params: str, guard: Callable[[], None]) -> None:
    """Give DEVICE, a mediated one, its `vgpu_params`. As `mdev_life.set_params`."""
    from . import mdev_life

    mdev_life.set_params(sysfs, device, params, guard)


def clear(
    sysfs: str,
    device: str,
    gpu: str,
    profile: Profile,
    guard: Callable[[], None],
    deadline: float,
    may_be_in_use: bool = False,
    was_used: bool = False,
) -> None:
    """Take PROFILE off DEVICE of GPU, and read back that it has none; nothing where it has none.

    As `vendor_vfio.clear` and `mdev_life.remove` do. WAS_USED: a QEMU may have had it, so its
    driver may be about to do so itself. Raises RewrittenError where something else stands there,
    DeviceError, or what GUARD raises.
    """
    if not is_mdev(device):
        expected = int(profile.id)
        address = _address(device)
        vendor_vfio.clear(sysfs, address, expected, guard, deadline, may_be_in_use)
        return
    from . import mdev_life

    kind = str(profile.id)
    cleans = was_used and kind.startswith("nvidia-")
    not_before = min(time.monotonic() + _OWN_CLEANING, deadline) if cleans else 0.0
    mdev_life.remove(sysfs, device, kind, gpu, guard, deadline, may_be_in_use, not_before)


def _address(device: str) -> PciAddress:
    try:
        return PciAddress.parse(device)
    except AddressError as error:
        raise DeviceError(str(error)) from error
