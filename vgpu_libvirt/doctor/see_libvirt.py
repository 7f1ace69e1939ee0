# SPDX-License-Identifier: LGPL-2.1-or-later
"""Looks at the libvirt daemon that runs; one that doesn't is never woken by asking it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

from .. import fs, marks
from ..claims import processes
from ..errors import LibvirtError
from . import reading

if TYPE_CHECKING:
    from ..claims.model import Process
    from ..config import Config

_ANSWER = 10.0  # seconds


class Daemon(NamedTuple):
    """The host's libvirtd or virtqemud."""

    name: str
    process: Process
    since_boot: float  # seconds from boot to its start
    since: float | None  # the same in seconds since the epoch; None: can't be told
    has_found_hook: bool  # whether it has told so itself, by our hook for daemons
    version: int | None  # 9007000 is 9.7.0; None: it doesn't tell

    @property
    def label(self) -> str:
        """The daemon as a sentence names it."""
        return f"{self.name} (pid {self.process.pid})"


def daemon(config: Config, unseen: list[str]) -> Daemon | None:
    """The daemon of the host, or None where none runs."""
    paths = config.paths
    try:
        process = processes.running_daemon(paths.proc)
        # Ordinary users have daemons of their own, which have no vGPUs; /proc itself is root's.
        if process is None or (
            os.stat(f"{paths.proc}/{process.pid}").st_uid != os.stat(paths.proc).st_uid
        ):
            return None
        name = processes.read_stat(paths.proc, process.pid).name
    except (OSError, ValueError) as error:
        unseen.append(f"the libvirt daemon can't be looked at: {error}")
        return None
    since_boot = process.start / os.sysconf("SC_CLK_TCK")
    booted = _boot_time(paths.proc, unseen)
    try:
        has_found = process in marks.found(paths)
    except OSError as error:
        unseen.append(f"which hooks {name} has found can't be told: {fs.reason(error)}")
        has_found = False
    return Daemon(
        name,
        process,
        since_boot,
        None if booted is None else booted + since_boot,
        has_found,
        _version(config.uri, unseen),
    )


def _boot_time(proc: str, unseen: list[str]) -> float | None:
    """When the host booted, in seconds since the epoch by the clock of now."""
    for line in (reading.text(f"{proc}/stat", unseen) or "").splitlines():
        key, _, value = line.partition(" ")
        if key == "btime" and value.isdigit():
            return float(value)
    unseen.append(f"{proc}/stat tells no time of boot, so no daemon's age can be told")
    return None


def _version(uri: str, unseen: list[str]) -> int | None:
    try:
        from .. import libvirt_api
    except ImportError as error:
        unseen.append(f"libvirt's version can't be asked for: {error}")
        return None
    try:
        return libvirt_api.version(uri, _ANSWER)
    except LibvirtError as error:
        unseen.append(f"libvirt's version can't be told: {error}")
        return None
