# SPDX-License-Identifier: LGPL-2.1-or-later
"""Rules that mediated devices have alone: where they are made, and whose a UUID is."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

from tests.faults.cases import OTHER_GPU, mdevs_alone
from tests.faults.kill import Action, Child, Operation, once
from tests.faults.world import ANY, Guest, check_nothing_leaked, check_promises, web1, web2
from tests.unit.host import WEB1, WEB2
from vgpu_libvirt.claims import store

if TYPE_CHECKING:
    from tests.faults.kill import Call
    from tests.faults.world import World

pytestmark = [pytest.mark.promise(1, 2, 3, 5), mdevs_alone]


# --- where it is made ---


def is_about_to_claim(call: Call) -> bool:
    """What a start does once it has looked at the host."""
    return call.name == "flock" and call.path == "state/lock"


def is_about_to_make(call: Call) -> bool:
    return call.name == "write" and call.path.endswith("/create")


def between_look_and_claim(world: World, guest: Guest) -> Child:
    child = Child(
        world, Operation("prepare", guest), Action(0, "before", "stop", once(is_about_to_claim))
    )
    assert child.wait_until_stopped()
    return child


def test_the_last_room_that_was_claimed_since_a_start_looked_is_not_claimed_again(
    world: World,
) -> None:
    first, second = web1(*world.gpu(vfs=1)), web2(ANY)
    late = between_look_and_claim(world, first)
    assert world.start(second).status == 0
    ended = late.go_on()
    assert ended.status == 1
    assert "web2" in ended.stderr
    assert [write.result for write in world.log] == ["ok"], "nobody asked the driver in vain"
    check_promises(world)


def test_other_room_is_found_at_once(world: World) -> None:
    world.gpu(vfs=2)
    first, second = web1(ANY), web2(ANY)
    late = between_look_and_claim(world, first)
    assert world.start(second).status == 0
    assert late.go_on().status == 0
    assert set(world.types) == {*first.devices, *second.devices}
    assert [write.result for write in world.log] == ["ok", "ok"]
    check_promises(world)


def test_a_parent_at_which_others_were_faster_has_not_refused(world: World) -> None:
    """However often; only what the driver has no reason to refuse is tried a few times."""
    world.gpu(vfs=6)
    guest = web1(ANY)
    child = Child(world, Operation("prepare", guest), Action(0, "before", "stop", is_about_to_make))
    others = [f"{number:08}-0000-0000-0000-000000000000" for number in range(5)]
    for other in others:
        assert child.wait_until_stopped()
        world.set_type(other, 1152)
        os.kill(child.pid, signal.SIGCONT)
    assert child.wait_until_stopped()
    assert child.go_on().status == 0
    assert set(world.types) == {*others, *guest.devices}
    assert [write.result for write in world.log] == ["EIO"] * 5 + ["ok"]
    check_promises(world)


@pytest.mark.parametrize("vfs", [2, 6])
def test_where_the_driver_refuses_it_is_made_elsewhere(world: World, vfs: int) -> None:
    """On another parent each time, and some only: each may take its time."""
    world.gpu(vfs=vfs)
    guest = web1(ANY)
    world.call("fail", device=guest.devices[0], result="EIO", times=vfs - 1)
    result = world.start(guest)
    assert result.status == (0 if vfs == 2 else 1)
    assert len(world.log) == min(vfs, 4)
    if result.status:
        assert "(before that, 0000:3d:00.4, 0000:3d:00.5, 0000:3d:00.6 failed)" in result.stderr
        check_nothing_leaked(world)


def test_its_claim_tells_the_gpu_on_which_it_was_made_in_the_end(world: World) -> None:
    """What another try claimed before is no more."""
    guest = web1(*world.gpu(vfs=1), *world.gpu(OTHER_GPU, vfs=1))._replace(places=(ANY,))
    (device,) = guest.devices
    world.call("fail", device=device, result="EIO", times=1)
    assert world.start(guest).status == 0
    claim = world.claim(device)
    assert claim is not None
    assert claim.gpu == world.gpu_of(device) == OTHER_GPU
    world.stop(guest)
    check_nothing_leaked(world)


# --- whose a UUID is ---


def test_another_domains_mdev_is_refused(world: World) -> None:
    owner = web1(*world.gpu())
    owner = owner._replace(places=(ANY,))
    assert world.start(owner).status == 0
    thief = web2(*owner.devices)
    refused = world.start(thief)
    assert refused.status == 1
    assert f"names the mediated device {owner.devices[0]}, not {web2(ANY).devices[0]}" in (
        refused.stderr
    )
    check_promises(world)


@pytest.mark.promise(7)
def test_a_domain_that_did_not_ask_gets_no_others_mdev(world: World) -> None:
    world.gpu()
    owner = web1(ANY)
    assert world.start(owner).status == 0
    bystander = web2(*owner.devices, profile="")
    refused = world.hook("prepare", bystander.xml)
    assert refused.status == 3
    assert f"belongs to domain 'web1' ({WEB1})" in refused.stderr
    world.stop(owner)
    assert world.hook("prepare", bystander.xml).status == 0
    check_promises(world)


def test_an_mdev_of_its_uuid_that_nobody_claimed_is_left_alone(world: World) -> None:
    """As after the store was lost; what to do is said."""
    guest = web1(*world.gpu(vfs=1))
    (device,) = guest.devices
    world.set_type(device, 1152)
    refused = world.start(guest)
    assert refused.status == 1
    assert f"{device} has type nvidia-1152, which vgpu-libvirt didn't set" in refused.stderr
    assert "write 1 to its 'remove'" in refused.stderr
    assert world.types == {device: 1152}
    assert world.log == []


@pytest.mark.parametrize("what", ["another type", "another GPU"])
def test_an_mdev_that_somebody_made_anew_is_kept(world: World, what: str) -> None:
    world.gpu(vfs=1)
    guest = web1(ANY)
    (device,) = guest.devices
    assert world.start(guest).status == 0
    world.kill_qemu(guest)
    world.forget(guest)
    if what == "another type":
        world.set_type(device, 1148)
    else:
        claim = world.claim(device)
        assert claim is not None
        store.replace(world.paths.state, claim._replace(gpu=OTHER_GPU))
    told = world.hook("release", guest.xml)
    assert "somebody else made it" in told.stderr
    assert device in world.types
    assert world.claim(device), "visibly"
    assert [write.value for write in world.log] == ["1152"]


# --- what can't be told ---


def test_an_incomplete_list_of_domains_stops_no_removal(world: World) -> None:
    """Nobody else ever has this UUID, so the other witnesses are enough."""
    guest = web1(*world.gpu(vfs=1))
    assert world.start(guest).status == 0
    world.write(world.status_file("odd"), "<domstatus")
    world.stop(guest)
    check_nothing_leaked(world)


def test_a_qemu_that_outlives_its_domain_keeps_its_mdev(world: World) -> None:
    """A removal would wait for it, and take it from its guest at once."""
    guest = web1(*world.gpu(vfs=1))
    (device,) = guest.devices
    assert world.start(guest).status == 0
    assert world.hook("stopped", guest.xml).status == 0
    world.forget(guest)
    assert "is held open by process" in world.hook("release", guest.xml).stderr
    assert world.hook("prepare", guest.xml).status == 1
    assert world.daemon_hook().status == 0
    assert world.types == {device: 1152}
    check_promises(world)
    world.kill_qemu(guest)
    assert world.daemon_hook().status == 0
    check_nothing_leaked(world)


def test_two_domains_of_one_alias_have_two(world: World) -> None:
    world.gpu(vfs=2)
    first, second = web1(ANY), web2(ANY)
    for guest in (first, second):
        assert world.start(guest).status == 0
    assert len({*first.devices, *second.devices}) == 2
    owners = {name: c.domain_uuid for name, c in store.read_all(world.paths.state).readable.items()}
    assert owners == {first.devices[0]: WEB1, second.devices[0]: WEB2}
