# SPDX-License-Identifier: LGPL-2.1-or-later
"""Traps about hooks: whether libvirt runs ours, once, and whether it works; pure.

libvirt runs `hooks/qemu`, then every executable file in `hooks/qemu.d`, hidden ones and backups
too, and passes over the others with no more than a line in its log (virhook.c). It looks for hooks
when it starts and at a SIGHUP; while it knows of any, it reads the directory anew at each call.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ..config import HOOK_NAME
from .findings import Symptom

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .see_hooks import Script
    from .sight import Sight

# What package managers and editors leave beside the files that they replace.
_BACKUP = re.compile(
    r"~$|\.(?:dpkg-(?:old|new|dist|tmp|bak)|rpm(?:save|new|orig)|ucf-(?:old|new|dist)|pac(?:new|save)"
    r"|bak|old|orig|save|swp|swo|tmp|new)$|^\.|^#.*#$",
    re.IGNORECASE,
)
_TYPE_FILE = "current_vgpu_type"
_REINSTALL = "reinstall vgpu-libvirt, or run 'virt-vgpu install-hooks' where pip installed it"


def hook_missing(sight: Sight) -> Iterator[Symptom]:
    """Without it no domain gets a vGPU, and none gives one back."""
    path = _place(sight, "qemu")
    ours = (s for s in sight.hooks.scripts if s.kind == "qemu" and (s.is_in_place or s.is_ours))
    if not sight.hooks.are_hidden and not any(ours):
        yield Symptom(path, f"the hook {path} is missing, so no domain gets a vGPU", _REINSTALL)


def daemon_hook_missing(sight: Sight) -> Iterator[Symptom]:
    """What was missed while libvirt was down then waits for the next sync."""
    path = _place(sight, "daemon")
    script = _in_place(sight, "daemon")
    if script and not script.is_executable:
        what, remedy = "not executable", f"run 'chmod 755 {path}'"
    elif script is None and not sight.hooks.are_hidden:
        what, remedy = "missing", _REINSTALL
    else:
        return
    yield Symptom(
        path,
        f"the hook {path} is {what}, so what libvirt missed while it was down waits for a sync",
        remedy,
    )


def hook_not_executable(sight: Sight) -> Iterator[Symptom]:
    """Passed over silently."""
    script = _in_place(sight, "qemu")
    if script and not script.is_executable:
        yield Symptom(
            script.path,
            f"the hook {script.path} is not executable, so libvirt passes over it and no domain "
            "gets a vGPU",
            f"run 'chmod 755 {script.path}'",
        )


def hook_replaced(sight: Sight) -> Iterator[Symptom]:
    """A file of our name that doesn't do our work."""
    for script in sight.hooks.scripts:
        if script.is_in_place and script.text and not script.is_ours:
            yield Symptom(
                script.path,
                f"{script.path} is not our hook any more, since it doesn't run vgpu-libvirt-hook",
                f"move it elsewhere and {_REINSTALL}",
            )


def hook_not_seen(sight: Sight) -> Iterator[Symptom]:
    """A daemon that found no hook for QEMU runs none that was installed later, until a SIGHUP.

    It has surely seen ours if it started later than the file's last change, if it had another hook
    then, if a claim is of a hook that it ran, or if hooks/daemon has noted that it found ours.
    """
    daemon = sight.daemon
    script = _in_place(sight, "qemu")
    if daemon is None or daemon.since is None or script is None or not script.is_executable:
        return
    claims = sight.seen.host.claims.readable.values()
    has_run = any(
        claim.daemon == daemon.process and claim.boot_id == sight.clock.boot_id for claim in claims
    )
    earlier = any(
        other.kind == "qemu" and other.is_executable and other.changed < daemon.since
        for other in sight.hooks.scripts
    )
    if not (earlier or has_run or daemon.has_found_hook):
        yield Symptom(
            script.path,
            f"the hook {script.path} was put there or changed after {daemon.label} "
            "started, and nothing shows that it has looked for hooks since, so it may not run it",
            f"run 'systemctl reload {daemon.name}', or 'kill -HUP {daemon.process.pid}' where "
            "there is no systemd; no guest notices",
        )


def hook_twice(sight: Sight) -> Iterator[Symptom]:
    """A copy of ours under another name: an old one undoes what a new one does."""
    for script in sight.hooks.scripts:
        if script.is_executable and script.is_ours and not script.is_in_place:
            yield Symptom(
                script.path,
                f"{script.path} is another copy of our hook, which libvirt runs besides "
                f"{_place(sight, script.kind)}",
                f"remove {script.path}; should it have other work too, take ours out of it",
            )


def hook_leftover(sight: Sight) -> Iterator[Symptom]:
    """A backup of somebody's hook is run like the hook itself."""
    for script in sight.hooks.scripts:
        name = script.path.rpartition("/")[2]
        if script.is_executable and not script.is_ours and _BACKUP.search(name):
            yield Symptom(
                script.path,
                f"{script.path} looks like a leftover, but libvirt runs it like any other hook",
                f"remove {script.path}, or take its execute permission away",
            )


def hook_rival(sight: Sight) -> Iterator[Symptom]:
    """A hook that programs VFs itself knows nothing of claims.

    libvirt runs `release` for a start that failed because the VF belongs to another domain, too; a
    hook that writes 0 then clears the vGPU of a running guest.
    """
    for script in sight.hooks.scripts:
        if script.is_executable and not script.is_ours and _TYPE_FILE in script.text:
            yield Symptom(
                script.path,
                f"the hook {script.path} writes vGPU types itself, so it may clear the vGPU of a "
                "domain that runs",
                f"take that out of {script.path}, or remove it",
            )


def entry_missing(sight: Sight) -> Iterator[Symptom]:
    """Then no domain that asks for a vGPU starts."""
    entry = sight.entry
    if not entry.is_executable:
        yield Symptom(
            entry.path,
            f"{entry.path}, which the hook runs, is missing or not executable, so no domain that "
            "asks for a vGPU starts",
            _REINSTALL,
        )


def entry_broken(sight: Sight) -> Iterator[Symptom]:
    """It was run, for a domain that it has nothing to do with, and failed."""
    entry = sight.entry
    if entry.failure:
        yield Symptom(
            entry.path,
            f"{entry.path}, which the hook runs, is broken, so no domain that asks for a vGPU "
            f"starts: {entry.failure}",
            _REINSTALL,
        )


def _place(sight: Sight, kind: str) -> str:
    return f"{sight.config.paths.libvirt_etc}/hooks/{kind}.d/{HOOK_NAME}"


def _in_place(sight: Sight, kind: str) -> Script | None:
    return next((s for s in sight.hooks.scripts if s.kind == kind and s.is_in_place), None)
