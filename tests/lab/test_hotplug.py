# SPDX-License-Identifier: LGPL-2.1-or-later
"""A running domain gets a vGPU and lets it go, and whoever asked for that is killed on the way.

The guests have no operating system that could answer a request to unplug: `let_go` does.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.lab.guest import (
    PROFILE,
    PROFILE_ID,
    VF1,
    assert_free,
    claim,
    holds,
    is_running,
    let_go,
    qemu_pid,
    run,
    set_driver,
    start,
    sync,
    type_of,
    until,
    virsh,
    writes_to,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.promise(1, 2, 3, 4), pytest.mark.usefixtures("bystander")]

GPU = "0000:01:00.0"  # of VF1
CONFIG = Path("/etc/vgpu-libvirt/config.toml")
PORTS = "".join(
    f"<controller type='pci' index='{number}' model='pcie-root-port'/>" for number in range(1, 4)
)
ATTACH = ("virt-vgpu", "attach", "web1", "--profile", PROFILE, "--gpu", GPU, "--live")
DETACH = ("virt-vgpu", "detach", "web1", "--live")


def let_reservations_last(seconds: int) -> None:
    """From now on; how long they lasted is seen when somebody asks."""
    CONFIG.parent.mkdir(exist_ok=True)
    CONFIG.write_text(f"[policy]\nreserve_timeout = {seconds}\n")


@pytest.fixture(autouse=True)
def patient() -> Iterator[None]:
    """Reservations don't lapse, however slow the lab is."""
    let_reservations_last(3600)
    yield
    CONFIG.unlink()


@pytest.fixture
def web1() -> str:
    return start("web1", devices=PORTS)


def done(*command: str) -> str:
    answer = run(*command)
    assert answer.status == 0, answer.output
    return answer.output


def failed(*command: str) -> str:
    answer = run(*command)
    assert answer.status == 1, answer.output
    assert answer.output.count("\n") == 1
    return answer.output


def phase() -> str | None:
    mine = claim(VF1)
    return str(mine["phase"]) if mine else None


def asks(option: str = "") -> bool:
    return "ua-vgpu0" in virsh("dumpxml", "web1", *([option] if option else []))


def test_a_running_domain_gets_a_vgpu_and_gives_it_back_at_its_end(web1: str) -> None:
    assert f"at {VF1} of GPU {GPU}, and has {PROFILE} now" in done(*ATTACH)
    assert type_of(VF1) == PROFILE_ID
    assert holds("web1", VF1)
    mine = claim(VF1)
    assert mine is not None
    assert (mine["phase"], mine["alias"]) == ("running", "ua-vgpu0")
    assert mine["qemu"]["pid"] == qemu_pid("web1")
    assert asks()
    assert not asks("--inactive")
    assert sync()["released"] == []
    virsh("destroy", "web1")
    assert_free(VF1)


def test_both_sides_have_it_and_the_next_start_too(web1: str) -> None:
    done(*ATTACH, "--config")
    assert asks()
    assert asks("--inactive")
    virsh("destroy", "web1")
    assert_free(VF1)
    virsh("start", "web1")
    assert holds("web1", VF1)
    assert phase() == "running"


def test_what_libvirt_refuses_leaves_nothing() -> None:
    start("web1")  # without a port that is free
    assert "the hostdev can't be attached" in failed(*ATTACH)
    assert_free(VF1)
    assert not asks()
    assert writes_to(VF1)[-2:] == [PROFILE_ID, "0"]


def test_what_the_guest_lets_go_is_free_again(web1: str) -> None:
    done(*ATTACH)
    detaching = subprocess.Popen([*DETACH, "--timeout", "80"], stdout=subprocess.PIPE, text=True)
    while detaching.poll() is None:
        let_go("web1")
        time.sleep(1)
    output, _ = detaching.communicate()
    assert detaching.returncode == 0
    assert f"has no vGPU 'ua-vgpu0' any more; {VF1} was given back" in output
    assert_free(VF1)
    assert not asks()
    assert is_running("web1")
    done(*ATTACH)
    assert holds("web1", VF1)


def test_what_the_guest_does_not_let_go_stays_until_it_does(web1: str) -> None:
    done(*ATTACH)
    writes = writes_to(VF1)
    for _ in range(2):  # asking again changes nothing
        assert "has not let 'ua-vgpu0'" in failed(*DETACH, "--timeout", "1")
        assert sync()["released"] == []
        assert holds("web1", VF1)
        assert phase() == "running"
    assert writes_to(VF1) == writes
    let_go("web1")
    assert until(lambda: not holds("web1", VF1))
    assert sync()["released"] == [VF1]
    assert_free(VF1)
    assert is_running("web1")


def is_programming(process: subprocess.Popen[bytes]) -> bool:
    """Whether a process is within its write of a type."""
    files = Path(f"/proc/{process.pid}/fd")
    try:
        return any(
            os.readlink(file).endswith("/current_vgpu_type")
            and int((files.parent / "fdinfo" / file.name).read_text().split()[3], 8) & os.O_WRONLY
            for file in files.iterdir()
        )
    except FileNotFoundError:
        return False


def test_killed_before_libvirt_was_asked_the_claim_lapses(web1: str) -> None:
    set_driver(write_ms=3000)
    attaching = subprocess.Popen(ATTACH)
    assert until(lambda: is_programming(attaching))
    attaching.kill()
    attaching.wait()
    set_driver(write_ms=0)
    assert phase() == "reserved"
    assert type_of(VF1) == PROFILE_ID
    assert sync()["released"] == []
    assert phase() == "reserved"
    let_reservations_last(1)
    assert sync()["released"] == [VF1]
    assert_free(VF1)
    assert is_running("web1")


def test_killed_when_libvirt_was_asked_the_claim_is_found_to_run(web1: str) -> None:
    pid = qemu_pid("web1")
    group = os.path.basename(os.readlink(f"/sys/bus/pci/devices/{VF1}/iommu_group"))
    os.kill(pid, signal.SIGSTOP)
    try:
        attaching = subprocess.Popen(ATTACH)
        # libvirt makes the device's file in QEMU's /dev right before it asks QEMU
        assert until(lambda: Path(f"/proc/{pid}/root/dev/vfio/{group}").exists())
        attaching.kill()
        attaching.wait()
        assert phase() == "reserved"
    finally:
        os.kill(pid, signal.SIGCONT)
    assert until(lambda: holds("web1", VF1))
    assert until(lambda: "<hostdev" in Path("/run/libvirt/qemu/web1.xml").read_text())
    assert sync()["released"] == []
    assert phase() == "running"
    virsh("destroy", "web1")
    assert_free(VF1)
