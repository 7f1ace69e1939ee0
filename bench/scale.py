# SPDX-License-Identifier: LGPL-2.1-or-later
"""What a large host costs, as whole processes: `python3 -m bench.scale`; see README.md.

Each round runs every command once, so that what else the machine does hits all alike.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from bench.host import LargeHost, Size
from tests.unit.host import LIBVIRTD, REPOSITORY, entry_point
from vgpu_libvirt.claims import store

if TYPE_CHECKING:
    from collections.abc import Callable

SMALL, LARGE = Size(16, 250, 250), Size(64, 1000, 1000)
MOVES = 50
README = Path(__file__).with_name("README.md")
_BEGIN, _END = "<!-- measured -->\n", "<!-- end -->\n"


class Time(NamedTuple):
    """Seconds of one process and those that it ran."""

    wall: float
    cpu: float  # user and system


class Result(NamedTuple):
    """The medians of one command on both hosts."""

    name: str
    small: Time
    large: Time

    @property
    def growth(self) -> float:
        """How many times more CPU time the large host costs than the small one."""
        return self.large.cpu / self.small.cpu


class Commands:
    """The commands to time, on a host at rest and on one whose definitions have to be pointed."""

    def __init__(self, root: Path, size: Size) -> None:
        self.rest = LargeHost(root / "rest", size)
        self.late = LargeHost(root / "late", size)
        self.late.point_at_taken(MOVES)
        self.newcomer = self.rest.newcomers()[0]
        self.entry = str(entry_point(root))

    def bare(self) -> Time:
        return _timed(self.rest, sys.executable, "-I", "-S", "-c", "pass")[0]

    def sync_nothing(self) -> Time:
        return self._sync(self.rest, 0)

    def sync_moves(self) -> Time:
        return self._sync(self.late, MOVES)

    def prepare(self) -> Time:
        took = self._hook("prepare")
        claims = store.of_domain(self.rest.host.paths.state, self.newcomer.uuid)
        assert [claim.device for claim in claims] == [self.newcomer.vf]
        return took

    def release(self) -> Time:
        took = self._hook("release")
        assert not store.of_domain(self.rest.host.paths.state, self.newcomer.uuid)
        return took

    def calls(self) -> int:
        """How often a sync that changes nothing asks libvirt."""
        done = _run(self.rest, *_SYNC, BENCH_CALLS="1")
        return int(done.stderr.split()[0])

    def _sync(self, host: LargeHost, moves: int) -> Time:
        took, done = _timed(host, *_SYNC)
        outcome = json.loads(done.stdout)
        assert not (outcome["released"] or outcome["problems"]), outcome
        assert len(outcome["repointed"]) == moves, outcome["repointed"]
        return took

    def _hook(self, operation: str) -> Time:
        arguments = (self.entry, self.newcomer.name, operation, "begin", "-")
        took, done = _timed(self.rest, *arguments, document=self.newcomer.document())
        assert not done.stderr, done.stderr
        return took


_SYNC = (sys.executable, str(REPOSITORY / "bench/libvirt_double.py"), "sync", "--json")


def _timed(
    host: LargeHost, *command: str, document: str = ""
) -> tuple[Time, subprocess.CompletedProcess[str]]:
    before, begin = _children(), time.perf_counter()
    done = _run(host, *command, document=document)
    return Time(time.perf_counter() - begin, _children() - before), done


def _children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _run(
    host: LargeHost, *command: str, document: str = "", **variables: str
) -> subprocess.CompletedProcess[str]:
    environment = {**host.environment, "VGPU_LIBVIRT_PARENT": str(LIBVIRTD), **variables}
    return subprocess.run(
        command, input=document, text=True, capture_output=True, check=True, env=environment
    )


def measure(root: Path, rounds: int) -> tuple[list[Result], int]:
    """The medians of all commands, and the calls to libvirt of a sync on the large host."""
    small, large = Commands(root / "small", SMALL), Commands(root / "large", LARGE)
    works: list[tuple[str, Callable[[], Time], Callable[[], Time]]] = [
        ("python3 -I -S -c pass", small.bare, large.bare),
        ("sync that changes nothing", small.sync_nothing, large.sync_nothing),
        (f"sync that points {MOVES} definitions", small.sync_moves, large.sync_moves),
        ("prepare hook", small.prepare, large.prepare),
        ("release hook", small.release, large.release),
    ]
    times: dict[str, tuple[list[Time], list[Time]]] = {name: ([], []) for name, *_ in works}
    for number in range(rounds + 1):
        for name, on_small, on_large in works:
            took = on_small(), on_large()
            if number:  # the first one fills caches
                times[name][0].append(took[0])
                times[name][1].append(took[1])
    return [Result(name, *map(_median, both)) for name, both in times.items()], large.calls()


def _median(times: list[Time]) -> Time:
    return Time(*(statistics.median(column) for column in zip(*times, strict=True)))


def table(results: list[Result], calls: int, rounds: int) -> str:
    """The results as Markdown."""
    bare = results[0]
    lines = [
        f"| medians of {rounds} | {SMALL} | {LARGE} | x python3 | growth |",
        "|---|---:|---:|---:|---:|",
    ]
    for each in results:
        ratio = each.large.cpu / bare.large.cpu
        lines.append(
            f"| {each.name} | {_milliseconds(each.small)} | {_milliseconds(each.large)} | "
            f"{ratio:.0f} | {each.growth:.1f} |"
        )
    lines.append("")
    lines.append(
        f"CPU time (wall time) in ms. libvirt is a double, which costs nothing: a sync asks it "
        f"{calls} times."
    )
    return "\n".join(lines) + "\n"


def _milliseconds(took: Time) -> str:
    return f"{1000 * took.cpu:.0f} ({1000 * took.wall:.0f})"


def main() -> None:
    """Measure and print; with --write also into README.md."""
    parser = argparse.ArgumentParser(prog="python3 -m bench.scale", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--write", action="store_true", help="put the table into README.md")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="vgpu-bench-") as directory:
        results, calls = measure(Path(directory), options.rounds)
    text = table(results, calls, options.rounds)
    sys.stdout.write(text)
    if options.write:
        before, _, rest = README.read_text().partition(_BEGIN)
        README.write_text(f"{before}{_BEGIN}{text}{_END}{rest.partition(_END)[2]}")


if __name__ == "__main__":
    main()
