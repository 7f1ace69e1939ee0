# SPDX-License-Identifier: LGPL-2.1-or-later
"""Looks at what has syncs run: systemd's units, or the worker's trigger where there is none."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING, NamedTuple

from .. import fs, trigger, worker

if TYPE_CHECKING:
    from ..config import Paths

# Unit -> whether it must be active; all must be enabled.
WANTED = {
    "vgpu-libvirt-boot.service": False,  # at boot alone
    "vgpu-libvirt-changed.path": True,
    "vgpu-libvirt-sync.path": True,
    "vgpu-libvirt-sync.timer": True,
}
SERVICE = "vgpu-libvirt-sync.service"
_PATIENCE = 10.0  # seconds
_PROPERTIES = ("Id", "LoadState", "ActiveState", "UnitFileState")


class Unit(NamedTuple):
    """A unit as systemd has it: `loaded`, `active`, `enabled` are the good words."""

    name: str
    load: str
    active: str
    file: str


class Sync(NamedTuple):
    """What there is to run syncs, and whether one is wanted."""

    has_systemd: bool
    units: tuple[Unit, ...]  # empty without systemd, or where it can't be asked
    wanted_for: float | None  # seconds since somebody asked and nobody came; None: nobody waits


def look(paths: Paths, now: float, unseen: list[str]) -> Sync:
    """Look at it; NOW is the time in seconds since the epoch."""
    has_systemd = not worker.is_needed(paths)
    return Sync(has_systemd, _units(unseen) if has_systemd else (), _waiting(paths, now, unseen))


def _waiting(paths: Paths, now: float, unseen: list[str]) -> float | None:
    path = trigger.path(paths)
    try:
        return now - os.lstat(path).st_mtime
    except FileNotFoundError:
        return None
    except OSError as error:
        unseen.append(f"{path} can't be looked at: {fs.reason(error)}")
        return None


def _units(unseen: list[str]) -> tuple[Unit, ...]:
    properties = [f"--property={name}" for name in _PROPERTIES]
    try:
        done = subprocess.run(  # noqa: S603
            ["systemctl", "show", *properties, *WANTED, SERVICE],  # noqa: S607
            capture_output=True,
            text=True,
            timeout=_PATIENCE,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        unseen.append(f"systemd can't be asked about the units that run syncs: {error}")
        return ()
    if done.returncode:
        reason = " ".join(done.stderr.split())
        unseen.append(f"systemd can't be asked about the units that run syncs: {reason}")
        return ()
    found = []
    for block in done.stdout.strip().split("\n\n"):
        values = dict(line.split("=", 1) for line in block.splitlines() if "=" in line)
        found.append(Unit(*(values.get(name, "") for name in _PROPERTIES)))
    return tuple(found)
