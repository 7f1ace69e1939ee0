# SPDX-License-Identifier: LGPL-2.1-or-later
"""Chooses a device for a request, or says why there is none; pure.

`together.py` does it for all the vGPUs of a domain at once.
"""

from __future__ import annotations

from fractions import Fraction

from . import reasons
from .capacity import cleared, narrowed, startable, use_of
from .devices import numa, profiles
from .errors import NoRoomError, RequestError
from .records import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .capacity import GpuUse, Host
    from .devices.model import Device, Gpu, Profile
    from .domain.model import Request

HINT = "'virt-vgpu profiles' shows what could be started now"


class Placed(NamedTuple):
    """A vGPU of the same domain that has its device already."""

    request: Request
    device: Device
    profile: Profile | None = None  # None: this host has none that it could be


class Company(NamedTuple):
    """What of its domain bears on the place of a vGPU."""

    nodes: frozenset[int] = frozenset()  # NUMA nodes that the domain lives on
    others: tuple[Placed, ...] = ()


ALONE = Company()


class Candidate(NamedTuple):
    """A device that could serve a request; the best is the smallest."""

    pointed: bool  # whether another definition points at it
    dirty: bool  # whether it has to be cleared first
    overbooked: bool  # whether its GPU has no room beyond what other definitions will take
    far: bool  # whether it isn't on the domain's NUMA nodes
    other: bool  # under `pack`: whether its GPU doesn't run this size yet
    order: Fraction  # share of framebuffer in use; negative under `pack`
    place: tuple[object, ...]  # its address, for an order among equals
    device: Device


