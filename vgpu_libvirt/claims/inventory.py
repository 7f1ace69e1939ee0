# SPDX-License-Identifier: LGPL-2.1-or-later
"""libvirt's own list of running domains: its status files, each counted with its process.

libvirt writes `<run>/qemu/<name>.xml` whole (aside, then rename) once QEMU is forked, and removes
it between the hooks `stopped` and `release`. Old versions leave stale ones behind, hence the
process.
"""

from __future__ import annotations

import functools
import os

from .. import fs
from ..address import PciAddress
from ..domain import read
from ..errors import AddressError, DomainXmlError
from ..records import TYPE_CHECKING, NamedTuple
from . import processes
from .model import Process
from .processes import VANISHED

if TYPE_CHECKING:
    from ..config import Paths
    from ..domain.model import Domain


class LiveDomain(NamedTuple):
    """A domain that runs, as its status file and its process show."""

    uuid: str
    name: str
    id: int | None
    process: Process
    monitor: str
    devices: frozenset[str]  # names of the PCI and mdev devices among its hostdevs
    domain: Domain  # what its status file says of it


class _Listed(NamedTuple):
    domains: tuple[LiveDomain, ...]
    problems: tuple[str, ...]


class LiveDomains(_Listed):
    """All domains that run, and why that list may be incomplete."""

    @property
    def complete(self) -> bool:
        """Whether nothing is missing."""
        return not self.problems

    def by_uuid(self, uuid: str) -> LiveDomain | None:
        """The running domain with this UUID, or None."""
        return self._by_uuid.get(uuid)

    def using(self, device: str) -> LiveDomain | None:
        """The running domain with DEVICE among its hostdevs, or None."""
        return self._by_device.get(device)

    # Each claim is looked up here, and a large host has as many claims as domains.
    @functools.cached_property
    def _by_uuid(self) -> dict[str, LiveDomain]:
        return {domain.uuid: domain for domain in reversed(self.domains)}

    @functools.cached_property
    def _by_device(self) -> dict[str, LiveDomain]:
        return {name: domain for domain in reversed(self.domains) for name in domain.devices}


class Only(NamedTuple):
    """Which domains are wanted: who has one of DEVICES, and who is UUID.

    With WHOLE it also matters whether the list is complete, so whether all others can be read.
    """

    devices: frozenset[str]
    uuid: str = ""
    whole: bool = False

    def may_be_in(self, text: str) -> bool:
        """Whether the status file TEXT may be of such a domain; libvirt writes it, always alike."""
        return bool(self.uuid and self.uuid in text) or any(map(text.__contains__, self._spelt))

    @property
    def _spelt(self) -> tuple[str, ...]:
        return tuple(map(_spelt, sorted(self.devices)))


@functools.lru_cache(maxsize=64)  # asked for with every file
def _spelt(device: str) -> str:
    """DEVICE as the status file of a domain that has it names it."""
    try:
        address = PciAddress.parse(device)
    except AddressError:
        return device  # the UUID of a mediated device
    return " ".join(f"{name}='{value}'" for name, value in address.to_xml().items())


def live_domains(paths: Paths, only: Only | None = None) -> LiveDomains:
    """Read all status files. No directory: no domains.

    ONLY: others than these are not in it. A large host has a thousand, and hooks read them all.
    """
    directory = f"{paths.libvirt_run}/qemu"
    domains = []
    problems = []
    try:
        names = sorted(os.listdir(directory))
    except FileNotFoundError:
        return LiveDomains((), ())
    except OSError as error:
        return LiveDomains((), (f"{directory} can't be read: {fs.reason(error)}",))
    for name in names:
        if not name.endswith(".xml"):
            continue
        path = f"{directory}/{name}"
        try:
            domain = _live(paths, path, only)
        except FileNotFoundError:
            continue  # it ended while we looked
        except OSError as error:
            problems.append(f"the status file {path} can't be read: {fs.reason(error)}")
            continue
        except DomainXmlError as error:
            problems.append(f"the status file {path} can't be understood: {error}")
            continue
        if domain:
            domains.append(domain)
    return LiveDomains(tuple(domains), tuple(problems))


def live_domain(paths: Paths, name: str, uuid: str) -> LiveDomain | None:
    """The running domain with UUID, looked for first in the file that its NAME suggests."""
    try:
        found = _live(paths, f"{paths.libvirt_run}/qemu/{name}.xml")
    except (OSError, DomainXmlError):
        found = None  # odd names are escaped; and the whole list says what is unreadable
    return found if found and found.uuid == uuid else live_domains(paths).by_uuid(uuid)


def _live(paths: Paths, path: str, only: Only | None = None) -> LiveDomain | None:
    text = fs.read_text(path)
    if only and not only.may_be_in(text) and (not only.whole or read.is_status(text)):
        return None
    status = read.parse_status(text)
    domain = status.domain
    if status.pid is None:
        raise DomainXmlError("it names no process")
    try:
        stat = processes.read_stat(paths.proc, status.pid)
    except VANISHED:
        return None
    except ValueError as error:
        raise DomainXmlError(str(error)) from error
    process = Process(status.pid, stat.start)
    if processes.is_dead(paths.proc, status.pid, stat):
        return None
    if not processes.names_uuid(paths.proc, status.pid, domain.uuid):
        return None
    devices = {str(hostdev.address) for hostdev in domain.hostdevs if hostdev.address}
    devices.update(hostdev.uuid for hostdev in domain.hostdevs if hostdev.uuid)
    return LiveDomain(
        domain.uuid,
        domain.name,
        domain.id,
        process,
        status.monitor or "",
        frozenset(devices),
        domain,
    )
