# SPDX-License-Identifier: LGPL-2.1-or-later
"""The verbs that take devices back: `sync`, `release`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click
from rich.text import Text

from .. import config, libvirt_api, pointing, report, sync
from ..claims import locks, processes, store, witnesses
from ..claims.liveness import State
from ..errors import KeptError, LibvirtError, VgpuError
from ..lifecycle import learn
from ..lifecycle.context import Context
from ..lifecycle.release import force_hindered_by, give_back, keep_visibly
from ..survey import look
from . import output
from .show import json_option

if TYPE_CHECKING:
    from ..config import Config

_LONGEST = 600.0  # seconds for a whole sync; each device has its own, shorter limit
_ANSWER = 10.0  # seconds that libvirt has to answer

dry_run_option = click.option("--dry-run", is_flag=True, help="Only say what would be done.")


@click.command("sync", short_help="Give back what is nobody's, and point definitions right.")
@json_option
@dry_run_option
def sync_(as_json: bool, dry_run: bool) -> None:
    """Bring the claims in line with what runs, and the definitions with what could start.

    Devices of domains that are provably gone are cleared; what can't be decided is kept, and said.
    Hostdevs of definitions that ask for a vGPU are pointed at devices that can serve them now.
    """
    settings = config.load()
    context = _context(settings)
    outcome = sync.reconcile(context, time.monotonic() + _LONGEST, dry_run=dry_run)
    pointed = _point(settings, context, dry_run)
    seen = pointed.seen or look(settings)  # pointing changes nothing that it shows
    told = [*outcome.problems, *pointed.problems, *report.build(seen).problems]
    problems = list(dict.fromkeys(told))
    if not dry_run and (hindered := learn.from_inventory(settings, seen.host.inventory)):
        problems += [] if hindered in problems else [hindered]
    if as_json:
        output.show_json(
            {
                "released": list(outcome.released),
                "kept": [{"device": kept.device, "reason": kept.reason} for kept in outcome.kept],
                "repointed": [
                    {
                        "domain_uuid": each.domain_uuid,
                        "alias": each.alias,
                        "from": each.came,
                        "to": each.goes,
                    }
                    for each in pointed.repointed
                ],
                "problems": problems,
            }
        )
        return
    verb = "would be given back" if dry_run else "was given back"
    lines = [Text(f"{device} {verb}.") for device in outcome.released]
    lines += [
        Text(f"{kept.device} was kept: {kept.reason}") for kept in outcome.kept if kept.is_doubtful
    ]
    lines += [Text(_pointed_line(each, dry_run)) for each in pointed.repointed]
    output.show([*(lines or [Text("Nothing had to be done.")]), *output.problems(problems)])


@click.command(short_help="Give one device back, if its owner is provably gone.")
@click.argument("device")
@click.option(
    "--force",
    is_flag=True,
    help="Also where that can't be proved, if you know it. Never takes a device from the living.",
)
@dry_run_option
def release(device: str, force: bool, dry_run: bool) -> None:
    """Clear DEVICE and drop its claim, if its owner is provably gone.

    Says why we think so. A device that is open, or may be, is never cleared.
    """
    settings = config.load()
    state = settings.paths.state
    claim = store.read(state, device.lower())
    if claim is None:
        raise VgpuError(f"{device} has no claim; 'virt-vgpu list' shows those that have one")
    context = _context(settings)
    world = witnesses.look_around(settings.paths)
    verdict = context.judge(claim, world)
    if verdict.state is not State.DEAD:
        hindrance = force_hindered_by(claim, verdict, world)
        if force and hindrance:
            raise KeptError(f"{claim.device} is kept: {claim.owner} is {verdict}{hindrance}")
        if not force:
            hint = "" if hindrance else "; if you know that it is gone, use --force"
            raise KeptError(f"{claim.device} is kept: {claim.owner} is {verdict}{hint}")
    if dry_run:
        click.echo(f"{claim.device} would be given back: {claim.owner} is {verdict}.")
        return
    try:
        with locks.devices(state, [claim.device], context.lock_deadline()):
            give_back(context, claim, context.release_deadline(), by_force=force)
    except KeptError as error:
        raise KeptError(f"{claim.device} is kept: {error}") from error
    except VgpuError as error:
        hindered = keep_visibly(context, claim, str(error))
        raise KeptError("; ".join([f"{claim.device} is kept: {error}", *hindered])) from error
    click.echo(f"{claim.device} was given back: {claim.owner} is {verdict}.")


def _point(settings: Config, context: Context, dry_run: bool) -> pointing.Outcome:
    """Point the definitions, where libvirt runs and answers."""
    if not processes.a_daemon_runs(settings.paths.proc):
        return pointing.Outcome()
    try:
        if context.libvirt and context.libvirt.silence:
            raise LibvirtError(context.libvirt.silence)
        with libvirt_api.connect(settings.uri) as connection:
            return pointing.point(settings, connection, dry_run)
    except LibvirtError as error:
        return pointing.Outcome((), (f"no definition was looked at: {error}",))


def _pointed_line(each: pointing.Repointed, dry_run: bool) -> str:
    be = "would be" if dry_run else "was"
    if each.goes is None:
        return f"'{each.alias}' of domain '{each.domain_name}' {be} removed with its request."
    come = f" instead of {each.came}" if each.came else ""
    return f"'{each.alias}' of domain '{each.domain_name}' {be} pointed at {each.goes}{come}."


def _context(settings: Config) -> Context:
    """With libvirt's word, where a daemon runs; its socket alone would start one.

    First the claims, then the question: its answer is about those alone.
    """
    asked_after = frozenset(
        claim.claim_id for claim in store.read_all(settings.paths.state).readable.values()
    )
    if not asked_after or not processes.a_daemon_runs(settings.paths.proc):
        return Context(settings)
    return Context(settings, libvirt=libvirt_api.ask(settings.uri, asked_after, _ANSWER))
