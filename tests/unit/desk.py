# SPDX-License-Identifier: LGPL-2.1-or-later
"""A host with domains, a libvirt that is a double, and the command line."""

from __future__ import annotations

from typing import TYPE_CHECKING

import libvirt
from click.testing import CliRunner

from tests.unit.fake_libvirt import Connection, Domain
from vgpu_libvirt.claims import store
from vgpu_libvirt.cli.main import main
from vgpu_libvirt.domain.read import parse_domain

if TYPE_CHECKING:
    from click.testing import Result

    from tests.unit.host import Host
    from vgpu_libvirt.claims.model import Claim
    from vgpu_libvirt.domain.model import Domain as Parsed
    from vgpu_libvirt.domain.model import Request

ERROR = "virt-vgpu: error: "


class Desk:
    """The host has one GPU, with `vfs`."""

    def __init__(self, host: Host, connection: Connection, vfs: list[str] | None = None) -> None:
        self.host = host
        self.connection = connection
        self.vfs = vfs or host.gpu()

    def define(self, document: str, **more: bool) -> Domain:
        domain = Domain(document, **more)
        domain.hook = self.host.hook
        self.connection.domains.append(domain)
        return domain

    def call(self, *arguments: str) -> Result:
        environment = self.host.environment
        return CliRunner().invoke(main, arguments, env=environment, prog_name="virt-vgpu")

    def do(self, *arguments: str) -> str:
        """What a call that succeeds says."""
        result = self.call(*arguments)
        assert (result.exit_code, result.exception) == (0, None), result.output
        return result.output

    def fails(self, *arguments: str) -> str:
        """What a call that fails says, in one line."""
        result = self.call(*arguments)
        assert result.exit_code == 1, result.output
        assert result.output.startswith(ERROR)
        assert result.output.count("\n") == 1
        return result.output.removeprefix(ERROR)

    def refused(self, *arguments: str) -> str:
        """What a call that fails says, which leaves every domain as it was."""
        before = [domain.content() for domain in self.connection.domains]
        said = self.fails(*arguments)
        assert [domain.content() for domain in self.connection.domains] == before
        assert not list((self.host.state / "edits").glob("*.json"))
        return said

    def claims(self) -> tuple[Claim, ...]:
        return tuple(store.read_all(self.host.paths.state).readable.values())


def parsed(domain: Domain, live: bool = False) -> Parsed:
    """The definition, or what runs."""
    return parse_domain(domain.XMLDesc(0 if live else libvirt.VIR_DOMAIN_XML_INACTIVE))


def requests(domain: Domain, live: bool = False) -> tuple[Request, ...]:
    return parsed(domain, live).requests


def pointed(domain: Domain, live: bool = False) -> dict[str | None, str]:
    """Alias -> device of its hostdevs, none of which is managed."""
    hostdevs = parsed(domain, live).hostdevs
    assert not any(hostdev.managed for hostdev in hostdevs)
    return {hostdev.alias: str(hostdev.address or hostdev.uuid) for hostdev in hostdevs}
