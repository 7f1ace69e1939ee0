# SPDX-License-Identifier: LGPL-2.1-or-later
"""Drivers with other habits: whatever they list, refuse, delay or ignore, the promises hold."""

from __future__ import annotations

import errno
import itertools
import os
import threading
import time
import uuid
from typing import TYPE_CHECKING

import pytest

from tests.faults.cases import OTHER_GPU, mdevs_alone, vfs_alone
from tests.faults.gpus import ERRNOS
from tests.faults.world import (
    MDEV,
    VENDOR_VFIO,
    Guest,
    check_nothing_leaked,
    check_promises,
    web1,
    web2,
)
from vgpu_libvirt import fs
from vgpu_libvirt.devices import backend, mdev

if TYPE_CHECKING:
    from tests.faults.world import World

HABITS = [
    dict(zip(("errnos", "own_list", "header"), habits, strict=True))
    for habits in itertools.product(
        ("vendor", "rfc"), ("empty", "kept"), ("always", "never", "while-unused")
    )
]


def refusal(world: World, vf: str, value: str) -> str | None:
    return written(world, f"bus/pci/devices/{vf}/nvidia/current_vgpu_type", value)


def written(world: World, path: str, text: str) -> str | None:
    """The errno with which the driver refuses a write; None: it takes it."""
    try:
        fs.write_attribute(f"{world.sysfs}/{path}", text)
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return None


@vfs_alone
@pytest.mark.parametrize(
    ("errnos", "answers"),
    [
        ("vendor", ["EINVAL", "EIO", "EPERM", None, "EPERM", "EIO", "EPERM", None]),
        ("rfc", ["EINVAL", "ENODEV", None, None, None, "EINVAL", "EBUSY", None]),
    ],
)
def test_the_simulated_drivers_rules(world: World, errnos: str, answers: list[str | None]) -> None:
    first, second, *_ = world.gpu()
    world.set_driver(errnos=errnos)
    given = [
        refusal(world, first, "junk"),
        refusal(world, first, "99999"),
        refusal(world, first, "0"),
        refusal(world, first, "1152"),
        refusal(world, first, "1152"),
        refusal(world, second, "1148"),
    ]
    world.call("use", devices=[first], is_open=True, live=True)
    given.append(refusal(world, first, "0"))
    world.call("use", devices=[first], is_open=False, live=False)
    given.append(refusal(world, first, "0"))
    assert given == answers
    log = world.log
    assert [write.result for write in log] == [answer or "ok" for answer in answers]
    assert [write.open for write in log] == [False] * 6 + [True, False]
    assert {write.pid for write in log} == {os.getpid()}


@vfs_alone
def test_the_simulated_drivers_lists_shrink(world: World) -> None:
    first, second, *_ = world.gpu()
    path = world.pci(second) / "nvidia/creatable_vgpu_types"
    assert path.read_text().count("\n") == 24
    refusal(world, first, "1156")
    assert path.read_text() == "ID    : vGPU Name\n"
    world.set_driver(header="while-unused")
    assert path.read_text() == ""


@pytest.mark.parametrize(
    ("backend", "habits"),
    [*((VENDOR_VFIO, habits) for habits in HABITS), *((MDEV, {"errnos": e}) for e in ERRNOS)],
    indirect=["backend"],
    ids=lambda habits: "-".join(habits.values()) if isinstance(habits, dict) else habits,
)
def test_lives_under_a_driver_with_other_habits(world: World, habits: dict[str, str]) -> None:
    world.set_driver(**habits)
    first, second, third, _ = world.gpu()
    one, two = web1(first, second), web2(third)
    for _ in range(2):
        assert world.start(one).status == 0
        assert world.start(two).status == 0
        check_promises(world)
        world.stop(one)
        world.stop(two)
    check_nothing_leaked(world)


def test_more_than_fits_is_refused_with_what_runs(world: World) -> None:
    places = world.gpu(vfs=8)
    for number, place in enumerate(places[:6]):
        guest = Guest(f"vm{number}", str(uuid.UUID(int=number)), number + 1, (place,))
        assert world.start(guest).status == 0
    refused = world.start(web1(places[6]))
    assert refused.status == 1
    assert "L40S-8Q" in refused.stderr
    assert len(world.types) == 6
    check_promises(world)
    world.everything_ends()
    check_nothing_leaked(world)


