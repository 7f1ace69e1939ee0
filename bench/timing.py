# SPDX-License-Identifier: LGPL-2.1-or-later
"""Times whole processes, in rounds in which each runs once, so that noise hits all alike."""

from __future__ import annotations

import os
import shutil
import statistics
import time
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable


class Took(NamedTuple):
    """Seconds of one process and those that it ran."""

    wall: float
    cpu: float  # user and system


def run(command: list[str], document: str = "", **variables: str) -> Took:
    """Run COMMAND with DOCUMENT on stdin, in the environment that libvirt gives a hook.

    It must succeed, and say nothing on stderr.
    """
    return finish(begin(command, document, **variables))


class _Process(NamedTuple):
    pid: int
    began: float
    stderr: int


def begin(command: list[str], document: str = "", **variables: str) -> _Process:
    """Begin as `run` does."""
    reader, writer = os.pipe()
    said = os.memfd_create("stderr")
    os.write(writer, document.encode())  # what a pipe has room for
    os.close(writer)
    environment = {"PATH": os.environ["PATH"], "LC_ALL": "C", **variables}
    actions = [
        (os.POSIX_SPAWN_DUP2, reader, 0),
        (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
        (os.POSIX_SPAWN_DUP2, said, 2),
    ]
    began = time.perf_counter()
    program = shutil.which(command[0])
    assert program, command[0]
    pid = os.posix_spawn(program, command, environment, file_actions=actions)
    os.close(reader)
    return _Process(pid, began, said)


def finish(process: _Process) -> Took:
    """Wait for it, and see that it went well."""
    _, status, usage = os.wait4(process.pid, 0)
    wall = time.perf_counter() - process.began
    said = os.pread(process.stderr, 4096, 0).decode()
    os.close(process.stderr)
    assert (os.waitstatus_to_exitcode(status), said) == (0, ""), said
    return Took(wall, usage.ru_utime + usage.ru_stime)


def together(times: list[Took]) -> Took:
    return Took(sum(each.wall for each in times), sum(each.cpu for each in times))


def median(times: list[Took]) -> Took:
    return Took(*(statistics.median(column) for column in zip(*times, strict=True)))


class Rounds:
    """Measurements by name, each of which is made once a round."""

    def __init__(self) -> None:
        self._works: dict[str, Callable[[], Took]] = {}
        self.times: dict[str, list[Took]] = {}

    def add(self, name: str, work: Callable[[], Took]) -> None:
        self._works[name] = work
        self.times[name] = []

    def run(self, rounds: int) -> dict[str, Took]:
        """The medians; a first round, which fills caches, doesn't count."""
        for number in range(rounds + 1):
            for name, work in self._works.items():
                took = work()
                if number:
                    self.times[name].append(took)
        return {name: median(times) for name, times in self.times.items()}
