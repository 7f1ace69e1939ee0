# SPDX-License-Identifier: LGPL-2.1-or-later
"""Changes of one hostdev in a definition: whole, whoever else edits it, and whoever is killed.

libvirt has no update for hostdevs, so a change is a config-only detach, then an attach. The element
is saved before, in `<state>/edits/`, so that whoever comes next finishes a change that was killed
in between, with the alias, guest address, rom and driver options that the user gave it.

Those of us who write a definition hold its lock, from reading it to the last write. Others (virsh,
virt-manager) know no lock of ours: each call to libvirt is whole, and what they change between our
two is met where it happens.
"""

from __future__ import annotations

import contextlib
import os
import time

from . import libvirt_api, unfinished
from .claims import locks
from .domain import edit
from .errors import DomainXmlError, LibvirtError, LockTimeoutError, StoreError, VgpuError
from .records import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import Any

    from .config import Config
    from .libvirt_api import Definition
    from .unfinished import Edit


@contextlib.contextmanager
def alone(config: Config, uuid: str, seconds: float | None = None) -> Iterator[None]:
    """Be the only one of us who writes the definition of the domain with UUID.

    Waits for others for SECONDS, else for `lock_timeout`. libvirt may be called meanwhile: no hook
    takes this lock (claims/locks.py). Raises LockTimeoutError, StoreError.
    """
    deadline = time.monotonic() + (seconds or config.policy.lock_timeout)
    with locks.definition(config.paths.state, uuid, deadline):
        yield


@contextlib.contextmanager
def opened(
    config: Config, connection: Any, wanted: str, dry_run: bool = False
) -> Iterator[Definition]:
    """The definition of the domain WANTED, for the user to edit, `alone`.

    A dry run reads it and takes no lock. Who may edit definitions but not write to our directory
    (a user of libvirt's group) edits without the lock, and without what `apply` saves: should one
    of us be at the same definition, libvirt refuses the later of two hostdevs with one alias, and
    that verb fails and puts back what it wrote; should the edit be killed between its two calls,
    the next sync adds the hostdev anew, without what was special about it. Raises VgpuError.
    """
    definition = libvirt_api.find(connection, wanted)
    with contextlib.ExitStack() as held:
        if not dry_run:
            try:
                held.enter_context(alone(config, definition.uuid))
            except StoreError as error:
                if not unfinished.is_denied(error):
                    raise
            else:
                if left := finish_alone(config, connection, definition.uuid):
                    raise LibvirtError(left[0])
            definition = libvirt_api.find(connection, definition.uuid)
        yield definition


@contextlib.contextmanager
def saved(state: str, definition: Definition, changes: Iterable[Edit]) -> Iterator[None]:
    """Save CHANGES that are part of a larger one, made inside of the block, `alone`.

    Killed in the middle of it, it is finished; left by an exception, what was done is undone.
    Who may not write to our directory goes on without. Raises StoreError.
    """
    paths = []
    try:
        for change in changes:
            try:
                paths.append(unfinished.save(state, change))
            except StoreError as error:
                if not unfinished.is_denied(error):
                    raise
        yield
    except BaseException:
        _forget_if_known(definition, *paths)
        raise
    unfinished.forget(*paths)


def apply(state: str, definition: Definition, change: Edit, must_save: bool = True) -> str | None:
    """Make CHANGE in the persistent definition, which was read `alone`.

    Where libvirt refuses the new element, the old one is put back. Without MUST_SAVE it is made
    also by those who may not write to our directory. Returns a sentence where the hostdev had to
    take another address in the guest. Raises LibvirtError, StoreError.
    """
    paths = []
    try:
        paths.append(unfinished.save(state, change))
    except StoreError as error:
        if must_save or not unfinished.is_denied(error):
            raise
    try:
        note = _make(definition, change)
    except _PutBackError as error:
        unfinished.forget(*paths)
        raise LibvirtError(str(error)) from error
    unfinished.forget(*paths)
    return note


def finish(config: Config, connection: Any) -> list[str]:
    """Finish the changes that were killed half-way; return a sentence for each that can't be."""
    try:
        paths = unfinished.paths(config.paths.state)
    except StoreError as error:
        return [str(error)]
    problems = []
    for uuid in dict.fromkeys(os.path.basename(path).partition(".")[0] for path in paths):
        try:
            with alone(config, uuid):
                problems += finish_alone(config, connection, uuid)
        except (LockTimeoutError, StoreError) as error:
            problems.append(f"an unfinished change in {config.paths.state}/edits stays: {error}")
    return problems


def finish_alone(config: Config, connection: Any, uuid: str) -> list[str]:
    """Finish those of the domain with UUID, `alone`; return a sentence for each that can't be."""
    told = []
    for path in unfinished.paths(config.paths.state, uuid):
        try:
            if note := _finish(path, unfinished.load(path), connection):
                told.append(note)
        except (DomainXmlError, LibvirtError, StoreError) as error:
            told.append(f"the unfinished change {path} stays: {error}")
    return told


class _PutBackError(LibvirtError):
    """What libvirt refused; the definition is as it was."""


def _make(definition: Definition, change: Edit) -> str | None:
    """Detach the old hostdev, attach the new one; return what `apply` does.

    Raises _PutBackError, or LibvirtError where the hostdev may be missing now.
    """
    if change.before is not None:
        try:
            libvirt_api.detach(definition, change.before)
        except LibvirtError as error:
            libvirt_api.look_again(definition)  # silence: who knows whether it was done
            raise _PutBackError(str(error)) from error
    if change.after is None:
        return None
    note = _attach(definition, change.before, change.after)
    if not _is_asked_for(change, libvirt_api.look_again(definition)):
        libvirt_api.detach(definition, change.after)  # its request, and it, went in between
    return note


def _attach(definition: Definition, before: str | None, after: str) -> str | None:
    try:
        libvirt_api.attach(definition, after)
    except LibvirtError as error:
        refusal = error
    else:
        return None
    try:
        if before is None:
            libvirt_api.look_again(definition)
        else:
            libvirt_api.attach(definition, before)
    except LibvirtError:
        # Not even that: somebody's new device may have got its address in the guest meanwhile.
        libvirt_api.attach(definition, edit.without_guest_address(after))
        return (
            f"{definition.label}: a hostdev has another address in the guest now, since it can't "
            f"be attached at its own any more: {refusal}"
        )
    raise _PutBackError(str(refusal)) from refusal


def _is_asked_for(change: Edit, definition: Definition) -> bool:
    return change.alias in edit.requested_aliases(edit.metadata(definition.document))


def _finish(path: str, change: Edit, connection: Any) -> str | None:
    note = None
    definition = libvirt_api.look_up(connection, change.domain_uuid)
    if definition and definition.is_persistent:
        document = definition.document
        there = edit.find_hostdev(document, change.alias)
        if there is None and change.before is not None:  # it may have had no alias
            there = edit.find_same(document, change.before)
        # Where somebody changed the hostdev or its request since, that stays.
        if _is_asked_for(change, definition) == (change.after is not None):
            try:
                if there is None and change.after is not None:
                    note = _attach(definition, change.before, change.after)
                elif there is not None and there == change.before:
                    note = _make(definition, change)
            except _PutBackError:
                if change.before is None:
                    raise
    unfinished.forget(path)
    return note


def _forget_if_known(definition: Definition, *paths: str) -> None:
    """Forget changes that failed, unless libvirt is silent: then who knows what was done."""
    with contextlib.suppress(VgpuError):
        libvirt_api.look_again(definition)
        unfinished.forget(*paths)
