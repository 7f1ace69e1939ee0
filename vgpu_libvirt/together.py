# SPDX-License-Identifier: LGPL-2.1-or-later
"""Chooses devices for all the vGPUs of a domain at once, or says why there is no way; pure.

Each choice narrows the next, so a wish that finds nothing left has an earlier one try elsewhere.
"""

from __future__ import annotations

from collections import Counter

from . import placement
from .capacity import cleared
from .errors import NoRoomError
from .placement import ALONE, Placed
from .records import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Sequence

    from .capacity import Host
    from .devices.model import Device, Profile
    from .domain.model import Request
    from .placement import Candidate, Company, Ranking

_MOST_STEPS = 200  # of the search; the vGPUs of a domain are few, and so are the GPUs of a host


class Wish(NamedTuple):
    """A vGPU that a domain wants, its profile known."""

    request: Request
    profile: Profile


class Choice(NamedTuple):
    """The device for a wish, and the end of a sentence that says why this one."""

    device: Device
    why: str


def place(
    wishes: Sequence[Wish], policy: str, host: Host, company: Company = ALONE
) -> tuple[Choice, ...]:
    """A device of its own for each of WISHES, in their order: all or none.

    COMPANY has the domain's vGPUs that keep their devices. Raises RequestError, with the reason
    for each GPU.
    """
    host = _beside(host, company)
    search = _Search(wishes, policy)
    found = search.run(0, host, company)
    if found is None:
        for wish in wishes:  # one that has no device whatever the others take is told alone
            placement.choose(wish.profile, wish.request, policy, host, company)
        raise NoRoomError(search.failure)
    return tuple(found[number] for number in range(len(wishes)))


def _beside(host: Host, company: Company) -> Host:
    """HOST with the devices of COMPANY given away."""
    planned = {each.device.name: each.profile for each in company.others if each.profile}
    others = {each.device.name for each in company.others if not each.profile}
    return host._replace(planned={**host.planned, **planned}, busy=host.busy | others)


class _Search:
    def __init__(self, wishes: Sequence[Wish], policy: str) -> None:
        self._wishes = wishes
        self._policy = policy
        # Those first that have the least choice.
        self._order = sorted(range(len(wishes)), key=lambda number: _freedom(wishes[number]))
        self._steps = 0
        self._failed: set[Hashable] = set()
        self._deepest = -1
        self.failure = ""

    def run(self, depth: int, host: Host, company: Company) -> dict[int, Choice] | None:
        """Choices for the wishes from DEPTH on, by number; None where there is no way."""
        if depth == len(self._wishes):
            return {}
        key = (depth, _taken(host, company))
        if key in self._failed or self._steps >= _MOST_STEPS:
            return None
        self._steps += 1
        number = self._order[depth]
        wish = self._wishes[number]
        ranking = placement.rank(wish.profile, wish.request, self._policy, host, company)
        for candidate in _different(ranking):
            placed = Placed(wish.request, candidate.device, wish.profile)
            beside = company._replace(others=(*company.others, placed))
            rest = self.run(depth + 1, _given(host, candidate, wish.profile), beside)
            if rest is not None:
                return {number: _choice(candidate, ranking, wish.request), **rest}
        if not ranking.candidates and depth > self._deepest:
            self._deepest = depth
            self.failure = self._sentence(wish, ranking, company.others)
        self._failed.add(key)
        return None

    def _sentence(self, wish: Wish, ranking: Ranking, placed: tuple[Placed, ...]) -> str:
        what = wish.profile.short_name
        if len(self._wishes) > 1:
            what += f" ('{wish.request.alias}')"
        ours = {each.request.alias for each in self._wishes}
        tried = [
            f"'{each.request.alias}' at {each.device.uuid or each.device.address}"
            for each in placed
            if each.request.alias in ours
        ]
        if tried:
            what += f" beside {', '.join(tried)}, and no other way to place them all"
        return f"no device for {what}: {'; '.join(ranking.reasons)}; {placement.HINT}"


def _freedom(wish: Wish) -> tuple[bool, bool, int]:
    bound = wish.request.apart or wish.request.together or wish.request.numa == "require"
    return wish.request.gpu is None, not bound, -(wish.profile.framebuffer_mib or 0)


def _different(ranking: Ranking) -> Iterator[Candidate]:
    """The best of each kind: the clean devices of a GPU that list the same are all alike."""
    seen: set[Hashable] = set()
    for candidate in ranking.candidates:
        kind = _kind(candidate.device, candidate.dirty)
        if kind not in seen:
            seen.add(kind)
            yield candidate


def _kind(device: Device, dirty: bool) -> Hashable:
    return device.gpu, device.name if dirty else "", frozenset(device.creatable or ())


def _given(host: Host, candidate: Candidate, profile: Profile) -> Host:
    """HOST once CANDIDATE has been given away for PROFILE."""
    if candidate.dirty:
        host = cleared(host, candidate.device)
    return host._replace(planned={**host.planned, candidate.device.name: profile})


def _taken(host: Host, company: Company) -> Hashable:
    """What tells two states of the search apart: what stands where, not on which like device."""
    return frozenset(
        Counter(
            (
                _kind(each.device, each.device.name in host.dirty),
                each.profile,
                each.request.apart,
                each.request.together,
            )
            for each in company.others
        ).items()
    )


def _choice(candidate: Candidate, ranking: Ranking, request: Request) -> Choice:
    return Choice(candidate.device, placement.why(candidate, ranking, request))
