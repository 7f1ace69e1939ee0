# SPDX-License-Identifier: LGPL-2.1-or-later
"""Carving, giving back and programming again killed at every step, or met there by a guest.

Whatever was killed, after the next sync a device is carved and has its type, or is free.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

import pytest

from tests.faults import carving, kill
from tests.faults.carving import COUNT, GPU, command_is_gone, plain, sync_with_libvirt
from tests.faults.cases import Case, vfs_alone
from tests.faults.kill import Action, Child
from tests.faults.world import check_nothing_leaked, check_promises, web2
from vgpu_libvirt.claims import processes, store
from vgpu_libvirt.claims.model import Phase

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable

    from tests.faults.kill import Operation
    from tests.faults.world import World

pytestmark = [pytest.mark.promise(1, 2, 3, 4), vfs_alone]  # no others can be carved

SIGKILL = -9


def _here(world: World) -> None:
    """Carve in a child, as a command of its own."""
    ended = kill.run(world, carving.carve(world))
    assert ended.status == 0, ended.stderr
    command_is_gone(world)


def _carve(world: World) -> Operation:
    world.gpu(str(GPU), vfs=COUNT)
    return carving.carve(world)


def _refused(world: World) -> Operation:
    vfs = world.gpu(str(GPU), vfs=COUNT)
    world.call("fail", device=vfs[1], result="EIO")
    return carving.carve(world)


def _uncarve(world: World) -> Operation:
    world.gpu(str(GPU), vfs=COUNT)
    _here(world)
    return carving.uncarve(world)


def _uncarve_used(world: World) -> Operation:
    vfs = world.gpu(str(GPU), vfs=COUNT)
    _here(world)
    assert world.start(plain(vfs[0])).status == 0
    return carving.uncarve(world)


def _boot(world: World) -> Operation:
    world.gpu(str(GPU), vfs=COUNT)
    _here(world)
    carving.power_fails(world)
    world.new_libvirtd()
    return carving.sync_at_boot(world)


CASES = [
    Case("carve", _carve),
    Case("carve-refused", _refused, status=1),
    Case("uncarve", _uncarve),
    Case("uncarve-used", _uncarve_used, status=1),
    Case("boot", _boot),
]
every_case = pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])


def carved(world: World) -> set[str]:
    claims = store.read_all(world.paths.state).readable.values()
    return {claim.device for claim in claims if claim.phase is Phase.CARVED}


def check_settled(world: World) -> None:
    """Every device is carved, in this boot, and has its type; or nobody's."""
    check_promises(world)
    claims = store.read_all(world.paths.state).readable
    assert set(world.types) == set(claims) == carved(world)
    boot = processes.boot_id(world.paths.proc)
    assert all(claim.boot_id == boot for claim in claims.values())


# --- what may come after a kill ---


def sync_comes(world: World) -> None:
    sync_with_libvirt(world)
    check_settled(world)


def libvirt_is_restarted(world: World) -> None:
    world.restart_libvirtd()
    check_settled(world)


def the_power_fails(world: World) -> None:
    before = carved(world)
    carving.power_fails(world)
    world.start_libvirtd()
    check_settled(world)
    assert carved(world) == before, "what was carved still is, and nothing else"


def a_domain_that_asks_comes(world: World) -> None:
    for vf in world._types():
        guest = web2(vf)
        result = world.start(guest)
        claim = world.claim(vf)
        if result.status == 0:
            assert claim is not None
            assert claim.domain_uuid == guest.uuid
            world.stop(guest)
        check_promises(world)
    sync_comes(world)


def a_domain_that_does_not_ask_comes(world: World) -> None:
    for vf in world._types():
        guest = plain(vf)
        if guest in world.running:
            continue
        may = vf in carved(world) and vf in world.types
        others = [other for other in world.running if other.uuid == guest.uuid]
        for other in others:
            world.stop(other)
        assert (world.start(guest).status == 0) == may
        check_promises(world)
        sync_with_libvirt(world)
        assert not may or vf in carved(world)
        check_promises(world)
    sync_comes(world)


