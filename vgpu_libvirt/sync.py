# SPDX-License-Identifier: LGPL-2.1-or-later
"""Brings the store in line with the world, whatever was missed: hooks that died, or never came.

From files alone, or with what a running libvirt answered (Context.libvirt). Safe beside any number
of hooks, and idempotent. With an empty store it adopts, and never clears.
"""

from __future__ import annotations

import time

from .claims import inventory, locks, store, witnesses
from .claims.liveness import State
from .errors import KeptError, LockTimeoutError, VgpuError
from .lifecycle.carve import is_to_renew, note_failure, renew
from .lifecycle.release import give_back, keep_visibly
from .lifecycle.running import adopt, as_running
from .records import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from .claims.inventory import LiveDomains
    from .claims.model import Claim
    from .claims.store import Claims
    from .claims.witnesses import World
    from .lifecycle.context import Context

# A device lock that is held for longer than this (seconds): somebody is at work on the device.
_BUSY = 0.2


class Kept(NamedTuple):
    """A device whose claim stands, and why."""

    device: str
    reason: str
    is_doubtful: bool  # whether that is anything to see to: its owner isn't simply alive


class Outcome(NamedTuple):
    """What a reconciliation did."""

    released: tuple[str, ...]
    kept: tuple[Kept, ...]
    problems: tuple[str, ...]
    renewed: tuple[str, ...] = ()  # carved devices that were programmed again


def reconcile(context: Context, deadline: float, dry_run: bool = False) -> Outcome:
    """Give back what is provably its owner's no more, keep the rest, adopt what lives unclaimed.

    What is carved is programmed again after a reboot. Begins nothing new after DEADLINE
    (`time.monotonic()`). With DRY_RUN nothing is written, and `released` and `renewed` are what
    would be. Raises StoreError where the claims can't be read.
    """
    claims = store.read_all(context.config.paths.state)
    daemons = (claim.daemon for claim in claims.readable.values())
    world = witnesses.look_around(context.config.paths, *daemons)
    released: list[str] = []
    renewed: list[str] = []
    kept = [Kept(device, reason, True) for device, reason in claims.unreadable.items()]
    problems = [*claims.problems, *world.domains.problems]
    for device, claim in sorted(claims.readable.items()):
        is_lost = is_to_renew(claim, world)
        reason = (
            _renew(context, claim, deadline, dry_run)
            if is_lost
            else _settle(context, claim, world, deadline, dry_run)
        )
        if reason is None:
            (renewed if is_lost else released).append(device)
        else:
            kept.append(reason)
    # To give back takes its time, and a domain may be at its next start by then.
    if not dry_run and (released or _is_behind(claims, world.domains)):
        try:
            problems += _keep_track(context)
        except VgpuError as error:  # what has been given back is still to be told
            problems.append(str(error))
    problems = list(dict.fromkeys(problems))
    return Outcome(tuple(released), tuple(sorted(kept)), tuple(problems), tuple(renewed))


def _settle(
    context: Context, claim: Claim, world: World, deadline: float, dry_run: bool
) -> Kept | None:
    """Give back the device of CLAIM, or say why not."""
    verdict = context.judge(claim, world)
    if verdict.state is not State.DEAD:
        is_doubtful = verdict.state is State.UNKNOWN or claim.error is not None
        if is_doubtful and not dry_run:
            context.tell("kept", claim, verdict.why)
        return Kept(claim.device, verdict.said_of(claim), is_doubtful)
    if dry_run:
        return None
    if time.monotonic() > deadline:
        return Kept(claim.device, "there was no time left to clear it", True)
    try:
        with locks.devices(context.config.paths.state, [claim.device], time.monotonic() + _BUSY):
            give_back(context, claim, min(deadline, context.release_deadline()))
    except LockTimeoutError:
        return Kept(claim.device, "somebody is at work on it just now", False)
    except KeptError as error:
        context.tell("kept", claim, str(error))
        return Kept(claim.device, str(error), True)
    except VgpuError as error:
        hindered = keep_visibly(context, claim, str(error))
        return Kept(claim.device, "; ".join([str(error), *hindered]), True)
    return None


def _renew(context: Context, claim: Claim, deadline: float, dry_run: bool) -> Kept | None:
    """Program the carved device of CLAIM, which a reboot left without a type, or say why not."""
    if dry_run:
        return None
    if time.monotonic() > deadline:
        return Kept(claim.device, "there was no time left to program it again", True)
    try:
        with locks.devices(context.config.paths.state, [claim.device], time.monotonic() + _BUSY):
            renew(context, claim)
    except LockTimeoutError:
        return Kept(claim.device, "somebody is at work on it just now", False)
    except VgpuError as error:
        hindered = note_failure(context, claim, str(error))
        return Kept(claim.device, "; ".join([str(error), *hindered]), True)
    return None


def _is_behind(claims: Claims, domains: LiveDomains) -> bool:
    """Whether CLAIMS lack anything of what runs."""
    live = {domain.uuid: domain for domain in domains.domains}
    return any(domain.devices.difference(claims.readable) for domain in live.values()) or any(
        as_running(claim, live[claim.domain_uuid]) != claim
        for claim in claims.readable.values()
        if claim.domain_uuid in live
    )


def _keep_track(context: Context) -> list[str]:
    """Note in the claims what runs, and claim what runs unclaimed."""
    state = context.config.paths.state
    with locks.host(state, context.lock_deadline()):
        # Looked at again, under the lock: this writes to claims.
        domains = inventory.live_domains(context.config.paths).domains
        live = {domain.uuid: domain for domain in domains}
        claims = store.read_all(state)
        for claim in claims.readable.values():
            domain = live.get(claim.domain_uuid)
            if domain and (noted := as_running(claim, domain)) != claim:
                store.replace(state, noted)
    unclaimed = [domain for domain in live.values() if domain.devices.difference(claims.readable)]
    return [problem for one in unclaimed for problem in adopt(context, one.domain, one)]
