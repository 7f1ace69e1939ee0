# SPDX-License-Identifier: LGPL-2.1-or-later
"""All that we ask of libvirt; with the shim the only one that imports it, never part of a hook.

Nobody calls this while holding a lock that a hook may wait for, of the host or of a device: libvirt
holds a domain's lock while a hook runs.
"""

from __future__ import annotations

import contextlib
import re
import threading
import uuid

import libvirt

from .claims.liveness import Answer
from .domain import edit
from .domain.model import NAMESPACE, PREFIX
from .domain.read import parse_domain
from .errors import DomainXmlError, LibvirtError
from .records import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any, TypeVar

    _T = TypeVar("_T")

# How our hook begins a sentence; libvirt shows it at the end of much else.
_HOOK = re.compile(r"vgpu-libvirt: (.+)")
# What QEMU says where a guest has been asked already to let a device go.
_UNPLUGGING = "is already in the process of unplug"
_NO_ID = -1  # of a domain that isn't active


class Definition(NamedTuple):
    """A domain as libvirt has it, and its handle there; `live` makes it the one that runs."""

    name: str
    uuid: str
    document: str  # the inactive XML; or that of what runs
    is_active: bool
    is_persistent: bool
    handle: Any  # libvirt.virDomain
    affects: int = libvirt.VIR_DOMAIN_AFFECT_CONFIG  # what changes go to

    @property
    def is_live(self) -> bool:
        """Whether it is the domain as it runs, not its definition."""
        return bool(self.affects == libvirt.VIR_DOMAIN_AFFECT_LIVE)

    @property
    def label(self) -> str:
        """The domain as a sentence names it."""
        return f"domain '{self.name}' ({self.uuid})"


@contextlib.contextmanager
def connect(uri: str) -> Iterator[Any]:
    """A connection to the libvirt at URI. Raises LibvirtError."""
    # Its own handler prints every error to stderr before we can say it in a sentence.
    libvirt.registerErrorHandler(_stay_quiet, None)
    try:
        connection = libvirt.open(uri)
    except libvirt.libvirtError as error:
        raise LibvirtError(
            f"libvirt can't be reached at {uri}: {_message(error)}; see that libvirtd or virtqemud "
            "runs, and that you may use it"
        ) from error
    try:
        yield connection
    finally:
        with contextlib.suppress(libvirt.libvirtError):
            connection.close()


def ask(
    uri: str, asked_after: frozenset[str], seconds: float, with_devices: bool = False
) -> Answer:
    """Ask libvirt which domains are active; give it SECONDS, since it waits for every hook.

    ASKED_AFTER are the ids of the claims that stood before; the answer is about their owners.
    WITH_DEVICES it says too what the active ones have, which costs a question each.
    """

    def listen() -> Answer:
        try:
            with connect(uri) as connection:
                devices = devices_in_use(connection) if with_devices else None
                return Answer(active(connection), asked_after, devices=devices)
        except LibvirtError as error:
            raise LibvirtError(f"libvirt doesn't answer: {error}") from error

    try:
        return _within(seconds, listen)
    except LibvirtError as error:
        return Answer(frozenset(), asked_after, str(error))


def version(uri: str, seconds: float) -> int:
    """The version of the libvirt at URI: 9007000 is 9.7.0. Gives it SECONDS. Raises LibvirtError.

    Any user may ask. Where no daemon runs, its socket would start one.
    """

    def listen() -> int:
        libvirt.registerErrorHandler(_stay_quiet, None)
        try:
            connection = libvirt.openReadOnly(uri)
            try:
                return int(connection.getLibVersion())
            finally:
                connection.close()
        except libvirt.libvirtError as error:
            raise LibvirtError(f"libvirt doesn't answer: {_message(error)}") from error

    return _within(seconds, listen)


def _within(seconds: float, listen: Callable[[], _T]) -> _T:
    """What LISTEN returns within SECONDS. Raises LibvirtError, as LISTEN does."""
    answers: list[_T] = []
    failures: list[LibvirtError] = []

    def run() -> None:
        try:
            answers.append(listen())
        except LibvirtError as error:
            failures.append(error)

    # A call to libvirt can't be ended; a thread of which nobody waits for the end can be left.
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if answers:
        return answers[0]
    if failures:
        raise failures[0]
    raise LibvirtError(f"libvirt runs, but hasn't answered for {seconds:g} s")


