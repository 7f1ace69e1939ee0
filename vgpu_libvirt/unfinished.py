# SPDX-License-Identifier: LGPL-2.1-or-later
"""The files in `<state>/edits/`: changes of definitions that are being made, and their locks.

A change is saved before it is begun, fsynced, and forgotten when it is done, so that one that was
killed half-way can be finished.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import time

from . import fs
from .claims import locks
from .errors import LockTimeoutError, StoreError
from .records import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection

_SUFFIX = ".json"
_REMEDY = "; remove the file, and the next sync adds the hostdev if it is missing"
_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)


class Edit(NamedTuple):
    """One hostdev of a domain, as XML: as it was and as it shall be; None: not there."""

    domain_uuid: str
    alias: str
    before: str | None
    after: str | None


def paths(state: str, uuid: str = "") -> list[str]:
    """The files of changes that are not finished; with UUID those of that domain alone.

    Raises StoreError.
    """
    directory = f"{state}/edits"
    try:
        names = _names(directory)
    except OSError as error:
        raise StoreError(
            f"the unfinished changes in {directory} can't be read: {fs.reason(error)}"
        ) from error
    return [
        f"{directory}/{name}" for name in names if name.startswith(uuid) and name.endswith(_SUFFIX)
    ]


def save(state: str, change: Edit) -> str:
    """Write CHANGE to a file and return its path. Raises StoreError."""
    path = f"{state}/edits/{change.domain_uuid}.{change.alias}{_SUFFIX}"
    try:
        fs.replace(path, json.dumps(change._asdict(), indent=1) + "\n", f"{state}/edits/.new")
    except OSError as error:
        raise StoreError(f"{path} can't be written: {fs.reason(error)}") from error
    return path


def load(path: str) -> Edit:
    """Read the change that was saved at PATH. Raises StoreError."""
    try:
        data = json.loads(fs.read_text(path))
        change = Edit(**data)
    except OSError as error:
        raise StoreError(f"it can't be read: {fs.reason(error)}") from error
    except (ValueError, TypeError, RecursionError) as error:
        raise StoreError(f"it can't be understood: {error}{_REMEDY}") from error
    texts = (change.before, change.after)
    if not isinstance(change.domain_uuid, str) or not isinstance(change.alias, str):
        raise StoreError(f"it can't be understood: it names no hostdev of a domain{_REMEDY}")
    if not all(text is None or isinstance(text, str) for text in texts):
        raise StoreError(f"it can't be understood: it has no XML in it{_REMEDY}")
    return change


def forget(*paths: str) -> None:
    """Remove the files of changes that are done. Raises StoreError."""
    for path in paths:
        try:
            os.unlink(path)
            fs.sync_directory(os.path.dirname(path))
        except FileNotFoundError:
            continue  # done before the larger change that it is part of
        except OSError as error:
            raise StoreError(f"{path} can't be removed: {fs.reason(error)}") from error


def prune(state: str, known: Collection[str]) -> list[str]:
    """Remove the locks of definitions that are gone, and what was never saved whole.

    KNOWN are the UUIDs of the definitions that are there. Returns a sentence for what can't be
    removed.
    """
    problems = []
    try:
        for name in _names(f"{state}/edits/.new"):  # left by somebody who was killed
            with (
                contextlib.suppress(LockTimeoutError, FileNotFoundError),
                locks.definition(state, name.partition(".")[0], time.monotonic()),
            ):
                os.unlink(f"{state}/edits/.new/{name}")
        for uuid in locks.definitions(state):
            if uuid not in known:
                locks.forget_definition(state, uuid)
    except OSError as error:
        problems.append(f"{error.filename} can't be removed: {fs.reason(error)}")
    except StoreError as error:
        problems.append(str(error))
    return problems


def is_denied(error: StoreError) -> bool:
    """Whether it is because who runs this may not write to our directory."""
    return isinstance(error.__cause__, OSError) and error.__cause__.errno in _DENIED


def _names(directory: str) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except FileNotFoundError:
        return []
