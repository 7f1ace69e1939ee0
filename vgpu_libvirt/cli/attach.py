# SPDX-License-Identifier: LGPL-2.1-or-later
"""The verb `attach`: one more vGPU for a domain's definition, or for a domain that runs."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import click

from .. import attaching, config, edits, libvirt_api, sides, trigger
from ..claims import store
from ..domain import edit
from ..domain.model import ALIAS_PREFIX, Request
from ..domain.read import CHOICES
from ..errors import RequestError
from ..lifecycle import learn
from . import complete, editing
from .options import address

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..address import PciAddress
    from ..config import Config
    from ..libvirt_api import Definition

_ALIAS = re.compile(rf"{ALIAS_PREFIX}[A-Za-z0-9_-]+", re.ASCII)  # libvirt takes no others


def _alias(_context: click.Context, _option: click.Parameter, value: str | None) -> str | None:
    if value is not None and not _ALIAS.fullmatch(value):
        raise click.BadParameter(
            f"'{value}' is no alias that libvirt keeps; begin it with '{ALIAS_PREFIX}' and use "
            "letters, digits, '-' and '_'"
        )
    return value


@click.command(short_help="Give a domain a vGPU, in its definition or while it runs.")
@click.argument("domain", shell_complete=complete.domains)
@click.option(
    "--profile",
    required=True,
    shell_complete=complete.profiles,
    help="Full name, short name or id of the vGPU's profile.",
)
@click.option(
    "--gpu",
    metavar="ADDRESS",
    callback=address,
    shell_complete=complete.gpus,
    help="Take a device of this GPU only.",
)
@click.option("--alias", callback=_alias, help="The hostdev's alias.  [default: ua-vgpu0, ...]")
@click.option("--placement", type=click.Choice(CHOICES["placement"]), help="Instead of [policy]'s.")
@click.option("--numa", type=click.Choice(CHOICES["numa"]), help="The domain's NUMA nodes.")
@click.option("--apart", is_flag=True, help="Not on the GPU of the domain's other vGPUs.")
@click.option("--together", is_flag=True, help="On the GPU of the domain's other vGPUs.")
@editing.live_option
@editing.config_option
@editing.dry_run_option
def attach(
    domain: str,
    profile: str,
    alias: str | None,
    live: bool,
    persistent: bool,
    dry_run: bool,
    **wishes: PciAddress | str | bool,
) -> None:
    """Ask for a vGPU in the definition of DOMAIN, and point a hostdev at a device for it.

    DOMAIN is a name or UUID. While it runs, --live plugs the vGPU in at once, until it ends;
    --config is for its next start.
    """
    settings = config.load()
    is_read = dry_run or (live and not persistent)  # the definition, and not written
    with (
        libvirt_api.connect(settings.uri) as connection,
        edits.opened(settings, connection, domain, is_read) as definition,
    ):
        both = sides.of(definition, live, persistent)
        for side in both:
            sides.parsed(side)
        request = _request(_new_alias(settings, both, alias), profile, wishes)
        if dry_run:
            _print_dry_run(both, attaching.choose(settings, connection, both, request))
            return
        notes: list[str] = []
        if live:
            choice, notes = attaching.plug(settings, connection, both, request)
            trigger.touch(settings.paths)  # other definitions may point there
        else:
            choice = attaching.choose(settings, connection, both, request)
            attaching.define(both[0], choice)
    learn.from_inventory(settings, choice.inventory)  # who may not write there needn't
    gets = "has" if live else "gets"
    when = "now" if live else "when the domain starts"
    if live and persistent:
        when = "now, and when the domain starts again"
    click.echo(
        f"'{request.alias}' of {both[0].label} is at {choice.source} of GPU "
        f"{choice.device.gpu}, and {gets} {choice.request.profile} {when}. Why there: {choice.why}."
    )
    for note in notes:
        click.echo(f"Note: {note}.", err=True)


def _new_alias(settings: Config, both: Sequence[Definition], wanted: str | None) -> str:
    """An alias that neither side has; nor has a device that isn't given back yet, for what runs."""
    asked = {alias for side in both for alias in _asked(side)}
    taken = asked.union(*(edit.device_aliases(side.document) for side in both))
    if wanted is None:
        if both[-1].is_live:
            claims = store.of_domain(settings.paths.state, both[-1].uuid)
            taken |= {claim.alias for claim in claims}
        numbers = range(len(taken) + 1)
        return next(name for n in numbers if (name := f"{ALIAS_PREFIX}vgpu{n}") not in taken)
    if wanted in taken:
        what = "asks for a vGPU at" if wanted in asked else "has a device with the alias"
        raise RequestError(
            f"{both[0].label} {what} '{wanted}' already; choose another alias, or run "
            f"'virt-vgpu detach' with that one first"
        )
    return wanted


def _asked(side: Definition) -> tuple[str, ...]:
    return edit.requested_aliases(edit.metadata(side.document))


def _request(alias: str, profile: str, wishes: dict[str, PciAddress | str | bool]) -> Request:
    """The request for what the options say; a flag's word is "gpu"."""
    said = {name: "gpu" if value is True else value for name, value in wishes.items() if value}
    return Request(alias, profile, **said)  # type: ignore[arg-type]


def _print_dry_run(both: Sequence[Definition], choice: attaching.Choice) -> None:
    request = choice.request
    hostdev = edit.hostdev(request.alias, choice.source)
    editing.print_dry_run(
        (side, edit.with_request(edit.metadata(side.document), request), "added to", hostdev)
        for side in both
    )
