# SPDX-License-Identifier: LGPL-2.1-or-later
"""What is on each GPU, and how much more fits; pure.

What the driver lists for a device is its own word on what fits there now: framebuffer, and on most
GPUs the rule that all vGPUs of a GPU have the same size. The lists don't know what is claimed but
not programmed yet, and none says how often a profile fits; that is worked out here.
"""

from __future__ import annotations

from types import MappingProxyType

from .devices import cards, catalogue, profiles
from .devices.catalogue import Catalogue
from .devices.model import Profile
from .records import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from .address import Location
    from .claims.store import Claims
    from .devices.model import Device, Gpu, Inventory

_NOTHING: Mapping[str, Profile] = MappingProxyType({})
_EMPTY = Catalogue()


class Host(NamedTuple):
    """All that bears on what a device can be given to; made by `host`. Devices are named."""

    inventory: Inventory
    claims: Claims
    profiles: tuple[Profile, ...]  # all that the host can name: lists, catalogue, claims; by id
    busy: frozenset[str] = frozenset()  # what a process or a running domain has
    pointed: frozenset[str] = frozenset()  # what the definitions of other domains name
    cordoned: frozenset[str] = frozenset()  # devices and GPUs on which nothing new is put
    dirty: frozenset[str] = frozenset()  # what a start would clear first, and then could have
    planned: Mapping[str, Profile] = _NOTHING  # what the same domain's other vGPUs will take
    complete: frozenset[str] = frozenset()  # cards all of whose profiles are in `profiles`

    def is_cordoned(self, device: Device) -> bool:
        """Whether nothing new is put on DEVICE, by its own cordon or its GPU's."""
        return bool(self.cordoned) and (
            str(device.address) in self.cordoned or str(device.gpu) in self.cordoned
        )

    def is_open(self, device: Device) -> bool:
        """Whether DEVICE is readable and nobody's, but perhaps dirty."""
        return (
            device.type_id is not None
            and device.creatable is not None
            and device.name not in self.claims.unreadable
            and device.name not in self.busy
            and device.name not in self.planned
            and not self.is_cordoned(device)
        )

    def is_free(self, device: Device) -> bool:
        """Whether DEVICE could be given away: open, without a type, and not claimed."""
        return (
            device.type_id == 0 and device.name not in self.claims.readable and self.is_open(device)
        )

    def is_dirty(self, device: Device) -> bool:
        """Whether DEVICE could be given away once it has been cleared, as a start would do."""
        return device.name in self.dirty and self.is_open(device)

    def profile_of(self, device: Device) -> Profile | None:
        """The profile on DEVICE, or the one that is about to be: its claim's. None: neither."""
        claim = self.claims.readable.get(device.name)
        if claim and device.type_id in (0, None, claim.profile.id):
            if not device.is_mdev:
                return claim.profile
            # What its GPU tells of it besides isn't in a claim.
            named = profiles.find(str(claim.profile.id), self.profiles)
            return named[0] if named else claim.profile
        if not device.type_id:
            return self.planned.get(device.name)
        named = profiles.find(str(device.type_id), self.profiles)
        return named[0] if named else Profile(device.type_id, f"type {device.type_id}")

    def awaits(self, device: Device) -> bool:
        """Whether DEVICE is given away, but not programmed yet."""
        return device.type_id == 0 and (
            device.name in self.claims.readable or device.name in self.planned
        )


class GpuUse(NamedTuple):
    """What is on a GPU, and what is left; made by `use_of`."""

    gpu: Gpu
    free: tuple[Device, ...]
    present: tuple[Profile, ...]  # of each device that has one, or is given away for one
    pending: tuple[Profile, ...]  # those of them that aren't programmed yet: no list knows them
    total_mib: int  # framebuffer
    left_mib: int  # of it
    is_known: bool  # whether it is all that is left, not just what surely is
    cards: frozenset[str]  # what its profiles' names say it is

    def fitting(self, profile: Profile) -> list[Device]:
        """The free devices that list PROFILE."""
        return [device for device in self.free if device.listed(profile)]

    @property
    def sizes(self) -> set[int | None]:
        """The sizes that are present."""
        return {profile.framebuffer_mib for profile in self.present}

    @property
    def is_mixed(self) -> bool:
        """Whether it provably takes vGPUs of several sizes: it has them, or lists another."""
        programmed = list(self.present)
        for profile in self.pending:
            programmed.remove(profile)
        sizes = {profile.framebuffer_mib for profile in programmed}
        listed = {p.framebuffer_mib for device in self.free for p in device.creatable or ()}
        return len(sizes) > 1 or bool(sizes and listed - sizes)


def host(
    inventory: Inventory,
    claims: Claims,
    busy: frozenset[str] = frozenset(),
    pointed: frozenset[str] = frozenset(),
    remembered: Catalogue = _EMPTY,
    cordoned: frozenset[str] = frozenset(),
) -> Host:
    """Put together what bears on a choice."""
    claimed = (claim.profile for claim in claims.readable.values())
    known = catalogue.known(inventory.profiles, remembered, claimed)
    return Host(
        inventory,
        claims,
        known.profiles,
        busy,
        pointed,
        cordoned,
        complete=known.complete,
    )


