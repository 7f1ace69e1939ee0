# SPDX-License-Identifier: LGPL-2.1-or-later
"""For Python programs that use libvirt-python and write their own XML.

    from vgpu_libvirt import shim
    connection = shim.connect("qemu:///system")

That is a `libvirt.virConnect` as `libvirt.open` gives it. When a domain with our element in its
metadata is created or started through it, a device is chosen and reserved, its hostdev is pointed
there, and what fails is undone; when such a domain is defined, its hostdev is added, or pointed at
a device that could serve it now. A hostdev that is attached where the domain asks for a vGPU gets a
device in the same way. All other calls, domains and hypervisors are left alone.
`virt-vgpu exec` does the same to programs that know nothing of us.

What fails on our side is a `libvirt.libvirtError` with a sentence of ours.
"""

from __future__ import annotations

import functools
from typing import Any

import libvirt

from . import calls, resolve

__all__ = ["connect", "install", "openAuth"]

_OPENING = ("open", "openAuth")


def connect(uri: str | None = None) -> Any:
    """As `libvirt.open`; read-only connections start nothing, so libvirt's own do for these."""
    _interpose()
    return _served(libvirt.open(uri))


def openAuth(uri: str | None, auth: list[Any], flags: int = 0) -> Any:  # noqa: N802
    """As `libvirt.openAuth`."""
    _interpose()
    return _served(libvirt.openAuth(uri, auth, flags), flags)


def install() -> None:
    """Make every connection that this program opens from now on one of ours."""
    _interpose()
    for name in _OPENING:
        setattr(libvirt, name, _opening(getattr(libvirt, name)))


@functools.cache
def _interpose() -> None:
    resolve.interpose(libvirt.virConnect, libvirt.virDomain)


def _opening(original: Any) -> Any:
    @functools.wraps(original)
    def opened(*arguments: Any, **keywords: Any) -> Any:
        connection = original(*arguments, **keywords)
        flags = keywords.get("flags", arguments[2] if len(arguments) > 2 else 0)
        return _served(connection, flags)

    return opened


def _served(connection: Any, flags: int = 0) -> Any:
    if not flags & libvirt.VIR_CONNECT_RO:
        calls.served.add(connection)
    return connection
