# SPDX-License-Identifier: LGPL-2.1-or-later
"""A program whose domains ask for nothing sees no difference between libvirt and the shim.

The same calls in the same order, on libvirt's own test driver, by each way to come by a connection.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.unit import libvirt_calls
from tests.unit.host import REPOSITORY

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.promise(6)
SEEDS = 100


@functools.cache
def plain() -> dict[str, Any]:
    return program("plain")


def program(how: str, **variables: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.libvirt_calls", how, str(SEEDS)],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **variables},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    shown = json.loads(done.stdout)
    assert len(shown["logs"]) == SEEDS
    return dict(shown)


def assert_same(shown: dict[str, Any], *keys: str) -> None:
    for key in keys:
        for mine, theirs in zip(shown[key], plain()[key], strict=True):
            assert mine == theirs


def test_the_calls_say_something() -> None:
    raised, returned = set(), set()
    for log in plain()["logs"]:
        for name, *outcome in log:
            (raised if outcome[0] == "raises" else returned).add(name)
    assert {"createXML", "defineXML", "create", "createWithFlags", "createWithFiles"} <= raised
    assert {"createXML", "defineXML", "create", "createWithFlags", "getDomain"} <= returned


def test_a_connection_of_the_shims() -> None:
    shown = program("shim")
    assert_same(shown, "logs", "errors")
    assert shown["shape"] == plain()["shape"]


def test_a_program_under_exec() -> None:
    path = filter(None, (str(REPOSITORY / "vgpu_libvirt/preload"), os.environ.get("PYTHONPATH")))
    shown = program("plain", PYTHONPATH=os.pathsep.join(path))
    assert_same(shown, "logs", "errors")
    assert shown["shape"] == plain()["shape"]


@pytest.mark.parametrize("asked", [True, False])
def test_a_libvirt_that_counts_as_this_hosts(tmp_path: Path, asked: bool) -> None:
    # Where the files mention us, each domain that is started is looked at, too.
    (tmp_path / "qemu").mkdir()
    for name in libvirt_calls.NAMES:
        text = "urn:vgpu-libvirt:domain:1" if asked else "<domain/>"
        (tmp_path / f"qemu/{name}.xml").write_text(text)
    (tmp_path / "state").mkdir()
    path = tmp_path / "config.toml"
    path.write_text(
        f'[libvirt]\nuri = "{libvirt_calls.URI}"\n'
        f'[paths]\nlibvirt_etc = "{tmp_path}"\nstate = "{tmp_path}/state"\n'
    )
    shown = program("shim", VGPU_LIBVIRT_CONFIG=str(path))
    # A look at a domain that is gone is one more error for the program's handler.
    assert_same(shown, *(["logs"] if asked else ["logs", "errors"]))
    assert list((tmp_path / "state").iterdir()) == []
