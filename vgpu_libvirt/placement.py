# SPDX-License-Identifier: LGPL-2.1-or-later
"""Chooses a device for a request, or says why there is none; pure."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING, NamedTuple

from .capacity import startable, use_of
from .devices import cards, profiles
from .devices.model import distinct
from .errors import RequestError

if TYPE_CHECKING:
    from .capacity import GpuUse, Host
    from .devices.model import Device, Profile
    from .domain.model import Request

_NO_GPU = "this host has no GPU with VFs that can become vGPUs; enable its VFs"


class Ranking(NamedTuple):
    """The devices that could serve a request, best first, and why GPUs have none."""

    devices: tuple[Device, ...]
    reasons: tuple[str, ...]  # for each GPU without one, what stands against it


def resolve(wanted: str, host: Host) -> Profile:
    """The profile that WANTED names on this host.

    Raises RequestError for one that is unknown or ambiguous, with what there is instead.
    """
    found = profiles.find(wanted, host.profiles)
    if len(found) == 1:
        return found[0]
    if found:
        raise RequestError(
            f"profile '{wanted}' is ambiguous: it could be {profiles.listed(found)}; ask for one "
            "by its full name or id"
        )
    if not host.inventory.gpus:
        raise RequestError(f"no device for '{wanted}': {_NO_GPU}")
    offered = profiles.listed(host.profiles) or "none"
    uses = (use_of(gpu, host) for gpu in host.inventory.gpus)
    # The driver lists only what fits beside what runs, so others may be there and not be seen.
    runs = [f"; {use.gpu.address} {_runs(use, host)}" for use in uses if use.present]
    if runs:
        raise RequestError(
            f"profile '{wanted}' is unknown, or doesn't fit now: the host offers {offered}"
            + "".join(runs)
        )
    raise RequestError(f"profile '{wanted}' is unknown on this host, which has {offered}")


def choose(profile: Profile, request: Request, policy: str, host: Host) -> Device:
    """The best device for PROFILE. Raises RequestError, with the reason for each GPU."""
    ranking = rank(profile, request, policy, host)
    if ranking.devices:
        return ranking.devices[0]
    raise RequestError(
        f"no device for {profile.short_name}: {'; '.join(ranking.reasons)}; 'virt-vgpu profiles' "
        "shows what could be started now"
    )


def rank(profile: Profile, request: Request, policy: str, host: Host) -> Ranking:
    """Order the devices that PROFILE could be put on now.

    First those that no other definition points at; then those of GPUs that have room beyond what
    other definitions will take; then by POLICY, or the request's own: `spread` prefers the GPU
    with the lowest share of its framebuffer in use, `pack` the highest; then by address.
    """
    found: list[tuple[tuple[bool, bool, Fraction], Device]] = []
    reasons = []
    gpus = host.inventory.gpus
    if not gpus:
        reasons.append(_NO_GPU)
    elif request.gpu is not None:
        gpus = tuple(gpu for gpu in gpus if gpu.address == request.gpu)
        if not gpus:
            reasons.append(_no_such_gpu(request, host))
    for gpu in gpus:
        use = use_of(gpu, host)
        fitting = use.fitting(profile)
        if not fitting:
            reasons.append(f"{gpu.address} {_why_none(profile, use, host)}")
            continue
        planned = sum(device.name in host.pointed for device in use.free)
        overbooked = planned >= startable(profile, use)
        share = _share(profile, use, planned)
        if (request.placement or policy) == "pack":
            share = -share
        found += [((device.name in host.pointed, overbooked, share), device) for device in fitting]
    found.sort(key=lambda each: (*each[0], each[1].address))
    return Ranking(tuple(device for _, device in found), tuple(reasons))


def _share(profile: Profile, use: GpuUse, planned: int) -> Fraction:
    """The share of a GPU's framebuffer in use, with PLANNED vGPUs more of PROFILE's size.

    Where a size isn't known, the share of its devices.
    """
    sizes = [each.framebuffer_mib for each in (*use.present, *(planned * [profile]))]
    if None in sizes or not use.total_mib:
        return Fraction(len(sizes), len(use.gpu.devices))
    return Fraction(sum(filter(None, sizes)), use.total_mib)


def _no_such_gpu(request: Request, host: Host) -> str:
    there = ", ".join(str(gpu.address) for gpu in host.inventory.gpus)
    return (
        f"GPU {request.gpu} is not on this host, has no VFs, or is excluded by [policy]; the GPUs "
        f"with VFs are {there}"
    )


def _why_none(profile: Profile, use: GpuUse, host: Host) -> str:
    """Why no device of a GPU can be given PROFILE, as the end of a sentence about the GPU."""
    users = _users(use, host)
    if not use.free:
        return f"has no free VF{users}"
    offered = distinct(listed for device in use.free for listed in device.creatable or ())
    if not offered:
        return f"is full{users}" if use.present else "offers nothing, although nothing runs there"
    sizes = {each.framebuffer_mib for each in offered}
    if profile.framebuffer_mib not in sizes and sizes == {p.framebuffer_mib for p in use.present}:
        return _runs(use, host)
    if use.present and cards.card_of(profile) in map(cards.card_of, offered):
        return f"has no room for it{users}"
    return f"doesn't offer it{users}"


def _runs(use: GpuUse, host: Host) -> str:
    sizes = {profile.framebuffer_mib for profile in use.present}
    what = f"{_gigabytes(sizes.pop())} profiles" if len(sizes) == 1 else "profiles of several sizes"
    return f"runs {what}{_users(use, host)}"


def _users(use: GpuUse, host: Host) -> str:
    """Who has devices of a GPU, in parentheses; empty where nobody does."""
    owners = []
    foreign = taken = unreadable = 0
    for device in use.gpu.devices:
        if claim := host.claims.readable.get(device.name):
            owners.append(claim.domain_name)
        elif device.error is not None or device.name in host.claims.unreadable:
            unreadable += 1
        elif device.type_id:
            foreign += 1
        elif device.name in host.busy:
            taken += 1
    parts = [f"owners {', '.join(sorted(owners))}"] if owners else []
    for number, what in (
        (foreign, "with a type that nobody claimed"),
        (taken, "taken without a type"),
        (unreadable, "that can't be read"),
    ):
        if number:
            parts.append(f"{number} VF{'s' if number > 1 else ''} {what}")
    return f" ({'; '.join(parts)})" if parts else ""


def _gigabytes(mib: int | None) -> str:
    if mib is None or mib % 1024:
        return f"{mib or '?'} MB"
    return f"{mib // 1024} GB"
