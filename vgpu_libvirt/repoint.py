# SPDX-License-Identifier: LGPL-2.1-or-later
"""Which hostdev of which definition should point elsewhere; pure.

libvirt reads a hostdev's address before any hook runs, so definitions must be right beforehand.
What is right stays. A domain gets a device of its own while there are enough, and shares one with
other definitions only where there are more of these than devices.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from . import choosing
from .capacity import cleared
from .errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .capacity import Host
    from .choosing import Place
    from .devices.model import Profile
    from .domain.model import Domain


class Wanting(NamedTuple):
    """A persistent definition with our element in its metadata."""

    domain: Domain
    nodes: frozenset[int]  # NUMA nodes that it lives on


class Move(NamedTuple):
    """A hostdev that shall point elsewhere, be added, or go with its request."""

    domain: Domain
    alias: str
    came: str | None  # the device that it points at; None: there is no hostdev
    place: Place | None  # None: its request is gone


class Plan(NamedTuple):
    """What to change, and a sentence for each definition that can't be served now."""

    moves: tuple[Move, ...]
    problems: tuple[str, ...]


def plan(definitions: Sequence[Wanting], policy: str, host: Host) -> Plan:
    """Decide for all DEFINITIONS, in the order of their UUIDs; done twice it changes nothing."""
    moves: list[Move] = []
    problems = []
    ordered = sorted(definitions, key=lambda one: one.domain.uuid)
    taken: dict[str, Profile | None] = {}  # by those that were seen to
    for number, one in enumerate(ordered):
        domain = one.domain
        rest = choosing.pointed_by(other.domain for other in ordered[number + 1 :])
        try:
            _check(domain)
            places = _places(one, policy, _as_its_own(host, domain), taken, rest)
        except RequestError as error:
            problems.append(f"domain '{domain.name}' can't be served now: {error}")
            taken |= dict.fromkeys(choosing.pointed_by([domain]))
            continue
        taken |= {place.device.name: place.profile for place in places}
        moves += [
            Move(domain, place.request.alias, place.came, place) for place in places if place.moves
        ]
        moves += _without_request(domain, host)
    return Plan(tuple(moves), tuple(problems))


def place(one: Wanting, policy: str, host: Host) -> tuple[Place, ...]:
    """A device for each request of ONE definition, where all others stay as they are.

    Raises RequestError.
    """
    _check(one.domain)
    return choosing.places(one.domain, one.nodes, policy, _as_its_own(host, one.domain))


def _places(
    one: Wanting,
    policy: str,
    host: Host,
    taken: Mapping[str, Profile | None],
    rest: frozenset[str],
) -> tuple[Place, ...]:
    """Places that nobody else has, beside all that others will start; else ones to share."""
    host = host._replace(pointed=host.pointed | taken.keys() | rest)
    planned = {name: profile for name, profile in taken.items() if profile}
    alone = host._replace(
        planned={**host.planned, **planned}, busy=host.busy | (taken.keys() - planned.keys())
    )
    try:
        return choosing.places(one.domain, one.nodes, policy, alone)
    except RequestError:
        return choosing.places(one.domain, one.nodes, policy, host)


def _as_its_own(host: Host, domain: Domain) -> Host:
    """HOST as it will be when DOMAIN has ended: what it has now is there for its next start."""
    for claim in host.claims.of_domain(domain.uuid):
        host = host._replace(busy=host.busy - {claim.device})
        for device in host.inventory.devices:
            if device.name == claim.device:
                host = cleared(host, device)
    return host


def _check(domain: Domain) -> None:
    if domain.request_error:
        raise RequestError(
            f"its request in the metadata can't be understood: {domain.request_error}; run "
            f"'virt-vgpu fix-xml {domain.name}'"
        )
    choosing.check_hostdevs(domain, "it")


def _without_request(domain: Domain, host: Host) -> list[Move]:
    """The hostdevs at our devices whose request is gone."""
    devices = {device.name for device in host.inventory.devices}
    asked = {request.alias for request in domain.requests}
    return [
        Move(domain, hostdev.alias, str(hostdev.address), None)
        for hostdev in domain.hostdevs
        if hostdev.alias and hostdev.alias not in asked and str(hostdev.address) in devices
    ]
