# SPDX-License-Identifier: LGPL-2.1-or-later
"""A disk that is full, read-only or failing, at every call that an operation makes on it."""

from __future__ import annotations

import contextlib
import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.faults import cases, kill
from tests.faults.cases import BYSTANDERS, CASES, Case
from tests.faults.kill import Action
from tests.faults.test_killed import everything_ends, libvirt_goes_on
from tests.faults.world import VENDOR_VFIO, check_promises
from vgpu_libvirt import hook

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from tests.faults.kill import Call, Ended, Operation
    from tests.faults.world import World

pytestmark = pytest.mark.promise(3, 6, 7)

# The others make the same calls, or the same ones more often.
ALIKE = ("prepare-two", "release-two", "prepare-refused-profile", "prepare-over-")
SOME = [case for case in CASES if not case.name.startswith(ALIKE)]
some_cases = cases.each(SOME)


def of_store(call: Call) -> bool:
    """Whether a failing disk can fail this call; closing a lock has nothing to write."""
    return call.path.startswith("state/") and not (
        call.name == "close" and call.path.startswith("state/lock")
    )


def writes_store(call: Call) -> bool:
    return call.writes_store


def taken(
    calls: Sequence[Call], which: Callable[[Call], bool], backend: str
) -> Iterator[tuple[int, Call]]:
    """Which of CALLS fail, with their numbers.

    The store's code doesn't know of backends; one call in three shows that who calls it doesn't.
    """
    found = [(number, call) for number, call in enumerate(calls) if which(call)]
    yield from found if backend == VENDOR_VFIO else found[::3]


def check_answer(operation: Operation, ended: Ended) -> None:
    """A sentence, no traceback; and only what may refuse says no."""
    assert ended.status in (0, 1) if operation.name in hook.MAY_REFUSE else ended.status == 0
    lines = ended.stderr.splitlines()
    assert all(line.startswith("vgpu-libvirt: ") for line in lines), ended.stderr
    assert "internal error" not in ended.stderr
    if ended.status:
        assert len(lines) == 1, ended.stderr


def disturbed(world: World, case: Case, action: Action) -> None:
    """One run with a disk that fails; later it works again, and nothing was lost or leaked."""
    operation = case.arrange(world)
    try:
        ended = kill.run(world, operation, action)
        check_answer(operation, ended)
        check_promises(world)
        libvirt_goes_on(world, operation, case)
        check_promises(world)
        everything_ends(world, case)
    except BaseException as error:
        error.add_note(f"{case.name}: {action}; {ended.stderr}")
        raise
    world.close()


@some_cases
def test_the_disk_fails_at_every_call(
    new_world: Callable[[], World], counts: Counter[str], case: Case
) -> None:
    """Once: to write there is no room, and nothing else is heard of it."""
    calls = kill.run(world := new_world(), case.arrange(world)).calls
    for number, call in taken(calls, of_store, world.backend):
        # A close that fails has closed the file all the same.
        when = "after" if call.name == "close" else "before"
        code = "ENOSPC" if call.writes_store else "EIO"
        disturbed(new_world(), case, Action(number, when, code))
        counts["failures"] += 1


@some_cases
def test_the_disk_is_full_from_any_call_on(
    new_world: Callable[[], World], counts: Counter[str], case: Case
) -> None:
    calls = kill.run(world := new_world(), case.arrange(world)).calls
    for number, _ in taken(calls, writes_store, world.backend):
        disturbed(new_world(), case, Action(number, "before", "ENOSPC", writes_store))
        counts["failures"] += 1


@some_cases
def test_a_change_is_made_and_reported_as_failed(
    new_world: Callable[[], World], counts: Counter[str], case: Case
) -> None:
    calls = kill.run(world := new_world(), case.arrange(world)).calls
    for number, call in taken(calls, writes_store, world.backend):
        if call.name != "open":
            disturbed(new_world(), case, Action(number, "after", "EIO"))
            counts["failures"] += 1


@some_cases
def test_a_store_on_a_read_only_disk(world: World, case: Case) -> None:
    operation = case.arrange(world)
    before = world.log
    with read_only(world.state):
        ended = kill.run(world, operation)
    check_answer(operation, ended)
    if operation.name == "prepare":
        assert ended.status == 1
        assert "read-only file system" in ended.stderr
        assert world.log == before
    check_promises(world)
    libvirt_goes_on(world, operation, case)
    everything_ends(world, case)


@contextlib.contextmanager
def read_only(directory: Path) -> Iterator[None]:
    """A directory, there or not, on a disk that can't be written."""
    directory.mkdir(exist_ok=True)
    for options in (("--bind", directory), ("-o", "remount,bind,ro")):
        subprocess.run(["mount", *options, directory], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", directory], check=True)


def test_a_store_on_a_full_disk(world: World) -> None:
    """Not by lies: a filesystem with no room left, then with room again."""
    world.state.mkdir()
    case = next(case for case in CASES if case.name == "prepare")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", world.state], check=True)
    try:
        operation = case.arrange(world)
        ballast = world.state / "ballast"
        fill(ballast)
        ended = kill.run(world, operation)
        check_answer(operation, ended)
        assert ended.status == 1
        assert "no space left on device" in ended.stderr
        assert not world.types
        check_promises(world)
        ballast.unlink()
        assert world.start(operation.guest).status == 0
        everything_ends(world, case)
    finally:
        subprocess.run(["umount", world.state], check=True)


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


@cases.each(BYSTANDERS)
@pytest.mark.parametrize("code", ["EIO", "ENOSPC", "EROFS", "EACCES"])
def test_a_domain_that_did_not_ask_never_notices(
    new_world: Callable[[], World], counts: Counter[str], case: Case, code: str
) -> None:
    calls = kill.run(world := new_world(), case.arrange(world)).calls
    for number, call in enumerate(calls):
        if of_store(call):
            world = new_world()
            ended = kill.run(world, case.arrange(world), Action(number, "before", code))
            assert ended.status == 0, ended.stderr
            assert world.log == []
            counts["failures"] += 1
