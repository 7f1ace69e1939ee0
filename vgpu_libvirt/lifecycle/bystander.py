# SPDX-License-Identifier: LGPL-2.1-or-later
"""Hostdevs that didn't ask for a vGPU, where we know that they would damage one.

Whatever we can't read or understand here, the domain starts: it has nothing to do with us.
"""

from __future__ import annotations

import os

from ..claims import handles, inventory, store
from ..claims.model import Phase
from ..devices import backend, vendor_vfio
from ..errors import VgpuError
from ..records import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    from ..address import PciAddress
    from ..domain.model import Domain, Hostdev
    from .context import Context

    _T = TypeVar("_T")

_ASK = "to get a vGPU there, ask for a profile with 'virt-vgpu attach'"


def harm(context: Context, domain: Domain, operation: str) -> str | None:
    """The sentence that says what damage a hostdev without a request would do; None: none known.

    OPERATION is `prepare` or `start`. At the latter, when every other script of the host's hooks
    has had its turn, a VF without a type is refused too: QEMU could only die of it with a riddle.
    """
    asked = {request.alias for request in domain.requests}
    for hostdev in domain.hostdevs:
        if hostdev.alias in asked:
            continue
        problem = None
        if hostdev.address and hostdev.kind == "pci":
            problem = _harm_of(context, domain, hostdev, hostdev.address, operation)
        elif uuid := hostdev.uuid:
            problem = _harm_of_sharing(context, domain, uuid, operation)
        if problem:
            where = hostdev.address or hostdev.uuid
            return f"a hostdev of domain '{domain.name}' points at {where}, {problem}"
    return None


def _harm_of(
    context: Context, domain: Domain, hostdev: Hostdev, address: PciAddress, operation: str
) -> str | None:
    sysfs = context.config.paths.sysfs
    exclude = context.config.policy.exclude
    if address in exclude:
        return None
    if not vendor_vfio.is_vgpu_vf(sysfs, address):
        return _known(lambda: _harm_to_vfs(context, address))
    if exclude and _known(lambda: vendor_vfio.gpu_of(sysfs, address)) in exclude:
        return None
    if hostdev.managed:
        return (
            "a VF for vGPUs, with managed='yes', with which libvirt would unbind the driver that "
            f"makes the vGPU; set managed='no', and {_ASK}"
        )
    return (
        _harm_of_sharing(context, domain, str(address), operation)
        or (operation == "start" and _known(lambda: _untyped(sysfs, address)))
        or None
    )


def _harm_of_sharing(context: Context, domain: Domain, device: str, operation: str) -> str | None:
    """What is wrong if somebody else has DEVICE, or DOMAIN had it; None: nothing that we know."""
    return _known(lambda: _owner(context, domain, device, operation)) or _known(
        lambda: _user(context, domain, device)
    )


def _known(look: Callable[[], _T | None]) -> _T | None:
    """What LOOK finds; None where it can't tell, since then we know of no harm."""
    try:
        return look()
    except VgpuError:
        return None


def _owner(context: Context, domain: Domain, device: str, operation: str) -> str | None:
    claim = store.read(context.config.paths.state, device)
    if claim is None or claim.phase is Phase.CARVED:
        return None
    if claim.domain_uuid == domain.uuid:
        if operation != "prepare":
            return None  # claimed by this very start
        # Whoever gives it back, at any time, doesn't expect a QEMU that came without a claim.
        return (
            "a vGPU that it has from an earlier run, when it asked for one, and that will be "
            f"cleared; let 'virt-vgpu sync' do that, and {_ASK}"
        )
    return f"a vGPU that belongs to {claim.owner}; point it at another device"


def _user(context: Context, domain: Domain, device: str) -> str | None:
    paths = context.config.paths
    only = inventory.Only(frozenset({device}))
    user = inventory.live_domains(paths, only).using(device)
    if user and user.uuid != domain.uuid:
        return (
            f"a vGPU in use by the running domain '{user.name}' ({user.uuid}); point it at "
            "another device"
        )
    pids = handles.scan(paths.proc).on(backend.vfio_nodes(paths.sysfs, device))
    if pids:
        return f"a vGPU that process {min(pids)} has open; point it at another device"
    return None


def _untyped(sysfs: str, address: PciAddress) -> str | None:
    if vendor_vfio.read_current(sysfs, address):
        return None
    return f"a VF without a vGPU type, which QEMU can't open; {_ASK}"


def _harm_to_vfs(context: Context, address: PciAddress) -> str | None:
    """What giving away a whole GPU, or a mediated device's parent, would do to vGPUs on it."""
    there = vendor_vfio.directory(context.config.paths.sysfs, address)
    claims = store.read_all(context.config.paths.state).readable.values()
    owners = sorted(
        claim.owner
        for claim in claims
        if claim.gpu == str(address)
        or (backend.is_mdev(claim.device) and os.path.isdir(f"{there}/{claim.device}"))
    )
    if not owners:
        return None
    return f"which has the vGPU of {owners[0]} on it; point it at another device"