def find(connection: Any, wanted: str) -> Definition:
    """The domain that WANTED names, by UUID or by name. Raises LibvirtError."""
    lookups = [connection.lookupByName]
    with contextlib.suppress(ValueError):
        identity = str(uuid.UUID(wanted))
        lookups.insert(0, lambda _: connection.lookupByUUIDString(identity))
    for lookup in lookups:
        try:
            return _definition(lookup(wanted))
        except libvirt.libvirtError as error:
            if error.get_error_code() != libvirt.VIR_ERR_NO_DOMAIN:
                raise LibvirtError(
                    f"domain '{wanted}' can't be looked up: {_message(error)}"
                ) from error
    raise LibvirtError(
        f"there is no domain '{wanted}' at {connection.getURI()}; 'virsh list --all' shows those "
        "that are"
    )


def look_up(connection: Any, identity: str) -> Definition | None:
    """The domain with this UUID, or None. Raises LibvirtError."""
    try:
        return _definition(connection.lookupByUUIDString(identity))
    except libvirt.libvirtError as error:
        if error.get_error_code() == libvirt.VIR_ERR_NO_DOMAIN:
            return None
        raise LibvirtError(f"domain {identity} can't be looked up: {_message(error)}") from error


def definitions(connection: Any) -> tuple[Definition, ...]:
    """All persistent domains, running or not. Raises LibvirtError."""
    found = []
    try:
        handles = connection.listAllDomains(libvirt.VIR_CONNECT_LIST_DOMAINS_PERSISTENT)
    except libvirt.libvirtError as error:
        raise LibvirtError(f"the domains can't be listed: {_message(error)}") from error
    for handle in handles:
        try:
            document = handle.XMLDesc(libvirt.VIR_DOMAIN_XML_INACTIVE)
        except libvirt.libvirtError as error:
            if error.get_error_code() != libvirt.VIR_ERR_NO_DOMAIN:  # it went while we looked
                raise LibvirtError(f"a domain can't be read: {_message(error)}") from error
        else:
            # One question a domain; the rest came with the list, an inactive one without an id.
            name, identity = handle.name(), handle.UUIDString()
            is_active = handle.ID() != _NO_ID
            found.append(Definition(name, identity, document, is_active, True, handle))
    return tuple(found)


def live(definition: Definition) -> Definition:
    """The domain as it runs: its XML now, and changes go to it alone. Raises LibvirtError."""
    return look_again(definition._replace(affects=libvirt.VIR_DOMAIN_AFFECT_LIVE))


def look_again(side: Definition) -> Definition:
    """SIDE, the definition or what runs, as it is now. Raises LibvirtError."""
    handle = side.handle
    try:
        is_active = bool(handle.isActive())
        document = handle.XMLDesc(0 if side.is_live else libvirt.VIR_DOMAIN_XML_INACTIVE)
    except libvirt.libvirtError as error:
        raise LibvirtError(f"{side.label} can't be read: {_message(error)}") from error
    return side._replace(document=document, is_active=is_active)


def active(connection: Any) -> frozenset[str]:
    """The UUIDs of the domains that are active. Raises LibvirtError."""
    try:
        handles = connection.listAllDomains(libvirt.VIR_CONNECT_LIST_DOMAINS_ACTIVE)
    except libvirt.libvirtError as error:
        raise LibvirtError(f"the active domains can't be listed: {_message(error)}") from error
    return frozenset(handle.UUIDString() for handle in handles)


def devices_in_use(connection: Any) -> dict[str, str]:
    """What the active domains have, those that are just starting too: device -> domain's label.

    Raises LibvirtError.
    """
    found: dict[str, str] = {}
    try:
        for handle in connection.listAllDomains(libvirt.VIR_CONNECT_LIST_DOMAINS_ACTIVE):
            try:
                domain = parse_domain(handle.XMLDesc(0))
            except libvirt.libvirtError as error:
                if error.get_error_code() == libvirt.VIR_ERR_NO_DOMAIN:
                    continue  # it went while we looked
                raise
            label = f"domain '{domain.name}' ({domain.uuid})"
            found |= {str(each.address): label for each in domain.hostdevs if each.address}
    except (libvirt.libvirtError, DomainXmlError) as error:
        why = str(error) if isinstance(error, DomainXmlError) else _message(error)
        raise LibvirtError(f"what the active domains have can't be told: {why}") from error
    return found


