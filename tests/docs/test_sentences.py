# SPDX-License-Identifier: LGPL-2.1-or-later
"""docs/troubleshooting.md: each sentence there is the code's, and no refusal is missing."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING, NamedTuple

from tests.docs.blocks import REPOSITORY

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PACKAGE = REPOSITORY / "vgpu_libvirt"
PAGE = REPOSITORY / "docs/troubleshooting.md"
OURS_NO_MORE = "What libvirt, QEMU and the guest say"
HOLE = "\0"  # for what a sentence fills in
_CODE = r"`[^`]+`"
FEW = 10  # letters; what has fewer of its own only passes on another sentence

# Functions whose answers are a refusal's words, though they raise nothing.
ANSWERS = {
    "lifecycle/bystander.py": None,
    "lifecycle/suitability.py": {"_no_vgpu_vf"},
    "domain/match.py": {"_no_address"},
    "placement.py": {"_excluded"},
    "reasons.py": {"why_none"},
}
# What no user can see: it is caught on the way, or it is a check of arguments that only code makes.
UNSEEN = (
    "claims/inventory.py", "claims/processes.py", "devices/mdev_life.py: '{}' is no UUID",
    "devices/mdev_life.py: '{}' is no mdev's UUID", "sets.py", "records.py",
    "devices/catalogue.py: wrong in",
    "devices/catalogue.py: of version", "devices/catalogue.py: an id has",
    "devices/catalogue.py: no",
    "claims/cordons.py: wrong in", "claims/cordons.py: of version", "claims/cordons.py: about",
    "claims/cordons.py: not valid", "devices/catalogue.py: the catalogue of profiles {} can't be",
    "claims/model.py: wrong in '{}' (empty)", "claims/model.py: wrong in '{}' (a character",
    "domain/read.py: {}='{}' of",
)  # fmt: skip


class Said(NamedTuple):
    """A text in the source, with holes where it fills something in."""

    file: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.text.replace(HOLE, '…')}"


def documented() -> dict[str, str]:
    """The sentences and parts of sentences of the page, with the section of each."""
    found: dict[str, str] = {}
    for section in re.split(r"(?m)^## ", PAGE.read_text())[1:]:
        title, _, body = section.partition("\n")
        if title == OURS_NO_MORE:
            continue
        for match in re.finditer(
            rf"(?m)^(?:\*\*(?={_CODE}\*\*$)|- )({_CODE}(?:,\s+{_CODE})*)", body
        ):
            for text in re.findall(_CODE, match[1]):
                found[" ".join(text[1:-1].split())] = title
    return found


def _letters(text: str) -> int:
    return len(re.findall(r"[a-z]", text))


def template(node: ast.expr) -> str | None:
    """The text of a string in the source, with holes; None: it is no string."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr():
            return "".join(template(part) or HOLE for part in node.values)
        case ast.BinOp(op=ast.Add()):
            return (template(node.left) or HOLE) + (template(node.right) or HOLE)
    return None


def said(path: Path) -> Iterator[Said]:
    """All texts in a module."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.expr) and (text := template(node)):
            yield Said(str(path.relative_to(PACKAGE)), node.lineno, " ".join(text.split()))


def refusals(path: Path) -> Iterator[Said]:
    """What a module raises as a sentence, and what it answers as part of one."""
    file = str(path.relative_to(PACKAGE))
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        is_made = isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args
        if is_made and (text := template(node.exc.args[0])):
            yield Said(file, node.lineno, text)
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef) or file not in ANSWERS:
            continue
        only = ANSWERS[file]
        if only is None or function.name in only:
            for node in ast.walk(function):
                if isinstance(node, ast.Return) and node.value and (text := template(node.value)):
                    yield Said(file, node.lineno, text)


def hook_path() -> set[Path]:
    """The modules that hooks may import, at once or when an operation needs them."""
    found: set[Path] = set()
    left = [PACKAGE / "hook.py"]
    while left:
        path = left.pop()
        if path in found or not path.exists():
            continue
        found.add(path)
        left += _imports(path)
    return found


def _imports(path: Path) -> Iterator[Path]:
    for node in _run(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = path.parents[node.level - 1].joinpath(*(node.module or "").split("."))
            yield base.with_suffix(".py")
            for name in node.names:
                yield base / f"{name.name}.py"


def _run(node: ast.AST) -> Iterator[ast.AST]:
    """NODE and what is below it, without what only type checkers see."""
    if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
        return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from _run(child)


def _parts(sentence: str) -> list[str]:
    return [" ".join(part.split()) for part in sentence.split("…")]


def tells(sentence: str, text: str) -> bool:
    """Whether SENTENCE says so much of TEXT that a reader finds it by that."""
    return _letters("".join(_parts(sentence))) * 3 >= _letters(text) and is_said(sentence, text)


def is_said(sentence: str, text: str) -> bool:
    """Whether the constant parts of SENTENCE stand in TEXT, in order, and begin as it does."""
    parts = _parts(sentence)
    place = 0
    for part in filter(None, parts):
        at = text.find(part, place)
        if at < 0 or (place == 0 and part == parts[0] and text[:at].strip()):
            return False
        place = at + len(part)
    return any(parts)


def test_each_documented_sentence_is_in_the_source() -> None:
    texts = [each for path in PACKAGE.rglob("*.py") for each in said(path)]
    lost = [
        sentence
        for sentence in documented()
        if not any(is_said(sentence, each.text) for each in texts)
    ]
    assert not lost


def test_each_refusal_of_a_hook_is_documented() -> None:
    sentences = documented()
    missing = [
        str(each)
        for path in sorted(hook_path())
        for each in refusals(path)
        if _letters(each.text) >= FEW
        and not f"{each.file}: {each.text.replace(HOLE, '{}')}".startswith(UNSEEN)
        and not any(tells(sentence, each.text) for sentence in sentences)
    ]
    assert not missing


def test_what_is_called_unseen_is_there() -> None:
    texts = [
        f"{each.file}: {each.text.replace(HOLE, '{}')}"
        for path in hook_path()
        for each in refusals(path)
    ]
    assert [one for one in UNSEEN if not any(text.startswith(one) for text in texts)] == []


def test_the_hook_path_is_found() -> None:
    names = {str(path.relative_to(PACKAGE)) for path in hook_path()}
    assert {"lifecycle/assign.py", "placement.py", "claims/store.py", "domain/splice.py"} <= names
    assert not {"libvirt_api.py", "starting.py", "cli/main.py"} & names
