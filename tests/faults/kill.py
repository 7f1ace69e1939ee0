# SPDX-License-Identifier: LGPL-2.1-or-later
"""Runs one hook operation in a child, and stops it, kills it or lies to it at any system call.

The child is forked from this warm process, so that a kill costs a few milliseconds. In it every
function of `os` and `fcntl` that the package uses is wrapped, and the calls that touch the store,
the locks, the devices or libvirt's files count. That this sees all that the kernel sees is shown
against strace (test_killed.py).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import io
import json
import os
import re
import signal
import subprocess
import traceback
from typing import TYPE_CHECKING, Any, NamedTuple

import libvirt

from tests.faults.world import MDEV, VENDOR_VFIO
from tests.unit.host import entry_point
from vgpu_libvirt import hook, sync  # noqa: F401  # warm, as are the next
from vgpu_libvirt.devices import mdev_life, mdev_slots  # noqa: F401
from vgpu_libvirt.lifecycle import (  # noqa: F401
    bystander,
    hotplug,
    parents,
    prepare,
    release,
    running,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path
    from typing import TextIO

    from tests.faults.world import Guest, World

_PR_SET_PDEATHSIG = 1
_SECONDS = 30  # after which a child that hangs is ended
_libc = ctypes.CDLL(None)


class Operation(NamedTuple):
    """A hook operation for a guest; `daemon` is the hook of libvirt's start.

    With ACT it is something else, done in the child; ACT returns what the command line would.
    """

    name: str
    guest: Guest
    act: Callable[[Counter, TextIO], int] | None = None

    @property
    def arguments(self) -> list[str]:
        return ["--daemon"] if self.name == "daemon" else [self.guest.name, self.name, "begin", "-"]

    @property
    def document(self) -> bytes:
        return b"" if self.name == "daemon" else self.guest.xml.encode()


class Call(NamedTuple):
    """A system call that counts."""

    name: str
    path: str  # begins with what it is below: state, sysfs, libvirt_run, runtime
    detail: str = ""  # how a file is opened, what is written, where a second name is
    result: str = "ok"  # or an errno's name; what was read

    @property
    def changes(self) -> bool:
        """Whether the world is another one after it: files, locks or a device."""
        if self.name == "open":
            return self.detail in ("create", "write")
        if self.name == "close":
            return self.path.startswith(("state/lock", "state/locks/"))
        changing = ("write", "fsync", "link", "rename", "unlink", "mkdir", "flock", "libvirt")
        return self.name in changing

    @property
    def writes_store(self) -> bool:
        """Whether it changes a file of the store, and so may find the disk full or read-only."""
        makes = self.name in ("write", "fsync", "link", "rename", "unlink", "mkdir")
        opens = self.name == "open" and self.detail in ("create", "write")
        return self.path.startswith("state/") and (makes or opens)


class Action(NamedTuple):
    """What happens to the child at the call with number AT, counted from 0."""

    at: int
    when: str  # "before", or "after" the call was made
    what: str  # "kill", "stop", or the name of an errno: the call fails
    only: Callable[[Call], bool] | None = None  # from AT on, at every such call

    def applies(self, number: int, when: str, call: Call) -> bool:
        if when != self.when:
            return False
        return number >= self.at and self.only(call) if self.only else number == self.at


def once(what: Callable[[Call], bool]) -> Callable[[Call], bool]:
    """WHAT, the first time that it is so."""
    times = iter([True])
    return lambda call: what(call) and next(times, False)


# Of the calls that change nothing, one in so many is killed at. The second backend makes more of
# them, through the same code but for the driver's part.
_SAMPLED = {VENDOR_VFIO: 3, MDEV: 11}


def instants(calls: Sequence[Call], backend: str) -> Iterator[tuple[int, str]]:
    """When to kill: before and after each call that changes anything, and before some others.

    Between two changes the world stands still, so whoever is killed there leaves the same; only
    what comes then takes turns.
    """
    looks = 0
    for number, call in enumerate(calls):
        if call.changes:
            yield number, "before"
            yield number, "after"
        else:
            looks += 1
            if looks % _SAMPLED[backend] == 0:
                yield number, "before"


class Ended(NamedTuple):
    """How a child ended, and the calls that it made."""

    status: int  # exit status; negative: the signal
    stderr: str
    calls: tuple[Call, ...]


class Child:
    """A forked child that runs an operation."""

    def __init__(self, world: World, operation: Operation, *actions: Action) -> None:
        self._status: int | None = None
        self._ended: Ended | None = None
        self._log = os.memfd_create("calls")
        self._stderr = os.memfd_create("stderr")
        parent = world.libvirtd
        self.pid = os.fork()
        if not self.pid:
            try:
                _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
                signal.alarm(_SECONDS)
                os._exit(self._run(world, operation, actions, parent))
            except BaseException:
                os.write(self._stderr, traceback.format_exc().encode())
                os._exit(70)

    def _run(
        self, world: World, operation: Operation, actions: tuple[Action, ...], parent: int
    ) -> int:
        stderr = io.StringIO()
        environment = {**world.environment, hook.PARENT_VARIABLE: str(parent)}
        counter = Counter(world, actions, self._log)
        counter.install()
        if operation.act:
            status = operation.act(counter, stderr)
        else:
            document = io.BytesIO(operation.document)
            streams = hook.Streams(document, io.BytesIO(), stderr)
            status = hook.main(operation.arguments, streams, environment)
        counter.write(self._stderr, stderr.getvalue().encode())
        return status

    def wait_until_stopped(self) -> bool:
        """Wait until it stands still; False: it ended without coming to that point."""
        _, status = os.waitpid(self.pid, os.WUNTRACED)
        if os.WIFSTOPPED(status):
            return True
        self._status = status
        return False

    def go_on(self) -> Ended:
        """Let it go on, if it stands still, and wait for its end."""
        if self._status is None and self._ended is None:
            os.kill(self.pid, signal.SIGCONT)
        return self.end()

    def end(self) -> Ended:
        """Wait for its end."""
        if self._ended is None:
            if self._status is None:
                _, self._status = os.waitpid(self.pid, 0)
            calls = tuple(Call(*json.loads(line)) for line in _content(self._log).splitlines())
            stderr = _content(self._stderr).decode()
            self._ended = Ended(os.waitstatus_to_exitcode(self._status), stderr, calls)
        return self._ended


def _content(file: int) -> bytes:
    """All that was written to FILE, which is closed."""
    with os.fdopen(file, "rb") as opened:
        opened.seek(0)
        return opened.read()


def run(world: World, operation: Operation, *actions: Action) -> Ended:
    """Run an operation to its end."""
    return Child(world, operation, *actions).end()


class Counter:
    """Wraps what the package calls; counts, notes, and does what the actions say."""

    def __init__(self, world: World, actions: tuple[Action, ...], log: int) -> None:
        self.roots = roots(world)
        self.actions = actions
        self.log = log
        self.number = 0
        self.files: dict[int, str] = {}  # those of interest, by descriptor
        self.write = os.write
        self.is_off = False  # while what others do is done in this process

    def libvirt(self, domain: Any, name: str) -> None:
        """Have a method of a libvirt that is a double count as one call."""
        original = getattr(domain, name)

        def ask(*arguments: Any) -> Any:
            return self._make(Call("libvirt", name), self._uncounted, original, *arguments)

        setattr(domain, name, ask)

    def _uncounted(self, original: Callable[..., Any], *arguments: Any) -> Any:
        self.is_off = True
        try:
            return original(*arguments)
        finally:
            self.is_off = False

    def install(self) -> None:
        """Wrap the functions; in a child, which never takes that back."""
        for name in ("open", "stat", "lstat", "readlink", "mkdir", "unlink", "link", "rename"):
            self._wrap(os, name, self._by_path)
        for name in ("read", "write", "fsync", "close"):
            self._wrap(os, name, self._by_file)
        for name in ("flock", "fcntl"):
            self._wrap(fcntl, name, self._by_file)
        self._wrap(os, "listdir", self._listdir)

    def _wrap(self, module: Any, name: str, how: Callable[..., Any]) -> None:
        original = getattr(module, name)

        def call(*arguments: Any, **options: Any) -> Any:
            # What is below an open directory is a process's: of <proc>, where nothing counts.
            if self.is_off or "dir_fd" in options:
                return original(*arguments, **options)
            return how(original, name, *arguments, **options)

        setattr(module, name, call)

    def _by_path(self, original: Callable[..., Any], name: str, path: Any, *more: Any) -> Any:
        where = relative(self.roots, path)
        if where is None:
            return original(path, *more)
        detail = ""
        if name == "open":
            detail = how_opened(more[0])
        elif name in ("link", "rename"):
            detail = relative(self.roots, more[0]) or ""
        result = self._make(Call(_SAME.get(name, name), where, detail), original, path, *more)
        if name == "open":
            self.files[result] = where
        return result

    def _by_file(self, original: Callable[..., Any], name: str, file: int, *more: Any) -> Any:
        where = self.files.get(file)
        if where is None:
            return original(file, *more)
        detail = more[0].decode() if name == "write" else ""
        if name == "close":
            del self.files[file]
        return self._make(Call(name, where, detail), original, file, *more)

    def _listdir(self, original: Callable[..., Any], name: str, path: Any) -> Any:
        where = None if isinstance(path, int) else relative(self.roots, path)
        if where is None:
            return original(path)
        names = self._make(Call("open", where, "directory"), original, path)
        self._make(Call("close", where), lambda: None)
        return names

    def _make(self, call: Call, original: Callable[..., Any], *arguments: Any) -> Any:
        number = self.number
        self.number += 1
        self._act(number, "before", call)
        try:
            result = original(*arguments)
        except (OSError, libvirt.libvirtError) as error:
            code = error.errno if isinstance(error, OSError) else None
            self._note(call._replace(result=errno.errorcode.get(code or 0, "?")))
            self._act(number, "after", call)
            raise
        shown = result.decode() if isinstance(result, bytes) else "ok"
        self._note(call._replace(result=shown))
        self._act(number, "after", call)
        return result

    def _act(self, number: int, when: str, call: Call) -> None:
        for action in self.actions:
            if not action.applies(number, when, call):
                continue
            if action.what == "kill":
                signal.raise_signal(signal.SIGKILL)
            elif action.what == "stop":
                signal.raise_signal(signal.SIGSTOP)
            else:
                if when == "before":
                    self._note(call._replace(result=action.what))
                code = getattr(errno, action.what)
                raise OSError(code, os.strerror(code), call.path)

    def _note(self, call: Call) -> None:
        self.write(self.log, json.dumps(call).encode() + b"\n")


_SAME = {"lstat": "stat"}
ROOTS = ("state", "sysfs", "libvirt_run", "runtime")


def roots(world: World) -> dict[str, str]:
    """What the names of roots stand for on this host."""
    return {name: getattr(world.paths, name) for name in ROOTS}


def relative(roots: dict[str, str], path: Any) -> str | None:
    """PATH as counted calls name it; None: it doesn't count."""
    for name, root in roots.items():
        if str(path) == root or str(path).startswith(root + "/"):
            return name + str(path)[len(root) :]
    return None


