# SPDX-License-Identifier: LGPL-2.1-or-later
"""The second of two guests (tests/lab/run --peer): does what the first one's tests tell it to.

The functions of tests/lab/guest.py can be called there by their names.
"""

from __future__ import annotations

import time
import xmlrpc.client
import xmlrpc.server
from typing import Any

HERE = "10.0.0.2"
PORT = 7000


class Peer:
    """The other guest, as seen from the first."""

    def __init__(self) -> None:
        self._server = xmlrpc.client.ServerProxy(f"http://{HERE}:{PORT}", allow_none=True)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._server, name)

    def wait(self, seconds: float = 120) -> None:
        """Wait until it listens."""
        end = time.monotonic() + seconds
        while True:
            try:
                self._server.is_up()
            except OSError:
                if time.monotonic() > end:
                    raise
                time.sleep(1)
            else:
                return


def serve() -> None:
    """Be the other guest, for ever."""
    from tests.lab import guest

    guest.SYSTEMD.mkdir(parents=True)
    up = guest.run("env", "LAB_LISTEN=1", "lab-up")
    assert up.status == 0, up.output
    server = xmlrpc.server.SimpleXMLRPCServer((HERE, PORT), allow_none=True, logRequests=False)
    server.register_function(lambda: True, "is_up")
    for name in (
        "virsh",
        "claim",
        "type_of",
        "holds",
        "is_running",
        "sync",
        "sync_after_lapse",
        "define",
    ):
        server.register_function(getattr(guest, name), name)
    server.register_function(lambda *command: list(guest.run(*command)), "run")
    server.register_function(lambda name, text: str(guest.hook(name, text)), "hook")
    server.serve_forever()


if __name__ == "__main__":
    serve()
