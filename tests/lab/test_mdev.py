# SPDX-License-Identifier: LGPL-2.1-or-later
"""Mediated devices, as the kernel and libvirt treat them; what the unit tests' driver plays."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.lab import guest
from vgpu_libvirt.claims import handles
from vgpu_libvirt.devices import mdev, mdev_life
from vgpu_libvirt.errors import DeviceError, InUseError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

GPU, PARENT, SIBLING = "0000:02:00.0", "0000:02:10.0", "0000:02:10.2"
TYPE = f"nvidia-{guest.PROFILE_ID}"


@pytest.fixture(autouse=True)
def parents(clean: None) -> Iterator[None]:
    """mtty, and the VFs of the second GPU as parents."""
    made = guest.run("lab-mdev", GPU)
    assert made.status == 0, made.output
    yield
    guest.set_driver(busy_ms=0)
    for name in guest.virsh("list", "--name").split():
        guest.virsh("destroy", name)
    for each in mdev.existing("/sys"):
        assert guest.until(lambda uuid=each.uuid: gone_or_removed(uuid))  # type: ignore[misc]
    back = guest.run("lab-mdev", "--vfio", GPU)
    assert back.status == 0, back.output


def gone_or_removed(uuid: str) -> bool:
    there = mdev.read_mdev("/sys", uuid)
    if there and there.type_id:
        Path(f"/sys/bus/mdev/devices/{uuid}/remove").write_text("1")
    return mdev.read_mdev("/sys", uuid) is None


def guard(uuid: str) -> Callable[[], None]:
    def check() -> None:
        if handles.scan("/proc").on(mdev.vfio_nodes("/sys", uuid)):
            raise InUseError("open")

    return check


def make(name: str, parent: str = PARENT, type_id: str = TYPE) -> str:
    """Make the mdev of the domain NAME; return its UUID."""
    uuid = mdev_life.mdev_uuid(guest.uuid_of(name), "ua-vgpu0")
    mdev_life.create("/sys", parent, type_id, uuid, guard(uuid))
    return uuid


def start(name: str, uuid: str) -> None:
    hostdev = (
        "<hostdev mode='subsystem' type='mdev' model='vfio-pci'>"
        f"<source><address uuid='{uuid}'/></source></hostdev>"
    )
    guest.start(name, devices=hostdev)


def remove(uuid: str, seconds: float, gpu: str = GPU, type_id: str = TYPE) -> None:
    deadline = time.monotonic() + seconds
    mdev_life.remove("/sys", uuid, type_id, gpu, guard(uuid), deadline, may_be_in_use=True)


def room(wanted: str) -> dict[str, int | None]:
    """How many of a profile could be made now, by parent."""
    gpus = mdev.discover("/sys", wanted=wanted).gpus
    return {p.name: o.available for g in gpus for p in g.parents for o in p.offers or ()}


def test_a_domain_runs_on_an_mdev_of_each_driver() -> None:
    both = (make("web1"), GPU, TYPE), (make("web2", "mtty", "mtty-2"), "mtty", "mtty-2")
    for name, (uuid, *_) in zip(("web1", "web2"), both, strict=True):
        start(name, uuid)
        held = handles.scan("/proc").on(mdev.vfio_nodes("/sys", uuid))
        assert guest.qemu_pid(name) in held
    for name in ("web1", "web2"):
        guest.virsh("destroy", name)
    for uuid, gpu, type_id in both:
        remove(uuid, 5, gpu, type_id)
    assert mdev.existing("/sys") == ()


def test_the_catalogue_falls_as_the_vendors_does() -> None:
    gpu = next(gpu for gpu in mdev.discover("/sys").gpus if gpu.name == GPU)
    profile = next(o.profile for o in gpu.parents[0].offers or () if o.profile.id == TYPE)
    assert profile == ("nvidia-914", "NVIDIA FAKE24-4Q", 4096, 6)
    assert set(room("FAKE24-8Q").values()) == {1}
    make("web1")
    assert set(room("FAKE24-8Q").values()) == {0}, "another size"
    four = room("FAKE24-4Q")
    assert four.pop(PARENT) == 0
    assert set(four.values()) == {1}
    with pytest.raises(DeviceError, match="no more of this type fit there now"):
        make("web2", SIBLING, "nvidia-916")


def test_parameters_reach_the_driver_whole() -> None:
    uuid = make("web1")
    mdev_life.set_params("/sys", uuid, "frame_rate_limiter=0", guard(uuid))
    assert Path(f"/sys/bus/mdev/devices/{uuid}/nvidia/vgpu_params").read_text() == (
        "frame_rate_limiter=0\n"
    )


@pytest.mark.promise(1)
def test_an_mdev_that_runs_is_not_removed_and_a_dying_one_once_its_driver_is_done() -> None:
    uuid = make("web1")
    start("web1", uuid)
    with pytest.raises(InUseError):
        remove(uuid, 1)
    assert guest.is_running("web1")
    guest.set_driver(busy_ms=1500)
    os.kill(guest.qemu_pid("web1"), 9)
    remove(uuid, 60)
    assert mdev.read_mdev("/sys", uuid) is None
    assert room("FAKE24-4Q")[PARENT] == 1


@pytest.mark.promise(1)
@pytest.mark.parametrize("who", ["the mdev", "its parent's driver"])
def test_what_somebody_removes_while_it_runs_is_not_gone_before_it_is_closed(who: str) -> None:
    uuid = make("web1")
    start("web1", uuid)
    path, text = (
        (f"/sys/bus/mdev/devices/{uuid}/remove", "1")
        if who == "the mdev"
        else ("/sys/bus/pci/drivers/nvidia/unbind", PARENT)
    )
    with subprocess.Popen(["sh", "-c", f"echo {text} >{path}"]) as writer:
        try:
            assert guest.until(lambda: not Path(f"/sys/bus/mdev/devices/{uuid}").exists())
            assert writer.poll() is None, "the write waits"
            there = mdev.read_mdev("/sys", uuid)
            assert there is not None
            assert (there.parent, there.type_id) == (PARENT, None)
            pids = handles.scan("/proc").on(mdev.vfio_nodes("/sys", uuid))
            assert pids == {guest.qemu_pid("web1")}
            with pytest.raises(DeviceError, match="its removal has begun"):
                remove(uuid, 1)
        finally:  # or the write would wait for ever
            guest.virsh("destroy", "web1")
    assert mdev.read_mdev("/sys", uuid) is None
