# SPDX-License-Identifier: LGPL-2.1-or-later
"""The claim files: `<state>/claims/<device>.json`, one a device, whole or absent at any instant.

Every function that writes is called with the host lock held (see locks.py). A new claim is written
aside, fsynced and link(2)ed into place: that is exclusive and whole at once, where O_EXCL creation
would leave an empty, protecting file behind when killed.
"""

from __future__ import annotations

import contextlib
import os

from .. import fs
from ..errors import ClaimedError, ClaimUnreadableError, StoreError
from ..records import TYPE_CHECKING, NamedTuple
from . import model

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .model import Claim

_SUFFIX = ".json"


class Claims(NamedTuple):
    """The whole store as it was read: claims, and why others can't be, each by device name."""

    readable: dict[str, Claim]
    unreadable: dict[str, str]
    problems: tuple[str, ...]

    def of_domain(self, uuid: str) -> tuple[Claim, ...]:
        """The claims of one domain, by device."""
        return tuple(
            claim for _, claim in sorted(self.readable.items()) if claim.domain_uuid == uuid
        )


def read_all(state: str) -> Claims:
    """Read every claim. An unreadable one protects its device, which its file's name tells.

    Raises StoreError where not even the names can be read.
    """
    directory = f"{state}/claims"
    readable, unreadable, problems = {}, {}, []
    for name in _names(directory):
        device = name.removesuffix(_SUFFIX)
        if device == name or not model.is_device_name(device):
            problems.append(f"{directory}/{name} is not a claim; move it elsewhere")
            continue
        try:
            claim = read(state, device)
        except ClaimUnreadableError as error:
            unreadable[device] = str(error)
            problems.append(str(error))
            continue
        if claim:
            readable[device] = claim
    return Claims(readable, unreadable, tuple(problems))


def of_domain(state: str, uuid: str) -> tuple[Claim, ...]:
    """The readable claims of one domain, by device. Raises StoreError as `read_all` does.

    A hook wants the one or two claims of its domain, and a large host has a thousand: only those
    whose text has the UUID in it are understood.
    """
    found = []
    directory = f"{state}/claims"
    for name in _names(directory):
        device = name.removesuffix(_SUFFIX)
        try:
            text = fs.read_text(f"{directory}/{name}")
            if uuid not in text or device == name or not model.is_device_name(device):
                continue
            claim = model.parse(text, device)
        except (OSError, ClaimUnreadableError):
            continue  # it protects its device, and whoever reads all claims reports it
        if claim and claim.domain_uuid == uuid:
            found.append(claim)
    return tuple(found)


def of_devices(state: str, devices: Iterable[str], uuid: str) -> tuple[Claim, ...]:
    """The readable claims of one domain on DEVICES, for whoever holds a lock that others want."""
    found = []
    for device in sorted(devices):
        with contextlib.suppress(ClaimUnreadableError):  # as `of_domain`
            claim = read(state, device)
            found += [claim] if claim and claim.domain_uuid == uuid else []
    return tuple(found)


def _names(directory: str) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StoreError(f"the claims in {directory} can't be read: {fs.reason(error)}") from error


def read(state: str, device: str) -> Claim | None:
    """The claim on DEVICE, or None. Raises ClaimUnreadableError."""
    path = _path(state, device)
    try:
        return model.parse(fs.read_text(path), device)
    except FileNotFoundError:
        return None
    except OSError as error:
        reason = f"unreadable: {fs.reason(error)}"
        raise ClaimUnreadableError(_protects(path, reason, device)) from error
    except ClaimUnreadableError as error:
        raise ClaimUnreadableError(_protects(path, str(error), device)) from error


def create(state: str, claim: Claim) -> None:
    """Put a claim on a device that has none. Raises ClaimedError, StoreError."""
    try:
        aside = _write_aside(state, claim)
        try:
            os.link(aside, _path(state, claim.device))
        except FileExistsError as error:
            raise ClaimedError(f"{claim.device} has been claimed by somebody else") from error
        fs.sync_directory(f"{state}/claims")
        os.unlink(aside)
    except OSError as error:
        raise _unwritable(state, claim.device, error) from error


def replace(state: str, claim: Claim) -> None:
    """Write a changed claim over its predecessor. Raises StoreError."""
    try:
        os.rename(_write_aside(state, claim), _path(state, claim.device))
        fs.sync_directory(f"{state}/claims")
    except OSError as error:
        raise _unwritable(state, claim.device, error) from error


def drop(state: str, device: str) -> None:
    """Remove a claim. Raises StoreError."""
    try:
        os.unlink(_path(state, device))
        fs.sync_directory(f"{state}/claims")
    except OSError as error:
        raise _unwritable(state, device, error) from error


def _path(state: str, device: str) -> str:
    return f"{state}/claims/{device}{_SUFFIX}"


def _protects(path: str, reason: str, device: str) -> str:
    return f"the claim file {path} is {reason}; {device} stays as it is until that is mended"


def _unwritable(state: str, device: str, error: OSError) -> StoreError:
    return StoreError(f"the claim on {device} can't be written in {state}: {fs.reason(error)}")


def _write_aside(state: str, claim: Claim) -> str:
    aside = f"{state}/tmp"
    for directory in (aside, f"{state}/claims"):
        fs.make_directory(directory)
    # Who writes holds the host lock, so whatever lies here was left by somebody who was killed;
    # it may be a second name of a claim's file, and must never be opened for writing.
    for name in os.listdir(aside):
        with contextlib.suppress(IsADirectoryError):  # somebody else's, and not in our way
            os.unlink(f"{aside}/{name}")
    path = f"{aside}/{claim.device}{_SUFFIX}"
    fs.write_new(path, model.dump(claim))
    return path
