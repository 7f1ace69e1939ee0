# SPDX-License-Identifier: LGPL-2.1-or-later
"""Traps about GPUs, their VFs and their drivers; pure.

A VF that was wedged, by a QEMU that was killed while the guest's driver came up, shows nothing on
the host: its attributes are as they should be. No check finds it.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from ..report import State, named
from .findings import Symptom

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..address import PciAddress
    from .see_gpus import Pf, Vf
    from .sight import Sight

_DRIVER = "nvidia"
_NO_DRIVERS = (None, "nouveau", "nova_core")
_EXCLUDE = "list it in exclude of [policy] if it is not for vGPUs"


def vfs_off(sight: Sight) -> Iterator[Symptom]:
    """VFs vanish at each boot, and whenever the driver is loaded anew."""
    for pf in _ours(sight):
        if not pf.vfs:
            yield Symptom(
                str(pf.address),
                f"GPU {pf.address} has none of its {pf.most_vfs} VFs enabled, so nothing can be "
                "started on it",
                "list it in gpus of [sriov] and run 'virt-vgpu sriov', which each boot then does, "
                f"or {_EXCLUDE}",
            )


def gpu_driver(sight: Sight) -> Iterator[Symptom]:
    """A GPU that no driver has, or one that makes no vGPUs; another may be on purpose."""
    for pf in sight.gpus.pfs:
        if pf.driver in _NO_DRIVERS:
            has = f"the driver '{pf.driver}'" if pf.driver else "no driver"
            yield Symptom(
                str(pf.address),
                f"GPU {pf.address} has {has}, so nothing can be started on it",
                f"install the vendor's vGPU host driver, and load it; or {_EXCLUDE}",
            )


def no_gpu(sight: Sight) -> Iterator[Symptom]:
    """Nothing is wrong with GPUs where there are none."""
    if not sight.seen.host.inventory.gpus and not sight.gpus.pfs:
        yield Symptom(
            "host",
            "this host has no GPU with VFs that can become vGPUs",
            "nothing needs to be done where that is known",
        )


def vfs_without_vgpu(sight: Sight) -> Iterator[Symptom]:
    """VFs on the vendor's driver that can become neither kind of vGPU."""
    for pf in _ours(sight):
        bare = [vf for vf in pf.vfs if vf.driver == _DRIVER and not vf.is_vgpu and not vf.is_parent]
        if bare:
            yield Symptom(
                str(pf.address),
                f"{_some([vf.address for vf in bare])} of GPU {pf.address} can't become vGPUs: the "
                "driver shows no nvidia/ directory for them, nor types of mediated devices",
                "install the vendor's vGPU host driver (not the one for guests or for plain use), "
                f"on Linux 6.8 or later, and see that nvidia-vgpu-mgr runs; or {_EXCLUDE}",
            )


def vf_driver(sight: Sight) -> Iterator[Symptom]:
    """A VF that lost the vendor's driver, as managed='yes' does it, is no vGPU any more.

    Where the IOMMU is off no VF has a driver of VFIO's, and nothing was lost.
    """
    if _is_iommu_off(sight):
        return
    for pf in _ours(sight):
        lost = [vf.address for vf in pf.vfs if vf.driver != _DRIVER]
        if lost:
            yield Symptom(
                str(pf.address),
                f"{_some(lost)} of GPU {pf.address} lost the driver '{_DRIVER}', without which "
                "they can't become vGPUs; a hostdev with managed='yes' does that",
                "when no domain has a vGPU on that GPU, switch its VFs off and on: "
                f"'/usr/lib/nvidia/sriov-manage -d {pf.address}', then '-e'",
            )


def gpu_lists_nothing(sight: Sight) -> Iterator[Symptom]:
    """An idle GPU whose VFs offer no profile at all.

    In MIG mode the lists are empty, and a write fails with EIO, until there are GPU instances.
    """
    host = sight.seen.host
    for gpu in host.inventory.gpus:
        is_idle = all(d.type_id == 0 and d.name not in host.claims.readable for d in gpu.devices)
        if is_idle and all(device.creatable == () for device in gpu.devices):
            yield Symptom(
                str(gpu.address),
                f"GPU {gpu.address} is idle, but lists no profile, so nothing can be started on it",
                "in MIG mode make GPU instances, after the VFs were enabled; else see that "
                "nvidia-vgpu-mgr runs",
            )


def vf_unreadable(sight: Sight) -> Iterator[Symptom]:
    """Such a VF is given to nobody, and taken from nobody."""
    for device in sight.seen.host.inventory.devices:
        if device.error:
            yield Symptom(
                device.name,
                f"{device.name} can't be read, so it is given to nobody: {device.error}",
                "see what 'dmesg' has of the driver",
            )


