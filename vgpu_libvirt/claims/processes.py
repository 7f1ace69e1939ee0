# SPDX-License-Identifier: LGPL-2.1-or-later
"""What `<proc>` says about processes.

Not psutil: its import costs a hook more than twice what all of this does, it takes a zombie whose
threads still run for dead, and its start times are those of the wall clock, which can be set.
"""

from __future__ import annotations

import contextlib
import os
import time
from enum import Enum, auto

from .. import fs, sets
from ..records import NamedTuple
from .model import Namespaces, Process, Qemu

_DAEMONS = ("libvirtd", "virtqemud")
_PF_KTHREAD = 0x00200000  # of the flags in stat
VANISHED = (FileNotFoundError, ProcessLookupError)  # what looking at one that ended raises


class Presence(Enum):
    """Whether a process that somebody once saw is there."""

    RUNNING = auto()
    GONE = auto()
    UNKNOWN = auto()


class Stat(NamedTuple):
    """Of `<proc>/<pid>/stat`: the name, the state's letter, the parent, and the start in ticks."""

    name: str
    state: str
    parent: int
    start: int
    is_kernel_thread: bool


def read_stat(proc: str, pid: int) -> Stat:
    """Read a process's stat. Raises OSError (of VANISHED where it's gone), ValueError."""
    text = fs.read_text(f"{proc}/{pid}/stat", errors="replace")
    # The name may contain spaces and parentheses; the fields begin after the last one.
    head, _, tail = text.rpartition(")")
    fields = tail.split()
    if len(fields) < 20:
        raise ValueError(f"{proc}/{pid}/stat is too short")
    return Stat(
        head.partition("(")[2],
        fields[0],
        int(fields[1]),
        int(fields[19]),
        bool(int(fields[6]) & _PF_KTHREAD),
    )


def presence(proc: str, process: Process | Qemu) -> Presence:
    """Whether PROCESS still runs: same pid and start time, and not a zombie through and through.

    A zombie leader whose other threads live still holds the files of its process.
    """
    try:
        stat = read_stat(proc, process.pid)
    except VANISHED:
        return Presence.GONE
    except (OSError, ValueError):
        return Presence.UNKNOWN
    if stat.start != process.start:
        return Presence.GONE
    return Presence.GONE if is_dead(proc, process.pid, stat) else Presence.RUNNING


def is_dead(proc: str, pid: int, stat: Stat) -> bool:
    """Whether the process that STAT was read of is a zombie through and through."""
    return stat.state in "ZX" and not _other_threads(proc, pid)


def _other_threads(proc: str, pid: int) -> bool:
    try:
        return any(name != str(pid) for name in os.listdir(f"{proc}/{pid}/task"))
    except VANISHED:
        return False
    except OSError:
        return True


def names_uuid(proc: str, pid: int, uuid: str) -> bool:
    """Whether the command line of PID has UUID in it, as QEMU's always has, or can't be read.

    It reads as empty where the leader died and other threads live on; and of the kernel's own
    threads, which may have the pid of a QEMU that is gone.
    """
    try:
        line = fs.read_text(f"{proc}/{pid}/cmdline", errors="replace")
    except VANISHED:
        return False
    except OSError:
        return True
    if line:
        return uuid in line
    try:
        return not read_stat(proc, pid).is_kernel_thread
    except VANISHED:
        return False
    except (OSError, ValueError):
        return True


def daemon_above(proc: str, pid: int) -> Process | None:
    """PID or its nearest ancestor that is a libvirt daemon; None where none can be found."""
    seen = set()
    while pid > 0 and pid not in seen:
        seen.add(pid)
        try:
            stat = read_stat(proc, pid)
        except (OSError, ValueError):
            return None
        if stat.name in _DAEMONS:
            return Process(pid, stat.start)
        pid = stat.parent
    return None


def boot_id(proc: str) -> str | None:
    """The id of this boot, or None where it can't be read."""
    try:
        return fs.read_text(f"{proc}/sys/kernel/random/boot_id").strip() or None
    except OSError:
        return None


def since_boot() -> float:
    """Seconds since boot, sleep included; no clock that anybody can set."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def namespaces(proc: str) -> Namespaces:
    """The namespaces of this process; None each where `<proc>/self/ns` doesn't show it."""
    return Namespaces(_namespace(proc, "pid"), _namespace(proc, "net"))


def _namespace(proc: str, kind: str) -> int | None:
    try:
        link = os.readlink(f"{proc}/self/ns/{kind}")  # "pid:[4026531836]"
    except OSError:
        return None
    _, _, inode = link.partition(":[")
    return sets.number(inode.removesuffix("]"))


def is_daemon(proc: str, pid: int) -> bool:
    """Whether PID is a libvirt daemon, or can't be looked at."""
    try:
        return read_stat(proc, pid).name in _DAEMONS
    except VANISHED:
        return False
    except (OSError, ValueError):
        return True


def running_daemon(proc: str) -> Process | None:
    """The libvirt daemon of the host, or None: root's, where users run some of their own.

    Of several the oldest; a child that it forks has its name, too. Raises OSError where the
    processes can't be listed.
    """
    found = []
    for pid in (int(name) for name in os.listdir(proc) if name.isdigit()):
        try:
            stat = read_stat(proc, pid)
            owner = os.stat(f"{proc}/{pid}").st_uid
        except (OSError, ValueError):
            continue
        if stat.name in _DAEMONS and stat.state not in "ZX":
            found.append((owner, stat.start, pid))
    if not found:
        return None
    _, start, pid = min(found)
    return Process(pid, start)


def a_daemon_runs(proc: str) -> bool:
    """Whether a libvirt daemon runs. Raises OSError where the processes can't be listed."""
    return any(name.isdigit() and is_daemon(proc, int(name)) for name in os.listdir(proc))


def daemons(proc: str) -> frozenset[Process]:
    """The libvirt daemons that run, of which those that can't be looked at are left out.

    Raises OSError where the processes can't be listed.
    """
    found = set()
    for name in os.listdir(proc):
        if name.isdigit():
            with contextlib.suppress(OSError, ValueError):
                stat = read_stat(proc, int(name))
                if stat.name in _DAEMONS:
                    found.add(Process(int(name), stat.start))
    return frozenset(found)
