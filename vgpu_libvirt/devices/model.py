# SPDX-License-Identifier: LGPL-2.1-or-later
"""The words for what a host has; plain values, made by one backend each."""

from __future__ import annotations

import functools

from .. import sets
from ..records import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ..address import Location

_VENDORS = "NVIDIA ", "GRID "
_SERIES = "A", "B", "C", "Q"
_KINDS = "", *"0123456789", "ME", "NOME", "MEALL", "GFX"


class Profile(NamedTuple):
    """A vGPU type: the driver's id for it and the driver's full name.

    The same name is the same type, whichever way a GPU gives it; ids differ.
    """

    id: int | str  # a mdev's is the name of its type's directory: "nvidia-558"
    name: str
    described_mib: int | None = None  # framebuffer, where the driver tells it and the name doesn't

    def to_json(self) -> dict[str, int | str]:
        """What claims and the command line show of it."""
        return {"id": self.id, "name": self.name}

    @property
    def short_name(self) -> str:
        """The name without the vendor's prefix."""
        for vendor in _VENDORS:
            if self.name.startswith(vendor):
                return self.name.removeprefix(vendor).lstrip(" ")
        return self.name

    @property
    def framebuffer_mib(self) -> int | None:
        """Framebuffer in MiB as the name tells it, or the driver; None where neither does."""
        return self.described_mib or _framebuffer_mib(self.name)


@functools.lru_cache(maxsize=1024)  # few names, and each is asked for with every device
def _framebuffer_mib(name: str) -> int | None:
    gigabytes = split(name)[1]
    return None if gigabytes is None else gigabytes * 1024 or 512


def split(name: str) -> tuple[str, int | None]:
    """The card in a profile's NAME, and its framebuffer in GB; None: it tells none.

    <card>-<GB><series>, or <card>-<MIG slices>-<GB><series>[ME|NOME|MEALL|GFX]; GB 0 is 512 MiB.
    """
    card, dash, size = name.rpartition("-")
    series = size.lstrip("0123456789")
    number = sets.number(size.removesuffix(series))
    if not dash or number is None or series[:1] not in _SERIES or series[1:] not in _KINDS:
        return name, None
    without_slices, dash, slices = card.rpartition("-")
    return (without_slices if dash and sets.is_decimal(slices) else card), number


class Device(NamedTuple):
    """Something that a domain can get: a VF of a vendor VFIO GPU, or a mediated device.

    Where mediated devices are made, each that could be made at a time is a device of its own, one
    of its parent's `slot`s, without a UUID as yet.
    """

    address: Location  # of a mediated device: its parent's
    gpu: Location
    type_id: int | str | None  # 0: no vGPU on it; None: can't be read, see `error`
    creatable: tuple[Profile, ...] | None  # what could be set now; None: can't be read
    error: str | None = None
    slot: int | None = None  # of its parent's, by number; None: this is no mediated device
    uuid: str | None = None  # of a mediated device that exists, or is claimed

    @property
    def name(self) -> str:
        """What files, JSON and the command line call it; a slot's is for us alone."""
        return self.uuid or (f"{self.address}+{self.slot}" if self.slot else str(self.address))

    @property
    def is_mdev(self) -> bool:
        """Whether it is, or could become, a mediated device."""
        return self.slot is not None

    @property
    def order(self) -> tuple[object, ...]:
        """What devices are sorted by: PCI addresses by number, before all other names."""
        return (*location_order(self.address), self.slot or 0, self.uuid or "")

    def listed(self, profile: Profile) -> Profile | None:
        """PROFILE as this device lists it, perhaps under another id; None: it doesn't."""
        return next((each for each in self.creatable or () if each.name == profile.name), None)


class Gpu(NamedTuple):
    """A physical GPU with its devices, in the order of their addresses."""

    address: Location
    backend: str
    numa_node: int | None  # None: the host has one node, or doesn't say
    devices: tuple[Device, ...]
    profiles: tuple[Profile, ...] = ()  # what it has told of besides what devices list now
    most: tuple[tuple[Profile, int], ...] = ()  # of which it takes so many at most, as it has told


class Inventory(NamedTuple):
    """All GPUs of a host, by address, and what of them couldn't be read."""

    gpus: tuple[Gpu, ...]
    problems: tuple[str, ...] = ()

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices of all GPUs."""
        return tuple(device for gpu in self.gpus for device in gpu.devices)

    @property
    def profiles(self) -> tuple[Profile, ...]:
        """Each profile that some device could be given now, or a GPU has told of, by id."""
        told = [profile for gpu in self.gpus for profile in gpu.profiles]
        told += [p for device in self.devices for p in device.creatable or ()]
        return distinct(told)


def distinct(profiles: Iterable[Profile]) -> tuple[Profile, ...]:
    """PROFILES once each, by id and name."""
    return tuple(sorted(set(profiles), key=profile_order))


def profile_order(profile: Profile) -> tuple[object, ...]:
    """What profiles are sorted by: numbers as such, and so those at the end of other ids."""
    if isinstance(profile.id, int):
        return 0, "", profile.id, profile.name
    stem, _, number = profile.id.rpartition("-")
    is_number = number.isascii() and number.isdigit()
    return (1, stem, int(number), profile.name) if is_number else (1, profile.id, 0, profile.name)


def location_order(location: Location) -> tuple[object, ...]:
    """What locations are sorted by: PCI addresses by number, before all other names."""
    return (1, location) if isinstance(location, str) else (0, *location)