def narrowed(host: Host, gpus: Iterable[Gpu]) -> Host:
    """HOST as if it had GPUS alone, which are some of its own.

    What could be put on a GPU, and what not, has nothing to do with what is on others.
    """
    gpus = tuple(gpus)
    names = {device.name for gpu in gpus for device in gpu.devices}
    readable, unreadable = host.claims.readable, host.claims.unreadable
    return host._replace(
        inventory=host.inventory._replace(gpus=gpus),
        claims=host.claims._replace(
            readable={name: readable[name] for name in names if name in readable},
            unreadable={name: unreadable[name] for name in names if name in unreadable},
        ),
        busy=host.busy & names,
        pointed=host.pointed & names,
        cordoned=host.cordoned & (names | {str(at) for gpu in gpus for at in _places(gpu)}),
        dirty=host.dirty & names,
        planned={name: host.planned[name] for name in names if name in host.planned},
    )


def _places(gpu: Gpu) -> Iterable[Location]:
    return gpu.address, *(device.address for device in gpu.devices)


def cleared(host: Host, device: Device) -> Host:
    """The host as it would be once a dirty DEVICE has been cleared.

    What could be set there then is the driver's to say. We expect what it says of the devices
    beside it, and what shares its size with what stays; where nothing stays, all that the card has.
    """
    claims = dict(host.claims.readable)
    had = host.profile_of(device)
    claims.pop(device.name, None)
    there = host._replace(claims=host.claims._replace(readable=claims))
    if device.type_id == 0:
        return there
    gpu = next(gpu for gpu in host.inventory.gpus if gpu.address == device.gpu)
    kinds = use_of(gpu, host).cards
    emptied = _with(there, device._replace(type_id=0, creatable=()))
    gpu = next(gpu for gpu in emptied.inventory.gpus if gpu.address == device.gpu)
    left = use_of(gpu, emptied)
    listed = {profile for other in left.free for profile in other.creatable or ()} | {had}
    expected = tuple(
        profile
        for profile in host.profiles
        if cards.card_of(profile) in kinds
        and isinstance(profile.id, str) == device.is_mdev
        and (not left.present or profile in listed or profile.framebuffer_mib in left.sizes)
    )
    return _with(there, device._replace(type_id=0, creatable=expected))


def _with(host: Host, device: Device) -> Host:
    """HOST with DEVICE in the place of the one of its name."""
    gpus = tuple(
        gpu._replace(devices=tuple(device if d.name == device.name else d for d in gpu.devices))
        if gpu.address == device.gpu
        else gpu
        for gpu in host.inventory.gpus
    )
    return host._replace(inventory=host.inventory._replace(gpus=gpus))


def use_of(gpu: Gpu, host: Host) -> GpuUse:
    """Work out what is on GPU and what is left of it.

    Its framebuffer is that of the largest profile known for its card: in any list of the host (an
    idle GPU lists its largest), in the catalogue or a claim, or among the cards that we know. What
    is left is that less what is there or given away. Where that isn't known, all we know is that
    the largest profile still listed fits.
    """
    free = tuple(filter(host.is_free, gpu.devices))
    given = [(device, each) for device in gpu.devices if (each := host.profile_of(device))]
    present = tuple(profile for _, profile in given)
    pending = tuple(profile for device, profile in given if host.awaits(device))
    offered = {profile for device in gpu.devices for profile in device.creatable or ()}
    offered.update(gpu.profiles)
    kinds = frozenset(cards.card_of(profile) for profile in (*offered, *present))
    known = max((cards.framebuffer_mib(kind) or 0 for kind in kinds), default=0)
    told = max(((profile.framebuffer_mib or 0) * most for profile, most in gpu.most), default=0)
    named = cards.largest_mib(p for p in host.profiles if cards.card_of(p) in kinds)
    total = max(known, told, named)
    sizes = [profile.framebuffer_mib for profile in present]
    used = sum(filter(None, sizes))
    listed = cards.largest_mib(p for device in free for p in device.creatable or ())
    surely = listed - sum(profile.framebuffer_mib or 0 for profile in pending)
    left = total - used
    is_known = None not in sizes and bool(
        # Where mediated devices are made, all types are told of at all times.
        known or gpu.profiles or not present or (kinds and kinds <= host.complete)
    )
    if not is_known:
        left = surely if None in sizes else max(left, surely)
    return GpuUse(gpu, free, present, pending, max(total, used + left), left, is_known, kinds)


def startable(profile: Profile, use: GpuUse) -> int:
    """How many vGPUs of PROFILE could be started on a GPU now, one after the other.

    Never more than its free devices that list it, and never more than fit into what is left of its
    framebuffer, by the sizes that the profiles' names tell:

    - Where what is left isn't known (see `use_of`), the count is a lower bound. It is at least 1
      for what the driver lists.
    - Whether a GPU takes vGPUs of two sizes can't be told while all that it has isn't programmed
      yet; until then, another size than that counts 0.
    - For a name that tells no size, the number of free devices that list it is all there is: an
      upper bound. So is the count for MIG-backed profiles, since sysfs doesn't tell the GPU
      instances, and in mixed-size mode, where the driver also wants each size in its place.
    """
    free = len(use.fitting(profile))
    for limited, most in use.gpu.most:
        if limited.name == profile.name:
            free = min(free, most - sum(each.name == limited.name for each in use.present))
    size = profile.framebuffer_mib
    if free <= 0 or size is None:
        return max(free, 0)
    if any(other.framebuffer_mib != size for other in use.pending) and not use.is_mixed:
        return 0
    return max(min(free, use.left_mib // size), 0 if use.pending else 1)


def bound(profile: Profile, use: GpuUse) -> str:
    """What `startable` is where it isn't the number itself: "at least" or "at most"."""
    if profile.framebuffer_mib is None:
        return "at most"
    return "" if use.is_known else "at least"
