# SPDX-License-Identifier: LGPL-2.1-or-later
"""The verb `detach`: a vGPU out of a domain's definition, or out of a domain that runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from .. import config, detaching, edits, libvirt_api, sides, trigger
from ..claims import store
from ..devices import vendor_vfio
from ..devices.mdev_life import mdev_uuid
from ..domain import edit
from ..domain.read import parse_domain
from ..errors import RequestError
from . import complete, editing, rights

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..config import Config
    from ..libvirt_api import Definition

_SECONDS = 30.0


@click.command(short_help="Take a vGPU from a domain, out of its definition or while it runs.")
@click.argument("domain", shell_complete=complete.domains)
@click.option("--alias", help="Which vGPU, where the domain has several.")
@editing.live_option
@editing.config_option
@click.option(
    "--timeout",
    type=click.FloatRange(min=0),
    default=_SECONDS,
    show_default=True,
    metavar="SECONDS",
    help="With --live: how long the guest has to let go.",
)
@editing.dry_run_option
def detach(
    domain: str,
    alias: str | None,
    live: bool,
    persistent: bool,
    timeout: float,
    dry_run: bool,
) -> None:
    """Remove a vGPU's request and its hostdev from the definition of DOMAIN.

    DOMAIN is a name or UUID. While it runs, --live asks the guest to let the vGPU go, and gives the
    device back once it has; --config is for its next start.
    """
    settings = config.load()
    is_read = dry_run or (live and not persistent)  # the definition, and not written
    with (
        libvirt_api.connect(settings.uri) as connection,
        edits.opened(settings, connection, domain, is_read) as definition,
    ):
        both = sides.of(definition, live, persistent)
        name = alias or _only(settings, both)
        _check(settings, both, name)
        if dry_run:
            editing.print_dry_run(
                (
                    side,
                    sides.without(edit.metadata(side.document), name),
                    "removed from",
                    edit.find_hostdev(side.document, name),
                )
                for side in both
            )
            return
        if live:
            rights.check_root(settings.paths, "give devices back")
        device, notes = detaching.detach(settings, both, name, timeout)
    if live:
        trigger.touch(settings.paths)  # others may be waiting for the device
    given_back = f"; {device} was given back" if device else ""
    click.echo(f"{both[0].label} has no vGPU '{name}' any more{given_back}.")
    for note in notes:
        click.echo(f"Note: {note}.", err=True)


def _asked(side: Definition) -> tuple[str, ...]:
    return edit.requested_aliases(edit.metadata(side.document))


def _claimed(settings: Config, both: Sequence[Definition]) -> list[str]:
    """The aliases of what a running domain has or had, as our claims say."""
    if not both[-1].is_live:
        return []
    claims = store.of_domain(settings.paths.state, both[-1].uuid)
    return [claim.alias for claim in claims]


def _only(settings: Config, both: Sequence[Definition]) -> str:
    label = both[0].label
    asked = dict.fromkeys(
        [*(alias for side in both for alias in _asked(side)), *_claimed(settings, both)]
    )
    if len(asked) == 1:
        return next(iter(asked))
    if asked:
        raise RequestError(
            f"{label} asks for several vGPUs: {', '.join(asked)}; say which with --alias"
        )
    raise RequestError(
        f"{label} asks for no vGPU; a hostdev that is there nevertheless can be named with --alias"
    )


def _check(settings: Config, both: Sequence[Definition], alias: str) -> None:
    """Check that a side has the vGPU, and that no hostdev without a request is a NIC's."""
    is_known = alias in _claimed(settings, both)
    for side in both:
        if alias in _asked(side):
            is_known = True
        elif edit.find_hostdev(side.document, alias):
            _check_lonely_hostdev(settings, side, alias)
            is_known = True
    if not is_known:
        asked = dict.fromkeys(name for side in both for name in _asked(side))
        raise RequestError(
            f"{both[0].label} has no vGPU '{alias}'; it asks for {', '.join(asked) or 'none'}"
        )


def _check_lonely_hostdev(settings: Config, side: Definition, alias: str) -> None:
    """Check that the hostdev ALIAS, which no request goes with, is a vGPU's and not a NIC's."""
    hostdev = parse_domain(side.document).hostdev(alias)
    sysfs = settings.paths.sysfs
    address = hostdev.address if hostdev else None
    if address and vendor_vfio.exists(sysfs, address) and vendor_vfio.is_vgpu_vf(sysfs, address):
        return
    if hostdev and hostdev.uuid == mdev_uuid(side.uuid, alias):
        return  # made for it alone
    option = "--live" if side.is_live else "--config"
    raise RequestError(
        f"the hostdev '{alias}' of {side.label} points at no VF for vGPUs, and no request goes "
        f"with it; if it shall go, use 'virsh detach-device {option}'"
    )
