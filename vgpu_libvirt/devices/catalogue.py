# SPDX-License-Identifier: LGPL-2.1-or-later
"""The profiles that this host has shown: `<state>/catalogue.json`.

A driver lists only what fits now, so a full GPU lists nothing and its types have no names. The
catalogue remembers. It only serves sentences and sizes; no device is written on its word, and what
can't be read of it stops nothing.
"""

from __future__ import annotations

from .. import fs, jsons
from ..errors import CatalogueError
from ..records import TYPE_CHECKING, NamedTuple
from . import cards
from .model import Profile, distinct

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

VERSION = 1
_LARGEST_ID = 2**32 - 1


class Catalogue(NamedTuple):
    """Profiles, and the cards all of whose profiles are among them."""

    profiles: tuple[Profile, ...] = ()
    complete: frozenset[str] = frozenset()

    @property
    def is_complete(self) -> bool:
        """Whether it has all the profiles of every card that it has any of."""
        return bool(self.profiles) and self.complete.issuperset(map(cards.card_of, self.profiles))


def merged(old: Iterable[Profile], seen: Iterable[Profile]) -> tuple[Profile, ...]:
    """OLD and SEEN; what was seen is right where both have a name or an id.

    Another driver may number its types anew.
    """
    seen = tuple(seen)
    ids, names = {profile.id for profile in seen}, {profile.name for profile in seen}
    return distinct((*seen, *(p for p in old if p.id not in ids and p.name not in names)))


def known(
    listed: Iterable[Profile], remembered: Catalogue, claimed: Iterable[Profile]
) -> Catalogue:
    """All that the host can name: a list's word goes before the catalogue's, that before a claim's.

    A claim made for a domain that ran before us has the name that was asked for.
    """
    return remembered._replace(profiles=merged(merged(claimed, remembered.profiles), listed))


def learned(old: Catalogue, seen: Iterable[Profile], idle: Iterable[Profile] = ()) -> Catalogue:
    """OLD with what was SEEN in lists; IDLE: what GPUs list on which nothing runs, which is all."""
    idle = tuple(filter(_is_sane, idle))
    profiles = merged(old.profiles, (*filter(_is_sane, seen), *idle))
    outdated = {cards.card_of(profile) for profile in set(old.profiles).difference(profiles)}
    complete = (old.complete - outdated) | {cards.card_of(profile) for profile in idle}
    return Catalogue(profiles, complete)


def read(state: str) -> Catalogue:
    """The catalogue; empty where there is none yet. Raises CatalogueError."""
    path = _path(state)
    try:
        return _parse(fs.read_text(path))
    except FileNotFoundError:
        return Catalogue()
    except OSError as error:
        reason = f"can't be read: {fs.reason(error)}"
    except CatalogueError as error:
        reason = f"can't be understood: {error}"
    raise CatalogueError(f"the catalogue of profiles {path} {reason}; remove it, it is made anew")


def write(state: str, catalogue: Catalogue) -> None:
    """Write the catalogue; the caller holds the host lock. Raises CatalogueError."""
    try:
        fs.replace(_path(state), _dump(catalogue), f"{state}/tmp")
    except OSError as error:
        raise CatalogueError(
            f"the catalogue of profiles {_path(state)} can't be written: {fs.reason(error)}"
        ) from error


def _path(state: str) -> str:
    return f"{state}/catalogue.json"


def _dump(catalogue: Catalogue) -> str:
    found: dict[str, Any] = {}
    for profile in catalogue.profiles:
        card = cards.card_of(profile)
        entry = found.setdefault(card, {"complete": card in catalogue.complete, "profiles": {}})
        entry["profiles"][str(profile.id)] = profile.name
    return jsons.dumps({"version": VERSION, "cards": found}) + "\n"


def _parse(text: str) -> Catalogue:
    """Strictly: a file that isn't exactly what we write is somebody else's, or damaged."""
    try:
        data = jsons.loads(text)
    except (ValueError, RecursionError) as error:
        raise CatalogueError(f"not valid JSON ({error})") from error
    if not isinstance(data, dict) or data.keys() != {"version", "cards"}:
        raise CatalogueError("wrong in its keys")
    if type(data["version"]) is not int or data["version"] != VERSION:
        raise CatalogueError(f"of version {data['version']!r:.20}, not {VERSION}")
    profiles: list[Profile] = []
    complete = set()
    for card, entry in _object(data["cards"]).items():
        if _object(entry).keys() != {"complete", "profiles"} or type(entry["complete"]) is not bool:
            raise CatalogueError(f"wrong in the card {card!r:.60}")
        here = [_profile(*item) for item in _object(entry["profiles"]).items()]
        if not here or any(cards.card_of(profile) != card for profile in here):
            raise CatalogueError(f"wrong in the profiles of the card {card!r:.60}")
        profiles += here
        complete |= {card} if entry["complete"] else set()
    if len({profile.id for profile in profiles}) < len(profiles):
        raise CatalogueError("an id has two names")
    return Catalogue(distinct(profiles), frozenset(complete))


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise CatalogueError(f"no JSON object ({value!r:.60})")
    return value


def _profile(number: str, name: Any) -> Profile:
    if isinstance(name, str) and number.isascii() and number.isdigit() and len(number) <= 10:
        profile = Profile(int(number), name)
        if _is_sane(profile) and str(profile.id) == number:
            return profile
    raise CatalogueError(f"wrong in the profile {number!r:.60} ({name!r:.60})")


def _is_sane(profile: Profile) -> bool:
    """Whether a driver may have meant it."""
    name = profile.name
    if not isinstance(profile.id, int):
        return False
    return 0 < profile.id <= _LARGEST_ID and name == name.strip() != "" and name.isprintable()
