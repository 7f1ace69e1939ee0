# SPDX-License-Identifier: LGPL-2.1-or-later
"""libvirtd is killed in each hook: guests keep their vGPUs, one sync later nothing is leaked."""

from __future__ import annotations

import time
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
    is_there,
    kill_libvirtd,
    qemu_pid,
    set_driver,
    slow,
    start,
    start_libvirtd,
    sync,
    type_of,
    until,
    virsh,
)

pytestmark = [pytest.mark.promise(1, 3, 4, 7), pytest.mark.usefixtures("bystander")]


def sync_while_libvirt_waits() -> dict[str, str]:
    """A sync while a hook runs: libvirt doesn't answer, and nothing is taken."""
    answer = sync()
    assert answer["released"] == []
    return {kept["device"]: kept["reason"] for kept in answer["kept"]}


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
