# SPDX-License-Identifier: LGPL-2.1-or-later
"""Mediated devices as an inventory has them: those that exist, and one for each that could be made.

So what chooses among VFs chooses among these. A parent that could make three more has three slots;
each lists what could be made once those before it are.
"""

from __future__ import annotations

from ..address import PciAddress, location
from ..errors import DeviceError
from ..records import TYPE_CHECKING
from . import mdev
from .model import Device, Gpu, Inventory, Profile, location_order

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .mdev_model import Mdev, MdevProfile, Parent, ParentGpu


def discover(sysfs: str, exclude: Iterable[PciAddress] = ()) -> Inventory:
    """Find all mediated devices of the host and all that could be made, but for EXCLUDE's.

    What can't be read costs itself, and stands in `problems`.
    """
    parents = mdev.discover(sysfs, map(str, exclude))
    problems = list(parents.problems)
    there: tuple[Mdev, ...] = ()
    if parents.gpus:
        try:
            there = mdev.existing(sysfs)
        except DeviceError as error:
            problems.append(str(error))
    problems += [each.error for each in there if each.error]
    return Inventory(tuple(gpu_with(gpu, there) for gpu in parents.gpus), tuple(problems))


def gpu_with(gpu: ParentGpu, there: Iterable[Mdev]) -> Gpu:
    """GPU with those of the mdevs THERE that are its own, and its slots."""
    by_parent: dict[str, list[Mdev]] = {}
    for each in there:
        by_parent.setdefault(each.parent or "", []).append(each)
    devices = [
        device
        for parent in gpu.parents
        for device in (
            *(_existing(parent, each) for each in by_parent.get(parent.name, ())),
            *_slots(parent, bool(by_parent.get(parent.name))),
        )
    ]
    offered = {offer.profile for parent in gpu.parents for offer in parent.offers or ()}
    return Gpu(
        location(gpu.name),
        mdev.BACKEND,
        gpu.numa_node,
        tuple(sorted(devices, key=lambda device: device.order)),
        tuple(_profile(each) for each in offered),
        tuple((_profile(each), each.max_instances) for each in offered if each.max_instances),
    )


def with_awaited(inventory: Inventory, awaited: Iterable[tuple[str, str, Profile]]) -> Inventory:
    """INVENTORY with the mediated devices that are yet to be made, each in one of the slots.

    AWAITED: their UUIDs, the names of their GPUs, and their profiles. Which slot it will be isn't
    known; the first is taken that could be it, as whoever chose among them did.
    """
    gpus = list(inventory.gpus)
    known = {device.name for device in inventory.devices}
    for uuid, name, profile in awaited:
        for number, gpu in enumerate(gpus):
            if gpu.backend == mdev.BACKEND and str(gpu.address) == name and uuid not in known:
                gpus[number] = _awaiting(gpu, uuid, profile)
    return inventory._replace(gpus=tuple(gpus))


def _awaiting(gpu: Gpu, uuid: str, profile: Profile) -> Gpu:
    slots = [device for device in gpu.devices if device.uuid is None and device.type_id == 0]
    fitting = [slot for slot in slots if slot.listed(profile)]
    if fitting or slots:
        # Of one parent's, the last: those before it list what could be made besides.
        slot = min(
            fitting or slots, key=lambda each: (location_order(each.address), -(each.slot or 0))
        )
        devices = [device for device in gpu.devices if device != slot]
        devices.append(slot._replace(uuid=uuid))
    else:
        devices = [*gpu.devices, Device(gpu.address, gpu.address, 0, (), None, 0, uuid)]
    return gpu._replace(devices=tuple(sorted(devices, key=lambda device: device.order)))


def _existing(parent: Parent, there: Mdev) -> Device:
    return Device(
        location(parent.name),
        location(parent.gpu),
        there.type_id,
        (),
        there.error,
        slot=0,
        uuid=there.uuid,
    )


def _slots(parent: Parent, is_used: bool) -> Iterable[Device]:
    """What could be made on PARENT; where that is nothing and none is there, a slot for nothing."""
    here, gpu = location(parent.name), location(parent.gpu)
    if parent.offers is None:
        yield Device(here, gpu, None, None, parent.error, slot=0)
        return
    most = max((offer.available or 0 for offer in parent.offers), default=0)
    for number in range(most or (not is_used)):
        creatable = [_profile(o.profile) for o in parent.offers if (o.available or 0) > number]
        yield Device(here, gpu, 0, tuple(creatable), slot=number)


def _profile(kind: MdevProfile) -> Profile:
    by_name = Profile(kind.id, kind.name)
    if by_name.framebuffer_mib is not None:
        return by_name
    return by_name._replace(described_mib=kind.described_mib)
