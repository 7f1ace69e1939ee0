# SPDX-License-Identifier: LGPL-2.1-or-later
"""Why a GPU has no device for a request, as ends of sentences about that GPU; pure."""

from __future__ import annotations

from .capacity import use_of
from .devices import cards, mdev
from .devices.model import distinct
from .records import TYPE_CHECKING

if TYPE_CHECKING:
    from .capacity import GpuUse, Host
    from .devices.model import Device, Profile
    from .domain.model import Request

NO_GPU = "this host has no GPU with VFs that can become vGPUs; enable its VFs"


def no_such_gpu(request: Request, host: Host) -> str:
    """Why the GPU that REQUEST names can't be had; a whole sentence."""
    there = ", ".join(str(gpu.address) for gpu in host.inventory.gpus)
    return (
        f"GPU {request.gpu} is not on this host, has no VFs, or is excluded by [policy]; the GPUs "
        f"with VFs are {there}"
    )


def why_none(profile: Profile, use: GpuUse, host: Host) -> str:
    """Why no device of a GPU can be given PROFILE."""
    who = users(use, host)
    if str(use.gpu.address) in host.cordoned:
        return f"is cordoned{who}"
    if not use.free:
        return f"has {'no room for more' if use.gpu.backend == mdev.BACKEND else 'no free VF'}{who}"
    size = profile.framebuffer_mib
    if use.fitting(profile):  # listed, since what will be there isn't programmed yet
        clashes = any(other.framebuffer_mib != size for other in use.pending)
        return runs(use, host) if clashes and not use.is_mixed else f"has no room for it{who}"
    offered = distinct(listed for device in use.free for listed in device.creatable or ())
    if not offered:
        return f"is full{who}" if use.present else "offers nothing, although nothing runs there"
    sizes = {each.framebuffer_mib for each in offered}
    if size not in sizes and sizes == use.sizes:
        return runs(use, host)
    if use.present and cards.card_of(profile) in map(cards.card_of, offered):
        return f"has no room for it{who}"
    return f"doesn't offer it{who}"


def runs(use: GpuUse, host: Host) -> str:
    """What size of profiles a GPU has, and whose they are."""
    sizes = use.sizes
    what = f"{gigabytes(sizes.pop())} profiles" if len(sizes) == 1 else "profiles of several sizes"
    verb = "runs" if len(use.pending) < len(use.present) else "will run"
    return f"{verb} {what}{users(use, host)}"


def users(use: GpuUse, host: Host) -> str:
    """Who has devices of a GPU, in parentheses; empty where nobody does."""
    owners = []
    found = dict.fromkeys(_NOT_FREE, 0)
    for device in use.gpu.devices:
        claim = host.claims.readable.get(device.name)
        if claim and not claim.is_no_domains:
            owners.append(claim.domain_name)
        elif what := _not_free(device, host):
            found[what] += 1
    parts = [f"owners {', '.join(sorted(owners))}"] if owners else []
    kind = "place" if use.gpu.backend == mdev.BACKEND else "VF"
    for what, number in found.items():
        if number:
            parts.append(f"{number} {kind}{'s' if number > 1 else ''} {what}")
    return f" ({'; '.join(parts)})" if parts else ""


def gigabytes(mib: int | None) -> str:
    """A size of framebuffer."""
    if mib is None or mib % 1024:
        return f"{mib or '?'} MB"
    return f"{mib // 1024} GB"


_UNREADABLE = "that can't be read"
_CARVED = "carved"
_FOREIGN = "with a type that nobody claimed"
_TAKEN = "taken without a type"
_PLANNED = "for the domain's other vGPUs"
_CORDONED = "cordoned"
_NOT_FREE = (_CARVED, _FOREIGN, _TAKEN, _PLANNED, _CORDONED, _UNREADABLE)


def _not_free(device: Device, host: Host) -> str | None:
    """Why a device without an owner can't be given away."""
    if device.error is not None or device.name in host.claims.unreadable:
        return _UNREADABLE
    if device.name in host.claims.readable:
        return _CARVED  # a domain's has an owner
    if device.type_id:
        return _FOREIGN
    if device.name in host.planned:
        return _PLANNED
    if device.name in host.busy:
        return _TAKEN
    # A GPU's own cordon is said of the GPU.
    return _CORDONED if device.name in host.cordoned else None


def unseen(host: Host) -> str:
    """What runs where profiles may be that the host has never shown; empty where all are known.

    The driver lists only what fits beside what runs.
    """
    uses = [use_of(gpu, host) for gpu in host.inventory.gpus]
    return "".join(
        f"; {use.gpu.address} {runs(use, host)}"
        for use in uses
        if use.present and not (use.cards and use.cards <= host.complete)
    )
