# SPDX-License-Identifier: LGPL-2.1-or-later
"""Domains on mediated devices: the same request, the same verbs, the same promises as on VFs."""

from __future__ import annotations

import os
import re
import signal
import statistics
import time
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.lab import guest
from tests.lab.guest import (
    CLAIMS,
    OTHER_GPU_VF,
    PROFILE,
    PROFILE_ID,
    VF1,
    assert_free,
    claim,
    holds,
    is_running,
    qemu_pid,
    refused,
    run,
    set_driver,
    sync,
    type_of,
    until,
    uuid_of,
    virsh,
)
from vgpu_libvirt.claims import handles
from vgpu_libvirt.devices import mdev
from vgpu_libvirt.devices.mdev_life import mdev_uuid

if TYPE_CHECKING:
    from collections.abc import Iterator

GPU, PARENT = "0000:02:00.0", "0000:02:10.0"
VFS = "0000:01:00.0"  # the GPU whose VFs stay
TYPE = f"nvidia-{PROFILE_ID}"
OWN_REMOVAL = 2.0  # seconds that NVIDIA's driver has to remove an mdev itself
FOREIGN = "83b8f4f2-509f-382f-3c1e-e6bfe0fa1001"


@pytest.fixture(autouse=True)
def parents(clean: None) -> Iterator[None]:
    """The VFs of the second GPU as parents of mediated devices, and mtty."""
    made = run("lab-mdev", GPU)
    assert made.status == 0, made.output
    yield
    set_driver(busy_ms=0)
    for name in virsh("list", "--name").split():
        virsh("destroy", name)
    sync()
    for each in mdev.existing("/sys"):
        Path(f"/sys/bus/mdev/devices/{each.uuid}/remove").write_text("1")
    back = run("lab-mdev", "--vfio", GPU)
    assert back.status == 0, back.output


def device_of(name: str, alias: str = "ua-vgpu0") -> str:
    return mdev_uuid(uuid_of(name), alias)


def ask(name: str, *requests: tuple[str, str], profile: str = PROFILE) -> str:
    """Define a domain with nothing but REQUESTS: aliases, and the GPUs to which they are pinned."""
    asked = "".join(
        f"<vgpu:device alias='{alias}' profile='{profile}' gpu='{gpu}'/>" for alias, gpu in requests
    )
    devices = f"<vgpu:devices xmlns:vgpu='urn:vgpu-libvirt:domain:1'>{asked}</vgpu:devices>"
    document = guest.domain_xml(name).replace("<metadata>", f"<metadata>{devices}")
    path = Path("/tmp") / f"{name}.xml"
    path.write_text(document)
    virsh("define", str(path))
    return name


def pointed(name: str) -> dict[str, str]:
    """Alias -> the UUID, or the bus, that a definition's hostdevs name."""
    root = ET.fromstring(virsh("dumpxml", "--inactive", name))
    found = {}
    for hostdev in root.iter("hostdev"):
        alias, address = hostdev.find("alias"), hostdev.find("source/address")
        assert alias is not None
        assert address is not None
        found[alias.get("name", "")] = address.get("uuid") or address.get("bus", "")
    return found


def has_open(name: str, uuid: str) -> bool:
    return qemu_pid(name) in handles.scan("/proc").on(mdev.vfio_nodes("/sys", uuid))


def assert_gone(name: str) -> None:
    """What the domain NAME had is removed, and nobody's."""
    assert mdev.read_mdev("/sys", device_of(name)) is None
    assert claim(device_of(name)) is None


