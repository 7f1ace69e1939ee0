# SPDX-License-Identifier: LGPL-2.1-or-later
"""Which devices of a GPU to carve, by the rules of every other choice; pure."""

from __future__ import annotations

from . import placement, together
from .capacity import narrowed
from .claims.model import Phase
from .devices import vendor_vfio
from .domain.model import Request
from .errors import RequestError
from .lifecycle.carve import Piece
from .records import TYPE_CHECKING, NamedTuple
from .together import Wish

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .address import PciAddress
    from .capacity import Host


class Plan(NamedTuple):
    """What to carve; and what is carved already, where that counts, by the names of devices."""

    pieces: tuple[Piece, ...]
    there: tuple[str, ...] = ()

    @property
    def devices(self) -> tuple[str, ...]:
        """The names of all of them, in the order of their addresses."""
        return tuple(sorted([*self.there, *(piece.device.name for piece in self.pieces)]))


def plan(
    gpu: PciAddress, wanted: Mapping[str, int], policy: str, host: Host, is_total: bool
) -> Plan:
    """Free devices of GPU for so many of each profile WANTED: all of them or none.

    With IS_TOTAL that many shall be carved in all, and only what is missing is chosen. Raises
    RequestError, with the reason why the GPU hasn't got room.
    """
    host = narrowed(host, (g for g in host.inventory.gpus if g.backend == vendor_vfio.BACKEND))
    # What a dead domain left is for `sync` to give back first.
    host = host._replace(dirty=frozenset())
    wishes: list[Wish] = []
    there: list[str] = []
    seen: dict[str, str] = {}  # profile -> what it was called
    for name, count in wanted.items():
        profile = placement.resolve(name, host)
        if (other := seen.setdefault(profile.name, name)) != name:
            raise RequestError(f"'{other}' and '{name}' are the same profile; name it once")
        carved = [
            claim.device
            for claim in host.claims.readable.values()
            if (claim.phase, claim.gpu) == (Phase.CARVED, str(gpu))
            and claim.profile.name == profile.name
        ]
        there += carved if is_total else []
        missing = count - len(carved) if is_total else count
        wishes += [
            Wish(Request(f"{profile.short_name} {n + 1} of {missing}", name, gpu=gpu), profile)
            for n in range(missing)
        ]
    choices = together.place(wishes, policy, host)
    pieces = (
        Piece(choice.device, choice.device.listed(wish.profile) or wish.profile)
        for choice, wish in zip(choices, wishes, strict=True)
    )
    return Plan(tuple(pieces), tuple(there))
