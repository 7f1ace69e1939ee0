# SPDX-License-Identifier: LGPL-2.1-or-later
"""Traps about who owns what; pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..claims.liveness import State
from ..claims.model import Phase
from ..report import mismatch
from .findings import Symptom

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..claims.model import Claim
    from .sight import Sight

_SYNC = "run 'virt-vgpu sync', which gives it back once its owner is provably gone"


def claim_unreadable(sight: Sight) -> Iterator[Symptom]:
    """It protects its device, so nobody gets that until it is mended."""
    for device, why in sorted(sight.seen.host.claims.unreadable.items()):
        if not any(why in problem for problem in sight.store_problems):
            yield Symptom(
                device,
                why,
                "restore the file, or, if you know that nothing uses the device, remove it and "
                "clear the device",
            )


def claim_store(sight: Sight) -> Iterator[Symptom]:
    """The store as a whole, and files in it that are no claims."""
    for problem in sight.store_problems:
        yield Symptom(f"{sight.config.paths.state}/claims", problem, "see to that directory")


def release_pending(sight: Sight) -> Iterator[Symptom]:
    """What should have been given back, and couldn't be."""
    for claim in _claims(sight):
        if claim.phase is Phase.RELEASE_PENDING:
            yield Symptom(
                claim.device,
                f"{claim.device} waits to be given back by {claim.owner}: "
                f"{claim.error or 'its owner is not provably gone'}",
                f"{_SYNC}; if you know that it is gone, 'virt-vgpu release --force {claim.device}'",
            )


def claim_error(sight: Sight) -> Iterator[Symptom]:
    """What went wrong with a device that still has its owner."""
    for claim in _claims(sight):
        if claim.error and claim.phase is not Phase.RELEASE_PENDING:
            yield Symptom(
                claim.device,
                f"the claim of {claim.owner} on {claim.device} has an error: {claim.error}",
                "run 'virt-vgpu sync', and see what 'virt-vgpu status' says then",
            )


def claim_rewritten(sight: Sight) -> Iterator[Symptom]:
    """A type that isn't the claim's: somebody else writes to the device."""
    for device in sight.seen.host.inventory.devices:
        claim = sight.seen.host.claims.readable.get(device.name)
        if claim and (wrong := mismatch(device, claim, sight.seen)):
            yield Symptom(
                device.name,
                wrong,
                "find out who writes to nvidia/current_vgpu_type (other hooks, other tools), and "
                "let it keep off",
            )


def claim_elsewhere(sight: Sight) -> Iterator[Symptom]:
    """A claim on a device that isn't there, or isn't ours to use."""
    for name, why in sight.seen.elsewhere.items():
        claim = sight.seen.host.claims.readable.get(name)
        if claim:
            yield Symptom(name, f"{claim.owner} has a claim on {name}, {why}", _SYNC)


def claim_of_the_dead(sight: Sight) -> Iterator[Symptom]:
    """Not given back yet, though it can be."""
    for claim in _claims(sight):
        verdict = sight.seen.verdicts[claim.device]
        if verdict.state is State.DEAD and claim.phase is not Phase.RELEASE_PENDING:
            yield Symptom(
                claim.device,
                f"{claim.device} is still claimed by {claim.owner}, which is provably gone",
                "run 'virt-vgpu sync', or wait for the next one",
            )


def inventory_incomplete(sight: Sight) -> Iterator[Symptom]:
    """While the running domains can't all be told, nothing is given back."""
    if sight.is_root:
        for problem in sight.seen.world.domains.problems:
            yield Symptom(
                f"{sight.config.paths.libvirt_run}/qemu",
                f"which domains run can't be told, so no vGPU is given back: {problem}",
                "restart libvirtd or virtqemud, which writes these files anew; guests run on",
            )


def leftover_unreadable(sight: Sight) -> Iterator[Symptom]:
    """A cordon that doesn't hold, or a catalogue that names nothing."""
    for problem in sight.leftovers:
        yield Symptom(sight.config.paths.state, problem, "see to that file")


def _claims(sight: Sight) -> list[Claim]:
    return [claim for _, claim in sorted(sight.seen.host.claims.readable.items())]
