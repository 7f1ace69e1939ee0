# SPDX-License-Identifier: LGPL-2.1-or-later
"""How a mediated device comes, and goes again.

Its UUID is made for one hostdev of one domain, so nobody else ever has it. But what stands under it
may not be what we made, so type and GPU are looked at before it is removed. The kernel doesn't
refuse to remove a device that is open: it takes it off the bus at once, asks QEMU to let go of it,
and the write waits, through any signal, until it is closed. So the guard, right before the write,
is all that keeps a living domain's.
"""

from __future__ import annotations

import time

from .. import fs
from ..errors import DeviceError, FullError, InUseError, RewrittenError
from ..records import TYPE_CHECKING
from .mdev import (
    UUID,
    device_directory,
    gpu_of,
    parent_directory,
    read_available,
    read_mdev,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..errors import VgpuError
    from .mdev_model import Mdev

_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 0.5  # seconds between attempts to remove
_LONGEST_PARAMETERS = 4095  # bytes with the line's end; a write to sysfs takes one page


def mdev_uuid(domain_uuid: str, alias: str) -> str:
    """The UUID of the mdev that the hostdev ALIAS of a domain has: version 5, in lower case.

    Raises ValueError where DOMAIN_UUID is no UUID.
    """
    import hashlib  # 3 ms, for domains that have an mdev; uuid.uuid5 takes 2 ms more

    namespace = bytes.fromhex(domain_uuid.replace("-", ""))
    if len(namespace) != 16:
        raise ValueError(f"'{domain_uuid}' is no UUID")
    octets = bytearray(hashlib.sha1(namespace + alias.encode(), usedforsecurity=False).digest())
    octets[6] = octets[6] & 0x0F | 0x50  # version 5
    octets[8] = octets[8] & 0x3F | 0x80  # variant of RFC 4122
    text = octets[:16].hex()
    return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))


def create(sysfs: str, parent: str, type_id: str, uuid: str, guard: Callable[[], None]) -> None:
    """Make an mdev of a type on a parent, and read it back.

    GUARD is called right before the write, and raises to stop it.
    Raises DeviceError, FullError where the parent has no room; RewrittenError where another of this
    UUID stands there.
    """
    _check_uuid(uuid)
    guard()
    # After the guard, whose look around takes its time.
    if there := read_mdev(sysfs, uuid):
        if there.error:
            raise DeviceError(f"mdev {uuid} is there already: {there.error}")
        raise _other(there, type_id, parent) or DeviceError(f"mdev {uuid} is there already")
    path = f"{parent_directory(sysfs, parent)}/mdev_supported_types/{type_id}/create"
    refusal = _write(path, uuid)
    there = read_mdev(sysfs, uuid)
    if there is None:
        why = (
            f"the driver did not make mdev {uuid} as {type_id} on {parent}: "
            f"{refusal or 'the write succeeded, but there is none'}"
        )
        if _is_full(sysfs, parent, type_id):
            raise FullError(f"{why}; no more of this type fit there now")
        raise DeviceError(why)
    if rewritten := _other(there, type_id, parent):
        raise rewritten
    if there.error:
        raise DeviceError(f"mdev {uuid} can't be read back: {there.error}")


def set_params(sysfs: str, uuid: str, text: str, guard: Callable[[], None]) -> None:
    """Give an mdev its `vgpu_params`, before it is opened, and read them back if that can be.

    GUARD is called right before the write. Raises DeviceError; the caller then removes the mdev,
    which would run without them.
    """
    _check_uuid(uuid)
    path = f"{device_directory(sysfs, uuid)}/nvidia/vgpu_params"
    line = f"{text}\n"  # the driver takes the last character for this one, whatever it is
    if not text.isprintable() or not text.strip() or len(line.encode()) > _LONGEST_PARAMETERS:
        raise DeviceError(
            f"parameters '{text[:40]}' can't be given to mdev {uuid}: they must be one line of "
            f"text, of less than {_LONGEST_PARAMETERS} bytes"
        )
    guard()
    if refusal := _write(path, line):
        raise DeviceError(f"the driver did not take '{text}' as {path}: {refusal}")
    try:
        now = fs.read_text(path)
    except OSError:
        return  # drivers need not show them
    if now.split() != text.split():
        raise DeviceError(
            f"the driver did not take '{text}' as {path}: the write succeeded, but it reads "
            f"'{now.strip()[:80]}'"
        )


