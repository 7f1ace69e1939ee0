# SPDX-License-Identifier: LGPL-2.1-or-later
"""What becomes of a program's call about a domain that asks for a vGPU.

Starts reserve devices and are pointed there; nothing else is refused, or takes a device.
"""

from __future__ import annotations

import os
import uuid
from functools import partial
from typing import TYPE_CHECKING, Any

import libvirt

from .. import choosing, fs, libvirt_api, pointing, starting
from ..claims import store
from ..claims.liveness import Answer
from ..domain import amend
from ..domain.model import NAMESPACE
from ..domain.read import parse_domain
from ..errors import LibvirtError, RequestError, VgpuError
from ..lifecycle.context import Context
from . import calls, local, plugging

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..choosing import Place
    from ..config import Config
    from ..domain.model import Domain
    from .calls import Call
    from .local import Settings

    How = Callable[[Call], Any] | None

_CREATING = ("createXML", "createXMLWithFiles", "createLinux")
_DEFINING = ("defineXML", "defineXMLFlags")
_STARTING = ("create", "createWithFlags", "createWithFiles")
_MIGRATING = ("migrate", "migrate2", "migrate3")


def interpose(connection: type, domain: type) -> None:
    """See to the calls that define, start and change domains, of these classes, once."""
    for name in _CREATING:
        calls.wrap(connection, name, _see_creating)
    for name in _DEFINING:
        calls.wrap(connection, name, _see_defining)
    for name in _STARTING:
        calls.wrap(domain, name, _see_starting)
    for name in _MIGRATING:
        calls.wrap(domain, name, _see_migrating)
    plugging.interpose(domain)


def _see_migrating(_call: Call) -> How:
    return _migrate


def _migrate(call: Call) -> Any:
    domain = call()
    calls.came_to(domain, call.argument("dconn"))
    return domain


# --- a document that is started ---


def _see_creating(call: Call) -> How:
    document = call.document
    if document is None or NAMESPACE not in document:
        return None
    settings = local.settings_for(call.connection)
    document = amend.with_uuid(document)
    domain = _asking(document)
    return partial(_create, settings, document, domain) if settings and domain else None


def _create(settings: Settings, document: str, domain: Domain, call: Call) -> Any:
    _check(settings, domain)
    config, connection = settings.config, call.connection
    started = _Document(config, document, domain, call)
    _, claims = starting.try_devices(config, connection, started)
    starting.check_taken(config, _label(domain), claims)
    return call.result


class _Document:
    """A domain that is started from a document, by a program's call."""

    def __init__(self, config: Config, document: str, domain: Domain, call: Call) -> None:
        self._config = config
        self._document = document
        self._domain = domain
        self._call = call

    def look(self) -> tuple[Context, Domain]:
        claims = store.of_domain(self._config.paths.state, self._domain.uuid)
        active = libvirt_api.active(self._call.connection)
        answer = Answer(active, frozenset(claim.claim_id for claim in claims))
        return Context(self._config, libvirt=answer), self._domain

    def create(self, places: tuple[Place, ...]) -> None:
        document = _pointed(self._document, places)
        _start(self._call, _label(self._domain), document)


# --- a definition that is started ---


def _see_starting(call: Call) -> How:
    settings = local.settings_for(call.connection)
    handle = call.owner
    if settings is None or not _may_ask(settings.config, handle.name()):
        return None
    document = handle.XMLDesc(libvirt.VIR_DOMAIN_XML_INACTIVE)
    domain = _asking(document) if NAMESPACE in document else None
    # A saved state names its devices itself; where there is nothing to start, libvirt says so.
    if domain is None or handle.isActive() or handle.hasManagedSaveImage():
        return None
    return partial(_start_defined, settings, domain)


def _may_ask(config: Config, name: str) -> bool:
    """Whether libvirt's file of the domain NAME mentions us, or can't tell.

    So libvirt isn't asked about domains that it doesn't know, which it would report.
    """
    directory = f"{config.paths.libvirt_etc}/qemu"
    try:
        return NAMESPACE in fs.read_text(f"{directory}/{name}.xml")
    except FileNotFoundError:
        return not os.path.isdir(directory)
    except OSError:
        return True


def _start_defined(settings: Settings, domain: Domain, call: Call) -> Any:
    if settings.error:
        raise settings.error
    config, connection = settings.config, call.connection
    definition = libvirt_api.find(connection, domain.uuid)
    _, claims = starting.start_by(
        config, connection, definition, lambda found: _start(call, found.label)
    )
    starting.check_taken(config, definition.label, claims)
    return call.result


# --- a document that is defined ---


def _see_defining(call: Call) -> How:
    document = call.document
    if document is None or NAMESPACE not in document:
        return None
    settings = local.settings_for(call.connection)
    domain = _asking(amend.with_uuid(document))
    return partial(_define, settings, document, domain) if settings and domain else None


def _define(settings: Settings, document: str, domain: Domain, call: Call) -> Any:
    """Define it, its hostdevs at devices that can serve it now, if there are any.

    Its start has the last word, so a definition that can't be served today is as good as any.
    """
    try:
        _check(settings, domain)
        places = pointing.choose(settings.config, call.connection, domain)
        pointed = _pointed(document, places)
    except VgpuError as error:
        calls.log.warning("%s is defined as it is: %s", _label(domain), error)
        return call()
    return call(pointed)


# --- all of them ---


def _asking(document: str) -> Domain | None:
    """The domain of a program's own DOCUMENT, if it asks for a vGPU.

    Raises DomainXmlError, ValueError for a UUID that is none.
    """
    domain = parse_domain(document)
    return domain._replace(uuid=str(uuid.UUID(domain.uuid))) if domain.asks else None


def _check(settings: Settings, domain: Domain) -> None:
    if settings.error:
        raise settings.error
    if domain.request_error:
        raise RequestError(
            f"the vGPU request in the metadata of {_label(domain)} can't be understood: "
            f"{domain.request_error}"
        )
    choosing.check_hostdevs(domain, _label(domain))


def _pointed(document: str, places: tuple[Place, ...]) -> str:
    moves = {place.request.alias: place.source for place in places if place.moves}
    return amend.pointing(document, moves)


def _start(call: Call, label: str, document: str | None = None) -> None:
    try:
        call(document)
    except libvirt.libvirtError as error:
        raise LibvirtError(libvirt_api.start_failure(label, error)) from error


def _label(domain: Domain) -> str:
    return f"domain '{domain.name}' ({domain.uuid})"
