# SPDX-License-Identifier: LGPL-2.1-or-later
"""The worker that runs syncs where there is no systemd: alone, and without losing a wish."""

from __future__ import annotations

import fcntl
import os
import subprocess
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.unit.host import LIBVIRTD, REPOSITORY, Host, entry_point, web1, web2
from vgpu_libvirt import trigger, worker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from vgpu_libvirt.config import Paths

# --- processes: what a hook starts ---

# In virt-vgpu's place: takes the trigger, says who it is, and is slow.
SYNC = """#!/usr/bin/python3 -I
import os, sys, time
sys.path.insert(0, {repository!r})
from vgpu_libvirt import config, trigger
paths = config.load().paths
trigger.take(paths)
with open({log!r}, "a") as log:
    own = "/proc/self/fd/"
    files = {{fd: os.readlink(own + fd) for fd in os.listdir(own) if os.path.exists(own + fd)}}
    others = [name for fd, name in files.items() if int(fd) > 2 and name != {log!r}]
    print(sys.argv[1:], os.getsid(0) != {session}, os.getcwd(), files["0"], files["1"], others,
          file=log)
time.sleep({seconds})
sys.exit({status})
"""


class Installation:
    """An entry point with a virt-vgpu beside it."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.log = host.root / "log"
        self.entry = entry_point(host.root, "/usr/bin/python3")

    def install(self, seconds: float = 0, status: int = 0, take: bool = True) -> None:
        text = SYNC.format(
            repository=str(REPOSITORY),
            log=str(self.log),
            session=os.getsid(0),
            seconds=seconds,
            status=status,
        )
        if not take:
            text = text.replace("trigger.take(paths)", "")
        path = self.host.root / "virt-vgpu"
        path.write_text(text)
        path.chmod(0o755)

    def hook(self, *arguments: str, xml: str = "") -> float:
        """Run a hook as libvirt does, to the end of its output; how long that took."""
        extra = os.dup(2)  # a file that libvirt left open by mistake
        os.set_inheritable(extra, True)
        began = time.monotonic()
        done = subprocess.run(
            [self.entry, *arguments],
            input=xml,
            text=True,
            capture_output=True,
            close_fds=False,
            env={
                **self.host.environment,
                "VGPU_LIBVIRT_PARENT": str(LIBVIRTD),
                "PYTHONDONTWRITEBYTECODE": "1",
            },
        )
        os.close(extra)
        assert (done.returncode, done.stderr) in [(0, ""), (1, done.stderr)]
        return time.monotonic() - began

    def syncs(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []

    def until(self, condition: Callable[[], bool], seconds: float = 20) -> bool:
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end:
                return False
            time.sleep(0.02)
        return True

    def is_idle(self) -> bool:
        """Whether no worker runs."""
        try:
            fd = os.open(f"{self.host.paths.runtime}/worker.lock", os.O_RDWR)
        except FileNotFoundError:
            return True
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        finally:
            os.close(fd)
        return True


@pytest.fixture
def installation(host: Host) -> Iterator[Installation]:
    there = Installation(host)
    yield there
    assert there.until(there.is_idle), "a worker is left behind"


def test_a_refused_start_has_a_sync_run_for_which_nobody_waits(installation: Installation) -> None:
    vf = installation.host.gpu()[0]
    installation.host.hook("prepare", web2(vf))
    trigger.take(installation.host.paths)
    installation.install(seconds=6)
    took = installation.hook("web1", "prepare", "begin", "-", xml=web1(vf))
    assert took < 4, "libvirt waits until nobody has the hook's output any more"
    assert installation.until(lambda: len(installation.syncs()) == 1)
    log = f"{installation.host.paths.runtime}/worker.log"
    assert installation.syncs() == [
        f"['sync', '--wait'] True / /dev/null {log} []",
    ]


def test_a_daemon_that_starts_has_one_run(installation: Installation) -> None:
    installation.install()
    installation.hook("--daemon")
    assert installation.until(lambda: len(installation.syncs()) == 1)


def test_without_an_installed_command_nothing_is_started(installation: Installation) -> None:
    vf = installation.host.gpu()[0]
    installation.hook("web1", "prepare", "begin", "-", xml=web1(vf))
    assert trigger.is_set(installation.host.paths)
    time.sleep(0.3)
    assert not (Path(installation.host.paths.runtime) / "worker.lock").exists()


def test_where_systemd_runs_it_is_left_to_that(installation: Installation) -> None:
    vf = installation.host.gpu()[0]
    Path(installation.host.paths.systemd).mkdir()
    installation.install()
    installation.hook("web1", "prepare", "begin", "-", xml=web1(vf))
    assert trigger.is_set(installation.host.paths)
    time.sleep(0.3)
    assert installation.syncs() == []


def test_a_burst_makes_few_runs_and_the_last_wish_is_seen(installation: Installation) -> None:
    vf = installation.host.gpu()[0]
    installation.install(seconds=1)
    for number in range(6):
        operation = ("prepare", "release")[number % 2]
        installation.hook("web1", operation, "begin", "-", xml=web1(vf))
    assert installation.until(lambda: not trigger.is_set(installation.host.paths))
    assert installation.until(installation.is_idle)
    assert 1 <= len(installation.syncs()) <= 4


@pytest.mark.parametrize("take", [True, False])
def test_a_sync_that_fails_is_not_repeated_without_end(
    installation: Installation, take: bool
) -> None:
    vf = installation.host.gpu()[0]
    installation.install(status=1, take=take)
    installation.hook("web1", "prepare", "begin", "-", xml=web1(vf))
    assert installation.until(lambda: bool(installation.syncs()))
    assert installation.until(installation.is_idle)
    time.sleep(0.5)
    assert len(installation.syncs()) == 1


# --- all orders in which workers and hooks can meet ---


class Course:
    """One course of events: which of those that can go on does so, at each step.

    Each actor is a thread that stands still before every step until it is chosen, so only one runs.
    """

    def __init__(self, choices: list[int]) -> None:
        self.choices = choices
        self.open: list[int] = []  # how many could have gone on, at each step
        self.waiting: dict[str, threading.Event] = {}
        self.moved = threading.Semaphore(0)
        self.name = threading.local()

    def step(self) -> None:
        """Stand still until chosen."""
        name = getattr(self.name, "is", None)
        if name is None:
            return
        go = threading.Event()
        self.waiting[name] = go
        self.moved.release()
        go.wait()

    def run(self, actors: dict[str, Callable[[], None]]) -> None:
        left = len(actors)

        def body(name: str, act: Callable[[], None]) -> None:
            self.name.__dict__["is"] = name
            self.step()
            act()
            nonlocal left
            left -= 1
            self.moved.release()

        for name, act in actors.items():
            threading.Thread(target=body, args=(name, act), daemon=True).start()
        for _ in actors:
            self.moved.acquire()
        while left:
            names = sorted(self.waiting)
            choice = self.choices[len(self.open)] if len(self.open) < len(self.choices) else 0
            self.open.append(len(names))
            self.waiting.pop(names[choice]).set()
            self.moved.acquire()

    def next(self) -> list[int] | None:
        """The choices of the next course that differs from this one; None: that was the last."""
        made = [*self.choices, *[0] * (len(self.open) - len(self.choices))]
        while made:
            if made[-1] + 1 < self.open[len(made) - 1]:
                return [*made[:-1], made[-1] + 1]
            made.pop()
        return None


class Meeting:
    """Workers and hooks on one host, of which the one goes on that the course chooses."""

    def __init__(self, paths: Paths) -> None:
        self.paths = paths
        self.course = Course([])
        self.locked: set[int] = set()
        self.begin([])

    def begin(self, choices: list[int]) -> None:
        self.course = Course(choices)
        self.happened: list[str] = []
        self.seen: set[str] = set()
        self.syncing = 0
        self.runs = 0

    def sync(self) -> bool:
        self.syncing += 1
        assert self.syncing == 1, "two workers sync at once"
        self.runs += 1
        trigger.take(self.paths)
        self.course.step()
        self.seen.update(self.happened)
        self.syncing -= 1
        return True

    def work(self) -> None:
        worker.work(self.paths, self.sync)

    def hook(self, name: str) -> Callable[[], None]:
        def act() -> None:
            self.happened.append(name)
            self.course.step()
            trigger.touch(self.paths)
            self.work()

        return act

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Have everybody stand still before each thing that others can see."""
        is_set, flock, open_, close = trigger.is_set, fcntl.flock, os.open, os.close

        def step_is_set(paths: Paths) -> bool:
            self.course.step()
            return is_set(paths)

        def step_flock(fd: int, how: int) -> None:
            self.course.step()
            flock(fd, how)

        def noting_open(path: str, *more: int) -> int:
            fd = open_(path, *more)
            (self.locked.add if path.endswith("worker.lock") else self.locked.discard)(fd)
            return fd

        def step_close(fd: int) -> None:
            if fd in self.locked:
                self.course.step()
            close(fd)

        monkeypatch.setattr(trigger, "is_set", step_is_set)
        monkeypatch.setattr(fcntl, "flock", step_flock)
        monkeypatch.setattr(os, "open", noting_open)
        monkeypatch.setattr(os, "close", step_close)


def test_no_wish_is_lost_in_any_order_of_events(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that an earlier hook started, and a hook that comes at any moment with its own."""
    meeting = Meeting(host.paths)
    meeting.install(monkeypatch)
    courses, runs = 0, set()
    choices: list[int] | None = []
    while choices is not None:
        meeting.begin(choices)
        meeting.happened.append("earlier")
        trigger.touch(host.paths)
        meeting.course.run({"earlier": meeting.work, "later": meeting.hook("later")})
        assert meeting.seen == {"earlier", "later"}, f"a wish was lost: {meeting.course.choices}"
        assert not trigger.is_set(host.paths)
        assert meeting.runs <= 2
        runs.add(meeting.runs)
        courses += 1
        choices = meeting.course.next()
    assert runs == {1, 2}, "wishes collapse, or come while a sync runs"
    assert courses > 500
