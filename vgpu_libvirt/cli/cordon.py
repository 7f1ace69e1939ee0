# SPDX-License-Identifier: LGPL-2.1-or-later
"""The verbs `cordon` and `uncordon`: nothing new on a GPU or device, who runs there stays."""

from __future__ import annotations

import os
import pwd
import time
from typing import TYPE_CHECKING

import click

from .. import config, report, trigger
from ..address import PciAddress
from ..claims import cordons, locks
from ..claims.cordons import Cordon
from ..devices import mdev, vendor_vfio
from ..errors import CordonError, DeviceError
from ..survey import look
from . import complete, rights
from .options import address, dry_run_option

if TYPE_CHECKING:
    from ..config import Config


def _reason(_context: click.Context, _option: click.Parameter, value: str | None) -> str | None:
    if value is not None and not value.isprintable():
        raise click.BadParameter("write the reason on one line")
    return value or None


@click.command(short_help="Put nothing new on a GPU or device.")
@click.argument("target", metavar="GPU|DEVICE", callback=address, shell_complete=complete.targets)
@click.option("--reason", callback=_reason, help="Why, for those who will ask.")
@dry_run_option
def cordon(target: PciAddress, reason: str | None, dry_run: bool) -> None:
    """Put nothing new on a GPU or device, until 'uncordon'; also after a reboot.

    Domains that run there stay. Starts that point there are refused.
    """
    settings = config.load()
    _check(settings, target)
    new = Cordon(target, _who(), time.time(), reason)
    if dry_run:
        click.echo(f"{target} would be cordoned {new.label}; {_who_is_left(settings, target)}.")
        return
    rights.check_root(settings.paths, "cordon")
    state = settings.paths.state
    with locks.host(state, time.monotonic() + settings.policy.lock_timeout):
        cordons.write(state, new)
    trigger.touch(settings.paths)  # definitions that point there should point elsewhere
    # Looked at after the cordon stands: whoever is not there now won't come any more.
    click.echo(f"{target} is cordoned {new.label}; {_who_is_left(settings, target)}.")


@click.command(short_help="Let a GPU or device be used again.")
@click.argument("target", metavar="GPU|DEVICE", callback=address, shell_complete=complete.cordoned)
@dry_run_option
def uncordon(target: PciAddress, dry_run: bool) -> None:
    """Take the cordon off a GPU or device, so that domains can start there again."""
    settings = config.load()
    state = settings.paths.state
    if not cordons.exists(state, target):
        held = ", ".join(str(each.target) for each in cordons.read_all(state).held)
        raise CordonError(f"{target} itself is not cordoned; cordoned: {held or 'nothing'}")
    if dry_run:
        click.echo(f"{target} would not be cordoned any more.")
        return
    rights.check_root(settings.paths, "uncordon")
    with locks.host(state, time.monotonic() + settings.policy.lock_timeout):
        cordons.remove(state, target)
    trigger.touch(settings.paths)
    click.echo(f"{target} is not cordoned any more.")


def _check(settings: Config, target: PciAddress) -> None:
    """Check that TARGET is something on which we put vGPUs. Raises DeviceError."""
    sysfs = settings.paths.sysfs
    is_vf = vendor_vfio.is_vgpu_vf(sysfs, target)
    gpu = vendor_vfio.gpu_of(sysfs, target) if is_vf else target
    if not is_vf and not vendor_vfio.is_gpu(sysfs, target):
        gpu = _gpu_of_parent(sysfs, target)
    if excluded := {target, gpu}.intersection(settings.policy.exclude):
        raise DeviceError(
            f"{min(excluded)} is excluded by [policy] in the configuration, so nothing is put there"
        )


def _gpu_of_parent(sysfs: str, target: PciAddress) -> PciAddress:
    """The GPU of a parent of mediated devices, or that GPU itself. Raises DeviceError."""
    for gpu in mdev.discover(sysfs).gpus:
        if str(target) in (gpu.name, *(parent.name for parent in gpu.parents)):
            return PciAddress.parse(gpu.name)
    raise DeviceError(
        f"{target} is neither a GPU with VFs nor one of its VFs; 'virt-vgpu list' shows those"
    )


def _who() -> str:
    """Who does it, for people: the user that became root, where there is one."""
    name = os.environ.get("SUDO_USER", "")
    if not name or not name.isprintable():
        try:
            name = pwd.getpwuid(os.getuid()).pw_name
        except KeyError:
            name = f"user {os.getuid()}"
    return name


def _who_is_left(settings: Config, target: PciAddress) -> str:
    there = [
        row._replace(devices=tuple(d for d in row.devices if target in (d.device.address, gpu)))
        for row in report.build(look(settings)).gpus
        if (gpu := row.gpu.address)
    ]
    left = [name for row in there for name in row.left]
    return f"still there: {', '.join(left)}" if left else "nobody is there"
