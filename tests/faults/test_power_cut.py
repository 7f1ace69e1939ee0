# SPDX-License-Identifier: LGPL-2.1-or-later
"""The power goes at any instant of any operation: what was not fsynced may be gone.

The calls of one whole run are replayed up to each of them; the host boots with what that left.
"""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, NamedTuple

import pytest

from tests.faults import cases, disk, kill
from tests.faults.cases import CASES, Case
from tests.faults.disk import Disk
from tests.faults.world import VENDOR_VFIO, check_nothing_leaked
from vgpu_libvirt.claims import store
from vgpu_libvirt.devices.mdev import UUID

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Hashable

    from tests.faults.kill import Call
    from tests.faults.world import World

pytestmark = pytest.mark.promise(3, 5)

KEPT = ("fsynced", "names", "all")
every_case = cases.each(CASES)


@every_case
def test_a_boot_after_a_power_cut_at_every_step(
    new_world: Callable[[], World], counts: Counter[str], case: Case
) -> None:
    world = new_world()
    operation = case.arrange(world)
    on_disk = Disk(world.state)
    calls = kill.run(world, operation).calls
    outcomes: dict[Hashable, dict[str, str | None]] = {}
    for call in (None, *calls):
        if call:
            on_disk.apply(call)
        for kept in KEPT:
            left = on_disk.left(kept)
            outcomes[tuple(left.items())] = left
    # What a boot finds of the store is the same with either backend, and no mdev outlives one.
    step = 1 if world.backend == VENDOR_VFIO else 4
    for left in list(outcomes.values())[::step]:
        boot_with(new_world(), case, left)
        counts["boots"] += 1
    counts["instants"] += len(calls) + 1


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
        if access := access_of(call):
            check_access(access, on_disk, shown)
            counts["accesses"] += 1
        elif call.name == "unlink" and call.path.startswith("state/claims/"):
            device = call.path.removeprefix("state/claims/").removesuffix(".json")
            assert shown[device] == CLEAR, f"{device}'s claim went while it {shown[device]}"
        on_disk.apply(call)


CLEAR = "is clear"
WRITTEN = "is unread since the last write"


class Access(NamedTuple):
    """That a device was written to, or what it showed when it was read."""

    device: str
    shows: str


def access_of(call: Call) -> Access | None:
    """What CALL is to a device; None: nothing."""
    above, _, name = call.path.rpartition("/")
    if name == "current_vgpu_type":
        device = above.rpartition("/")[0].rpartition("/")[2]
        if call.name == "write":
            return Access(device, WRITTEN)
        if call.name == "read" and call.result.strip():
            return Access(device, CLEAR if call.result.strip() == "0" else "has a type")
    if call.name == "write" and name in ("create", "remove"):
        return Access(call.detail if name == "create" else above.rpartition("/")[2], WRITTEN)
    # An mdev is gone when neither the bus nor its parent has it any more.
    if call.name in ("readlink", "stat") and UUID.fullmatch(name) and "/mdev" in above:
        return Access(name, CLEAR if call.result == "ENOENT" else "is there")
    return None


def check_access(access: Access, on_disk: Disk, shown: dict[str, str]) -> None:
    device = access.device
    if access.shows == WRITTEN:
        claim = f"state/claims/{device}.json"
        assert on_disk.left("fsynced").get(claim), f"{device} was written to before its claim was"
    shown[device] = access.shows
