# SPDX-License-Identifier: LGPL-2.1-or-later
"""Looks at what libvirt runs as hooks, and at what ours run."""

from __future__ import annotations

import os
import stat
import subprocess
from typing import TYPE_CHECKING, NamedTuple

from .. import fs
from ..config import HOOK_NAME
from . import reading

if TYPE_CHECKING:
    from ..config import Paths

KINDS = ("qemu", "daemon")
_PATIENCE = 30.0  # seconds for the entry point to do nothing
# Of a domain that has nothing to do with us: the entry point reads it, and leaves.
_DOCUMENT = "<domain><name>doctor</name><uuid>00000000-0000-0000-0000-000000000000</uuid></domain>"


class Script(NamedTuple):
    """A file where libvirt looks for hooks; it runs every one that is executable."""

    kind: str  # qemu | daemon
    path: str
    is_executable: bool
    text: str  # empty where it can't be read
    changed: float  # seconds since the epoch: when it was put there, or its mode was set

    @property
    def is_in_place(self) -> bool:
        """Whether it has the name of our hook, where we put it."""
        return self.path.endswith(f"/{self.kind}.d/{HOOK_NAME}")

    @property
    def is_ours(self) -> bool:
        """Whether it is our hook by what it does, whatever its name."""
        return "vgpu-libvirt-hook" in self.text


class Hooks(NamedTuple):
    """All hook files, in the order in which libvirt runs them."""

    scripts: tuple[Script, ...]
    are_hidden: bool  # whether there may be others, which we may not see


class Entry(NamedTuple):
    """The program that our hooks run, and the command beside it."""

    path: str
    is_executable: bool
    failure: str | None  # how it failed to do nothing
    command: str
    has_command: bool


def hooks(paths: Paths, unseen: list[str]) -> Hooks:
    """Look at all hook files for domains and daemons."""
    found = []
    seen_so_far = len(unseen)
    for kind in KINDS:
        main = f"{paths.libvirt_etc}/hooks/{kind}"
        inside = [f"{main}.d/{name}" for name in reading.names(f"{main}.d", unseen)]
        for path in (main, *inside):
            try:
                status = os.stat(path)
            except FileNotFoundError:
                continue
            except OSError as error:
                unseen.append(f"{path} can't be read: {fs.reason(error)}")
                continue
            if stat.S_ISREG(status.st_mode):
                is_executable = bool(status.st_mode & 0o111)
                text = reading.text(path, unseen) or ""
                found.append(Script(kind, path, is_executable, text, status.st_ctime))
    return Hooks(tuple(found), len(unseen) > seen_so_far)


def entry(path: str) -> Entry:
    """Look at the entry point, and run it for a domain that it has nothing to do with."""
    command = os.path.join(os.path.dirname(path), "virt-vgpu")
    is_executable = os.access(path, os.X_OK)
    failure = _failure(path) if is_executable else None
    return Entry(path, is_executable, failure, command, os.access(command, os.X_OK))


def _failure(path: str) -> str | None:
    # The environment is as bare as what libvirt gives its hooks.
    environment = {"LC_ALL": "C", "PATH": os.defpath}
    try:
        done = subprocess.run(  # noqa: S603
            [path, "doctor", "prepare", "begin", "-"],
            input=_DOCUMENT,
            env=environment,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PATIENCE,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"it doesn't end within {_PATIENCE:g} s"
    except OSError as error:  # its interpreter is missing
        return fs.reason(error)
    if (done.returncode, done.stderr) == (0, ""):
        return None
    lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
    return lines[-1]
