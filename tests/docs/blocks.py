# SPDX-License-Identifier: LGPL-2.1-or-later
"""The code blocks of README.md and docs/*.md: what each is, and the commands in it.

A fenced block says what it is: ```console are commands with what they print, for the lab, or for
any host where the word `host` follows; ```sh is a script; others are in the language that they
name. README.md, which is read as plain text too, indents its blocks: what they begin with says
what they are.

In a console, a line that begins with `# ` or `$ ` is a command, one with `> ` goes on with it, and
the others are what it prints, perhaps among more; `...` stands for anything.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).parents[2]
README = REPOSITORY / "README.md"
PAGES = (README, *sorted((REPOSITORY / "docs").glob("*.md")))

_FENCE = re.compile(r"^(?P<indent> *)```(?P<info>[^`]*)$")
_ANYTHING = "..."


class Command(NamedTuple):
    """A command, and the lines that it must print, in this order."""

    text: str
    output: tuple[str, ...]
    place: str  # page and line

    @property
    def fails(self) -> bool:
        """Whether it is shown to fail."""
        return any(re.match(r"(virt-vgpu: )?error: ", line) for line in self.output)


class Block(NamedTuple):
    """One block of code."""

    page: str  # its file's name
    line: int
    language: str  # empty: nothing says what it is
    where: str  # the word after it
    text: str

    @property
    def place(self) -> str:
        """Where it is, for people."""
        return f"{self.page}:{self.line}"

    def commands(self) -> list[Command]:
        """The commands of a console."""
        found: list[tuple[str, list[str], int]] = []
        for number, line in enumerate(self.text.splitlines(), self.line + 1):
            if line[:2] in ("# ", "$ "):
                found.append((line[2:], [], number))
            elif line[:2] == "> " and found and not found[-1][1]:
                text, _, first = found[-1]
                found[-1] = (f"{text}\n{line[2:]}", [], first)
            elif found:
                found[-1][1].append(line)
            elif line.strip():
                raise ValueError(f"{self.place}: '{line}' comes before any command")
        return [
            Command(text, tuple(filter(str.strip, output)), f"{self.page}:{number}")
            for text, output, number in found
        ]


def blocks(page: Path) -> list[Block]:
    """The code blocks of a page, in their order."""
    lines = page.read_text().splitlines()
    found = _fenced(page.name, lines)
    return found + _indented(page.name, lines, found)


def is_printed(expected: tuple[str, ...], output: str) -> str | None:
    """The first line of EXPECTED that OUTPUT lacks, at or after the one before it; else None."""
    rest = output
    for line in expected:
        if line.strip() == _ANYTHING:
            continue
        parts = (r"[ \t]+".join(map(re.escape, part.split())) for part in line.split(_ANYTHING))
        anything = r"[ \t]*.*?[ \t]*"
        match = re.search(rf"(?m)^[ \t]*{anything.join(parts)}[ \t]*$", rest)
        if match is None:
            return line
        rest = rest[match.end() :]
    return None


def _fenced(page: str, lines: list[str]) -> list[Block]:
    found = []
    begin, info = 0, None
    for number, line in enumerate(lines, 1):
        match = _FENCE.match(line)
        if match is None:
            continue
        if info is None:
            begin, info = number, match["info"].strip()
            continue
        language, _, where = info.partition(" ")
        inside = (text.removeprefix(match["indent"]) for text in lines[begin : number - 1])
        found.append(Block(page, begin, language, where.strip(), "\n".join(inside) + "\n"))
        info = None
    if info is not None:
        raise ValueError(f"{page}:{begin}: the block has no end")
    return found


def _indented(page: str, lines: list[str], fenced: list[Block]) -> list[Block]:
    """The blocks that are indented by four or more, after an empty line."""
    inside = {block.line + n for block in fenced for n in range(block.text.count("\n") + 2)}
    found: list[Block] = []
    number = 0
    while number < len(lines):
        line = lines[number]
        is_first = line.startswith("    ") and (number == 0 or not lines[number - 1].strip())
        if not is_first or number + 1 in inside or _goes_on_with_a_list(lines, number):
            number += 1
            continue
        end = number
        while end < len(lines) and (lines[end].startswith("    ") or not lines[end].strip()):
            end += 1
        text = "\n".join(text[4:] for text in lines[number:end]).strip("\n") + "\n"
        language, where = _guess(text) if page == README.name else ("", "")
        found.append(Block(page, number, language, where, text))
        number = end
    return found


def _goes_on_with_a_list(lines: list[str], number: int) -> bool:
    before = next((line for line in reversed(lines[:number]) if line.strip()), "")
    return bool(re.match(r" *([-*]|\d+\.) ", before))


def _guess(text: str) -> tuple[str, str]:
    """What an indented block of README.md is."""
    first = text.splitlines()[0]
    if re.match(r"[#$] ", first):
        return "console", "lab"
    if first.startswith("<"):
        return "xml", ""
    if re.fullmatch(r"\[\w+\]", first):
        return "toml", ""
    if re.match(r"virt-vgpu \w[\w-]* {2,}|virt-vgpu list ", first):
        return "synopsis", ""
    return "console-without-prompts", "host"
