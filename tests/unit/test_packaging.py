# SPDX-License-Identifier: LGPL-2.1-or-later
"""What packaging/install puts where, and that systemd understands the units."""

from __future__ import annotations

import configparser
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


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("root")
    subprocess.run(["sh", REPOSITORY / "packaging/install", root], check=True)
    return root


def read(name: str) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read(REPOSITORY / "packaging/systemd" / name)
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


def test_only_the_run_at_boot_is_ordered_with_libvirt_which_it_never_asks() -> None:
    daemons = {"libvirtd.service", "virtqemud.service"}
    for name in UNITS:
        unit = read(name)["Unit"]
        ordered = {*unit.get("Before", "").split(), *unit.get("After", "").split()} & daemons
        assert not {"Wants", "Requires", "BindsTo", "PartOf"}.intersection(unit), name
        assert ordered == (daemons if name == "vgpu-libvirt-boot.service" else set())
    boot = read("vgpu-libvirt-boot.service")
    assert daemons.issubset(boot["Unit"]["Before"].split())
    assert {"local-fs.target", "nvidia-vgpu-mgr.service", "nvidia-vgpud.service"}.issubset(
        boot["Unit"]["After"].split()
    )
    assert boot["Service"]["ExecStart"] == "/usr/bin/virt-vgpu sync --files-only"


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
