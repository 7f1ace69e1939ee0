# SPDX-License-Identifier: LGPL-2.1-or-later
"""The verbs `carve` and `uncarve`: devices for stacks that give them to domains themselves."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from .. import carving, config, trigger
from ..claims import store
from ..claims.model import Phase
from ..errors import KeptError, RequestError
from ..lifecycle import carve as carver
from ..lifecycle import uncarve as uncarver
from ..survey import look
from . import complete, rights
from .keep import ask_libvirt
from .options import address, addresses, dry_run_option

if TYPE_CHECKING:
    from ..address import PciAddress
    from ..claims.model import Claim
    from ..claims.store import Claims


def _wanted(
    _context: click.Context, _argument: click.Parameter, values: tuple[str, ...]
) -> dict[str, int]:
    wanted: dict[str, int] = {}
    for value in values:
        profile, _, count = value.rpartition("=")
        if not profile or not (count.isascii() and count.isdigit() and int(count)):
            raise click.BadParameter(f"'{value}' is not PROFILE=COUNT, such as L40S-8Q=2")
        if profile in wanted:
            raise click.BadParameter(f"'{profile}' is named twice")
        wanted[profile] = int(count)
    return wanted


@click.command(short_help="Program VFs for stacks that give them to domains themselves.")
@click.option(
    "--gpu",
    metavar="PF",
    required=True,
    callback=address,
    shell_complete=complete.gpus,
    help="The GPU whose VFs to take.",
)
@click.argument("wanted", metavar="PROFILE=COUNT...", nargs=-1, required=True, callback=_wanted)
@click.option(
    "--total",
    is_flag=True,
    help="COUNT in all, instead of COUNT more: done again, it does nothing.",
)
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print the devices as Nova's [pci] device_spec takes them, on one line.",
)
@dry_run_option
def carve(
    gpu: PciAddress, wanted: dict[str, int], total: bool, as_json: bool, dry_run: bool
) -> None:
    """Program COUNT free VFs of a GPU with each PROFILE, and keep them so.

    They are for domains that don't ask for a vGPU, as those of OpenStack Nova with managed='no': no
    hook hands them out or clears them, and after a reboot they are programmed again, until
    'uncarve'. All of them are carved, or none. Run again, it carves COUNT more; with --total only
    what is missing of COUNT, and --json prints those that were carved before, too.
    """
    settings = config.load()
    if not dry_run:
        rights.check_root(settings.paths, "carve")
    plan = carving.plan(gpu, wanted, settings.policy.placement, look(settings).host, total)
    if not dry_run and plan.pieces:
        carver.carve(settings, plan.pieces)
        trigger.touch(settings.paths)  # definitions that point there should point elsewhere
    if as_json:
        spec = [{"address": device, "managed": "no"} for device in plan.devices]
        click.echo(json.dumps(spec))
        return
    be = "would be" if dry_run else "is"
    for piece in plan.pieces:
        click.echo(f"{piece.device.name} {be} carved as {piece.profile.name}.")
    if not plan.pieces:
        click.echo(f"Nothing had to be carved: {', '.join(plan.devices)} are.")


@click.command(short_help="Give carved VFs back.")
@click.argument(
    "targets",
    metavar="DEVICE|GPU...",
    nargs=-1,
    required=True,
    callback=addresses,
    shell_complete=complete.carved,
)
@dry_run_option
def uncarve(targets: list[PciAddress], dry_run: bool) -> None:
    """Clear carved devices, or all those of a GPU, and forget them.

    What a domain has, or may have, stays carved, and is named; the others go.
    """
    settings = config.load()
    if not dry_run:
        rights.check_root(settings.paths, "uncarve")
    claims = _carved(store.read_all(settings.paths.state), targets)
    if dry_run:
        why = {claim.device: uncarver.hindrance(settings, claim) for claim in claims}
        done, kept = tuple(name for name in why if not why[name]), tuple(filter(None, why.values()))
    else:
        done, kept = uncarver.uncarve(settings, claims, lambda ids: ask_libvirt(settings, ids))
    for device in done:
        click.echo(f"{device} {'would not be' if dry_run else 'is not'} carved any more.")
    if not dry_run:
        trigger.touch(settings.paths)
    if kept:
        raise KeptError("; ".join(kept))


def _carved(claims: Claims, targets: list[PciAddress]) -> tuple[Claim, ...]:
    """The claims on what TARGETS name that are no domain's. Raises RequestError."""
    found: dict[str, Claim] = {}
    for target in targets:
        name = str(target)
        here = {
            claim.device: claim
            for claim in claims.readable.values()
            if claim.is_no_domains and name in (claim.device, claim.gpu)
        }
        if not here:
            raise RequestError(_not_carved(claims, name))
        found |= here
    return tuple(found[device] for device in sorted(found))


def _not_carved(claims: Claims, name: str) -> str:
    if why := claims.unreadable.get(name):
        return why
    claim = claims.readable.get(name)
    if claim := claims.readable.get(name):
        why = f"it belongs to {claim.owner}; 'virt-vgpu release' gives it back"
    else:
        carved = (c.device for c in claims.readable.values() if c.phase is Phase.CARVED)
        why = f"carved: {', '.join(carved) or 'nothing'}"
    return f"nothing is carved at {name}; {why}"
