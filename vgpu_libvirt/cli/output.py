# SPDX-License-Identifier: LGPL-2.1-or-later
"""How verbs print: tables with colours on a terminal, plain aligned text elsewhere, or JSON."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from typing import TYPE_CHECKING

import click
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

_GAP = 2  # blanks between columns
# Who reads our output through a pipe gets whole sentences on a line.
_PIPED_WIDTH = 1_000_000


def show(lines: Iterable[Text]) -> None:
    """Print LINES; sentences are wrapped where there is a terminal, tables never."""
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = _PIPED_WIDTH
    with console.capture() as captured:
        for line in lines:
            console.print(line, crop=False)
    text = "\n".join(line.rstrip() for line in captured.get().splitlines())
    if not console.encoding.lower().startswith("utf"):
        text = text.replace("…", "...")
    click.echo(text, color=console.is_terminal or None)


def watch(lines: Callable[[], list[Text]], seconds: float) -> None:
    """Show what LINES gives, in place on a terminal, and elsewhere below each other; until Ctrl-C.

    What the terminal has no room for ends in an ellipsis.
    """
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        again(lambda: show([*lines(), Text()]), seconds)
        return
    with Live(console=console, auto_refresh=False) as live:
        again(lambda: live.update(Group(*lines()), refresh=True), seconds)


def again(show_it: Callable[[], None], seconds: float) -> None:
    """Call SHOW_IT now and every SECONDS, until Ctrl-C."""
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            show_it()
            sys.stdout.flush()
            time.sleep(seconds)


def show_json(value: object) -> None:
    """Print VALUE as JSON."""
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))


def table(
    header: Sequence[str],
    rows: Sequence[Sequence[Text]],
    widths: Sequence[int],
    right: Sequence[int] = (),
    indent: int = 0,
) -> list[Text]:
    """A table as lines; RIGHT: the columns that align right.

    An empty cell lends its room to the one before it.
    """
    lines = []
    for row in [[Text(name, style="bold") for name in header], *rows]:
        line = Text(" " * indent, no_wrap=True, overflow="ignore")
        end = 0  # where the next column begins
        for number, (cell, width) in enumerate(zip(row, widths, strict=True)):
            if cell or not number:
                line.append(" " * (indent + end - line.cell_len))
                line.append(" " * (width - cell.cell_len if number in right else 0))
                line.append_text(cell)
            end += width + _GAP
        lines.append(line)
    return lines


def widths(header: Sequence[str], rows: Iterable[Sequence[Text]]) -> list[int]:
    """How wide the columns must be, of one table or of several that stand below each other."""
    found = [len(name) for name in header]
    lending = []
    for row in rows:
        for number, cell in enumerate(row):
            if number + 1 < len(row) and not row[number + 1]:
                lending.append((number, cell.cell_len))
            else:
                found[number] = max(found[number], cell.cell_len)
    for number, width in lending:
        found[number + 1] = max(found[number + 1], width - found[number] - _GAP)
    return found


def problems(sentences: Iterable[str]) -> list[Text]:
    """The end of a report: what is wrong, if anything."""
    lines = [Text(f"  - {sentence}") for sentence in sentences]
    return [Text(), Text("Problems:", style="bold red"), *lines] if lines else []
