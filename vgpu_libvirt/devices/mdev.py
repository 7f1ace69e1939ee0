# SPDX-License-Identifier: LGPL-2.1-or-later
"""vGPUs as mediated devices: their parents, the catalogue of types, and which of them exist.

A parent is what `<sysfs>/class/mdev_bus` names: a VF, a GPU without VFs, or no PCI device at all.
Each of its types is a directory in `mdev_supported_types`; `available_instances` there is the
driver's word on how many more it could make now: on most GPUs 0 for all other sizes once there is
one. The rest of a type is the same on all parents of a GPU, and read from one.
"""

from __future__ import annotations

import os
import re

from .. import fs
from ..address import PciAddress
from ..errors import AddressError, DeviceError
from ..records import TYPE_CHECKING
from . import nodes, vendor_vfio
from .mdev_model import Mdev, MdevProfile, Offer, Parent, ParentGpu, Parents

if TYPE_CHECKING:
    from collections.abc import Iterable

BACKEND = "mdev"

UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.ASCII)  # as the kernel has it

_API = "vfio-pci"  # what libvirt's model='vfio-pci' takes; others are no GPUs
_NUMBER = re.compile(r"[0-9]{1,9}", re.ASCII)
_FRAMEBUFFER = re.compile(r"\bframebuffer *= *([0-9]{1,7})M\b", re.ASCII)
_MAX_INSTANCE = re.compile(r"\bmax_instance *= *([0-9]{1,7})\b", re.ASCII)


def parent_directory(sysfs: str, parent: str) -> str:
    """The sysfs directory of a parent."""
    return f"{sysfs}/class/mdev_bus/{parent}"


def device_directory(sysfs: str, uuid: str) -> str:
    """The sysfs directory of an mdev."""
    return f"{sysfs}/bus/mdev/devices/{uuid}"


def parse_description(text: str) -> tuple[int | None, int | None]:
    """Framebuffer in MiB and the most instances on a GPU, as a `description` has them.

    Of `num_heads=4, frl_config=60, framebuffer=4096M, max_resolution=7680x4320, max_instance=6`.
    Newer drivers leave them out, and other vendors describe other things; that is None.
    """
    framebuffer, most = _FRAMEBUFFER.search(text), _MAX_INSTANCE.search(text)
    return (
        (int(framebuffer[1]) or None) if framebuffer else None,
        (int(most[1]) or None) if most else None,
    )


def gpu_of(sysfs: str, parent: str) -> str:
    """The name of the GPU of a parent: its PF, by `physfn`, else itself. Raises DeviceError."""
    # Where the parent's driver has gone, `mdev_bus` has it no more, and the PCI bus still does.
    place = (
        f"{sysfs}/bus/pci/devices/{parent}" if ":" in parent else parent_directory(sysfs, parent)
    )
    try:
        return os.path.basename(os.readlink(f"{place}/physfn"))
    except FileNotFoundError:
        return parent
    except OSError as error:
        raise DeviceError(f"the GPU of {parent} can't be told: {fs.reason(error)}") from error


def read_available(sysfs: str, parent: str, type_id: str) -> int:
    """How many more mdevs of a type could be made on a parent now. Raises DeviceError."""
    path = f"{parent_directory(sysfs, parent)}/mdev_supported_types/{type_id}/available_instances"
    text = _read(path).strip()
    if not _NUMBER.fullmatch(text):
        raise DeviceError(f"{path} can't be understood: '{text[:40]}' is no number")
    return int(text)


def discover(sysfs: str, exclude: Iterable[str] = (), wanted: str | None = None) -> Parents:
    """Find all parents of the host by GPU, but for those in EXCLUDE (names of parents or GPUs).

    With WANTED, only the profiles that it may mean: the rest of the catalogue costs many reads.
    What has no types of PCI devices is no parent. A parent or a type that can't be read costs
    itself: it stands there with its error, and in `problems`.
    """
    try:
        names = _names(f"{sysfs}/class/mdev_bus")
    except DeviceError as error:
        return Parents((), (str(error),))
    excluded = frozenset(exclude)
    found: dict[str, list[Parent]] = {}
    known: dict[tuple[str, str], MdevProfile] = {}
    problems = []
    for name in sorted(names, key=_order):
        try:
            gpu = gpu_of(sysfs, name)
        except DeviceError as error:
            problems.append(str(error))
            continue
        if excluded.isdisjoint((name, gpu)) and (
            parent := _read_parent(sysfs, name, gpu, known, wanted)
        ):
            found.setdefault(gpu, []).append(parent)
            errors = [parent.error, *(offer.error for offer in parent.offers or ())]
            problems += filter(None, errors)
    return Parents(
        tuple(
            ParentGpu(gpu, _numa_node(sysfs, gpu), tuple(found[gpu]))
            for gpu in sorted(found, key=_order)
        ),
        tuple(problems),
    )


def existing(sysfs: str) -> tuple[Mdev, ...]:
    """All mdevs of the host, by UUID. Raises DeviceError where they can't be listed."""
    uuids = set(_names(f"{sysfs}/bus/mdev/devices"))
    for parent in _names(f"{sysfs}/class/mdev_bus"):
        uuids.update(filter(UUID.fullmatch, _names(parent_directory(sysfs, parent))))
    return tuple(filter(None, (read_mdev(sysfs, uuid) for uuid in sorted(uuids))))


