# SPDX-License-Identifier: LGPL-2.1-or-later
"""A release that is killed, comes too early, or never: the VF comes back, and not before."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lab.guest import (
    PROFILE_ID,
    VF1,
    assert_free,
    claim,
    define,
    holds,
    in_background,
    is_running,
    let_go,
    qemu_pid,
    refused,
    run,
    set_driver,
    start,
    sync,
    type_of,
    until,
    virsh,
    writes_to,
)

pytestmark = [pytest.mark.promise(1, 3, 4, 7), pytest.mark.usefixtures("bystander")]

FREEZER = Path("/tmp/freezer")


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
    let_go("web1")
    assert until(lambda: "<hostdev" not in virsh("dumpxml", "web1"))
    assert until(lambda: not holds("web1", VF1))
    assert type_of(VF1) == PROFILE_ID
    assert sync()["released"] == [VF1]
    assert_free(VF1)
    assert is_running("web1")
