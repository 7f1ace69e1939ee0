# SPDX-License-Identifier: LGPL-2.1-or-later
"""Hooks that stand still, at any point, and go on when the world is another one.

The hook is stopped at a call; its daemon dies, the next one comes, and starts the same domain, or
another one, at the same place. Whoever has the device then keeps it, type and all. A mediated
device has the same name at the next start of its domain, so a late release finds it there.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from tests.faults import cases, kill
from tests.faults.cases import CASES, Case
from tests.faults.kill import Action, Child, Operation, once
from tests.faults.world import VENDOR_VFIO, check_nothing_leaked, check_promises, web1, web2
from tests.unit.host import REPOSITORY, entry_point
from vgpu_libvirt import sync
from vgpu_libvirt.claims import locks, store
from vgpu_libvirt.claims.model import Phase

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Iterator, Sequence

    from tests.faults.kill import Call
    from tests.faults.world import Guest, World

pytestmark = pytest.mark.promise(1, 4)

PATIENCE = 1e-6  # seconds that a hook waits here for the lock of one that stands still
SHORT = 40  # calls; of an operation as short as that, everything is tried at every step
STUB = REPOSITORY / "hooks/qemu"


# --- what happens while the hook stands still ---


def _start(world: World, guest: Guest) -> bool:
    """Whether it started; a refusal is one sentence."""
    result = world.start(guest)
    assert result.status == 0 or result.stderr.count("\n") == 1, result.stderr
    return result.status == 0


def the_same_runs_under_a_new_daemon(world: World, guest: Guest, child: Child) -> None:
    _old_world_ends(world, guest)
    world.start_libvirtd()
    _start(world, guest)


def another_runs_under_a_new_daemon(world: World, guest: Guest, child: Child) -> None:
    _old_world_ends(world, guest)
    world.start_libvirtd()
    _start(world, web2(*guest.places))


def another_runs_under_the_same_daemon(world: World, guest: Guest, child: Child) -> None:
    _start(world, web2(*guest.places))


def the_same_is_between_prepare_and_qemu(world: World, guest: Guest, child: Child) -> None:
    """No process shows the start that is under way, but for its daemon."""
    _old_world_ends(world, guest)
    world.start_libvirtd()
    prepared = world.hook("prepare", guest.xml).status == 0
    child.go_on()
    if prepared:
        _keeps_what_it_prepared(world, guest)
    else:
        world.start_fails(guest)


def the_same_is_prepared_without_a_reconciliation(world: World, guest: Guest, child: Child) -> None:
    _old_world_ends(world, guest)
    world.new_libvirtd()
    world.forget(guest)
    prepared = world.hook("prepare", guest.xml).status == 0
    child.go_on()
    if prepared:
        _keeps_what_it_prepared(world, guest)
    else:
        world.start_fails(guest)


def _old_world_ends(world: World, guest: Guest) -> None:
    """The daemon is killed, and the guest that ran dies with it."""
    world.kill_libvirtd()
    if guest in world.running:
        world.kill_qemu(guest)


def _keeps_what_it_prepared(world: World, guest: Guest) -> None:
    """Nobody takes the device before QEMU comes, and then it is there as prepared."""
    for other in map(web2, guest.places):
        started = world.start(other).status == 0
        assert not (started and {*other.devices} & {*guest.devices}), "taken from a start under way"
    assert world.hook("start", guest.xml).status == 0
    world.run_qemu(guest)
    assert world.hook("started", guest.xml).status == 0
    check_promises(world)


MEANWHILE = (
    the_same_runs_under_a_new_daemon,
    another_runs_under_a_new_daemon,
    another_runs_under_the_same_daemon,
    the_same_is_between_prepare_and_qemu,
    the_same_is_prepared_without_a_reconciliation,
)

# --- the tests ---

LATE = (
    "prepare",
    "prepare-over-running",
    "prepare-takes-over",
    "prepare-driver-refuses",
    "started",
    "stopped",
    "reconnect-notes",
    "reconnect-adopts",
    "release",
    "release-busy",
    "reconcile",
)
late_cases = cases.each(case for case in CASES if case.name in LATE)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits long for a hook that stands still, or the tests would do nothing else."""
    monkeypatch.setattr(sync, "_BUSY", PATIENCE)


@late_cases
def test_a_hook_stands_still_at_any_step(
    new_world: Callable[[], World], counts: Counter[str], case: Case
) -> None:
    calls = kill.run(world := new_world(), case.arrange(world)).calls
    turn = 0
    for number, times in pauses(calls, world.backend):
        for _ in range(times):
            one_history(new_world(), case, number, MEANWHILE[turn % len(MEANWHILE)])
            turn += 1
    counts["pauses"] += turn


