# SPDX-License-Identifier: LGPL-2.1-or-later
"""Who holds VFIO files open: one pass over `<proc>/*/fd`, made anew for each decision."""

from __future__ import annotations

import os
from types import MappingProxyType

from .. import fs
from ..records import TYPE_CHECKING, NamedTuple
from .processes import VANISHED

if TYPE_CHECKING:
    from collections.abc import Mapping

_DELETED = " (deleted)"


class Handles(NamedTuple):
    """The open VFIO files of the host, and what could not be looked at."""

    holders: dict[str, frozenset[int]]  # node below <dev>, as "vfio/9" -> pids
    unknown: tuple[str, ...]
    sockets: Mapping[str, frozenset[int]] = MappingProxyType({})  # "socket:[5]" -> pids

    def on(self, nodes: frozenset[str]) -> frozenset[int]:
        """The pids that hold any of NODES open."""
        return frozenset(pid for node in nodes for pid in self.holders.get(node, ()))


def scan(proc: str, sockets: frozenset[str] = frozenset()) -> Handles:
    """Look at every open file of every process; also at who has SOCKETS (as "socket:[5]").

    What is unreadable but not vanished is `unknown`: without root that is most of the host.
    Nodes are told by the end of their path, so that a process in a mount namespace of its own, as
    QEMU under libvirt, is seen too.
    """
    holders: dict[str, set[int]] = {}
    unknown: list[str] = []
    try:
        pids = [int(name) for name in os.listdir(proc) if name.isdigit()]
    except OSError as error:
        return Handles({}, (f"{proc} can't be read: {fs.reason(error)}",))
    if 1 not in pids:
        # Under hidepid, or systemd's ProtectProc, others' processes aren't even listed.
        unknown.append(f"{proc} doesn't show process 1, so it may hide others too")
    for pid in pids:
        if not _scan_files(f"{proc}/{pid}", pid, sockets, holders, unknown):
            # A dead leader has no files left to show; the threads that outlived it do.
            for thread in _threads(f"{proc}/{pid}", pid, unknown):
                _scan_files(f"{proc}/{pid}/task/{thread}", pid, sockets, holders, unknown)
    found = {link: frozenset(who) for link, who in holders.items()}
    held = {link: found.pop(link) for link in sockets.intersection(found)}
    return Handles(found, tuple(unknown), held)


def _scan_files(
    process: str,
    pid: int,
    sockets: frozenset[str],
    holders: dict[str, set[int]],
    unknown: list[str],
) -> bool:
    """Note the VFIO files and SOCKETS of one task; whether it showed any file at all."""
    directory = f"{process}/fd"
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            return _scan_links(directory, fd, pid, sockets, holders, unknown)
        finally:
            os.close(fd)
    except VANISHED:
        return False
    except OSError as error:
        unknown.append(f"{directory} can't be read: {fs.reason(error)}")
        return True


def _scan_links(
    directory: str,
    fd: int,
    pid: int,
    sockets: frozenset[str],
    holders: dict[str, set[int]],
    unknown: list[str],
) -> bool:
    """As `_scan_files`, of the DIRECTORY that is open as FD. Raises OSError."""
    names = os.listdir(fd)
    for name in names:
        try:
            # By FD: a large host has a hundred thousand, and a sixth of the time is the way there.
            target = os.readlink(name, dir_fd=fd)
        except VANISHED:
            continue
        except OSError as error:
            unknown.append(f"{directory}/{name} can't be read: {fs.reason(error)}")
            continue
        if "/vfio/" in target:
            node = "vfio/" + target.removesuffix(_DELETED).rpartition("/vfio/")[2]
            holders.setdefault(node, set()).add(pid)
        elif target in sockets:
            holders.setdefault(target, set()).add(pid)
    return bool(names)


def _threads(process: str, pid: int, unknown: list[str]) -> list[str]:
    try:
        return [name for name in os.listdir(f"{process}/task") if name != str(pid)]
    except VANISHED:
        return []
    except OSError as error:
        unknown.append(f"{process}/task can't be read: {fs.reason(error)}")
        return []
