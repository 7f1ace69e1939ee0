# SPDX-License-Identifier: LGPL-2.1-or-later
"""GPUs of each kind, and the desk at which tests of the verbs that talk to libvirt sit."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import libvirt
import pytest

from tests.unit import fake_libvirt
from tests.unit.desk import Desk
from tests.unit.fake_libvirt import Connection
from tests.unit.gpus import KINDS, Gpus, Vfs
from tests.unit.program import Program
from vgpu_libvirt.shim import calls, resolve

if TYPE_CHECKING:
    from tests.unit.host import Host


@pytest.fixture
def connection(monkeypatch: pytest.MonkeyPatch) -> Connection:
    """What libvirt.open returns."""
    connection = Connection()
    monkeypatch.setattr(libvirt, "open", lambda _uri: connection)
    return connection


@pytest.fixture(params=KINDS, ids=[kind.backend for kind in KINDS])
def gpus(request: pytest.FixtureRequest, host: Host, monkeypatch: pytest.MonkeyPatch) -> Gpus:
    """A GPU in `host`, of each kind in turn."""
    made: Gpus = request.param(host, monkeypatch)
    return made


@pytest.fixture
def gpus_or_vfs(
    request: pytest.FixtureRequest, host: Host, monkeypatch: pytest.MonkeyPatch
) -> Gpus:
    """The `gpus` that a test takes, for what it takes beside; one that takes none has VFs."""
    if "gpus" in request.fixturenames:
        taken: Gpus = request.getfixturevalue("gpus")
        return taken
    return Vfs(host, monkeypatch)


@pytest.fixture
def desk(host: Host, connection: Connection, gpus_or_vfs: Gpus) -> Desk:
    """A host with a GPU, domains, and the command line."""
    return Desk(host, connection, gpus_or_vfs.places)


@pytest.fixture
def program(host: Host, monkeypatch: pytest.MonkeyPatch) -> Program:
    """A program whose libvirt is the shim's; each has classes of its own, interposed once."""
    monkeypatch.setenv("VGPU_LIBVIRT_CONFIG", host.environment["VGPU_LIBVIRT_CONFIG"])
    Path(host.paths.state).mkdir()
    connections = type("Connection", (fake_libvirt.Connection,), {})
    domains = type("Domain", (fake_libvirt.Domain,), {})
    resolve.interpose(connections, domains)
    connection = connections()
    connection.kind = domains
    calls.served.add(connection)
    return Program(host, connection)
