# SPDX-License-Identifier: LGPL-2.1-or-later
"""The desk at which tests of the verbs that talk to libvirt sit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import libvirt
import pytest

from tests.unit.desk import Desk
from tests.unit.fake_libvirt import Connection

if TYPE_CHECKING:
    from tests.unit.host import Host


@pytest.fixture
def connection(monkeypatch: pytest.MonkeyPatch) -> Connection:
    """What libvirt.open returns."""
    connection = Connection()
    monkeypatch.setattr(libvirt, "open", lambda _uri: connection)
    return connection


@pytest.fixture
def desk(host: Host, connection: Connection) -> Desk:
    """A host with a GPU, domains, and the command line."""
    return Desk(host, connection)
