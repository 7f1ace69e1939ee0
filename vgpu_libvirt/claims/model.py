# SPDX-License-Identifier: LGPL-2.1-or-later
"""A claim, and the file that holds it: version 1, strict to read."""

from __future__ import annotations

from enum import StrEnum

from .. import jsons, sets
from ..address import PciAddress
from ..devices.backend import is_mdev
from ..devices.model import Profile
from ..errors import AddressError, ClaimUnreadableError
from ..records import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from typing import Any

VERSION = 1
_END_OF_TIME = 1e15  # seconds; any number that no clock shows
_OF_A_DOMAIN = ("domain_uuid", "domain_name", "alias")


class Phase(StrEnum):
    """How far an assignment has come."""

    RESERVED = "reserved"  # for a start that is yet to come, or to be plugged in; lapses
    CLAIMED = "claimed"  # on disk; the device may or may not be programmed
    CONFIGURED = "configured"  # programmed and read back
    RUNNING = "running"  # its QEMU is known
    RELEASE_PENDING = "release-pending"  # should be given back, but it isn't provably safe yet
    CARVED = "carved"  # programmed for domains that don't ask; stays until the administrator says


class Process(NamedTuple):
    """A process of one boot: its pid and its start time in clock ticks since boot."""

    pid: int
    start: int


class Qemu(NamedTuple):
    """The QEMU of a claim's owner, and the path of its monitor socket."""

    pid: int
    start: int
    monitor: str


class Namespaces(NamedTuple):
    """Inode numbers of the namespaces in which the claim's pids and sockets mean something."""

    pid: int | None
    net: int | None


class Claim(NamedTuple):
    """That a domain, by UUID and hostdev alias, owns a device; one file each.

    Of a device that the administrator carves no domain is the owner: in the file what names one is
    null, here it is empty.
    """

    device: str
    backend: str
    gpu: str
    profile: Profile
    claim_id: str
    phase: Phase
    domain_uuid: str
    domain_name: str  # for people only: domains are renamed
    domain_id: int | None
    alias: str
    boot_id: str
    created: float  # seconds since the epoch, for people only
    since_boot: float  # seconds, CLOCK_BOOTTIME
    daemon: Process | None  # the libvirtd or virtqemud that ran the hook; who carves
    qemu: Qemu | None
    namespaces: Namespaces
    adopted: bool = False
    error: str | None = None

    @property
    def owner(self) -> str:
        """The owner as a sentence names it."""
        if self.is_no_domains:
            return "the administrator's carve"
        return f"domain '{self.domain_name}' ({self.domain_uuid})"

    @property
    def is_no_domains(self) -> bool:
        """Whether no domain owns the device: the administrator carves it, or gives it back."""
        return not self.domain_uuid

    @property
    def is_mere_reservation(self) -> bool:
        """Whether it only keeps a device for a start to come: no hook made it, nothing was written.

        A type that such a device has is somebody else's.
        """
        return self.phase is Phase.RESERVED and self.daemon is None

    def to_json(self) -> dict[str, Any]:
        """The claim as the file and `status --json` show it."""
        fields = self._asdict()
        for key in ("daemon", "qemu", "namespaces"):
            fields[key] = fields[key] and fields[key]._asdict()
        for key in _OF_A_DOMAIN if self.is_no_domains else ():
            fields[key] = None
        return {"version": VERSION, **fields, "profile": self.profile.to_json()}


def is_device_name(text: str) -> bool:
    """Whether a device may be called so: a PCI address, or the UUID of a mediated device."""
    if sets.is_uuid(text):
        return True
    try:
        PciAddress.parse(text)
    except AddressError:
        return False
    return text == text.strip().lower()


def dump(claim: Claim) -> str:
    """The text of CLAIM's file."""
    return jsons.dumps(claim.to_json()) + "\n"