def read_mdev(sysfs: str, uuid: str) -> Mdev | None:
    """Read an mdev; None: there is none. What can't be read of it is None, with the reason."""
    path = device_directory(sysfs, uuid)
    try:
        parent = os.path.basename(os.path.dirname(os.readlink(path)))
        return Mdev(uuid, parent, os.path.basename(os.readlink(f"{path}/mdev_type")))
    except FileNotFoundError:
        pass
    except OSError as error:
        return Mdev(uuid, None, None, f"{path} can't be read: {fs.reason(error)}")
    try:
        if (leaving := _parent_of_leaving(sysfs, uuid)) is None:
            return None
    except DeviceError as error:
        return Mdev(uuid, None, None, str(error))
    return Mdev(uuid, leaving, None, f"its removal has begun, and waits until {uuid} is closed")


def vfio_nodes(sysfs: str, uuid: str) -> frozenset[str]:
    """The VFIO nodes of an mdev below `<dev>`; empty where there is no such mdev.

    Raises DeviceError where they can't be told.
    """
    found = nodes.vfio_nodes(device_directory(sysfs, uuid), uuid)
    return found or frozenset(f"vfio/{group}" for group in _groups(sysfs, uuid))


def _parent_of_leaving(sysfs: str, uuid: str) -> str | None:
    """The parent of an mdev that the bus has lost; None: it is gone for good. Raises DeviceError.

    When a removal begins, the bus loses the mdev at once; its parent has it until the driver is
    done. When the parent's driver goes, `mdev_bus` loses the parent first; the IOMMU group has the
    mdev until it is closed.
    """
    for parent in _names(f"{sysfs}/class/mdev_bus"):
        if os.path.isdir(f"{parent_directory(sysfs, parent)}/{uuid}"):
            return parent
    return next(iter(_groups(sysfs, uuid).values()), None)


def _groups(sysfs: str, uuid: str) -> dict[str, str]:
    """The IOMMU groups that have an mdev (one at most), each with its parent's name.

    Raises DeviceError.
    """
    found = {}
    root = f"{sysfs}/kernel/iommu_groups"
    for group in _names(root):
        path = f"{root}/{group}/devices/{uuid}"
        try:
            found[group] = os.path.basename(os.path.dirname(os.readlink(path)))
        except FileNotFoundError:
            continue
        except OSError as error:
            raise DeviceError(f"{path} can't be read: {fs.reason(error)}") from error
    return found


def _names(directory: str) -> list[str]:
    """What stands in DIRECTORY, nothing where there is none. Raises DeviceError."""
    try:
        return os.listdir(directory)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise DeviceError(f"{directory} can't be read: {fs.reason(error)}") from error


def _read_parent(
    sysfs: str,
    name: str,
    gpu: str,
    known: dict[tuple[str, str], MdevProfile],
    wanted: str | None,
) -> Parent | None:
    """Read a parent; None where it is none. KNOWN: profiles by GPU and id, read and added to."""
    root = f"{parent_directory(sysfs, name)}/mdev_supported_types"
    try:
        types = sorted(os.listdir(root), key=_order)
    except FileNotFoundError:
        return None
    except OSError as error:
        return Parent(name, gpu, None, f"{root} can't be read: {fs.reason(error)}")
    offers = []
    is_parent = False
    for type_id in types:
        notes: list[str] = []
        try:
            profile = known.get((gpu, type_id)) or _read_profile(root, type_id, notes)
            if profile is None:
                continue
            is_parent = True
            if not notes:
                known[gpu, type_id] = profile
            if wanted is None or profile.is_meant_by(wanted):
                available = read_available(sysfs, name, type_id)
                offers.append(Offer(profile, available, "; ".join(notes) or None))
        except DeviceError as error:
            is_parent = True
            offers.append(Offer(MdevProfile(type_id, type_id), None, str(error)))
    if not is_parent or not os.path.isdir(root):
        return None  # in the latter case it went while we looked
    return Parent(name, gpu, tuple(offers))


def _read_profile(root: str, type_id: str, notes: list[str]) -> MdevProfile | None:
    """Read what a type is; None where its mdevs are no PCI devices.

    A description that can't be read is noted in NOTES, and done without. Raises DeviceError.
    """
    path = f"{root}/{type_id}"
    if _read(f"{path}/device_api").strip() != _API:
        return None
    name = _read(f"{path}/name", "").strip() or type_id
    description = ""
    try:
        description = _read(f"{path}/description", "")
    except DeviceError as error:
        notes.append(str(error))
    return MdevProfile(type_id, name, *parse_description(description))


def _read(path: str, missing: str | None = None) -> str:
    """The text of an attribute; MISSING, if given, where there is none. Raises DeviceError."""
    try:
        return fs.read_text(path)
    except OSError as error:
        if isinstance(error, FileNotFoundError) and missing is not None:
            return missing
        raise DeviceError(f"{path} can't be read: {fs.reason(error)}") from error


def _numa_node(sysfs: str, gpu: str) -> int | None:
    try:
        return vendor_vfio.numa_node(sysfs, PciAddress.parse(gpu))
    except AddressError:
        return None


def _order(name: str) -> tuple[tuple[int, ...], str]:
    """Sorts addresses by number, before all that is none, and types of one vendor by number."""
    if ":" in name:
        try:
            return PciAddress.parse(name), ""
        except AddressError:
            pass
    stem, _, number = name.rpartition("-")
    is_number = number.isascii() and number.isdigit()
    return (2**32, int(number) if is_number else 0), stem if is_number else name
