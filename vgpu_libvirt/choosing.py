# SPDX-License-Identifier: LGPL-2.1-or-later
"""Chooses a device for each vGPU of one definition: what is right stays where it is; pure."""

from __future__ import annotations

from . import placement, together
from .capacity import cleared, narrowed
from .devices import backend, mdev
from .devices.mdev_life import mdev_uuid
from .domain.read import parse_domain
from .errors import DomainXmlError, RequestError
from .placement import Company, Placed
from .records import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from .address import Location
    from .capacity import Host
    from .devices.model import Device, Gpu, Profile
    from .domain.model import Domain, Request
    from .libvirt_api import Definition
    from .together import Choice, Wish

_STAYS = "its definition points there already"


class Place(NamedTuple):
    """A device for a request; `came` is where its hostdev points, None: there is no hostdev."""

    request: Request
    profile: Profile  # as the device lists it
    device: Device  # of a mediated one, where it can be made
    source: Location  # what its hostdev must name: a VF's address, or a mediated device's UUID
    came: str | None
    why: str  # the end of a sentence

    @property
    def goes(self) -> str:
        """The device that its hostdev must name, as claims and the command line call it."""
        return str(self.source)

    @property
    def moves(self) -> bool:
        """Whether its hostdev has to be pointed elsewhere, or added."""
        return self.came != self.goes


def source_of(device: Device, domain: Domain, alias: str) -> Location:
    """What the hostdev ALIAS of DOMAIN must name to get DEVICE."""
    return mdev_uuid(domain.uuid, alias) if device.is_mdev else device.address


def pointed_by(domains: Iterable[Domain]) -> frozenset[str]:
    """The devices that the hostdevs of DOMAINS name."""
    return frozenset(
        str(hostdev.address or hostdev.uuid)
        for domain in domains
        for hostdev in domain.hostdevs
        if hostdev.address or hostdev.uuid
    )


def others(definitions: Iterable[Definition], uuid: str) -> Iterator[Domain]:
    """The domains of all DEFINITIONS but that with UUID.

    Without those that can't be understood: what they point at only costs a preference.
    """
    for definition in definitions:
        if definition.uuid != uuid:
            try:
                yield parse_domain(definition.document)
            except DomainXmlError:
                continue


def one_more(
    domain: Domain, request: Request, nodes: frozenset[int], policy: str, host: Host
) -> Choice:
    """A device for REQUEST beside the vGPUs that DOMAIN has, which stay where they are.

    DOMAIN lives on NODES. Raises RequestError, with the reason for each GPU.
    """
    company = placed_beside(domain, {request.alias}, host)._replace(nodes=nodes)
    wish = together.Wish(request, placement.resolve(request.profile, host))
    host = host._replace(busy=host.busy | pointed_by([domain]))
    (choice,) = together.place([wish], policy, host, company)
    return choice


def placed_beside(domain: Domain, aliases: Collection[str], host: Host) -> Company:
    """What DOMAIN has besides the vGPUs with ALIASES, where its hostdevs point."""
    devices = {device.name: device for device in host.inventory.devices}
    there = []
    for other in domain.requests:
        device = devices.get(_pointed(domain, other) or "")
        if other.alias in aliases or device is None:
            continue
        try:
            profile = placement.resolve(other.profile, host)
        except RequestError:
            profile = None  # it won't start, whatever we do
        there.append(Placed(other, device, profile))
    return Company(others=tuple(there))


def check_hostdevs(domain: Domain, label: str) -> None:
    """Check that the hostdevs of DOMAIN's requests could get a vGPU; LABEL names it in a sentence.

    Raises RequestError.
    """
    for request in domain.requests:
        hostdev = domain.hostdev(request.alias)
        if hostdev and hostdev.hindrance:
            raise RequestError(
                f"the hostdev '{request.alias}' of {label} has {hostdev.hindrance}, with which it "
                f"gets no vGPU; run 'virt-vgpu fix-xml {domain.name}'"
            )


def places(domain: Domain, nodes: frozenset[int], policy: str, host: Host) -> tuple[Place, ...]:
    """A device of its own for each request of DOMAIN, which lives on NODES: all or none.

    HOST is as DOMAIN may choose on it: `pointed` are the devices of other definitions. Raises
    RequestError, with the reason for each GPU.
    """
    wishes = _wishes(domain, host)
    kept = _kept(domain, wishes, nodes, policy, host)
    try:
        return _chosen(domain, wishes, kept, nodes, policy, host)
    except RequestError as error:
        if not kept:
            raise
        try:  # what stays may be what stands in the way
            return _chosen(domain, wishes, {}, nodes, policy, host)
        except RequestError:
            raise error from None


