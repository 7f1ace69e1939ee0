# SPDX-License-Identifier: LGPL-2.1-or-later
"""Whatever dies, a living guest keeps its vGPU, and one sync later nothing is leaked."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.lab.guest import (
    PROFILE_ID,
    VF1,
    VF2,
    claim,
    define,
    holds,
    hook,
    is_running,
    qemu_pid,
    refused,
    run,
    set_driver,
    start,
    type_of,
    until,
    virsh,
    writes_to,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.promise(1, 3, 4, 7)

FREEZER = Path("/tmp/freezer")


def slow(operation: str, before_ours: bool = False) -> None:
    """A hook script beside ours that says that it is at OPERATION of web1, and stays there."""
    hook(
        "40-slow" if before_ours else "60-slow",
        f"#!/bin/sh\ncat >/dev/null\n[ \"$1 $2\" != 'web1 {operation}' ] && exit\n"
        "touch /tmp/there\nexec sleep 300\n",
    )
    Path("/tmp/there").unlink(missing_ok=True)


def is_there() -> bool:
    return Path("/tmp/there").exists()


def libvirtd_pid() -> int:
    return int(Path("/run/libvirtd.pid").read_text())


def kill_libvirtd() -> None:
    pid = libvirtd_pid()
    os.kill(pid, signal.SIGKILL)
    assert until(lambda: not Path(f"/proc/{pid}").exists())


def start_libvirtd() -> None:
    for script in ("40-slow", "60-slow"):
        (Path("/etc/libvirt/hooks/qemu.d") / script).unlink(missing_ok=True)
    run("pkill", "-KILL", "-x", "sleep")
    started = run("libvirtd-start")
    assert started.status == 0, started.output


def sync() -> dict[str, Any]:
    done = run("virt-vgpu", "sync", "--json")
    assert done.status == 0, done.output
    return dict(json.loads(done.output))


def in_background(*command: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


@pytest.fixture(autouse=True)
def bystander(clean: None) -> Iterator[None]:
    """Another guest, with a vGPU on the same GPU, that nothing here may touch."""
    start("bystander", VF2)
    writes = writes_to(VF2)
    mine = claim(VF2)
    yield
    assert is_running("bystander")
    assert holds("bystander", VF2)
    assert type_of(VF2) == PROFILE_ID
    assert writes_to(VF2) == writes
    now = claim(VF2)
    assert mine is not None
    assert now is not None
    assert now["claim_id"] == mine["claim_id"]


def assert_free(vf: str) -> None:
    assert (type_of(vf), claim(vf)) == ("0", None)


def test_libvirtd_dies_while_our_prepare_writes_to_the_device() -> None:
    define("web1", VF1)
    set_driver(write_ms=4000)
    starting = in_background("virsh", "start", "web1")
    assert until(lambda: claim(VF1) is not None)
    kill_libvirtd()
    starting.wait()
    assert until(lambda: type_of(VF1) == PROFILE_ID), "the orphaned hook finishes its write"
    set_driver(write_ms=0)
    start_libvirtd()
    assert until(lambda: claim(VF1) is None, 5) or VF1 in sync()["released"]
    assert_free(VF1)
    virsh("start", "web1")


def test_libvirtd_dies_in_our_release() -> None:
    start("web1", VF1)
    set_driver(write_ms=4000)
    stopping = in_background("virsh", "destroy", "web1")
    assert until(lambda: not Path("/run/libvirt/qemu/web1.xml").exists())
    time.sleep(1)
    kill_libvirtd()
    stopping.wait()
    set_driver(write_ms=0)
    start_libvirtd()
    sync()
    assert until(lambda: claim(VF1) is None)
    assert_free(VF1)


@pytest.mark.parametrize("operation", ["prepare", "start"])
def test_libvirtd_dies_between_our_hook_and_qemu(operation: str) -> None:
    define("web1", VF1)
    slow(operation)
    starting = in_background("virsh", "start", "web1")
    assert until(is_there)
    kept = sync_while_libvirt_waits()
    assert VF1 in kept, "the daemon that starts the domain is the witness"
    kill_libvirtd()
    starting.wait()
    assert type_of(VF1) == PROFILE_ID
    start_libvirtd()
    sync()
    assert_free(VF1)


def sync_while_libvirt_waits() -> dict[str, str]:
    """A sync while a hook runs: libvirt doesn't answer, and nothing is taken."""
    answer = sync()
    assert answer["released"] == []
    return {kept["device"]: kept["reason"] for kept in answer["kept"]}


