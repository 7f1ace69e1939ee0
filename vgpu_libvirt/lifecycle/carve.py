# SPDX-License-Identifier: LGPL-2.1-or-later
"""Devices that the administrator carves: programmed once, for domains that don't ask for a vGPU.

Their claims are no domain's. No hook gives such a device away or takes it back, and after a reboot
it is programmed again. A claim that isn't carved yet has us in the place of the daemon: while we
run nobody takes it, and if we are killed the next `sync` gives it back.
"""

from __future__ import annotations

import os

from ..address import PciAddress
from ..claims import cordons, locks, processes, store, witnesses
from ..claims.model import Phase, Process
from ..devices import profiles, vendor_vfio
from ..domain.model import Domain
from ..errors import DeviceError, RefusedError, RewrittenError, VgpuError
from ..records import TYPE_CHECKING, NamedTuple
from ..revert import Revert
from . import learn
from .context import Context
from .release import drop, give_back, keep_visibly

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..claims.model import Claim
    from ..claims.witnesses import World
    from ..config import Config
    from ..devices.model import Device, Profile

_NOBODY = Domain("", "", None, (), (), frozenset(), frozenset())


class Piece(NamedTuple):
    """A VF that shall be carved, and as what. Mediated devices have no life without a domain."""

    device: Device
    profile: Profile


def ourselves(config: Config) -> Process:
    """This process, as a claim notes it. Raises RefusedError where it can't be told."""
    proc = config.paths.proc
    pid = os.getpid()
    try:
        return Process(pid, processes.read_stat(proc, pid).start)
    except (OSError, ValueError) as error:
        raise RefusedError(
            f"nothing can be carved, since this process can't be found in {proc}: {error}"
        ) from error


def carve(config: Config, pieces: Sequence[Piece]) -> tuple[Claim, ...]:
    """Claim and program the devices of PIECES, and keep them: all of them or none.

    Raises VgpuError, which says too what could not be given back.
    """
    context = Context(config, ourselves(config))
    state = config.paths.state
    left: list[str] = []
    try:
        with locks.devices(state, [piece.device.name for piece in pieces], context.lock_deadline()):
            world = witnesses.look_around(config.paths)
            with Revert() as undo:
                made = [_program(context, piece, world, undo, left) for piece in pieces]
                carved = tuple(claim._replace(phase=Phase.CARVED) for claim in made)
                # Last, and all at once: what is carved may be in use in the next moment.
                with locks.host(state, context.lock_deadline()):
                    for claim in carved:
                        store.replace(state, claim)
        for claim in carved:
            context.tell("carved", claim, "the administrator said so")
    except VgpuError as error:
        raise type(error)("; ".join([str(error), *left])) from error
    learn.from_lists(config.paths, [p for each in pieces for p in each.device.creatable or ()])
    return carved


def _program(context: Context, piece: Piece, world: World, undo: Revert, left: list[str]) -> Claim:
    """Claim and program one device, whose lock is held; what UNDO can't take back is in LEFT."""
    paths = context.config.paths
    device, profile = piece
    address = PciAddress.parse(device.name)
    gpu = vendor_vfio.gpu_of(paths.sysfs, address)
    if user := world.domains.using(device.name):
        raise RefusedError(
            f"{device.name} is in use by the running domain '{user.name}' ({user.uuid}) by now; "
            "try again, another may be free"
        )
    guard = context.write_guard(device.name)
    guard()  # before there is anything to undo
    if current := vendor_vfio.read_current(paths.sysfs, address):
        raise RefusedError(
            f"{device.name} has been given type {current} meanwhile; try again, another may be free"
        )
    claim = context.new_claim(_NOBODY, "", device.name, gpu, profile)
    undo.add(lambda: _take_back(context, claim, left))
    with locks.host(paths.state, context.lock_deadline()):
        if cordon := cordons.first(paths.state, (address, gpu)):
            raise RefusedError(
                f"{cordon.target} is cordoned ({cordon.label}); nothing new is put there until "
                f"'virt-vgpu uncordon {cordon.target}'"
            )
        store.create(paths.state, claim)
    vendor_vfio.program(paths.sysfs, address, profile, guard)
    return claim


