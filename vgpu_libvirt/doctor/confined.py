# SPDX-License-Identifier: LGPL-2.1-or-later
"""Traps about libvirt itself, and about what confines the hooks that it runs; pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .findings import Symptom

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .sight import Sight

# The first that takes an unmanaged VF on another driver than vfio-pci, by its `vfio-dev`
# (libvirt's NEWS of 9.7.0): "Unmanaged PCI device must be manually detached" before.
_OLDEST = 9_007_000
_OLDEST_WITH_DIRECTORIES = 6_005_000  # the first that runs what is in `hooks/qemu.d`


def no_daemon(sight: Sight) -> Iterator[Symptom]:
    """An idle daemon that its socket starts is asleep most of the time, and isn't woken by us."""
    if sight.daemon is None:
        yield Symptom(
            "libvirt",
            "no libvirt daemon runs, or none shows, so nothing was looked at that it tells: its "
            "version, whether it has seen the hooks, what was denied to them",
            "run 'virt-vgpu doctor' again while one runs; 'virsh list' starts one that its socket "
            "starts",
        )


def libvirt_too_old(sight: Sight) -> Iterator[Symptom]:
    """An old libvirt refuses every start with a vendor VFIO VF; mediated devices it takes."""
    daemon = sight.daemon
    if not daemon or daemon.version is None:
        return
    if daemon.version < _OLDEST_WITH_DIRECTORIES:
        yield Symptom(
            daemon.name,
            f"{daemon.label} is libvirt {_text(daemon.version)}, which runs nothing in qemu.d, "
            "and so not our hook",
            f"install libvirt {_text(_OLDEST)} or later",
        )
    elif daemon.version < _OLDEST and sight.seen.host.inventory.gpus:
        yield Symptom(
            daemon.name,
            f"{daemon.label} is libvirt {_text(daemon.version)}, which refuses VFs whose driver "
            f"isn't vfio-pci; {_text(_OLDEST)} is the first that takes them",
            f"install libvirt {_text(_OLDEST)} or later",
        )


def selinux_boolean(sight: Sight) -> Iterator[Symptom]:
    """Where SELinux confines libvirt's hooks they may execute, read and write next to nothing.

    `virt_hooks_unconfined` is off by default (selinux-policy since 2024). Where a policy lacks it,
    hooks aren't confined, or can't be unconfined.
    """
    if sight.confinement.is_hook_boolean_off:
        yield Symptom(
            "virt_hooks_unconfined",
            "SELinux confines libvirt's hooks, since its boolean virt_hooks_unconfined is off, so "
            "ours can't set vGPU types",
            "run 'setsebool -P virt_hooks_unconfined 1'",
        )


def confinement_denials(sight: Sight) -> Iterator[Symptom]:
    """What AppArmor or SELinux kept our hooks from, since the daemon started."""
    denials = sight.confinement.denials
    if denials and sight.daemon:
        number = "once" if len(denials) == 1 else f"{len(denials)} times"
        yield Symptom(
            sight.daemon.name,
            f"{'AppArmor' if 'apparmor=' in denials[-1] else 'SELinux'} has kept our hooks from "
            f"something {number} since {sight.daemon.label} started, last: {denials[-1]}",
            "allow it (packaging's examples/apparmor has rules for stricter profiles; SELinux: "
            f"'restorecon -R {sight.config.paths.libvirt_etc}/hooks'), and restart "
            f"{sight.daemon.name}",
        )


def _text(version: int) -> str:
    return f"{version // 1_000_000}.{version // 1000 % 1000}.{version % 1000}"
