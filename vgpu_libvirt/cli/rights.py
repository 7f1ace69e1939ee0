# SPDX-License-Identifier: LGPL-2.1-or-later
"""Who may do what: the store and the devices are root's, definitions are for users of libvirt."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from ..errors import RightsError

if TYPE_CHECKING:
    from ..config import Paths


def is_root(paths: Paths) -> bool:
    """Whether we may write the store, which is made where it is missing."""
    place = paths.state
    while not os.path.lexists(place) and place != os.path.dirname(place):
        place = os.path.dirname(place)
    return os.access(place, os.W_OK, effective_ids=True)


def check_root(paths: Paths, what: str) -> None:
    """Raise RightsError unless we may write the store; WHAT: the deed, for the sentence."""
    if not is_root(paths):
        verb = click.get_current_context().info_name
        raise RightsError(
            f"only root may {what}: {paths.state} is not yours to write; run 'virt-vgpu {verb}' "
            "with sudo"
        )
