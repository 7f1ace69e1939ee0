# SPDX-License-Identifier: LGPL-2.1-or-later
"""Points the hostdevs of definitions at devices that could serve them now, through libvirt.

Only one hostdev at a time is changed, config only, and only if it is still as it was when the
choice was made: what others edit meanwhile stays, and the next look sees it.
"""

from __future__ import annotations

from . import choosing, edits, events, journal, libvirt_api, repoint, starting, unfinished
from .devices import numa
from .domain import edit
from .domain.model import NAMESPACE
from .domain.read import parse_domain
from .errors import DeviceError, DomainXmlError, LibvirtError, LockTimeoutError, StoreError
from .records import TYPE_CHECKING, NamedTuple
from .repoint import Wanting
from .survey import look
from .unfinished import Edit

if TYPE_CHECKING:
    from typing import Any

    from .choosing import Place
    from .config import Config
    from .domain.model import Domain
    from .repoint import Move
    from .survey import Survey

# A definition's lock that is held for longer (seconds): somebody starts the domain just now.
_BUSY = 2.0


class Repointed(NamedTuple):
    """A hostdev that points elsewhere now; None: nowhere, since it wasn't or isn't there."""

    domain_uuid: str
    domain_name: str
    alias: str
    came: str | None
    goes: str | None


class Outcome(NamedTuple):
    """What was changed, and what couldn't be."""

    repointed: tuple[Repointed, ...] = ()
    problems: tuple[str, ...] = ()
    seen: Survey | None = None  # the host as it was when that was decided; None: not looked at
    notes: tuple[str, ...] = ()  # on what was changed, which the next look won't see again


def point(config: Config, connection: Any, dry_run: bool = False) -> Outcome:
    """Point all definitions that ask for a vGPU; with DRY_RUN only say what would be changed.

    First finishes changes that were killed half-way. Raises LibvirtError.
    """
    notes = [] if dry_run else edits.finish(config, connection)
    problems: list[str] = []
    wanting: list[Wanting] = []
    others: list[Domain] = []
    definitions = libvirt_api.definitions(connection)
    if not dry_run:
        known = {each.uuid for each in definitions}
        problems += unfinished.prune(config.paths.state, known)
    for definition in definitions:
        try:
            domain = parse_domain(definition.document)
            asks = bool(domain.requests) or _has_ours(definition.document)
        except DomainXmlError as error:
            problems.append(f"{definition.label} can't be understood: {error}")
            continue
        if asks:
            wanting.append(Wanting(domain, _nodes(config, domain)))
        else:
            others.append(domain)
    seen = look(config)
    host = seen.host._replace(pointed=choosing.pointed_by(others))
    plan = repoint.plan(wanting, config.policy.placement, host)
    done = []
    for move in plan.moves:
        try:
            if dry_run or _make(config, connection, move, notes):
                done.append(_told(move))
                if not dry_run:
                    owner = move.domain.uuid, move.domain.name, move.alias
                    journal.tell(config.paths, events.repointed(*owner, move.came, move.place))
        except (DomainXmlError, LibvirtError, LockTimeoutError, StoreError) as error:
            problems.append(str(error))
    return Outcome(tuple(done), (*problems, *plan.problems), seen, tuple(notes))


def _has_ours(document: str) -> bool:
    """Whether DOCUMENT has our element in its metadata, even one without a request in it."""
    return NAMESPACE in document and edit.metadata(document) is not None


def choose(config: Config, connection: Any, domain: Domain) -> tuple[Place, ...]:
    """Where each hostdev of DOMAIN's definition should point, which may be yet to be defined.

    Raises RequestError where there is no such device, LibvirtError.
    """
    pointed = starting.pointed_by_others(connection, domain.uuid)
    host = look(config).host._replace(pointed=pointed)
    wanting = Wanting(domain, _nodes(config, domain))
    return repoint.place(wanting, config.policy.placement, host)


def _make(config: Config, connection: Any, move: Move, notes: list[str]) -> bool:
    """Make MOVE, unless somebody changed that hostdev or its request, or took its place, meanwhile.

    Adds to NOTES what else is to be told.
    """
    with edits.alone(config, move.domain.uuid, _BUSY):
        definition = libvirt_api.look_up(connection, move.domain.uuid)
        if definition is None or not definition.is_persistent:
            return False
        now = parse_domain(definition.document)
        asked = [request for request in now.requests if request.alias == move.alias]
        if now.hostdev(move.alias) != move.domain.hostdev(move.alias):
            return False
        if asked != ([move.place.request] if move.place else []):
            return False
        before = edit.find_hostdev(definition.document, move.alias)
        after = None
        if move.place:
            source = move.place.source
            if any(source in (hostdev.address, hostdev.uuid) for hostdev in now.hostdevs):
                return False
            after = edit.pointing(before, move.alias, source)
        change = Edit(definition.uuid, move.alias, before, after)
        if note := edits.apply(config.paths.state, definition, change):
            notes.append(note)
    return True


def _told(move: Move) -> Repointed:
    goes = move.place.goes if move.place else None
    return Repointed(move.domain.uuid, move.domain.name, move.alias, move.came, goes)


def _nodes(config: Config, domain: Domain) -> frozenset[int]:
    try:
        return numa.nodes_of(config.paths.sysfs, domain.nodes, domain.cpus)
    except DeviceError:
        return frozenset()  # then `require` finds nothing to require, and says so
