# SPDX-License-Identifier: LGPL-2.1-or-later
"""The verb `doctor`. It writes nothing, takes no lock, and starts no daemon."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click
from rich.text import Text

from .. import config
from ..doctor import findings, registry, sight
from ..doctor.findings import Level
from ..errors import ConfigError
from . import output
from .show import json_option, number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..doctor.findings import Finding

# By which hooks find what they run, where it isn't in its place; libvirt never sets it.
_ENTRY_VARIABLE = "VGPU_LIBVIRT_HOOK"
_SOUND = "Nothing on this host will bite"
_STYLES = {Level.PROBLEM: "bold red", Level.NOTE: "bold"}


@click.command(short_help="Say what on this host will bite, and what to do about it.")
@json_option
def doctor(as_json: bool) -> None:
    """Say what on this host will bite, and what to do about it.

    Exits with 1 if there is any problem: something by which a start, a release or a guest will
    suffer. Notes are worth knowing, or say what could not be looked at; without root that is much.

    With --json a list of objects: "check" (a word for the kind of trap), "level" ("problem" or
    "note"), "object", "problem" and "remedy" (a sentence each).
    """
    found = _diagnose()
    if as_json:
        output.show_json([finding._asdict() for finding in found])
    else:
        output.show(_lines(found))
    if any(finding.level is Level.PROBLEM for finding in found):
        raise click.exceptions.Exit(1)


def _diagnose() -> Sequence[Finding]:
    try:
        settings = config.load()
    except ConfigError as error:
        return [registry.of_broken_configuration(error)]
    places = sight.Places()
    if entry := os.environ.get(_ENTRY_VARIABLE):
        places = places._replace(entry=entry)
    return findings.diagnose(registry.CHECKS, sight.look(settings, places))


def _lines(found: Sequence[Finding]) -> list[Text]:
    problems = sum(finding.level is Level.PROBLEM for finding in found)
    notes = len(found) - problems
    counts = [number(count, what) for count, what in ((problems, "problem"), (notes, "note"))]
    if not problems:
        return [Text(f"{_SOUND}{f'; {counts[1]}' if notes else ''}."), *_listed(found)]
    return [Text(f"{', '.join(counts if notes else counts[:1])}."), *_listed(found)]


def _listed(found: Sequence[Finding]) -> list[Text]:
    lines = []
    for finding in found:
        head = Text(f"{finding.level}: ", style=_STYLES[finding.level])
        lines += [Text(), head.append(finding.check, style="not bold")]
        lines += [Text(f"  {_sentence(finding.problem)}"), Text(f"  {_sentence(finding.remedy)}")]
    return lines


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."
