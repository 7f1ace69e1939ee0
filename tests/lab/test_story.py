# SPDX-License-Identifier: LGPL-2.1-or-later
"""What the project is for: domains get VFs, keep them, and give them back; on real VFIO."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.lab.guest import (
    DRIVERS,
    OTHER_GPU_VF,
    OUR_HOOK,
    PROFILE,
    PROFILE_ID,
    VF1,
    VF2,
    claim,
    define,
    driver_of,
    holds,
    hook,
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

NAIVE_HOOK = f"""#!/bin/bash
# What people write themselves: set the type at prepare, 0 at release, of each hostdev in the XML.
x="0x([0-9a-f]+)"
vfs=$(sed -nE "s/ *<address domain='$x' bus='$x' slot='$x' function='$x'\\/>.*/\\1:\\2:\\3.\\4/p")
for vf in $vfs; do
  file=/sys/bus/pci/devices/$vf/nvidia/current_vgpu_type
  [ -e "$file" ] || continue
  case $2 in
    prepare) [ "$(cat "$file")" = {PROFILE_ID} ] || echo {PROFILE_ID} >"$file" ;;
    release) echo 0 >"$file" ;;
  esac
done
exit 0
"""


@pytest.mark.parametrize("driver", DRIVERS)
def test_two_domains_get_two_vfs_and_give_them_back(driver: str) -> None:
    set_driver(**DRIVERS[driver])
    start("web1", VF1)
    start("web2", VF2)
    for name, vf in (("web1", VF1), ("web2", VF2)):
        assert type_of(vf) == PROFILE_ID
        assert holds(name, vf)
        mine = claim(vf)
        assert mine is not None
        assert mine["phase"] == "running"
        assert mine["domain_uuid"] == uuid_of(name)
        assert mine["qemu"]["pid"] == qemu_pid(name)
        assert mine["profile"] == {"id": int(PROFILE_ID), "name": PROFILE}
        assert Path(f"/proc/{mine['daemon']['pid']}/comm").read_text() == "libvirtd\n"
    virsh("destroy", "web1")
    assert (type_of(VF1), claim(VF1)) == ("0", None)
    assert type_of(VF2) == PROFILE_ID
    assert is_running("web2")
    virsh("destroy", "web2")
    assert (type_of(VF2), claim(VF2)) == ("0", None)


@pytest.mark.parametrize("errno_in_use", [1, 16, 0], ids=["EPERM", "EBUSY", "let through"])
def test_a_failed_start_on_anothers_vf_does_not_touch_it(errno_in_use: int) -> None:
    set_driver(errno_in_use=errno_in_use)
    start("web1", VF1)
    before, mine = writes_to(VF1), claim(VF1)
    define("web3", VF1)
    said = refused("start", "web3")
    assert (
        f"vgpu-libvirt: {VF1} belongs to domain 'web1' ({uuid_of('web1')}): libvirt has it "
        f"running as process {qemu_pid('web1')}; point the hostdev 'ua-vgpu0' of domain 'web3' at "
        "another VF"
    ) in said
    assert writes_to(VF1) == before, "not even a write that the driver refuses"
    assert type_of(VF1) == PROFILE_ID
    assert claim(VF1) == mine
    assert is_running("web1")
    assert holds("web1", VF1)


def test_a_naive_hook_destroys_the_running_guests_vgpu() -> None:
    """Why the project exists: same story, the hook that everybody writes first."""
    OUR_HOOK.unlink()
    hook("50-naive", NAIVE_HOOK)
    set_driver(errno_in_use=0)
    start("web1", VF1)
    assert type_of(VF1) == PROFILE_ID
    define("web3", VF1)
    assert "in use by driver QEMU, domain web1" in refused("start", "web3")
    assert is_running("web1")
    assert holds("web1", VF1)
    assert type_of(VF1) == "0", "web1 runs on, its vGPU is gone"


def test_a_naive_hook_kills_a_guest_that_is_just_starting() -> None:
    """The driver's refusal doesn't help before QEMU has the VF open; ours holds there too."""
    slow = "#!/bin/sh\ncat >/dev/null\n[ \"$1 $2\" != 'web1 start' ] || sleep 6\n"
    for ours in (False, True):
        if not ours:
            shutil.move(OUR_HOOK, "/tmp/our-hook")
            hook("50-naive", NAIVE_HOOK)
        else:
            (OUR_HOOK.parent / "50-naive").unlink()
            shutil.move("/tmp/our-hook", OUR_HOOK)
        hook("60-slow", slow)
        define("web1", VF1)
        define("web3", VF1)
        first = subprocess.Popen(
            ["virsh", "start", "web1"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        assert until(lambda: type_of(VF1) == PROFILE_ID)
        time.sleep(1)
        said = refused("start", "web3")
        assert (first.wait(60) == 0) is ours
        assert is_running("web1") is ours
        if ours:
            # libvirtd listens on the monitor for QEMU by then; before, it is the witness itself
            assert f"{VF1} belongs to domain 'web1'" in said
            assert type_of(VF1) == PROFILE_ID


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


def test_managed_is_refused_before_libvirt_unbinds_the_driver() -> None:
    define("web1", VF1, managed="yes")
    assert "has managed='yes', with which libvirt would unbind the driver" in refused(
        "start", "web1"
    )
    assert driver_of(VF1) == "nvidia"
    define("plain", VF2, profile=None, managed="yes")
    assert "a VF for vGPUs, with managed='yes'" in refused("start", "plain")
    assert driver_of(VF2) == "nvidia"


def test_a_vf_without_a_type_is_refused_with_a_sentence_instead_of_a_riddle() -> None:
    define("plain", VF1, profile=None)
    said = refused("start", "plain")
    assert f"a hostdev of domain 'plain' points at {VF1}, a VF without a vGPU type" in said


def test_a_profile_that_does_not_fit_beside_what_runs() -> None:
    start("web1", VF1)
    define("web2", VF2, profile="FAKE24-12Q")
    said = refused("start", "web2")
    assert f"{VF2} can't be given NVIDIA FAKE24-12Q now, since its GPU 0000:01:00.0 runs" in said
    assert "NVIDIA FAKE24-4Q (914)" in said
    assert type_of(VF2) == "0"
    define("web2", OTHER_GPU_VF, profile="FAKE24-12Q")
    virsh("start", "web2")
    assert type_of(OTHER_GPU_VF) == "917"


def test_domains_that_did_not_ask_start_whatever_is_broken() -> None:
    config = Path("/etc/vgpu-libvirt/config.toml")
    config.parent.mkdir(exist_ok=True)
    config.write_text("[policy\n")
    try:
        start("plain")
        define("web1", VF1)
        said = refused("start", "web1")
        assert f"{config} is not valid TOML" in said
    finally:
        config.unlink()
    entry = Path("/usr/bin/vgpu-libvirt-hook")
    shutil.move(entry, "/tmp/entry")
    try:
        virsh("destroy", "plain")
        virsh("start", "plain")
        assert f"{entry} is missing or not executable" in refused("start", "web1")
    finally:
        shutil.move("/tmp/entry", entry)
