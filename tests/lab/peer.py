# SPDX-License-Identifier: LGPL-2.1-or-later
"""The second of two guests (tests/lab/run --peer): does what the first one's tests tell it to.

The functions of tests/lab/guest.py can be called there by their names.
"""

from __future__ import annotations

import json
import time
import xmlrpc.client
import xmlrpc.server
from functools import partial
from typing import Any

HERE = "10.0.0.2"
PORT = 7000


class Peer:
    """The other guest, as seen from the first."""

    def __init__(self) -> None:
        self._server = xmlrpc.client.ServerProxy(f"http://{HERE}:{PORT}")

    def __getattr__(self, name: str) -> Any:
        return partial(self._call, name)

    def _call(self, name: str, *arguments: Any) -> Any:
        # In JSON, since XML-RPC has no large numbers.
        return json.loads(str(self._server.call(name, json.dumps(arguments))))

    def wait(self, seconds: float = 180) -> None:
        """Wait until it listens."""
        end = time.monotonic() + seconds
        while True:
            try:
                self._call("is_up")
            except OSError:
                if time.monotonic() > end:
                    raise
                time.sleep(1)
            else:
                return


def serve() -> None:
    """Be the other guest, for ever."""
    from tests.lab import guest

    def call(name: str, arguments: str) -> str:
        function = getattr(guest, name) if name != "is_up" else lambda: True
        answer = function(*json.loads(arguments))
        return json.dumps(answer, default=str)

    guest.SYSTEMD.mkdir(parents=True)
    up = guest.run("env", "LAB_LISTEN=1", "lab-up")
    assert up.status == 0, up.output
    server = xmlrpc.server.SimpleXMLRPCServer((HERE, PORT), logRequests=False)
    server.register_function(call, "call")
    server.serve_forever()


if __name__ == "__main__":
    serve()