class Ranking(NamedTuple):
    """The devices that could serve a request, best first, and why GPUs have none."""

    candidates: tuple[Candidate, ...]
    reasons: tuple[str, ...]  # for each GPU without one, what stands against it

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices alone."""
        return tuple(candidate.device for candidate in self.candidates)


def resolve(wanted: str, host: Host) -> Profile:
    """The profile that WANTED names on this host.

    Raises RequestError for one that is unknown or ambiguous, with what there is instead.
    """
    found = profiles.find(wanted, host.profiles)
    if len({profile.name for profile in found}) == 1:
        return found[0]  # under several ids, on a host that gives it in several ways
    if found:
        raise RequestError(
            f"profile '{wanted}' is ambiguous: it could be {profiles.listed(found)}; ask for one "
            "by its full name or id"
        )
    if not host.inventory.gpus:
        raise RequestError(f"no device for '{wanted}': {reasons.NO_GPU}")
    offered = profiles.listed(host.profiles) or "none"
    if unseen := reasons.unseen(host):
        raise RequestError(
            f"profile '{wanted}' is unknown, or doesn't fit now: the host offers {offered}{unseen}"
        )
    raise RequestError(f"profile '{wanted}' is unknown on this host, which has {offered}")


def choose(
    profile: Profile, request: Request, policy: str, host: Host, company: Company = ALONE
) -> Device:
    """The best device for PROFILE. Raises RequestError, with the reason for each GPU."""
    ranking = rank(profile, request, policy, host, company)
    if ranking.candidates:
        return ranking.devices[0]
    raise NoRoomError(f"no device for {profile.short_name}: {'; '.join(ranking.reasons)}; {HINT}")


def rank(
    profile: Profile, request: Request, policy: str, host: Host, company: Company = ALONE
) -> Ranking:
    """Order the devices that PROFILE could be put on now.

    First those that no other definition points at; of them the clean ones before those that a
    start has to clear first; then those of GPUs that have room beyond what other definitions will
    take; those on the domain's NUMA nodes; then by POLICY, or the request's own: `spread` prefers
    the GPU with the lowest share of its framebuffer in use, `pack` one that runs this size
    already (most take one size at a time), then the highest share; then by address.

    Raises RequestError for `numa='require'` of a domain that lives on no node in particular.
    """
    if request.numa == "require" and not company.nodes:
        raise RequestError(
            f"'{request.alias}' has numa='require', but its domain has neither <numatune> nor "
            "pinned vcpus to require anything of; add one, or remove numa"
        )
    found: list[Candidate] = []
    against = []
    gpus = host.inventory.gpus
    if not gpus:
        against.append(reasons.NO_GPU)
    elif request.gpu is not None:
        gpus = tuple(gpu for gpu in gpus if gpu.address == request.gpu)
        if not gpus:
            against.append(reasons.no_such_gpu(request, host))
    pack = (request.placement or policy) == "pack"
    for gpu in gpus:
        why = _excluded(request, gpu, company)
        here = [] if why else list(_candidates(profile, gpu, pack, host))
        if request.numa != "ignore" and company.nodes and numa.node_of(gpu) not in company.nodes:
            here = [candidate._replace(far=True) for candidate in here]
        found += here
        if not here:
            against.append(
                f"{gpu.address} {why or reasons.why_none(profile, use_of(gpu, host), host)}"
            )
    return Ranking(tuple(sorted(found)), tuple(against))


def why(best: Candidate, ranking: Ranking, request: Request) -> str:
    """Why BEST, the first of RANKING, was chosen: the end of a sentence about the device."""
    gpu = best.device.gpu
    rivals = [each for each in ranking.candidates if each.device.gpu != gpu]
    cleaning = "; what is on it is cleared first" if best.dirty else ""
    if request.gpu:
        return f"it is on GPU {gpu}, which was asked for{cleaning}"
    if not rivals:
        return f"only GPU {gpu} can take it now{cleaning}"
    rival = rivals[0]
    share = f"share of its framebuffer in use ({round(abs(best.order) * 100)} %)"
    for is_worse, text in (
        (rival.pointed and not best.pointed, "no other definition points at it"),
        (rival.dirty and not best.dirty, "nothing has to be cleared first"),
        (rival.overbooked and not best.overbooked, f"GPU {gpu} has room for it beside the others"),
        (rival.far and not best.far, f"GPU {gpu} is on the domain's NUMA node"),
        (rival.other and not best.other, f"GPU {gpu} already runs profiles of this size"),
        (rival.order > best.order, f"GPU {gpu} has the lowest {share}"),
    ):
        if is_worse:
            if best.order < 0:
                text = text.replace("lowest", "highest")
            return text + cleaning
    return f"it is the first of equals{cleaning}"


def _excluded(request: Request, gpu: Gpu, company: Company) -> str | None:
    """What in a request, or in those of the same domain, speaks against a GPU."""
    if request.numa == "require" and numa.node_of(gpu) not in company.nodes:
        nodes = ", ".join(map(str, sorted(company.nodes)))
        return f"is on NUMA node {numa.node_of(gpu)}, and the domain lives on {nodes}"
    for other in company.others:
        is_there = other.device.gpu == gpu.address
        if is_there and (request.apart or other.request.apart):
            return f"has '{other.request.alias}', from which '{request.alias}' must be apart"
        if not is_there and (request.together or other.request.together):
            return f"is not that of '{other.request.alias}', to which '{request.alias}' belongs"
    return None


def _candidates(profile: Profile, gpu: Gpu, pack: bool, host: Host) -> Iterator[Candidate]:
    use = use_of(gpu, host)
    yield from _candidates_in(profile, use, use.fitting(profile), pack, host, dirty=False)
    for device in filter(host.is_dirty, gpu.devices):
        there = cleared(narrowed(host, [gpu]), device)
        after = next(each for each in there.inventory.gpus if each.address == gpu.address)
        use = use_of(after, there)
        fitting = [each for each in use.fitting(profile) if each.name == device.name]
        yield from _candidates_in(profile, use, fitting and [device], pack, host, dirty=True)


def _candidates_in(
    profile: Profile, use: GpuUse, devices: list[Device], pack: bool, host: Host, dirty: bool
) -> Iterator[Candidate]:
    """DEVICES of a GPU as candidates, if the GPU takes one more of PROFILE."""
    number = startable(profile, use) if devices else 0
    if not number:
        return
    pointed = sum(each.name in host.pointed for each in use.free)
    share = _share(profile, use, pointed)
    best = Candidate(
        pointed=False,
        dirty=dirty,
        overbooked=pointed >= number,
        far=False,
        other=pack and profile.framebuffer_mib not in use.sizes,
        order=-share if pack else share,
        place=devices[0].order,
        device=devices[0],
    )
    for device in devices:
        is_pointed = device.name in host.pointed
        yield best._replace(pointed=is_pointed, place=device.order, device=device)


def _share(profile: Profile, use: GpuUse, pointed: int) -> Fraction:
    """The share of a GPU's framebuffer in use, with POINTED vGPUs more of PROFILE's size.

    Where a size isn't known, the share of its devices.
    """
    sizes = [each.framebuffer_mib for each in (*use.present, *(pointed * [profile]))]
    if None in sizes or not use.total_mib:
        return Fraction(len(sizes), len(use.gpu.devices))
    return Fraction(sum(filter(None, sizes)), use.total_mib)
