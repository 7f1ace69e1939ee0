# SPDX-License-Identifier: LGPL-2.1-or-later
"""GPUs and devices on which nothing new is put: `<state>/cordons/<address>.json`, one file each.

A cordon is a wish about what is yet to come; who runs there stays. Functions that write are called
with the host lock held, and a claim is made under it too: once a cordon stands, all claims that
will ever come there are there. A cordon that can't be read doesn't hold, since it must never keep
domains from starting; it is reported.
"""

from __future__ import annotations

import os
import time

from .. import fs, jsons
from ..address import PciAddress
from ..errors import AddressError, CordonError
from ..records import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

VERSION = 1
_SUFFIX = ".json"
_END_OF_TIME = 1e11  # seconds since the epoch; localtime() takes no later ones everywhere


class Cordon(NamedTuple):
    """That nothing new is to be put on a GPU or device."""

    target: PciAddress
    by: str  # for people only
    since: float  # seconds since the epoch
    reason: str | None = None

    @property
    def label(self) -> str:
        """Who, when and why, as a sentence says it in parentheses: `by root, 2026-09-21: why`."""
        day = time.strftime("%Y-%m-%d", time.localtime(self.since))
        return f"by {self.by}, {day}" + (f": {self.reason}" if self.reason else "")


class Cordons(NamedTuple):
    """All cordons that hold, and why others can't be read."""

    held: tuple[Cordon, ...]
    problems: tuple[str, ...]


def read(state: str, target: PciAddress) -> Cordon | None:
    """The cordon on TARGET itself, or None. Raises CordonError."""
    path = _path(state, target)
    try:
        return _parse(fs.read_text(path), target)
    except FileNotFoundError:
        return None
    except OSError as error:
        reason = f"can't be read: {fs.reason(error)}"
    except CordonError as error:
        reason = f"can't be understood: {error}"
    raise CordonError(
        f"the cordon {path} {reason}; {target} is not cordoned until it is cordoned anew"
    )


def read_all(state: str) -> Cordons:
    """Read all cordons."""
    directory = f"{state}/cordons"
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return Cordons((), ())
    except OSError as error:
        return Cordons((), (f"the cordons in {directory} can't be read: {fs.reason(error)}",))
    held, problems = [], []
    for name in sorted(names):
        try:
            target = PciAddress.parse(name.removesuffix(_SUFFIX))
            if name != f"{target}{_SUFFIX}":
                raise AddressError(name)
            cordon = read(state, target)
        except AddressError:
            problems.append(f"{directory}/{name} is not a cordon; move it elsewhere")
        except CordonError as error:
            problems.append(str(error))
        else:
            held += [cordon] if cordon else []
    return Cordons(tuple(held), tuple(problems))


def first(state: str, targets: Iterable[PciAddress]) -> Cordon | None:
    """The first cordon that holds on any of TARGETS, or None."""
    for target in targets:
        try:
            if cordon := read(state, target):
                return cordon
        except CordonError:
            continue  # it doesn't hold, and `virt-vgpu list` reports it
    return None


def write(state: str, cordon: Cordon) -> None:
    """Cordon a target, or write anew who does it and why. Raises CordonError."""
    data = {"version": VERSION, **cordon._asdict(), "target": str(cordon.target)}
    try:
        text = jsons.dumps(data) + "\n"
        fs.replace(_path(state, cordon.target), text, f"{state}/tmp")
    except OSError as error:
        raise _unwritable(cordon.target, state, error) from error


def remove(state: str, target: PciAddress) -> bool:
    """Remove the cordon on TARGET, readable or not; whether there was one. Raises CordonError."""
    try:
        os.unlink(_path(state, target))
        fs.sync_directory(f"{state}/cordons")
    except FileNotFoundError:
        return False
    except OSError as error:
        raise _unwritable(target, state, error) from error
    return True


def exists(state: str, target: PciAddress) -> bool:
    """Whether there is a cordon on TARGET itself, readable or not."""
    return os.path.lexists(_path(state, target))


def _path(state: str, target: PciAddress) -> str:
    return f"{state}/cordons/{target}{_SUFFIX}"


def _unwritable(target: PciAddress, state: str, error: OSError) -> CordonError:
    return CordonError(f"the cordon on {target} can't be written in {state}: {fs.reason(error)}")


def _parse(text: str, target: PciAddress) -> Cordon:
    try:
        data: Any = jsons.loads(text)
    except (ValueError, RecursionError) as error:
        raise CordonError(f"not valid JSON ({error})") from error
    if not isinstance(data, dict) or data.keys() != {"version", *Cordon._fields}:
        raise CordonError("wrong in its keys")
    if type(data["version"]) is not int or data["version"] != VERSION:
        raise CordonError(f"of version {data['version']!r:.20}, not {VERSION}")
    by, since, reason = data["by"], data["since"], data["reason"]
    if data["target"] != str(target):
        raise CordonError(f"about another target ({data['target']!r:.60})")
    if type(since) not in (int, float) or not 0 <= since < _END_OF_TIME:
        raise CordonError(f"wrong in 'since' ({since!r:.60})")
    for key, value in (("by", by), ("reason", reason)):
        if not isinstance(value, str) or not value.isprintable():
            if key == "reason" and value is None:
                continue
            raise CordonError(f"wrong in '{key}' ({value!r:.60})")
    return Cordon(target, by, float(since), reason)
