# SPDX-License-Identifier: LGPL-2.1-or-later
"""The verbs that take devices back: `sync`, `release`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

import click
from rich.text import Text

from .. import (
    autostart,
    config,
    counts,
    fs,
    libvirt_api,
    pointing,
    report,
    sync,
    totals,
    trigger,
    until_quiet,
)
from ..claims import locks, processes, store, witnesses
from ..claims.liveness import Answer, State
from ..claims.model import Phase
from ..errors import CountsError, KeptError, LibvirtError, VgpuError
from ..lifecycle import learn
from ..lifecycle.context import Context
from ..lifecycle.release import force_hindered_by, give_back, keep_visibly
from ..survey import look
from . import complete, output, rights
from .options import dry_run_option
from .show import json_option

if TYPE_CHECKING:
    from ..claims.model import Claim
    from ..config import Config
    from ..survey import Survey

_LONGEST = 600.0  # seconds for a whole sync; each device has its own, shorter limit
_ANSWER = 10.0  # seconds that libvirt has to answer
# With --wait, seconds:
_STARTING = 30.0  # until a daemon listens
_BUSY = 300.0  # until it answers, which it doesn't while a hook runs
_PAUSE = 0.3


@click.command("sync", short_help="Give back what is nobody's, and point definitions right.")
@json_option
@dry_run_option
@click.option("--files-only", is_flag=True, help="Ask libvirt nothing, as at boot before it runs.")
@click.option("--wait", is_flag=True, help="Wait for a libvirt that starts or runs a hook.")
def sync_(as_json: bool, dry_run: bool, files_only: bool, wait: bool) -> None:
    """Bring the claims in line with what runs, and the definitions with what could start.

    Devices of domains that are provably gone are cleared; what can't be decided is kept, and said.
    Hostdevs of definitions that ask for a vGPU are pointed at devices that can serve them now, and
    domains are started that libvirt's autostart could not. Looks again until nothing has changed.
    """
    began = time.monotonic()
    settings = config.load()
    if not dry_run:
        rights.check_root(settings.paths, "give devices back and point definitions")
    patience = None if files_only else _BUSY if wait else _ANSWER
    if wait and not files_only:
        _wait_for_libvirt(settings)
    done = _Done()
    problems: list[str] = []
    if dry_run or files_only:
        done = _look_once(settings, patience, dry_run)
    else:
        problems += _let_group_ask(settings)

        def look_again() -> None:
            nonlocal done
            done = done.then(_look_once(settings, patience))

        problems += until_quiet.repeat(settings.paths, look_again).problems
    seen = done.survey or look(settings)
    told = [*problems, *done.problems, *report.build(seen).problems]
    problems = list(dict.fromkeys(told))
    if not dry_run and (hindered := learn.from_inventory(settings, seen.host.inventory)):
        problems += [] if hindered in problems else [hindered]
    if not dry_run:
        problems += _count(settings, done, len(problems), time.monotonic() - began)
    if as_json:
        output.show_json({**_json(done), "problems": problems})
        return
    lines = [Text(line) for line in _lines(done, dry_run)]
    output.show([*(lines or [Text("Nothing had to be done.")]), *output.problems(problems)])


@click.command(short_help="Give one device back, if its owner is provably gone.")
@click.argument("device", shell_complete=complete.claimed)
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
    if not dry_run:
        rights.check_root(settings.paths, "give devices back")
    claim = store.read(state, device.lower())
    if claim is None:
        raise VgpuError(f"{device} has no claim; 'virt-vgpu list' shows those that have one")
    if claim.phase is Phase.CARVED:
        raise KeptError(
            f"{claim.device} is kept: it is carved, for domains that don't ask for a vGPU; "
            f"'virt-vgpu uncarve {claim.device}' gives it back"
        )
    context = _context(settings)
    world = witnesses.look_around(settings.paths)
    verdict = context.judge(claim, world)
    if verdict.state is not State.DEAD:
        hindrance = force_hindered_by(claim, verdict, world)
        if force and hindrance:
            raise _kept(context, claim, f"{verdict.said_of(claim)}{hindrance}", dry_run)
        if not force:
            hint = "" if hindrance else "; if you know that it is gone, use --force"
            raise _kept(context, claim, f"{verdict.said_of(claim)}{hint}", dry_run)
    if dry_run:
        click.echo(f"{claim.device} would be given back: {verdict.said_of(claim)}.")
        return
    try:
        with locks.devices(state, [claim.device], context.lock_deadline()):
            give_back(context, claim, context.release_deadline(), by_force=force)
    except KeptError as error:
        raise KeptError(f"{claim.device} is kept: {error}") from error
    except VgpuError as error:
        hindered = keep_visibly(context, claim, str(error))
        raise KeptError("; ".join([f"{claim.device} is kept: {error}", *hindered])) from error
    trigger.touch(settings.paths)
    click.echo(f"{claim.device} was given back: {verdict.said_of(claim)}.")


def _kept(context: Context, claim: Claim, why: str, dry_run: bool) -> KeptError:
    """The error that says that CLAIM stands, which is told to the journal too."""
    if not dry_run:
        context.tell("kept", claim, why)
    return KeptError(f"{claim.device} is kept: {why}")


class _Done(NamedTuple):
    """What the looks of one sync did; `kept`, and what the last one can see again, are its own."""

    released: tuple[str, ...] = ()
    renewed: tuple[str, ...] = ()
    kept: tuple[sync.Kept, ...] = ()
    repointed: tuple[pointing.Repointed, ...] = ()
    started: tuple[autostart.Started, ...] = ()
    not_started: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()  # on definitions
    seen: tuple[str, ...] = ()
    survey: Survey | None = None  # the last look's, where all that came after shows in no survey

    @property
    def problems(self) -> tuple[str, ...]:
        return (*self.not_started, *self.notes, *self.seen)

    def then(self, later: _Done) -> _Done:
        """With what a later look did."""
        return _Done(
            (*self.released, *later.released),
            (*self.renewed, *later.renewed),
            later.kept,
            (*self.repointed, *later.repointed),
            (*self.started, *later.started),
            (*self.not_started, *later.not_started),
            (*self.notes, *later.notes),
            later.seen,
            later.survey,
        )


def _look_once(settings: Config, patience: float | None, dry_run: bool = False) -> _Done:
    """Look and act; PATIENCE: the seconds that libvirt has to answer, None: it isn't asked."""
    context = Context(settings) if patience is None else _context(settings, patience)
    outcome = sync.reconcile(context, time.monotonic() + _LONGEST, dry_run=dry_run)
    done = _Done(outcome.released, outcome.renewed, outcome.kept, seen=outcome.problems)
    if patience is None or not processes.a_daemon_runs(settings.paths.proc):
        return done
    try:
        if context.libvirt and context.libvirt.silence:
            raise LibvirtError(context.libvirt.silence)
        with libvirt_api.connect(settings.uri) as connection:
            pointed = pointing.point(settings, connection, dry_run)
            late = autostart.start_refused(settings, connection, dry_run)
    except LibvirtError as error:
        return done._replace(seen=(*done.seen, f"no definition was looked at: {error}"))
    return done._replace(
        repointed=pointed.repointed,
        started=late.started,
        not_started=late.problems,
        notes=pointed.notes,
        seen=(*done.seen, *pointed.problems),
        survey=None if late.started else pointed.seen,
    )


