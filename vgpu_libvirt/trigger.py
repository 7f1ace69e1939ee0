# SPDX-License-Identifier: LGPL-2.1-or-later
"""The file by which anybody asks for a `virt-vgpu sync`, and what tells that definitions changed.

It is there, or it isn't: a sync removes it before it looks, so whatever happened before it was
touched is seen by a sync that begins later, and any number of wishes make one run. systemd's path
unit runs a sync as long as it is there; where there is no systemd, see worker.py.
"""

from __future__ import annotations

import contextlib
import os

from .errors import StoreError
from .records import TYPE_CHECKING

if TYPE_CHECKING:
    from .config import Paths

GROUP = "libvirt"  # whose members may use libvirt without root, and so may ask for a sync

Definitions = frozenset[tuple[str, int, int]]  # file name, inode, time of the last change in ns


def path(paths: Paths) -> str:
    """Where the trigger is; the packaged units name the default."""
    return f"{_directory(paths)}/sync"


def ask(paths: Paths) -> None:
    """Touch the trigger. Raises OSError."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(paths.runtime, 0o755)
    with contextlib.suppress(FileExistsError):
        os.mkdir(_directory(paths), 0o700)
    try:
        # Neither a link nor a FIFO that the group put there may lead us astray or hold us up.
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        os.close(os.open(path(paths), flags, 0o644))
    except OSError:
        if not is_set(paths):  # whatever it is, it is there
            raise


def touch(paths: Paths) -> None:
    """Touch the trigger, for a hook: what hinders that is nothing to a start or a stop."""
    with contextlib.suppress(OSError):  # the timer's sync comes without being asked
        ask(paths)


def is_set(paths: Paths) -> bool:
    """Whether somebody has asked since the last `take`."""
    return os.path.lexists(path(paths))


def take(paths: Paths) -> None:
    """Remove the trigger, whatever it is. Raises StoreError."""
    try:
        try:
            os.unlink(path(paths))
        except FileNotFoundError:
            return
        except IsADirectoryError:
            _remove_directory(paths)
    except OSError as error:
        raise StoreError(
            f"the trigger {path(paths)} can't be removed: {error.strerror}; remove it by hand, or "
            "syncs come without end"
        ) from error


def let_group_ask(paths: Paths) -> None:
    """Let the members of libvirt's group ask, where there is such a group. Raises OSError.

    For root, and never in a hook: looking a group up may go over the network.
    """
    import grp

    try:
        group = grp.getgrnam(GROUP).gr_gid
    except KeyError:
        return
    with contextlib.suppress(FileExistsError):
        os.mkdir(paths.runtime, 0o755)
    with contextlib.suppress(FileExistsError):
        os.mkdir(_directory(paths), 0o700)
    directory = os.open(_directory(paths), os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fchown(directory, -1, group)
        os.fchmod(directory, 0o770)
    finally:
        os.close(directory)


def definitions(paths: Paths) -> Definitions:
    """What identifies the present content of libvirt's definitions. Raises OSError.

    libvirt writes one aside and renames it, so it has another inode, or at least another time.
    """
    found = set()
    try:
        with os.scandir(f"{paths.libvirt_etc}/qemu") as entries:
            for entry in entries:
                if entry.name.endswith(".xml"):
                    with contextlib.suppress(FileNotFoundError):
                        stat = entry.stat(follow_symlinks=False)
                        found.add((entry.name, stat.st_ino, stat.st_mtime_ns))
    except FileNotFoundError:
        return frozenset()
    return frozenset(found)


def _directory(paths: Paths) -> str:
    return f"{paths.runtime}/wanted"


def _remove_directory(paths: Paths) -> None:
    """Remove a directory in the trigger's place, away from those who may go on filling it."""
    import shutil

    aside = f"{paths.runtime}/no-trigger"
    shutil.rmtree(aside, ignore_errors=True)
    os.rename(path(paths), aside)
    shutil.rmtree(aside)
