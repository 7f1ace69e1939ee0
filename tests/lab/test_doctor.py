# SPDX-License-Identifier: LGPL-2.1-or-later
"""`virt-vgpu doctor` where things are really broken: it names that trap, and nothing else."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import libvirt
import pytest

from tests.lab.guest import (
    CLAIMS,
    HOOKS,
    OTHER_GPU_VF,
    OUR_HOOK,
    PROFILE_ID,
    VF1,
    VF3,
    assert_free,
    claim,
    define,
    doctor,
    hook,
    libvirtd_pid,
    nothing_pretended,
    refused,
    restart_libvirtd,
    run,
    set_driver,
    set_type,
    start,
    sync,
    type_of,
    until,
    virsh,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

ENTRY = Path("/usr/bin/vgpu-libvirt-hook")
PACKAGE = Path("/usr/lib/vgpu-libvirt/live/vgpu_libvirt")
GPUS = ("0000:01:00.0", "0000:02:00.0")
STATE = str(CLAIMS.parent)


@pytest.fixture(autouse=True)
def sound(clean: None) -> Iterator[None]:
    """Sound again afterwards, whatever was broken in between; libvirtd has seen the hooks."""
    yield
    for name in virsh("list", "--all", "--name").split():
        run("virsh", "destroy", name)
        virsh("undefine", name)
    for script in HOOKS.iterdir():  # of a test that failed
        if script != OUR_HOOK:
            script.unlink()
    # What libvirtd has noted of our hook is in /run, which the end of each test empties; it must
    # have started later than the hook was put there or changed.
    if OUR_HOOK.stat().st_ctime > Path("/run/libvirtd.pid").stat().st_ctime:
        restart_libvirtd()
    assert doctor() == {}


def enable_vfs(gpu: str, number: int) -> None:
    path = Path(f"/sys/bus/pci/devices/{gpu}/sriov_numvfs")
    path.write_text("0")
    path.write_text(str(number))


def test_a_sound_lab_says_so_also_while_a_guest_runs() -> None:
    start("web1", VF1)
    with nothing_pretended():
        answer = run("virt-vgpu", "doctor")
    assert answer == (0, "Nothing on this host will bite.\n")


@pytest.mark.promise(9)
def test_it_writes_nothing() -> None:
    start("web1", VF1)
    set_type(VF3, PROFILE_ID)
    find = ("find", STATE, "/run/vgpu-libvirt", "/etc/libvirt", "/run/libvirt", "-printf")
    before = run(*find, "%p %T@ %C@\\n").output
    assert set(doctor()) == {"foreign-type"}
    assert run(*find, "%p %T@ %C@\\n").output == before
    set_type(VF3, "0")


def test_a_hook_that_is_not_executable() -> None:
    OUR_HOOK.chmod(0o644)
    assert set(doctor()) == {"hook-not-executable"}
    OUR_HOOK.chmod(0o755)


def test_a_hook_that_libvirtd_has_not_seen() -> None:
    """libvirtd passes over it until it reloads, and so does doctor's finding go."""
    text = OUR_HOOK.read_text()
    OUR_HOOK.unlink()
    assert set(doctor()) == {"hook-missing"}
    restart_libvirtd()
    hook(OUR_HOOK.name, text)
    assert set(doctor()) == {"hook-not-seen"}
    define("web1", VF1)
    assert "vgpu-libvirt" not in refused("start", "web1")  # QEMU's own riddle
    assert set(doctor()) == {"hook-not-seen"}
    os.kill(libvirtd_pid(), signal.SIGHUP)
    assert until(lambda: doctor() == {})
    virsh("start", "web1")
    assert type_of(VF1) == PROFILE_ID


@pytest.mark.parametrize(
    ("name", "check"),
    [
        ("50-vgpu-libvirt.dpkg-old", "hook-twice"),
        (".50-vgpu-libvirt.swp", "hook-twice"),
        ("10-network~", "hook-leftover"),
        ("20-types", "hook-rival"),
    ],
)
def test_other_scripts_beside_ours(name: str, check: str) -> None:
    text = {
        "hook-twice": OUR_HOOK.read_text(),
        "hook-leftover": "#!/bin/sh\n",
        "hook-rival": f"#!/bin/sh\necho 0 >/sys/bus/pci/devices/{VF1}/nvidia/current_vgpu_type\n",
    }[check]
    script = hook(name, text)
    found = doctor()
    assert set(found) == {check}
    assert str(HOOKS / name) in found[check]
    script.unlink()


def test_an_entry_point_that_is_missing_or_broken() -> None:
    ENTRY.chmod(0o644)
    assert set(doctor()) == {"entry-missing"}
    ENTRY.chmod(0o755)
    module = PACKAGE / "hook.py"
    text = module.read_text()
    module.unlink()
    assert "No module named 'vgpu_libvirt.hook'" in doctor()["entry-broken"]
    module.write_text(text)


def test_vfs_that_are_off() -> None:
    Path(f"/sys/bus/pci/devices/{GPUS[1]}/sriov_numvfs").write_text("0")
    found = doctor()
    assert set(found) == {"vfs-off"}
    assert GPUS[1] in found["vfs-off"]
    enable_vfs(GPUS[1], 7)


def test_a_vf_that_lost_its_driver() -> None:
    driver = Path("/sys/bus/pci/drivers/nvidia")
    (driver / "unbind").write_text(VF3)
    assert set(doctor()) == {"vf-driver"}
    (driver / "bind").write_text(VF3)


def test_a_type_that_nobody_claimed() -> None:
    set_type(VF3, PROFILE_ID)
    assert set(doctor()) == {"foreign-type"}
    set_type(VF3, "0")


