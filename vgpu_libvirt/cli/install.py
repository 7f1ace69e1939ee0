# SPDX-License-Identifier: LGPL-2.1-or-later
"""The verbs `install-hooks` and `uninstall-hooks`, for who installed the package by pip."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

import click

from .. import config, installing
from ..claims import store
from ..errors import InstallError, StoreError
from ..installing import Found, Program
from .options import dry_run_option

if TYPE_CHECKING:
    from ..config import Paths
    from ..installing import File

root_option = click.option(
    "--root",
    metavar="DIR",
    default="/",
    type=click.Path(file_okay=False, resolve_path=True),
    help="Work below DIR, as packagers do; nothing that runs is told.",
)


@click.command("install-hooks", short_help="Make libvirt run the hooks of a pip installation.")
@click.option("--units", is_flag=True, help="Also systemd's units, which run 'sync'.")
@root_option
@dry_run_option
def install_hooks(units: bool, root: str, dry_run: bool) -> None:
    """Put the hooks where libvirt runs them, and what they run into /usr/bin.

    Not for a distribution's package, which brings its hooks itself. To be run again when the
    package, its venv or its Python has changed; a hook must not run while pip replaces the package,
    so start no domain meanwhile.
    """
    base = "" if root == "/" else root
    paths = config.load().paths
    program = Program()
    files = installing.plan(paths, base, program, units)
    installing.check_foreign(files)
    if not base and (unsafe := installing.unsafe_part(program)):
        raise InstallError(
            f"{unsafe} can be changed by others than root, but libvirt would run it as root; "
            "install vgpu-libvirt where only root can write"
        )
    due = [(file, found) for file in files if (found := installing.find(file)) is not Found.SAME]
    for file, _ in due:
        if not dry_run:
            installing.write(file)
        click.echo(f"{file.path} {'would be' if dry_run else 'was'} written.")
    if not due:
        click.echo("Everything is installed already.")
    if dry_run or base:
        return
    if (files[-1], Found.NOTHING) in due:
        for sentence in installing.tell_libvirt(paths):
            click.echo(sentence)
    if units:
        _enable(paths, [file for file in files if os.path.dirname(file.path) == config.UNITS])


@click.command("uninstall-hooks", short_help="Take away what 'install-hooks' installed.")
@click.option("--force", is_flag=True, help="Also while domains have vGPUs; they run on.")
@root_option
@dry_run_option
def uninstall_hooks(force: bool, root: str, dry_run: bool) -> None:
    """Remove the hooks from libvirt, and all else that 'install-hooks' wrote.

    Claims stay. Domains that run keep their vGPUs, but without the hooks nothing gives these back
    when the domains end: so this is refused while there is a claim, unless it is forced.
    """
    base = "" if root == "/" else root
    paths = config.load().paths
    if not force:
        _check_claims(f"{base}{paths.state}")
    ours, foreign = installing.installed(paths, base)
    if not dry_run and not base:
        _disable(paths, [path for path in ours if os.path.dirname(path) == config.UNITS])
    for path in ours:
        if not dry_run:
            installing.remove(path)
        click.echo(f"{path} {'would be' if dry_run else 'was'} removed.")
    for path in foreign:
        click.echo(f"{path} stays: it is not from 'install-hooks'.")
    if not ours:
        click.echo("Nothing of 'install-hooks' is installed.")


def _check_claims(state: str) -> None:
    hint = "without hooks nothing gives a vGPU back when its domain ends"
    try:
        claims = store.read_all(state)
    except StoreError as error:
        raise InstallError(f"{error}; {hint}; if you know that none runs, use --force") from error
    held = [f"{claim.device} by {claim.owner}" for claim in claims.readable.values()]
    held += [f"{device} by a claim that can't be read" for device in claims.unreadable]
    if held:
        raise InstallError(
            f"in use: {', '.join(held)}; {hint}, so shut these domains off first, or use --force"
        )


def _enable(paths: Paths, units: list[File]) -> None:
    if not os.path.isdir(paths.systemd):
        click.echo("systemd doesn't run here; nothing was enabled.")
        return
    wanted = [os.path.basename(unit.path) for unit in units if "[Install]" in unit.text.split()]
    later = [name for name in wanted if name.endswith(".service")]  # at boot, or by the others
    _call("systemd-tmpfiles", "--create", "vgpu-libvirt.conf")
    _systemctl("daemon-reload")
    _systemctl("enable", *later)
    _systemctl("enable", "--now", *(name for name in wanted if name not in later))


def _disable(paths: Paths, units: list[str]) -> None:
    if units and os.path.isdir(paths.systemd):
        _systemctl("disable", "--now", *map(os.path.basename, units))


def _systemctl(*arguments: str) -> None:
    _call("systemctl", "--quiet", *arguments)


def _call(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode:
        raise InstallError(f"'{' '.join(command)}' failed: {' '.join(done.stderr.split())}")
