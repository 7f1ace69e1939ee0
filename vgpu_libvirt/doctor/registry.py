# SPDX-License-Identifier: LGPL-2.1-or-later
"""All checks, in the order in which their findings are told; each is a trap of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import claims, confined, definitions, gpus, hooks, host
from .findings import Check, Finding, Level

if TYPE_CHECKING:
    from ..errors import ConfigError

CONFIG_BROKEN = "config-broken"  # told alone: without a configuration there is nothing to look at

_P, _N = Level.PROBLEM, Level.NOTE

CHECKS = (
    Check("hook-missing", _P, hooks.hook_missing),
    Check("hook-not-executable", _P, hooks.hook_not_executable),
    Check("hook-replaced", _P, hooks.hook_replaced),
    Check("hook-not-seen", _P, hooks.hook_not_seen),
    Check("hook-twice", _P, hooks.hook_twice),
    Check("hook-leftover", _P, hooks.hook_leftover),
    Check("hook-rival", _P, hooks.hook_rival),
    Check("entry-missing", _P, hooks.entry_missing),
    Check("entry-broken", _P, hooks.entry_broken),
    Check("libvirt-too-old", _P, confined.libvirt_too_old),
    Check("selinux-boolean", _P, confined.selinux_boolean),
    Check("confinement-denials", _P, confined.confinement_denials),
    Check("gpu-driver", _P, gpus.gpu_driver),
    Check("vfs-off", _P, gpus.vfs_off),
    Check("vfs-without-vgpu", _P, gpus.vfs_without_vgpu),
    Check("vf-driver", _P, gpus.vf_driver),
    Check("gpu-lists-nothing", _P, gpus.gpu_lists_nothing),
    Check("vf-unreadable", _P, gpus.vf_unreadable),
    Check("foreign-type", _P, gpus.foreign_type),
    Check("iommu-off", _P, gpus.iommu_off),
    Check("iommu-group-shared", _P, gpus.iommu_group_shared),
    Check("vfio-missing", _P, gpus.vfio_missing),
    Check("exclude-nothing", _P, gpus.exclude_nothing),
    Check("managed", _P, definitions.managed),
    Check("request-broken", _P, definitions.request_broken),
    Check("profile-unknown", _P, definitions.profile_unknown),
    Check("mdev-where-vfs", _P, definitions.mdev_where_vfs),
    Check("vf-where-mdevs", _P, definitions.vf_where_mdevs),
    Check("pointed-at-nothing", _P, definitions.pointed_at_nothing),
    Check("pointed-at-other", _P, definitions.pointed_at_other),
    Check("hostdev-without-request", _P, definitions.hostdev_without_request),
    Check("autostart-unserved", _P, definitions.autostart_unserved),
    Check("definition-behind", _P, definitions.definition_behind),
    Check("claim-unreadable", _P, claims.claim_unreadable),
    Check("claim-store", _P, claims.claim_store),
    Check("release-pending", _P, claims.release_pending),
    Check("claim-error", _P, claims.claim_error),
    Check("claim-rewritten", _P, claims.claim_rewritten),
    Check("claim-elsewhere", _P, claims.claim_elsewhere),
    Check("inventory-incomplete", _P, claims.inventory_incomplete),
    Check("leftover-unreadable", _P, claims.leftover_unreadable),
    Check("sync-units", _P, host.sync_units),
    Check("sync-fails", _P, host.sync_fails),
    Check("sync-command-missing", _P, host.sync_command_missing),
    Check("sync-unanswered", _P, host.sync_unanswered),
    Check("state-not-writable", _P, host.state_not_writable),
    Check("boot-unknown", _P, host.boot_unknown),
    Check("daemon-hook-missing", _N, hooks.daemon_hook_missing),
    Check("no-daemon", _N, confined.no_daemon),
    Check("no-gpu", _N, gpus.no_gpu),
    Check("unclaimed-in-use", _N, gpus.unclaimed_in_use),
    Check("cannot-migrate", _N, gpus.cannot_migrate),
    Check("shared-device", _N, definitions.shared_device),
    Check("claim-of-the-dead", _N, claims.claim_of_the_dead),
    Check("state-volatile", _N, host.state_volatile),
    Check("clock-odd", _N, host.clock_odd),
    Check("not-seen", _N, host.not_seen),
)


def of_broken_configuration(error: ConfigError) -> Finding:
    """The one finding where the configuration can't be used."""
    return Finding(CONFIG_BROKEN, Level.PROBLEM, *host.config_broken(error))