@pytest.mark.parametrize(
    ("vf", "managed", "check"),
    [
        (VF1, "yes", "managed"),
        ("0000:7f:10.0", "no", "pointed-at-nothing"),
        (GPUS[0], "no", "pointed-at-other"),
    ],
)
def test_a_definition_that_can_not_start(vf: str, managed: str, check: str) -> None:
    define("web1", vf, managed=managed)
    assert set(doctor()) == {check}
    assert "vgpu-libvirt: " in refused("start", "web1")


def test_more_definitions_than_devices() -> None:
    try:
        for gpu in GPUS:
            enable_vfs(gpu, 1)
        for name, vf in (("web1", VF1), ("web2", OTHER_GPU_VF), ("web3", OTHER_GPU_VF)):
            define(name, vf)
        assert set(doctor()) == {"shared-device"}
        for name in ("web2", "web3"):
            virsh("autostart", name)
        assert set(doctor()) == {"autostart-unserved"}
    finally:
        for gpu in GPUS:
            enable_vfs(gpu, 7)


def test_a_definition_of_vfs_where_mediated_devices_are() -> None:
    assert run("lab-mdev", GPUS[1]).status == 0
    define("web1", OTHER_GPU_VF)
    assert set(doctor()) == {"vf-where-mdevs"}
    assert run("lab-mdev", "--vfio", GPUS[1]).status == 0


def test_a_device_that_could_not_be_given_back() -> None:
    start("web1", VF1)
    set_driver(busy_ms=600_000)
    virsh("destroy", "web1")
    assert set(doctor()) == {"release-pending"}
    set_driver(busy_ms=0)
    sync()
    assert_free(VF1)


def test_a_claim_with_an_error() -> None:
    start("web1", VF1)
    path = CLAIMS / f"{VF1}.json"
    path.write_text(json.dumps({**(claim(VF1) or {}), "error": "what went wrong"}))
    assert set(doctor()) == {"claim-error"}


def test_a_claim_that_can_not_be_read() -> None:
    path = CLAIMS / f"{VF3}.json"
    path.write_text("{}")
    assert set(doctor()) == {"claim-unreadable"}
    path.unlink()


def test_a_store_that_can_not_be_written_or_is_lost_at_a_reboot() -> None:
    try:
        assert run("mount", "--bind", STATE, STATE).status == 0
        assert doctor() == {}
        assert run("mount", "-o", "remount,bind,ro", STATE).status == 0
        assert set(doctor()) == {"state-not-writable"}
    finally:
        run("umount", STATE)
    try:
        assert run("mount", "-t", "tmpfs", "tmpfs", STATE).status == 0
        assert set(doctor()) == {"state-volatile"}
    finally:
        run("umount", STATE)


def test_a_configuration_that_excludes_nothing_or_is_broken() -> None:
    config = Path("/run/doctor.toml")
    run_with = ("env", f"VGPU_LIBVIRT_CONFIG={config}")
    config.write_text('[policy]\nexclude = ["0000:77:00.0"]\n')
    assert set(doctor(*run_with)) == {"exclude-nothing"}
    config.write_text("[policy]\nexclude = 7\n")
    found = doctor(*run_with)
    assert set(found) == {"config-broken"}
    assert f"{config}, line 2" in found["config-broken"]


def test_a_libvirt_that_does_not_run_is_not_started() -> None:
    assert run("libvirtd-stop").status == 0
    try:
        assert set(doctor()) == {"no-daemon"}
        assert not Path("/run/libvirtd.pid").exists()
    finally:
        assert run("libvirtd-start").status == 0


def test_a_libvirt_that_is_too_old() -> None:
    """It says that it is Debian 12's: its library with another number in it."""
    there = Path("/usr/lib/x86_64-linux-gnu/libvirt.so.0").read_bytes()
    number = libvirt.getVersion()
    old = there.replace(number.to_bytes(4, "little"), (9_000_000).to_bytes(4, "little"))
    assert old != there
    directory = Path("/run/old-libvirt")
    directory.mkdir()
    (directory / "libvirt.so.0").write_bytes(old)
    try:
        assert run("libvirtd-stop").status == 0
        began = run("env", f"LD_LIBRARY_PATH={directory}", "libvirtd-start")
        assert began.status == 0, began.output
        found = doctor()
        assert set(found) == {"libvirt-too-old"}
        assert "is libvirt 9.0.0, which refuses VFs" in found["libvirt-too-old"]
    finally:
        restart_libvirtd()


def test_a_clock_that_was_set_back() -> None:
    start("web1", VF1)
    began, real = time.monotonic(), time.time()
    try:
        time.clock_settime(time.CLOCK_REALTIME, real - 3 * 86400)
        found = doctor()
    finally:
        time.clock_settime(time.CLOCK_REALTIME, real + time.monotonic() - began)
    assert set(found) == {"clock-odd"}
    assert VF1 in found["clock-odd"]


def test_a_boot_that_has_no_name() -> None:
    nothing = Path("/run/nothing")
    nothing.write_text("")
    boot_id = "/proc/sys/kernel/random/boot_id"
    assert run("mount", "--bind", str(nothing), boot_id).status == 0
    try:
        found = doctor()
    finally:
        assert run("umount", boot_id).status == 0
    assert set(found) == {"boot-unknown"}
    assert boot_id in found["boot-unknown"]


def test_an_ordinary_user_is_told_what_is_hidden() -> None:
    start("web1", VF1)
    assert set(doctor("setpriv", "--reuid=65534", "--clear-groups")) == {"not-seen"}
