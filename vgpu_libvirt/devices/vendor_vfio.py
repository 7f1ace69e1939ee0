# SPDX-License-Identifier: LGPL-2.1-or-later
"""vGPUs as SR-IOV VFs under the vendor's own VFIO driver (Linux 6.8 and later).

Each VF has `nvidia/creatable_vgpu_types` and `nvidia/current_vgpu_type` in its sysfs directory.
The driver's rules, as public sources and field reports tell them: a type can't be set over a type
(not even the same), 0 over 0 may fail, a refusal may come as EPERM, EIO, EBUSY, EINVAL, ENODEV or
ENOSPC, and a write that succeeds may still leave 0. So we read before and after each write, and
never act on an errno.
"""

from __future__ import annotations

import functools
import os
import time

from .. import fs, sets
from ..address import PciAddress
from ..errors import AddressError, DeviceError, InUseError, RewrittenError
from ..records import TYPE_CHECKING
from . import nodes
from .model import Device, Gpu, Inventory, Profile, location_order

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..address import Location

BACKEND = "vendor-vfio"

_ID_DIGITS = 10
_VIRTFN = "virtfn"
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 0.5  # seconds between attempts to clear


@functools.lru_cache(maxsize=256)  # the devices of a GPU mostly have the same list
def parse_creatable(text: str) -> tuple[Profile, ...]:
    """Read a `creatable_vgpu_types`: `id : name` rows, with or without the header, or none.

    Two peers describe rows of `name  id`; a file of nothing but these is read too.
    Raises DeviceError, with the line, for anything else.
    """
    profiles: dict[int, Profile] = {}
    shapes = set()
    for line in filter(None, map(str.strip, text.splitlines())):
        left, colon, right = (part.strip() for part in line.partition(":"))
        if colon and left.upper() == "ID":
            continue
        if is_name_first := not colon and " " in line:
            right, left = line.rsplit(None, 1)
        shapes.add(is_name_first)
        number = sets.number(left, _ID_DIGITS)
        if number is None or not right or len(shapes) > 1:
            raise DeviceError(f"line '{line}' is no row of profile id and name")
        profile = Profile(number, right)
        if profiles.setdefault(number, profile) != profile:
            raise DeviceError(f"line '{line}' gives id {profile.id} a second name")
    return tuple(profiles.values())


def parse_current(text: str) -> int:
    """Read a `current_vgpu_type`: 0 or a profile's id. Raises DeviceError."""
    text = text.strip()
    number = sets.number(text, _ID_DIGITS)
    if number is None:
        raise DeviceError(f"'{text[:40]}' is no profile id")
    return number


def directory(sysfs: str, address: Location) -> str:
    """The sysfs directory of a PCI device."""
    return f"{sysfs}/bus/pci/devices/{address}"


def exists(sysfs: str, address: PciAddress) -> bool:
    """Whether the host has this PCI device at all. Raises DeviceError where it can't be told."""
    try:
        os.stat(directory(sysfs, address))
    except FileNotFoundError:
        if os.path.isdir(f"{sysfs}/bus/pci/devices"):
            return False
        raise DeviceError(f"{sysfs}/bus/pci/devices is not there; is sysfs mounted?") from None
    except OSError as error:
        raise DeviceError(f"{address} can't be looked up: {fs.reason(error)}") from error
    return True


def is_vgpu_vf(sysfs: str, address: PciAddress) -> bool:
    """Whether this is a VF that the vendor's driver can make a vGPU of.

    By `physfn` and `nvidia/` alone: PF and VFs may share a device id, the PCI class of a GPU
    varies, and the PF never has an `nvidia` directory.
    """
    path = directory(sysfs, address)
    return os.path.islink(f"{path}/physfn") and os.path.isdir(f"{path}/nvidia")


def driver_of(sysfs: str, address: PciAddress) -> str | None:
    """The name of the driver that a PCI device is bound to; None: none, or it can't be told."""
    try:
        return os.path.basename(os.readlink(f"{directory(sysfs, address)}/driver"))
    except OSError:
        return None


