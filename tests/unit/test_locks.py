# SPDX-License-Identifier: LGPL-2.1-or-later
"""The host lock and the device locks, between real processes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.unit.host import WEB1, WEB2
from tests.unit.support import child, directory_for_all, nobody
from vgpu_libvirt.claims import locks
from vgpu_libvirt.errors import LockTimeoutError, StoreError

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

pytestmark = pytest.mark.promise(2)

FIRST, SECOND, THIRD = "0000:3d:00.4", "0000:3d:00.5", "0000:41:00.4"
HOLD = """
from vgpu_libvirt.claims import locks
import time
state, *names = sys.argv[1:]
deadline = time.monotonic() + 30
with locks.devices(state, names, deadline) if names else locks.host(state, deadline):
    print("held", flush=True)
    sys.stdin.readline()
print("released", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def state(tmp_path: Path) -> str:
    return str(tmp_path / "var/lib/state")


def soon(seconds: float = 0.0) -> float:
    return time.monotonic() + seconds


def free(path: Path) -> bool:
    """Whether nobody holds the lock at PATH, as another program would see it."""
    with path.open() as opened:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def test_a_lock_is_held_inside_the_block_and_its_file_stays(state: str) -> None:
    path = Path(state) / "lock"
    with locks.host(state, soon()):
        assert not free(path)
    assert free(path)
    assert path.stat().st_size == 0
    assert path.stat().st_mode & 0o777 == 0o600
    inode = path.stat().st_ino
    with locks.host(state, soon()):
        assert path.stat().st_ino == inode


def test_it_is_given_back_when_the_block_raises(state: str) -> None:
    with pytest.raises(KeyError), locks.host(state, soon()):
        raise KeyError
    assert free(Path(state) / "lock")


@pytest.mark.skipif(os.geteuid() != 0, reason="an ordinary user can't go ahead of others")
def test_who_has_the_hosts_lock_is_scheduled_first_and_then_as_before(state: str) -> None:
    usual = os.getpriority(os.PRIO_PROCESS, 0)
    with contextlib.suppress(KeyError), locks.host(state, soon()):
        assert os.getpriority(os.PRIO_PROCESS, 0) == -20
        raise KeyError
    assert os.getpriority(os.PRIO_PROCESS, 0) == usual


def test_who_may_not_go_ahead_takes_the_hosts_lock_all_the_same() -> None:
    with directory_for_all() as directory:
        directory.chmod(0o777)
        with nobody(), locks.host(str(directory), soon()):
            assert not free(directory / "lock")
        assert os.getpriority(os.PRIO_PROCESS, 0) >= 0


def test_each_device_has_a_lock_of_its_own_beside_the_hosts(state: str) -> None:
    with (
        locks.devices(state, [FIRST], soon()),
        locks.devices(state, [SECOND], soon()),
        locks.host(state, soon()),
    ):
        assert not free(Path(state) / "locks" / FIRST)
        assert free(Path(state) / "locks" / SECOND) is False
    assert sorted(os.listdir(f"{state}/locks")) == [FIRST, SECOND]


def test_two_processes_never_hold_one_lock(state: str) -> None:
    with child(HOLD, state) as holder:
        assert holder.stdout is not None
        assert holder.stdin is not None
        with pytest.raises(LockTimeoutError) as caught, locks.host(state, soon()):
            pass
        assert str(caught.value) == (
            f"the lock {state}/lock is held by somebody else for too long; try again, and see "
            "with 'fuser' who that is"
        )
        holder.stdin.write("\n")
        holder.stdin.flush()
        assert holder.stdout.readline() == "released\n"
        with locks.host(state, soon()):
            pass


def test_waiting_ends_at_the_deadline_and_not_before(state: str) -> None:
    with child(HOLD, state, FIRST):
        begin = time.monotonic()
        with pytest.raises(LockTimeoutError), locks.devices(state, [FIRST], begin + 0.3):
            pass
        assert 0.3 <= time.monotonic() - begin < 1


def test_a_lock_that_comes_free_while_waiting_is_taken(state: str) -> None:
    with child(HOLD, state) as holder:
        os.kill(holder.pid, signal.SIGSTOP)  # not even a holder that stands still gives it back
        with pytest.raises(LockTimeoutError), locks.host(state, soon(0.1)):
            pass
        holder.kill()
        with locks.host(state, soon(30)):
            pass


def test_a_free_lock_is_taken_after_the_deadline_too(state: str) -> None:
    with locks.host(state, soon(-10)):
        assert not free(Path(state) / "lock")


def test_a_killed_holder_holds_nothing(state: str) -> None:
    with child(HOLD, state, FIRST, SECOND) as holder:
        assert not free(Path(state) / "locks" / SECOND)
        holder.kill()
        holder.wait()
        assert free(Path(state) / "locks" / FIRST)
        assert free(Path(state) / "locks" / SECOND)


def test_a_program_that_the_holder_starts_does_not_inherit_the_lock(state: str) -> None:
    with locks.devices(state, [FIRST], soon()), locks.host(state, soon()):
        program = "import sys; print(flush=True); sys.stdin.readline()"
        started = subprocess.Popen(
            [sys.executable, "-ISc", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            close_fds=False,
        )
        assert started.stdout is not None
        started.stdout.readline()
    assert free(Path(state) / "locks" / FIRST)
    assert free(Path(state) / "lock")
    started.communicate(b"\n")


# --- definitions ---


def test_a_definitions_lock_is_beside_the_others(state: str) -> None:
    path = Path(state) / "edits" / f"{WEB1}.lock"
    with (
        locks.definition(state, WEB1, soon()),
        locks.definition(state, WEB2, soon()),
        locks.devices(state, [FIRST], soon()),
        locks.host(state, soon()),
    ):
        assert not free(path)
    assert free(path)
    assert locks.definitions(state) == [WEB1, WEB2]


def test_two_never_hold_a_definitions_lock(state: str) -> None:
    with (
        locks.definition(state, WEB1, soon()),
        pytest.raises(LockTimeoutError, match=rf"edits/{WEB1}.lock is held by somebody else"),
        locks.definition(state, WEB1, soon(0.1)),
    ):
        pass


def test_the_lock_of_a_definition_that_is_gone_goes_unless_somebody_holds_it(state: str) -> None:
    with locks.definition(state, WEB1, soon()):
        locks.forget_definition(state, WEB1)
        assert locks.definitions(state) == [WEB1]
    locks.forget_definition(state, WEB1)
    assert locks.definitions(state) == []


def test_who_waited_for_a_lock_that_was_removed_takes_the_one_that_others_take(
    state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path(state) / "edits" / f"{WEB1}.lock"
    with contextlib.ExitStack() as other:
        other.enter_context(locks.definition(state, WEB1, soon()))

        def meanwhile(_seconds: float) -> None:
            path.unlink()
            other.close()

        monkeypatch.setattr(locks.time, "sleep", meanwhile)
        with locks.definition(state, WEB1, soon(30)):
            assert not free(path)


TWO_AT_ONCE = """
from vgpu_libvirt.claims import locks
import time
state, *names = sys.argv[1:]
print("ready", flush=True)
sys.stdin.readline()
for _ in range(200):
    with locks.devices(state, names, time.monotonic() + 30):
        pass
print("done", flush=True)
"""


def test_locks_asked_for_in_any_order_are_taken_in_one(state: str) -> None:
    """Two processes that ask in opposite orders never wait for each other."""
    with (
        child(TWO_AT_ONCE, state, FIRST, SECOND, THIRD) as one,
        child(TWO_AT_ONCE, state, THIRD, SECOND, FIRST, FIRST) as other,
    ):
        for process in (one, other):
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        for process in (one, other):
            assert process.stdout is not None
            assert process.stdout.readline() == "done\n"


def test_what_was_taken_is_given_back_when_the_rest_cannot_be_had(state: str) -> None:
    with child(HOLD, state, SECOND):
        with (
            pytest.raises(LockTimeoutError, match=SECOND),
            locks.devices(state, [THIRD, SECOND, FIRST], soon(0.1)),
        ):
            pass
        assert free(Path(state) / "locks" / FIRST)
        assert not (Path(state) / "locks" / THIRD).exists(), "later ones weren't asked for"


def test_a_name_given_twice_is_one_lock(state: str) -> None:
    with locks.devices(state, [FIRST, FIRST], soon()):
        pass


def test_no_devices_no_locks(state: str) -> None:
    with locks.devices(state, [], soon()):
        assert not Path(state).exists()


@pytest.mark.parametrize(
    "take",
    [lambda state: locks.host(state, soon()), lambda state: locks.devices(state, [FIRST], soon())],
    ids=["host", "device"],
)
def test_a_lock_that_cannot_be_opened(
    take: Callable[[str], AbstractContextManager[None]],
) -> None:
    with directory_for_all() as directory:
        directory.chmod(0o555)
        with nobody(), pytest.raises(StoreError) as caught, take(str(directory)):
            pass
        assert str(caught.value).startswith(f"the lock {directory}/lock")
        assert str(caught.value).endswith(" can't be opened: permission denied")


def test_a_directory_in_the_place_of_a_lock(state: str) -> None:
    (Path(state) / "lock").mkdir(parents=True)
    with pytest.raises(StoreError) as caught, locks.host(state, soon()):
        pass
    assert str(caught.value) == f"the lock {state}/lock can't be opened: is a directory"


def test_a_file_in_the_place_of_the_state(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("")
    with (
        pytest.raises(StoreError, match=r"can't be opened: not a directory$"),
        locks.devices(str(tmp_path / "state"), [FIRST], soon()),
    ):
        pass
