# SPDX-License-Identifier: LGPL-2.1-or-later
"""Where there is no systemd: a detached process that runs the syncs that hooks ask for.

It is the hook's own entry point with `--worker`, one at a time. A hook starts it and never waits
for it; it waits for libvirt as long as hooks run, and holds no lock that a hook may wait for.
"""

from __future__ import annotations

import contextlib
import fcntl
import os

from . import trigger
from .records import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from .config import Paths

_SYNC = ("sync", "--wait")


def is_needed(paths: Paths) -> bool:
    """Whether no systemd is there whose path unit would run a sync."""
    return not os.path.isdir(paths.systemd)


def start(program: str, option: str, environment: Mapping[str, str]) -> None:
    """Run PROGRAM, our entry point, with OPTION; not where virt-vgpu isn't installed beside it.

    Costs the hook two forks. libvirt waits until nobody has the hook's stdout or stderr any more.
    """
    if not os.access(_command(program), os.X_OK):
        return
    with contextlib.suppress(OSError):  # the trigger stays, for the next hook's worker
        if child := os.fork():
            os.waitpid(child, 0)
            return
        try:
            os.setsid()
            if not os.fork():
                _let_go()
                os.execve(program, [program, option], environment)  # noqa: S606
        finally:
            os._exit(0)  # nothing of the hook may run twice


def run(paths: Paths, program: str) -> None:
    """Be the worker. Raises OSError."""
    work(paths, lambda: _sync(paths, program))


def work(paths: Paths, sync: Callable[[], bool]) -> None:
    """Run SYNC while the trigger is there, unless another worker does; until SYNC fails.

    Raises OSError.
    The trigger is looked at again when the lock was let go: whoever touched it and found the lock
    held has left it to us.
    """
    while trigger.is_set(paths):
        with _alone(paths) as alone:
            # Looked at anew: who had the lock before us may have seen to it.
            if not alone or (trigger.is_set(paths) and not sync()):
                return


@contextlib.contextmanager
def _alone(paths: Paths) -> Iterator[bool]:
    """Hold the workers' lock; whether it could be had."""
    fd = os.open(f"{paths.runtime}/worker.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(fd)


def _sync(paths: Paths, program: str) -> bool:
    """Run one `virt-vgpu sync`, which removes the trigger; its output is kept in `worker.log`."""
    log = f"{paths.runtime}/worker.log"
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
    command = _command(program)
    pid = os.posix_spawn(
        command,
        [command, *_SYNC],
        os.environ,
        file_actions=[(os.POSIX_SPAWN_OPEN, 1, log, flags, 0o600), (os.POSIX_SPAWN_DUP2, 1, 2)],
    )
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def _command(program: str) -> str:
    return os.path.join(os.path.dirname(program), "virt-vgpu")


def _let_go() -> None:
    """Keep nothing of the caller's: no open file, no directory."""
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    os.chdir("/")