def is_gpu(sysfs: str, address: PciAddress) -> bool:
    """Whether this is the PF of at least one such VF."""
    return any(is_vgpu_vf(sysfs, vf) for vf in virtual_functions(sysfs, address))


def virtual_functions(sysfs: str, gpu: PciAddress) -> list[PciAddress]:
    """The VFs of GPU by its `virtfnN` links, in the order of N; empty where it can't be read."""
    path = directory(sysfs, gpu)
    found = []
    try:
        names = os.listdir(path)
    except OSError:
        return []
    for name in names:
        number = sets.number(name.removeprefix(_VIRTFN))
        if number is not None and name.startswith(_VIRTFN):
            try:
                target = os.path.basename(os.readlink(f"{path}/{name}"))
                found.append((number, PciAddress.parse(target)))
            except (OSError, AddressError):
                continue  # a VF that is just going away
    return [address for _, address in sorted(found)]


def gpu_of(sysfs: str, address: PciAddress) -> PciAddress:
    """The PF of a VF, by its `physfn` link. Raises DeviceError."""
    try:
        target = os.readlink(f"{directory(sysfs, address)}/physfn")
        return PciAddress.parse(os.path.basename(target))
    except OSError as error:
        raise DeviceError(f"the GPU of {address} can't be told: {fs.reason(error)}") from error
    except AddressError as error:
        raise DeviceError(f"the GPU of {address} can't be told: {error}") from error


def read_current(sysfs: str, address: PciAddress) -> int:
    """The id of the profile on a VF now; 0: none. Raises DeviceError."""
    path = f"{directory(sysfs, address)}/nvidia/current_vgpu_type"
    try:
        return parse_current(fs.read_text(path))
    except OSError as error:
        raise DeviceError(f"{path} can't be read: {fs.reason(error)}") from error
    except DeviceError as error:
        raise DeviceError(f"{path} can't be understood: {error}") from error


def read_creatable(sysfs: str, address: PciAddress) -> tuple[Profile, ...]:
    """The profiles that a VF could be given now. Raises DeviceError.

    It shrinks with what runs on the same GPU, and is empty on most drivers once the VF has a type.
    """
    path = f"{directory(sysfs, address)}/nvidia/creatable_vgpu_types"
    try:
        return parse_creatable(fs.read_text(path))
    except OSError as error:
        raise DeviceError(f"{path} can't be read: {fs.reason(error)}") from error
    except DeviceError as error:
        raise DeviceError(f"{path} can't be understood: {error}") from error


def read_device(sysfs: str, address: PciAddress) -> Device:
    """Read a VF. What can't be read is None, with the reason. Raises DeviceError for no GPU."""
    gpu = gpu_of(sysfs, address)
    type_id, creatable = None, None
    errors = []
    try:
        type_id = read_current(sysfs, address)
    except DeviceError as error:
        errors.append(str(error))
    try:
        creatable = read_creatable(sysfs, address)
    except DeviceError as error:
        errors.append(str(error))
    return Device(address, gpu, type_id, creatable, "; ".join(errors) or None)


def discover(sysfs: str, exclude: tuple[PciAddress, ...] = ()) -> Inventory:
    """Find all vGPU VFs of the host, by GPU, but for those in EXCLUDE (devices or GPUs).

    A VF that can't be read costs that VF: it stands in the list with its error, and in `problems`.
    """
    root = f"{sysfs}/bus/pci/devices"
    devices: dict[Location, list[Device]] = {}
    problems = []
    try:
        names = os.listdir(root)
    except FileNotFoundError:
        names = []
    except OSError as error:
        return Inventory((), (f"{root} can't be read: {fs.reason(error)}",))
    for name in names:
        try:
            address = PciAddress.parse(name)
        except AddressError:
            continue
        if not is_vgpu_vf(sysfs, address):
            continue
        try:
            device = read_device(sysfs, address)
        except DeviceError as error:
            problems.append(str(error))
            continue
        if exclude and (address in exclude or device.gpu in exclude):
            continue
        devices.setdefault(device.gpu, []).append(device)
        if device.error:
            problems.append(device.error)
    return Inventory(
        tuple(
            Gpu(
                gpu,
                BACKEND,
                numa_node(sysfs, gpu),
                tuple(sorted(devices[gpu], key=lambda device: device.order)),
            )
            for gpu in sorted(devices, key=location_order)
        ),
        tuple(sorted(problems)),
    )


