# SPDX-License-Identifier: LGPL-2.1-or-later
"""Finds, for each request of a domain, the device that its hostdev names; pure."""

from __future__ import annotations

from ..devices.model import location_order
from ..errors import RequestError
from ..records import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ..address import Location
    from .model import Domain, Hostdev, Request


class Wanted(NamedTuple):
    """A request with the device that libvirt will give the domain for it."""

    request: Request
    source: Location  # what its hostdev names: a VF's address, or a mediated device's UUID

    @property
    def device(self) -> str:
        """The device's name."""
        return str(self.source)

    @property
    def is_mdev(self) -> bool:
        """Whether it is a mediated device, which is made where there is room for it."""
        return isinstance(self.source, str)


def match(domain: Domain) -> tuple[Wanted, ...]:
    """Pair each request with its hostdev's device, VFs first, in the order of their addresses.

    Raises RequestError for metadata that can't be understood, and for a hostdev that is missing,
    of another type, managed, without an address that could be real, with another UUID than is made
    for it, or shared by two requests.
    """
    if domain.request_error:
        raise RequestError(
            f"the vGPU request in the metadata of domain '{domain.name}' can't be understood: "
            f"{domain.request_error}"
        )
    found: dict[Location, Wanted] = {}
    aliases = set()
    for request in domain.requests:
        if request.alias in aliases:
            raise RequestError(
                f"domain '{domain.name}' asks for '{request.alias}' twice; give each vGPU an alias "
                "of its own"
            )
        aliases.add(request.alias)
        wanted = Wanted(request, _source(domain, request))
        if wanted.source in found:
            raise RequestError(
                f"domain '{domain.name}' asks for two vGPUs on one device, {wanted.device}: "
                f"'{found[wanted.source].request.alias}' and '{request.alias}'; point one hostdev "
                "at another"
            )
        found[wanted.source] = wanted
    return tuple(found[source] for source in sorted(found, key=location_order))


def _source(domain: Domain, request: Request) -> Location:
    hostdev = domain.hostdev(request.alias)
    if hostdev is None:
        known = sorted(other.alias for other in domain.hostdevs if other.alias)
        raise RequestError(
            f"domain '{domain.name}' asks for a vGPU at '{request.alias}', but has no hostdev with "
            f"that alias (its hostdevs' aliases: {', '.join(known) or 'none'}); run "
            "'virt-vgpu sync', which adds one, or says why there is no device for it"
        )
    where = f"the hostdev '{request.alias}' of domain '{domain.name}'"
    if hostdev.kind == "mdev":
        return uuid_of(domain, request, hostdev)
    if hostdev.kind != "pci":
        raise RequestError(
            f"{where} is of type '{hostdev.kind}'; it must be of type 'pci' or 'mdev'"
        )
    if hostdev.managed:
        raise RequestError(
            f"{where} has managed='yes', with which libvirt would unbind the driver that makes the "
            "vGPU; set managed='no'"
        )
    if request.params is not None:
        raise RequestError(
            f"the vGPU '{request.alias}' of domain '{domain.name}' has params, which only mediated "
            "devices take; remove them"
        )
    if hostdev.address is None or hostdev.address.is_placeholder:
        raise RequestError(
            f"{where} {_no_address(hostdev)}; give it the address of a VF, as "
            "'virt-vgpu list' shows them"
        )
    return hostdev.address


def uuid_of(domain: Domain, request: Request, hostdev: Hostdev) -> str:
    """What HOSTDEV, a mediated device's, names. Raises RequestError for another than its own."""
    from ..devices.mdev_life import mdev_uuid  # most domains have none

    wanted = mdev_uuid(domain.uuid, request.alias)
    if hostdev.uuid != wanted:
        raise RequestError(
            f"the hostdev '{request.alias}' of domain '{domain.name}' names the mediated device "
            f"{hostdev.uuid or 'without a UUID'}, not {wanted}, which is made for it; run "
            "'virt-vgpu sync'"
        )
    return wanted


def _no_address(hostdev: Hostdev) -> str:
    if hostdev.address:
        return f"has the placeholder {hostdev.address} as its source's address"
    if hostdev.address_error:
        return f"has no usable source address ({hostdev.address_error})"
    return "has no source address"
