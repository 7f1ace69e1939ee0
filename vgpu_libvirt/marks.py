# SPDX-License-Identifier: LGPL-2.1-or-later
"""Notes in `<runtime>` about libvirt daemons: which of them have found our hook.

A daemon looks for hooks when it starts and when it gets a SIGHUP; one that found none for QEMU runs
none that is installed later. Both times it runs hooks/daemon right afterwards, which leaves this.
"""

from __future__ import annotations

import contextlib
import os
import re

from . import fs
from .claims import processes
from .claims.model import Process
from .claims.processes import Presence
from .config import HOOK_NAME
from .records import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .config import Paths

_LINE = re.compile(r"(\d{1,19}) (\d{1,19})", re.ASCII)


def note_found(paths: Paths, daemon: Process) -> None:
    """Note that DAEMON, which has just looked for hooks, found ours; not where it is missing.

    For a hook: what hinders that costs a finding of `virt-vgpu doctor`, and is no error.
    """
    with contextlib.suppress(OSError):
        if os.access(f"{paths.libvirt_etc}/hooks/qemu.d/{HOOK_NAME}", os.X_OK):
            others = found(paths)
            living = {one for one in others if _runs(paths, one)} | {daemon}
            if living != others:
                fs.replace(_found(paths), text(sorted(living)), f"{paths.runtime}/new")


def found(paths: Paths) -> frozenset[Process]:
    """The daemons that are known to have found our hook. Raises OSError."""
    try:
        return read(_found(paths))
    except FileNotFoundError:
        return frozenset()


def read(path: str) -> frozenset[Process]:
    """The daemons in a file; what can't be understood is none. Raises OSError."""
    lines = (_LINE.fullmatch(line) for line in fs.read_text(path).splitlines())
    return frozenset(Process(int(match[1]), int(match[2])) for match in lines if match)


def text(daemons: Iterable[Process]) -> str:
    """The content of a file that lists DAEMONS."""
    return "".join(f"{daemon.pid} {daemon.start}\n" for daemon in daemons)


def _runs(paths: Paths, daemon: Process) -> bool:
    return processes.presence(paths.proc, daemon) is Presence.RUNNING


def _found(paths: Paths) -> str:
    return f"{paths.runtime}/found-hooks"
