# SPDX-License-Identifier: LGPL-2.1-or-later
"""What the verbs share that change a domain's definition, or the domain as it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from .. import sides

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ..libvirt_api import Definition

dry_run_option = click.option(
    "--dry-run", is_flag=True, help="Print what would be written, and write nothing."
)
live_option = click.option("--live", is_flag=True, help="Change the running domain.")
config_option = click.option(
    "--config",
    "persistent",
    is_flag=True,
    help="Change the definition of a domain that may run; without --live that is the default.",
)


def print_dry_run(changes: Iterable[tuple[Definition, str | None, str, str | None]]) -> None:
    """Print, for each side, its metadata after, a verb, and the hostdev that this happens to."""
    lines = []
    for side, metadata, verb, hostdev in changes:
        name = sides.name(side)
        lines += [f"{name[0].upper()}{name[1:]} would have in its <metadata>:", ""]
        lines += [metadata or "(no request for a vGPU)", ""]
        if hostdev:
            lines += [f"This would be {verb} its <devices>:", "", hostdev, ""]
    click.echo("\n".join([*lines, "Nothing was written."]))
