# SPDX-License-Identifier: LGPL-2.1-or-later
"""Notes of starts that `prepare` refused, for a daemon that no sync has reached yet.

libvirt's autostart runs before libvirt serves clients, so no sync can point the definitions then.
The first sync that reaches the daemon starts what autostart could not (autostart.py), and from then
on a refusal is for whoever asked for the start to see to. All of it lies in `<runtime>`.
"""

from __future__ import annotations

import contextlib
import os
import re

from . import fs, marks
from .records import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .claims.model import Process
    from .config import Paths

_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.ASCII)


def note(paths: Paths, uuid: str, daemon: Process | None) -> None:
    """Note that a start of the domain with UUID by DAEMON was refused.

    For a hook: what hinders that costs a domain its autostart, and is no error.
    """
    if daemon is None or not _UUID.fullmatch(uuid):
        return
    with contextlib.suppress(OSError):
        if daemon not in served(paths):
            fs.replace(f"{_directory(paths)}/{uuid}", marks.text([daemon]), f"{paths.runtime}/new")


def notes(paths: Paths) -> dict[str, Process | None]:
    """UUID -> the daemon that was refused; None: it can't be understood. Raises OSError."""
    try:
        names = sorted(os.listdir(_directory(paths)))
    except FileNotFoundError:
        return {}
    found: dict[str, Process | None] = {}
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            noted = marks.read(f"{_directory(paths)}/{name}")
            found[name] = next(iter(noted)) if len(noted) == 1 else None
    return found


def forget(paths: Paths, uuid: str) -> None:
    """Remove a note. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(f"{_directory(paths)}/{uuid}")


def served(paths: Paths) -> frozenset[Process]:
    """The daemons that a sync has reached. Raises OSError."""
    try:
        return marks.read(_served(paths))
    except FileNotFoundError:
        return frozenset()


def mark_served(paths: Paths, daemons: Iterable[Process]) -> None:
    """Write down which daemons a sync has reached. Raises OSError."""
    fs.replace(_served(paths), marks.text(sorted(daemons)), f"{paths.runtime}/new")


def _directory(paths: Paths) -> str:
    return f"{paths.runtime}/refused"


def _served(paths: Paths) -> str:
    return f"{paths.runtime}/served"
