# SPDX-License-Identifier: LGPL-2.1-or-later
"""A program that uses the shim, on a libvirt that is a double."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import libvirt
import pytest

from tests.unit.host import web2
from vgpu_libvirt.claims import store
from vgpu_libvirt.claims.model import Phase
from vgpu_libvirt.domain.read import parse_domain

if TYPE_CHECKING:
    from tests.unit import fake_libvirt
    from tests.unit.host import Host
    from vgpu_libvirt.claims.model import Claim


class Program:
    """A program that uses the shim, on a host whose hooks libvirt runs."""

    def __init__(self, host: Host, connection: fake_libvirt.Connection) -> None:
        self.host = host
        self.connection = connection
        self.vfs = host.gpu()
        connection.hook = host.hook

    def define(self, document: str, **more: bool) -> fake_libvirt.Domain:
        """A domain that was defined without us."""
        return self.connection.add(self.connection.kind(document, **more))

    def claims(self) -> dict[str, Claim]:
        return store.read_all(self.host.paths.state).readable

    def reserved(self) -> list[str]:
        return [name for name, claim in self.claims().items() if claim.phase is Phase.RESERVED]


def pointed(document: str) -> dict[str | None, str]:
    """Alias -> address of its hostdevs."""
    return {hostdev.alias: str(hostdev.address) for hostdev in parse_domain(document).hostdevs}


def failing(work: Any) -> libvirt.libvirtError:
    with pytest.raises(libvirt.libvirtError) as caught:
        work()
    return caught.value


def taken(program: Program, vf: str) -> None:
    """VF is another domain's."""
    assert program.host.hook("prepare", web2(vf)).status == 0
