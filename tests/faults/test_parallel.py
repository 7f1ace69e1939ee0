# SPDX-License-Identifier: LGPL-2.1-or-later
"""Many at once: starts for more than there is, and storms of everything on few devices."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
import traceback
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.faults import kill
from tests.faults.kill import Action, Operation
from tests.faults.world import (
    MDEV,
    VENDOR_VFIO,
    Guest,
    World,
    check_nothing_leaked,
    check_promises,
    our_libvirtd,
)
from tests.unit.host import REPOSITORY, entry_point
from vgpu_libvirt.claims import store
from vgpu_libvirt.claims.model import Phase

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable

pytestmark = pytest.mark.promise(2, 3)

GPUS = ("0000:3d:00.0", "0000:41:00.0", "0000:81:00.0", "0000:c1:00.0")
MANY = 64
SLOTS_A_GPU = 4  # of 12 GiB on 48


def guests(places: list[str], profile: str = "NVIDIA L40S-12Q") -> list[Guest]:
    """MANY domains, dealt out over PLACES."""
    return [
        Guest(f"vm{n}", str(uuid.UUID(int=n + 1)), n + 1, (places[n % len(places)],), profile)
        for n in range(MANY)
    ]


def prepare_all_at_once(world: World, domains: list[Guest]) -> dict[Guest, tuple[int, str]]:
    """Run `prepare` of all as real hook processes; each one's exit status and sentence."""
    our_libvirtd(world)
    environment = {
        **world.environment,
        "VGPU_LIBVIRT_HOOK": str(entry_point(world.root, "/usr/bin/python3")),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    running = {}
    for guest in domains:
        document = world.write(world.root / f"{guest.name}.xml", guest.xml)
        with document.open() as stdin:
            running[guest] = subprocess.Popen(
                [REPOSITORY / "hooks/qemu", guest.name, "prepare", "begin", "-"],
                stdin=stdin,
                stderr=subprocess.PIPE,
                env=environment,
                text=True,
            )
    answers = {}
    for guest, process in running.items():
        _, sentence = process.communicate(timeout=120)
        answers[guest] = (process.returncode, sentence)
    return answers


def check_answers(world: World, answers: dict[Guest, tuple[int, str]], fit: int) -> list[Guest]:
    """As many started as fit, each whole; the others have a sentence and nothing else."""
    check_promises(world)
    started = [guest for guest, (status, _) in answers.items() if status == 0]
    for guest, (status, sentence) in answers.items():
        assert (status, sentence.count("\n")) in ((0, 0), (1, 1)), (guest, status, sentence)
    assert len(started) == fit, [sentence for _, sentence in answers.values()]
    devices = [device for guest in started for device in guest.devices]
    assert len(set(devices)) == fit
    assert set(world.types) == set(devices)
    claims = store.read_all(world.paths.state).readable
    assert {claim.domain_uuid for claim in claims.values()} == {guest.uuid for guest in started}
    assert {claim.phase for claim in claims.values()} == {Phase.CONFIGURED}
    return started


def end(world: World, answers: dict[Guest, tuple[int, str]]) -> None:
    """libvirt ends every start, those that failed too."""
    for guest in answers:
        world.stop(guest)
    check_nothing_leaked(world)


@pytest.mark.parametrize(
    ("backend", "busy"), [(VENDOR_VFIO, 0), (VENDOR_VFIO, 3), (MDEV, 3)], indirect=["backend"]
)
def test_more_starts_than_the_gpus_have_room_for(
    world: World, counts: Counter[str], busy: int
) -> None:
    """64 domains, each with a VF of its own, where 16 vGPUs fit; the driver refuses the rest."""
    world.set_policy(lock_timeout=60.0)
    world.set_driver(write_ms=busy)
    places = [place for gpu in GPUS for place in world.gpu(gpu, vfs=MANY // len(GPUS))]
    answers = prepare_all_at_once(world, guests(places))
    started = check_answers(world, answers, SLOTS_A_GPU * len(GPUS))
    gpus = [world.gpu_of(guest.devices[0]) for guest in started]
    assert all(gpus.count(gpu) == SLOTS_A_GPU for gpu in set(gpus))
    end(world, answers)
    counts["processes"] += MANY


def test_more_starts_than_there_are_devices(world: World, counts: Counter[str]) -> None:
    """64 domains point at 16 VFs."""
    world.set_policy(lock_timeout=60.0)
    places = [place for gpu in GPUS for place in world.gpu(gpu, vfs=SLOTS_A_GPU)]
    answers = prepare_all_at_once(world, guests(places))
    check_answers(world, answers, len(places))
    end(world, answers)
    counts["processes"] += MANY


def test_domains_with_two_devices_each_get_both_or_none(world: World, counts: Counter[str]) -> None:
    """Every two of the domains want each other's device, in either order."""
    world.set_policy(lock_timeout=60.0)
    first, second = (world.gpu(gpu, vfs=SLOTS_A_GPU) for gpu in GPUS[:2])
    pairs = [(a, b) for a in first for b in second]
    pairs = [pair if n % 2 else pair[::-1] for n, pair in enumerate(pairs)]
    domains = [
        guest._replace(places=pair) for guest, pair in zip(guests(first), pairs, strict=False)
    ]
    answers = prepare_all_at_once(world, domains)
    check_promises(world)
    started = [guest for guest, (status, _) in answers.items() if status == 0]
    assert started
    assert set(world.types) == {device for guest in started for device in guest.devices}
    end(world, answers)
    counts["processes"] += len(domains)


# --- storms ---

SECONDS = 2.5
WORKERS = 5


class Worker:
    """A domain's whole life, again and again, as libvirt would play it."""

    def __init__(self, world: World, number: int, places: list[str]) -> None:
        self.world = world.elsewhere(4000 + 1000 * number)
        self.number, self.places = number, places
        self.random = random.Random(number)
        self.steps = 0

    def guest(self) -> Guest:
        chosen = self.random.sample(self.places, self.random.choice((1, 1, 2)))
        return Guest(
            f"vm{self.number}", str(uuid.UUID(int=self.number + 1)), self.number, tuple(chosen)
        )

    def work(self, until: float) -> None:
        while time.monotonic() < until:
            self.random.choice((self.live, self.live, self.break_off, self.reconcile))()
            self.steps += 1

    def live(self) -> None:
        guest = self.guest()
        if self.world.start(guest).status == 0:
            time.sleep(self.random.random() / 50)
            types = self.world.types
            for device in guest.devices:
                assert types.get(device) == 1152, f"{device} lost its type while {guest} ran"
            self.world.stop(guest)

    def break_off(self) -> None:
        """A hook dies of a signal; libvirt takes that for a failed start."""
        guest = self.guest()
        number = self.random.randrange(150)
        kill.run(self.world, Operation("prepare", guest), Action(number, "before", "kill"))
        self.world.start_fails(guest)

    def reconcile(self) -> None:
        assert self.world.daemon_hook().status == 0


@pytest.mark.parametrize(
    "driver_options",
    [{}, {"busy_ms": 15, "write_ms": 2}, {"errnos": "rfc", "open_writes": "taken"}],
    ids=["quick", "busy", "permissive"],
)
def test_a_storm_of_starts_stops_kills_and_reconciliations(
    new_world: Callable[[], World], counts: Counter[str], driver_options: dict[str, object]
) -> None:
    world = new_world()
    world.set_policy(lock_timeout=30.0)
    world.set_driver(**driver_options)
    places = world.gpu(vfs=4)
    pids = [storm(Worker(world, number, places)) for number in range(WORKERS)]
    steps = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    assert all(status == 0 for status in steps), steps
    check_promises(world)
    world.everything_ends()
    check_nothing_leaked(world)
    counts["writes_in_storms"] += len(world.log)
    counts["steps_in_storms"] += sum(
        int((world.root / f"steps{number}").read_text()) for number in range(WORKERS)
    )


def storm(worker: Worker) -> int:
    """Let it work in a process of its own; its pid."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        signal.alarm(60)
        worker.world.connect()
        worker.work(time.monotonic() + SECONDS)
        Path(worker.world.root, f"steps{worker.number}").write_text(str(worker.steps))
        status = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(status)
