# SPDX-License-Identifier: LGPL-2.1-or-later
"""What a hook costs beside what it can't do without: `python3 -m bench.speed`; see README.md.

In each round every command runs once, so that what else the machine does hits all alike; what
counts are ratios of medians.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from bench.host import PROFILE, LargeHost, Size
from bench.installed import PYTHON, STUB, install
from bench.timing import Rounds, Took, begin, finish, median, run, together
from tests.unit.host import domain_xml
from vgpu_libvirt.claims import store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from bench.host import Guest

SMALL, LARGE = Size(1, 4, 0), Size(64, 1000, 0)
BUSY = Size(4, 16, 0)  # on which many start at once
SMALL_PROCESSES, LARGE_PROCESSES, BUSY_PROCESSES = 100, 5000, 200
AT_ONCE = 64
MOST_OF_LIBVIRT = 20  # requests that libvirtd and virtqemud serve at once: max_workers, by default
LIFE = ("prepare", "start", "started", "stopped", "release")
_FILES = 20  # that a process which is no QEMU has open
_FIRST_OTHER_PID = 100_000
_BEGIN, _END = "<!-- measured -->\n", "<!-- end -->\n"

# What everybody's first hook does: no books, no looking, and no questions.
MINIMAL = """#!/bin/bash
vf={vf}
case $2 in
prepare) echo {profile} >"$vf/nvidia/current_vgpu_type" ;;
release) echo 0 >"$vf/nvidia/current_vgpu_type" ;;
esac
exit 0
"""

# One pass over all open files, as a program that wants to know who has a device open must make it.
PASS = """
import os, sys
found = []
for pid in os.listdir(sys.argv[1]):
    if pid.isdigit():
        directory = f"{sys.argv[1]}/{pid}/fd"
        for name in os.listdir(directory):
            if "/vfio/" in os.readlink(f"{directory}/{name}"):
                found.append(pid)
"""

# How long the host lock is held, from when it is had to when it is let go: wall and CPU time.
HOLDS = """import contextlib, time
from vgpu_libvirt.claims import locks
_held = locks._held
@contextlib.contextmanager
def held(path, deadline):
    with _held(path, deadline) as fd:
        begin = time.perf_counter(), time.thread_time()
        yield fd
        took = time.perf_counter() - begin[0], time.thread_time() - begin[1]
    if path.endswith("/lock"):
        with open("@FILE@", "a") as file:
            file.write(f"{took[0]} {took[1]}\\n")
locks._held = held
"""


class Row(NamedTuple):
    """One line of the table."""

    name: str
    took: Took
    ratio: str = ""
    target: str = ""
    is_met: bool | None = None


class Bench:
    """A host of SIZE below ROOT with PROCESSES in all, on which this process plays libvirtd."""

    def __init__(self, root: Path, size: Size, processes: int) -> None:
        root.mkdir(parents=True)
        self.root = root
        self.large = LargeHost(root / "host", size)
        self.host = self.large.host
        # The stub tells our entry point who runs it.
        self.host.process(os.getpid(), "libvirtd", start=4242)
        for number in range(processes - size.running):
            opens = ("anon_inode:[eventfd]",) * (_FILES - 1)
            self.host.process(_FIRST_OTHER_PID + number, "worker", opens=opens)
        os.unlink(self.host.paths.journal)  # nobody listens
        self.entry = install(root / "installed", self.host.paths)
        self.guests = self.large.newcomers()

    def stub(self, operation: str, guest: Guest, entry: str = "") -> Took:
        """Run the stub as libvirt does."""
        return run(
            [STUB, guest.name, operation, "begin", "-"],
            guest.document(live=True),
            VGPU_LIBVIRT_HOOK=entry or self.entry,
        )

    def life(self, guest: Guest, call: Callable[[str], Took]) -> list[Took]:
        """What each hook of one start and stop takes, run by CALL."""
        took = []
        for operation in LIFE:
            if operation == "started":
                group, _ = self.host.nodes(guest.vf)
                document = guest.document(live=True)
                self.host.run_domain(
                    guest.name, guest.uuid, guest.pid, document, (group,), guest.number
                )
            if operation == "release":
                self.host.end_domain(guest.name, guest.pid)
            took.append(call(operation))
        assert self.is_clear(guest)
        return took

    def is_clear(self, guest: Guest) -> bool:
        """Whether nothing is left of GUEST."""
        claims = store.of_domain(self.host.paths.state, guest.uuid)
        return not claims and self.host.type_of(guest.vf) == "0"


def _both(took: Took, other: Took) -> str:
    """How many times TOOK is OTHER, in wall time, and in CPU time."""
    return f"{took.wall / other.wall:.2f} (CPU {took.cpu / other.cpu:.2f})"


def stub_rows(dispatcher: str | None, rounds: int) -> Iterator[Row]:
    """(a) A domain that doesn't ask and has no hostdev."""
    document = domain_xml(extra="<!-- " + "x" * 8000 + " -->")
    arguments = ["vm", "prepare", "begin", "-"]
    measured = Rounds()
    measured.add("sh", lambda: run(["sh", "-c", ":"]))
    measured.add("stub", lambda: run([STUB, *arguments], document))
    if dispatcher:
        measured.add("dispatcher", lambda: run([dispatcher, *arguments], document))
    took = measured.run(rounds * 25)  # each takes a few milliseconds
    yield Row("`sh -c :`", took["sh"])
    ratio = took["stub"].wall / took["sh"].wall
    yield Row(
        "hook of a domain without a vGPU",
        took["stub"],
        f"{_both(took['stub'], took['sh'])} x sh",
        "2.2 x sh",
        ratio <= 2.2,
    )
    if dispatcher:
        ratio = took["stub"].wall / took["dispatcher"].wall
        yield Row(
            "the same of a dispatcher in bash, which has nothing to run",
            took["dispatcher"],
            f"ours is {_both(took['stub'], took['dispatcher'])} of it",
            "0.5",
            ratio <= 0.5,
        )