def foreign_type(sight: Sight) -> Iterator[Symptom]:
    """A type that nobody claimed takes room, and nobody will give it back."""
    if sight.config.policy.foreign == "reset":
        return
    for name, what in _unclaimed(sight, in_use=False):
        yield Symptom(
            name,
            f"{name} has {what}, but nobody claimed it and nothing shows it in use",
            "if it is a leftover, write 0 to its nvidia/current_vgpu_type, or set foreign = "
            '"reset" in [policy]',
        )


def unclaimed_in_use(sight: Sight) -> Iterator[Symptom]:
    """Somebody else's vGPU; a sync claims it if it is a domain's that asks for it."""
    for name, what in _unclaimed(sight, in_use=True):
        yield Symptom(
            name,
            f"{name} has {what} and is in use, but nobody claimed it; it is left alone",
            "nothing needs to be done; 'virt-vgpu sync' claims it if its domain asks for it",
        )


def iommu_off(sight: Sight) -> Iterator[Symptom]:
    """Without groups libvirt says "host doesn't support passthrough of host PCI devices".

    The vendor's driver takes no VF then: its probe fails with EINVAL.
    """
    if _is_iommu_off(sight):
        yield Symptom(
            "IOMMU",
            "no VF has an IOMMU group, so no VF can be given to a domain",
            "switch the IOMMU on, in the firmware (VT-d, AMD-Vi) and on the kernel's command line "
            "(intel_iommu=on), and reboot",
        )


def iommu_group_shared(sight: Sight) -> Iterator[Symptom]:
    """A device goes to no domain while another domain has one of the same group."""
    members: dict[str, list[PciAddress]] = defaultdict(list)
    for vf in _to_be_given(sight):
        if vf.group:
            members[vf.group].append(vf.address)
    for group, addresses in sorted(members.items()):
        if len(addresses) > 1:
            yield Symptom(
                f"IOMMU group {group}",
                f"{_some(sorted(addresses))} are in one IOMMU group, {group}, so only one domain "
                "at a time can have any of them",
                "enable ACS and ARI in the firmware, or put the GPU into a slot behind a port that "
                "has them",
            )


def vfio_missing(sight: Sight) -> Iterator[Symptom]:
    """What libvirt looks for before anything else; the module `vfio` makes it."""
    path = f"{sight.config.paths.dev}/vfio/vfio"
    if _to_be_given(sight) and not sight.gpus.has_vfio:
        yield Symptom(
            path,
            f"{path} is missing, so libvirt gives no VF to a domain",
            "run 'modprobe vfio', at each boot",
        )


def exclude_nothing(sight: Sight) -> Iterator[Symptom]:
    """Perhaps misspelt, and what was meant is used for vGPUs."""
    for address in sight.gpus.missing:
        yield Symptom(
            str(address),
            f"exclude of [policy] names {address}, which this host doesn't have",
            "correct it, or take it out of the configuration",
        )


def cannot_migrate(sight: Sight) -> Iterator[Symptom]:
    """A domain with such a vGPU can be neither migrated nor saved; see devices/migration.py."""
    for domain in sight.seen.world.domains.domains:
        for name in sorted(domain.devices & sight.gpus.unmigratable):
            yield Symptom(
                domain.name,
                f"domain '{domain.name}' ({domain.uuid}) can't be migrated or saved while it runs, "
                f"since the driver of {name} has no migration",
                "shut it off to move it, or install a driver and a kernel that can migrate vGPUs",
            )


def _ours(sight: Sight) -> Iterator[Pf]:
    """The GPUs that the vendor's driver has; others are for something else."""
    return (pf for pf in sight.gpus.pfs if pf.driver == _DRIVER)


def _to_be_given(sight: Sight) -> list[Vf]:
    """The VFs of these that are given to domains themselves, or would be with their driver."""
    return [vf for pf in _ours(sight) for vf in pf.vfs if not vf.is_parent]


def _is_iommu_off(sight: Sight) -> bool:
    vfs = _to_be_given(sight)
    return bool(vfs) and not any(vf.group for vf in vfs)


def _unclaimed(sight: Sight, in_use: bool) -> Iterator[tuple[str, str]]:
    for row in (row for gpu in sight.report.gpus for row in gpu.devices):
        if row.profile and row.is_unclaimed and (row.state is State.IN_USE) == in_use:
            yield row.device.name, named(row.profile)


def _some(addresses: list[PciAddress]) -> str:
    """As a sentence names some VFs: all of few, the first of many."""
    if len(addresses) <= 3:
        return ", ".join(map(str, addresses))
    return f"{addresses[0]} and {len(addresses) - 1} other VFs"