def remove(
    sysfs: str,
    uuid: str,
    expected_type: str,
    expected_gpu: str,
    guard: Callable[[], None],
    deadline: float,
    may_be_in_use: bool = False,
    not_before: float = 0.0,
) -> None:
    """Remove an mdev of a type on a GPU, and look that it is gone; nothing where there is none.

    A refusal is tried again, with growing pauses, while `time.monotonic()` is below DEADLINE. GUARD
    is called right before each write. With MAY_BE_IN_USE, its InUseError counts as a refusal: a
    dying QEMU still closes its files. Until NOT_BEFORE (`time.monotonic()`) nothing is written:
    some drivers remove an mdev themselves once QEMU closed it, and break where we were faster.

    A removal that another process has begun is waited for. Raises RewrittenError where the mdev has
    another type or GPU than expected, DeviceError, or what GUARD raises.
    """
    _check_uuid(uuid)

    def look() -> Mdev | None:
        there = read_mdev(sysfs, uuid)
        if there and there.parent:
            gpu = gpu_of(sysfs, there.parent)
            if gpu != expected_gpu or there.type_id not in (None, expected_type):
                raise RewrittenError(
                    f"mdev {uuid} is {_named(there)} of GPU {gpu}, not {expected_type} of GPU "
                    f"{expected_gpu}; somebody else made it"
                )
        return there

    pause = _FIRST_PAUSE
    while look():
        if time.monotonic() >= not_before:
            failure = _try_to_remove(sysfs, uuid, look, guard, may_be_in_use)
            if failure is None:
                return
            if time.monotonic() + pause > deadline:
                raise failure
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


def _try_to_remove(
    sysfs: str,
    uuid: str,
    look: Callable[[], Mdev | None],
    guard: Callable[[], None],
    may_be_in_use: bool,
) -> VgpuError | None:
    """Try it once; return why it is still there, or None where it is gone."""
    there = look()
    if there and not there.error:
        try:
            guard()
        except InUseError as error:
            if not may_be_in_use:
                raise
            return error
        there = look()  # again, since the guard's look around takes its time
    if there is None:
        return None
    if there.error:
        return DeviceError(f"mdev {uuid} is not removed: {there.error}")
    refusal = _write(f"{device_directory(sysfs, uuid)}/remove", "1")
    if look() is None:
        return None
    return DeviceError(
        f"the driver did not remove mdev {uuid}: {refusal or 'the write changed nothing'}"
    )


def _other(there: Mdev, type_id: str, parent: str) -> RewrittenError | None:
    """What to raise where an mdev is surely not of this type on this parent."""
    if there.parent in (None, parent) and there.type_id in (None, type_id):
        return None
    return RewrittenError(
        f"mdev {there.uuid} is {_named(there)}, not {type_id} on {parent}; somebody else made it"
    )


def _named(there: Mdev) -> str:
    return f"{there.type_id or 'of a type that can not be read'} on {there.parent}"


def _check_uuid(uuid: str) -> None:
    if not UUID.fullmatch(uuid):
        raise DeviceError(f"'{uuid}' is no mdev's UUID, which is written in lower case")


def _is_full(sysfs: str, parent: str, type_id: str) -> bool:
    """Whether the driver says that no more of a type fit on a parent."""
    try:
        return read_available(sysfs, parent, type_id) == 0
    except DeviceError:
        return False


def _write(path: str, text: str) -> str | None:
    """Write TEXT; return how the driver refused it, or None."""
    try:
        fs.write_attribute(path, text)
    except OSError as error:
        return fs.reason(error)
    return None
