# SPDX-License-Identifier: LGPL-2.1-or-later
"""The few ways in which we touch files: bounded reads, one-write attributes, durable replacement.

Every path comes from `config.Paths`, so that a test, or a container, can root them elsewhere.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat

READ_LIMIT = 4 * 1024 * 1024  # bytes; the largest honest file is a status XML of some 100 kB


def read_text(path: str, limit: int = READ_LIMIT, errors: str = "strict") -> str:
    """Return the text of PATH, read whole.

    ERRORS is as for `bytes.decode`: names of processes and sockets are any bytes at all.
    Raises OSError, also for a file longer than LIMIT bytes (EFBIG) or not in UTF-8 (EILSEQ).
    """
    # O_NONBLOCK: a FIFO in a file's place must not hang a hook, and with it libvirt.
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        # Something is there that can't be read; callers take "not found" for "there is none".
        if os.path.islink(path):
            raise OSError(errno.ENOLINK, "a link to nothing", path) from None
        raise
    try:
        if stat.S_ISFIFO(os.fstat(fd).st_mode):  # reads as empty, or as not yet written
            raise OSError(errno.EINVAL, "not a regular file", path)
        chunks = []
        size = 0
        while chunk := os.read(fd, 65536):
            chunks.append(chunk)
            size += len(chunk)
            if size > limit:
                raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), path)
    finally:
        os.close(fd)
    try:
        return b"".join(chunks).decode(errors=errors)
    except UnicodeDecodeError:
        raise OSError(errno.EILSEQ, "not a text in UTF-8", path) from None


def write_attribute(path: str, text: str) -> None:
    """Write TEXT to a sysfs attribute by one write(2), as drivers want it. Raises OSError."""
    fd = os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def make_directory(path: str) -> None:
    """Make directory PATH and what is missing above it, durably. Raises OSError."""
    if os.path.isdir(path):
        return
    make_directory(os.path.dirname(path))
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o755)
    sync_directory(os.path.dirname(path))


def write_new(path: str, text: str) -> None:
    """Write TEXT to PATH, which must not exist, and fsync it. Raises OSError."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        data = text.encode()
        while data:
            data = data[os.write(fd, data) :]
        os.fsync(fd)
    finally:
        os.close(fd)


def replace(path: str, text: str, aside: str) -> None:
    """Put TEXT at PATH, whole or not at all and durably, by way of directory ASIDE.

    Both lie on one filesystem, and the caller holds a lock on PATH. Raises OSError.
    """
    directory = os.path.dirname(path)
    for needed in (aside, directory):
        make_directory(needed)
    new = f"{aside}/{os.path.basename(path)}"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(new)  # left by somebody who was killed
    write_new(new, text)
    os.rename(new, path)
    sync_directory(directory)


def sync_directory(path: str) -> None:
    """Make the names in directory PATH durable. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def reason(error: OSError) -> str:
    """Why an operation on a file failed, without the errno and the path: "permission denied"."""
    text = error.strerror or str(error)
    return text[:1].lower() + text[1:]
