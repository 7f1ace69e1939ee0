# SPDX-License-Identifier: LGPL-2.1-or-later
"""Traps about what domains' definitions say; pure."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from .. import placement
from ..address import PciAddress
from ..devices import mdev
from ..errors import RequestError
from .findings import Symptom

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..domain.model import Hostdev, Request
    from .see_definitions import Defined
    from .sight import Sight

_LATE = 600.0  # seconds within which a sync comes after a change, whoever runs it


def managed(sight: Sight) -> Iterator[Symptom]:
    """With managed='yes' libvirt unbinds the driver that makes the vGPU.

    The domain starts "fine" without any, or is refused by our hook; and the VF may stay unusable
    until its GPU's VFs are switched off and on.
    """
    vfs = _vfs(sight)
    for one in sight.definitions.all:
        for hostdev in one.domain.hostdevs:
            if hostdev.managed and hostdev.kind == "pci" and hostdev.address in vfs:
                yield Symptom(
                    one.domain.name,
                    f"the hostdev at {hostdev.address} of {one.label} has managed='yes', with "
                    "which libvirt would unbind the driver that makes the vGPU",
                    f"run 'virt-vgpu fix-xml {one.domain.name}'",
                )


def request_broken(sight: Sight) -> Iterator[Symptom]:
    """Such a domain doesn't start."""
    for one in sight.definitions.asking:
        error = one.domain.request_error
        if error:
            yield Symptom(
                one.domain.name,
                f"the request in the metadata of {one.label} can't be understood: {error}",
                f"run 'virt-vgpu fix-xml {one.domain.name}'",
            )


def profile_unknown(sight: Sight) -> Iterator[Symptom]:
    """A profile that no GPU of this host has ever listed."""
    if not sight.seen.host.profiles:
        return  # no GPU tells any
    for one, request in _requests(sight):
        try:
            placement.resolve(request.profile, sight.seen.host)
        except RequestError as error:
            yield Symptom(
                one.domain.name,
                f"{one.label} can't start: {error}",
                "ask for one that 'virt-vgpu profiles' lists, with 'virsh edit'",
            )


def mdev_where_vfs(sight: Sight) -> Iterator[Symptom]:
    """A definition of the time when this host's vGPUs were mediated devices."""
    gpus = sight.seen.host.inventory.gpus
    if not gpus or any(gpu.backend == mdev.BACKEND for gpu in gpus):
        return
    for one, request in _requests(sight):
        hostdev = one.domain.hostdev(request.alias)
        if hostdev and hostdev.kind == "mdev":
            yield Symptom(
                one.domain.name,
                f"the hostdev '{request.alias}' of {one.label} is a mediated device, but this "
                "host's vGPUs are VFs",
                "run 'virt-vgpu sync', which points it at a VF",
            )


def vf_where_mdevs(sight: Sight) -> Iterator[Symptom]:
    """The reverse: a VF on which this host's driver makes mediated devices."""
    parents = {vf.address for pf in sight.gpus.pfs for vf in pf.vfs if vf.is_parent}
    for one, request, hostdev in _pointing(sight):
        if hostdev.address in parents and hostdev.address not in _devices(sight):
            yield Symptom(
                one.domain.name,
                f"the hostdev '{request.alias}' of {one.label} points at the VF {hostdev.address}, "
                "but this host's vGPUs are mediated devices, made on its VFs",
                "run 'virt-vgpu sync', which makes it a mediated device",
            )


def pointed_at_nothing(sight: Sight) -> Iterator[Symptom]:
    """Our hook refuses it; QEMU would die with "An error occurred, but the cause is unknown"."""
    for one, request, hostdev in _pointing(sight):
        address = hostdev.address
        if address is None or address.is_placeholder or address not in sight.definitions.there:
            what = hostdev.address_error or (address and str(address)) or "no address"
            yield Symptom(
                one.domain.name,
                f"the hostdev '{request.alias}' of {one.label} points at no device of this host "
                f"({what}), so it can't start",
                "run 'virt-vgpu sync', which points it elsewhere, or says why it can't",
            )


def pointed_at_other(sight: Sight) -> Iterator[Symptom]:
    """A device, but none that we can make a vGPU of."""
    parents = {vf.address for pf in sight.gpus.pfs for vf in pf.vfs if vf.is_parent}
    for one, request, hostdev in _pointing(sight):
        address = hostdev.address
        if address not in sight.definitions.there or address in _devices(sight) or (
            address in parents or address.is_placeholder
        ):  # fmt: skip
            continue
        why = "which is no VF that can become a vGPU now"
        if address in sight.config.policy.exclude:
            why = "which exclude of [policy] names"
        yield Symptom(
            one.domain.name,
            f"the hostdev '{request.alias}' of {one.label} points at {address}, {why}",
            "run 'virt-vgpu sync', which points it elsewhere, or says why it can't",
        )


