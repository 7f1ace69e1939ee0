# SPDX-License-Identifier: LGPL-2.1-or-later
"""Reads libvirt's persistent definitions from its files, and what a sync would do about them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

from .. import choosing, repoint
from ..devices import vendor_vfio
from ..domain.read import parse_domain
from ..errors import DeviceError, DomainXmlError, RequestError
from ..repoint import Plan, Wanting
from ..survey import nodes_of
from . import reading

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ..address import PciAddress
    from ..capacity import Host
    from ..config import Config
    from ..domain.model import Domain
    from ..survey import Survey


class Defined(NamedTuple):
    """A persistent domain, as its file has it."""

    domain: Domain
    age: float  # seconds since libvirt wrote it
    is_autostarted: bool
    is_running: bool
    hindrance: str | None  # why no device could serve it now, where libvirt starts it at boot

    @property
    def label(self) -> str:
        """The domain as a sentence names it."""
        return f"domain '{self.domain.name}' ({self.domain.uuid})"


class Definitions(NamedTuple):
    """All of them, and what of the host bears on them."""

    all: tuple[Defined, ...]
    plan: Plan  # what a sync would change now
    there: frozenset[PciAddress]  # the PCI devices that they name and that exist

    @property
    def asking(self) -> tuple[Defined, ...]:
        """Those that ask for a vGPU."""
        return tuple(one for one in self.all if one.domain.asks)


def look(config: Config, seen: Survey, now: float, unseen: list[str]) -> Definitions:
    """Read all definitions; NOW is the time in seconds since the epoch."""
    root = f"{config.paths.libvirt_etc}/qemu"
    autostarted = frozenset(reading.names(f"{root}/autostart", unseen))
    read: list[tuple[Domain, float, bool]] = []
    for name in reading.names(root, unseen):
        path = f"{root}/{name}"
        text = reading.text(path, unseen) if name.endswith(".xml") else None
        if text is None:
            continue
        try:
            read.append((parse_domain(text), now - os.stat(path).st_mtime, name in autostarted))
        except DomainXmlError as error:
            unseen.append(f"{path} can't be understood: {error}")
        except OSError:
            continue  # it was undefined while we looked
    domains = [domain for domain, _, _ in read]
    wanting = [_wanting(config, domain) for domain in domains if domain.asks]
    others = choosing.pointed_by(domain for domain in domains if not domain.asks)
    host = seen.host._replace(pointed=others)
    return Definitions(
        tuple(
            Defined(
                domain,
                age,
                starts,
                seen.world.domains.by_uuid(domain.uuid) is not None,
                # Only of those that should run, since it takes a look at all GPUs.
                _hindrance(config, domain, host) if starts and domain.asks else None,
            )
            for domain, age, starts in read
        ),
        repoint.plan(wanting, config.policy.placement, host),
        frozenset(_existing(config, domains)),
    )


def _wanting(config: Config, domain: Domain) -> Wanting:
    try:
        return Wanting(domain, nodes_of(config, domain))
    except DeviceError:
        return Wanting(domain, frozenset())  # then `require` finds nothing to require


def _hindrance(config: Config, domain: Domain, host: Host) -> str | None:
    try:
        repoint.place(_wanting(config, domain), config.policy.placement, host)
    except RequestError as error:
        return str(error)
    return None


def _existing(config: Config, domains: Iterable[Domain]) -> Iterable[PciAddress]:
    for domain in domains:
        for hostdev in domain.hostdevs:
            if hostdev.address and os.path.exists(
                vendor_vfio.directory(config.paths.sysfs, hostdev.address)
            ):
                yield hostdev.address
