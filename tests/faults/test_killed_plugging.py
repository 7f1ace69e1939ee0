# SPDX-License-Identifier: LGPL-2.1-or-later
"""Plugging in and out killed at every step, and what comes then.

The domain lives on all the while, so nothing but its own devices shows what became of it.
"""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING

import pytest

from tests.faults import kill
from tests.faults.cases import Case
from tests.faults.kill import Action
from tests.faults.plugging import lapse, plug, running, unplug
from tests.faults.world import check_nothing_leaked, check_promises, web2
from vgpu_libvirt import sync
from vgpu_libvirt.claims.model import Phase
from vgpu_libvirt.lifecycle.context import Context

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable

    from tests.faults.kill import Operation
    from tests.faults.world import Guest, World

pytestmark = pytest.mark.promise(1, 2, 3, 4)

SIGKILL = -9


def _plug(refuses: str, world: World) -> Operation:
    world.gpu(vfs=1)
    return plug(world, running(world), refuses)


def _unplug(lets_go: bool, world: World) -> Operation:
    return unplug(world, running(world, *world.gpu(vfs=1)), lets_go)


def _unplug_unnoted(world: World) -> Operation:
    """`started` never came, so no claim knows the QEMU."""
    guest = web2(*world.gpu(vfs=1))
    assert world.hook("prepare", guest.xml).status == 0
    world.run_qemu(guest)
    return unplug(world, guest)


CASES = [
    Case("attach", functools.partial(_plug, "")),
    Case("attach-metadata-refused", functools.partial(_plug, "setMetadata live"), status=1),
    Case("attach-refused", functools.partial(_plug, "attachDeviceFlags live"), status=1),
    Case("detach", functools.partial(_unplug, True)),
    Case("detach-not-let-go", functools.partial(_unplug, False), status=1),
    Case("detach-unnoted", _unplug_unnoted),
]
every_case = pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])


# --- what may come after a kill; the guest is as it runs by then ---


def _sync(world: World) -> None:
    sync.reconcile(Context(world.config), time.monotonic() + 5)
    check_promises(world)


def the_domain_ends(world: World, guest: Guest) -> None:
    world.stop(guest)
    check_nothing_leaked(world)


def sync_comes_in_time_and_again(world: World, guest: Guest) -> None:
    """While it may still be plugged in nothing is taken; then what isn't its device comes back."""
    before = world.types
    reserved = [name for name in before if (c := world.claim(name)) and c.phase is Phase.RESERVED]
    _sync(world)
    assert all(world.types[name] == before[name] for name in reserved), "P4: too early"
    lapse(world)
    _sync(world)
    assert set(world.types) == set(guest.devices), "leaked while the domain lives"
    for device in guest.devices:
        claim = world.claim(device)
        assert claim is not None
        assert claim.phase is Phase.RUNNING


def libvirt_is_restarted(world: World, guest: Guest) -> None:
    """The one that was asked is gone, so it is over at once."""
    world.restart_libvirtd()
    assert set(world.types) == set(guest.devices)


def another_domain_comes(world: World, guest: Guest) -> None:
    (place,) = world.places
    other = web2(place)._replace(name="web3", uuid="aaaaaaaa-0000-0000-0000-000000000003", number=9)
    result = world.start(other)
    assert not (result.status == 0 and guest.places), "a living domain's device given away"
    check_promises(world)
    lapse(world)
    if result.status and not guest.places:
        if world.is_mdev:
            _sync(world)  # another's mdev is in the way by the room that it takes
        assert world.start(other).status == 0, "once it lapsed nothing stands in the way"
    check_promises(world)


def it_is_started_again(world: World, guest: Guest) -> None:
    """Killed with its libvirtd, so that no hook saw it end; it names the same device."""
    world.kill_libvirtd()
    world.kill_qemu(guest)
    world.forget(guest)
    world.new_libvirtd()
    assert world.start(guest._replace(places=tuple(world.places))).status == 0
    check_promises(world)


def it_is_tried_again(world: World, guest: Guest) -> None:
    lapse(world)
    _sync(world)
    again = unplug(world, guest) if guest.places else plug(world, guest)
    ended = kill.run(world, again)
    assert ended.status == 0, ended.stderr
    now = world.look_at(guest)
    assert bool(now.places) != bool(guest.places)
    assert set(world.types) == set(now.devices)


CONTINUATIONS = (
    the_domain_ends,
    sync_comes_in_time_and_again,
    libvirt_is_restarted,
    another_domain_comes,
    it_is_started_again,
    it_is_tried_again,
)


# --- the tests ---


@every_case
def test_not_disturbed(new_world: Callable[[], World], case: Case) -> None:
    for continuation in CONTINUATIONS:
        world = new_world()
        operation = case.arrange(world)
        ended = kill.run(world, operation)
        assert ended.status == case.status, ended.stderr
        guest = world.look_at(operation.guest)
        check_promises(world)
        assert set(world.types) == set(guest.devices)
        continuation(world, guest)
        check_promises(world)
        world.everything_ends()
        check_nothing_leaked(world)


@every_case
def test_killed_at_every_step(
    new_world: Callable[[], World], counts: Counter[str], case: Case
) -> None:
    calls = kill.run(world := new_world(), case.arrange(world)).calls
    assert any(call.name == "libvirt" for call in calls)
    turn = 0
    for number, when in kill.instants(calls, world.backend):
        times = len(CONTINUATIONS) if calls[number].name in ("libvirt", "write") else 1
        counts["kill_points"] += 1
        for _ in range(times):
            continuation = CONTINUATIONS[turn % len(CONTINUATIONS)]
            turn += 1
            one_history(new_world(), case, Action(number, when, "kill"), continuation)
    counts["histories"] += turn


def one_history(
    world: World, case: Case, action: Action, continuation: Callable[[World, Guest], None]
) -> None:
    """Kill the operation as ACTION says, then let the world go on."""
    operation = case.arrange(world)
    try:
        ended = kill.run(world, operation, action)
        assert ended.status == SIGKILL, "it made other calls than the first time"
        guest = world.look_at(operation.guest)
        check_promises(world)
        continuation(world, guest)
        check_promises(world)
        world.everything_ends()
        check_nothing_leaked(world)
    except BaseException as error:
        error.add_note(f"{case.name}: {action}, then {continuation.__name__}; {ended.calls[-3:]}")
        raise
    world.close()
