# SPDX-License-Identifier: LGPL-2.1-or-later
"""The packages, each built once a run, however many workers there are."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.unit.host import REPOSITORY

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Build = Callable[[str, list[str]], Path]

# What a packager's shell may have, and what a build must not depend on.
ENVIRONMENT = {
    "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/nonexistent",
    "LC_ALL": "C.UTF-8",
    "TMPDIR": os.environ.get("TMPDIR", "/tmp"),
}


def run(*command: str | Path, **options: object) -> subprocess.CompletedProcess[str]:
    """Run COMMAND in a bare environment; stdout and stderr together."""
    return subprocess.run(  # type: ignore[call-overload,no-any-return]
        command,
        **{
            "env": ENVIRONMENT,
            "text": True,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.STDOUT,
            **options,
        },
    )


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """Runs a command, once, that leaves one file in the directory that is its last argument."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base

    def build(name: str, command: list[str]) -> Path:
        directory = shared / name
        with (shared / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not directory.exists():
                done = run(*command, shared / f"{name}.new", cwd=REPOSITORY)
                assert done.returncode == 0, done.stdout
                (shared / f"{name}.new").rename(directory)
        (file,) = directory.iterdir()
        return file

    return build


@pytest.fixture(scope="session")
def deb(build: Build) -> Path:
    return build("deb", ["packaging/build-deb"])


@pytest.fixture(scope="session")
def rpm(build: Build) -> Path:
    return build("rpm", ["packaging/build-rpm"])


@pytest.fixture(scope="session")
def wheel(build: Build) -> Path:
    # From a copy: setuptools leaves its own files beside its sources.
    script = """
set -e
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp -R vgpu_libvirt hooks packaging README.md LICENSE pyproject.toml "$work"
"$0" -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir "$1" "$work"
"""
    return build("wheel", ["sh", "-c", script, sys.executable])


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A directory in which packaging/install has installed this checkout."""
    install(tmp_path / "root")
    return tmp_path / "root"


def install(root: Path) -> str:
    done = run("sh", REPOSITORY / "packaging/install", root)
    assert done.returncode == 0, done.stdout
    return done.stdout