def it_is_carved_again(world: World) -> None:
    sync_with_libvirt(world)
    if kill.run(world, carving.carve(world)).status:
        _here(world)  # the driver refused once
    assert carved(world) == set(world._types())
    check_settled(world)


def it_is_given_back_again(world: World) -> None:
    used = {vf for guest in world.running for vf in guest.devices}
    kill.run(world, carving.uncarve(world))
    assert set(world.types) == used
    command_is_gone(world)
    check_promises(world)


CONTINUATIONS = (
    sync_comes,
    libvirt_is_restarted,
    the_power_fails,
    a_domain_that_asks_comes,
    a_domain_that_does_not_ask_comes,
    it_is_carved_again,
    it_is_given_back_again,
)


def everything_ends(world: World) -> None:
    """All domains die, and the administrator wants everything back."""
    world.everything_ends()
    ended = kill.run(world, carving.uncarve(world))
    assert ended.status == 0, ended.stderr
    command_is_gone(world)
    check_nothing_leaked(world)


# --- the tests ---


@every_case
def test_not_disturbed(new_world: Callable[[], World], case: Case) -> None:
    for continuation in CONTINUATIONS:
        world = new_world()
        operation = case.arrange(world)
        ended = kill.run(world, operation)
        assert ended.status == case.status, ended.stderr
        command_is_gone(world)
        if case.name != "uncarve-used":
            check_settled(world)
        continuation(world)
        everything_ends(world)


@every_case
def test_killed_at_every_step(
    new_world: Callable[[], World], counts: Counter[str], case: Case
) -> None:
    calls = kill.run(world := new_world(), case.arrange(world)).calls
    turn = 0
    for number, call in enumerate(calls):
        for when in ("before", "after") if call.changes else ("before",):
            decides = call.name in ("rename", "link") or call.path.endswith("current_vgpu_type")
            times = len(CONTINUATIONS) if decides and call.changes else 1
            for _ in range(times):
                continuation = CONTINUATIONS[turn % len(CONTINUATIONS)]
                turn += 1
                one_history(new_world(), case, Action(number, when, "kill"), continuation)
    counts["kill_points"] += len(calls) + 1
    counts["histories"] += turn


def one_history(
    world: World, case: Case, action: Action, continuation: Callable[[World], None]
) -> None:
    """Kill the operation as ACTION says, then let the world go on."""
    operation = case.arrange(world)
    try:
        ended = kill.run(world, operation, action)
        assert ended.status == SIGKILL, "it made other calls than the first time"
        command_is_gone(world)
        check_promises(world)
        continuation(world)
        check_promises(world)
        everything_ends(world)
    except BaseException as error:
        error.add_note(f"{case.name}: {action}, then {continuation.__name__}; {ended.calls[-3:]}")
        raise
    world.close()


@pytest.mark.parametrize("how", ["starts", "begins to start"])
@pytest.mark.parametrize("case", [CASES[0], CASES[2], CASES[4]], ids=lambda case: case.name)
def test_a_guest_comes_at_every_step(
    new_world: Callable[[], World], counts: Counter[str], case: Case, how: str
) -> None:
    """A domain that doesn't ask; or its `prepare` alone, and libvirt has it active from then on."""
    calls = kill.run(world := new_world(), case.arrange(world)).calls
    for number, _call in enumerate(calls):
        world = new_world()
        world.set_policy(lock_timeout=0.1)  # that a lock is waited for isn't what this shows
        child = Child(world, case.arrange(world), Action(number, "before", "stop"))
        try:
            assert child.wait_until_stopped()
            guest = plain(next(iter(world._types())))
            if how == "starts":
                world.start(guest)
                child.go_on()
            else:
                passed = carving.begins_to_start(world, guest)
                child.go_on()
                if passed and world.hook("start", guest.xml).status == 0:
                    world.run_qemu(guest)
            command_is_gone(world)
            check_promises(world)
            sync_with_libvirt(world)
            check_promises(world)
            for running in world.running:
                assert {*running.devices} <= carved(world)
            carving.is_over(world)
            everything_ends(world)
        except BaseException as error:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, 9)
            error.add_note(f"{case.name} stopped before {number}: {calls[number]}")
            raise
        world.close()
    counts["stops"] += len(calls)
