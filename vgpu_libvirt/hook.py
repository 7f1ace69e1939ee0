# SPDX-License-Identifier: LGPL-2.1-or-later
"""What libvirt's hooks hand over to.

`hooks/qemu`: `NAME OPERATION SUBOPERATION EXTRA`, domain XML on stdin; `hooks/daemon`: `--daemon`.
`--want-sync` asks for a sync, for systemd; where that isn't, `--worker` runs those asked for.
libvirt, and every `virsh list` on the host, waits while this runs. So it imports what its operation
needs and no more, and never libvirt: a hook that calls libvirt deadlocks.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time

from .domain.model import NAMESPACE
from .domain.read import parse_domain
from .errors import DomainXmlError, VgpuError, kind
from .records import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import BinaryIO, TextIO

    from .config import Config, Paths
    from .domain.model import Domain
    from .lifecycle.context import Context

MAY_REFUSE = ("prepare", "start", "migrate", "restore")
DAEMON_OPTION = "--daemon"
RELOAD_OPTION = "--daemon-reloads"
WANT_OPTION = "--want-sync"
WORKER_OPTION = "--worker"
# And so what definitions should point at.
CHANGES_CLAIMS = ("prepare", "migrate", "restore", "release")
OPERATIONS = (*MAY_REFUSE, "started", "stopped", "release", "reconnect", "attach")

DONE = 0
REFUSED = 1
USAGE = 2
REFUSED_BYSTANDER = 3  # for a domain that didn't ask; the stub believes no other exit status then

_DAEMON_SECONDS = 4.0  # for beginning work when libvirt starts; hooks/daemon ends us after five

# The stub says who ran it: its own parent, where a dispatcher may stand between us and libvirt.
PARENT_VARIABLE = "VGPU_LIBVIRT_PARENT"


class Streams(NamedTuple):
    """What a hook reads from and writes to; libvirt takes stdout at `migrate` and `restore`."""

    stdin: BinaryIO
    stdout: BinaryIO
    stderr: TextIO


class Outcome(NamedTuple):
    """What an operation ended in, but for a refusal of a domain that asks."""

    problems: Sequence[str] = ()
    harm: str | None = None  # what damage a hostdev of a domain that doesn't ask would do
    answer: bytes = b""  # the document in the place of the one that was read; empty: as it was


class Refusal(NamedTuple):
    """Of whom an operation was refused, and why: as errors.kind names it, and as a sentence."""

    domain: Domain | None
    reason: str
    sentence: str


class Caller(NamedTuple):
    """How we were run: by what environment, and as which program; none: by no installed one."""

    environment: Mapping[str, str]
    program: str = ""


def main(
    arguments: list[str],
    streams: Streams,
    environment: Mapping[str, str],
    program: str = "",
) -> int:
    """Run one hook operation; return the exit status.

    PROGRAM: the installed entry point, which can be run again as a worker.
    """
    caller = Caller(environment, program)
    stderr = streams.stderr
    if arguments == [DAEMON_OPTION]:
        return _daemon_starts(stderr, caller)
    if arguments == [RELOAD_OPTION]:
        return _daemon_reloads(stderr, caller)
    if arguments in ([WANT_OPTION], [WORKER_OPTION]):
        return _sync_is_wanted(arguments[0], stderr, caller)
    document = streams.stdin.read()
    operation = arguments[1] if len(arguments) > 1 else ""
    if len(arguments) != 4:
        if operation and operation not in MAY_REFUSE:
            return DONE
        print("usage: vgpu-libvirt-hook NAME OPERATION SUBOPERATION EXTRA <XML", file=stderr)
        return USAGE
    if operation not in OPERATIONS:
        return DONE
    return _domain_changes(operation, document, streams, caller)


def _domain_changes(operation: str, document: bytes, streams: Streams, caller: Caller) -> int:
    began = time.monotonic()
    asks = NAMESPACE.encode() in document
    outcome = Outcome()
    domain = paths = None
    reason = ""
    try:
        domain = _read(document)
        asks = domain.asks
        if (
            operation in MAY_REFUSE
            and not asks
            and not any(h.address or h.uuid for h in domain.hostdevs)
        ):
            return DONE
        settings = _settings(caller.environment)
        paths = settings.paths
        outcome = _run(operation, domain, document, settings, caller)
        refused = outcome.harm is not None
        reason = "hostdev"  # that a domain has without a request for it
        if outcome.answer:
            streams.stdout.write(outcome.answer)
            streams.stdout.flush()
    except VgpuError as error:
        outcome = Outcome([str(error)])
        refused = operation in MAY_REFUSE and asks
        reason = kind(error)
    except Exception as error:  # a bug of ours must end in a sentence, and must not kill a guest
        outcome = Outcome([_bug(error)])
        refused = operation in MAY_REFUSE and asks
        reason = kind(error)
    said = [*outcome.problems, *([outcome.harm] if outcome.harm else [])]
    for problem in said:
        _tell(streams.stderr, problem)
    if paths and (asks or refused):
        seconds = time.monotonic() - began
        refusal = Refusal(domain, reason, "; ".join(said)) if refused else None
        with contextlib.suppress(Exception):  # what is told of it must not decide it
            _record(paths, operation, seconds, refusal)
    if not refused:
        return DONE
    return REFUSED if asks else REFUSED_BYSTANDER


def _record(paths: Paths, operation: str, seconds: float, refusal: Refusal | None) -> None:
    """Count the operation, and tell the host's journal that it was refused."""
    from . import counts

    counts.note_hook(paths, operation, seconds, refusal.reason if refusal else counts.DONE)
    if refusal:
        from . import events, journal

        journal.tell(paths, events.refusal(*refusal))