def how_opened(flags: int) -> str:
    if flags & os.O_DIRECTORY:
        return "directory"
    if flags & os.O_CREAT:
        return "create"
    return "write" if flags & os.O_ACCMODE else "read"


# --- the same by strace ---

QUICK = "backend._OWN_CLEANING = 0.0"  # as for all hooks here: see conftest.py

_LINE = re.compile(r"(?:\d+ +)?(?P<name>\w+)\((?P<arguments>.*)")
_FILE = re.compile(r"(?P<number>\d+)<(?P<path>[^>]*)>")
_OPENED = re.compile(r".* = (?P<number>\d+)<")
_QUOTED = re.compile(r'"(?P<path>[^"]*)"')
# What only looks at an open file again, as part of reading a directory.
_PARTS = ("getdents64", "fstat", "newfstatat")
_PLAIN = {"newfstatat": "stat", "lstat": "stat"}


def traced(world: World, operation: Operation) -> list[str]:
    """Run the operation as a process of its own under strace; each call that counts, "NAME PATH".

    Whatever system call names a counted path, or a file opened by one, is in the list.
    """
    trace = world.root / "trace"
    program = entry_point(world.root)
    now = f"from vgpu_libvirt.devices import backend\n{QUICK}\nrun()"
    program.write_text(program.read_text().replace("\nrun()", f"\n{now}"))
    strace = ["strace", "-f", "-y", "-s", "0", "-o", trace]
    done = subprocess.run(
        [*strace, program, *operation.arguments],
        input=operation.document,
        env={
            **world.environment,
            hook.PARENT_VARIABLE: str(world.libvirtd),
            "PYTHONDONTWRITEBYTECODE": "1",
        },
        capture_output=True,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    return list(_counted(trace, roots(world)))


def _counted(trace: Path, places: dict[str, str]) -> Iterator[str]:
    opened: dict[str, str] = {}  # by descriptor; a file's own path may be another, by links
    for line in trace.read_text().splitlines():
        match = _LINE.match(line)
        if not match:
            continue
        name, arguments = match["name"], match["arguments"]
        by_file = _FILE.match(arguments)
        named = by_file or _QUOTED.search(arguments)
        where = relative(places, named["path"]) if named else None
        if by_file and by_file["number"] in opened:
            where = opened[by_file["number"]]
        elif where and (result := _OPENED.match(arguments)):
            opened[result["number"]] = where
        if name == "close" and by_file:
            opened.pop(by_file["number"], None)
        if where is None:
            # Nothing that counts may hide in a call that we don't know to read.
            assert not any(f"{root}/" in arguments for root in places.values()), line
        elif not (by_file and name in _PARTS):
            plain = _PLAIN.get(name, name.removesuffix("at2").removesuffix("at"))
            yield f"{plain} {where}"
