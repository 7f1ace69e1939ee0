# SPDX-License-Identifier: LGPL-2.1-or-later
"""A host with systemd, from the package's installation over a reboot to its end: one story.

Each test goes on where the one before it ended. Those of `after_reboot` run when the machine has
been rebooted, by an orderly `systemctl reboot` while web1 ran:

    tests/lab/run --systemd --reboot 'pytest -m after_reboot' 'pytest -m "not after_reboot"'
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.lab import deb
from tests.lab.guest import (
    CLAIMS,
    OUR_HOOK,
    PROFILE_ID,
    TRIGGER,
    assert_free,
    claim,
    define_request,
    doctor,
    holds,
    is_running,
    qemu_pid,
    run,
    type_of,
    virsh,
    writes_to,
)
from tests.lab.test_pointing import where
from vgpu_libvirt.domain.read import parse_domain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CONFIG = Path("/etc/vgpu-libvirt/config.toml")
GPUS = ("0000:01:00.0", "0000:02:00.0")
MODE = Path("/sys/module/fakevgpu/parameters/mixed")
WATCHERS = ("vgpu-libvirt-changed.path", "vgpu-libvirt-sync.path", "vgpu-libvirt-sync.timer")
AT_BOOT = ("vgpu-libvirt-sriov.service", "vgpu-libvirt-boot.service")
SYNC = "vgpu-libvirt-sync.service"
LIBVIRTD = ("libvirtd.service", "libvirtd.socket", "libvirtd-ro.socket", "libvirtd-admin.socket")
UNITS = Path("/usr/lib/systemd/system")
SOURCES = Path(__file__).parents[2] / "packaging/systemd"

pytestmark = pytest.mark.promise(1, 3, 4, 7)
after_reboot = pytest.mark.after_reboot


@pytest.fixture(scope="session", autouse=True)
def lab() -> None:
    """systemd has begun everything."""


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    """No test cleans up for the next; but no unit may have failed."""
    yield
    assert run("systemctl", "--failed", "--plain", "--no-legend").output == ""


def until(condition: Callable[[], bool]) -> bool:
    """As guest.until, with more patience and fewer looks: a whole system shares one processor."""
    end = time.monotonic() + 300
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(1)
    return True


def systemctl(*arguments: str) -> str:
    done = run("systemctl", *arguments)
    assert done.status == 0, f"{arguments}: {done.output}{run('journalctl', '-n', '30').output}"
    return done.output.strip()


def shown(unit: str, key: str) -> str:
    return systemctl("show", "--value", "--property", key, unit)


def apt(*arguments: str | Path) -> str:
    """Run apt-get as an administrator does; without a network, but all that is needed is there."""
    done = run("apt-get", "--yes", "-o", "Dpkg::Use-Pty=0", *map(str, arguments))
    assert done.status == 0, done.output
    return done.output


def is_quiet() -> bool:
    return not TRIGGER.exists() and shown(SYNC, "ActiveState") == "inactive"


def points(name: str) -> bool:
    return parse_domain(virsh("dumpxml", "--inactive", name)).hostdev("ua-vgpu0") is not None


def state_of(name: str, vf: str) -> tuple[object, ...]:
    """What must not change while NAME runs."""
    return qemu_pid(name), type_of(vf), claim(vf), writes_to(vf), holds(name, vf)


def vfs_of(gpu: str) -> int:
    return len(list(Path(f"/sys/bus/pci/devices/{gpu}").glob("virtfn*")))


# --- the first boot ---


def test_apt_installs_it_and_everything_watches() -> None:
    # Debian's ends when nobody has asked it for two minutes, and the next one finds hooks anyway.
    Path("/etc/default/libvirtd").write_text("LIBVIRTD_ARGS=\n")
    systemctl("restart", "libvirtd.service")
    before = shown("libvirtd.service", "MainPID")
    apt("install", deb.built())
    for unit in WATCHERS:
        assert (unit, systemctl("is-active", unit)) == (unit, "active")
    for unit in (*WATCHERS, *AT_BOOT):
        assert (unit, systemctl("is-enabled", unit)) == (unit, "enabled")
    assert shown("libvirtd.service", "MainPID") == before, "it was told, and not restarted"
    assert until(is_quiet), "what there was before it was looked at"
    ours = sorted(map(str, UNITS.glob("vgpu-libvirt-*")))
    assert len(ours) == len(list(SOURCES.iterdir()))
    verified = run("systemd-analyze", "verify", "--man=no", "--recursive-errors=one", *ours)
    assert (verified.status, verified.output) == (0, "")


def test_listed_gpus_get_their_vfs_from_the_unit() -> None:
    assert [vfs_of(gpu) for gpu in GPUS] == [0, 0]
    CONFIG.write_text(f"[sriov]\ngpus = {json.dumps(GPUS)}\nmixed_size = ['{GPUS[1]}']\n")
    systemctl("start", "vgpu-libvirt-sriov.service")
    assert [vfs_of(gpu) for gpu in GPUS] == [7, 7]
    assert MODE.read_text().strip() == "1", "the last GPU's, which the lab's driver has for all"
    said = run("virt-vgpu", "sriov")
    assert (said.status, said.output.splitlines()[0]) == (0, f"{GPUS[0]} has 7 VFs already.")


def test_doctor_names_the_unit_that_does_not_run_and_says_when_all_is_well() -> None:
    assert doctor() == {}
    systemctl("stop", WATCHERS[0])
    try:
        found = doctor()
    finally:
        systemctl("start", WATCHERS[0])
    assert set(found) == {"sync-units"}
    assert f"{WATCHERS[0]} is not active" in found["sync-units"]


def test_metadata_alone_is_enough_a_moment_later() -> None:
    define_request("web1")
    assert until(lambda: points("web1"))
    virsh("start", "web1")
    assert holds("web1", where("web1"))
    assert until(is_quiet)


def test_no_definition_of_a_burst_is_missed() -> None:
    names = ["burst1", "burst2", "burst3"]
    for name in names:
        define_request(name)
    assert until(lambda: all(points(name) for name in names))
    assert until(is_quiet)
    for name in names:
        virsh("undefine", name)
    assert [systemctl("is-active", unit) for unit in WATCHERS] == ["active"] * 3


def test_the_confined_sync_sees_who_lives_and_gives_back_what_is_nobodys() -> None:
    """libvirt is away, so that files, sockets and open handles alone tell."""
    define_request("web2")
    assert until(lambda: points("web2"))
    virsh("start", "web2")
    assert until(is_quiet)
    vf, web1 = where("web2"), state_of("web1", where("web1"))
    group = os.path.basename(os.readlink(f"/sys/bus/pci/devices/{vf}/iommu_group"))
    pid = qemu_pid("web2")
    systemctl("stop", *LIBVIRTD)
    os.kill(pid, signal.SIGKILL)
    assert until(lambda: not Path(f"/proc/{pid}").exists())
    open_it = f"exec 3<>/dev/vfio/{group}; exec sleep 1000"
    # with a /dev of its own, as guests have
    systemd_run = ("systemd-run", "--unit=holder", "--property=BindPaths=/dev", "--quiet")
    assert run(*systemd_run, "bash", "-c", open_it).status == 0
    assert until(lambda: shown("holder.service", "MainPID") != "0")
    assert until(lambda: "vfio" in run("ls", "-l", f"/proc/{shown('holder', 'MainPID')}/fd").output)
    systemctl("start", SYNC)
    assert type_of(vf) == PROFILE_ID
    kept = claim(vf)
    assert kept is not None
    assert kept["domain_name"] == "web2"
    systemctl("stop", "holder.service")
    systemctl("start", SYNC)
    assert_free(vf)
    assert state_of("web1", where_in_claims("web1")) == web1
    assert writes_to(vf)[-1] == "0"
    systemctl("start", *LIBVIRTD)
    virsh("undefine", "web2")


def where_in_claims(name: str) -> str:
    """The VF of NAME by the store, while libvirt is away."""
    claims = [json.loads(path.read_text()) for path in CLAIMS.glob("*.json")]
    (device,) = [one["device"] for one in claims if one["domain_name"] == name]
    return str(device)


def test_libvirts_restart_is_nothing_to_a_guest() -> None:
    vf = where("web1")
    before = state_of("web1", vf)
    systemctl("restart", "libvirtd.service")
    assert is_running("web1")
    assert until(is_quiet)
    assert state_of("web1", vf) == before


def test_an_upgrade_is_nothing_to_a_guest(tmp_path: Path) -> None:
    vf = where("web1")
    before = state_of("web1", vf)
    apt("install", deb.newer(deb.built(), tmp_path))
    assert deb.NEWER in run("virt-vgpu", "--version").output
    assert [systemctl("is-active", unit) for unit in WATCHERS] == ["active"] * 3
    assert "[sriov]" in CONFIG.read_text()
    assert until(is_quiet)
    assert state_of("web1", vf) == before


def test_before_the_reboot() -> None:
    """web1 runs, and is to come back by itself; its guest answers no request to shut down."""
    Path("/etc/default/libvirt-guests").write_text("SHUTDOWN_TIMEOUT=1\n")
    virsh("autostart", "web1")
    assert is_running("web1")


# --- the second boot ---


@after_reboot
def test_autostart_brings_a_guest_back_with_its_vgpu() -> None:
    assert [vfs_of(gpu) for gpu in GPUS] == [7, 7]
    assert MODE.read_text().strip() == "1"
    assert until(lambda: is_running("web1"))
    vf = where("web1")
    assert holds("web1", vf)
    assert type_of(vf) == PROFILE_ID
    mine = claim(vf)
    assert mine is not None
    assert mine["boot_id"] == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert sorted(path.stem for path in CLAIMS.glob("*.json")) == [vf], "nothing is left of before"


@after_reboot
def test_vfs_come_first_then_what_is_left_goes_then_libvirt_starts() -> None:
    began, ended = "ExecMainStartTimestampMonotonic", "ExecMainExitTimestampMonotonic"
    vendor, vfs, left = (
        [int(shown(unit, key)) for key in (began, ended)]
        for unit in ("nvidia-vgpu-mgr.service", *AT_BOOT)
    )
    libvirt = int(shown("libvirtd.service", began))
    order = [*vendor, *vfs, *left, libvirt]
    assert order == sorted(order)
    assert [systemctl("is-active", unit) for unit in (*AT_BOOT, *WATCHERS)] == ["active"] * 5


@after_reboot
def test_a_purge_is_nothing_to_a_guest() -> None:
    vf = where("web1")
    assert until(is_quiet)
    before = state_of("web1", vf)
    said = apt("purge", "vgpu-libvirt")
    assert "/var/lib/vgpu-libvirt is left" in said
    assert state_of("web1", vf) == before
    assert not OUR_HOOK.exists()
    assert not CONFIG.exists()
    left = run("systemctl", "list-units", "--all", "--plain", "--no-legend", "vgpu-libvirt-*")
    assert left.output == ""
    assert not list(Path("/etc/systemd/system").rglob("vgpu-libvirt-*"))


@after_reboot
def test_a_daemon_by_virtqemuds_name_is_told_of_the_hooks_and_gives_back() -> None:
    """Debian 13 has no virtqemud: libvirtd by its name, as a unit of its name, stands in for it."""
    vf = where("web1")
    before = state_of("web1", vf)
    systemctl("stop", *LIBVIRTD)
    run("cp", "/usr/sbin/libvirtd", "/usr/local/sbin/virtqemud")
    unit = (UNITS / "libvirtd.service").read_text()
    Path("/run/systemd/system/virtqemud.service").write_text(
        "".join(line for line in unit.splitlines(True) if not line.startswith(("Wants=", "Also=")))
        .replace("/usr/sbin/libvirtd", "/usr/local/sbin/virtqemud")
        .replace("--timeout 120", "")
    )
    systemctl("daemon-reload")
    systemctl("start", "virtqemud.service")
    assert is_running("web1")
    apt("install", deb.built())
    assert until(is_quiet)
    assert state_of("web1", vf) == before
    virsh("destroy", "web1")
    assert_free(vf)
    assert until(is_quiet)
    virsh("start", "web1")
    mine = claim(where("web1"))
    assert mine is not None
    assert mine["daemon"]["pid"] == int(shown("virtqemud.service", "MainPID"))
    virsh("destroy", "web1")
    assert_free(where("web1"))