def pauses(calls: Sequence[Call], backend: str) -> Iterator[tuple[int, int]]:
    """Before which calls a hook stands still, and how often.

    The decisions, and the locks between them, are the same code for either backend, so of the
    second one's looks at the world one in eight is tried.
    """
    is_first = backend == VENDOR_VFIO
    every = 1 if len(calls) < SHORT else 2 if is_first else 8
    looks = 0
    for number, call in enumerate(calls):
        if call.changes:
            yield number, 2 if is_first else 1
        elif call.name not in ("read", "close"):  # what a file shows was decided when it was opened
            looks += 1
            if looks % every == 0:
                yield number, len(MEANWHILE) if is_first and every == 1 else 1


def one_history(
    world: World, case: Case, number: int, meanwhile: Callable[[World, Guest, Child], None]
) -> None:
    world.set_policy(lock_timeout=PATIENCE, release_timeout=0.2)
    operation = case.arrange(world)
    child = Child(world, operation, Action(number, "before", "stop"))
    try:
        assert child.wait_until_stopped()
        meanwhile(world, operation.guest, child)
        child.go_on()
        check_promises(world)
        world.everything_ends()
        check_nothing_leaked(world, frozenset(world.types) if case.foreign else frozenset())
    except BaseException as error:
        ended = child.go_on()
        error.add_note(f"{case.name} stood still before {number}: {ended.calls[number].path}")
        error.add_note(f"{meanwhile.__name__}; {ended.stderr}")
        raise
    world.close()


@pytest.mark.parametrize("runs", [True, False], ids=["runs", "is between prepare and QEMU"])
def test_a_release_of_the_start_before_finds_the_device_of_the_next(
    world: World, runs: bool
) -> None:
    """It read its claim, and waits for the device's lock; by then the device is another's.

    A mediated one has the very same name, since that is made of the domain's.
    """
    guest = web1(*world.gpu(vfs=1))
    (device,) = guest.devices
    assert world.start(guest).status == 0
    before = world.claim(device)
    world.kill_qemu(guest)
    world.forget(guest)
    late = Child(
        world, Operation("release", guest), Action(0, "before", "stop", is_lock_of(device))
    )
    assert late.wait_until_stopped()
    world.restart_libvirtd()
    assert world.claim(device) is None, "the next daemon saw to it"
    assert world.hook("prepare", guest.xml).status == 0
    if runs:
        world.run_qemu(guest)
        assert world.hook("started", guest.xml).status == 0
    now = world.claim(device)
    writes = len(world.log)
    assert late.go_on().status == 0
    assert before is not None
    assert now is not None
    assert world.claim(device) == now
    assert now.claim_id != before.claim_id
    assert world.types == {device: 1152}
    assert len(world.log) == writes
    check_promises(world)
    world.everything_ends()
    check_nothing_leaked(world)


def test_nobody_begins_while_a_late_release_is_about_to_write(world: World) -> None:
    """It has looked at everything, and its next step is the write."""
    world.set_policy(lock_timeout=PATIENCE)
    guest = web1(*world.gpu(vfs=1))
    (device,) = guest.devices
    assert world.start(guest).status == 0
    world.kill_qemu(guest)
    world.forget(guest)
    late = Child(world, Operation("release", guest), Action(0, "before", "stop", is_device_write))
    assert late.wait_until_stopped()
    world.kill_libvirtd()
    world.new_libvirtd()
    refused = world.hook("prepare", guest.xml)
    assert refused.status == 1
    assert f"{device} is held by somebody else for too long" in refused.stderr
    assert late.go_on().status == 0
    assert world.types == {}
    assert world.start(guest).status == 0
    check_promises(world)
    world.everything_ends()
    check_nothing_leaked(world)


def is_lock_of(device: str) -> Callable[[Call], bool]:
    return once(lambda call: call.name == "flock" and call.path == f"state/locks/{device}")


def is_device_write(call: Call) -> bool:
    return call.name == "write" and call.path.startswith("sysfs/")


# --- inside the driver ---


