# SPDX-License-Identifier: LGPL-2.1-or-later
"""Changes of one hostdev in a definition that survive being killed half-way.

libvirt has no update for hostdevs, so a change is a config-only detach, then an attach. The element
is saved before, in `<state>/edits/`, so that whoever comes next finishes a change that was killed
in between, with the alias, guest address, rom and driver options that the user gave it.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any, NamedTuple

from . import fs, libvirt_api
from .domain import edit
from .errors import LibvirtError, StoreError

if TYPE_CHECKING:
    from .libvirt_api import Definition

_SUFFIX = ".json"


class Edit(NamedTuple):
    """One hostdev of a domain, as XML: as it was and as it shall be; None: not there."""

    domain_uuid: str
    alias: str
    before: str | None
    after: str | None


def apply(state: str, definition: Definition, change: Edit) -> None:
    """Make CHANGE in the persistent definition. Raises LibvirtError, StoreError.

    Where libvirt refuses the new element, the old one is put back.
    """
    path = _save(state, change)
    if change.before is not None:
        libvirt_api.detach(definition, change.before)
    if change.after is not None:
        try:
            libvirt_api.attach(definition, change.after)
        except LibvirtError:
            if change.before is not None:
                libvirt_api.attach(definition, change.before)
            _forget(path)
            raise
    _forget(path)


def finish(state: str, connection: Any, domain_uuid: str = "") -> list[str]:
    """Finish the changes that were killed half-way; return a sentence for each that can't be.

    With DOMAIN_UUID, of that domain alone.
    """
    directory = f"{state}/edits"
    try:
        names = sorted(
            name
            for name in os.listdir(directory)
            if name.startswith(domain_uuid) and name.endswith(_SUFFIX)
        )
    except FileNotFoundError:
        return []
    except OSError as error:
        return [f"the unfinished changes in {directory} can't be read: {fs.reason(error)}"]
    problems = []
    for name in names:
        path = f"{directory}/{name}"
        try:
            _finish(path, _load(path), connection)
        except (LibvirtError, StoreError) as error:
            problems.append(f"the unfinished change {path} stays: {error}")
    return problems


def _finish(path: str, change: Edit, connection: Any) -> None:
    definition = libvirt_api.look_up(connection, change.domain_uuid)
    if definition and definition.is_persistent:
        there = edit.find_hostdev(definition.document, change.alias)
        if there is None and change.before is not None:  # it may have had no alias
            there = edit.find_same(definition.document, change.before)
        # There it is the old one, not yet detached, or the new one; what is right is seen anew.
        if there is None and change.after is not None:
            try:
                libvirt_api.attach(definition, change.after)
            except LibvirtError:
                if change.before is None:
                    raise
                libvirt_api.attach(definition, change.before)
    _forget(path)


def _save(state: str, change: Edit) -> str:
    path = f"{state}/edits/{change.domain_uuid}.{change.alias}{_SUFFIX}"
    try:
        fs.replace(path, json.dumps(change._asdict(), indent=1) + "\n", f"{state}/edits/.new")
    except OSError as error:
        raise StoreError(f"{path} can't be written: {fs.reason(error)}") from error
    return path


def _load(path: str) -> Edit:
    try:
        data = json.loads(fs.read_text(path))
        change = Edit(**data)
    except OSError as error:
        raise StoreError(f"it can't be read: {fs.reason(error)}") from error
    except (ValueError, TypeError, RecursionError) as error:
        raise StoreError(f"it can't be understood: {error}") from error
    texts = (change.before, change.after)
    if not isinstance(change.domain_uuid, str) or not isinstance(change.alias, str):
        raise StoreError("it can't be understood: it names no hostdev of a domain")
    if not all(text is None or isinstance(text, str) for text in texts):
        raise StoreError("it can't be understood: it has no XML in it")
    return change


def _forget(path: str) -> None:
    try:
        os.unlink(path)
        fs.sync_directory(os.path.dirname(path))
    except OSError as error:
        raise StoreError(f"{path} can't be removed: {fs.reason(error)}") from error
