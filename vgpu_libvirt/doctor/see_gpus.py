# SPDX-License-Identifier: LGPL-2.1-or-later
"""Looks at NVIDIA's GPUs and their VFs, also those that are no vGPU devices but should be."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

from ..address import PciAddress
from ..devices import mdev, migration, vendor_vfio
from ..errors import AddressError
from . import reading

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ..config import Config

_VENDOR = "0x10de"
_DISPLAY = "0x03"  # how the class of a GPU begins, a 3D controller's too


class Vf(NamedTuple):
    """A virtual function of a GPU."""

    address: PciAddress
    driver: str | None
    is_vgpu: bool  # whether the vendor's VFIO driver shows its `nvidia` directory
    is_parent: bool  # whether mediated devices are made on it
    group: str | None  # its IOMMU group; None: it has none


class Pf(NamedTuple):
    """A GPU that can have VFs."""

    address: PciAddress
    driver: str | None
    most_vfs: int
    vfs: tuple[Vf, ...]


class Gpus(NamedTuple):
    """What there is of them."""

    pfs: tuple[Pf, ...]
    missing: tuple[PciAddress, ...]  # of `exclude`, what this host doesn't have
    has_vfio: bool  # whether <dev>/vfio/vfio is there, which libvirt looks for
    unmigratable: frozenset[str]  # VFs whose driver is known to have no migration


def look(config: Config, vfs: Iterable[PciAddress], unseen: list[str]) -> Gpus:
    """Look at all GPUs that aren't excluded, and whether the vGPUs on VFS can migrate."""
    sysfs = config.paths.sysfs
    exclude = config.policy.exclude
    return Gpus(
        tuple(pf for pf in _pfs(sysfs, unseen) if pf.address not in exclude),
        tuple(
            address
            for address in exclude
            if not os.path.exists(vendor_vfio.directory(sysfs, address))
        ),
        os.path.exists(f"{config.paths.dev}/vfio/vfio"),
        frozenset(name for name in map(str, vfs) if migration.is_supported(sysfs, name) is False),
    )


def _pfs(sysfs: str, unseen: list[str]) -> list[Pf]:
    found = []
    for name in reading.names(f"{sysfs}/bus/pci/devices", unseen):
        try:
            address = PciAddress.parse(name)
        except AddressError:
            continue
        path = vendor_vfio.directory(sysfs, address)
        most = reading.number(f"{path}/sriov_totalvfs", unseen)
        if not most or (reading.text(f"{path}/vendor", unseen) or "").strip() != _VENDOR:
            continue
        if (reading.text(f"{path}/class", unseen) or "").startswith(_DISPLAY):
            vfs = tuple(_vf(sysfs, vf) for vf in vendor_vfio.virtual_functions(sysfs, address))
            found.append(Pf(address, vendor_vfio.driver_of(sysfs, address), most, vfs))
    return found


def _vf(sysfs: str, address: PciAddress) -> Vf:
    types = f"{mdev.parent_directory(sysfs, str(address))}/mdev_supported_types"
    return Vf(
        address,
        vendor_vfio.driver_of(sysfs, address),
        vendor_vfio.is_vgpu_vf(sysfs, address),
        os.path.isdir(types) and bool(os.listdir(types)),
        reading.link(f"{vendor_vfio.directory(sysfs, address)}/iommu_group"),
    )
