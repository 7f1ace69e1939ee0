# SPDX-License-Identifier: LGPL-2.1-or-later
"""What packaging/install puts where, and that systemd understands the units."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.unit.host import REPOSITORY
from vgpu_libvirt import hook, trigger
from vgpu_libvirt.config import Paths

if TYPE_CHECKING:
    from pathlib import Path

UNITS = sorted(path.name for path in (REPOSITORY / "packaging/systemd").iterdir())
SERVICES = [name for name in UNITS if name.endswith(".service")]
AT_BOOT = ("vgpu-libvirt-boot.service", "vgpu-libvirt-sriov.service")
# What would hide from a sync who lives, or where it must write.
BLINDFOLDS = {
    *("PrivateNetwork", "NetworkNamespacePath", "JoinsNamespaceOf"),
    *("PrivateUsers", "User", "DynamicUser", "PrivatePIDs", "PrivateDevices"),
    *("ProtectProc", "ProcSubset", "ProtectKernelTunables"),
    *("RootDirectory", "RootImage", "TemporaryFileSystem", "InaccessiblePaths"),
}
EXPOSURE = [
    ("vgpu-libvirt-boot.service", 4.0),
    ("vgpu-libvirt-sync.service", 4.0),
    ("vgpu-libvirt-changed.service", 3.0),
    ("vgpu-libvirt-metrics.service", 4.0),
]  # 3.6 and less now; systemds differ. Not of what runs the vendor's programs, which is at 9


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("root")
    subprocess.run(["sh", REPOSITORY / "packaging/install", root], check=True)
    return root


def read(name: str) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    assert parser.read(REPOSITORY / "packaging/systemd" / name)
    return parser


@pytest.mark.parametrize("name", UNITS)
def test_systemd_takes_every_unit_without_a_word(installed: Path, name: str) -> None:
    assert shutil.which("systemd-analyze"), "tests/setup installs it"
    # systemd's own units, and the shell: what ours name must be there
    subprocess.run(
        ["cp", "-an", "/usr/lib/systemd/system/.", installed / "usr/lib/systemd/system"], check=True
    )
    (installed / "bin").mkdir(exist_ok=True)
    shutil.copy("/bin/sh", installed / "bin/sh")
    done = subprocess.run(
        [
            *("systemd-analyze", "verify", "--man=no", "--recursive-errors=one"),
            *(f"--root={installed}", name),
        ],
        capture_output=True,
        text=True,
    )
    ours = [line for line in (done.stdout + done.stderr).splitlines() if "vgpu" in line]
    assert (done.returncode, ours) == (0, [])


def test_the_units_watch_what_the_code_touches() -> None:
    assert read("vgpu-libvirt-sync.path")["Path"]["PathExists"] == trigger.path(Paths())
    changed = read("vgpu-libvirt-changed.path")["Path"]["PathChanged"]
    assert changed == f"{Paths().libvirt_etc}/qemu"
    command = read("vgpu-libvirt-changed.service")["Service"]["ExecStart"]
    assert command == f"/usr/bin/vgpu-libvirt-hook {hook.WANT_OPTION}"


def test_no_limit_eats_an_event() -> None:
    for name in ("changed.path", "changed.service", "sync.path", "sync.service"):
        unit = read(f"vgpu-libvirt-{name}")
        assert unit["Unit"]["StartLimitIntervalSec"] == "0"
        if name.endswith(".path"):
            assert unit["Path"]["TriggerLimitIntervalSec"] == "0"


def test_the_service_behind_the_definitions_is_over_before_a_sync_looks() -> None:
    after = read("vgpu-libvirt-sync.service")["Unit"]["After"].split()
    assert "vgpu-libvirt-changed.service" in after


def words(name: str, section: str, key: str) -> set[str]:
    return set(read(name)[section].get(key, "").split())


def test_only_what_runs_at_boot_is_ordered_with_libvirt_which_it_never_asks() -> None:
    daemons = {"libvirtd.service", "virtqemud.service"}
    vendors = {"local-fs.target", "nvidia-vgpu-mgr.service", "nvidia-vgpud.service"}
    for name in UNITS:
        unit = read(name)["Unit"]
        ordered = (words(name, "Unit", "Before") | words(name, "Unit", "After")) & daemons
        assert not {"Wants", "Requires", "BindsTo", "PartOf"}.intersection(unit), name
        assert ordered == (daemons if name in AT_BOOT else set())
    for name in AT_BOOT:
        assert daemons <= words(name, "Unit", "Before")
        assert vendors <= words(name, "Unit", "After")
        assert "min" in read(name)["Service"]["TimeoutStartSec"], "libvirt waits for it"
    boot, vfs = "vgpu-libvirt-boot.service", "vgpu-libvirt-sriov.service"
    assert read(boot)["Service"]["ExecStart"] == "/usr/bin/virt-vgpu sync --files-only"
    assert read(vfs)["Service"]["ExecStart"] == "/usr/bin/virt-vgpu sriov"
    assert boot in words(vfs, "Unit", "Before")
    assert vfs in words(boot, "Unit", "After")


@pytest.mark.promise(1, 4)
@pytest.mark.parametrize("name", SERVICES)
def test_no_unit_blinds_those_who_look_who_lives(name: str) -> None:
    service = read(name)["Service"]
    assert not BLINDFOLDS.intersection(service)
    for key in ("ReadOnlyPaths", "BindPaths", "BindReadOnlyPaths", "NoExecPaths"):
        assert key not in service
    for lists in ("SystemCallFilter", "RestrictAddressFamilies"):
        assert not service.get(lists, "").startswith("~"), "those that are allowed are listed"


def test_the_unit_says_itself_what_must_never_be_set() -> None:
    text = (REPOSITORY / "packaging/systemd/vgpu-libvirt-sync.service").read_text()
    said = "".join(line.removeprefix("#") for line in text.splitlines() if line.startswith("#"))
    listed = said.partition("never to be set here: ")[2].partition(".")[0]
    assert set(listed.replace(",", " ").replace(" and ", " ").split()) == BLINDFOLDS


@pytest.mark.parametrize("name", ["vgpu-libvirt-boot.service", "vgpu-libvirt-sync.service"])
def test_what_writes_to_devices_is_confined_to_what_it_needs(name: str) -> None:
    service = read(name)["Service"]
    # /proc/*/fd of others, locks on files of others, the trigger's group, and the vendor's driver
    assert set(service["CapabilityBoundingSet"].split()) == {
        *("CAP_SYS_PTRACE", "CAP_DAC_READ_SEARCH", "CAP_DAC_OVERRIDE", "CAP_CHOWN"),
        "CAP_SYS_ADMIN",
    }
    assert service["ProtectSystem"] == "strict"
    assert f"/var/lib/{service['StateDirectory']}" == Paths().state
    assert f"/run/{service['RuntimeDirectory']}" == Paths().runtime
    assert service["RuntimeDirectoryPreserve"] == "yes", "it would take the next wish along"
    for key in ("NoNewPrivileges", "ProtectKernelModules", "RestrictNamespaces", "PrivateTmp"):
        assert service[key] == "yes", key
    assert "UMask" not in service, "claims are for everybody to read"


def test_the_run_at_boot_is_confined_as_every_other() -> None:
    at_boot, later = (read(f"vgpu-libvirt-{name}.service")["Service"] for name in ("boot", "sync"))
    own = {"Type", "RemainAfterExit", "ExecStart", "ExecStopPost", "TimeoutStartSec"}
    confined = {key: value for key, value in later.items() if key not in own}
    assert confined == {key: value for key, value in at_boot.items() if key not in own}
    assert confined


@pytest.mark.parametrize(("name", "most"), EXPOSURE)
def test_systemd_rates_the_units_as_before(name: str, most: float) -> None:
    """Of 10; what `systemd-analyze security` misses most is what would blind us."""
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=yes", "--no-pager",
         REPOSITORY / "packaging/systemd" / name],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    rated = re.search(r"Overall exposure level for \S+: ([\d.]+) ", done.stdout)
    assert rated, done.stdout
    assert float(rated[1]) <= most


def test_the_directory_of_the_trigger_is_made_for_libvirts_group(installed: Path) -> None:
    text = (installed / "usr/lib/tmpfiles.d/vgpu-libvirt.conf").read_text()
    lines = [line.split() for line in text.splitlines() if not line.startswith("#")]
    runtime = Paths().runtime
    assert lines == [
        ["d", runtime, "0755", "root", "root", "-"],
        ["d", f"{runtime}/wanted", "0770", "root", trigger.GROUP, "-"],
    ]


def test_the_worker_finds_the_command_beside_the_entry_point(installed: Path) -> None:
    for name in ("vgpu-libvirt-hook", "virt-vgpu"):
        assert (installed / "usr/bin" / name).stat().st_mode & 0o111
