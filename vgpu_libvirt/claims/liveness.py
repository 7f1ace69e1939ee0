# SPDX-License-Identifier: LGPL-2.1-or-later
"""The one verdict on whether a claim's owner lives, with the evidence that led to it.

Any witness for life is enough to keep a device; death needs all of them. A pure function: hooks,
sync, the command line and rollback all come here.
"""

from __future__ import annotations

from enum import StrEnum

from ..devices.backend import is_mdev
from ..records import TYPE_CHECKING, NamedTuple
from .model import Phase
from .processes import Presence
from .witnesses import monitor_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .inventory import LiveDomain
    from .model import Claim
    from .witnesses import Witnesses, World


_CARVED = "it is carved, for domains that don't ask for a vGPU, until 'virt-vgpu uncarve'"


class State(StrEnum):
    """What we know of a claim's owner."""

    ALIVE = "alive"
    DEAD = "dead"
    UNKNOWN = "unknown"


class Verdict(NamedTuple):
    """The state of (claim, device), and the sentences that say why."""

    state: State
    evidence: tuple[str, ...]
    other: LiveDomain | None = None  # somebody else who lives and has the device by now

    @property
    def why(self) -> str:
        """The evidence as one text."""
        return "; ".join(self.evidence)

    def said_of(self, claim: Claim) -> str:
        """What it says of CLAIM, on which it was given, as a sentence."""
        if not claim.is_no_domains:
            return f"{claim.owner} is {self}"
        doubt = "whether it is in use can't be told: " if self.state is State.UNKNOWN else ""
        return doubt + self.why

    def __str__(self) -> str:
        state = "not provably dead" if self.state is State.UNKNOWN else self.state
        return f"{state}: {self.why}"


class Answer(NamedTuple):
    """What a running libvirt answered; hooks never ask."""

    active: frozenset[str]  # UUIDs of the domains that are active
    asked_after: frozenset[str]  # ids of the claims that stood before it was asked
    silence: str | None = None  # why there is no answer
    # Device -> the active domain that has it, as a sentence names it; None: it wasn't asked.
    devices: Mapping[str, str] | None = None

    def denies(self, claim: Claim) -> bool:
        """Whether libvirt says that the owner of CLAIM isn't active, or doesn't know it.

        That ends a start: between `prepare` and QEMU it says active, or nothing. It says nothing
        about a claim that was made after the question, or for a start that is yet to come.
        """
        if self.silence is not None or claim.claim_id not in self.asked_after:
            return False
        if claim.is_no_domains:  # who passed `prepare` while it was carved is among `devices`
            return self.devices is not None
        return claim.phase is not Phase.RESERVED and claim.domain_uuid not in self.active

    def confirms(self, claim: Claim) -> list[str]:
        """What of the answer shows that the device of CLAIM is in use, or about to be."""
        if claim.is_no_domains:
            user = (self.devices or {}).get(claim.device)
            return [f"libvirt says that {user}, which is active, has it"] if user else []
        return ["libvirt says that it is active"] if claim.domain_uuid in self.active else []


def judge(
    claim: Claim,
    world: World,
    witnesses: Witnesses,
    reserve_timeout: float,
    start_is_over: bool = False,
    libvirt: Answer | None = None,
) -> Verdict:
    """Say whether the owner of CLAIM lives and still has the device.

    START_IS_OVER: the caller knows that the start that made this claim can't become a QEMU, as a
    hook of the same domain and the same live daemon does: libvirt runs a domain's operations one
    at a time; or that libvirt has answered a request to plug the device in. LIBVIRT is what it
    answered, where it could be asked.
    """
    if claim.phase is Phase.CARVED:
        signs = _signs_of_life(claim, world, witnesses, witnesses.holders)
        return Verdict(State.ALIVE, (_CARVED, *signs))
    # What no domain owns any domain may have.
    other = None if claim.is_no_domains else world.domains.using(claim.device)
    if other and (other.uuid == claim.domain_uuid or not witnesses.holders <= {other.process.pid}):
        other = None
    holders = frozenset[int]() if other else witnesses.holders
    alive = _signs_of_life(claim, world, witnesses, holders)
    if libvirt:
        alive += libvirt.confirms(claim)
        start_is_over |= libvirt.denies(claim)
    doubts = _doubts(claim, world, witnesses, reserve_timeout, start_is_over)
    if libvirt and libvirt.silence:
        doubts.append(libvirt.silence)
    over = start_is_over or _start_has_lapsed(claim, world, witnesses, reserve_timeout)
    if not doubts and not holders and (how := _without_it(claim, world, over)):
        return Verdict(State.DEAD, (f"{claim.owner} runs, but {how}",), other)
    if alive:
        return Verdict(State.ALIVE, tuple(alive))
    if doubts:
        return Verdict(State.UNKNOWN, tuple(doubts))
    what = f"{claim.device} in use" if claim.is_no_domains else f"{claim.owner} alive"
    return Verdict(State.DEAD, (f"nothing shows {what}",), other)


