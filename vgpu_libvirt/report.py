# SPDX-License-Identifier: LGPL-2.1-or-later
"""What `list`, `status` and `profiles` show, as text or JSON: a pure view of a survey."""

from __future__ import annotations

import re
from enum import StrEnum

from . import capacity
from .claims import liveness
from .claims.model import Phase
from .devices.model import Profile, distinct, location_order, profile_order
from .lifecycle.carve import is_to_renew
from .records import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

    from .address import Location
    from .claims.cordons import Cordon
    from .claims.inventory import LiveDomain
    from .claims.liveness import Verdict
    from .claims.model import Claim
    from .devices.model import Device, Gpu
    from .survey import Survey

_PROCESS = re.compile(r"/(\d+)/(?:fd|task)\b", re.ASCII)


class State(StrEnum):
    """What a device is to somebody who looks for one; the first that applies, in this order."""

    UNREADABLE = "unreadable"  # its claim or an attribute
    IN_USE = "in-use"  # open in a process, a running domain's, or its owner lives
    CLAIMED = "claimed"
    FOREIGN = "foreign"  # it has a type, but no claim
    FREE = "free"


class DeviceRow(NamedTuple):
    """A device with what is on it, and whose it is."""

    device: Device
    profile: Profile | None  # what it has now; None: nothing, or it can't be read
    state: State
    claim: Claim | None
    cordon: Cordon | None = None  # its own
    user: LiveDomain | None = None  # of a carved device

    @property
    def is_unclaimed(self) -> bool:
        """Whether it has a type that nobody claimed.

        Not a mediated device that we didn't make: that has an owner who knows it by its UUID.
        """
        has_one = self.profile is not None and self.state in (State.IN_USE, State.FOREIGN)
        return has_one and self.claim is None and not self.device.is_mdev


class GpuRow(NamedTuple):
    """A GPU with its devices."""

    gpu: Gpu
    devices: tuple[DeviceRow, ...]
    cordon: Cordon | None = None  # its own

    @property
    def left(self) -> tuple[str, ...]:
        """Who is on it: the names of owners, and the devices that aren't free nevertheless."""
        owned = [row for row in self.devices if row.claim and not row.claim.is_no_domains]
        owners = {row.claim.domain_name for row in owned if row.claim}
        taken = (row for row in self.devices if row not in owned and row.state is not State.FREE)
        return (*sorted(owners), *(row.device.name for row in taken))


class Capacity(NamedTuple):
    """How many vGPUs of a profile could be started on a GPU now; see capacity.startable."""

    profile: Profile
    gpu: Gpu
    startable: int
    bound: str  # "at least" or "at most" that many, or empty


class Report(NamedTuple):
    """All of it; `problems` are sentences."""

    gpus: tuple[GpuRow, ...]
    claims: tuple[tuple[Claim, Verdict], ...]
    problems: tuple[str, ...]


def build(survey: Survey) -> Report:
    """Make the report."""
    cordons: dict[Location, Cordon] = {cordon.target: cordon for cordon in survey.cordons}
    gpus = tuple(
        GpuRow(
            gpu,
            tuple(
                _row(survey, device)._replace(cordon=cordons.get(device.address))
                for device in gpu.devices
                # A parent's slots but the first only count how often something can be made there.
                if device.uuid or not device.slot
            ),
            cordons.get(gpu.address),
        )
        for gpu in survey.host.inventory.gpus
    )
    claims = tuple(
        (claim, survey.verdicts[name])
        for name, claim in sorted(survey.host.claims.readable.items())
    )
    return Report(gpus, claims, tuple(_problems(survey, gpus)))


def capacities(survey: Survey) -> tuple[Capacity, ...]:
    """What could be started on each GPU, for every profile that it lists or has; by id."""
    found: list[Capacity] = []
    for gpu in survey.host.inventory.gpus:
        use = capacity.use_of(gpu, survey.host)
        listed = (profile for device in gpu.devices for profile in device.creatable or ())
        found += [
            Capacity(profile, gpu, capacity.startable(profile, use), capacity.bound(profile, use))
            for profile in distinct((*listed, *use.present))
        ]
    return tuple(
        sorted(
            found,
            key=lambda one: (profile_order(one.profile), location_order(one.gpu.address)),
        )
    )


def status_json(report: Report) -> dict[str, Any]:
    """The report as `status --json` and `list --json` print it."""
    return {
        "gpus": [
            {
                "address": str(row.gpu.address),
                "backend": row.gpu.backend,
                "numa_node": row.gpu.numa_node,
                "devices": [_device_json(each) for each in row.devices],
                **_cordon_json(row.cordon),
            }
            for row in report.gpus
        ],
        "claims": [claim.to_json() for claim, _ in report.claims],
        "problems": list(report.problems),
    }


def profiles_json(found: Iterable[Capacity]) -> list[dict[str, Any]]:
    """The capacities as `profiles --json` prints them."""
    return [
        {
            "id": one.profile.id,
            "name": one.profile.name,
            "gpu": str(one.gpu.address),
            "startable": one.startable,
            "framebuffer_mib": one.profile.framebuffer_mib,
        }
        for one in found
    ]


def _device_json(row: DeviceRow) -> dict[str, Any]:
    shown = ("domain_uuid", "domain_name", "alias", "phase")
    claim = row.claim.to_json() if row.claim else {}
    return {
        "address": str(row.device.address),
        **({"uuid": row.device.uuid} if row.device.is_mdev else {}),
        "profile": row.profile.to_json() if row.profile else None,
        "state": row.state,
        "claim": {key: claim[key] for key in shown} if claim else None,
        **_cordon_json(row.cordon),
    }


