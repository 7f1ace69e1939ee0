# SPDX-License-Identifier: LGPL-2.1-or-later
"""Tells the host's journal what was decided; the one place that does.

Nothing waits for it and nothing fails of it: whoever doesn't listen, or not fast enough, misses a
line. Nothing is said on stderr instead: of a hook libvirt shows that as the reason of a failed
start, and a verb of the command line says what it did anyway.
"""

from __future__ import annotations

import os

from . import events
from .errors import kind
from .records import TYPE_CHECKING

if TYPE_CHECKING:
    from .config import Paths
    from .domain.model import Domain
    from .errors import VgpuError
    from .events import Event


def tell(paths: Paths, event: Event) -> None:
    """Send EVENT to the journal; where there is none, to syslog."""
    if _sent(paths.journal, events.for_journal(event)):
        return
    _sent(paths.syslog, events.for_syslog(event, os.getpid()))


def refused(paths: Paths, operation: str, domain: Domain, error: VgpuError) -> None:
    """Tell and count that OPERATION, which libvirt was not asked for, was refused to DOMAIN."""
    from . import counts

    reason = kind(error)
    counts.note_refusal(paths, operation, reason)
    tell(paths, events.refusal(domain, reason, str(error)))


def _sent(path: str, data: bytes) -> bool:
    """Send DATA to the socket at PATH; whether there is one, which may still not have taken it."""
    # What `socket` is made of: that module costs as much again as all of Python's start, and the
    # syslog of the C library waits where the socket is full.
    import _socket

    try:
        kind = _socket.SOCK_DGRAM | _socket.SOCK_NONBLOCK | _socket.SOCK_CLOEXEC
        sender = _socket.socket(_socket.AF_UNIX, kind)
        try:
            sender.sendto(data, _socket.MSG_DONTWAIT | _socket.MSG_NOSIGNAL, path)
        finally:
            sender.close()
    except FileNotFoundError:
        return False
    except OSError:  # full, of another kind, not for us: a line is not worth a start
        return True
    return True
