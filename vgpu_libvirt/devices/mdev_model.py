# SPDX-License-Identifier: LGPL-2.1-or-later
"""The words for mediated devices and what they are made on; plain values, as those of `model`."""

from __future__ import annotations

from ..records import NamedTuple
from .model import Profile


class MdevProfile(NamedTuple):
    """A kind of mdev: its type's directory, the driver's name for it, and what is said of it."""

    id: str  # "nvidia-558"; vendors number their types without regard to the card
    name: str  # "NVIDIA A40-2Q"; the id where the driver has no name for it
    described_mib: int | None = None  # framebuffer in MiB; None: the description doesn't tell
    max_instances: int | None = None  # on one GPU; None: the description doesn't tell

    @property
    def short_name(self) -> str:
        """The name without the vendor's prefix."""
        return Profile(0, self.name).short_name

    @property
    def framebuffer_mib(self) -> int | None:
        """Framebuffer in MiB by the description, else as the name tells it; None: neither does."""
        return self.described_mib or Profile(0, self.name).framebuffer_mib

    def is_meant_by(self, wanted: str) -> bool:
        """Whether WANTED is its name, its name without the prefix, or its id."""
        return wanted in (self.id, self.name) or wanted == self.short_name


class Offer(NamedTuple):
    """A profile, as one parent has it."""

    profile: MdevProfile
    available: int | None  # how many more could be made there now; None: can't be read
    error: str | None = None


class Parent(NamedTuple):
    """Something that mdevs are made on."""

    name: str  # as sysfs has it: "0000:3d:00.4", "mtty"
    gpu: str  # its PF's name, else its own
    offers: tuple[Offer, ...] | None  # by the profiles' ids; None: can't be read, see `error`
    error: str | None = None

    @property
    def creatable(self) -> tuple[MdevProfile, ...]:
        """The profiles of which at least one could be made now."""
        return tuple(offer.profile for offer in self.offers or () if offer.available)

    def room(self, profile: MdevProfile) -> int:
        """How many of PROFILE could be made now, as the driver says."""
        return sum(o.available or 0 for o in self.offers or () if o.profile.id == profile.id)


class ParentGpu(NamedTuple):
    """What shares one framebuffer: parents, in the order of their addresses."""

    name: str
    numa_node: int | None  # None: the host has one node, or doesn't say
    parents: tuple[Parent, ...]


class Parents(NamedTuple):
    """All parents of a host by GPU, and what of them couldn't be read."""

    gpus: tuple[ParentGpu, ...]
    problems: tuple[str, ...] = ()

    @property
    def profiles(self) -> tuple[MdevProfile, ...]:
        """Every profile of every parent, by id, also what can't be made now."""
        found = {o.profile for g in self.gpus for p in g.parents for o in p.offers or ()}
        return tuple(sorted(found, key=lambda profile: (profile.id, profile.name)))


class Mdev(NamedTuple):
    """A mediated device that exists."""

    uuid: str
    parent: str | None  # None: can't be read, see `error`
    type_id: str | None  # its type's directory, "nvidia-558"; None: likewise, or it is going away
    error: str | None = None
