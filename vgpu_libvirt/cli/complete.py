# SPDX-License-Identifier: LGPL-2.1-or-later
"""What a shell offers at the Tab key: from files, and quickly; nothing where these can't be read.

Errors are never shown: the words of a half-written command line are no place for them, and the
command itself will say what is wrong.
"""

from __future__ import annotations

import contextlib
import os
import threading
from typing import TYPE_CHECKING

from .. import config
from ..claims import cordons, processes, store
from ..devices import hardware
from ..errors import VgpuError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import click

    from ..config import Config

    Complete = Callable[[click.Context, click.Parameter, str], list[str]]

_ANSWER = 1.0  # seconds for libvirt, which may be waiting for a hook


def _quiet(offer: Callable[[Config], Iterable[str]]) -> Complete:
    """A callback for click that offers what OFFER finds."""

    def complete(_context: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
        words: Iterable[str] = ()
        with contextlib.suppress(VgpuError, OSError):
            words = offer(config.load())
        # a word with a space in it would come out of bash as two
        return sorted(w for w in words if w.startswith(incomplete) and len(w.split()) == 1)

    return complete


def _domains(settings: Config) -> Iterable[str]:
    try:
        names = os.listdir(f"{settings.paths.libvirt_etc}/qemu")
    except PermissionError:
        return _domains_by_libvirt(settings)
    return [name.removesuffix(".xml") for name in names if name.endswith(".xml")]


def _domains_by_libvirt(settings: Config) -> Iterable[str]:
    if not processes.a_daemon_runs(settings.paths.proc):
        return []  # connecting to its socket would start one
    from .. import libvirt_api

    found: list[str] = []

    def ask() -> None:
        with (
            contextlib.suppress(VgpuError),
            libvirt_api.connect(settings.uri) as connection,
        ):
            found.extend(each.name for each in libvirt_api.definitions(connection))

    # A call to libvirt can't be ended; a thread of which nobody waits for the end can be left.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_ANSWER)
    return list(found)


def _gpus(settings: Config) -> Iterable[str]:
    found = hardware.discover(settings.paths.sysfs, settings.policy.exclude)
    return [str(gpu.address) for gpu in found.gpus]


def _targets(settings: Config) -> Iterable[str]:
    found = hardware.discover(settings.paths.sysfs, settings.policy.exclude)
    return [str(gpu.address) for gpu in found.gpus] + [
        device.name for device in found.devices if device.uuid or not device.slot
    ]


def _claimed(settings: Config) -> Iterable[str]:
    claims = store.read_all(settings.paths.state)
    return [*claims.readable, *claims.unreadable]


def _carved(settings: Config) -> Iterable[str]:
    claims = [c for c in store.read_all(settings.paths.state).readable.values() if c.is_no_domains]
    return {name for claim in claims for name in (claim.device, claim.gpu)}


def _cordoned(settings: Config) -> Iterable[str]:
    return [str(each.target) for each in cordons.read_all(settings.paths.state).held]


def _profiles(settings: Config) -> Iterable[str]:
    from ..survey import look

    names = [(str(each.id), each.short_name) for each in look(settings).host.profiles]
    return [number if " " in name else name for number, name in names]


domains = _quiet(_domains)
gpus = _quiet(_gpus)
targets = _quiet(_targets)
claimed = _quiet(_claimed)
carved = _quiet(_carved)
cordoned = _quiet(_cordoned)
profiles = _quiet(_profiles)