def _wait_for_libvirt(settings: Config) -> None:
    """Wait until a libvirt daemon that runs answers, as long as one may take that is all right.

    One that starts doesn't listen yet; then its autostart, and later any hook, holds the answer up.
    """
    starting_until = time.monotonic() + _STARTING
    while processes.a_daemon_runs(settings.paths.proc):
        # Only one question at a time: each that is left open costs the daemon a thread.
        answer = libvirt_api.ask(settings.uri, frozenset(), _BUSY)
        if not answer.silence or time.monotonic() > starting_until:
            return
        time.sleep(_PAUSE)


def _let_group_ask(settings: Config) -> list[str]:
    try:
        trigger.let_group_ask(settings.paths)
    except OSError as error:
        return [
            f"members of group {trigger.GROUP} can't ask for a sync: {settings.paths.runtime}: "
            f"{fs.reason(error)}"
        ]
    return []


def _count(settings: Config, done: _Done, problems: int, seconds: float) -> list[str]:
    """Count what was done, for `metrics`, and add up what hooks have counted; why it can't be."""
    numbers = len(done.released), len(done.kept), len(done.repointed), problems
    counts.note_sync(settings.paths, counts.Sync(time.time(), seconds, *numbers))
    try:
        totals.fold(settings.paths)
    except CountsError as error:
        return [str(error)]
    return []


def _json(done: _Done) -> dict[str, object]:
    return {
        "released": list(done.released),
        "renewed": list(done.renewed),
        "kept": [{"device": kept.device, "reason": kept.reason} for kept in done.kept],
        "repointed": [
            {
                "domain_uuid": each.domain_uuid,
                "alias": each.alias,
                "from": each.came,
                "to": each.goes,
            }
            for each in done.repointed
        ],
        "started": [each._asdict() for each in done.started],
    }


def _lines(done: _Done, dry_run: bool) -> list[str]:
    be = "would be" if dry_run else "was"
    return [
        *(f"{device} {be} given back." for device in done.released),
        *(f"{device}, which is carved, {be} programmed again." for device in done.renewed),
        *(f"{kept.device} was kept: {kept.reason}" for kept in done.kept if kept.is_doubtful),
        *(_pointed_line(each, be) for each in done.repointed),
        *(
            f"Domain '{each.domain_name}', which libvirt's autostart could not start, {be} started."
            for each in done.started
        ),
    ]


def _pointed_line(each: pointing.Repointed, be: str) -> str:
    if each.goes is None:
        return f"'{each.alias}' of domain '{each.domain_name}' {be} removed with its request."
    come = f" instead of {each.came}" if each.came else ""
    return f"'{each.alias}' of domain '{each.domain_name}' {be} pointed at {each.goes}{come}."


def _context(settings: Config, patience: float = _ANSWER) -> Context:
    """With libvirt's word, where a daemon runs; its socket alone would start one.

    First the claims, then the question: its answer is about those alone.
    """
    claims = store.read_all(settings.paths.state).readable.values()
    # Of what is carved, and stays so, nobody asks.
    ids = frozenset(claim.claim_id for claim in claims if claim.phase is not Phase.CARVED)
    with_devices = any(claim.is_no_domains and claim.claim_id in ids for claim in claims)
    return Context(settings, libvirt=ask_libvirt(settings, ids, patience, with_devices))


def ask_libvirt(
    settings: Config, ids: frozenset[str], patience: float = _ANSWER, with_devices: bool = True
) -> Answer | None:
    """What a libvirt that runs says of the claims with IDS; None: there are none, or none runs."""
    if not ids or not processes.a_daemon_runs(settings.paths.proc):
        return None
    return libvirt_api.ask(settings.uri, ids, patience, with_devices)
