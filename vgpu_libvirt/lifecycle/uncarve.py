# SPDX-License-Identifier: LGPL-2.1-or-later
"""Giving carved devices back.

A domain that doesn't ask starts on a carved device without a word to us: no claim knows that it is
between `prepare` and QEMU. So first the claim says that the device is to be given back, which the
hooks of later starts refuse; then libvirt is asked who is active with it, with no lock held; then
the guards decide as ever. Who is killed in between leaves a release for `sync` to finish.
"""

from __future__ import annotations

import os

from ..claims import locks, processes, store, witnesses
from ..claims.liveness import State
from ..claims.model import Phase
from ..errors import InUseError, KeptError, RefusedError, VgpuError
from ..records import TYPE_CHECKING, NamedTuple
from .carve import ourselves
from .context import Context
from .release import give_back, keep_visibly

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ..claims.liveness import Answer
    from ..claims.model import Claim, Process
    from ..config import Config

    # Asks a libvirt that runs about the claims with these ids; None: none runs.
    Ask = Callable[[frozenset[str]], Answer | None]


class Outcome(NamedTuple):
    """The devices that were given back, and a sentence for each that stays."""

    done: tuple[str, ...]
    kept: tuple[str, ...]


class _Asked(NamedTuple):
    """A claim as it was, and as it says now that its device is to be given back."""

    before: Claim
    now: Claim


def hindrance(config: Config, claim: Claim) -> str:
    """What stands against giving the device of CLAIM back, as far as files show; empty: nothing."""
    context = Context(config)
    world = witnesses.look_around(config.paths)
    verdict = context.judge(claim._replace(phase=Phase.RELEASE_PENDING), world, start_is_over=True)
    if verdict.state is State.DEAD:
        return ""
    return f"{claim.device} stays: {verdict.said_of(claim)}"


def uncarve(config: Config, claims: Iterable[Claim], ask: Ask) -> Outcome:
    """Clear the devices of CLAIMS, none of which is a domain's, and drop them.

    What a domain has, or may have, stays as it was. Raises RefusedError where the host's daemons
    can't be told.
    """
    kept: list[str] = []
    asked: list[_Asked] = []
    witness = _witness(config)
    for claim in claims:
        if why := hindrance(config, claim):
            kept.append(why)
            continue
        try:
            if now := _mark(config, claim, witness):
                asked.append(_Asked(claim, now))
        except VgpuError as error:
            kept.append(f"{claim.device} stays: {error}")
    answer = ask(frozenset(each.now.claim_id for each in asked)) if asked else None
    context = Context(config, libvirt=answer)
    done = []
    for each in asked:
        if why := _give_back(context, each):
            kept.append(why)
        else:
            done.append(each.now.device)
    return Outcome(tuple(done), tuple(kept))


def _witness(config: Config) -> Process:
    """Who may be starting a domain now: libvirt's daemon; where none runs only we are at work."""
    proc = config.paths.proc
    try:
        return processes.running_daemon(proc) or ourselves(config)
    except OSError as error:
        raise RefusedError(
            f"the processes in {proc} can't be listed: {os.strerror(error.errno or 0)}"
        ) from error


def _mark(config: Config, claim: Claim, witness: Process) -> Claim | None:
    """Have CLAIM say that its device is to be given back; None: it stands there no more."""
    paths = config.paths
    context = Context(config)
    deadline = context.lock_deadline()
    with locks.devices(paths.state, [claim.device], deadline), locks.host(paths.state, deadline):
        now = store.read(paths.state, claim.device)
        if now is None or now.claim_id != claim.claim_id:
            return None
        if now.phase is not Phase.CARVED:
            return now  # who carved it, or wanted it back, was killed
        # A new id: what libvirt answered somebody about the old one says nothing about this one.
        marked = now._replace(
            phase=Phase.RELEASE_PENDING,
            claim_id=os.urandom(16).hex(),
            boot_id=processes.boot_id(paths.proc) or now.boot_id,
            since_boot=processes.since_boot(),
            daemon=witness,
            namespaces=processes.namespaces(paths.proc),
        )
        store.replace(paths.state, marked)
        return marked


def _give_back(context: Context, asked: _Asked) -> str:
    """Clear one device; else put the claim back as it was, and return why. Empty: it is done."""
    state = context.config.paths.state
    claim = asked.now
    try:
        with locks.devices(state, [claim.device], context.lock_deadline()):
            is_over = context.libvirt is None
            try:
                give_back(context, claim, context.release_deadline(), start_is_over=is_over)
            except (KeptError, InUseError) as error:
                _put_back(context, asked)
                return f"{claim.device} stays: {error}"
    except VgpuError as error:
        hindered = keep_visibly(context, claim, str(error))
        return "; ".join([f"{claim.device} stays until it can be cleared: {error}", *hindered])
    return ""


def _put_back(context: Context, asked: _Asked) -> None:
    state = context.config.paths.state
    with locks.host(state, context.lock_deadline()):
        now = store.read(state, asked.now.device)
        if now and now.claim_id == asked.now.claim_id and asked.before.phase is Phase.CARVED:
            store.replace(state, asked.before)
