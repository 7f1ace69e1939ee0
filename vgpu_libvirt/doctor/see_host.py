# SPDX-License-Identifier: LGPL-2.1-or-later
"""Looks at the host itself: what confines hooks, where our state is, what boot this is."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, NamedTuple

from .. import fs
from . import reading

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..config import Paths
    from .see_libvirt import Daemon

_KMSG_RECORD = 8192  # bytes; the kernel makes none longer
_AUDIT_TAIL = 4 * 1024 * 1024  # bytes
_AUDITED = re.compile(r"audit\((\d+)\.\d+:\d+\)")
_ESCAPE = re.compile(r"\\([0-7]{3})")
_DENIED = ('apparmor="DENIED"', "avc:  denied")
_OURS = ("/hooks/qemu", "/hooks/daemon", "vgpu-libvirt", "vgpu_libvirt", "virt_hook")


class Confinement(NamedTuple):
    """What AppArmor and SELinux let hooks do, as far as it shows."""

    is_hook_boolean_off: bool  # SELinux enforces, and has virt_hooks_unconfined off
    denials: tuple[str, ...]  # log lines about our hooks since the daemon started


class StateDirectory(NamedTuple):
    """Where the claims are."""

    path: str
    hindrance: str | None  # why root can't write there, as the end of a sentence
    filesystem: str | None  # its type; None: can't be told


def confinement(
    paths: Paths, audit_log: str, daemon: Daemon | None, unseen: list[str]
) -> Confinement:
    """Look at the security modules that are on, and for what they denied since DAEMON started."""
    selinux = f"{paths.sysfs}/fs/selinux"
    enforces = (reading.text(f"{selinux}/enforce", unseen) or "0").strip() == "1"
    boolean = reading.text(f"{selinux}/booleans/virt_hooks_unconfined", unseen)
    apparmor = reading.text(f"{paths.sysfs}/module/apparmor/parameters/enabled", unseen)
    is_confined = enforces or (apparmor or "").strip() == "Y"
    lines: list[str] = []
    if is_confined and daemon:
        lines += _kernel_log(f"{paths.dev}/kmsg", daemon.since_boot, unseen)
        if daemon.since is not None:
            lines += _audit_log(audit_log, daemon.since, unseen)
    denials = [line for line in lines if _has_any(line, _DENIED) and _has_any(line, _OURS)]
    return Confinement(
        enforces and boolean is not None and boolean.split()[:1] == ["0"],
        tuple(dict.fromkeys(denials)),
    )


def state_directory(paths: Paths, is_root: bool, unseen: list[str]) -> StateDirectory:
    """Look at the state directory; IS_ROOT: whether what we may write is what root may."""
    path = paths.state
    filesystem = _filesystem(os.path.realpath(path), f"{paths.proc}/self/mountinfo", unseen)
    return StateDirectory(path, _hindrance(path, is_root), filesystem)


def _hindrance(path: str, is_root: bool) -> str | None:
    for directory in (path, f"{path}/claims", f"{path}/tmp", f"{path}/locks"):
        there = directory
        while not os.path.lexists(there):
            there = os.path.dirname(there)
        if not os.path.isdir(there):
            return f"since {there} is not a directory"
        try:
            status = os.statvfs(there)
        except OSError as error:
            return f"since {there} can't be looked at: {fs.reason(error)}"
        if status.f_flag & os.ST_RDONLY:
            return f"since {there} is on a read-only filesystem"
        if is_root and not os.access(there, os.W_OK | os.X_OK):
            return f"since root may not write to {there}"
        if status.f_blocks and not status.f_bfree:
            return f"since the filesystem of {there} is full"
    return None


def _filesystem(path: str, mountinfo: str, unseen: list[str]) -> str | None:
    """The type of the filesystem that PATH is on, or would be."""
    best, found = "", None
    for line in (reading.text(mountinfo, unseen) or "").splitlines():
        mount, _, kind = line.partition(" - ")
        fields = mount.split()
        if len(fields) < 5 or not kind:
            continue
        point = _ESCAPE.sub(lambda match: chr(int(match[1], 8)), fields[4])
        # Of several at one place the last one is on top.
        if f"{path}/".startswith(f"{point.rstrip('/')}/") and len(point) >= len(best):
            best, found = point, kind.split()[0]
    return found


def _kernel_log(path: str, since_boot: float, unseen: list[str]) -> Iterator[str]:
    """The kernel's messages since then; a file in the place of the device is read as its text."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    except OSError as error:
        unseen.append(f"the kernel's log, and denials in it, can't be read: {fs.reason(error)}")
        return
    try:
        while True:
            try:
                text = os.read(fd, _KMSG_RECORD).decode(errors="replace")
            except BlockingIOError:
                return
            except BrokenPipeError:
                continue  # messages were lost before we came to them
            if not text:
                return
            for record in text.splitlines():
                head, _, message = record.partition(";")
                fields = head.split(",")
                if len(fields) > 2 and fields[2].isdigit() and int(fields[2]) / 1e6 >= since_boot:
                    yield message
    finally:
        os.close(fd)


def _audit_log(path: str, since: float, unseen: list[str]) -> Iterator[str]:
    """The lines of auditd's log since then, of its end."""
    try:
        with open(path, "rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - _AUDIT_TAIL))
            text = log.read().decode(errors="replace")
    except FileNotFoundError:
        return
    except OSError as error:
        unseen.append(f"the audit log {path} can't be read: {fs.reason(error)}")
        return
    for line in text.splitlines():
        match = _AUDITED.search(line)
        if match and float(match[1]) >= since:
            yield line


def _has_any(line: str, texts: tuple[str, ...]) -> bool:
    return any(text in line for text in texts)
