# SPDX-License-Identifier: LGPL-2.1-or-later
"""Whether the device that a hostdev names can serve the request at all, and is nobody else's."""

from __future__ import annotations

import os

from ..address import PciAddress
from ..claims import cordons, inventory
from ..devices import numa, vendor_vfio
from ..errors import CordonedError, OpenError, RequestError
from ..records import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ..address import Location
    from ..claims.inventory import LiveDomains
    from ..devices.model import Device
    from ..domain.match import Wanted
    from ..domain.model import Domain
    from .context import Context


def check_places(context: Context, domain: Domain, wanted: tuple[Wanted, ...]) -> None:
    """Check that each address is a vGPU VF here, on a GPU that the requests allow.

    Where mediated devices are made is chosen by the requests (see parents.py), so of them there is
    nothing to check. Raises RequestError, with what is there instead.
    """
    sysfs = context.config.paths.sysfs
    gpus = []
    at_vfs = []
    for each in wanted:
        address = each.source
        if not isinstance(address, PciAddress):
            continue
        at_vfs.append(each)
        where = f"the hostdev '{each.request.alias}' of domain '{domain.name}'"
        if problem := _no_vgpu_vf(sysfs, address):
            raise RequestError(
                f"{where} points at {each.device}, {problem}; point it at a VF, as "
                "'virt-vgpu list' shows them"
            )
        gpu = vendor_vfio.gpu_of(sysfs, address)
        if excluded := {address, gpu}.intersection(context.config.policy.exclude):
            raise RequestError(
                f"{where} points at {each.device}, but {min(excluded)} is excluded by [policy] in "
                "the configuration; point it at another VF"
            )
        _check_cordons(context, domain, each, (address, gpu))
        _check_pin(sysfs, domain, each, gpu)
        _check_numa(sysfs, domain, each, gpu)
        gpus.append(gpu)
    _check_company(domain, tuple(at_vfs), gpus)


def check_cordons(context: Context, domain: Domain, wanted: Wanted, device: Device) -> None:
    """Check that neither DEVICE, on which WANTED shall be, nor its GPU is cordoned.

    The one that counts is made under the host lock, where the claim is. Raises RefusedError.
    """
    _check_cordons(context, domain, wanted, (device.address, device.gpu))


def _check_cordons(
    context: Context, domain: Domain, wanted: Wanted, places: tuple[Location, Location]
) -> None:
    place, gpu = places
    targets = [each for each in places if isinstance(each, PciAddress)]
    if cordon := cordons.first(context.config.paths.state, targets):
        of_gpu = f" of GPU {gpu}" if cordon.target == gpu else ""
        raise CordonedError(
            f"the hostdev '{wanted.request.alias}' of domain '{domain.name}' "
            f"{'would be made on' if wanted.is_mdev else 'points at'} {place}{of_gpu}, which is "
            f"cordoned ({cordon.label}); "
            f"{'try again' if wanted.is_mdev else 'point it at another VF'}, or run 'virt-vgpu "
            f"uncordon {cordon.target}'"
        )


def check_unused(
    context: Context,
    domain: Domain,
    wanted: Wanted,
    live: LiveDomains,
    a_write_follows: bool = False,
) -> None:
    """Check that no LIVE domain and no process has the device. Raises RefusedError, InUseError.

    Where A_WRITE_FOLLOWS, whose guard looks at the processes, they are not looked at twice.
    """
    user = live.using(wanted.device)
    if user and user.uuid != domain.uuid:
        where = f"the hostdev '{wanted.request.alias}' of domain '{domain.name}'"
        how = (
            f"{where} has it for its own; stop that one"
            if wanted.is_mdev
            else f"point {where} at another VF"
        )
        raise OpenError(
            f"{wanted.device} is in use by the running domain '{user.name}' ({user.uuid}); {how}"
        )
    if not a_write_follows:
        context.write_guard(wanted.device)()


def users(context: Context, wanted: Iterable[Wanted]) -> LiveDomains:
    """The live domains that have any of the devices WANTED."""
    only = inventory.Only(frozenset(each.device for each in wanted))
    return inventory.live_domains(context.config.paths, only)


def _no_vgpu_vf(sysfs: str, address: PciAddress) -> str | None:
    if not vendor_vfio.exists(sysfs, address):
        return "which is not on this host"
    if vendor_vfio.is_vgpu_vf(sysfs, address):
        return None
    if vendor_vfio.is_gpu(sysfs, address):
        return "which is a whole GPU, not one of its VFs"
    if os.path.lexists(f"{vendor_vfio.directory(sysfs, address)}/physfn"):
        return "which is a VF without an 'nvidia' directory: its driver offers no vGPU there"
    return "which is no VF of a vGPU-capable GPU"


def _check_pin(sysfs: str, domain: Domain, wanted: Wanted, gpu: PciAddress) -> None:
    pin = wanted.request.gpu
    if pin is None or pin == gpu:
        return
    where = f"domain '{domain.name}' wants '{wanted.request.alias}' on GPU {pin}"
    if not vendor_vfio.is_gpu(sysfs, pin):
        raise RequestError(
            f"{where}, which is not on this host or has no VFs; name one that 'virt-vgpu list' "
            "shows, or enable its VFs"
        )
    raise RequestError(
        f"{where}, but its hostdev points at {wanted.device} of GPU {gpu}; point it at a VF of the "
        "former"
    )


def _check_numa(sysfs: str, domain: Domain, wanted: Wanted, gpu: PciAddress) -> None:
    if wanted.request.numa != "require":
        return
    where = f"domain '{domain.name}' has numa='require' at '{wanted.request.alias}'"
    nodes = numa.nodes_of(sysfs, domain.nodes, domain.cpus)
    if not nodes:
        raise RequestError(
            f"{where}, but neither <numatune> nor pinned vcpus to require anything of; add one, or "
            "remove numa"
        )
    node = vendor_vfio.numa_node(sysfs, gpu) or 0
    if node not in nodes:
        raise RequestError(
            f"{where} and lives on NUMA node {', '.join(map(str, sorted(nodes)))}, but "
            f"{wanted.device} is on node {node}; point its hostdev at a VF of another GPU"
        )


def _check_company(domain: Domain, wanted: tuple[Wanted, ...], gpus: list[PciAddress]) -> None:
    for each, gpu in zip(wanted, gpus, strict=True):
        shared = gpus.count(gpu) > 1
        if each.request.apart and shared:
            raise RequestError(
                f"domain '{domain.name}' wants '{each.request.alias}' apart from its other vGPUs, "
                f"but another of them is on GPU {gpu} too; point one hostdev at another GPU"
            )
        if each.request.together and len(set(gpus)) > 1:
            raise RequestError(
                f"domain '{domain.name}' wants '{each.request.alias}' together with its other "
                f"vGPUs, but they are on {len(set(gpus))} GPUs; point all hostdevs at one"
            )
