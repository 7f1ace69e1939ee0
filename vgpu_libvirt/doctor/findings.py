# SPDX-License-Identifier: LGPL-2.1-or-later
"""The words for what `virt-vgpu doctor` finds."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from .sight import Sight


class Level(StrEnum):
    """Whether it will bite."""

    PROBLEM = "problem"  # a start, a release or a guest will suffer from it
    NOTE = "note"  # worth knowing, or something that could not be looked at


class Symptom(NamedTuple):
    """Something wrong: what with, what, and what to do about it."""

    object: str
    problem: str  # a sentence without its full stop, that names the object
    remedy: str  # likewise, in the imperative


class Check(NamedTuple):
    """Looks for one kind of trap."""

    id: str
    level: Level
    find: Callable[[Sight], Iterable[Symptom]]


class Finding(NamedTuple):
    """A symptom, with the check that found it; as `doctor --json` prints it."""

    check: str
    level: Level
    object: str
    problem: str
    remedy: str


def diagnose(checks: Iterable[Check], sight: Sight) -> tuple[Finding, ...]:
    """What CHECKS find, problems first."""
    found = [Finding(c.id, c.level, *symptom) for c in checks for symptom in c.find(sight)]
    return tuple(sorted(found, key=lambda finding: finding.level is not Level.PROBLEM))
