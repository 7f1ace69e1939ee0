# SPDX-License-Identifier: LGPL-2.1-or-later
"""The verb `start`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from .. import by_sync, config, libvirt_api, starting
from . import complete, rights
from .options import dry_run_option

if TYPE_CHECKING:
    from ..choosing import Place


@click.command(short_help="Start a domain, its vGPUs on devices that are free.")
@click.argument("domain", shell_complete=complete.domains)
@click.option("--paused", is_flag=True, help="Leave its CPUs stopped, for 'virsh resume'.")
@dry_run_option
def start(domain: str, paused: bool, dry_run: bool) -> None:
    """Start DOMAIN with each of its vGPUs on a device that can serve it now.

    DOMAIN is a name or UUID. Its hostdevs are pointed there first; a device that does for its
    vGPU stays. Says which devices, and why these.
    """
    settings = config.load()
    with libvirt_api.connect(settings.uri) as connection:
        if dry_run:
            definition, places = starting.plan(settings, connection, domain)
            click.echo(
                f"{definition.label} would start with {_named(places)}. Nothing was written."
            )
            return
        # Who may not reserve devices has the system's sync find them.
        way = starting if rights.is_root(settings.paths) else by_sync
        definition, places, notes = way.start(settings, connection, domain, paused)
    state = "is started, and paused" if paused else "runs"
    click.echo(f"{definition.label} {state}, with {_named(places)}.")
    for note in notes:
        click.echo(f"Note: {note}.", err=True)


def _named(places: tuple[Place, ...]) -> str:
    return "; ".join(
        f"'{place.request.alias}' ({place.profile.name}) at {place.source} of GPU "
        f"{place.device.gpu}, since {place.why}"
        for place in places
    )