@pytest.mark.parametrize("result", ["EIO", "ENOSPC", "EBUSY", "ENODEV", "ENOMEM", "ignored"])
def test_a_type_that_the_driver_does_not_set(world: World, result: str) -> None:
    guest = web1(*world.gpu(vfs=1))
    (device,) = guest.devices
    world.call("fail", device=device, result=result)
    refused = world.start(guest)
    assert refused.status == 1
    how = f"make mdev {device}" if world.is_mdev else f"put NVIDIA L40S-8Q on {device}"
    assert f"the driver did not {how}" in refused.stderr
    check_nothing_leaked(world)
    assert world.start(guest).status == 0


@pytest.mark.parametrize("result", ["EIO", "EPERM", "EBUSY", "ignored"])
@pytest.mark.parametrize("times", [1, 1000])
def test_a_type_that_the_driver_does_not_clear(world: World, result: str, times: int) -> None:
    guest = web1(*world.gpu(vfs=1))
    (device,) = guest.devices
    assert world.start(guest).status == 0
    world.call("fail", device=device, result=result, times=times, value=0)
    world.stop(guest)
    check_promises(world)
    if times == 1 or result == "ignored":  # this driver drops the type all the same
        check_nothing_leaked(world)
    else:
        claim = world.claim(device)
        assert claim is not None
        assert claim.error is not None
        assert world.types == {device: 1152}
        assert world.start(guest).status == 1


@vfs_alone
@pytest.mark.parametrize("attribute", ["current_vgpu_type", "creatable_vgpu_types"])
def test_an_attribute_that_cannot_be_read(world: World, attribute: str) -> None:
    vf, other, *_ = world.gpu()
    path = f"bus/pci/devices/{vf}/nvidia/{attribute}"
    world.call("hide", path=path, hidden=True)
    refused = world.start(web1(vf))
    assert refused.status == 1
    assert attribute in refused.stderr
    assert world.log == []
    assert world.start(web2(other)).status == 0
    world.call("hide", path=path, hidden=False)
    assert world.start(web1(vf)).status == 0
    world.call("hide", path=path, hidden=True)
    world.everything_ends()
    check_promises(world)
    world.call("hide", path=path, hidden=False)
    world.restart_libvirtd()
    check_nothing_leaked(world)


@mdevs_alone
def test_a_parent_that_cannot_be_read_costs_itself(world: World) -> None:
    one, two = web1(*world.gpu(vfs=1)), web2(*world.gpu(OTHER_GPU, vfs=1))
    parents = "class/mdev_bus/0000:3d:00.4", "class/mdev_bus/0000:41:00.4"
    path = "bus/pci/devices/0000:3d:00.4/mdev_supported_types/nvidia-1152/available_instances"
    world.call("hide", path=path, hidden=True)
    assert world.start(one).status == 0
    assert is_on(world, one) == parents[1]
    assert world.start(two).status == 1
    world.call("hide", path=path, hidden=False)
    assert world.start(two).status == 0
    assert is_on(world, two) == parents[0]


@mdevs_alone
@pytest.mark.parametrize("what", ["mdev_type", "bus"])
def test_an_mdev_that_cannot_be_read_is_kept_until_it_can(world: World, what: str) -> None:
    guest = web1(*world.gpu(vfs=1))
    (device,) = guest.devices
    assert world.start(guest).status == 0
    path = f"bus/mdev/devices/{device}"
    if what == "mdev_type":
        path = f"bus/pci/devices/0000:3d:00.4/{device}/mdev_type"
    world.call("hide", path=path, hidden=True)
    world.everything_ends()
    check_promises(world)
    assert world.types == {device: 1152}
    assert world.start(guest).status == 1
    world.call("hide", path=path, hidden=False)
    world.restart_libvirtd()
    check_nothing_leaked(world)


def is_on(world: World, guest: Guest) -> str:
    """On which parent the mdev of GUEST is."""
    place = (world.sysfs / "bus/mdev/devices" / guest.devices[0]).readlink()
    return f"class/mdev_bus/{place.parent.name}"


