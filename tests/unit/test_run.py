# SPDX-License-Identifier: LGPL-2.1-or-later
"""`tests/run` says by its exit status what its stages said, whatever runs beside or after them."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.unit.host import REPOSITORY

if TYPE_CHECKING:
    from pathlib import Path

STAGES = ("lint", "format", "types", "shell", "tests", "lab", "promises")
NOTHING_COLLECTED = 5  # pytest's

# What each stage runs; $FAILING names the one that fails, $STATUS says how.
FAKE = """#!/bin/bash
name=${0##*/}
[ "$name" != ruff ] || name=ruff-$1
[ "$name" != "$FAILING" ] || exit "$STATUS"
"""
SETUP = """#!/bin/bash
[ "${1-}" != --venv ] || echo "$PWD/venv"
[ "${1-}" != --domains ] || echo "$PWD/domains"
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout in which every stage runs a double."""
    root = tmp_path / "checkout"
    fakes = ["venv/bin/ruff", "venv/bin/mypy", "venv/bin/pytest"]
    fakes += ["bin/shellcheck", "tests/lab/run", "tests/promises"]
    for name in [*fakes, "tests/setup"]:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(SETUP if name == "tests/setup" else FAKE)
        path.chmod(0o755)
    for name in ("tests/run", "tests/lab/lib/cache.sh"):
        (root / name).parent.mkdir(exist_ok=True)
        shutil.copy(REPOSITORY / name, root / name)
    for name in ("tests/lab/test_one.py", "tests/lab/test_two.py"):
        (root / name).touch()
    return root


def run(
    checkout: Path, *arguments: str, failing: str = "", status: int = 1
) -> tuple[int, dict[str, str]]:
    """The exit status, and each stage's verdict in the summary."""
    done = subprocess.run(
        [checkout / "tests/run", *arguments],
        env={
            "PATH": f"{checkout}/bin:{os.environ['PATH']}",
            "VGPU_LIBVIRT_CACHE": f"{checkout}/cache",
            "FAILING": failing,
            "STATUS": str(status),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    summary = done.stdout.partition("== summary\n")[2]
    return done.returncode, {line.split()[0]: line.split()[1] for line in summary.splitlines()}


def test_exits_0_when_every_stage_passed(checkout: Path) -> None:
    assert run(checkout) == (0, dict.fromkeys(STAGES, "passed"))


def test_exits_0_without_the_lab_too(checkout: Path) -> None:
    assert run(checkout, "--quick") == (0, dict.fromkeys(STAGES[:5], "passed"))


@pytest.mark.parametrize(
    ("program", "stage"),
    [
        ("ruff-check", "lint"),
        ("ruff-format", "format"),
        ("mypy", "types"),
        ("shellcheck", "shell"),
        ("pytest", "tests"),
        ("run", "lab"),
        ("promises", "promises"),
    ],
)
def test_exits_1_when_a_stage_failed_and_runs_the_others(
    checkout: Path, program: str, stage: str
) -> None:
    verdicts = dict.fromkeys(STAGES, "passed") | {stage: "FAILED"}
    assert run(checkout, failing=program) == (1, verdicts)


def test_a_whole_run_without_tests_fails(checkout: Path) -> None:
    status, verdicts = run(checkout, failing="pytest", status=NOTHING_COLLECTED)
    assert (status, verdicts["tests"]) == (1, "FAILED:")


def test_a_selection_may_leave_a_stage_without_tests(checkout: Path) -> None:
    status, verdicts = run(checkout, "-k", "x", failing="pytest", status=NOTHING_COLLECTED)
    assert (status, verdicts["tests"]) == (0, "none")


def test_a_guest_that_died_is_booted_once_more_and_no_more(checkout: Path) -> None:
    status, verdicts = run(checkout, failing="run", status=125)
    assert (status, verdicts["lab"]) == (1, "FAILED")
