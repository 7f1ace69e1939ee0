# SPDX-License-Identifier: LGPL-2.1-or-later
"""What becomes of a program's call that attaches or detaches a device.

A hostdev whose alias the domain asks for a vGPU at, in the metadata of the side that is changed,
gets a device that can serve it: claimed and made ready for what runs, pointed at for a definition.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import libvirt

from .. import attaching, libvirt_api, trigger
from ..address import PciAddress
from ..claims import store
from ..domain import edit
from ..domain.model import ALIAS_PREFIX, unfit
from ..domain.read import parse_domain
from ..errors import AddressError, LibvirtError, RequestError, VgpuError
from . import calls, local

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..attaching import Choice
    from ..config import Config, Paths
    from ..domain.model import Request
    from ..libvirt_api import Definition
    from ..revert import Revert
    from .calls import Call
    from .local import Settings

    How = Callable[[Call], Any] | None

_ATTACHING = ("attachDevice", "attachDeviceFlags")
_DETACHING = ("detachDevice", "detachDeviceFlags", "detachDeviceAlias")
_LIVE, _CONFIG = libvirt.VIR_DOMAIN_AFFECT_LIVE, libvirt.VIR_DOMAIN_AFFECT_CONFIG


class _Plug(NamedTuple):
    """A hostdev that a program attaches where its alias is asked for."""

    document: str
    request: Request
    sides: tuple[Definition, ...]  # in the order in which they change; what runs is the last

    @property
    def label(self) -> str:
        return f"'{self.request.alias}' of {self.sides[-1].label}"


def interpose(domain: type) -> None:
    """See to the calls that attach and detach devices, of this class, once."""
    for name in _ATTACHING:
        calls.wrap(domain, name, _see_attaching)
    for name in _DETACHING:
        calls.wrap(domain, name, _see_detaching)


def _see_attaching(call: Call) -> How:
    alias = _alias(call.document)
    settings = local.settings_for(call.connection) if alias else None
    if settings is None:
        return None
    both = _sides(call)
    if not both:
        return None
    domain = parse_domain(both[-1].document)
    asked = [request for request in domain.requests if request.alias == alias]
    # What it has already, and any mistake in its metadata, is for libvirt, or its start, to refuse.
    if not asked or domain.request_error or domain.hostdev(asked[0].alias):
        return None
    plug = _Plug(str(call.document), asked[0], both)
    return partial(_attach_live if both[-1].is_live else _attach_config, settings, plug)


def _alias(document: str | None) -> str | None:
    """The alias of a hostdev, if that is what DOCUMENT is, and it can be one of ours."""
    if document is None or "<hostdev" not in document or ALIAS_PREFIX not in document:
        return None
    root = edit.parse(document)
    alias = root.find("alias")
    name = alias.get("name") if root.tag == "hostdev" and alias is not None else None
    return name if name and name.startswith(ALIAS_PREFIX) else None


def _sides(call: Call) -> tuple[Definition, ...]:
    """The sides of the domain that CALL changes; none where libvirt refuses it."""
    flags = _flags(call)
    definition = libvirt_api.look_up(call.connection, call.owner.UUIDString())
    if definition is None or flags & ~(_LIVE | _CONFIG):
        return ()
    if not flags:
        flags = _LIVE if definition.is_active else _CONFIG
    if (flags & _LIVE and not definition.is_active) or (
        flags & _CONFIG and not definition.is_persistent
    ):
        return ()
    return ((definition,) if flags & _CONFIG else ()) + (
        (libvirt_api.live(definition),) if flags & _LIVE else ()
    )


def _flags(call: Call) -> int:
    """What a call changes; those without flags change what runs."""
    return int(call.argument("flags") or 0) if call.takes("flags") else _LIVE


def _attach_live(settings: Settings, plug: _Plug, call: Call) -> Any:
    """Make a device ready, and have libvirt plug it in; where that fails, give it back."""
    if settings.error:
        raise settings.error
    _check(plug)

    def attach(choice: Choice, _undo: Revert, _left: list[str]) -> None:
        try:
            call(edit.repointed(plug.document, choice.source))
        except libvirt.libvirtError as error:
            raise LibvirtError(f"{plug.label} can't be attached: {error}") from error

    try:
        _, notes = attaching.plug_by(
            settings.config, call.connection, plug.sides, plug.request, attach, _given(plug)
        )
    finally:
        trigger.touch(settings.config.paths)
    for note in notes:
        calls.log.warning("%s", note)
    return call.result


def _attach_config(settings: Settings, plug: _Plug, call: Call) -> Any:
    """Attach it to a definition, pointed where it could be served now, if there is such a place.

    Its start has the last word, so what can't be served today is as good as any.
    """
    try:
        if settings.error:
            raise settings.error
        _check(plug)
        choice = _choose(settings.config, plug, call)
        pointed = edit.repointed(plug.document, choice.source)
    except VgpuError as error:
        calls.log.warning("%s is attached as it is: %s", plug.label, error)
        return call()
    return call(pointed)


def _choose(config: Config, plug: _Plug, call: Call) -> Choice:
    return attaching.choose(
        config, call.connection, plug.sides, plug.request, preferred=_given(plug)
    )


def _check(plug: _Plug) -> None:
    """Check that the hostdev could get a vGPU. Raises RequestError."""
    root = edit.parse(plug.document)
    if what := unfit(str(root.get("type")), root.get("managed") == "yes"):
        raise RequestError(
            f"the hostdev {plug.label} has {what}, with which it gets no vGPU; attach one with "
            "type='pci' and managed='no', or type='mdev'"
        )


def _given(plug: _Plug) -> str | None:
    """The device at which the program points; it stays there, if that can serve it."""
    source = edit.parse(plug.document).find("source/address")
    if source is None:
        return None
    try:
        return str(PciAddress.from_xml({str(k): str(v) for k, v in source.items()}))
    except AddressError:
        return None


def _see_detaching(call: Call) -> How:
    settings = local.settings_for(call.connection)
    if settings is None or settings.error:
        return None
    paths = settings.config.paths
    has_ours = store.of_domain(paths.state, call.owner.UUIDString())
    return partial(_detach, paths) if has_ours else None


def _detach(paths: Paths, call: Call) -> Any:
    """Detach it, and have a sync look whether the guest has let it go."""
    result = call()
    trigger.touch(paths)
    return result