@mdevs_alone
def test_the_simulated_drivers_rules_for_mdevs(world: World) -> None:
    """The kernel's and the vendor's: one of a UUID, one a parent, one size a GPU."""
    world.gpu(vfs=2)
    one, two, three = (str(uuid.UUID(int=n)) for n in range(1, 4))
    assert available(world) == {1147: 2, 1148: 2, 1152: 2, 1153: 2}
    assert written(world, create(1152), "junk") == "EINVAL"
    assert written(world, create(1152), one) is None
    assert available(world) == {1147: 0, 1148: 0, 1152: 1, 1153: 0}
    assert written(world, create(1152, "0000:3d:00.5"), one) == "EEXIST"
    assert written(world, create(1152), two) == "EIO"
    assert written(world, create(1148, "0000:3d:00.5"), two) == "EIO"
    assert written(world, create(1152, "0000:3d:00.5"), three) is None
    assert sorted(os.listdir(world.sysfs / "bus/mdev/devices")) == [one, three]
    assert sorted(mdev.Mdev(*each) for each in mdev.existing(str(world.sysfs))) == [
        (one, "0000:3d:00.4", "nvidia-1152", None),
        (three, "0000:3d:00.5", "nvidia-1152", None),
    ]
    assert written(world, remove(one), "1") is None
    assert written(world, remove(one), "1") == "ENOENT"
    assert mdev.read_mdev(str(world.sysfs), one) is None
    assert [write.result for write in world.log] == ["ok", "EIO", "EIO", "ok", "ok"]
    assert written(world, create(1152), one) is None, "the kernel forgot the other one"
    assert written(world, remove(one), "1") is None


@mdevs_alone
def test_the_removal_of_an_open_mdev_waits_until_it_is_closed(world: World) -> None:
    """As the kernel's does; nothing here ever asks for one."""
    world.gpu(vfs=1)
    one = str(uuid.UUID(int=1))
    assert written(world, create(1152), one) is None
    world.call("use", devices=[one], is_open=True, live=False)
    remover = threading.Thread(target=written, args=(world, remove(one), "1"))
    remover.start()
    end = time.monotonic() + 10
    while (there := mdev.read_mdev(str(world.sysfs), one)) and not there.error:
        assert time.monotonic() < end
    assert there is not None
    assert there.parent == "0000:3d:00.4"
    assert "its removal has begun" in str(there.error)
    assert mdev.vfio_nodes(str(world.sysfs), one), "who has it open can still be told"
    assert written(world, create(1152), one) == "EEXIST"
    world.call("use", devices=[one], is_open=False, live=False)
    remover.join()
    assert mdev.read_mdev(str(world.sysfs), one) is None
    assert [write.open for write in world.log] == [False, True]


def create(type_id: int, parent: str = "0000:3d:00.4") -> str:
    return f"class/mdev_bus/{parent}/mdev_supported_types/nvidia-{type_id}/create"


def remove(device: str) -> str:
    return f"bus/mdev/devices/{device}/remove"


def available(world: World) -> dict[int, int]:
    """How many of each type could be made."""
    gpu = mdev.discover(str(world.sysfs)).gpus[0]
    types = {offer.profile for parent in gpu.parents for offer in parent.offers or ()}
    return {
        int(each.id.removeprefix("nvidia-")): sum(parent.room(each) for parent in gpu.parents)
        for each in types
    }


# --- a driver that removes mdevs itself ---


@mdevs_alone
def test_an_mdev_that_its_driver_removes_itself_is_left_to_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is removed before breaks its parent until the host boots again."""
    monkeypatch.setattr(backend, "_OWN_CLEANING", 0.6)
    world.set_policy(release_timeout=2.0)
    world.set_driver(cleans_ms=150)
    guest = web1(*world.gpu(vfs=1))
    for _ in range(2):
        assert world.start(guest).status == 0
        world.stop(guest)
        check_nothing_leaked(world)
    assert [write.value for write in world.log] == ["1152", "1152"], "nobody else removed one"


@mdevs_alone
def test_an_mdev_that_its_driver_does_not_remove_is_removed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "_OWN_CLEANING", 0.2)
    guest = web1(*world.gpu(vfs=1))
    assert world.start(guest).status == 0
    world.stop(guest)
    check_nothing_leaked(world)
    assert [write.value for write in world.log] == ["1152", "0"]


@pytest.mark.parametrize("busy", ["refuses", "blocks"])
def test_a_driver_that_is_busy_after_the_close(world: World, busy: str) -> None:
    world.set_driver(busy_ms=120, busy=busy)
    guest = web1(*world.gpu(vfs=1))
    for _ in range(2):
        assert world.start(guest).status == 0
        world.stop(guest)
        check_nothing_leaked(world)
