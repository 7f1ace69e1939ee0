# SPDX-License-Identifier: LGPL-2.1-or-later
"""Which hostdev of which definition should point elsewhere; pure.

libvirt reads a hostdev's address before any hook runs, so definitions must be right beforehand.
What is right stays. A domain gets a device of its own while there are enough, and shares one with
other definitions only where there are more of these than devices.
"""

from __future__ import annotations

from collections import Counter

from . import choosing
from .capacity import cleared, narrowed
from .claims.model import Phase
from .devices import backend, mdev
from .devices.mdev_life import mdev_uuid
from .errors import RequestError
from .records import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence, Set

    from .capacity import Host
    from .choosing import Place
    from .claims.store import Claims
    from .devices.model import Gpu, Profile
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
    gpus = {device.name: gpu for gpu in host.inventory.gpus for device in gpu.devices}
    vfs = {device.name for device in host.inventory.devices if not device.is_mdev}
    taken: dict[str, Profile | None] = {}  # by those that were seen to
    # By those that weren't yet: device -> how many point at it.
    rest = Counter(name for one in ordered for name in choosing.pointed_by([one.domain]))
    for one in ordered:
        domain = one.domain
        rest.subtract(own := choosing.pointed_by([domain]))
        try:
            _check(domain)
            # Most stay, and that takes a look at their own GPUs alone.
            places = _staying(one, policy, host, gpus, taken)
            if places is None:
                there = host._replace(pointed=host.pointed | taken.keys() | (+rest).keys())
                places = _places(one, policy, _as_its_own(there, domain), taken)
        except RequestError as error:
            problems.append(f"domain '{domain.name}' can't be served now: {error}")
            taken |= dict.fromkeys(own)
            continue
        taken |= {place.device.name: place.profile for place in places}
        moves += [
            Move(domain, place.request.alias, place.came, place) for place in places if place.moves
        ]
        moves += _without_request(domain, vfs, host.claims)
    return Plan(tuple(moves), tuple(problems))


def _staying(
    one: Wanting,
    policy: str,
    host: Host,
    gpus: Mapping[str, Gpu],
    taken: Mapping[str, Profile | None],
) -> tuple[Place, ...] | None:
    """The places that a definition points at, if nobody else has them and all can serve it.

    GPUS are the host's, by the names of their devices.
    """
    names = choosing.pointed_by([one.domain])
    its_own = {gpus[name].address: gpus[name] for name in names if name in gpus}
    if any(map(backend.is_mdev, names)):  # made on whatever GPU has room
        its_own |= {gpu.address: gpu for gpu in gpus.values() if gpu.backend == mdev.BACKEND}
    near = _as_its_own(narrowed(host, its_own.values()), one.domain)
    return choosing.staying(one.domain, one.nodes, policy, _without(near, taken))


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
) -> tuple[Place, ...]:
    """Places that nobody else has, beside all that others will start; else ones to share."""
    try:
        return choosing.places(one.domain, one.nodes, policy, _without(host, taken))
    except RequestError:
        return choosing.places(one.domain, one.nodes, policy, host)


def _without(host: Host, taken: Mapping[str, Profile | None]) -> Host:
    """HOST beside all that those who have TAKEN its devices will start."""
    here = {device.name for device in host.inventory.devices if device.name in taken}
    planned = {name: profile for name in here if (profile := taken[name])}
    return host._replace(
        planned={**host.planned, **planned}, busy=host.busy | (here - planned.keys())
    )


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


def _without_request(domain: Domain, vfs: Set[str], claims: Claims) -> list[Move]:
    """The hostdevs at our devices whose request is gone; those at carved devices need none.

    VFS: those on which a vGPU can be. What mediated devices are made on may be passed through.
    """
    asked = {request.alias for request in domain.requests}
    carved = {name for name, claim in claims.readable.items() if claim.phase is Phase.CARVED}
    found = []
    for hostdev in domain.hostdevs:
        if hostdev.alias is None or hostdev.alias in asked:
            continue
        name = str(hostdev.address or hostdev.uuid)
        # A mediated device is ours by its UUID, whether it exists or not.
        if name in vfs - carved or name == mdev_uuid(domain.uuid, hostdev.alias):
            found.append(Move(domain, hostdev.alias, name, None))
    return found
