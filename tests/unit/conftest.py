# SPDX-License-Identifier: LGPL-2.1-or-later
"""GPUs of each kind, and the desk at which tests of the verbs that talk to libvirt sit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import libvirt
import pytest

from tests.unit.desk import Desk
from tests.unit.fake_libvirt import Connection
from tests.unit.gpus import KINDS, Gpus, Vfs

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