def _daemon_starts(stderr: TextIO, caller: Caller) -> int:
    """Reconcile from files alone, before libvirt serves anybody; it waits, so not for long.

    A sync is asked for, which points the definitions once libvirt serves.
    """
    try:
        context = _context(_settings(caller.environment), caller.environment)
        if context.daemon is None:
            return DONE  # another of libvirt's daemons, which has no domains
        from . import marks, sync

        marks.note_found(context.config.paths, context.daemon)
        _ask_for_sync(context.config.paths, caller)
        outcome = sync.reconcile(context, time.monotonic() + _DAEMON_SECONDS)
        problems = [*outcome.problems, *(kept.reason for kept in outcome.kept if kept.is_doubtful)]
    except VgpuError as error:
        problems = [str(error)]
    except Exception as error:  # libvirt must start, whatever is wrong with us
        problems = [_bug(error)]
    for problem in problems:
        _tell(stderr, problem)
    return DONE


def _daemon_reloads(stderr: TextIO, caller: Caller) -> int:
    """Note that a daemon has looked for its hooks anew."""
    try:
        context = _context(_settings(caller.environment), caller.environment)
        if context.daemon is not None:
            from . import marks

            marks.note_found(context.config.paths, context.daemon)
    except Exception as error:  # whatever is wrong with us, libvirt reloads
        _tell(stderr, str(error) if isinstance(error, VgpuError) else _bug(error))
    return DONE


def _tell(stderr: TextIO, problem: str) -> None:
    # A request's attributes may have newlines in them; a refusal is one line.
    print(f"vgpu-libvirt: {' '.join(problem.splitlines())}", file=stderr)


def _bug(error: Exception) -> str:
    return f"internal error, please report it: {type(error).__name__}: {error}"


def _settings(environment: Mapping[str, str]) -> Config:
    """The configuration. Raises ConfigError."""
    from . import config

    return config.load(environment)


def _context(
    settings: Config, environment: Mapping[str, str], domain_uuid: str | None = None
) -> Context:
    """Whose hook we are."""
    from .claims.processes import daemon_above
    from .lifecycle.context import Context

    parent = environment.get(PARENT_VARIABLE, "")
    pid = int(parent) if parent.isascii() and parent.isdigit() else os.getppid()
    return Context(settings, daemon_above(settings.paths.proc, pid), domain_uuid)


def _read(document: bytes) -> Domain:
    try:
        return parse_domain(document.decode())
    except UnicodeDecodeError as error:
        raise DomainXmlError("the domain's XML is not in UTF-8") from error


def _run(
    operation: str, domain: Domain, document: bytes, settings: Config, caller: Caller
) -> Outcome:
    """Do OPERATION for DOMAIN, as DOCUMENT describes it.

    Raises VgpuError to refuse a domain that asks. What changes claims, or was refused because of
    them, asks for a sync, so that the next start works.
    """
    context = _context(settings, caller.environment, domain.uuid)
    try:
        if operation in ("prepare", "start"):
            return Outcome(harm=_begin(operation, context, domain))
        if operation in ("migrate", "restore"):
            return Outcome(answer=_arrive(context, domain, document))
        return Outcome(_follow(operation)(context, domain))
    finally:
        if domain.asks and operation in CHANGES_CLAIMS:
            _ask_for_sync(context.config.paths, caller)


def _begin(operation: str, context: Context, domain: Domain) -> str | None:
    """Do `prepare` or `start`; return what damage a hostdev would do. Raises VgpuError."""
    from .lifecycle import bystander

    harm = bystander.harm(context, domain, operation)
    if harm is not None or not domain.asks:
        return harm
    if operation == "start":
        from .lifecycle.start import start

        start(context, domain)
        return None
    from .lifecycle.prepare import prepare

    try:
        prepare(context, domain)
    except VgpuError:
        from . import refused

        refused.note(context.config.paths, domain.uuid, context.daemon)
        raise
    return None


def _arrive(context: Context, domain: Domain, document: bytes) -> bytes:
    """Do `migrate` or `restore`; libvirt takes an empty answer as no change. Raises VgpuError."""
    if not domain.asks:
        return b""
    from .lifecycle.arrive import arrive

    return arrive(context, domain, document)


def _sync_is_wanted(option: str, stderr: TextIO, caller: Caller) -> int:
    """Ask for a sync, or run those that were asked for."""
    from . import trigger, worker

    try:
        paths = _settings(caller.environment).paths
        if option == WANT_OPTION:
            trigger.ask(paths)
        else:
            worker.run(paths, caller.program)
    except (VgpuError, OSError) as error:
        _tell(stderr, f"no sync can be asked for or run: {error}")
        return REFUSED
    return DONE


def _ask_for_sync(paths: Paths, caller: Caller) -> None:
    """Ask for a sync; where no systemd sees to it, start a worker that does. Never fails."""
    from . import trigger

    trigger.touch(paths)
    if caller.program:
        from . import worker

        if worker.is_needed(paths):
            worker.start(caller.program, WORKER_OPTION, caller.environment)


def _follow(operation: str) -> Callable[[Context, Domain], list[str]]:
    """The function for an operation that never refuses."""
    if operation == "release":
        from .lifecycle.release import release

        return release
    from .lifecycle import running

    return {
        "started": running.started,
        "stopped": running.stopped,
        "reconnect": running.reconnect,
        "attach": running.reconnect,
    }[operation]


def run() -> None:
    """Run as a program."""
    streams = Streams(sys.stdin.buffer, sys.stdout.buffer, sys.stderr)
    sys.exit(main(sys.argv[1:], streams, os.environ, sys.argv[0]))
