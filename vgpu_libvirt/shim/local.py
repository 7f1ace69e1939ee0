# SPDX-License-Identifier: LGPL-2.1-or-later
"""Whether a connection leads to the libvirt whose devices we keep, and we may."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

from .. import config
from ..config import Config
from ..errors import ConfigError

if TYPE_CHECKING:
    from urllib.parse import SplitResult


class Settings(NamedTuple):
    """The configuration, and why it can't be used."""

    config: Config
    error: ConfigError | None = None


def settings_for(connection: Any) -> Settings | None:
    """The settings for CONNECTION; None where its hypervisor is none of our business, or can't be.

    It is this host's, by the configured URI or one that is the same, and this process may write to
    our store. Raises libvirtError.
    """
    try:
        settings = Settings(config.load())
    except ConfigError as error:
        settings = Settings(Config(), error)
    if not _is_here(connection, settings.config.uri):
        return None
    return settings if _may_write(settings.config.paths.state) else None


def _is_here(connection: Any, configured: str) -> bool:
    uri = str(connection.getURI())
    if uri == configured:
        return True
    one, other = urlsplit(uri), urlsplit(configured)
    if _driver(one) != _driver(other) or one.netloc or other.netloc or one.path != other.path:
        return False
    # The socket may be the end of a tunnel.
    return "socket" not in parse_qs(one.query) or connection.getHostname() == socket.gethostname()


def _driver(uri: SplitResult) -> str:
    return uri.scheme.removesuffix("+unix")


def _may_write(state: str) -> bool:
    if not os.path.lexists(state):
        return os.geteuid() == 0  # it is made with the first claim
    return os.access(state, os.R_OK | os.W_OK | os.X_OK, effective_ids=True)
