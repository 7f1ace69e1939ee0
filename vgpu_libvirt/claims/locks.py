# SPDX-License-Identifier: LGPL-2.1-or-later
"""The host lock, the device locks and the definition locks: flock(2) on files.

Order: device locks first, by ascending name, then the host lock; nobody waits for a device lock
while holding the host lock. The host lock covers decisions and claim files, never a driver write,
a pause or a call to libvirt. Whoever writes to a device holds its lock from the decision to the
last read-back: without it a late release checks, stands still, and clears the next owner's device.
Their files are never removed.

A definition's lock is another matter: it keeps apart those of us who write one domain's definition,
which is done by calls to libvirt. They may be made while it is held, since no hook ever takes it,
so nothing that libvirt waits for waits for it. It is taken before all others.

This is our own flock, not the filelock library's: it costs the hook 58 ms less, and some of that
library's releases unlink the file on release, after which two processes can hold "the" lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time

from .. import fs
from ..errors import LockTimeoutError, StoreError
from ..records import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_LOCK = ".lock"
_PAUSE = 0.01  # seconds between two tries for a lock that somebody holds
_FIRST = -20  # the nice value that is scheduled before all others


@contextlib.contextmanager
def host(state: str, deadline: float) -> Iterator[None]:
    """Hold the host lock; wait for it until `time.monotonic()` reaches DEADLINE.

    Raises LockTimeoutError, StoreError.
    """
    with _ahead_of_others(), _held(f"{state}/lock", deadline):
        yield


@contextlib.contextmanager
def devices(state: str, names: Iterable[str], deadline: float) -> Iterator[None]:
    """Hold the locks of all devices in NAMES, taken in their order. Raises as `host` does."""
    with contextlib.ExitStack() as held:
        for name in sorted(set(names)):
            held.enter_context(_held(f"{state}/locks/{name}", deadline))
        yield


@contextlib.contextmanager
def definition(state: str, uuid: str, deadline: float) -> Iterator[None]:
    """Hold the lock of the definition of the domain with UUID. Raises as `host` does."""
    path = _definition(state, uuid)
    while True:
        with _held(path, deadline) as fd:
            # Not if it was removed while we waited: the next to come would lock another file.
            if _is_at(fd, path):
                yield
                return


def forget_definition(state: str, uuid: str) -> None:
    """Remove the lock of the definition of a domain that is gone, unless somebody holds it.

    Raises StoreError.
    """
    path = _definition(state, uuid)
    with contextlib.suppress(LockTimeoutError), definition(state, uuid, time.monotonic()):
        try:
            os.unlink(path)
        except OSError as error:
            raise StoreError(f"the lock {path} can't be removed: {fs.reason(error)}") from error


def definitions(state: str) -> list[str]:
    """The UUIDs of all domains whose definitions have a lock. Raises StoreError."""
    directory = os.path.dirname(_definition(state, ""))
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StoreError(f"the locks in {directory} can't be seen: {fs.reason(error)}") from error
    return sorted(name.removesuffix(_LOCK) for name in names if name.endswith(_LOCK))


@contextlib.contextmanager
def _ahead_of_others() -> Iterator[None]:
    """Be scheduled first: where many start at once, each waits for whoever has the host lock."""
    usual = os.getpriority(os.PRIO_PROCESS, 0)
    with contextlib.suppress(PermissionError):  # a confined service just waits longer
        os.setpriority(os.PRIO_PROCESS, 0, _FIRST)
    try:
        yield
    finally:
        os.setpriority(os.PRIO_PROCESS, 0, usual)


def _definition(state: str, uuid: str) -> str:
    return f"{state}/edits/{uuid}{_LOCK}"


def _is_at(fd: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except OSError:
        return False


@contextlib.contextmanager
def _held(path: str, deadline: float) -> Iterator[int]:
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
        yield fd
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
