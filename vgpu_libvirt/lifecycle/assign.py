# SPDX-License-Identifier: LGPL-2.1-or-later
"""Claiming and programming the devices of one domain, all or none: for a start or a plug-in."""

from __future__ import annotations

from .. import trying
from ..claims import inventory, locks, store, witnesses
from ..claims.liveness import State
from ..claims.model import Phase
from ..devices import backend, profiles
from ..devices.model import Profile
from ..errors import (
    DeviceError,
    ForeignError,
    FullError,
    OwnedError,
    RefusedError,
    RequestError,
    VgpuError,
)
from ..records import TYPE_CHECKING, NamedTuple
from ..revert import Revert
from . import suitability
from .release import drop, give_back, keep_visibly

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..claims.inventory import LiveDomains
    from ..claims.model import Claim, Qemu
    from ..devices.model import Device
    from ..domain.match import Wanted
    from ..domain.model import Domain
    from .context import Context

_MOST_RACES = 100  # for parents of mediated devices, lost to other starts


class Start(NamedTuple):
    """One domain's start or arrival, or that it gets a device more; devices' locks are held."""

    context: Context
    domain: Domain
    deadline: float  # time.monotonic() after which nothing busy is tried again
    kept: list[str]  # what an undo could not give back
    seen: list[Profile]  # what the devices listed
    reserves: bool = False  # whether what follows may never come
    qemu: Qemu | None = None  # of a domain that runs already

    def new_claim(self, wanted: Wanted, device: Device, profile: Profile) -> Claim:
        """A fresh claim for this start; DEVICE is where a mediated one shall be made."""
        claim = self.context.new_claim(
            self.domain, wanted.request.alias, wanted.device, device.gpu, profile
        )
        return claim._replace(phase=Phase.RESERVED, qemu=self.qemu) if self.reserves else claim


def release_leftover(start: Start, claim: Claim) -> None:
    """Give back what the domain has from an earlier run. Raises RefusedError."""
    try:
        give_back(start.context, claim, start.deadline)
    except VgpuError as error:
        raise RefusedError(
            f"domain '{start.domain.name}' still has {claim.device} from an earlier run: {error}"
        ) from error


def assign(start: Start, wanted: Sequence[Wanted]) -> list[Claim]:
    """Claim and program each device of WANTED: all of them or none.

    Raises RefusedError, which says too what could not be given back.
    """
    try:
        # Once for all of them: whoever writes looks again, right before it does.
        live = suitability.users(start.context, wanted)
        with Revert() as undo:
            return [
                _assign(start, each, tuple(wanted[number + 1 :]), live, undo)
                for number, each in enumerate(wanted)
            ]
    except VgpuError as error:
        raise RefusedError("; ".join([str(error), *start.kept])) from error


def _assign(
    start: Start, wanted: Wanted, later: tuple[Wanted, ...], live: LiveDomains, undo: Revert
) -> Claim:
    """Claim and program one device; UNDO is told how to take it back. LATER: what comes after."""
    paths = start.context.config.paths
    reserved = _make_way(start, wanted)
    device = backend.read_device(paths.sysfs, wanted.device)
    is_clear = device.type_id == 0  # so a write follows, and who has it open is looked at then
    suitability.check_unused(start.context, start.domain, wanted, live, is_clear)
    if device.error and (device.type_id is None or device.creatable is None):
        raise DeviceError(f"{device.name} can't be used: {device.error}")
    if device.type_id and reserved and reserved.is_mere_reservation:
        drop(start.context, reserved, f"somebody else set type {device.type_id} meanwhile")
        reserved = None
    if reserved and device.type_id == reserved.profile.id:
        kept = device, reserved.profile
        return _give(start, wanted, lambda: kept, True, undo)
    if device.type_id:
        _reset_foreign(start, wanted, device)
        device = backend.read_device(paths.sysfs, wanted.device)
    if wanted.is_mdev:
        return _make(start, wanted, later, bool(reserved), undo)
    there = device, _profile(start, wanted, device)
    start.seen.extend(device.creatable or ())
    return _give(start, wanted, lambda: there, bool(reserved), undo)


def _make(
    start: Start, wanted: Wanted, later: tuple[Wanted, ...], is_claimed: bool, undo: Revert
) -> Claim:
    """Claim a mediated device and make it where there is room; where that is refused, elsewhere.

    That there is room for it on a GPU is its claim's to keep, and on which parent the driver's to
    say: one that somebody else was faster at didn't refuse.
    """
    from .. import survey  # what a start on VFs doesn't pay
    from . import parents

    tried: list[str] = []  # parents, in their order
    refused: dict[str, None] = {}

    def choose() -> tuple[Device, Profile]:
        found = parents.choose(start.context, start.domain, (wanted, *later), refused, host)
        tried.append(str(found.device.address))
        return found

    failure: VgpuError | None = None
    for number in range(_MOST_RACES):
        # Not under the host lock: that takes its time. What is claimed meanwhile is read there.
        host = survey.look(start.context.config).host
        try:
            return _give(start, wanted, choose, is_claimed or number > 0, undo)
        except RequestError as error:
            failure = failure or error
            break
        except DeviceError as error:
            if len(tried) == number:
                raise  # nothing was chosen
            failure = error
            if backend.read_type(start.context.config.paths.sysfs, wanted.device):
                break  # it was made, and is taken back as it is
            if not isinstance(error, FullError):
                refused[tried[-1]] = None
            if len(refused) == trying.MOST_TRIES:
                break
    assert failure is not None
    raise trying.with_tried(failure, refused)