@pytest.mark.promise(1, 2, 3)
def test_domains_get_mdevs_keep_them_and_give_them_back() -> None:
    for name in ("web1", "web2"):
        ask(name, ("ua-vgpu0", GPU))
    sync()
    for name in ("web1", "web2"):
        assert pointed(name) == {"ua-vgpu0": device_of(name)}
        virsh("start", name)
        there = mdev.read_mdev("/sys", device_of(name))
        assert there is not None
        assert there.type_id == TYPE
        assert has_open(name, device_of(name))
        owned = claim(device_of(name))
        assert owned is not None
        assert (owned["phase"], owned["backend"], owned["gpu"]) == ("running", "mdev", GPU)
        assert owned["profile"] == {"id": TYPE, "name": PROFILE}
    shown = run("virt-vgpu", "list").output
    assert "web1" in shown
    assert device_of("web2") in shown
    # A domain's end takes its own, and nothing of anybody else's.
    virsh("destroy", "web1")
    assert_gone("web1")
    assert has_open("web2", device_of("web2"))
    guest.restart_libvirtd()
    sync()
    assert has_open("web2", device_of("web2"))
    os.kill(qemu_pid("web2"), signal.SIGKILL)
    assert until(lambda: not is_running("web2"))
    assert until(lambda: claim(device_of("web2")) is None)
    assert_gone("web2")
    virsh("start", "web1")
    assert has_open("web1", device_of("web1"))


def test_both_kinds_in_one_guest() -> None:
    ask("web1", ("ua-vgpu0", VFS), ("ua-vgpu1", GPU))
    sync()
    assert pointed("web1")["ua-vgpu1"] == device_of("web1", "ua-vgpu1")
    virsh("start", "web1")
    assert type_of(VF1) == PROFILE_ID
    assert holds("web1", VF1)
    assert has_open("web1", device_of("web1", "ua-vgpu1"))
    virsh("destroy", "web1")
    assert_free(VF1)
    assert list(CLAIMS.glob("*.json")) == []
    assert mdev.existing("/sys") == ()


def test_a_start_without_room_is_refused_with_the_reason_and_leaves_nothing() -> None:
    ask("web1", ("ua-vgpu0", GPU))
    ask("web2", ("ua-vgpu0", GPU), profile="FAKE24-8Q")
    sync()
    virsh("start", "web1")
    assert "0000:02:00.0 runs 4 GB profiles (owners web1)" in refused("start", "web2")
    assert_gone("web2")
    virsh("destroy", "web1")
    virsh("start", "web2")
    assert has_open("web2", device_of("web2"))


def test_a_domain_goes_where_its_host_still_can_and_comes_back() -> None:
    """The host's kind changes, the request doesn't."""
    ask("web1", ("ua-vgpu0", GPU))
    sync()
    assert pointed("web1") == {"ua-vgpu0": device_of("web1")}
    assert run("lab-mdev", "--vfio", GPU).status == 0
    sync()
    assert pointed("web1") == {"ua-vgpu0": "0x02"}
    virsh("start", "web1")
    assert holds("web1", OTHER_GPU_VF)
    virsh("destroy", "web1")
    assert run("lab-mdev", GPU).status == 0
    sync()
    assert pointed("web1") == {"ua-vgpu0": device_of("web1")}
    virsh("start", "web1")
    assert has_open("web1", device_of("web1"))


@pytest.mark.promise(3, 6)
def test_an_mdev_of_somebody_elses_is_left_alone() -> None:
    create = f"/sys/class/mdev_bus/{PARENT}/mdev_supported_types/{TYPE}/create"
    Path(create).write_text(FOREIGN)
    hostdev = (
        "<hostdev mode='subsystem' type='mdev' model='vfio-pci'>"
        f"<source><address uuid='{FOREIGN}'/></source></hostdev>"
    )
    guest.start("web1", devices=hostdev)
    sync()
    assert has_open("web1", FOREIGN)
    virsh("destroy", "web1")
    sync()
    assert mdev.read_mdev("/sys", FOREIGN) == (FOREIGN, PARENT, TYPE, None)
    assert list(CLAIMS.glob("*.json")) == []


def test_attach_and_detach_live() -> None:
    guest.start("web1", devices="<controller type='pci' index='1' model='pcie-root-port'/>")
    done = run("virt-vgpu", "attach", "web1", "--live", "--profile", PROFILE, "--gpu", GPU)
    assert done.status == 0, done.output
    assert has_open("web1", device_of("web1"))
    assert (claim(device_of("web1")) or {})["phase"] == "running"
    set_driver(busy_ms=500)
    virsh("destroy", "web1")
    assert until(lambda: not sync()["kept"])
    assert_gone("web1")