def create(definition: Definition, paused: bool) -> None:
    """Start a domain. Raises LibvirtError, where our hook refused it with the hook's sentence."""
    flags = libvirt.VIR_DOMAIN_START_PAUSED if paused else 0
    try:
        definition.handle.createWithFlags(flags)
    except libvirt.libvirtError as error:
        raise LibvirtError(start_failure(definition.label, error)) from error


def start_failure(label: str, error: libvirt.libvirtError) -> str:
    """Why the domain LABEL can't be started: where our hook refused it, the hook's sentence."""
    message = _message(error)
    ours = _HOOK.findall(message)
    return f"{label} can't be started: {ours[-1] if ours else message}"


def has_saved_state(definition: Definition) -> bool:
    """Whether a start of the domain restores what `virsh managedsave` saved."""
    try:
        return bool(definition.handle.hasManagedSaveImage())
    except libvirt.libvirtError as error:
        raise LibvirtError(
            f"{definition.label}: whether it has a saved state can't be told: {_message(error)}"
        ) from error


def is_autostarted(definition: Definition) -> bool:
    """Whether libvirt starts the domain when the host boots. Raises LibvirtError."""
    try:
        return bool(definition.handle.autostart())
    except libvirt.libvirtError as error:
        raise LibvirtError(
            f"{definition.label}: whether it starts at boot can't be told: {_message(error)}"
        ) from error


def set_metadata(definition: Definition, metadata: str | None) -> None:
    """Write our element of a domain's metadata; None removes it."""
    text = None if metadata is None else edit.for_libvirt(metadata)
    handle = definition.handle
    _change(
        definition,
        "the metadata can't be written",
        lambda: handle.setMetadata(
            libvirt.VIR_DOMAIN_METADATA_ELEMENT,
            text,
            PREFIX,
            NAMESPACE,
            definition.affects,
        ),
    )


def remove_metadata(definition: Definition, namespace: str) -> None:
    """Remove the element of another NAMESPACE from a definition's metadata."""
    handle = definition.handle
    _change(
        definition,
        f"the metadata of {namespace} can't be removed",
        lambda: handle.setMetadata(
            libvirt.VIR_DOMAIN_METADATA_ELEMENT,
            None,
            None,
            namespace,
            libvirt.VIR_DOMAIN_AFFECT_CONFIG,
        ),
    )


def attach(definition: Definition, device: str) -> None:
    """Add a device to a domain; to one that runs, it is plugged in."""
    handle, flags = definition.handle, definition.affects
    _change(
        definition,
        "the hostdev can't be attached",
        lambda: handle.attachDeviceFlags(device, flags),
    )


def detach(definition: Definition, device: str) -> None:
    """Remove a device from a domain; one that runs is asked to let it go, and may take its time."""
    handle, flags = definition.handle, definition.affects
    _change(
        definition,
        "the hostdev can't be detached",
        lambda: handle.detachDeviceFlags(device, flags),
    )


def _definition(handle: Any) -> Definition:
    is_active = bool(handle.isActive())
    is_persistent = bool(handle.isPersistent())
    document = handle.XMLDesc(libvirt.VIR_DOMAIN_XML_INACTIVE)
    name, identity = handle.name(), handle.UUIDString()
    return Definition(name, identity, document, is_active, is_persistent, handle)


def _change(definition: Definition, failure: str, act: Callable[[], object]) -> None:
    try:
        act()
    except libvirt.libvirtError as error:
        if definition.is_live and _UNPLUGGING in _message(error):
            return  # asked before, by whomever
        raise LibvirtError(f"{definition.label}: {failure}: {_message(error)}") from error


def _message(error: Any) -> str:
    return str(error.get_error_message() or error)


def _stay_quiet(_context: object, _error: object) -> None:
    pass