def parse(text: str, device: str) -> Claim:
    """Read the claim file of DEVICE. Raises ClaimUnreadableError, with the reason only.

    Strict on purpose: a file that isn't exactly what we write protects its device.
    """
    try:
        data = jsons.loads(text)
    except (ValueError, RecursionError) as error:
        raise ClaimUnreadableError(f"not valid JSON ({error})") from error
    if not isinstance(data, dict):
        raise ClaimUnreadableError("not a JSON object")
    version = data.pop("version", None)
    if type(version) is not int or version != VERSION:
        raise ClaimUnreadableError(f"of version {version!r}, but this program knows only {VERSION}")
    expected = set(Claim._fields)
    if data.keys() != expected:
        names = ", ".join(sorted(map(str, data.keys() ^ expected)))
        raise ClaimUnreadableError(f"wrong in its keys ({names})")
    if all(data[key] is None for key in _OF_A_DOMAIN):
        domain_uuid = domain_name = alias = ""
    else:
        domain_uuid, domain_name = _uuid(data), _text(data, "domain_name")
        alias = _text(data, "alias")
    claim = Claim(
        device=_text(data, "device"),
        backend=_text(data, "backend"),
        gpu=_text(data, "gpu"),
        profile=Profile(*_record(data, "profile", id=str if is_mdev(device) else int, name=str)),
        claim_id=_text(data, "claim_id"),
        phase=_phase(data),
        domain_uuid=domain_uuid,
        domain_name=domain_name,
        domain_id=_checked(data["domain_id"], "domain_id", int, True),
        alias=alias,
        boot_id=_text(data, "boot_id"),
        created=_time(data, "created"),
        since_boot=_time(data, "since_boot"),
        daemon=None
        if data["daemon"] is None
        else Process(*_record(data, "daemon", pid=int, start=int)),
        qemu=None
        if data["qemu"] is None
        else Qemu(*_record(data, "qemu", pid=int, start=int, monitor=str)),
        namespaces=Namespaces(*_record(data, "namespaces", pid=int | None, net=int | None)),
        adopted=_checked(data["adopted"], "adopted", bool),
        error=_checked(data["error"], "error", str, True),
    )
    if claim.phase is Phase.CARVED and not claim.is_no_domains:
        raise ClaimUnreadableError(f"wrong in 'phase' ('{claim.phase}', but for {claim.owner})")
    if claim.device != device:
        raise ClaimUnreadableError(f"about another device ('{claim.device}')")
    return claim


def _checked(value: Any, key: str, kind: Any, nullable: bool = False) -> Any:
    if value is None and nullable:
        return None
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ClaimUnreadableError(f"wrong in '{key}' ({value!r:.60})")
    return value


def _text(data: dict[str, Any], key: str) -> str:
    value = _checked(data[key], key, str)
    if not value:
        raise ClaimUnreadableError(f"wrong in '{key}' (empty)")
    if _is_impossible(value):
        raise ClaimUnreadableError(f"wrong in '{key}' (a character that no name has)")
    return str(value)


def _is_impossible(text: str) -> bool:
    """Whether it has characters that JSON can write, and a path can't have."""
    try:
        return "\0" in text or not text.encode()
    except UnicodeEncodeError:
        return True


def _time(data: dict[str, Any], key: str) -> float:
    value = _checked(data[key], key, int | float)
    if not 0 <= value < _END_OF_TIME:  # NaN, Infinity and integers beyond any float among them
        raise ClaimUnreadableError(f"wrong in '{key}' ({value!r:.60})")
    return float(value)


def _record(data: dict[str, Any], key: str, **kinds: Any) -> list[Any]:
    record = _checked(data[key], key, dict)
    if record.keys() != kinds.keys():
        raise ClaimUnreadableError(f"wrong in '{key}' ({record!r:.60})")
    return [_checked(record[name], f"{key}.{name}", kind) for name, kind in kinds.items()]


def _phase(data: dict[str, Any]) -> Phase:
    try:
        return Phase(_text(data, "phase"))
    except ValueError:
        raise ClaimUnreadableError(f"wrong in 'phase' ({data['phase']!r:.60})") from None


def _uuid(data: dict[str, Any]) -> str:
    value = _text(data, "domain_uuid")
    if not sets.is_uuid(value):
        raise ClaimUnreadableError(f"wrong in 'domain_uuid' ({value!r:.60})")
    return value
