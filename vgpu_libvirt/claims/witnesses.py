# SPDX-License-Identifier: LGPL-2.1-or-later
"""What shows whether a domain lives: libvirt's files, the kernel's, the processes themselves.

A hook can't ask libvirt, which holds the domain's lock while the hook runs. This module only looks;
liveness.py draws the conclusion.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import os
import struct
from types import MappingProxyType

from .. import fs, sets
from ..errors import DeviceError
from ..records import TYPE_CHECKING, NamedTuple
from . import handles, inventory, processes
from .processes import Presence

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ..config import Paths
    from .handles import Handles
    from .inventory import LiveDomains
    from .model import Claim, Namespaces, Process

_LISTENING = 0x10000  # of the flags in <proc>/net/unix; accepted connections share the path
_MONITOR = "/monitor.sock"
_FLOCK = "hhqqi0q"  # struct flock of 64-bit Linux: type, whence, start, length, pid


class _Seen(NamedTuple):
    boot_id: str | None
    since_boot: float
    namespaces: Namespaces
    domains: LiveDomains
    handles: Handles
    listeners: tuple[str, ...] | None  # paths of listening Unix sockets; None: can't be read
    monitors: Mapping[str, frozenset[int]] = MappingProxyType({})  # of those, path -> pids
    daemons: Mapping[Process, Presence] = MappingProxyType({})  # as they were before all that


class World(_Seen):
    """What the whole host shows at one time."""

    def listens(self, path: str) -> bool:
        """Whether a Unix socket of this path listens."""
        return path in self._paths

    def monitor_in(self, directory: str) -> str | None:
        """The path of the monitor socket that listens in a DIRECTORY of this name, or None."""
        return self._monitors.get(directory)

    # Each claim is looked up here, and a large host has as many claims as sockets.
    @functools.cached_property
    def _paths(self) -> frozenset[str]:
        return frozenset(self.listeners or ())

    @functools.cached_property
    def _monitors(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for path in self.listeners or ():
            _, slash, directory = path.removesuffix(_MONITOR).rpartition("/")
            if slash and path.endswith(_MONITOR):
                found.setdefault(directory, path)
        return found


class Witnesses(NamedTuple):
    """What bears on one claim alone."""

    qemu: Presence | None  # None: the claim doesn't know its QEMU
    daemon: Presence | None  # None: the claim doesn't know its daemon
    pid_file_owner: int | None  # who holds the lock on the domain's pid file, and is its QEMU
    holders: frozenset[int]  # pids that hold the device open
    unknown: tuple[str, ...]  # what could not be looked at
    is_anothers_monitor: bool = False  # what listens there is neither its QEMU nor a daemon


def look_around(paths: Paths, *daemons: Process | None, about: Claim | None = None) -> World:
    """Look at the host anew, and before all else at DAEMONS.

    What a daemon that is gone has started shows in what is looked at after it, not before. Who has
    what open comes last, since a write may follow. ABOUT: only what bears on that claim is wanted.
    """
    before = {one: processes.presence(paths.proc, one) for one in set(daemons) if one}
    listeners = _listeners(paths.proc)
    monitors = {path: link for path, link in listeners or () if path.endswith(_MONITOR)}
    only = (
        inventory.Only(frozenset({about.device}), about.domain_uuid, whole=True) if about else None
    )
    domains = inventory.live_domains(paths, only)
    seen = handles.scan(paths.proc, frozenset(monitors.values()))
    return World(
        processes.boot_id(paths.proc),
        processes.since_boot(),
        processes.namespaces(paths.proc),
        domains,
        seen,
        None if listeners is None else tuple(path for path, _ in listeners),
        {path: seen.sockets.get(link, frozenset()) for path, link in monitors.items()},
        before,
    )


def look_at(
    paths: Paths, claim: Claim, world: World, nodes_of: Callable[[str], frozenset[str]]
) -> Witnesses:
    """Look at what bears on CLAIM. NODES_OF tells a device's VFIO nodes, or raises DeviceError."""
    unknown = list(world.handles.unknown[:1])
    holders: frozenset[int] = frozenset()
    try:
        holders = world.handles.on(nodes_of(claim.device))
    except DeviceError as error:
        unknown.append(str(error))
    owner = None
    try:
        owner = None if claim.is_no_domains else _pid_file_owner(paths, claim)
    except OSError as error:
        unknown.append(f"the pid file {pid_file(paths, claim)} can't be read: {fs.reason(error)}")
    return Witnesses(
        processes.presence(paths.proc, claim.qemu) if claim.qemu else None,
        _daemon(paths, claim, world),
        owner,
        holders,
        tuple(unknown),
        _is_anothers(paths, claim, world),
    )


