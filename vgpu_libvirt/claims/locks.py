# SPDX-License-Identifier: LGPL-2.1-or-later
"""The host lock and the device locks: flock(2) on files that are never removed.

Order: device locks first, by ascending name, then the host lock; nobody waits for a device lock
while holding the host lock. The host lock covers decisions and claim files, never a driver write,
a pause or a call to libvirt. Whoever writes to a device holds its lock from the decision to the
last read-back: without it a late release checks, stands still, and clears the next owner's device.

This is our own flock, not the filelock library's: it costs the hook 58 ms less, and some of that
library's releases unlink the file on release, after which two processes can hold "the" lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from typing import TYPE_CHECKING

from .. import fs
from ..errors import LockTimeoutError, StoreError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_PAUSE = 0.01  # seconds between two tries for a lock that somebody holds


@contextlib.contextmanager
def host(state: str, deadline: float) -> Iterator[None]:
    """Hold the host lock; wait for it until `time.monotonic()` reaches DEADLINE.

    Raises LockTimeoutError, StoreError.
    """
    with _held(f"{state}/lock", deadline):
        yield


@contextlib.contextmanager
def devices(state: str, names: Iterable[str], deadline: float) -> Iterator[None]:
    """Hold the locks of all devices in NAMES, taken in their order. Raises as `host` does."""
    with contextlib.ExitStack() as held:
        for name in sorted(set(names)):
            held.enter_context(_held(f"{state}/locks/{name}", deadline))
        yield


@contextlib.contextmanager
def _held(path: str, deadline: float) -> Iterator[None]:
    try:
        fs.make_directory(os.path.dirname(path))
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StoreError(f"the lock {path} can't be opened: {fs.reason(error)}") from error
    try:
        while not _try(fd, path):
            if time.monotonic() >= deadline:
                raise LockTimeoutError(
                    f"the lock {path} is held by somebody else for too long; try again, and see "
                    "with 'fuser' who that is"
                )
            time.sleep(_PAUSE)
        yield
    finally:
        os.close(fd)


def _try(fd: int, path: str) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise StoreError(f"the lock {path} can't be taken: {fs.reason(error)}") from error
    return True
