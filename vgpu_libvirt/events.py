# SPDX-License-Identifier: LGPL-2.1-or-later
"""What was decided about a device or a domain, and how the host's journal takes it; pure."""

from __future__ import annotations

from enum import StrEnum

from .records import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from .choosing import Place
    from .claims.model import Claim
    from .domain.model import Domain

IDENTIFIER = "vgpu-libvirt"
_FACILITY = 3  # of syslog: system daemons
_WARNING, _NOTICE, _INFO = 4, 5, 6  # of syslog
# Bytes of a value. The kernel takes no datagram beyond 200 kB, and a request's attribute may be
# any text.
_LONGEST = 4096


class Decision(StrEnum):
    """What was decided."""

    CLAIMED = "claimed"
    CONFIGURED = "configured"  # programmed, and read back
    RESERVED = "reserved"
    LAPSED = "lapsed"  # a reservation is over
    ADOPTED = "adopted"
    RELEASED = "released"
    KEPT = "kept"
    PENDING = "release-pending"
    REFUSED = "refused"
    REPOINTED = "repointed"
    RESET = "foreign-reset"
    CARVED = "carved"


_PRIORITIES = {
    Decision.REFUSED: _WARNING,
    Decision.PENDING: _WARNING,
    Decision.ADOPTED: _NOTICE,
    Decision.LAPSED: _NOTICE,
    Decision.RESET: _NOTICE,
}


class Event(NamedTuple):
    """One decision; what isn't known of it is empty."""

    decision: Decision
    domain_uuid: str = ""
    domain_name: str = ""
    alias: str = ""
    devices: tuple[str, ...] = ()
    profile: str = ""
    claim_id: str = ""
    reason: str = ""  # of a refusal, as errors.kind names it
    evidence: str = ""  # why, as a sentence

    @property
    def priority(self) -> int:
        """How urgent it is, as syslog numbers that."""
        return _PRIORITIES.get(self.decision, _INFO)

    @property
    def message(self) -> str:
        """The decision as a line for people."""
        parts = [self.decision, ", ".join(self.devices)]
        if self.domain_name:
            owner = f"'{self.alias}' of domain" if self.alias else "domain"
            parts.append(f"for {owner} '{self.domain_name}' ({self.domain_uuid})")
        said = " ".join(filter(None, parts))
        return " ".join(f"{said}: {self.evidence}".split()) if self.evidence else said


def of_claim(decision: Decision, claim: Claim, evidence: str) -> Event:
    """What was decided about CLAIM."""
    return Event(
        decision,
        claim.domain_uuid,
        claim.domain_name,
        claim.alias,
        (claim.device,),
        claim.profile.name,
        claim.claim_id,
        evidence=evidence,
    )


def repointed(
    domain_uuid: str, domain_name: str, alias: str, came: str | None, place: Place | None
) -> Event:
    """That a definition's hostdev ALIAS, which pointed at CAME, points at PLACE; None: nowhere."""
    before = f"it pointed at {came}" if came else "it had no hostdev"
    return Event(
        Decision.REPOINTED,
        domain_uuid,
        domain_name,
        alias,
        (place.goes,) if place else (),
        place.profile.name if place else "",
        evidence=f"{before}, and {place.why if place else 'its request is gone'}",
    )


def refusal(domain: Domain | None, reason: str, sentence: str) -> Event:
    """That a start of DOMAIN was refused; None: its document could not be read."""
    if domain is None:
        return Event(Decision.REFUSED, reason=reason, evidence=sentence)
    asked = [domain.hostdev(request.alias) for request in domain.requests] or domain.hostdevs
    return Event(
        Decision.REFUSED,
        domain.uuid,
        domain.name,
        devices=tuple(str(each.address) for each in asked if each and each.address),
        reason=reason,
        evidence=sentence,
    )


def for_journal(event: Event) -> bytes:
    """EVENT in the native protocol of systemd's journal, as one datagram."""
    fields = [
        ("MESSAGE", event.message),
        ("PRIORITY", str(event.priority)),
        ("SYSLOG_IDENTIFIER", IDENTIFIER),
        ("VGPU_DECISION", event.decision),
        ("VGPU_DOMAIN_UUID", event.domain_uuid),
        ("VGPU_DOMAIN", event.domain_name),
        ("VGPU_ALIAS", event.alias),
        *(("VGPU_DEVICE", device) for device in event.devices),
        ("VGPU_PROFILE", event.profile),
        ("VGPU_CLAIM_ID", event.claim_id),
        ("VGPU_REASON", event.reason),
        ("VGPU_EVIDENCE", event.evidence),
    ]
    return b"".join(_field(name, value) for name, value in fields if value)


def for_syslog(event: Event, pid: int) -> bytes:
    """EVENT as the local syslog takes it, said by process PID."""
    head = f"<{_FACILITY << 3 | event.priority}>{IDENTIFIER}[{pid}]: "
    return head.encode() + _bytes(_line(event))


def _line(event: Event) -> str:
    """EVENT as one line of text, in which a program finds its parts, too."""
    named = (
        ("decision", event.decision),
        ("domain_uuid", event.domain_uuid),
        ("device", ",".join(event.devices)),
        ("claim_id", event.claim_id),
        ("reason", event.reason),
    )
    return f"{event.message} [{' '.join(f'{name}={value}' for name, value in named if value)}]"


def _field(name: str, value: str) -> bytes:
    """One field: `NAME=value`, or with the value's length before it where it has several lines."""
    data = _bytes(value)
    if b"\n" not in data:
        return b"%s=%s\n" % (name.encode(), data)
    return b"%s\n%s%s\n" % (name.encode(), len(data).to_bytes(8, "little"), data)


def _bytes(text: str) -> bytes:
    return text.encode(errors="backslashreplace")[:_LONGEST]