def _cordon_json(cordon: Cordon | None) -> dict[str, Any]:
    """Nothing where there is no cordon, for readers that know no cordons."""
    return {"cordoned": True} if cordon else {}


def _row(survey: Survey, device: Device) -> DeviceRow:
    profile = survey.host.profile_of(device) if device.type_id else None
    claim = survey.host.claims.readable.get(device.name)
    carved = claim is not None and claim.is_no_domains
    user = survey.world.domains.using(device.name) if carved else None
    return DeviceRow(device, profile, _state(survey, device), claim, user=user)


def _state(survey: Survey, device: Device) -> State:
    if device.error is not None or device.name in survey.host.claims.unreadable:
        return State.UNREADABLE
    verdict = survey.verdicts.get(device.name)
    claim = survey.host.claims.readable.get(device.name)
    lives = verdict is not None and verdict.state is liveness.State.ALIVE
    # What is carved may lie idle for ever.
    if device.name in survey.host.busy or (lives and not (claim and claim.is_no_domains)):
        return State.IN_USE
    if verdict:
        return State.CLAIMED
    return State.FOREIGN if device.type_id else State.FREE


def _problems(survey: Survey, gpus: tuple[GpuRow, ...]) -> list[str]:
    problems = [*survey.problems, *unseen_processes(survey.world.handles.unknown)]
    for row in (row for gpu in gpus for row in gpu.devices):
        problems += _unclaimed(row)
        if row.claim and (wrong := mismatch(row.device, row.claim, survey)):
            problems.append(wrong)
    for claim in survey.host.claims.readable.values():
        if claim.phase is Phase.RELEASE_PENDING:
            problems.append(
                f"{claim.device} waits to be given back by {claim.owner}: "
                f"{claim.error or _why_pending(claim)}"
            )
        elif claim.phase is Phase.CARVED:
            problems += _carved(survey, claim)
    for name, why in survey.elsewhere.items():
        if owned := survey.host.claims.readable.get(name):
            remedy = (
                "'virt-vgpu uncarve' drops the claim"
                if owned.is_no_domains
                else "the claim goes once the domain is provably dead"
            )
            problems.append(f"{owned.owner} has a claim on {name}, {why}; {remedy}")
        else:
            problems.append(f"an unreadable claim is on {name}, {why}")
    return list(dict.fromkeys(problems))


def _why_pending(claim: Claim) -> str:
    what = "it is unused" if claim.is_no_domains else "its owner is dead"
    return f"nothing proves that {what}"


def _carved(survey: Survey, claim: Claim) -> list[str]:
    """What is wrong with a carved device, but for another type than its own."""
    problems = []
    if is_to_renew(claim, survey.world):
        why = claim.error or "no sync has run"
        problems.append(
            f"{claim.device} is carved as {named(claim.profile)}, but hasn't been programmed "
            f"since the reboot: {why}; 'virt-vgpu sync' tries it again"
        )
    if user := survey.world.domains.using(claim.device):
        asked = {request.alias for request in user.domain.requests}
        problems += [
            f"'{hostdev.alias}' of the running domain '{user.name}' ({user.uuid}) asks for a vGPU, "
            f"but has the carved {claim.device}; it gets one of its own at its next start"
            for hostdev in user.domain.hostdevs
            if hostdev.alias in asked and str(hostdev.address) == claim.device
        ]
    return problems


def _unclaimed(row: DeviceRow) -> list[str]:
    """A type that nobody claimed."""
    if row.profile is None or not row.is_unclaimed:
        return []
    what = f"{row.device.name} has {named(row.profile)}"
    if row.state is State.IN_USE:
        return [f"{what} and is in use, but nobody claimed it; it is left alone"]
    return [
        f"{what}, but nobody claimed it and nothing shows it in use; if it is a leftover, write 0 "
        'to its nvidia/current_vgpu_type, or set foreign = "reset" in [policy]'
    ]


def mismatch(device: Device, claim: Claim, survey: Survey) -> str | None:
    """That DEVICE has another type than its CLAIM's; none is fine until it has been programmed."""
    if device.type_id is None or device.type_id == claim.profile.id:
        return None
    if device.type_id == 0 and not _is_programmed(claim, survey):
        return None
    now = f"type {device.type_id}" if device.type_id else "no type"
    return (
        f"{device.name} was given {named(claim.profile)} for {claim.owner}, but has {now} now: "
        "somebody else writes to it"
    )


def _is_programmed(claim: Claim, survey: Survey) -> bool:
    """Whether CLAIM says that its type is on its device."""
    if claim.phase is Phase.CARVED:
        return not is_to_renew(claim, survey.world)
    return claim.phase in (Phase.CONFIGURED, Phase.RUNNING)


def unseen_processes(unknown: tuple[str, ...]) -> list[str]:
    """One sentence for all processes whose open files can't be read; others as they are."""
    processes = {match[1] for sentence in unknown if (match := _PROCESS.search(sentence))}
    problems = [sentence for sentence in unknown if not _PROCESS.search(sentence)]
    if processes:
        number = "1 process" if len(processes) == 1 else f"{len(processes)} processes"
        problems.append(
            f"the open files of {number} can't be read, so devices in use may look free; run as "
            "root to see them"
        )
    return problems


def named(profile: Profile) -> str:
    """A profile as a sentence names it: with its id, which is all that some have."""
    unnamed = profile.name == f"type {profile.id}"
    return profile.name if unnamed else f"{profile.name} ({profile.id})"
