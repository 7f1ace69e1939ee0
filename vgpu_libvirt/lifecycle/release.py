# SPDX-License-Identifier: LGPL-2.1-or-later
"""Taking devices back: the hook `release`, and the one way in which any claim ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..address import PciAddress
from ..claims import locks, store, witnesses
from ..claims.liveness import State
from ..claims.model import Phase
from ..devices import vendor_vfio
from ..errors import KeptError, VgpuError

if TYPE_CHECKING:
    from ..claims.model import Claim
    from ..domain.model import Domain
    from .context import Context


def release(context: Context, domain: Domain) -> list[str]:
    """Give back what the store says this domain has; return a sentence for each device kept.

    Never by the XML's addresses: libvirt runs this also for a start that failed because the device
    belongs to somebody else. It proves no death either, so the guards decide.
    """
    deadline = context.release_deadline()
    problems = []
    for claim in store.read_all(context.config.paths.state).of_domain(domain.uuid):
        try:
            with locks.devices(context.config.paths.state, [claim.device], context.lock_deadline()):
                give_back(context, claim, deadline)
        except VgpuError as error:
            problems.append(f"{claim.device} stays claimed: {error}")
            problems += keep_visibly(context, claim, str(error))
    return problems


def give_back(context: Context, claim: Claim, deadline: float, start_is_over: bool = False) -> None:
    """Clear a device and drop its claim, if CLAIM still stands and its owner is provably dead.

    The caller holds the device's lock, and the claim and the witnesses are read anew under it.
    While the driver is busy, no new attempt is begun after DEADLINE (`time.monotonic()`).
    Raises KeptError where the owner is alive or can't be known to be dead, and what reading,
    guarding and clearing a device may raise; the claim is then as it was.
    """
    paths = context.config.paths
    if not _stands(context, claim):
        return
    verdict = context.judge(claim, witnesses.look_around(paths), start_is_over)
    if verdict.state is not State.DEAD:
        raise KeptError(f"{claim.owner} is {verdict}")
    address = PciAddress.parse(claim.device)
    # A device of somebody else who lives is left alone; so is one that is gone with its type.
    if verdict.other is None and vendor_vfio.exists(paths.sysfs, address):
        vendor_vfio.clear(
            paths.sysfs,
            address,
            claim.profile.id,
            context.write_guard(claim.device),
            deadline,
            may_be_in_use=True,
        )
    drop(context, claim)


def drop(context: Context, claim: Claim) -> None:
    """Remove CLAIM if it is still the one in the store. The caller holds the device's lock."""
    state = context.config.paths.state
    with locks.host(state, context.lock_deadline()):
        current = store.read(state, claim.device)
        if current and current.claim_id == claim.claim_id:
            store.drop(state, claim.device)


def keep_visibly(context: Context, claim: Claim, why: str) -> list[str]:
    """Mark CLAIM `release-pending` with the reason, for a later sync; return what hindered it.

    The orphaned hook of a daemon that is gone marks nothing: the domain may run under a new one.
    """
    if context.daemon is not None and not context.daemon_runs:
        return []
    state = context.config.paths.state
    try:
        with locks.host(state, context.lock_deadline()):
            current = store.read(state, claim.device)
            if current and current.claim_id == claim.claim_id:
                pending = current._replace(phase=Phase.RELEASE_PENDING, error=why)
                store.replace(state, pending)
    except VgpuError as error:
        return [str(error)]
    return []


def _stands(context: Context, claim: Claim) -> bool:
    current = store.read(context.config.paths.state, claim.device)
    return current is not None and current.claim_id == claim.claim_id