def test_a_release_that_was_killed_inside_the_driver_keeps_others_away_until_it_is_out(
    world: World,
) -> None:
    """A process can't die within a driver's write, and holds the device's lock until then."""
    (place,) = world.gpu(vfs=1)
    guest, other = web1(place), web2(place)
    (device,) = guest.devices
    assert world.start(guest).status == 0
    world.kill_qemu(guest)
    world.forget(guest)
    world.set_policy(lock_timeout=0.1)
    world.call("hold", device=device, held=True)
    child = Child(world, Operation("release", guest))
    assert world.call("wait_for_writer")
    os.kill(child.pid, signal.SIGKILL)
    world.kill_libvirtd()
    world.new_libvirtd()
    for each in (guest, other):
        refused = world.hook("prepare", each.xml)
        assert refused.status == 1
        if each.devices == guest.devices:
            assert f"{device} is held by somebody else for too long" in refused.stderr
    world.call("hold", device=device, held=False)
    assert child.end().status == -signal.SIGKILL
    assert world.start(guest).status == 0
    check_promises(world)
    world.everything_ends()
    check_nothing_leaked(world)


def test_a_driver_that_takes_its_time_is_waited_for(world: World) -> None:
    world.set_driver(write_ms=150, busy_ms=100)
    guest = web1(*world.gpu(vfs=1))
    assert world.start(guest).status == 0
    world.stop(guest)
    check_nothing_leaked(world)


# --- real processes, whose daemon is found by their ancestors ---


