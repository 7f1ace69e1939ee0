# SPDX-License-Identifier: LGPL-2.1-or-later
"""One look at all that doctor judges; it writes nothing, and takes no lock."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, NamedTuple

from .. import report, survey
from ..address import PciAddress
from ..claims import cordons, processes, store
from ..config import AUDIT_LOG, BIN
from ..devices import catalogue
from ..errors import CatalogueError, StoreError
from . import see_definitions, see_gpus, see_hooks, see_host, see_libvirt, see_sync

if TYPE_CHECKING:
    from ..config import Config
    from ..report import Report
    from ..survey import Survey
    from .see_definitions import Definitions
    from .see_gpus import Gpus
    from .see_hooks import Entry, Hooks
    from .see_host import Confinement, StateDirectory
    from .see_libvirt import Daemon
    from .see_sync import Sync


class Places(NamedTuple):
    """What isn't found by the configuration."""

    entry: str = f"{BIN}/vgpu-libvirt-hook"
    audit_log: str = AUDIT_LOG


class Clock(NamedTuple):
    """What time it is, by what the claims say too."""

    boot_id: str | None
    since_boot: float  # seconds, sleep included
    now: float  # seconds since the epoch


class Sight(NamedTuple):
    """Everything that the checks judge."""

    config: Config
    seen: Survey
    report: Report  # of that
    hooks: Hooks
    entry: Entry
    daemon: Daemon | None
    confinement: Confinement
    gpus: Gpus
    definitions: Definitions
    state: StateDirectory
    sync: Sync
    clock: Clock
    store_problems: tuple[str, ...]  # the store as a whole, and what in it is no claim
    leftovers: tuple[str, ...]  # cordons and catalogue that can't be read
    is_root: bool
    unseen: tuple[str, ...]  # what could not be looked at


def look(config: Config, places: Places) -> Sight:
    """Look at the host, and keep what can't be looked at as sentences."""
    paths = config.paths
    unseen: list[str] = []
    is_root = os.geteuid() == 0
    now = time.time()
    seen = survey.look(config)
    daemon = see_libvirt.daemon(config, unseen)
    definitions = see_definitions.look(config, seen, now, unseen)
    devices = seen.host.inventory.devices
    vfs = [device.address for device in devices if isinstance(device.address, PciAddress)]
    hidden = report.unseen_processes(seen.world.handles.unknown)
    if not is_root:
        hidden += seen.world.domains.problems
    return Sight(
        config,
        seen,
        report.build(seen),
        see_hooks.hooks(paths, unseen),
        see_hooks.entry(places.entry),
        daemon,
        see_host.confinement(paths, places.audit_log, daemon, unseen),
        see_gpus.look(config, vfs, unseen),
        definitions,
        see_host.state_directory(paths, is_root, unseen),
        see_sync.look(paths, now, unseen),
        Clock(processes.boot_id(paths.proc), processes.since_boot(), now),
        tuple(_store_problems(paths.state)),
        tuple(_leftovers(paths.state)),
        is_root,
        tuple(dict.fromkeys([*unseen, *hidden])),
    )


def _store_problems(state: str) -> list[str]:
    try:
        claims = store.read_all(state)
    except StoreError as error:
        return [str(error)]
    return [text for text in claims.problems if text not in claims.unreadable.values()]


def _leftovers(state: str) -> list[str]:
    problems = list(cordons.read_all(state).problems)
    try:
        catalogue.read(state)
    except CatalogueError as error:
        problems.append(str(error))
    return problems
