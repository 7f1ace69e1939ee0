# SPDX-License-Identifier: LGPL-2.1-or-later
"""Finds the profile that a request means; pure."""

from __future__ import annotations

from ..errors import NoRoomError, RequestError
from ..records import TYPE_CHECKING
from .model import distinct

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from .catalogue import Catalogue
    from .model import Device, Profile


def find(wanted: str, profiles: Iterable[Profile]) -> tuple[Profile, ...]:
    """The profiles that WANTED names: by full name, else by short name, else by id."""
    profiles = tuple(profiles)
    for key in ("name", "short_name", "id"):
        if found := tuple(p for p in profiles if str(getattr(p, key)) == wanted):
            return found
    return ()


def resolve(
    wanted: str,
    device: Device,
    known_on_host: Callable[[], Catalogue],
    neighbours_of: Callable[[], str],
) -> Profile:
    """The profile of DEVICE that WANTED names.

    KNOWN_ON_HOST tells all profiles that the host can name, NEIGHBOURS_OF what runs on the same
    GPU, or nothing; only a refusal needs them. Raises RequestError for a profile that
    is unknown, ambiguous or not creatable now, with what there is instead.
    """
    creatable = device.creatable or ()
    found = find(wanted, creatable)
    if len(found) == 1:
        return found[0]
    if found:
        raise RequestError(
            f"profile '{wanted}' is ambiguous on {device.name}: it could be {listed(found)}; ask "
            "for one by its full name or id"
        )
    possible = f"it could be given {listed(creatable)}" if creatable else "it can be given nothing"
    known, neighbours = known_on_host(), neighbours_of()
    if found := find(wanted, known.profiles):
        raise NoRoomError(
            f"{device.name} can't be given {found[0].name} now, since its GPU {device.gpu} "
            f"{neighbours or 'does not offer it'}; {possible} now"
        )
    if neighbours and not known.is_complete:
        # The driver lists only what fits beside what runs, so others may be there and not be seen.
        raise RequestError(
            f"profile '{wanted}' is unknown, or doesn't fit now beside what the GPU {device.gpu} "
            f"of {device.name} {neighbours}; {possible} now"
        )
    raise RequestError(
        f"profile '{wanted}' is unknown on this host; {device.name}: {possible}"
        + ("" if creatable or not known.profiles else f"; the host has {listed(known.profiles)}")
    )


def listed(profiles: Iterable[Profile]) -> str:
    """PROFILES as a sentence names them."""
    return ", ".join(f"{profile.name} ({profile.id})" for profile in distinct(profiles))