def _take_back(context: Context, claim: Claim, left: list[str]) -> None:
    """Undo one piece; what won't clear stays, visibly, for `sync`."""
    paths = context.config.paths
    try:
        standing = store.read(paths.state, claim.device)
        if standing and standing.claim_id == claim.claim_id and standing.phase is Phase.CARVED:
            left.append(f"{claim.device} is carved; 'virt-vgpu uncarve' gives it back")
        elif vendor_vfio.read_current(paths.sysfs, PciAddress.parse(claim.device)) == 0:
            drop(context, claim, "not all that was to be carved could be")
        else:
            give_back(context, claim, context.release_deadline(), start_is_over=True)
    except VgpuError as error:
        left.append(f"{claim.device} stays claimed until it can be cleared: {error}")
        left.extend(keep_visibly(context, claim, str(error)))


def is_to_renew(claim: Claim, world: World) -> bool:
    """Whether the device of CLAIM is carved, and hasn't been programmed in this boot yet."""
    return claim.phase is Phase.CARVED and world.boot_id not in (None, claim.boot_id)


def renew(context: Context, claim: Claim) -> None:
    """Program a carved device again after a reboot, under the guards of any write.

    The caller holds the device's lock, and the claim is read anew under it. Raises VgpuError, the
    claim is then as it was; RewrittenError where somebody else has set another type.
    """
    paths = context.config.paths
    standing = store.read(paths.state, claim.device)
    world = witnesses.look_around(paths)
    if standing is None or standing.claim_id != claim.claim_id or not is_to_renew(standing, world):
        return
    claim = standing
    address = PciAddress.parse(claim.device)
    current = vendor_vfio.read_current(paths.sysfs, address)
    if current not in (0, claim.profile.id):
        raise RewrittenError(
            f"{claim.device} is carved as {claim.profile.name} ({claim.profile.id}), but has type "
            f"{current} since the reboot; somebody else set it"
        )
    if not current:
        claim = _programmed(context, claim, address, world)
    # Only now: whoever is killed before has the next one find it programmed already.
    proc = paths.proc
    _write(
        context,
        claim._replace(
            boot_id=processes.boot_id(proc) or claim.boot_id,
            since_boot=processes.since_boot(),
            daemon=None,
            namespaces=processes.namespaces(proc),
            error=None,
        ),
    )


def _programmed(context: Context, claim: Claim, address: PciAddress, world: World) -> Claim:
    paths = context.config.paths
    if excluded := {address, PciAddress.parse(claim.gpu)}.intersection(
        context.config.policy.exclude
    ):
        raise RefusedError(
            f"{claim.device} is carved, but {min(excluded)} is excluded by [policy] in the "
            "configuration, so it is not programmed again"
        )
    if user := world.domains.using(claim.device):
        raise RefusedError(
            f"{claim.device} is carved, and can't be programmed again while the running domain "
            f"'{user.name}' ({user.uuid}) has it"
        )
    profile = _profile(context, claim, address)
    if profile != claim.profile:
        claim = claim._replace(profile=profile)
        _write(context, claim)
    vendor_vfio.program(paths.sysfs, address, profile, context.write_guard(claim.device))
    return claim


def _profile(context: Context, claim: Claim, address: PciAddress) -> Profile:
    """What the driver of this boot calls CLAIM's profile; another one may number its types anew."""
    device = vendor_vfio.read_device(context.config.paths.sysfs, address)
    found = profiles.find(claim.profile.name, device.creatable or ())
    if not found:
        raise DeviceError(
            device.error
            or f"{claim.device} is carved as {claim.profile.name}, which the driver doesn't offer "
            "there now; 'virt-vgpu list' shows what else is on its GPU"
        )
    return found[0]


def note_failure(context: Context, claim: Claim, why: str) -> list[str]:
    """Note WHY a carved device could not be programmed again; return what hindered that."""
    try:
        _write(context, claim._replace(error=why))
    except VgpuError as error:
        return [str(error)]
    return []


def _write(context: Context, claim: Claim) -> None:
    """Write CLAIM, carved, over itself, if it still stands and is carved, and isn't the same."""
    state = context.config.paths.state
    with locks.host(state, context.lock_deadline()):
        now = store.read(state, claim.device)
        if now and (now.claim_id, now.phase) == (claim.claim_id, claim.phase) and now != claim:
            store.replace(state, claim)
