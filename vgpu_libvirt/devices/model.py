# SPDX-License-Identifier: LGPL-2.1-or-later
"""The words for what a host has; plain values, made by one backend each."""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ..address import PciAddress

_VENDOR_PREFIX = re.compile(r"(?:NVIDIA|GRID) +")
# <card>-<GB><series>, or <card>-<MIG slices>-<GB><series>[ME|NOME|MEALL|GFX]; GB 0 is 512 MiB.
_SIZE = re.compile(r"-(\d+)[ABCQ](?:\d|ME|NOME|MEALL|GFX)?$", re.ASCII)


class Profile(NamedTuple):
    """A vGPU type: the driver's number for it and the driver's full name."""

    id: int
    name: str

    @property
    def short_name(self) -> str:
        """The name without the vendor's prefix."""
        return _VENDOR_PREFIX.sub("", self.name, count=1)

    @property
    def framebuffer_mib(self) -> int | None:
        """Framebuffer in MiB as the name tells it; None where it doesn't."""
        return _framebuffer_mib(self.name)


@functools.lru_cache(maxsize=1024)  # few names, and each is asked for with every device
def _framebuffer_mib(name: str) -> int | None:
    match = _SIZE.search(name)
    return (int(match[1]) * 1024 or 512) if match else None


class Device(NamedTuple):
    """Something that a domain can get; for a vendor VFIO GPU, one of its VFs."""

    address: PciAddress
    gpu: PciAddress
    type_id: int | None  # 0: no vGPU on it; None: can't be read, see `error`
    creatable: tuple[Profile, ...] | None  # what could be set now; None: can't be read
    error: str | None = None

    @property
    def name(self) -> str:
        """What files, JSON and the command line call it."""
        return str(self.address)


class Gpu(NamedTuple):
    """A physical GPU with its devices, in the order of their addresses."""

    address: PciAddress
    backend: str
    numa_node: int | None  # None: the host has one node, or doesn't say
    devices: tuple[Device, ...]


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
        """Each profile that some device could be given now, by id."""
        return distinct(p for device in self.devices for p in device.creatable or ())


def distinct(profiles: Iterable[Profile]) -> tuple[Profile, ...]:
    """PROFILES once each, by id and name."""
    return tuple(sorted(set(profiles)))