def _give(
    start: Start,
    wanted: Wanted,
    choose: Callable[[], tuple[Device, Profile]],
    is_claimed: bool,
    undo: Revert,
) -> Claim:
    """Claim and program what CHOOSE says: a device that is free or has that profile.

    It is asked under the host lock, so that what was claimed before bears on what it says.
    IS_CLAIMED: by the domain already.
    """
    paths = start.context.config.paths
    with locks.host(paths.state, start.context.lock_deadline()):
        device, profile = choose()
        claim = start.new_claim(wanted, device, profile)
        undo.add(lambda: _take_back(start, claim))
        suitability.check_cordons(start.context, start.domain, wanted, device)
        # Model: claim_first
        (store.replace if is_claimed else store.create)(paths.state, claim)
    came = "instead of what it had reserved" if is_claimed else "nobody had it"
    start.context.tell("reserved" if start.reserves else "claimed", claim, came)
    guard = start.context.write_guard(wanted.device)
    params = wanted.request.params
    if device.type_id != profile.id:
        # Model: guard, write, read_back
        backend.program(paths.sysfs, wanted.device, device.address, profile, params, guard)
    elif params is not None:
        # Whoever made it may have been killed before it had them.
        backend.set_params(paths.sysfs, wanted.device, params, guard)
    if claim.phase is Phase.CLAIMED:
        claim = claim._replace(phase=Phase.CONFIGURED)
        with locks.host(paths.state, start.context.lock_deadline()):
            store.replace(paths.state, claim)
    start.context.tell("configured", claim, f"it reads back type {profile.id}")
    return claim


def _make_way(start: Start, wanted: Wanted) -> Claim | None:
    """See to the claim that stands on the device: ours is returned, a dead owner's given back.

    Raises RefusedError, with the owner's name, where the owner isn't provably dead.
    """
    context = start.context
    claim = store.read(context.config.paths.state, wanted.device)
    if claim is None or claim.domain_uuid == start.domain.uuid:
        return claim
    verdict = context.judge(claim, witnesses.look_around(context.config.paths, about=claim))
    if verdict.state is State.DEAD:
        try:
            give_back(context, claim, start.deadline)
        except VgpuError as error:
            raise RefusedError(
                f"{wanted.device} still has the vGPU of {claim.owner}, which is dead: {error}"
            ) from error
        return None
    raise OwnedError(
        f"{wanted.device} belongs to {claim.owner}: {verdict.evidence[0]}; run 'virt-vgpu sync', "
        f"which points the hostdev '{wanted.request.alias}' of domain '{start.domain.name}' at "
        "another VF if there is one, then start it again (a snapshot names its own: 'virsh "
        "snapshot-edit' points that at another)"
    )


def _reset_foreign(start: Start, wanted: Wanted, device: Device) -> None:
    """Clear a type that somebody else set, if the policy says so and nobody can be using it."""
    context = start.context
    paths = context.config.paths
    if context.config.policy.foreign != "reset":
        how = "write 1 to its 'remove'" if device.is_mdev else "write 0 to its current_vgpu_type"
        raise ForeignError(
            f"{device.name} has type {device.type_id}, which vgpu-libvirt didn't set; if nobody "
            f'uses it, {how}, or set foreign = "reset" in [policy]'
        )
    domains = inventory.live_domains(paths)
    if not domains.complete:
        raise ForeignError(
            f"{device.name} has type {device.type_id}, which vgpu-libvirt didn't set, and whether "
            f"a domain uses it can't be told: {domains.problems[0]}"
        )
    # Claimed under its old type while it is cleared: whoever finds us killed can finish it.
    assert device.type_id is not None
    old = next(iter(profiles.find(str(device.type_id), context.known().profiles)), None)
    old = old or Profile(device.type_id, f"type {device.type_id}")
    claim = start.new_claim(wanted, device, old)
    with locks.host(paths.state, start.context.lock_deadline()):
        store.create(paths.state, claim)
    try:
        guard = context.write_guard(device.name)
        backend.clear(paths.sysfs, device.name, claim.gpu, old, guard, start.deadline)
        context.tell("foreign-reset", claim, f"nobody claimed or used its type {old.id}")
    finally:
        drop(context, claim, "it was claimed only to be cleared")


def _profile(start: Start, wanted: Wanted, device: Device) -> Profile:
    def neighbours() -> str:
        claims = store.read_all(start.context.config.paths.state).readable.values()
        running = [claim for claim in claims if claim.gpu == str(device.gpu)]
        owners = ", ".join(
            f"{claim.domain_name or 'carved'}: {claim.profile.name}" for claim in running
        )
        return f"runs {owners}" if owners else ""

    return profiles.resolve(wanted.request.profile, device, start.context.known, neighbours)


def _take_back(start: Start, claim: Claim) -> None:
    """Undo one assignment of this start; what won't clear stays, visibly, for `release`.

    Model: take_back.
    """
    context = start.context
    sysfs = context.config.paths.sysfs
    try:
        # No QEMU can have come of a start that is still in its first hook: ours.
        if backend.read_type(sysfs, claim.device) == 0:
            drop(context, claim, "its start failed before it was programmed")
        else:
            give_back(context, claim, start.deadline, start_is_over=True)
    except VgpuError as error:
        start.kept.append(f"{claim.device} stays claimed until it can be cleared: {error}")
        start.kept.extend(keep_visibly(context, claim, str(error)))