# --- beside mdevctl ---


def hook(operation: str, name: str, prefix: tuple[str, ...] = ()) -> guest.Answer:
    document = virsh("dumpxml", "--inactive", name)
    suboperation = "end" if operation == "release" else "begin"
    by_libvirtd = f"VGPU_LIBVIRT_PARENT={guest.libvirtd_pid()}"
    command = ("vgpu-libvirt-hook", name, operation, suboperation, "-")
    return run("env", by_libvirtd, *prefix, *command, stdin=document)


def start_by_mdevctl(*prefix: str) -> guest.Answer:
    return run(*prefix, "mdevctl", "start", "-u", FOREIGN, "-p", PARENT, "-t", TYPE)


def seconds(work: object) -> float:
    begun = time.monotonic()
    answer = work()  # type: ignore[operator]
    assert answer.status == 0, answer.output
    return time.monotonic() - begun


def test_start_and_stop_of_one_beside_mdevctl(record_property: pytest.RecordProperty) -> None:
    """Ours claims durably, looks who has it open before each write, and looks at every domain.

    A Python that does nothing is what ours can't do without. NVIDIA's own removal is waited for.
    """
    ask("web1", ("ua-vgpu0", GPU))
    sync()
    times: dict[str, list[float]] = {"ours": [], "mdevctl": [], "python": []}
    for _ in range(5):
        made = seconds(lambda: hook("prepare", "web1"))
        assert mdev.read_mdev("/sys", device_of("web1")) is not None
        times["ours"].append(made + seconds(lambda: hook("release", "web1")) - OWN_REMOVAL)
        assert_gone("web1")
        made = seconds(start_by_mdevctl)
        times["mdevctl"].append(made + seconds(lambda: run("mdevctl", "stop", "-u", FOREIGN)))
        times["python"].append(seconds(lambda: run("/usr/bin/python3", "-I", "-S", "-c", "pass")))
    medians = {who: statistics.median(each) for who, each in times.items()}
    ratio = (medians["ours"] + OWN_REMOVAL) / medians["mdevctl"]
    record_property("ratio", round(ratio, 1))
    print(f"start and stop of one mdev: {medians}, ours take {ratio:.1f} times mdevctl's")
    assert medians["ours"] < 2 * 10 * medians["python"]


@pytest.mark.promise(3)
def test_what_is_killed_half_way_is_ended_by_one_sync_and_with_mdevctl_by_nobody() -> None:
    ask("web1", ("ua-vgpu0", GPU))
    sync()
    left = {"ours": 0, "mdevctl": 0}
    for number in range(1, 40):
        answer = hook("prepare", "web1", killing(number))
        there = mdev.read_mdev("/sys", device_of("web1")) is not None
        left["ours"] += there and answer.status != 0
        assert not there or claim(device_of("web1")), "made, and nobody knows"
        outcome = run("virt-vgpu", "sync", "--json")
        assert outcome.status == 0, outcome.output
        assert_gone("web1")
        if answer.status == 0:
            break
    for call in ("write", "exit_group"):  # its only write makes the device; then it is done
        answer = start_by_mdevctl(*killing(1, call))
        assert answer.status != 0
        if mdev.read_mdev("/sys", FOREIGN) is not None:
            left["mdevctl"] += 1
            sync()
            assert mdev.read_mdev("/sys", FOREIGN) is not None, "not ours to remove"
            Path(f"/sys/bus/mdev/devices/{FOREIGN}/remove").write_text("1")
    print(f"made when killed: {left}; ours are gone after a sync")
    assert left["ours"]
    assert left["mdevctl"]


def killing(number: int, call: str = "write") -> tuple[str, ...]:
    """A prefix that kills a command, and all that it runs, at its system CALL of that NUMBER."""
    inject = f"inject={call}:signal=SIGKILL:when={number}"
    return ("strace", "-f", "-qq", "-o", "/dev/null", "-e", f"trace={call}", "-e", inject)


def test_the_words_are_the_catalogues() -> None:
    shown = run("virt-vgpu", "profiles").output
    assert re.search(rf"{PROFILE} +{TYPE} +4096 MiB", shown), shown