def _sorted(devices: list[Device]) -> tuple[Device, ...]:
    return tuple(sorted(devices, key=lambda device: device.order))


def numa_node(sysfs: str, gpu: Location) -> int | None:
    """The NUMA node of a PCI device; None where there is none or the host doesn't say."""
    try:
        node = int(fs.read_text(f"{directory(sysfs, gpu)}/numa_node"))
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def vfio_nodes(sysfs: str, address: PciAddress) -> frozenset[str]:
    """The VFIO nodes of a VF below `<dev>`. Raises DeviceError where they can't be told."""
    return nodes.vfio_nodes(directory(sysfs, address), str(address))


def program(sysfs: str, address: PciAddress, profile: Profile, guard: Callable[[], None]) -> None:
    """Set PROFILE on a VF that has none, and read it back.

    GUARD is called right before the write, and raises to stop it. Raises DeviceError.
    """
    guard()
    # After the guard, whose look around takes its time: a type is never written over a type.
    if current := read_current(sysfs, address):
        raise DeviceError(f"{address} has type {current} already")
    refusal = _write(sysfs, address, int(profile.id))
    if (current := read_current(sysfs, address)) != profile.id:
        raise DeviceError(
            f"the driver did not put {profile.name} on {address}: "
            f"{refusal or f'the write succeeded, but it reads {current}'}"
        )


def clear(
    sysfs: str,
    address: PciAddress,
    expected: int,
    guard: Callable[[], None],
    deadline: float,
    may_be_in_use: bool = False,
) -> None:
    """Take the type EXPECTED off a VF, and read back that it has none; nothing where it has none.

    A VF isn't always ready right after QEMU closed it, so a refusal is tried again, with growing
    pauses, while `time.monotonic()` is below DEADLINE. GUARD is called right before each write.
    With MAY_BE_IN_USE, its InUseError counts as a refusal: a dying QEMU still closes its files.
    Raises RewrittenError where another type stands there, DeviceError, or what GUARD raises.
    """
    pause = _FIRST_PAUSE
    while not _is_clear(sysfs, address, expected):
        failure: Exception
        try:
            guard()
            # Again, since the guard's look around takes its time.
            if _is_clear(sysfs, address, expected):
                return
            refusal = _write(sysfs, address, 0)
            failure = DeviceError(
                f"the driver did not clear {address}: {refusal or 'the write changed nothing'}"
            )
        except InUseError as error:
            if not may_be_in_use:
                raise
            failure = error
        if _is_clear(sysfs, address, expected):
            return
        if time.monotonic() + pause > deadline:
            raise failure
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


def _is_clear(sysfs: str, address: PciAddress, expected: int) -> bool:
    """Whether a VF has no type; False: it has EXPECTED. Raises RewrittenError, DeviceError."""
    current = read_current(sysfs, address)
    if current not in (0, expected):
        raise RewrittenError(
            f"{address} has type {current}, not the {expected} that we wrote; "
            "somebody else changed it"
        )
    return current == 0


def _write(sysfs: str, address: PciAddress, value: int) -> str | None:
    """Write VALUE; return how the driver refused it, or None."""
    path = f"{directory(sysfs, address)}/nvidia/current_vgpu_type"
    try:
        fs.write_attribute(path, str(value))
    except OSError as error:
        return fs.reason(error)
    return None