def hostdev_without_request(sight: Sight) -> Iterator[Symptom]:
    """Nobody sets a type there, and QEMU can't open a VF without one."""
    devices = sight.seen.host.inventory.devices
    # What mediated devices are made on has no type, and may be passed through.
    untyped = {each.address for each in devices if each.type_id == 0 and not each.is_mdev}
    for one in sight.definitions.all:
        for hostdev in () if one.domain.asks else one.domain.hostdevs:
            if hostdev.kind == "pci" and not hostdev.managed and hostdev.address in untyped:
                yield Symptom(
                    one.domain.name,
                    f"a hostdev of {one.label} points at {hostdev.address}, which has no vGPU, and "
                    "the domain asks for none, so it can't start",
                    f"run 'virt-vgpu fix-xml {one.domain.name} --profile ...'",
                )


def shared_device(sight: Sight) -> Iterator[Symptom]:
    """Definitions that share a device because there are fewer devices than definitions.

    Where there are enough, a sync gives each its own. Those that start at boot are
    `autostart_unserved`'s.
    """
    for device, ones in _sharing(sight):
        starting = [one for one in ones if one.is_autostarted]
        if len(starting) < 2:
            yield Symptom(
                device,
                f"{device} is what {_listed(ones)} point at, since there are more "
                "definitions than devices that could serve them; only one of them can run",
                "nothing needs to be done where that is meant; else undefine some, or ask for "
                "smaller profiles",
            )


def autostart_unserved(sight: Sight) -> Iterator[Symptom]:
    """Domains that libvirt starts at boot, and can't."""
    for one in sight.definitions.asking:
        if one.is_autostarted and not one.is_running and one.hindrance and not _is_wrong(one):
            yield Symptom(
                one.domain.name,
                f"{one.label} starts at boot, but couldn't be served now: {one.hindrance}",
                "make room for it, or see 'virt-vgpu profiles' for what there is room for",
            )
    for device, ones in _sharing(sight):
        starting = [one for one in ones if one.is_autostarted]
        if len(starting) > 1:
            yield Symptom(
                device,
                f"{_listed(starting)} start at boot, but all point at {device}, since there are "
                "too few devices for all",
                "take autostart from all but one ('virsh autostart --disable'), or ask for smaller "
                "profiles",
            )


def definition_behind(sight: Sight) -> Iterator[Symptom]:
    """A sync would change it, and none has come: starts are refused that could be served."""
    ages = {one.domain.uuid: one.age for one in sight.definitions.all}
    for move in sight.definitions.plan.moves:
        if ages[move.domain.uuid] < _LATE:
            continue
        now = f"points at {move.came}" if move.came else "is missing"
        then = f"should point at {move.place.goes}" if move.place else "has no request"
        yield Symptom(
            move.domain.name,
            f"the hostdev '{move.alias}' of domain '{move.domain.name}' ({move.domain.uuid}) "
            f"{now}, but {then}, and no sync has seen to it",
            "run 'virt-vgpu sync', and see what keeps it from running by itself",
        )


def _vfs(sight: Sight) -> set[PciAddress | None]:
    """All VFs that are vGPUs, or would be."""
    found: set[PciAddress | None] = {vf.address for pf in sight.gpus.pfs for vf in pf.vfs}
    return found | _devices(sight)


def _devices(sight: Sight) -> set[PciAddress | None]:
    """The VFs that are vGPUs; where mediated devices are made, no PCI hostdev belongs."""
    devices = sight.seen.host.inventory.devices
    vfs = (device.address for device in devices if not device.is_mdev)
    return {address for address in vfs if isinstance(address, PciAddress)}


def _requests(sight: Sight) -> Iterator[tuple[Defined, Request]]:
    return ((one, request) for one in sight.definitions.asking for request in one.domain.requests)


def _pointing(sight: Sight) -> Iterator[tuple[Defined, Request, Hostdev]]:
    """The requests with the PCI hostdev of each; managed ones have a check of their own."""
    for one, request in _requests(sight):
        hostdev = one.domain.hostdev(request.alias)
        if hostdev and hostdev.kind == "pci" and not hostdev.managed:
            yield one, request, hostdev


def _sharing(sight: Sight) -> Iterator[tuple[str, list[Defined]]]:
    """Devices at which several definitions will still point after a sync, with these."""
    moved = {
        (move.domain.uuid, move.alias): move.place.goes if move.place else None
        for move in sight.definitions.plan.moves
    }
    pointing: dict[str, list[Defined]] = defaultdict(list)
    known = {str(address) for address in _devices(sight)}
    for one, request in _requests(sight):
        hostdev = one.domain.hostdev(request.alias)
        now = str(hostdev.address) if hostdev else None
        device = moved.get((one.domain.uuid, request.alias), now)
        if device in known:
            pointing[device].append(one)
    return ((device, ones) for device, ones in sorted(pointing.items()) if len(ones) > 1)


def _is_wrong(one: Defined) -> bool:
    """Whether the definition itself is in the way, which other checks tell."""
    hostdevs = (one.domain.hostdev(request.alias) for request in one.domain.requests)
    return bool(one.domain.request_error) or any(
        hostdev and hostdev.hindrance for hostdev in hostdevs
    )


def _listed(ones: list[Defined]) -> str:
    return " and ".join(f"domain '{one.domain.name}'" for one in ones)
