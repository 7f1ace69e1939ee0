# SPDX-License-Identifier: LGPL-2.1-or-later
"""The simulated driver, one a test process, and worlds on it."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import shutil
import tempfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import vgpu_libvirt.devices.backend
from tests.conftest import COUNTS
from tests.faults.driver import running, unmount_orphans
from tests.faults.world import BACKENDS, World

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.faults.driver import Client


def _reason_to_skip() -> str | None:
    if os.geteuid() != 0:
        return "only root can mount the simulated driver and be what libvirt's hooks are"
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "there is no /dev/fuse for the simulated driver"
    try:
        import mfusepy  # noqa: F401
    except (ImportError, OSError) as error:
        return f"FUSE can't be used: {error}"
    return None


@pytest.fixture(scope="session")
def driver() -> Iterator[Client]:
    """The simulated driver."""
    if reason := _reason_to_skip():
        pytest.skip(reason)
    unmount_orphans()
    temporary = tempfile.TemporaryDirectory(prefix="vgpu-libvirt-driver-")
    with temporary as directory, running(Path(directory)) as client:
        yield client


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """How the GPUs of a test's worlds give vGPUs: every test is run with either."""
    return str(request.param)


@pytest.fixture(autouse=True)
def quick_drivers(monkeypatch: pytest.MonkeyPatch) -> None:
    """No driver here removes mdevs itself, but where a test says so; nobody waits for it to."""
    monkeypatch.setattr(vgpu_libvirt.devices.backend, "_OWN_CLEANING", 0.0)


@pytest.fixture
def new_world(driver: Client, backend: str) -> Iterator[Callable[[], World]]:
    """Makes worlds; memory holds them, since thousands are made and each one fsyncs."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    root = Path(tempfile.mkdtemp(prefix="vgpu-libvirt-", dir=memory))
    numbers = itertools.count()
    try:
        yield lambda: World(root / str(next(numbers)), driver, backend)
    finally:
        shutil.rmtree(root)


@pytest.fixture
def world(new_world: Callable[[], World]) -> World:
    """A host whose sysfs is the simulated driver, with a libvirtd that runs."""
    return new_world()


@pytest.fixture(scope="module")
def counts(request: pytest.FixtureRequest) -> Iterator[Counter[str]]:
    """What a module counts, for <$VGPU_LIBVIRT_COUNTS_DIR>/<module>.json: a new directory each run.

    The processes that share a module's tests add up there.
    """
    counted: Counter[str] = Counter()
    yield counted
    directory = os.environ.get(COUNTS)
    if not directory or not counted:
        return
    name = request.module.__name__.rpartition(".")[2]
    Path(directory).mkdir(parents=True, exist_ok=True)
    with Path(directory, f"{name}.json").open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        text = file.read()
        counted.update(json.loads(text)[name] if text else {})
        file.truncate(0)
        json.dump({name: dict(sorted(counted.items()))}, file)