def _same_boot(claim: Claim, world: World) -> bool:
    return world.boot_id in (None, claim.boot_id)


def _signs_of_life(
    claim: Claim, world: World, witnesses: Witnesses, holders: frozenset[int]
) -> list[str]:
    signs = []
    if claim.is_no_domains:
        if user := world.domains.using(claim.device):
            signs.append(f"the running domain '{user.name}' ({user.uuid}) has it")
    elif domain := world.domains.by_uuid(claim.domain_uuid):
        signs.append(f"libvirt has it running as process {domain.process.pid}")
    if holders:
        pids = ", ".join(map(str, sorted(holders)))
        signs.append(f"{claim.device} is held open by process {pids}")
    if witnesses.pid_file_owner is not None:
        signs.append(f"its pid file is locked by process {witnesses.pid_file_owner}")
    if not _same_boot(claim, world):
        return signs  # its pid and its domain id were others' numbers
    if claim.qemu and witnesses.qemu is Presence.RUNNING:
        signs.append(f"its QEMU, process {claim.qemu.pid}, runs")
    path = monitor_of(claim, world)
    if path and not witnesses.is_anothers_monitor:
        signs.append(f"its monitor {path} listens")
    return signs


def _doubts(
    claim: Claim,
    world: World,
    witnesses: Witnesses,
    reserve_timeout: float,
    start_is_over: bool,
) -> list[str]:
    # Nobody else ever has a mediated device of this UUID, so its other witnesses are enough.
    unlisted = () if is_mdev(claim.device) else world.domains.problems[:1]
    doubts = [*unlisted, *witnesses.unknown]
    if not _same_boot(claim, world):
        return doubts  # namespaces have other numbers in another boot, and no QEMU outlived it
    for kind, theirs, ours in zip(
        claim.namespaces._fields, claim.namespaces, world.namespaces, strict=True
    ):
        if theirs is not None and ours is not None and theirs != ours:
            doubts.append(f"it was claimed in another {kind} namespace")
    if world.boot_id is None:
        doubts.append("this boot's id (boot_id) can't be read")
    if world.listeners is None:
        doubts.append("the list of Unix sockets (net/unix) can't be read")
    if claim.qemu:
        if witnesses.qemu is Presence.UNKNOWN:
            doubts.append(f"its QEMU, process {claim.qemu.pid}, can't be looked at")
    elif not (start_is_over or _start_has_lapsed(claim, world, witnesses, reserve_timeout)):
        doing = "may start a domain with it" if claim.is_no_domains else "started it"
        doubts.append(
            f"the daemon that {doing}, process {claim.daemon.pid}, still runs"
            if claim.daemon
            else f"the daemon that {doing} isn't known"
        )
    return doubts


def _start_has_lapsed(
    claim: Claim, world: World, witnesses: Witnesses, reserve_timeout: float
) -> bool:
    """Whether the start that made this claim can't become a QEMU any more.

    Between `prepare` and QEMU its daemon is the only witness. Nor can a device that was reserved
    for a domain that runs still be plugged in then: who asked for that, or libvirt, is gone or has
    long failed. Should that come even later, it finds no type on the device, or its next owner's
    name in libvirt's list of devices in use, and fails.
    """
    if not _same_boot(claim, world):
        return True
    if claim.phase is Phase.RESERVED and world.since_boot - claim.since_boot > reserve_timeout:
        return True
    return witnesses.daemon is Presence.GONE


def _without_it(claim: Claim, world: World, is_over: bool) -> str | None:
    """How it came that the owner runs without the device; None: it has it, or doesn't run.

    It was unplugged, or ejected by the guest; or it was to be plugged in, and that IS_OVER.
    """
    domain = world.domains.by_uuid(claim.domain_uuid)
    if domain is None or claim.device in domain.devices:
        return None
    if claim.phase in (Phase.RUNNING, Phase.RELEASE_PENDING):
        return f"has let {claim.device} go"
    return f"never got {claim.device}" if claim.phase is Phase.RESERVED and is_over else None
