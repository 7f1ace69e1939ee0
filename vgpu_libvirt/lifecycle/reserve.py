# SPDX-License-Identifier: LGPL-2.1-or-later
"""Keeping devices for a start that is yet to come, so that there is no race to lose.

A reservation is a claim without a daemon. `prepare` takes it over; it lapses where none comes.
"""

from __future__ import annotations

import contextlib

from ..claims import locks, store, witnesses
from ..claims.liveness import State
from ..claims.model import Phase
from ..devices import backend
from ..errors import OwnedError, RefusedError, VgpuError
from ..records import TYPE_CHECKING, NamedTuple
from ..revert import Revert
from . import suitability
from .release import drop, give_back

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ..claims.model import Claim
    from ..devices.model import Device, Profile
    from ..domain.match import Wanted
    from ..domain.model import Domain
    from .context import Context


class Wish(NamedTuple):
    """A device that shall be kept for a request."""

    wanted: Wanted
    device: Device  # of a mediated one, where it could be made
    profile: Profile  # as that device lists it


def reserve(context: Context, domain: Domain, wishes: Sequence[Wish]) -> tuple[Claim, ...]:
    """Claim the devices of WISHES for DOMAIN's next start: all of them or none; write to none.

    A device with a type that nobody claimed gets no claim: clearing it is for `prepare`.
    Raises VgpuError, naming the device, where one can't be had.
    """
    state = context.config.paths.state
    made: list[Claim] = []
    names = [wish.wanted.device for wish in wishes]
    with locks.devices(state, names, context.lock_deadline()), Revert() as undo:
        undo.add(lambda: _forget(context, made))
        for wish in wishes:
            _reserve(context, domain, wish, made)
    return tuple(made)


def unreserve(context: Context, claims: Iterable[Claim]) -> list[str]:
    """Drop those of CLAIMS that no start took over; return a sentence for each that stays.

    Whatever `prepare` made of them has another id, and is not ours to touch.
    """
    state = context.config.paths.state
    left = []
    for claim in claims:
        try:
            with locks.devices(state, [claim.device], context.lock_deadline()):
                current = store.read(state, claim.device)
                if current is None or current.claim_id != claim.claim_id:
                    continue
                if current.is_mere_reservation:
                    drop(context, current, "the start that it was for failed")
                else:
                    give_back(context, current, context.release_deadline())
        except VgpuError as error:
            left.append(f"{claim.device} stays claimed: {error}")
    return left


def _reserve(context: Context, domain: Domain, wish: Wish, made: list[Claim]) -> None:
    paths = context.config.paths
    wanted = wish.wanted
    earlier = _make_way(context, domain, wish)
    live = suitability.users(context, [wanted])
    suitability.check_unused(context, domain, wanted, live)
    if backend.read_type(paths.sysfs, wanted.device):
        return
    claim = context.new_claim(
        domain, wanted.request.alias, wanted.device, wish.device.gpu, wish.profile
    )._replace(phase=Phase.RESERVED, domain_id=None)
    made.append(claim)
    with locks.host(paths.state, context.lock_deadline()):
        suitability.check_cordons(context, domain, wanted, wish.device)
        (store.replace if earlier else store.create)(paths.state, claim)
    context.tell("reserved", claim, "for a start to come")


def _make_way(context: Context, domain: Domain, wish: Wish) -> Claim | None:
    """See to the claim that stands on the device: a reservation of ours is returned.

    Raises VgpuError where the owner isn't provably dead.
    """
    claim = store.read(context.config.paths.state, wish.wanted.device)
    if claim is None:
        return None
    if claim.domain_uuid == domain.uuid and claim.is_mere_reservation:
        return claim
    verdict = context.judge(claim, witnesses.look_around(context.config.paths, about=claim))
    if verdict.state is not State.DEAD:
        raise OwnedError(f"{claim.device} belongs to {claim.owner}, which is {verdict}")
    try:
        give_back(context, claim, context.release_deadline())
    except VgpuError as error:
        raise RefusedError(
            f"{claim.device} still has the vGPU of {claim.owner}, which is dead: {error}"
        ) from error
    return None


def _forget(context: Context, claims: Iterable[Claim]) -> None:
    """Drop claims whose devices' locks are held; one that can't be dropped lapses."""
    for claim in claims:
        with contextlib.suppress(VgpuError):
            drop(context, claim, "not all that its start needs could be reserved")