@pytest.fixture
def real_world(new_world: Callable[[], World]) -> Iterator[World]:
    """A world of real processes, in a pid namespace of their own, of which we read all files."""
    world = new_world()
    world.paths = world.paths._replace(proc="/proc")
    world.write_config()
    entry_point(world.root)
    (world.root / "libvirtd").symlink_to("/bin/sh")
    world.write(world.root / "dispatcher", '#!/bin/sh\n"$@"\nexit $?\n').chmod(0o755)
    first = subprocess.Popen(
        ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", "sh", "-c", "echo; read _"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert first.stdout is not None
    assert first.stdout.readline() == b"\n"
    world.first_process = child_of(first)
    yield world
    first.communicate(b"\n")


def child_of(process: subprocess.Popen[Any]) -> int:
    """The pid, as we see it, of what `unshare` or `nsenter` started."""
    return psutil.Process(process.pid).children()[0].pid


BETWEEN = {
    "nothing": "{hook}",
    "sh -c": "sh -c '{hook}; exit $?'",
    "a dispatcher": "{root}/dispatcher {hook}",
    "dispatchers and sh -c": "{root}/dispatcher {root}/dispatcher sh -c '{hook}; exit $?'",
}


class Libvirtd:
    """A process called libvirtd that runs one hook, and lives on until it is killed."""

    def __init__(self, world: World, command: str, document: str, between: str = "{hook}") -> None:
        world.write(world.root / "document", document)
        script = between.format(hook=command, root=world.root)
        enter = ["nsenter", "--target", str(world.first_process), "--pid", "--mount", "--"]
        self.process = subprocess.Popen(
            [
                *enter,
                world.root / "libvirtd",
                "-c",
                f"echo $$; {script} <{world.root}/document; echo $?; read _",
            ],
            env={**world.environment, "VGPU_LIBVIRT_HOOK": str(world.root / "vgpu-libvirt-hook")},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self._number()  # in the namespace

    def _number(self) -> int:
        assert self.process.stdout is not None
        return int(self.process.stdout.readline())

    def status(self) -> int:
        """The hook's exit status."""
        return self._number()

    def kill(self) -> None:
        if self.process.poll() is None:
            os.kill(child_of(self.process), signal.SIGKILL)
            self.process.wait()


def hook_command(operation: str) -> str:
    return f"{STUB} web1 {operation} begin -"


@pytest.mark.parametrize("between", BETWEEN.values(), ids=list(BETWEEN))
def test_the_daemon_is_known_whatever_stands_between(real_world: World, between: str) -> None:
    world = real_world
    guest = web1(*world.gpu(vfs=1))
    first = Libvirtd(world, hook_command("prepare"), guest.xml, between)
    assert first.status() == 0
    claim = world.claim(guest.devices[0])
    assert claim is not None
    assert claim.daemon is not None
    assert claim.daemon.pid == first.pid
    # Another daemon's release proves nothing while the first one may still be starting QEMU.
    second = Libvirtd(world, hook_command("release"), guest.xml, between)
    assert second.status() == 0
    assert world.types
    second.kill()
    first.kill()
    third = Libvirtd(world, hook_command("release"), guest.xml, between)
    assert third.status() == 0
    check_nothing_leaked(world)


def test_a_prepare_goes_on_after_its_daemon_was_killed(real_world: World) -> None:
    world = real_world
    guest = web1(*world.gpu(vfs=1))
    (device,) = guest.devices
    world.call("hold", device=device, held=True)
    first = Libvirtd(world, hook_command("prepare"), guest.xml)
    assert world.call("wait_for_writer")
    first.kill()
    daemon_hook = f"{REPOSITORY}/hooks/daemon - start - start"
    second = Libvirtd(world, daemon_hook, "")
    assert second.status() == 0
    assert world.claim(device), "somebody is at work on it"
    world.call("hold", device=device, held=False)
    end = time.monotonic() + 20
    while (claim := world.claim(device)) and claim.phase is not Phase.CONFIGURED:
        assert time.monotonic() < end
        time.sleep(0.01)
    with locks.devices(world.paths.state, [device], end):
        assert world.types == {device: 1152}, "the orphan did its work"
    third = Libvirtd(world, daemon_hook, "")
    assert third.status() == 0
    check_nothing_leaked(world)


# --- clocks and boots ---


@pytest.mark.parametrize("later", [0.0, 1.0, 4e9], ids=["epoch", "a second", "2096"])
def test_the_wall_clock_means_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch, later: float
) -> None:
    (place,) = world.gpu(vfs=1)
    guest = web1(place)
    (device,) = guest.devices
    assert world.hook("prepare", guest.xml).status == 0
    claim = world.claim(device)
    assert claim is not None
    reserved = claim._replace(phase=Phase.RESERVED)
    for phase in (claim, reserved):
        store.replace(world.paths.state, phase)
        monkeypatch.setattr(time, "time", lambda: later)
        assert world.hook("prepare", web2(place).xml).status == 1
        assert world.daemon_hook().status == 0
        assert world.claim(device) == phase
    assert world.start(guest).status == 0
    monkeypatch.undo()
    world.stop(guest)
    check_nothing_leaked(world)


def test_numbers_of_another_boot_mean_nothing(world: World) -> None:
    """The daemon and the QEMU have, by chance, the pids and start times of those before."""
    (place,) = world.gpu(vfs=1)
    guest = web1(place)
    assert world.start(guest).status == 0
    numbers = world.claim(*guest.devices)
    assert numbers is not None
    assert numbers.daemon is not None
    assert numbers.qemu is not None
    world.reboot()
    check_nothing_leaked(world)
    store.create(world.paths.state, numbers)
    world.process(numbers.qemu.pid, "postgres", numbers.qemu.start)
    world.process(numbers.daemon.pid, "libvirtd", numbers.daemon.start)
    if world.is_mdev:
        assert world.daemon_hook().status == 0  # the room that another's takes is for a sync
    assert world.start(web2(place)).status == 0
    check_promises(world)


def test_without_the_boot_nothing_begins_and_nothing_ends(world: World) -> None:
    place, other, *_ = world.gpu()
    guest = web1(place)
    assert world.start(guest).status == 0
    world.kill_qemu(guest)
    world.forget(guest)
    path = world.proc / "sys/kernel/random/boot_id"
    path.rename(path.with_name("hidden"))
    assert "(boot_id) can't be read" in world.hook("release", guest.xml).stderr
    assert "boot_id can't be read" in world.hook("prepare", web2(other).xml).stderr
    assert world.types == {guest.devices[0]: 1152}
    path.with_name("hidden").rename(path)
    assert world.hook("release", guest.xml).stderr == ""
    check_nothing_leaked(world)


def test_a_domain_that_stopped_asking_is_not_started_into_its_own_late_release(
    world: World,
) -> None:
    """Its hostdev stayed, its request went: nobody locks the device for it."""
    world.set_policy(lock_timeout=PATIENCE)
    guest = web1(*world.gpu(vfs=1))
    assert world.start(guest).status == 0
    world.kill_qemu(guest)
    world.forget(guest)
    calls = kill.run(world, Operation("release", guest)).calls
    write = next(n for n, call in enumerate(calls) if call.name == "write" and "sysfs" in call.path)
    assert world.start(guest).status == 0
    world.kill_qemu(guest)
    world.forget(guest)
    child = Child(world, Operation("release", guest), Action(write, "before", "stop"))
    assert child.wait_until_stopped()
    world.kill_libvirtd()
    world.new_libvirtd()
    refused = world.hook("prepare", guest._replace(profile="").xml)
    assert refused.status == 3
    assert "a vGPU that it has from an earlier run" in refused.stderr
    child.go_on()
    check_nothing_leaked(world)
