# SPDX-License-Identifier: LGPL-2.1-or-later
"""Every operation killed at every step, and what libvirt or another domain does then.

Between two calls that count nothing changes, so the instant after one is the instant before the
next. Every instant at which the world is another one is killed at twice, with two different
continuations; see kill.instants.
"""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from tests.faults import cases, kill
from tests.faults.cases import CASES, Case
from tests.faults.kill import Action
from tests.faults.world import check_nothing_leaked, check_promises, web1, web2

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable

    from tests.faults.kill import Operation
    from tests.faults.world import Guest, World

pytestmark = pytest.mark.promise(1, 2, 3, 4, 7)

SIGKILL = -9
every_case = cases.each(CASES)


# --- what may come after a kill ---


def libvirt_goes_on(world: World, operation: Operation, case: Case) -> None:
    """What the same daemon does after this hook, which it takes for failed, or doesn't care."""
    guest = operation.guest
    if operation.name == "stopped":
        # The case is a QEMU that libvirt could not kill.
        world.forget(guest)
        assert world.hook("release", guest.xml).status == 0
        check_promises(world)
    elif operation.name not in ("release", "daemon"):
        world.stop(guest)


def libvirt_is_restarted(world: World, operation: Operation, case: Case) -> None:
    world.restart_libvirtd()


def another_domain_comes(world: World, operation: Operation, case: Case) -> None:
    """Another domain is started at the same place, before libvirt has seen to this one."""
    guest = operation.guest
    other = web2(*guest.places)
    result = world.start(other)
    if guest in world.running and {*other.devices} & {*guest.devices}:
        assert result.status == 1, "the device of a living domain was given away"
    check_promises(world)
    libvirt_goes_on(world, operation, case)


def it_is_started_again(world: World, operation: Operation, case: Case) -> None:
    guest = operation.guest
    libvirt_goes_on(world, operation, case)
    if guest in world.running:
        world.kill_qemu(guest)
        world.forget(guest)
    check_promises(world)
    assert _start(world, guest) == 0 or case.may_be_refused


def it_is_started_at_once(world: World, operation: Operation, case: Case) -> None:
    """As after a restart of libvirt, which forgot that the first start failed."""
    guest = operation.guest
    if guest not in world.running:
        world.kill_libvirtd()
        world.new_libvirtd()
        assert _start(world, guest) == 0 or case.may_be_refused


def _start(world: World, guest: Guest) -> int:
    result = world.start(guest)
    assert result.status == 0 or result.stderr.count("\n") == 1, result.stderr
    return result.status


CONTINUATIONS = (
    libvirt_goes_on,
    libvirt_is_restarted,
    another_domain_comes,
    it_is_started_again,
    it_is_started_at_once,
)


def everything_ends(world: World, case: Case) -> None:
    world.everything_ends()
    foreign = frozenset(world.types) if case.foreign else frozenset[str]()
    if case.rewritten and world.types:
        check_promises(world)
        for device in world.types:
            world.set_type(device, 0)
        world.restart_libvirtd()
    check_nothing_leaked(world, foreign)


# --- the tests ---


@every_case
def test_an_operation_that_is_not_disturbed(
    new_world: Callable[[], World], counts: Counter[str], case: Case
) -> None:
    for continuation in CONTINUATIONS:
        world = new_world()
        operation = case.arrange(world)
        ended = kill.run(world, operation)
        assert ended.status == case.status, ended.stderr
        check_promises(world)
        continuation(world, operation, case)
        check_promises(world)
        everything_ends(world, case)
    counts["operations"] += 1


@every_case
def test_killed_at_every_step(
    new_world: Callable[[], World], counts: Counter[str], case: Case
) -> None:
    calls = kill.run(world := new_world(), case.arrange(world)).calls
    turn = 0
    for number, when in kill.instants(calls, world.backend):
        continuation = CONTINUATIONS[turn % len(CONTINUATIONS)]
        turn += 1
        one_history(new_world(), case, Action(number, when, "kill"), continuation)
    counts["kill_points"] += turn


def one_history(
    world: World,
    case: Case,
    action: Action,
    continuation: Callable[[World, Operation, Case], None],
) -> None:
    """Kill the operation as ACTION says, then let the world go on."""
    operation = case.arrange(world)
    try:
        ended = kill.run(world, operation, action)
        assert ended.status == SIGKILL, "it made other calls than the first time"
        check_promises(world)
        continuation(world, operation, case)
        check_promises(world)
        everything_ends(world, case)
    except BaseException as error:
        error.add_note(f"{case.name}: {action}, then {continuation.__name__}; {ended.calls[-3:]}")
        raise
    world.close()


@cases.mdevs_alone
def test_an_mdev_that_was_killed_before_its_parameters_has_them_at_the_next_start(
    world: World,
) -> None:
    """It was to arrive, so what was made of it is still reserved."""
    guest = web1(*world.gpu(vfs=1), params="frame_rate_limiter=0")
    is_params = Action(0, "before", "kill", lambda call: call.path.endswith("vgpu_params"))
    assert kill.run(world, kill.Operation("restore", guest), is_params).status == SIGKILL
    assert world.types == {guest.devices[0]: 1152}
    assert world.start(guest).status == 0
    place = world.sysfs / "bus/mdev/devices" / guest.devices[0]
    assert (place / "nvidia/vgpu_params").read_text() == "frame_rate_limiter=0\n"
    world.stop(guest)
    check_nothing_leaked(world)


def test_what_is_reserved_for_another_profile_is_made_anew(world: World) -> None:
    """The arrival failed, its definition was changed, and it is started before that lapsed."""
    guest = web1(*world.gpu(vfs=1))
    assert world.hook("restore", guest.xml).status == 0
    assert world.types == {guest.devices[0]: 1152}
    other = guest._replace(profile="NVIDIA L40S-2Q")
    assert world.start(other).status == 0
    assert world.types == {guest.devices[0]: 1148}
    world.stop(other)
    check_nothing_leaked(world)


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
@every_case
def test_the_calls_that_count_are_all_that_the_kernel_sees(
    new_world: Callable[[], World], counts: Counter[str], case: Case
) -> None:
    world = new_world()
    ended = kill.run(world, case.arrange(world))
    world = new_world()
    seen = kill.traced(world, case.arrange(world))
    assert [f"{call.name} {call.path}" for call in ended.calls] == seen
    counts["calls_seen_by_strace"] += len(seen)
