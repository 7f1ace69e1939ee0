# SPDX-License-Identifier: LGPL-2.1-or-later
"""The power goes at any instant of any operation: what was not fsynced may be gone.

The calls of one whole run are replayed up to each of them; the host boots with what that left.
"""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from tests.faults import disk, kill
from tests.faults.cases import CASES, Case
from tests.faults.disk import Disk
from tests.faults.world import check_nothing_leaked
from vgpu_libvirt.claims import store

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable

    from tests.faults.kill import Call
    from tests.faults.world import World

pytestmark = pytest.mark.promise(3, 5)

KEPT = ("fsynced", "names", "all")
CURRENT = "/nvidia/current_vgpu_type"
every_case = pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])


@every_case
def test_a_boot_after_a_power_cut_at_every_step(
    new_world: Callable[[], World], counts: Counter[str], case: Case
) -> None:
    world = new_world()
    operation = case.arrange(world)
    on_disk = Disk(world.state)
    calls = kill.run(world, operation).calls
    outcomes = {}
    for call in (None, *calls):
        if call:
            on_disk.apply(call)
        for kept in KEPT:
            left = on_disk.left(kept)
            outcomes[tuple(left.items())] = left
    for left in outcomes.values():
        boot_with(new_world(), case, left)
    counts["instants"] += len(calls) + 1
    counts["boots"] += len(outcomes)


def boot_with(world: World, case: Case, left: dict[str, str | None]) -> None:
    operation = case.arrange(world)
    shutil.rmtree(world.state, ignore_errors=True)
    disk.write(left, world.state)
    assert store.read_all(world.paths.state).unreadable == {}
    world.reboot()
    check_nothing_leaked(world)
    assert world.start(operation.guest).status == 0 or case.may_be_refused
    world.everything_ends()
    check_nothing_leaked(world)
    world.close()


@every_case
def test_the_claim_is_on_disk_before_any_write_and_goes_after_the_device_was_read_clear(
    world: World, counts: Counter[str], case: Case
) -> None:
    operation = case.arrange(world)
    on_disk = Disk(world.state)
    shown: dict[str, str] = {}  # what each device showed when it was read last
    for call in kill.run(world, operation).calls:
        if call.path.endswith(CURRENT):
            check_access(call, on_disk, shown)
            counts["accesses"] += 1
        elif call.name == "unlink" and call.path.startswith("state/claims/"):
            device = call.path.removeprefix("state/claims/").removesuffix(".json")
            assert shown[device] == "0", f"{device}'s claim went while it showed {shown[device]}"
        on_disk.apply(call)


def check_access(call: Call, on_disk: Disk, shown: dict[str, str]) -> None:
    device = call.path.removesuffix(CURRENT).rpartition("/")[2]
    if call.name == "write":
        claim = f"state/claims/{device}.json"
        assert on_disk.left("fsynced").get(claim), f"{device} was written to before its claim was"
        shown[device] = "unread since the last write"
    elif call.name == "read" and call.result.strip():
        shown[device] = call.result.strip()
