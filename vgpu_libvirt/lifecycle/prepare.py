# SPDX-License-Identifier: LGPL-2.1-or-later
"""Giving a starting domain its devices: the hook `prepare`, which may refuse."""

from __future__ import annotations

import contextlib

from ..claims import locks, store
from ..claims.model import Phase
from ..devices import profiles
from ..domain.match import match
from ..errors import RefusedError
from ..records import TYPE_CHECKING
from . import learn, suitability
from .assign import Start, assign, release_leftover

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..claims.model import Claim
    from ..domain.match import Wanted
    from ..domain.model import Domain
    from .context import Context

_TRIES = 3  # at locking a set of devices that changed while we waited for their locks


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
    # One with a QEMU was to be plugged into that one: a leftover, whose death is to be proved. One
    # with another profile than is asked for by now is a leftover too.
    return (claim.phase, claim.qemu) == (Phase.RESERVED, None) and any(
        (claim.device, claim.alias) == (each.device, each.request.alias)
        and profiles.find(each.request.profile, [claim.profile])
        for each in wanted
    )