def test_libvirtd_dies_when_qemu_has_started() -> None:
    define("web1", VF1)
    slow("started")
    starting = in_background("virsh", "start", "web1")
    assert until(is_there)
    kill_libvirtd()
    starting.wait()
    start_libvirtd()
    assert until(lambda: is_running("web1"))
    sync()
    assert holds("web1", VF1)
    mine = claim(VF1)
    assert mine is not None
    assert (mine["phase"], mine["qemu"]["pid"]) == ("running", qemu_pid("web1"))
    virsh("destroy", "web1")
    assert_free(VF1)


@pytest.mark.parametrize("operation", ["stopped", "release"])
def test_libvirtd_dies_when_qemu_has_ended(operation: str) -> None:
    start("web1", VF1)
    slow(operation, before_ours=True)
    stopping = in_background("virsh", "destroy", "web1")
    assert until(is_there)
    kill_libvirtd()
    stopping.wait()
    start_libvirtd()
    assert until(lambda: not is_running("web1"))
    sync()
    assert until(lambda: claim(VF1) is None)
    assert_free(VF1)


def test_our_release_is_killed() -> None:
    start("web1", VF1)
    set_driver(write_ms=3000)
    stopping = in_background("virsh", "destroy", "web1")
    assert until(lambda: not Path("/run/libvirt/qemu/web1.xml").exists())
    assert until(lambda: run("pkill", "-KILL", "-f", "vgpu-libvirt-hook web1 release").status == 0)
    assert stopping.wait() == 0
    set_driver(write_ms=0)
    sync()
    assert_free(VF1)


def test_a_qemu_that_cannot_die_keeps_its_vf() -> None:
    start("web1", VF1)
    pid = qemu_pid("web1")
    FREEZER.mkdir(exist_ok=True)
    mounted = run("mount", "-t", "cgroup", "-o", "freezer", "none", str(FREEZER))
    assert mounted.status == 0, mounted.output
    cell = FREEZER / "cell"
    cell.mkdir()
    try:
        (cell / "cgroup.procs").write_text(str(pid))
        (cell / "freezer.state").write_text("FROZEN")
        assert "Failed to terminate process" in refused("destroy", "web1")
        writes = writes_to(VF1)
        assert sync()["released"] == []
        define("web3", VF1)
        assert f"{VF1} belongs to domain 'web1'" in refused("start", "web3")
        assert writes_to(VF1) == writes
        assert type_of(VF1) == PROFILE_ID
    finally:
        (cell / "freezer.state").write_text("THAWED")
        assert until(lambda: not Path(f"/proc/{pid}").exists())
        cell.rmdir()
        run("umount", str(FREEZER))
    assert until(lambda: claim(VF1) is None)
    assert_free(VF1)


def test_a_hot_unplugged_device_comes_back_at_the_next_sync() -> None:
    start("web1", VF1)
    xml = Path("/tmp/hostdev.xml")
    document = virsh("dumpxml", "web1")
    begin, end = document.index("<hostdev"), document.index("</hostdev>")
    xml.write_text(document[begin:end] + "</hostdev>")
    virsh("detach-device", "web1", str(xml), "--live")
    # no guest answers the request to unplug; at its next reset the machine lets go by itself
    virsh("reset", "web1")
    assert until(lambda: "<hostdev" not in virsh("dumpxml", "web1"))
    assert until(lambda: not holds("web1", VF1))
    assert type_of(VF1) == PROFILE_ID
    assert sync()["released"] == [VF1]
    assert_free(VF1)
    assert is_running("web1")
