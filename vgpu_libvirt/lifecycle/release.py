# SPDX-License-Identifier: LGPL-2.1-or-later
"""Taking devices back: the hook `release`, and the one way in which any claim ends."""

from __future__ import annotations

from ..claims import locks, store, witnesses
from ..claims.liveness import State
from ..claims.model import Phase
from ..devices import backend
from ..errors import KeptError, VgpuError
from ..records import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..claims.liveness import Verdict
    from ..claims.model import Claim
    from ..claims.witnesses import World
    from ..domain.model import Domain
    from .context import Context


_FIRST_PID_NAMESPACE = 0xEFFFFFFC  # the host's own, which sees all processes; Linux fixes it


def release(context: Context, domain: Domain) -> list[str]:
    """Give back what the store says this domain has; return a sentence for each device kept.

    Never by the XML's addresses: libvirt runs this also for a start that failed because the device
    belongs to somebody else. It proves no death either, so the guards decide.
    """
    deadline = context.release_deadline()
    problems = []
    for claim in store.of_domain(context.config.paths.state, domain.uuid):
        try:
            with locks.devices(context.config.paths.state, [claim.device], context.lock_deadline()):
                give_back(context, claim, deadline)
        except VgpuError as error:
            problems.append(f"{claim.device} stays claimed: {error}")
            problems += keep_visibly(context, claim, str(error))
    return problems


def give_back(
    context: Context,
    claim: Claim,
    deadline: float,
    start_is_over: bool = False,
    by_force: bool = False,
) -> None:
    """Clear a device and drop its claim, if CLAIM still stands and its owner is provably dead.

    The caller holds the device's lock, and the claim and the witnesses are read anew under it.
    While the driver is busy, no new attempt is begun after DEADLINE (`time.monotonic()`). BY_FORCE:
    a person vouches for the death that we can't prove; every other guard stands.
    Raises KeptError where the owner is alive or can't be known to be dead, and what reading,
    guarding and clearing a device may raise; the claim is then as it was.
    """
    paths = context.config.paths
    # Model: look_again. Its QEMU may have been noted in it since.
    standing = _standing(context, claim)
    if standing is None:
        return
    claim = standing
    # Model: see_daemon, then see_others.
    world = witnesses.look_around(paths, claim.daemon, about=claim)
    verdict = context.judge(claim, world, start_is_over)
    if verdict.state is not State.DEAD:
        hindrance = force_hindered_by(claim, verdict, world) if by_force else ""
        if not by_force or hindrance:
            raise KeptError(f"{verdict.said_of(claim)}{hindrance}")
    # A device of somebody else who lives is left alone; so is one that is gone with its type, and
    # one that was only reserved: what type it has we didn't write.
    wrote = not claim.is_mere_reservation
    # To libvirt, and a QEMU that died before `started` was run may have had it open.
    was_given = claim.phase in (Phase.CONFIGURED, Phase.RELEASE_PENDING)
    if verdict.other is None and wrote and backend.exists(paths.sysfs, claim.device):
        # Model: guard, write_0, read_back_0.
        backend.clear(
            paths.sysfs,
            claim.device,
            claim.gpu,
            claim.profile,
            _force_guard(context, claim)
            if by_force
            else context.write_guard(claim.device, world.handles),
            deadline,
            may_be_in_use=True,
            was_used=claim.qemu is not None or (was_given and not start_is_over),
        )
    drop(context, claim, verdict.why)  # Model: drop


def _force_guard(context: Context, claim: Claim) -> Callable[[], None]:
    """The guard of a write by force, which looks at everything again, and last at who has it open.

    The start that somebody thought dead may have become a QEMU a moment ago.
    """
    check = context.write_guard(claim.device)

    def look_again() -> None:
        world = witnesses.look_around(context.config.paths, about=claim)
        verdict = context.judge(claim, world)
        is_dead = verdict.state is State.DEAD and verdict.other is None
        hindrance = "" if is_dead else force_hindered_by(claim, verdict, world)
        if hindrance or _standing(context, claim) is None:
            raise KeptError(f"{verdict.said_of(claim)}{hindrance}")
        check()

    return look_again


def force_hindered_by(claim: Claim, verdict: Verdict, world: World) -> str:
    """What stands against giving back by force, as the rest of a sentence; empty: nothing.

    Who has it open is looked at right before the write, as ever.
    """
    if verdict.state is State.ALIVE:
        return "; not even --force takes a device from the living"
    if not world.domains.complete and not backend.is_mdev(claim.device):
        return "; while the list of running domains is incomplete, not even --force clears a device"
    if user := world.domains.using(claim.device):
        return f"; and the running domain '{user.name}' ({user.uuid}) has the device"
    theirs, ours = claim.namespaces.pid, world.namespaces.pid
    is_blind = ours not in (theirs, _FIRST_PID_NAMESPACE) and claim.boot_id == world.boot_id
    if world.handles.unknown or (is_blind and theirs is not None):
        return "; and who has it open can't be told from here"
    return ""


def drop(context: Context, claim: Claim, why: str) -> None:
    """Remove CLAIM if it is still the one in the store, and tell WHY.

    The caller holds the device's lock.
    """
    state = context.config.paths.state
    with locks.host(state, context.lock_deadline()):
        current = _standing(context, claim)
        if current:
            store.drop(state, claim.device)
    if current:
        context.tell("lapsed" if current.phase is Phase.RESERVED else "released", current, why)


def keep_visibly(context: Context, claim: Claim, why: str) -> list[str]:
    """Mark CLAIM `release-pending` with the reason, for a later sync; return what hindered it.

    A mere reservation stays one, which lapses; and what has been carved by now stays carved.
    The orphaned hook of a daemon that is gone marks nothing: the domain may run under a new one.
    """
    if context.daemon is not None and not context.daemon_runs:
        return []
    state = context.config.paths.state
    try:
        with locks.host(state, context.lock_deadline()):
            current = _standing(context, claim)
            if current:
                stays = current.is_mere_reservation or current.phase is Phase.CARVED
                phase = current.phase if stays else Phase.RELEASE_PENDING
                store.replace(state, current._replace(phase=phase, error=why))
    except VgpuError as error:
        return [str(error)]
    if current and (current.phase, current.error) != (phase, why):  # not what was told before
        context.tell("release-pending" if phase is Phase.RELEASE_PENDING else "kept", current, why)
    return []


def _standing(context: Context, claim: Claim) -> Claim | None:
    """CLAIM as it is in the store now; None where it stands there no more."""
    current = store.read(context.config.paths.state, claim.device)
    return current if current and current.claim_id == claim.claim_id else None
