# SPDX-License-Identifier: LGPL-2.1-or-later
"""Taking a vGPU from a domain: out of its definition, unplugged from what runs, or both.

A guest lets a device go when it likes. Only when libvirt doesn't list it and nobody has it open is
it given back, by us or by a later `sync`.
"""

from __future__ import annotations

import time

from . import edits, libvirt_api, sides
from .claims import store
from .domain import edit
from .domain.read import parse_domain
from .errors import ClaimUnreadableError, KeptError, LibvirtError
from .lifecycle import hotplug
from .lifecycle.context import Context
from .records import TYPE_CHECKING
from .revert import Revert
from .unfinished import Edit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .claims.model import Claim
    from .config import Config
    from .libvirt_api import Definition

_PAUSE = 0.2  # seconds between two looks at whether the guest has let go


def detach(
    config: Config, both: Sequence[Definition], alias: str, seconds: float
) -> tuple[str | None, list[str]]:
    """Take the vGPU ALIAS from all sides; return the device that was given back, or why none was.

    A running guest has SECONDS to let it go. Raises KeptError where it hasn't by then, LibvirtError
    where libvirt refuses, and then nothing is changed, or said to be.
    """
    live = both[-1] if both[-1].is_live else None
    context = Context(config)
    device = claim = None
    notes: list[str] = []
    if live:
        notes = hotplug.track(context, parse_domain(live.document), alias)
        device, claim = _look_up(context, live, alias)
    removals = [
        Edit(side.uuid, alias, hostdev, None)
        for side in both
        if not side.is_live and (hostdev := edit.find_hostdev(side.document, alias))
    ]
    left: list[str] = []
    try:
        with edits.saved(config.paths.state, both[0], removals), Revert() as undo:
            for side in both:
                if not side.is_live:
                    sides.remove(side, alias, undo, left)
            if live and (hostdev := edit.find_hostdev(live.document, alias)):
                libvirt_api.detach(live, hostdev)
    except LibvirtError as error:
        raise LibvirtError("; ".join([str(error), *left])) from error
    if live is None:
        return None, notes
    if device:
        _wait(context, live, alias, device, claim, seconds)
    kept = hotplug.take_back(context, claim, is_over=False) if claim else []
    sides.forget_request(live, alias)
    if kept:
        raise KeptError(f"'{alias}' of {live.label} is detached, but {'; '.join(kept)}")
    return claim.device if claim else None, notes


def _look_up(context: Context, live: Definition, alias: str) -> tuple[str | None, Claim | None]:
    """The device that a running domain has as ALIAS, and its claim, each if there is one.

    Raises ClaimUnreadableError, since then the device couldn't be given back.
    """
    domain = parse_domain(live.document)
    claims = store.read_all(context.config.paths.state)
    hostdev = domain.hostdev(alias)
    device = str(hostdev.address or hostdev.uuid or "") or None if hostdev else None
    if device in claims.unreadable:
        raise ClaimUnreadableError(claims.unreadable[device])
    for claim in claims.of_domain(domain.uuid):
        if device == claim.device or (device is None and alias == claim.alias):
            return claim.device, claim
    return device, None


def _wait(
    context: Context,
    live: Definition,
    alias: str,
    device: str,
    claim: Claim | None,
    seconds: float,
) -> None:
    """Wait until the guest has let DEVICE go. Raises KeptError where it hasn't after SECONDS."""
    end = time.monotonic() + seconds
    domain = parse_domain(live.document)
    while why := hotplug.why_not_gone(context, domain, device, claim):
        if time.monotonic() >= end:
            raise KeptError(
                f"the guest of {live.label} has not let '{alias}' ({device}) go within "
                f"{seconds:g} s, so it stays; once the guest has, 'virt-vgpu sync' gives it back "
                f"({why})"
                if domain.hostdev(alias)
                else f"'{alias}' ({device}) of {live.label} was being plugged in, and may still "
                f"be; 'virt-vgpu sync' gives it back once that is over ({why})"
            )
        time.sleep(_PAUSE)
