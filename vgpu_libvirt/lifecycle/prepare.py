# SPDX-License-Identifier: LGPL-2.1-or-later
"""Giving a starting domain its devices: the hooks `prepare` and `start`, which may refuse."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, NamedTuple

from ..address import PciAddress
from ..claims import locks, store, witnesses
from ..claims.liveness import State
from ..claims.model import Phase
from ..devices import profiles, vendor_vfio
from ..devices.model import Profile
from ..domain.match import match
from ..errors import DeviceError, RefusedError, VgpuError
from ..revert import Revert
from . import learn, suitability
from .release import drop, give_back, keep_visibly

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ..claims.model import Claim, Qemu
    from ..claims.witnesses import World
    from ..devices.model import Device
    from ..domain.match import Wanted
    from ..domain.model import Domain
    from .context import Context

_TRIES = 3  # at locking a set of devices that changed while we waited for their locks


class Start(NamedTuple):
    """One domain's start or arrival, or that it gets a device more; devices' locks are held."""

    context: Context
    domain: Domain
    deadline: float  # time.monotonic() after which nothing busy is tried again
    kept: list[str]  # what an undo could not give back
    seen: list[Profile]  # what the devices listed
    reserves: bool = False  # whether what follows may never come
    qemu: Qemu | None = None  # of a domain that runs already

    def new_claim(self, wanted: Wanted, device: Device, profile: Profile) -> Claim:
        """A fresh claim for this start."""
        claim = self.context.new_claim(
            self.domain, wanted.request.alias, device.address, device.gpu, profile
        )
        return claim._replace(phase=Phase.RESERVED, qemu=self.qemu) if self.reserves else claim


def prepare(context: Context, domain: Domain) -> None:
    """Claim, program and read back every device that DOMAIN asks for: all of them or none.

    Raises VgpuError with the sentence for the user where that can't be.
    """
    wanted = match(domain)
    suitability.check_places(context, domain, wanted)
    with _locked(context, domain, wanted, context.lock_deadline()) as own:
        start = Start(context, domain, context.release_deadline(), [], [])
        for claim in own:
            if not _is_reserved_for(claim, wanted):
                release_leftover(start, claim)
        assign(start, wanted)
    learn.from_lists(context.config.paths, start.seen)  # what hinders it stops no start


def start(context: Context, domain: Domain) -> None:
    """Check that DOMAIN's claims and its devices' types are still as `prepare` left them.

    Raises VgpuError where they aren't: QEMU would die with a riddle, or use another's device.
    """
    paths = context.config.paths
    for wanted in match(domain):
        claim = store.read(paths.state, wanted.device)
        if claim is None or (claim.domain_uuid, claim.alias) != (domain.uuid, wanted.request.alias):
            raise RefusedError(
                f"{wanted.device} is not claimed for '{wanted.request.alias}' of domain "
                f"'{domain.name}' any more"
                + (f" but for {claim.owner}" if claim else "")
                + "; start the domain again"
            )
        current = vendor_vfio.read_current(paths.sysfs, wanted.address)
        if current != claim.profile.id:
            raise RefusedError(
                f"{wanted.device} had {claim.profile.name} ({claim.profile.id}) set for domain "
                f"'{domain.name}', but has type {current} now: somebody else writes to it; find "
                "out who, then start the domain again"
            )


@contextlib.contextmanager
def _locked(
    context: Context, domain: Domain, wanted: tuple[Wanted, ...], deadline: float
) -> Iterator[tuple[Claim, ...]]:
    """Hold the locks of all devices WANTED and of all that DOMAIN still has; yield its claims."""
    state = context.config.paths.state
    devices = {each.device for each in wanted}
    for _ in range(_TRIES):
        held = devices | {claim.device for claim in store.of_domain(state, domain.uuid)}
        with locks.devices(state, held, deadline):
            own = store.of_domain(state, domain.uuid)
            if held.issuperset(claim.device for claim in own):
                yield own
                return
    raise RefusedError(f"the claims of domain '{domain.name}' keep changing; try again")


def _is_reserved_for(claim: Claim, wanted: tuple[Wanted, ...]) -> bool:
    # One with a QEMU was to be plugged into that one: a leftover, whose death is to be proved.
    return (claim.phase, claim.qemu) == (Phase.RESERVED, None) and any(
        (claim.device, claim.alias) == (each.device, each.request.alias) for each in wanted
    )


def release_leftover(start: Start, claim: Claim) -> None:
    """Give back what the domain has from an earlier run. Raises RefusedError."""
    try:
        give_back(start.context, claim, start.deadline)
    except VgpuError as error:
        raise RefusedError(
            f"domain '{start.domain.name}' still has {claim.device} from an earlier run: {error}"
        ) from error


def assign(start: Start, wanted: Iterable[Wanted]) -> list[Claim]:
    """Claim and program each device of WANTED: all of them or none.

    Raises RefusedError, which says too what could not be given back.
    """
    try:
        # Once for all of them: whoever writes looks again, right before it does.
        world = witnesses.look_around(start.context.config.paths)
        with Revert() as undo:
            return [_assign(start, each, world, undo) for each in wanted]
    except VgpuError as error:
        raise RefusedError("; ".join([str(error), *start.kept])) from error


def _assign(start: Start, wanted: Wanted, world: World, undo: Revert) -> Claim:
    """Claim and program one device; UNDO is told how to take it back."""
    paths = start.context.config.paths
    reserved = _make_way(start, wanted, world)
    suitability.check_unused(start.context, start.domain, wanted, world)
    device = vendor_vfio.read_device(paths.sysfs, wanted.address)
    if device.error and (device.type_id is None or device.creatable is None):
        raise DeviceError(f"{device.name} can't be used: {device.error}")
    if device.type_id and reserved and reserved.is_mere_reservation:
        drop(start.context, reserved)  # somebody else set that type meanwhile
        reserved = None
    if reserved and device.type_id == reserved.profile.id:
        profile = reserved.profile
    else:
        if device.type_id:
            _reset_foreign(start, wanted, device, world)
            device = vendor_vfio.read_device(paths.sysfs, wanted.address)
        profile = _profile(start, wanted, device)
    start.seen.extend(device.creatable or ())
    claim = start.new_claim(wanted, device, profile)
    undo.add(lambda: _take_back(start, claim))
    with locks.host(paths.state, start.context.lock_deadline()):
        suitability.check_cordons(start.context, start.domain, wanted, device.gpu)
        # Model: claim_first
        (store.replace if reserved else store.create)(paths.state, claim)
    if device.type_id != profile.id:
        # Model: guard, write, read_back
        guard = start.context.write_guard(device.name)
        vendor_vfio.program(paths.sysfs, device.address, profile, guard)
    if claim.phase is Phase.CLAIMED:
        claim = claim._replace(phase=Phase.CONFIGURED)
        with locks.host(paths.state, start.context.lock_deadline()):
            store.replace(paths.state, claim)
    return claim


def _make_way(start: Start, wanted: Wanted, world: World) -> Claim | None:
    """See to the claim that stands on the device: ours is returned, a dead owner's given back.

    Raises RefusedError, with the owner's name, where the owner isn't provably dead.
    """
    context = start.context
    claim = store.read(context.config.paths.state, wanted.device)
    if claim is None or claim.domain_uuid == start.domain.uuid:
        return claim
    verdict = context.judge(claim, world)
    if verdict.state is State.DEAD:
        try:
            give_back(context, claim, start.deadline)
        except VgpuError as error:
            raise RefusedError(
                f"{wanted.device} still has the vGPU of {claim.owner}, which is dead: {error}"
            ) from error
        return None
    raise RefusedError(
        f"{wanted.device} belongs to {claim.owner}: {verdict.evidence[0]}; run 'virt-vgpu sync', "
        f"which points the hostdev '{wanted.request.alias}' of domain '{start.domain.name}' at "
        "another VF if there is one, then start it again (a snapshot names its own: 'virsh "
        "snapshot-edit' points that at another)"
    )


def _reset_foreign(start: Start, wanted: Wanted, device: Device, world: World) -> None:
    """Clear a type that somebody else set, if the policy says so and nobody can be using it."""
    context = start.context
    paths = context.config.paths
    if context.config.policy.foreign != "reset":
        raise RefusedError(
            f"{device.name} has type {device.type_id}, which vgpu-libvirt didn't set; if nobody "
            f'uses it, write 0 to its nvidia/current_vgpu_type, or set foreign = "reset" in '
            "[policy]"
        )
    if not world.domains.complete:
        raise RefusedError(
            f"{device.name} has type {device.type_id}, which vgpu-libvirt didn't set, and whether "
            f"a domain uses it can't be told: {world.domains.problems[0]}"
        )
    # Claimed under its old type while it is cleared: whoever finds us killed can finish it.
    old = next(iter(profiles.find(str(device.type_id), context.known().profiles)), None)
    old = old or Profile(device.type_id or 0, f"type {device.type_id}")
    claim = start.new_claim(wanted, device, old)
    with locks.host(paths.state, start.context.lock_deadline()):
        store.create(paths.state, claim)
    try:
        guard = context.write_guard(device.name)
        vendor_vfio.clear(paths.sysfs, device.address, old.id, guard, start.deadline)
    finally:
        drop(context, claim)


def _profile(start: Start, wanted: Wanted, device: Device) -> Profile:
    def neighbours() -> str:
        claims = store.read_all(start.context.config.paths.state).readable.values()
        running = [claim for claim in claims if claim.gpu == str(device.gpu)]
        owners = ", ".join(f"{claim.domain_name}: {claim.profile.name}" for claim in running)
        return f"runs {owners}" if owners else ""

    return profiles.resolve(wanted.request.profile, device, start.context.known, neighbours)


def _take_back(start: Start, claim: Claim) -> None:
    """Undo one assignment of this start; what won't clear stays, visibly, for `release`.

    Model: take_back.
    """
    context = start.context
    sysfs = context.config.paths.sysfs
    try:
        # No QEMU can have come of a start that is still in its first hook: ours.
        if vendor_vfio.read_current(sysfs, PciAddress.parse(claim.device)) == 0:
            drop(context, claim)
        else:
            give_back(context, claim, start.deadline, start_is_over=True)
    except VgpuError as error:
        start.kept.append(f"{claim.device} stays claimed until it can be cleared: {error}")
        start.kept.extend(keep_visibly(context, claim, str(error)))