def _daemon(paths: Paths, claim: Claim, world: World) -> Presence | None:
    if claim.daemon is None:
        return None
    return world.daemons.get(claim.daemon) or processes.presence(paths.proc, claim.daemon)


def running(paths: Paths, process: Process | None) -> bool:
    """Whether PROCESS is known and provably runs."""
    return process is not None and processes.presence(paths.proc, process) is Presence.RUNNING


def monitor_of(claim: Claim, world: World) -> str | None:
    """The listening monitor socket of CLAIM's domain, or None.

    QEMU's end keeps its row after libvirt unlinked the path, so it outlives the domain's files.
    """
    if claim.qemu and world.listens(claim.qemu.monitor):
        return claim.qemu.monitor
    if claim.domain_id is None:
        return None
    # libvirt names the directory by id and the first 20 characters of the name.
    return world.monitor_in(f"domain-{claim.domain_id}-{claim.domain_name[:20]}")


def _is_anothers(paths: Paths, claim: Claim, world: World) -> bool:
    """Whether all who hold CLAIM's monitor are provably strangers.

    Domain ids begin anew with a daemon that finds no domain, and names are given again.
    """
    holders = world.monitors.get(monitor_of(claim, world) or "", ())
    return bool(holders) and not any(
        processes.is_daemon(paths.proc, pid)
        or processes.names_uuid(paths.proc, pid, claim.domain_uuid)
        for pid in holders
    )


def _listeners(proc: str) -> tuple[tuple[str, str], ...] | None:
    """Path and link ("socket:[5]") of each listening Unix socket; None: can't be read."""
    try:
        text = fs.read_text(f"{proc}/net/unix", errors="replace")
    except OSError:
        return None
    if not text.startswith("Num "):
        return None  # the kernel's has a header, so this isn't the kernel's
    return tuple(filter(None, map(_listener, text.split("\n"))))


def _listener(row: str) -> tuple[str, str] | None:
    """Path and link of the socket of one ROW; None where it doesn't listen, or has no path.

    Num: RefCount Protocol Flags Type St Inode Path. Any user can bind a name with bytes, blanks and
    newlines in it: what is no row is none.
    """
    number, _, rest = row.partition(": ")
    *words, rest = rest.split(" ", 5)
    inode, _, path = rest.lstrip(" ").partition(" ")
    if not (path and number and sets.is_decimal(inode) and len(words) == 5):
        return None
    if number.split() != [number] or not all(map(sets.is_hex, words)):
        return None
    return (path, f"socket:[{inode}]") if int(words[2], 16) & _LISTENING else None


def pid_file(paths: Paths, claim: Claim) -> str:
    """The pid file of CLAIM's domain, as libvirt 11 names it."""
    return f"{paths.libvirt_run}/qemu/{claim.domain_name}.pid"


def _pid_file_owner(paths: Paths, claim: Claim) -> int | None:
    """The process that holds the lock on the domain's pid file and is its QEMU; raises OSError.

    QEMU holds that POSIX lock for its whole life. Another domain may have the name by now.
    """
    escaped = claim.domain_name
    for char, entity in (("&", "amp"), ("<", "lt"), (">", "gt"), ("'", "apos"), ('"', "quot")):
        escaped = escaped.replace(char, f"&{entity};")
    for name in {claim.domain_name, escaped}:  # libvirt 9 escapes odd names as in XML
        try:
            fd = os.open(
                f"{paths.libvirt_run}/qemu/{name}.pid", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
            )
        except OSError as error:
            # The escaped spelling may be longer than any file's name; then that isn't the one.
            if error.errno in (errno.ENOENT, errno.ENAMETOOLONG):
                continue
            raise
        try:
            wanted = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            kind, _, _, _, pid = struct.unpack(_FLOCK, fcntl.fcntl(fd, fcntl.F_GETLK, wanted))
        finally:
            os.close(fd)
        if kind != fcntl.F_UNLCK and pid <= 0:
            raise OSError(errno.ESRCH, "locked by a process that can't be seen from here")
        if kind != fcntl.F_UNLCK and processes.names_uuid(paths.proc, pid, claim.domain_uuid):
            return int(pid)
    return None
