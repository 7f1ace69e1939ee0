# SPDX-License-Identifier: LGPL-2.1-or-later
"""However a guest ends, its VF comes back, and not before."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.lab.guest import (
    PROFILE_ID,
    VF1,
    claim,
    define,
    holds,
    is_running,
    qemu_pid,
    refused,
    restart_libvirtd,
    run,
    set_driver,
    start,
    type_of,
    until,
    uuid_of,
    virsh,
    writes_to,
)

pytestmark = pytest.mark.promise(3, 4)


def test_a_killed_qemu_gives_its_vf_back() -> None:
    start("web1", VF1)
    os.kill(qemu_pid("web1"), signal.SIGKILL)
    assert until(lambda: type_of(VF1) == "0")
    assert until(lambda: claim(VF1) is None)
    assert not is_running("web1")
    virsh("start", "web1")
    assert type_of(VF1) == PROFILE_ID


def test_a_start_that_fails_after_prepare_gives_its_vf_back() -> None:
    disk = (
        "<disk type='file' device='disk'><driver name='qemu' type='raw'/>"
        "<source file='/nonexistent'/><target dev='vda' bus='virtio'/></disk>"
    )
    define("web1", VF1, devices=disk)
    assert "/nonexistent" in refused("start", "web1")
    assert (type_of(VF1), claim(VF1)) == ("0", None)
    assert writes_to(VF1)[-2:] == [PROFILE_ID, "0"]


def test_a_driver_that_is_busy_after_close_is_asked_again() -> None:
    set_driver(busy_ms=1500)
    start("web1", VF1)
    virsh("destroy", "web1")
    assert (type_of(VF1), claim(VF1)) == ("0", None)


def test_a_driver_that_stays_busy_leaves_the_claim_and_the_next_start_finishes() -> None:
    set_driver(busy_ms=600_000)
    start("web1", VF1)
    virsh("destroy", "web1")
    pending = claim(VF1)
    assert pending is not None
    assert pending["phase"] == "release-pending"
    assert "did not clear" in pending["error"]
    assert type_of(VF1) == PROFILE_ID
    define("web3", VF1)
    assert "which is dead: the driver did not clear" in refused("start", "web3")
    set_driver(busy_ms=0)
    virsh("start", "web3")
    mine = claim(VF1)
    assert mine is not None
    assert mine["domain_uuid"] == uuid_of("web3")


def test_libvirtd_restarts_and_the_guest_keeps_its_vgpu() -> None:
    start("web1", VF1)
    before = claim(VF1)
    restart_libvirtd()
    assert until(lambda: is_running("web1"))
    time.sleep(3)  # reconnect runs some time after libvirtd answers
    after = claim(VF1)
    assert before is not None
    assert after is not None
    assert after["claim_id"] == before["claim_id"]
    assert holds("web1", VF1)
    virsh("destroy", "web1")
    assert (type_of(VF1), claim(VF1)) == ("0", None)


def test_a_lost_store_is_filled_again_when_libvirtd_comes_back() -> None:
    start("web1", VF1)
    Path(f"/var/lib/vgpu-libvirt/claims/{VF1}.json").unlink()
    restart_libvirtd()
    assert until(lambda: claim(VF1) is not None)
    adopted = claim(VF1)
    assert adopted is not None
    assert adopted["adopted"]
    assert adopted["domain_uuid"] == uuid_of("web1")
    virsh("destroy", "web1")
    assert (type_of(VF1), claim(VF1)) == ("0", None)


def test_qemu_dies_while_libvirtd_is_down() -> None:
    start("web1", VF1)
    pid = qemu_pid("web1")
    assert run("libvirtd-stop").status == 0
    os.kill(pid, signal.SIGKILL)
    time.sleep(1)
    assert type_of(VF1) == PROFILE_ID
    assert run("libvirtd-start").status == 0
    assert until(lambda: type_of(VF1) == "0")
    assert until(lambda: claim(VF1) is None)
