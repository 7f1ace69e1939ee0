# SPDX-License-Identifier: LGPL-2.1-or-later
"""Traps about the host: what runs syncs, where the claims are, the boot and the clock; pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .findings import Symptom
from .see_sync import SERVICE, WANTED

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..errors import ConfigError
    from .sight import Sight

_UNANSWERED = 900.0  # seconds: a sync may wait some minutes for a libvirt that runs hooks
_CLOCK_STEP = 86400.0  # seconds; less than that is somebody who set the clock right
_VOLATILE = ("tmpfs", "ramfs")


def config_broken(error: ConfigError) -> Symptom:
    """What there is to say where the configuration can't be read: it tells where to look."""
    return Symptom(
        "configuration",
        f"the configuration can't be used, so domains that ask for a vGPU don't start: {error}",
        "correct it; nothing else was looked at, since it says where to look",
    )


def sync_units(sight: Sight) -> Iterator[Symptom]:
    """What runs syncs where there is systemd."""
    for unit in sight.sync.units:
        if unit.name not in WANTED:
            continue
        wrong = []
        now = "--now " if WANTED[unit.name] else ""
        remedy = f"run 'systemctl enable {now}{unit.name}'"
        if unit.load == "not-found":
            wrong.append("not installed")
            remedy = "reinstall vgpu-libvirt, or run 'virt-vgpu install-hooks --units'"
        elif unit.load != "loaded":
            wrong.append(unit.load)
        elif not unit.file.startswith("enabled"):
            wrong.append("not enabled")
        if unit.load == "loaded" and WANTED[unit.name] and unit.active != "active":
            wrong.append("not active")
        if wrong:
            yield Symptom(
                unit.name,
                f"{unit.name} is {' and '.join(wrong)}, so syncs don't come when they should",
                remedy,
            )


def sync_fails(sight: Sight) -> Iterator[Symptom]:
    """The last sync that systemd ran."""
    for unit in sight.sync.units:
        if unit.name == SERVICE and unit.active == "failed":
            yield Symptom(
                SERVICE,
                f"the last sync that {SERVICE} ran has failed",
                f"see 'journalctl -u {SERVICE}', and run 'virt-vgpu sync'",
            )


def sync_command_missing(sight: Sight) -> Iterator[Symptom]:
    """Where there is no systemd, hooks start a worker that runs the command beside their own."""
    if not sight.sync.has_systemd and not sight.entry.has_command:
        command = sight.entry.command
        yield Symptom(
            command,
            f"{command} is missing or not executable, so no hook can have a sync run",
            "reinstall vgpu-libvirt",
        )


def sync_unanswered(sight: Sight) -> Iterator[Symptom]:
    """A sync takes the wish for one away before it looks; this one is older than any takes."""
    waited = sight.sync.wanted_for
    if waited is not None and waited > _UNANSWERED:
        runtime = sight.config.paths.runtime
        log = f"'journalctl -u {SERVICE}'" if sight.sync.has_systemd else f"{runtime}/worker.log"
        yield Symptom(
            f"{runtime}/wanted/sync",
            f"a sync was asked for {waited / 60:.0f} minutes ago, and none has come",
            f"run 'virt-vgpu sync', and see {log}",
        )


def state_not_writable(sight: Sight) -> Iterator[Symptom]:
    """Without a claim on disk nothing is programmed, and nothing given back."""
    state = sight.state
    if state.hindrance:
        yield Symptom(
            state.path,
            f"no claim can be written in {state.path}, {state.hindrance}, so domains that ask for "
            "a vGPU don't start, and none is given back",
            "make it a directory in which root can write",
        )


def state_volatile(sight: Sight) -> Iterator[Symptom]:
    """Claims mean nothing after a reboot, but cordons and half-made edits do."""
    state = sight.state
    if state.filesystem in _VOLATILE:
        yield Symptom(
            state.path,
            f"{state.path} is on a {state.filesystem}, so a reboot loses cordons, hostdevs whose "
            "change was interrupted, and the names of profiles",
            "put it on a disk, or set state in [paths]",
        )


def boot_unknown(sight: Sight) -> Iterator[Symptom]:
    """Without it a claim proves nothing, so none is made."""
    if sight.clock.boot_id is None:
        path = f"{sight.config.paths.proc}/sys/kernel/random/boot_id"
        yield Symptom(
            path,
            f"{path} can't be read, so no device can be claimed, and domains that ask for a vGPU "
            "don't start",
            "mount proc there, and let root read it",
        )


def clock_odd(sight: Sight) -> Iterator[Symptom]:
    """A claim from the future: of this boot, it is later than now.

    By the clock since boot reservations lapse; nobody can set it, but a restored image of a virtual
    machine may. The wall clock is for people alone.
    """
    clock = sight.clock
    for claim in sight.seen.host.claims.readable.values():
        is_later = claim.boot_id == clock.boot_id and claim.since_boot > clock.since_boot
        if is_later or claim.created > clock.now + _CLOCK_STEP:
            yield Symptom(
                claim.device,
                f"the claim of {claim.owner} on {claim.device} was made later than it is now, by "
                f"the {'time since boot' if is_later else 'wall clock'}",
                "set the clock right, and see that chronyd or timesyncd does",
            )


def not_seen(sight: Sight) -> Iterator[Symptom]:
    """What could not be looked at, so that nobody takes silence for health."""
    advice = "look at it yourself" if sight.is_root else "run 'virt-vgpu doctor' as root"
    for sentence in sight.unseen:
        thing = sentence.split()[0] if sentence.startswith("/") else "host"
        yield Symptom(thing, sentence, advice)
