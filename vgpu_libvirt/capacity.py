# SPDX-License-Identifier: LGPL-2.1-or-later
"""What is on each GPU, and how much more fits; pure.

What the driver lists for a device is its own word on what fits there now: framebuffer, and on most
GPUs the rule that all vGPUs of a GPU have the same size. The lists don't know what is claimed but
not programmed yet, and none says how often a profile fits; that is worked out here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from .devices import cards, profiles
from .devices.model import Profile, distinct

if TYPE_CHECKING:
    from .claims.store import Claims
    from .devices.model import Device, Gpu, Inventory


class Host(NamedTuple):
    """All that bears on what a device can be given to; made by `host`."""

    inventory: Inventory
    claims: Claims
    profiles: tuple[Profile, ...]  # all that the host shows, in a list or in a claim; by id
    busy: frozenset[str] = frozenset()  # devices that a process or a running domain has
    pointed: frozenset[str] = frozenset()  # devices that the definitions of other domains name

    def is_free(self, device: Device) -> bool:
        """Whether DEVICE could be given away: readable, without a type, and nobody's."""
        return (
            device.type_id == 0
            and device.creatable is not None
            and device.name not in self.claims.readable
            and device.name not in self.claims.unreadable
            and device.name not in self.busy
        )

    def profile_of(self, device: Device) -> Profile | None:
        """The profile on DEVICE, or the one that is about to be: its claim's. None: neither."""
        claim = self.claims.readable.get(device.name)
        if claim and device.type_id in (0, None, claim.profile.id):
            return claim.profile
        if not device.type_id:
            return None
        named = profiles.find(str(device.type_id), self.profiles)
        return named[0] if named else Profile(device.type_id, f"type {device.type_id}")


class GpuUse(NamedTuple):
    """What is on a GPU, and what is left; made by `use_of`."""

    gpu: Gpu
    free: tuple[Device, ...]
    present: tuple[Profile, ...]  # of each device that has one, or is claimed for one
    pending: tuple[Profile, ...]  # those of them that aren't programmed yet: no list knows them
    total_mib: int  # framebuffer
    left_mib: int  # of it
    is_known: bool  # whether it is all that is left, not just what surely is

    def fitting(self, profile: Profile) -> list[Device]:
        """The free devices that list PROFILE."""
        return [device for device in self.free if profile in (device.creatable or ())]


def host(
    inventory: Inventory,
    claims: Claims,
    busy: frozenset[str] = frozenset(),
    pointed: frozenset[str] = frozenset(),
) -> Host:
    """Put together what bears on a choice."""
    claimed = (claim.profile for claim in claims.readable.values())
    return Host(inventory, claims, distinct((*inventory.profiles, *claimed)), busy, pointed)


def use_of(gpu: Gpu, host: Host) -> GpuUse:
    """Work out what is on GPU and what is left of it.

    Its framebuffer is that of the largest profile known for its card: in any list of the host (an
    idle GPU lists its largest), in a claim, or among the cards that we know. What is left is that
    less what is there or claimed. Where that isn't known, all we know is that the largest profile
    still listed fits.
    """
    free = tuple(filter(host.is_free, gpu.devices))
    present = tuple(filter(None, map(host.profile_of, gpu.devices)))
    pending = tuple(
        host.claims.readable[device.name].profile
        for device in gpu.devices
        if device.type_id == 0 and device.name in host.claims.readable
    )
    offered = {profile for device in gpu.devices for profile in device.creatable or ()}
    kinds = {cards.card_of(profile) for profile in (*offered, *present)}
    known = max((cards.framebuffer_mib(kind) or 0 for kind in kinds), default=0)
    total = max(known, cards.largest_mib(p for p in host.profiles if cards.card_of(p) in kinds))
    sizes = [profile.framebuffer_mib for profile in present]
    used = sum(filter(None, sizes))
    listed = cards.largest_mib(p for device in free for p in device.creatable or ())
    surely = listed - sum(profile.framebuffer_mib or 0 for profile in pending)
    left = total - used
    is_known = None not in sizes and bool(known or not present)
    if not is_known:
        left = surely if None in sizes else max(left, surely)
    return GpuUse(gpu, free, present, pending, max(total, used + left), left, is_known)


def startable(profile: Profile, use: GpuUse) -> int:
    """How many vGPUs of PROFILE could be started on a GPU now, one after the other.

    Never more than its free devices that list it, and never more than fit into what is left of its
    framebuffer, by the sizes that the profiles' names tell:

    - Where what is left isn't known (see `use_of`), the count is a lower bound. It is at least 1
      for what the driver lists.
    - Whether a GPU takes vGPUs of two sizes can't be told while something is claimed that isn't
      programmed yet; until then, another size than that counts 0.
    - For a name that tells no size, the number of free devices that list it is all there is: an
      upper bound. So is the count for MIG-backed profiles, since sysfs doesn't tell the GPU
      instances, and in mixed-size mode, where the driver also wants each size in its place.
    """
    free = len(use.fitting(profile))
    size = profile.framebuffer_mib
    if not free or size is None:
        return free
    if any(other.framebuffer_mib != size for other in use.pending):
        return 0
    return max(min(free, use.left_mib // size), 0 if use.pending else 1)


def bound(profile: Profile, use: GpuUse) -> str:
    """What `startable` is where it isn't the number itself: "at least" or "at most"."""
    if profile.framebuffer_mib is None:
        return "at most"
    return "" if use.is_known else "at least"