def life_rows(bench: Bench, rounds: int) -> Iterator[Row]:
    """(b) The five hooks of a whole start and stop with a vGPU."""
    guest = bench.guests[0]
    minimal = bench.root / "minimal"
    minimal.write_text(MINIMAL.format(vf=bench.host.pci(guest.vf), profile=PROFILE.id))
    minimal.chmod(0o755)
    document = guest.document(live=True)
    hooks: dict[str, list[Took]] = {name: [] for name in LIFE}

    def ours() -> Took:
        times = bench.life(guest, lambda operation: bench.stub(operation, guest))
        for name, took in zip(LIFE, times, strict=True):
            hooks[name].append(took)
        return together(times)

    def bash() -> Took:
        return together(
            bench.life(
                guest,
                lambda operation: run([str(minimal), "vm", operation, "begin", "-"], document),
            )
        )

    measured = Rounds()
    measured.add("python", lambda: together([run(_BARE) for _ in LIFE]))
    measured.add("bash", bash)
    measured.add("ours", ours)
    took = measured.run(rounds * 2)
    yield Row("5 x `python3 -I -S -c pass`", took["python"])
    yield Row("5 hooks in bash that only write the type", took["bash"])
    ratio = took["ours"].wall / took["python"].wall
    yield Row(
        "5 hooks of one start and stop",
        took["ours"],
        f"{_both(took['ours'], took['python'])} x python3, "
        f"{_both(took['ours'], took['bash'])} x bash",
        "4 x python3",
        ratio <= 4,
    )
    for name, times in hooks.items():
        yield Row(f"- `{name}` of these", median(times[1:]))


_BARE = [PYTHON, "-I", "-S", "-c", "pass"]


def scale_rows(small: Bench, large: Bench, rounds: int) -> Iterator[Row]:
    """(c) `prepare` and `release` on a large host."""
    measured = Rounds()
    measured.add("python", lambda: run(_BARE))
    proc = large.host.paths.proc
    measured.add("pass", lambda: run([PYTHON, "-I", "-S", "-c", PASS, proc]))
    for name, bench in (("small", small), ("large", large)):
        for operation in ("prepare", "release"):
            guest = bench.guests[0]
            measured.add(
                f"{operation} {name}",
                lambda operation=operation, bench=bench, guest=guest: bench.stub(operation, guest),
            )
    took = measured.run(rounds)
    one_pass = Took(*(x - y for x, y in zip(took["pass"], took["python"], strict=True)))
    yield Row("one bare pass over that /proc", one_pass)
    for operation in ("prepare", "release"):
        little, much = took[f"{operation} small"], took[f"{operation} large"]
        most = together([little, little, one_pass])
        yield Row(f"`{operation}`, small host", little)
        yield Row(
            f"`{operation}`, large host",
            much,
            f"{_both(much, most)} of (2 x small + pass)",
            "1",
            much.wall <= most.wall,
        )


BURN = """
import sys, time
while time.process_time() < float(sys.argv[1]): pass
"""


