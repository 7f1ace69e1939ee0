# SPDX-License-Identifier: LGPL-2.1-or-later
"""The sides of a domain, its definition and what runs, as virsh's --config and --live name them.

What is changed on one is undone where a later change fails; what can't be undone is said.
"""

from __future__ import annotations

from . import libvirt_api
from .domain import edit
from .domain.read import parse_domain
from .errors import DomainXmlError, LibvirtError, RequestError
from .records import TYPE_CHECKING

if TYPE_CHECKING:
    from .address import Location
    from .domain.model import Domain, Request
    from .libvirt_api import Definition
    from .revert import Revert


def of(definition: Definition, live: bool, persistent: bool) -> tuple[Definition, ...]:
    """The sides that --live and --config (PERSISTENT) name, in the order in which they change.

    Neither is the definition of a domain that doesn't run. Raises LibvirtError.
    """
    label = definition.label
    if live and not definition.is_active:
        raise LibvirtError(f"{label} doesn't run; leave --live out to change its definition")
    if not definition.is_persistent and (persistent or not live):
        instead = (
            "use --live alone"
            if definition.is_active
            else "ask for the vGPU in the XML that it is created from"
        )
        raise LibvirtError(f"{label} is transient and has no definition to edit; {instead}")
    if definition.is_active and not live and not persistent:
        raise LibvirtError(
            f"{label} runs; say --live to change what runs, --config to change its definition, or "
            "both"
        )
    if not live:
        return (definition,)
    return ((definition,) if persistent else ()) + (libvirt_api.live(definition),)


def name(side: Definition) -> str:
    """A side as a sentence names it."""
    return f"{'the running' if side.is_live else 'the definition of'} {side.label}"


def parsed(side: Definition) -> Domain:
    """What is on a SIDE. Raises RequestError where its request can't be understood."""
    domain = parse_domain(side.document)
    if domain.request_error:
        remedy = (
            f"mend it with 'virsh metadata {side.name} --live --edit'"
            if side.is_live
            else f"run 'virt-vgpu fix-xml {side.name}'"
        )
        raise RequestError(
            f"the vGPU request in the metadata of {name(side)} can't be understood: "
            f"{domain.request_error}; {remedy}"
        )
    return domain


def add(
    side: Definition, request: Request, source: Location, undo: Revert, left: list[str]
) -> None:
    """Write REQUEST and its hostdev; what UNDO can't take back is said in LEFT."""
    # Anew, since making the device ready takes its time, and others may have written meanwhile.
    before = edit.metadata(libvirt_api.look_again(side).document)
    set_metadata(side, before, edit.with_request(before, request), undo, left)
    # Before the attempt: a device may have been plugged in although libvirt reports a failure.
    undo.add(lambda: _take_out(side, request.alias, source, left))
    libvirt_api.attach(side, edit.hostdev(request.alias, source))


def set_metadata(
    side: Definition, before: str | None, after: str | None, undo: Revert, left: list[str]
) -> None:
    """Write the metadata AFTER over those BEFORE."""
    if after == before:
        return

    def put_back() -> None:
        try:
            libvirt_api.set_metadata(side, before)
        except LibvirtError as error:
            if not _has_ended(side):
                left.append(f"and what was written can't be undone: {error}")

    libvirt_api.set_metadata(side, after)
    undo.add(put_back)


def remove(side: Definition, alias: str, undo: Revert, left: list[str]) -> None:
    """Remove the request for ALIAS and its hostdev from a definition, where they are."""
    before = edit.metadata(side.document)
    set_metadata(side, before, without(before, alias), undo, left)
    hostdev = edit.find_hostdev(side.document, alias)
    if hostdev is None:
        return

    def put_back() -> None:
        try:
            libvirt_api.attach(side, hostdev)
        except LibvirtError as error:
            left.append(f"and what was removed can't be put back: {error}")

    libvirt_api.detach(side, hostdev)
    undo.add(put_back)


def forget_request(live: Definition, alias: str) -> None:
    """Remove the request for ALIAS from the metadata of what runs, if it still does."""
    now = libvirt_api.look_again(live)
    before = edit.metadata(now.document)
    if now.is_active and (after := without(before, alias)) != before:
        libvirt_api.set_metadata(now, after)


def without(metadata: str | None, alias: str) -> str | None:
    """METADATA without the requests for ALIAS, or as it is where there is none."""
    if metadata is None or alias not in edit.requested_aliases(metadata):
        return metadata
    return edit.without_request(metadata, alias)


def _take_out(side: Definition, alias: str, source: Location, left: list[str]) -> None:
    try:
        now = libvirt_api.look_again(side)
        hostdev = parse_domain(now.document).hostdev(alias)
        text = edit.find_hostdev(now.document, alias)
        if hostdev is None or text is None or source not in (hostdev.address, hostdev.uuid):
            return
        libvirt_api.detach(side, text)
        if side.is_live and parse_domain(libvirt_api.look_again(side).document).hostdev(alias):
            left.append(
                f"and '{alias}' is plugged in nevertheless: run 'virt-vgpu detach {side.name} "
                f"--live --alias {alias}'"
            )
    except (LibvirtError, DomainXmlError) as error:
        if not _has_ended(side):
            left.append(f"and whether '{alias}' is there can't be told: {error}")


def _has_ended(side: Definition) -> bool:
    """Whether what ran is over, and all that was changed of it."""
    try:
        return side.is_live and not libvirt_api.look_again(side).is_active
    except LibvirtError:
        return False
