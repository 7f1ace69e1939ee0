# SPDX-License-Identifier: LGPL-2.1-or-later
"""Starts what libvirt's autostart could not: domains whose definitions pointed at taken devices.

See refused.py for who was noted. Only for a daemon that no sync has reached before, each domain
once, and none that runs by now or doesn't start at boot.
"""

from __future__ import annotations

from . import fs, libvirt_api, refused, starting
from .claims import processes
from .errors import VgpuError
from .records import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from typing import Any

    from .config import Config
    from .libvirt_api import Definition


class Started(NamedTuple):
    """A domain that was started."""

    domain_uuid: str
    domain_name: str


class Outcome(NamedTuple):
    """What was started, and a sentence for each that couldn't be."""

    started: tuple[Started, ...] = ()
    problems: tuple[str, ...] = ()


def start_refused(config: Config, connection: Any, dry_run: bool = False) -> Outcome:
    """Start what was refused before libvirt served; with DRY_RUN only say what would be started.

    The definitions have been pointed. Notes go, whoever's they are.
    """
    paths = config.paths
    started = []
    problems = []
    try:
        running = processes.daemons(paths.proc)
        served = refused.served(paths)
        for uuid, daemon in refused.notes(paths).items():
            if not dry_run:
                refused.forget(paths, uuid)  # each is tried once
            if daemon not in running - served:
                continue
            try:
                if definition := _startable(connection, uuid):
                    if not dry_run:
                        _start(config, connection, definition)
                    started.append(Started(definition.uuid, definition.name))
            except VgpuError as error:
                problems.append(f"what libvirt could not start at boot still isn't: {error}")
        if not dry_run and served != running:
            # Last: those of a sync that is killed before are started by the next.
            refused.mark_served(paths, running)
    except OSError as error:
        problems.append(
            f"what libvirt could not start at boot can't be told: {error.filename}: "
            f"{fs.reason(error)}"
        )
    return Outcome(tuple(started), tuple(problems))


def _startable(connection: Any, uuid: str) -> Definition | None:
    """The domain, if it is there, starts at boot, and doesn't run yet. Raises LibvirtError."""
    definition = libvirt_api.look_up(connection, uuid)
    if definition is None or not definition.is_persistent or definition.is_active:
        return None
    return definition if libvirt_api.is_autostarted(definition) else None


def _start(config: Config, connection: Any, definition: Definition) -> None:
    """Start it on a device that can serve it; what was saved names its devices itself."""
    if libvirt_api.has_saved_state(definition):
        libvirt_api.create(definition, paused=False)
    else:
        starting.start(config, connection, definition.uuid, paused=False)
