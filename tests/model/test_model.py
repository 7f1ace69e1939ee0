# SPDX-License-Identifier: LGPL-2.1-or-later
"""spin searches the whole of claims.pml, and finds an error as soon as any guard is left out."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

MODEL = Path(__file__).parent / "claims.pml"
COUNTS = "VGPU_LIBVIRT_COUNTS_DIR"
MEMORY_MIB = 3072

pytestmark = [
    pytest.mark.promise(1, 2, 3, 4),
    pytest.mark.skipif(
        not (shutil.which("spin") and shutil.which("gcc")), reason="there is no spin, or no gcc"
    ),
]


class Bounds(NamedTuple):
    """How often each may happen in one search; all of it at once would take days."""

    first: int  # starts of the first domain
    second: int
    devices: int
    crashes: int  # of libvirtd
    syncs: int

    @property
    def options(self) -> list[str]:
        return [f"-D{name.upper()}={value}" for name, value in self._asdict().items()]


ONE_AGAIN_AND_ONE = Bounds(first=2, second=1, devices=2, crashes=0, syncs=0)
TWO_AND_A_SYNC = Bounds(first=1, second=1, devices=1, crashes=0, syncs=1)
TWO_AND_A_CRASH = Bounds(first=1, second=1, devices=1, crashes=1, syncs=0)
ONE_AGAIN_A_CRASH_AND_A_SYNC = Bounds(first=2, second=0, devices=2, crashes=1, syncs=1)
ONE_AGAIN_AND_TWO_CRASHES = Bounds(first=2, second=0, devices=1, crashes=2, syncs=0)
SEARCHES = {
    "one-again-and-one": ONE_AGAIN_AND_ONE,
    "two-and-a-sync": TWO_AND_A_SYNC,
    "two-and-a-crash": TWO_AND_A_CRASH,
    "one-again-a-crash-and-a-sync": ONE_AGAIN_A_CRASH_AND_A_SYNC,
    "one-again-and-two-crashes": ONE_AGAIN_AND_TWO_CRASHES,
}
# Each guard, taken out, and the search that then finds an error.
GUARDS = {
    "NO_LOCK": ONE_AGAIN_AND_ONE,
    "NO_LOOK_AGAIN": ONE_AGAIN_AND_ONE,
    "NO_HANDLES": ONE_AGAIN_AND_ONE,
    "CLAIM_LAST": ONE_AGAIN_AND_ONE,
    "BY_ADDRESS": ONE_AGAIN_AND_ONE,
    "SYNC_IGNORES_DAEMON": TWO_AND_A_SYNC,
    "NO_ASKED_AFTER": ONE_AGAIN_A_CRASH_AND_A_SYNC,
    "ORPHAN_IS_OURS": ONE_AGAIN_A_CRASH_AND_A_SYNC,
    "DAEMON_LAST": ONE_AGAIN_A_CRASH_AND_A_SYNC,
    "NO_NOTE_CHECK": ONE_AGAIN_A_CRASH_AND_A_SYNC,
}


class Result(NamedTuple):
    """What a search says at its end."""

    errors: int
    states: int
    transitions: int
    depth: int
    complete: bool
    text: str


def search(directory: Path, bounds: Bounds, *options: str) -> Result:
    """Have spin look at every state."""
    compiler = ["gcc", "-w", "-O2", "-DSAFETY", "-DCOLLAPSE", "-o", "pan", "pan.c"]
    for command in (
        ["spin", "-a", *bounds.options, *options, str(MODEL)],
        [*compiler, f"-DMEMLIM={MEMORY_MIB}"],
    ):
        made = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)
        assert made.returncode == 0, made.stdout + made.stderr
    text = subprocess.run(
        ["./pan", "-m20000"], cwd=directory, capture_output=True, text=True, check=True
    ).stdout

    def number(pattern: str) -> int:
        match = re.search(pattern, text)
        assert match, text
        return int(float(match[1]))

    return Result(
        number(r"errors: (\d+)"),
        number(r"([\d.e+]+) states, stored"),
        number(r"([\d.e+]+) transitions"),
        number(r"depth reached (\d+)"),
        not re.search("Search not completed|max search depth too small|out of memory", text),
        text,
    )


@pytest.mark.parametrize("name", SEARCHES)
def test_the_promises_hold_in_every_state(tmp_path: Path, name: str) -> None:
    result = search(tmp_path, SEARCHES[name])
    assert result.errors == 0, result.text
    assert result.complete, result.text
    if directory := os.environ.get(COUNTS):
        counts = {"states": result.states, "transitions": result.transitions, "depth": result.depth}
        Path(directory).mkdir(parents=True, exist_ok=True)
        Path(directory, f"model-{name}.json").write_text(json.dumps({f"model {name}": counts}))


def test_every_guard_of_the_model_is_tried() -> None:
    names = re.findall(r"(?:ifdef |ifndef |defined\()([A-Z_]+)", MODEL.read_text())
    assert set(names) == set(GUARDS)


@pytest.mark.parametrize("guard", GUARDS)
def test_no_guard_can_be_left_out(tmp_path: Path, guard: str) -> None:
    result = search(tmp_path, GUARDS[guard], f"-D{guard}")
    assert result.errors == 1, result.text
    assert "assertion violated" in result.text, result.text
