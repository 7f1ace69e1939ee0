# SPDX-License-Identifier: LGPL-2.1-or-later
"""Each trap, made on a sound host, is named, and nothing else; the sound host is called sound."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import libvirt
import pytest
from click.testing import CliRunner

from tests.unit.fake_libvirt import Connection
from tests.unit.golden import check
from tests.unit.host import (
    LIBVIRTD,
    REPOSITORY,
    WEB2,
    domain_xml,
    hostdev_xml,
    web2,
)
from tests.unit.mdev_host import P40, MdevHost, Type
from tests.unit.sound import GPU, RUNNING_PID, Sound
from tests.unit.support import new_claim
from vgpu_libvirt import marks, trigger
from vgpu_libvirt.address import PciAddress
from vgpu_libvirt.claims import store
from vgpu_libvirt.claims.model import Phase, Process
from vgpu_libvirt.cli.main import main
from vgpu_libvirt.devices.mdev_life import mdev_uuid
from vgpu_libvirt.doctor import registry
from vgpu_libvirt.doctor.findings import Level

if TYPE_CHECKING:
    from collections.abc import Callable

    from click.testing import Result

HEADER = "ID    : vGPU Name\n"
EIGHT = f"{HEADER}1152  : NVIDIA L40S-8Q\n"
BIG = "NVIDIA L40S-48Q"
STUB = (REPOSITORY / "hooks/qemu").read_text()
SYSTEMCTL = "for unit in boot.service changed.path sync.path sync.timer sync.service; do"


@pytest.fixture
def connection(monkeypatch: pytest.MonkeyPatch) -> Connection:
    connection = Connection()
    monkeypatch.setattr(libvirt, "openReadOnly", lambda _uri: connection)
    monkeypatch.setattr(libvirt, "open", lambda _uri: pytest.fail("doctor needs no more"))
    return connection


@pytest.fixture
def host(tmp_path: Path, connection: Connection, monkeypatch: pytest.MonkeyPatch) -> Sound:
    # What root sees, whoever runs the tests: it is all theirs.
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    return Sound(tmp_path)


def test_nothing_is_found_on_a_sound_host(host: Sound) -> None:
    assert host.findings() == ()


# --- hooks ---


def hook_missing(host: Sound) -> None:
    host.our_hook().unlink()


def hook_not_executable(host: Sound) -> None:
    host.our_hook().chmod(0o644)


def hook_replaced(host: Sound) -> None:
    host.script("qemu.d/50-vgpu-libvirt", "#!/bin/sh\nexit 0\n")


def hook_not_seen(host: Sound) -> None:
    host.set_boot(time.time() - 1000)
    host.change_claim(daemon=None)


def hook_not_seen_by_this_daemon(host: Sound) -> None:
    hook_not_seen(host)
    host.change_claim(daemon=Process(LIBVIRTD, 4241))
    marks_by(host, Process(LIBVIRTD, 4241))


def hook_twice(host: Sound) -> None:
    host.script("qemu.d/50-vgpu-libvirt.dpkg-old", STUB)


def hook_twice_as_the_main_one(host: Sound) -> None:
    host.script("qemu", STUB)


def hook_twice_of_the_daemon(host: Sound) -> None:
    host.script("daemon.d/.50-vgpu-libvirt.swp", (REPOSITORY / "hooks/daemon").read_text())


def hook_leftover(host: Sound) -> None:
    host.script("qemu.d/10-network~", "#!/bin/sh\n")


def hook_leftover_of_rpm(host: Sound) -> None:
    host.script("qemu.d/10-network.rpmsave", "#!/bin/sh\n")


def hook_rival(host: Sound) -> None:
    host.script("qemu", "#!/bin/sh\necho 0 >/sys/bus/pci/devices/$VF/nvidia/current_vgpu_type\n")


def daemon_hook_missing(host: Sound) -> None:
    host.our_hook("daemon").unlink()


def daemon_hook_not_executable(host: Sound) -> None:
    host.our_hook("daemon").chmod(0o644)


def entry_missing(host: Sound) -> None:
    host.entry.chmod(0o644)


def entry_broken(host: Sound) -> None:
    host.entry.write_text(host.entry.read_text().replace("vgpu_libvirt.hook", "vgpu_libvirt.hoof"))


def entry_without_interpreter(host: Sound) -> None:
    host.entry.write_text("#!/nowhere/python3\n")


def marks_by(host: Sound, daemon: Process) -> None:
    Path(host.paths.runtime).mkdir(exist_ok=True)
    marks.note_found(host.paths, daemon)


# --- libvirt and what confines it ---


def libvirt_too_old(host: Sound) -> None:
    libvirt.openReadOnly("").version = 9_000_000


def libvirt_without_directories(host: Sound) -> None:
    libvirt.openReadOnly("").version = 6_004_000


def no_daemon(host: Sound) -> None:
    host.end(LIBVIRTD)


def selinux_boolean(host: Sound) -> None:
    host.write(host.sysfs / "fs/selinux/enforce", "1")
    host.write(host.sysfs / "fs/selinux/booleans/virt_hooks_unconfined", "0 0")


def confine(host: Sound) -> None:
    host.write(host.sysfs / "module/apparmor/parameters/enabled", "Y\n")


def denied_by_apparmor(host: Sound) -> None:
    confine(host)
    host.write(
        Path(host.paths.dev) / "kmsg",
        "6,1,50000000,-;eth0: link becomes ready\n"
        '5,2,60000000,-;audit: type=1400 audit(1790000000.5:9): apparmor="DENIED" operation="exec" '
        'profile="libvirtd" name="/usr/bin/vgpu-libvirt-hook" pid=900\n',
    )


def denied_in_the_audit_log(host: Sound) -> None:
    host.write(host.sysfs / "fs/selinux/enforce", "1")
    later = int(time.time()) + 2000
    host.audit_log.write_text(
        f"type=AVC msg=audit({later}.123:77): avc:  denied  {{ execute }} for  pid=9 "
        'comm="rpc-virtqemud" name="50-vgpu-libvirt" scontext=system_u:system_r:virtqemud_t:s0\n'
    )


# --- GPUs ---


def vfs_off(host: Sound) -> None:
    host.gpu("0000:5e:00.0", vfs=0)
    host.nvidia("0000:5e:00.0", [])


def gpu_driver(host: Sound) -> None:
    vfs_off(host)
    host.bind("0000:5e:00.0", "nouveau")


def gpu_without_driver(host: Sound) -> None:
    vfs_off(host)
    (host.pci("0000:5e:00.0") / "driver").unlink()


def no_gpu(host: Sound) -> None:
    host.stop_web1()
    shutil.rmtree(host.sysfs / "bus/pci/devices")
    for name in ("web1", "web2"):
        host.definition(name).unlink()


def without_vgpu(host: Sound) -> list[str]:
    """Another GPU, whose VFs have no `nvidia` directory."""
    vfs = host.gpu("0000:5e:00.0")
    host.nvidia("0000:5e:00.0", vfs)
    for vf in vfs:
        shutil.rmtree(host.pci(vf) / "nvidia")
    return vfs


def vfs_without_vgpu(host: Sound) -> None:
    without_vgpu(host)


def vf_driver(host: Sound) -> None:
    vf = host.vfs[3]
    shutil.rmtree(host.pci(vf) / "nvidia")
    host.bind(vf, "vfio-pci")


def vf_without_driver(host: Sound) -> None:
    vf = host.vfs[3]
    shutil.rmtree(host.pci(vf) / "nvidia")
    (host.pci(vf) / "driver").unlink()


def gpu_lists_nothing(host: Sound) -> None:
    host.nvidia("0000:5e:00.0", host.gpu("0000:5e:00.0", lists=HEADER))


def vf_unreadable(host: Sound) -> None:
    (host.pci(host.vfs[3]) / "nvidia/current_vgpu_type").write_text("what\n")


def foreign_type(host: Sound) -> None:
    host.set_type(host.vfs[3], 1152)


def unclaimed_in_use(host: Sound) -> None:
    foreign_type(host)
    host.process(4444, "cloud-hypervisor", opens=(host.nodes(host.vfs[3])[1],))


def iommu_off(host: Sound) -> None:
    for vf in host.vfs:
        (host.pci(vf) / "iommu_group").unlink()


def iommu_off_from_the_start(host: Sound) -> None:
    """Then the driver takes no VF, and none is a vGPU device."""
    host.stop_web1()
    for name in ("web1", "web2"):
        host.definition(name).unlink()
    for vf in host.vfs:
        (host.pci(vf) / "iommu_group").unlink()
        shutil.rmtree(host.pci(vf) / "nvidia")
        (host.pci(vf) / "driver").unlink()


def iommu_group_shared(host: Sound) -> None:
    group = os.readlink(host.pci(host.vfs[2]) / "iommu_group")
    (host.pci(host.vfs[3]) / "iommu_group").unlink()
    (host.pci(host.vfs[3]) / "iommu_group").symlink_to(group)


def vfio_missing(host: Sound) -> None:
    (Path(host.paths.dev) / "vfio/vfio").unlink()


def exclude_nothing(host: Sound) -> None:
    host.set_policy(exclude=(PciAddress.parse("0000:d3:00.0"),))


def cannot_migrate(host: Sound) -> None:
    """The kernel shows the VF of a running domain in debugfs, but no migration of it."""
    for vf in host.vfs[1:]:
        (host.sysfs / f"kernel/debug/vfio/{vf}/migration").mkdir(parents=True)
    (host.sysfs / f"kernel/debug/vfio/{host.vfs[0]}").mkdir()


# --- definitions ---


def managed(host: Sound) -> None:
    host.define("web2", web2(host.vfs[1], managed="yes"))


def managed_without_request(host: Sound) -> None:
    document = domain_xml("web2", WEB2, hostdevs={"ua-a": host.vfs[1]}, managed="yes")
    host.define("web2", document)


def request_broken(host: Sound) -> None:
    document = web2(host.vfs[1]).replace("<vgpu:device ", "<vgpu:device colour='red' ")
    host.define("web2", document)


def profile_unknown(host: Sound) -> None:
    host.define("web2", web2(host.vfs[1], "NVIDIA L40S-7Q"))


def mdev_where_vfs(host: Sound) -> None:
    hostdev = (
        "<hostdev mode='subsystem' type='mdev' managed='no' model='vfio-pci'><source>"
        f"<address uuid='{WEB2}'/></source><alias name='ua-vgpu0'/></hostdev>"
    )
    requests = {"ua-vgpu0": "NVIDIA L40S-8Q"}
    host.define("web2", domain_xml("web2", WEB2, requests=requests, hostdevs=hostdev))


def vf_where_mdevs(host: Sound) -> None:
    vfs = without_vgpu(host)
    for vf in vfs:
        types = host.sysfs / f"class/mdev_bus/{vf}/mdev_supported_types/nvidia-1152"
        for file, text in (
            ("device_api", "vfio-pci"),
            ("available_instances", "1"),
            ("name", "NVIDIA L40S-8Q"),
        ):
            host.write(types / file, f"{text}\n")
    host.define("web2", web2(vfs[0]))


def pointed_at_nothing(host: Sound) -> None:
    host.define("web2", web2("0000:3d:01.7"))


def pointed_at_a_placeholder(host: Sound) -> None:
    host.define("web2", web2("0000:00:00.0"))


def pointed_at_other(host: Sound) -> None:
    host.define("web2", web2(GPU))


def hostdev_without_request(host: Sound) -> None:
    host.define("web2", domain_xml("web2", WEB2, hostdevs={"ua-a": host.vfs[1]}))


def only_two_devices(host: Sound) -> None:
    """Two VFs, which web1 and web2 have, and a third definition."""
    for vf in host.vfs[2:]:
        shutil.rmtree(host.pci(vf))
    for number in (2, 3):
        (host.pci(GPU) / f"virtfn{number}").unlink()
    document = web2(host.vfs[1]).replace("web2", "web3").replace(WEB2, f"{WEB2[:-1]}3")
    host.define("web3", document)


def shared_device(host: Sound) -> None:
    only_two_devices(host)


def too_many_at_boot(host: Sound) -> None:
    only_two_devices(host)
    for name in ("web1", "web2", "web3"):
        host.autostart(name)


def autostart_unserved(host: Sound) -> None:
    for vf in host.vfs[1:]:
        host.set_list(vf, EIGHT)  # beside web1's
    host.define("web2", web2(host.vfs[1], BIG))
    host.autostart("web2")


def definition_behind(host: Sound) -> None:
    path = host.define("web2", web2(host.vfs[0]))  # which web1 has
    os.utime(path, (time.time() - 3600,) * 2)


# --- claims ---


def claim_unreadable(host: Sound) -> None:
    host.write(host.state / f"claims/{host.vfs[3]}.json", "{}")


def claim_store(host: Sound) -> None:
    host.write(host.state / "claims/web1.json.orig", "{}")


def release_pending(host: Sound) -> None:
    host.change_claim(phase=Phase.RELEASE_PENDING, error="the driver did not clear it")


def claim_error(host: Sound) -> None:
    host.change_claim(error="its type was read as 1153")


def claim_rewritten(host: Sound) -> None:
    host.set_type(host.vfs[0], 1153)


def claim_elsewhere(host: Sound) -> None:
    gone = "0000:5e:00.4"
    store.create(host.paths.state, new_claim(gone, gpu="0000:5e:00.0", domain_uuid=WEB2))


def claim_of_the_dead(host: Sound) -> None:
    host.end_domain("web1", RUNNING_PID)


def inventory_incomplete(host: Sound) -> None:
    host.write(host.status_file("broken"), "<domstatus")


def leftover_unreadable(host: Sound) -> None:
    host.write(host.state / f"cordons/{GPU}.json", "{")


def catalogue_unreadable(host: Sound) -> None:
    host.write(host.state / "catalogue.json", "{")


# --- the host ---


def systemd(host: Sound, active: str = "active", enabled: str = "enabled", last: str = "") -> None:
    """A systemd, whose units of ours are all ACTIVE and ENABLED; LAST: how the last sync ended."""
    Path(host.paths.systemd).mkdir()
    path = host.write(
        host.root / "bin/systemctl",
        f"#!/bin/sh\n{SYSTEMCTL}\n"
        f"active={active}; [ $unit != sync.service ] || active={last or 'inactive'}\n"
        "[ $unit != boot.service ] || active=inactive\n"
        'printf "Id=vgpu-libvirt-%s\\nLoadState=loaded\\nActiveState=%s\\nUnitFileState=%s\\n\\n"'
        f" $unit $active {enabled}\ndone\n",
    )
    path.chmod(0o755)


def sync_units(host: Sound) -> None:
    systemd(host, active="inactive")


def sync_units_not_enabled(host: Sound) -> None:
    systemd(host, enabled="disabled")


def sync_fails(host: Sound) -> None:
    systemd(host, last="failed")


def sync_command_missing(host: Sound) -> None:
    (host.root / "virt-vgpu").unlink()


def sync_unanswered(host: Sound) -> None:
    trigger.ask(host.paths)
    os.utime(trigger.path(host.paths), (time.time() - 3600,) * 2)


def state_not_writable(host: Sound) -> None:
    shutil.rmtree(host.state / "locks")
    (host.state / "locks").write_text("")


def state_volatile(host: Sound) -> None:
    line = f"31 25 0:27 / {host.state.parent} rw - tmpfs tmpfs rw\n"
    with (host.proc / "self/mountinfo").open("a") as file:
        file.write(line)


def boot_unknown(host: Sound) -> None:
    host.stop_web1()
    (host.proc / "sys/kernel/random/boot_id").unlink()


def clock_odd(host: Sound) -> None:
    host.change_claim(created=time.time() + 90000)


def clock_since_boot_odd(host: Sound) -> None:
    host.change_claim(since_boot=1e10)


def not_seen(host: Sound) -> None:
    host.write(host.definition("broken"), "<domain")


class Trap(NamedTuple):
    """What makes it, and the check that finds it."""

    make: Callable[[Sound], None]
    check: str


def trap(make: Callable[[Sound], None], check: str | None = None) -> Trap:
    """A trap, whose check is called as what makes it unless CHECK says otherwise."""
    return Trap(make, check or make.__name__.replace("_", "-"))


TRAPS = (
    trap(hook_missing),
    trap(hook_not_executable),
    trap(hook_replaced),
    trap(hook_not_seen),
    trap(hook_not_seen_by_this_daemon, "hook-not-seen"),
    trap(hook_twice),
    trap(hook_twice_as_the_main_one, "hook-twice"),
    trap(hook_twice_of_the_daemon, "hook-twice"),
    trap(hook_leftover),
    trap(hook_leftover_of_rpm, "hook-leftover"),
    trap(hook_rival),
    trap(daemon_hook_missing),
    trap(daemon_hook_not_executable, "daemon-hook-missing"),
    trap(entry_missing),
    trap(entry_broken),
    trap(entry_without_interpreter, "entry-broken"),
    trap(libvirt_too_old),
    trap(libvirt_without_directories, "libvirt-too-old"),
    trap(no_daemon),
    trap(selinux_boolean),
    trap(denied_by_apparmor, "confinement-denials"),
    trap(denied_in_the_audit_log, "confinement-denials"),
    trap(gpu_driver),
    trap(gpu_without_driver, "gpu-driver"),
    trap(no_gpu),
    trap(vfs_off),
    trap(vfs_without_vgpu),
    trap(vf_driver),
    trap(vf_without_driver, "vf-driver"),
    trap(gpu_lists_nothing),
    trap(vf_unreadable),
    trap(foreign_type),
    trap(unclaimed_in_use),
    trap(iommu_off),
    trap(iommu_off_from_the_start, "iommu-off"),
    trap(iommu_group_shared),
    trap(vfio_missing),
    trap(exclude_nothing),
    trap(cannot_migrate),
    trap(managed),
    trap(managed_without_request, "managed"),
    trap(request_broken),
    trap(profile_unknown),
    trap(mdev_where_vfs),
    trap(vf_where_mdevs),
    trap(pointed_at_nothing),
    trap(pointed_at_a_placeholder, "pointed-at-nothing"),
    trap(pointed_at_other),
    trap(hostdev_without_request),
    trap(shared_device),
    trap(too_many_at_boot, "autostart-unserved"),
    trap(autostart_unserved),
    trap(definition_behind),
    trap(claim_unreadable),
    trap(claim_store),
    trap(release_pending),
    trap(claim_error),
    trap(claim_rewritten),
    trap(claim_elsewhere),
    trap(claim_of_the_dead),
    trap(inventory_incomplete),
    trap(leftover_unreadable),
    trap(catalogue_unreadable, "leftover-unreadable"),
    trap(sync_units),
    trap(sync_units_not_enabled, "sync-units"),
    trap(sync_fails),
    trap(sync_command_missing),
    trap(sync_unanswered),
    trap(state_not_writable),
    trap(state_volatile),
    trap(boot_unknown),
    trap(clock_odd),
    trap(clock_since_boot_odd, "clock-odd"),
    trap(not_seen),
)


@pytest.mark.parametrize("row", TRAPS, ids=lambda row: row.make.__name__)
def test_a_trap_is_named_and_nothing_else(
    host: Sound, monkeypatch: pytest.MonkeyPatch, row: Trap
) -> None:
    monkeypatch.setenv("PATH", f"{host.root}/bin", prepend=os.pathsep)
    row.make(host)
    before = host.tree()
    assert host.found() == {row.check}
    assert host.tree() == before


def mediated(host: Sound, types: list[Type]) -> None:
    """Another GPU, without VFs, that makes mediated devices."""
    MdevHost(host.root, host.sysfs).parent("0000:08:00.0", types)


def test_a_whole_gpu_that_could_make_mediated_devices_may_be_passed_through(host: Sound) -> None:
    mediated(host, P40)
    host.define("web2", domain_xml("web2", WEB2, hostdevs={"ua-x": "0000:08:00.0"}))
    assert host.found() == set()


def test_a_carved_device_that_lost_its_type_is_told_as_any(host: Sound) -> None:
    carved = new_claim(host.vfs[3], phase=Phase.CARVED, domain_uuid="", domain_name="", alias="")
    carved = carved._replace(boot_id=host.look().clock.boot_id, daemon=None, domain_id=None)
    store.create(host.paths.state, carved)
    assert host.found() == {"claim-rewritten"}


def test_a_mediated_device_that_has_no_room_at_boot_is_told_as_a_vf_is(host: Sound) -> None:
    mediated(host, [each._replace(available="0") for each in P40])
    hostdev = (
        "<hostdev mode='subsystem' type='mdev' managed='no' model='vfio-pci'><source>"
        f"<address uuid='{mdev_uuid(WEB2, 'ua-vgpu0')}'/></source>"
        "<alias name='ua-vgpu0'/></hostdev>"
    )
    requests = {"ua-vgpu0": "GRID P40-4C"}
    host.define("web2", domain_xml("web2", WEB2, requests=requests, hostdevs=hostdev))
    host.autostart("web2")
    assert "autostart-unserved" in host.found()


def test_every_check_has_a_trap() -> None:
    assert {row.check for row in TRAPS} == {each.id for each in registry.CHECKS}


def test_no_check_has_two_names() -> None:
    assert len({each.id for each in registry.CHECKS}) == len(registry.CHECKS)
    assert len({each.find for each in registry.CHECKS}) == len(registry.CHECKS)


# --- what looks like a trap, and is none ---


def test_a_hook_that_came_after_the_daemon_but_has_run_is_fine(host: Sound) -> None:
    host.set_boot(time.time() - 1000)
    assert host.found() == set()


def test_a_hook_that_the_daemon_says_it_has_found_is_fine(host: Sound) -> None:
    hook_not_seen(host)
    marks_by(host, Process(LIBVIRTD, 4242))
    assert host.found() == set()


def test_a_daemon_that_had_another_hook_reads_the_directory_each_time(host: Sound) -> None:
    hook_not_seen(host)
    other = host.script("qemu.d/10-network", "#!/bin/sh\n")
    started = math.ceil(other.stat().st_ctime + 0.01)  # after that one, and before ours
    host.set_boot(started - 42)
    time.sleep(started + 0.1 - time.time())
    host.our_hook().chmod(0o755)
    assert host.found() == set()


def test_old_denials_and_those_of_others_are_no_trap(host: Sound) -> None:
    confine(host)
    ours, others = "/usr/bin/vgpu-libvirt-hook", "/usr/bin/other"
    host.write(
        Path(host.paths.dev) / "kmsg",
        f'5,1,1000000,-;apparmor="DENIED" profile="libvirtd" name="{ours}"\n'
        f'5,2,60000000,-;apparmor="DENIED" profile="libvirtd" name="{others}"\n',
    )
    host.audit_log.write_text(f'type=AVC msg=audit(1000.1:2): apparmor="DENIED" name="{ours}"\n')
    assert host.found() == set()


def test_a_gpu_that_another_driver_has_is_for_something_else(host: Sound) -> None:
    vfs_off(host)
    host.bind("0000:5e:00.0", "vfio-pci")
    assert host.found() == set()


def test_what_is_excluded_is_not_looked_at(host: Sound) -> None:
    vfs_off(host)
    host.set_policy(exclude=(PciAddress.parse("0000:5e:00.0"),))
    assert host.found() == set()


def test_a_foreign_type_that_the_policy_takes_is_no_trap(host: Sound) -> None:
    foreign_type(host)
    host.set_policy(foreign="reset")
    assert host.found() == set()


def test_a_full_gpu_lists_nothing_and_is_fine(host: Sound) -> None:
    for vf in host.vfs:
        host.set_list(vf, HEADER)
    assert "gpu-lists-nothing" not in host.found()


def test_two_at_one_device_are_fine_while_there_are_others(host: Sound) -> None:
    document = web2(host.vfs[1]).replace("web2", "web3").replace(WEB2, f"{WEB2[:-1]}3")
    host.define("web3", document)
    assert host.found() == set()  # a sync points one elsewhere


def test_a_wish_that_has_just_been_made_is_no_trap(host: Sound) -> None:
    trigger.ask(host.paths)
    assert host.found() == set()


def test_domains_without_vgpus_are_nothing_to_us(host: Sound) -> None:
    nic = hostdev_xml("ua-nic", "0000:01:00.0", managed="yes")
    host.define("other", domain_xml("other", f"{WEB2[:-1]}9", hostdevs=nic))
    assert host.found() == set()


def test_migration_that_the_driver_has_needs_no_note(host: Sound) -> None:
    for vf in host.vfs:
        (host.sysfs / f"kernel/debug/vfio/{vf}/migration").mkdir(parents=True)
    assert host.found() == set()


# --- libvirt is asked only where that starts nothing ---


def test_no_daemon_is_woken(host: Sound, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libvirt, "openReadOnly", lambda _uri: pytest.fail("it would start one"))
    host.end(LIBVIRTD)
    (finding,) = host.findings()
    assert (finding.check, finding.level) == ("no-daemon", Level.NOTE)


def test_a_silent_libvirt_is_said(host: Sound, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_uri: str) -> None:
        raise libvirt.libvirtError("refused")

    monkeypatch.setattr(libvirt, "openReadOnly", refuse)
    (finding,) = host.findings()
    assert finding.check == "not-seen"
    assert finding.problem.startswith("libvirt's version can't be told: libvirt doesn't answer: ")


# --- the verb ---


def call(host: Sound, *arguments: str) -> Result:
    environment = {**host.environment, "VGPU_LIBVIRT_HOOK": str(host.entry)}
    return CliRunner().invoke(main, ["doctor", *arguments], env=environment, prog_name="virt-vgpu")


def test_a_sound_host_says_so(host: Sound) -> None:
    result = call(host)
    assert (result.exit_code, result.output) == (0, "Nothing on this host will bite.\n")
    assert (call(host, "--json").exit_code, call(host, "--json").output) == (0, "[]\n")


def test_problems_exit_with_1(host: Sound) -> None:
    hook_not_executable(host)
    state_volatile(host)
    result = call(host)
    assert result.exit_code == 1
    check("cli/doctor.txt", result.output, host.root)
    result = call(host, "--json")
    assert result.exit_code == 1
    check("cli/doctor.json", result.output, host.root)


def test_notes_exit_with_0(host: Sound) -> None:
    state_volatile(host)
    result = call(host)
    assert result.exit_code == 0
    assert result.output.startswith("Nothing on this host will bite; 1 note.\n")


def test_a_broken_configuration_is_a_finding(host: Sound) -> None:
    host.write(host.root / "config.toml", "[policy]\nplacment = 'pack'\n")
    result = call(host)
    assert result.exit_code == 1
    assert result.output.startswith(f"1 problem.\n\nproblem: {registry.CONFIG_BROKEN}\n")
    assert "config.toml, line 2: unknown key 'placment'" in result.output


@pytest.mark.promise(9)
@pytest.mark.parametrize("arguments", [[], ["--json"]])
def test_doctor_writes_nothing(host: Sound, arguments: list[str]) -> None:
    release_pending(host)
    foreign_type(host)
    definition_behind(host)
    before = host.tree()
    assert call(host, *arguments).exit_code == 1
    assert host.tree() == before


def test_without_the_library_of_libvirt_the_rest_is_looked_at(host: Sound) -> None:
    hook_missing(host)
    code = (
        "import sys; sys.modules['libvirt'] = None; "
        "from vgpu_libvirt.cli.main import main; main(prog_name='virt-vgpu')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "doctor", "--json"],
        cwd=REPOSITORY,
        env={**host.environment, "VGPU_LIBVIRT_HOOK": str(host.entry)},
        capture_output=True,
        text=True,
    )
    found = {finding["check"]: finding["problem"] for finding in json.loads(done.stdout)}
    assert (done.returncode, done.stderr, set(found)) == (1, "", {"hook-missing", "not-seen"})
    assert found["not-seen"].startswith("libvirt's version can't be asked for: ")
