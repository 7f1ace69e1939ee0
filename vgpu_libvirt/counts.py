# SPDX-License-Identifier: LGPL-2.1-or-later
"""Counts what hooks and syncs do, for `virt-vgpu metrics`: totals.py adds it up.

Each appends one line to `<runtime>/counts/lines` by one write, and reads nothing. What hinders it,
or is beyond `_MOST_BYTES` on a host without any sync, is lost: a count is never worth a start.
"""

from __future__ import annotations

import contextlib
import os

from .records import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from .config import Paths

DONE = "done"  # the result of a hook that refused nothing
_MOST_BYTES = 1024 * 1024


class Sync(NamedTuple):
    """What one sync did."""

    ended: float  # seconds since the epoch
    seconds: float
    released: int
    kept: int
    repointed: int
    problems: int


def note_hook(paths: Paths, operation: str, seconds: float, result: str) -> None:
    """Count a hook: what it took, and DONE or the reason of its refusal."""
    _append(paths, f"hook {operation} {seconds:.4f} {result}")


def note_refusal(paths: Paths, operation: str, reason: str) -> None:
    """Count a start that was refused before libvirt was asked."""
    _append(paths, f"refused {operation} {reason}")


def note_sync(paths: Paths, done: Sync) -> None:
    """Count a sync."""
    numbers = " ".join(map(str, done[2:]))
    _append(paths, f"sync {done.ended:.3f} {done.seconds:.3f} {numbers}")


def _append(paths: Paths, line: str) -> None:
    with contextlib.suppress(OSError):  # what hinders a count is nothing to a start
        path = f"{directory(paths)}/lines"
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            fd = os.open(path, flags | os.O_CLOEXEC, 0o644)
        except FileNotFoundError:
            make_directory(paths)
            fd = os.open(path, flags | os.O_CLOEXEC, 0o644)
        try:
            if os.fstat(fd).st_size < _MOST_BYTES:
                os.write(fd, f"{line}\n".encode())
        finally:
            os.close(fd)


def directory(paths: Paths) -> str:
    """Where the lines are, and the totals."""
    return f"{paths.runtime}/counts"


def make_directory(paths: Paths) -> None:
    """Make that directory. Raises OSError."""
    for each in (paths.runtime, directory(paths)):
        with contextlib.suppress(FileExistsError):
            os.mkdir(each, 0o755)
