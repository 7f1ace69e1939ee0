# SPDX-License-Identifier: LGPL-2.1-or-later
"""The last look before QEMU runs: the hook `start`, which may refuse."""

from __future__ import annotations

from ..claims import store
from ..devices import backend
from ..domain.match import match
from ..errors import RefusedError
from ..records import TYPE_CHECKING

if TYPE_CHECKING:
    from ..domain.model import Domain
    from .context import Context


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
        current = backend.read_type(paths.sysfs, wanted.device)
        if current != claim.profile.id:
            raise RefusedError(
                f"{wanted.device} had {claim.profile.name} ({claim.profile.id}) set for domain "
                f"'{domain.name}', but has type {current} now: somebody else writes to it; find "
                "out who, then start the domain again"
            )