def staying(
    domain: Domain, nodes: frozenset[int], policy: str, host: Host
) -> tuple[Place, ...] | None:
    """What `places` gives where all vGPUs of DOMAIN stay where they are; None: not all can.

    HOST needs no other GPUs than those that DOMAIN's hostdevs point at.
    """
    try:
        wishes = _wishes(domain, host)
        kept = _kept(domain, wishes, nodes, policy, host)
    except RequestError:
        return None  # whoever looks at all GPUs says why
    if any(wish.request.alias not in kept for wish in wishes):
        return None
    return _chosen(domain, wishes, kept, nodes, policy, host)


def _wishes(domain: Domain, host: Host) -> list[Wish]:
    return [
        together.Wish(request, placement.resolve(request.profile, host))
        for request in domain.requests
    ]


def _kept(
    domain: Domain, wishes: list[Wish], nodes: frozenset[int], policy: str, host: Host
) -> dict[str, Placed]:
    """The vGPUs whose hostdevs point where they could start as they are, by alias."""
    kept: dict[str, Placed] = {}
    for wish in wishes:
        name = _pointed(domain, wish.request)
        if name is None:
            continue
        company = Company(nodes, tuple(kept.values()))
        near = _beside(narrowed(host, gpus_at(name, host)), kept.values())
        ranking = placement.rank(wish.profile, wish.request, policy, near, company)
        for device in ranking.devices:
            # A mediated device is made where there is room, and stays what it is.
            if name == str(source_of(device, domain, wish.request.alias)):
                kept[wish.request.alias] = Placed(wish.request, device, wish.profile)
                break
    return kept


def _chosen(
    domain: Domain,
    wishes: list[Wish],
    kept: dict[str, Placed],
    nodes: frozenset[int],
    policy: str,
    host: Host,
) -> tuple[Place, ...]:
    """A place for each wish: those KEPT where they are, the others anew."""
    rest = [wish for wish in wishes if wish.request.alias not in kept]
    # libvirt takes no two hostdevs at one address, so nothing moves to where another still points.
    there = _beside(host, kept.values())
    there = there._replace(busy=there.busy | pointed_by([domain]))
    choices = together.place(rest, policy, there, Company(nodes, tuple(kept.values())))
    found = {
        wish.request.alias: (choice.device, choice.why)
        for wish, choice in zip(rest, choices, strict=True)
    }
    found |= {alias: (placed.device, _STAYS) for alias, placed in kept.items()}
    return tuple(_place(domain, wish, *found[wish.request.alias], host) for wish in wishes)


def _place(domain: Domain, wish: Wish, device: Device, why: str, host: Host) -> Place:
    return Place(
        wish.request,
        profile_on(device, wish.profile, host),
        device,
        source_of(device, domain, wish.request.alias),
        _pointed(domain, wish.request),
        why,
    )


def profile_on(device: Device, profile: Profile, host: Host) -> Profile:
    """PROFILE under the id that it has on DEVICE, which may have to be cleared first."""
    known = (each for each in host.profiles if each.name == profile.name)
    of_its_kind = (each for each in known if isinstance(each.id, str) == device.is_mdev)
    return device.listed(profile) or next(of_its_kind, profile)


def gpus_at(name: str, host: Host) -> Iterator[Gpu]:
    """The GPUs on which a hostdev that names NAME can be: a VF's, or all with mediated devices."""
    for gpu in host.inventory.gpus:
        is_mdev = backend.is_mdev(name) and gpu.backend == mdev.BACKEND
        if is_mdev or any(device.name == name for device in gpu.devices):
            yield gpu


def _beside(host: Host, kept: Iterable[Placed]) -> Host:
    """HOST once those KEPT have their devices."""
    for each in kept:
        if host.is_dirty(each.device):
            host = cleared(host, each.device)
        if each.profile:
            host = host._replace(planned={**host.planned, each.device.name: each.profile})
    return host


def _pointed(domain: Domain, request: Request) -> str | None:
    hostdev = domain.hostdev(request.alias)
    return str(hostdev.address or hostdev.uuid or "") or None if hostdev else None
