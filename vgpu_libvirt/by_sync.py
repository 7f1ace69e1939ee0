# SPDX-License-Identifier: LGPL-2.1-or-later
"""Starting a domain by somebody who may use libvirt, but not reserve devices.

The system's sync is asked to point the definition right, and the start is libvirt's own. Nothing
is kept for it meanwhile: who is late is refused by the hook, with a sentence.
"""

from __future__ import annotations

import time

from . import fs, libvirt_api, starting, trigger
from .domain.read import parse_domain
from .errors import RequestError, RightsError, VgpuError
from .records import TYPE_CHECKING
from .starting import Started

if TYPE_CHECKING:
    from typing import Any

    from .config import Config
    from .libvirt_api import Definition

PATIENCE = 20.0  # seconds for a sync to point the definition
_PAUSE = 0.25


def start(config: Config, connection: Any, wanted: str, paused: bool) -> Started:
    """Start the domain WANTED where its definition points, once it points right.

    Raises VgpuError; RightsError where a sync is needed and can't be asked for, or none comes.
    """
    uuid = libvirt_api.find(connection, wanted).uuid
    deadline = time.monotonic() + PATIENCE
    has_asked = False
    while True:
        definition, context = starting.startable(config, connection, uuid)
        try:
            places = starting.choose(context, connection, parse_domain(definition.document))
            if not any(place.moves for place in places):
                break
            hindrance: VgpuError = RightsError(
                f"{definition.label} still points at no device that can serve it, though a sync "
                "was asked for and came; run 'virt-vgpu start' with sudo"
            )
        except RequestError as error:
            hindrance = error  # the sync may give back what is in the way
        if not has_asked:
            _ask(config, definition)
            has_asked = True
        elif time.monotonic() > deadline:
            raise _unanswered(definition) if trigger.is_set(config.paths) else hindrance
        time.sleep(_PAUSE)
    libvirt_api.create(definition, paused)
    return Started(definition, places, ())


def _ask(config: Config, definition: Definition) -> None:
    try:
        trigger.ask(config.paths)
    except OSError as error:
        raise RightsError(
            f"{definition.label} points at no device that can serve it now, and only root and the "
            f"group {trigger.GROUP} may have that changed ({trigger.path(config.paths)}: "
            f"{fs.reason(error)}); run 'virt-vgpu start' with sudo"
        ) from error


def _unanswered(definition: Definition) -> RightsError:
    return RightsError(
        f"{definition.label} points at no device that can serve it now, and nobody has answered "
        f"the wish for a sync for {PATIENCE:g} s; see that vgpu-libvirt-sync.path is enabled, or "
        "run 'virt-vgpu start' with sudo"
    )