def concurrent_rows(bench: Bench, rounds: int) -> Iterator[Row]:
    """(d) Many starts at once, and (e) how long they hold the host lock."""
    guests = bench.guests[:AT_ONCE]
    alone: list[Took] = []

    def prepares(entry: str, number: int = AT_ONCE) -> Took:
        guests = bench.guests[:number]
        began = time.perf_counter()
        running = [
            begin(
                [STUB, guest.name, "prepare", "begin", "-"],
                guest.document(live=True),
                VGPU_LIBVIRT_HOOK=entry,
            )
            for guest in guests
        ]
        times = [finish(process) for process in running]
        took = Took(time.perf_counter() - began, together(times).cpu)
        assert all(bench.host.type_of(guest.vf) == str(PROFILE.id) for guest in guests)
        for guest in guests:
            bench.stub("release", guest, entry)
        return took

    def one_by_one() -> Took:
        times = [bench.stub("prepare", guest) for guest in guests]
        alone.append(median(times))
        for guest in guests:
            bench.stub("release", guest)
        return together(times)

    def burning() -> Took:
        seconds = str(alone[-1].cpu)
        began = time.perf_counter()
        running = [begin([PYTHON, "-I", "-S", "-c", BURN, seconds]) for _ in guests]
        times = [finish(process) for process in running]
        return Took(time.perf_counter() - began, together(times).cpu)

    measured = Rounds()
    measured.add("one by one", one_by_one)
    measured.add("burning", burning)
    measured.add("at once", lambda: prepares(bench.entry))
    holds = {number: bench.root / f"holds{number}" for number in (AT_ONCE, MOST_OF_LIBVIRT)}
    for number, path in holds.items():
        prelude = HOLDS.replace("@FILE@", str(path))
        timed = install(bench.root / f"timed{number}", bench.host.paths, prelude)
        measured.add(f"timed {number}", lambda timed=timed, number=number: prepares(timed, number))
    took = measured.run(max(2, rounds // 3))
    yield Row(f"{AT_ONCE} `prepare`, one after the other", took["one by one"])
    yield Row(f"{AT_ONCE} processes at once that burn as much CPU time", took["burning"])
    ratio = took["at once"].wall / took["burning"].wall
    yield Row(
        f"{AT_ONCE} `prepare` at once",
        took["at once"],
        f"{ratio:.2f} x the burning",
        "1.3",
        ratio <= 1.3,
    )
    for number, path in holds.items():
        held = [Took(*map(float, line.split())) for line in path.read_text().splitlines()]
        ends = [sorted(column)[int(len(column) * 0.99)] for column in zip(*held, strict=True)]
        most = Took(*ends)
        yield Row(f"the host lock with {number} at once, held {len(held)} times", median(held))
        text = f"{1000 * most.wall:.1f} ms"
        yield Row("- 99th percentile", most, text, "10 ms", most.wall < 0.01)


def table(rows: list[Row]) -> str:
    """The rows as Markdown."""
    lines = ["| | wall, ms | CPU, ms | measured | target | |", "|---|---:|---:|---|---|---|"]
    for row in rows:
        cpu = f"{1000 * row.took.cpu:.1f}"
        met = {None: "", True: "met", False: "**missed**"}[row.is_met]
        lines.append(
            f"| {row.name} | {1000 * row.took.wall:.1f} | {cpu} | {row.ratio} | "
            f"{row.target and f'at most {row.target}'} | {met} |"
        )
    return "\n".join(lines) + "\n"


def facts(rounds: int, directory: str) -> str:
    """When and where this was measured."""
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    version = subprocess.run([PYTHON, "-V"], capture_output=True, text=True, check=True).stdout
    where = ["stat", "-f", "-c", "%T", directory]
    filesystem = subprocess.run(where, capture_output=True, text=True, check=True).stdout.strip()
    loads = " ".join(f"{load:.1f}" for load in os.getloadavg())
    return (
        f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} processors ({model}), Linux "
        f"{platform.release()}, {version.strip()}, {filesystem}; load average {loads}; medians of "
        f"{rounds} rounds or more.\n\n"
    )


def measure(root: Path, parts: str, dispatcher: str | None, rounds: int) -> list[Row]:
    """The rows of PARTS: a, b, c, d as the functions above have them."""
    rows: list[Row] = []
    small = Bench(root / "small", SMALL, SMALL_PROCESSES)
    if "a" in parts:
        rows += stub_rows(dispatcher, rounds)
    if "b" in parts:
        rows += life_rows(small, rounds)
    if "c" in parts:
        large = Bench(root / "large", LARGE, LARGE_PROCESSES)
        rows += scale_rows(small, large, rounds)
    if "d" in parts:
        rows += concurrent_rows(Bench(root / "busy", BUSY, BUSY_PROCESSES), rounds)
    return rows


def main() -> None:
    """Measure and print; with --write also into a page."""
    parser = argparse.ArgumentParser(prog="python3 -m bench.speed", description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--dispatcher", metavar="FILE", help="a dispatcher of hooks to compare")
    parser.add_argument("--only", default="abcd", metavar="PARTS", help="of abcd [abcd]")
    parser.add_argument("--write", metavar="FILE", help="put the table into this page")
    options = parser.parse_args()
    if os.geteuid() != 0:
        sys.exit("bench.speed: run it as root; for others the hook leaves at once")
    with tempfile.TemporaryDirectory(prefix="vgpu-bench-") as directory:
        before = facts(options.rounds, directory)
        rows = measure(Path(directory), options.only, options.dispatcher, options.rounds)
    text = before + table(rows)
    sys.stdout.write(text)
    if options.write:
        page = Path(options.write)
        head, _, rest = page.read_text().partition(_BEGIN)
        page.write_text(f"{head}{_BEGIN}{text}{_END}{rest.partition(_END)[2]}")


if __name__ == "__main__":
    main()
