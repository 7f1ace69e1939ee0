# SPDX-License-Identifier: LGPL-2.1-or-later
"""Looking again until nothing has happened since one looked, so that no event is lost.

The trigger is removed before each look. Whatever comes after the last check finds it gone, touches
it, and so has a sync of its own.
"""

from __future__ import annotations

from . import fs, trigger
from .records import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from .config import Paths
    from .trigger import Definitions

MOST_LOOKS = 8  # our own edits cost one more; more than a few: somebody keeps changing things


class Looks(NamedTuple):
    """How often was looked, and why no more or why not well."""

    number: int
    problems: tuple[str, ...]


def repeat(paths: Paths, look: Callable[[], object]) -> Looks:
    """Call LOOK until the trigger is away and the definitions are as they were before it.

    Raises StoreError where the trigger can't be removed, and what LOOK raises.
    """
    for number in range(1, MOST_LOOKS + 1):
        trigger.take(paths)
        before, problem = _definitions(paths)
        try:
            look()
        except KeyboardInterrupt:
            trigger.touch(paths)  # what was asked for hasn't been done
            raise
        if not trigger.is_set(paths) and _definitions(paths) == (before, problem):
            return Looks(number, (problem,) if problem else ())
    what = "somebody asked for a sync" if trigger.is_set(paths) else "the definitions changed"
    return Looks(
        MOST_LOOKS,
        (
            f"{what} during each of {MOST_LOOKS} looks, so what changed last may not have been "
            "seen; the next sync sees to it",
        ),
    )


def _definitions(paths: Paths) -> tuple[Definitions, str]:
    """What identifies the definitions; or why they can't be read, which then is no change."""
    try:
        return trigger.definitions(paths), ""
    except OSError as error:
        return frozenset(), (
            f"{paths.libvirt_etc}/qemu can't be read, so a definition that changes during a sync "
            f"has to wait for the next: {fs.reason(error)}"
        )
