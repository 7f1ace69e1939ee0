# SPDX-License-Identifier: LGPL-2.1-or-later
"""`install-hooks` and `uninstall-hooks`: only our own files change, and never under a guest."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import venv
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from tests.unit.host import REPOSITORY, domain_xml
from tests.unit.support import directory_for_all, needs_root, new_claim
from vgpu_libvirt import config, installing
from vgpu_libvirt.claims import store
from vgpu_libvirt.cli.main import main
from vgpu_libvirt.errors import InstallError
from vgpu_libvirt.installing import MARK, Found, Program

if TYPE_CHECKING:
    from click.testing import Result

    from tests.unit.host import Host

VF = "0000:3d:00.4"
QEMU = "etc/libvirt/hooks/qemu.d/50-vgpu-libvirt"
DAEMON = "etc/libvirt/hooks/daemon.d/50-vgpu-libvirt"
ENTRY, COMMAND = "usr/bin/vgpu-libvirt-hook", "usr/bin/virt-vgpu"
UNIT = "etc/systemd/system/vgpu-libvirt-sync.timer"


class Machine:
    """A root directory, in which libvirt's own places are the default ones."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def call(self, *arguments: str) -> Result:
        options = ["--root", str(self.root)]
        return CliRunner().invoke(main, [*arguments, *options], prog_name="virt-vgpu")

    def done(self, *arguments: str) -> str:
        result = self.call(*arguments)
        assert (result.exit_code, result.exception) == (0, None), result.output
        return result.output

    def refused(self, *arguments: str) -> str:
        result = self.call(*arguments)
        assert result.exit_code == 1
        assert result.output.startswith("virt-vgpu: error: ")
        assert result.output.count("\n") == 1
        return result.output

    def files(self) -> set[str]:
        found = (path for path in self.root.rglob("*") if not path.is_dir())
        return {str(path.relative_to(self.root)) for path in found}

    def read(self, name: str) -> str:
        return (self.root / name).read_text()


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setenv(config.VARIABLE, str(tmp_path / "no.toml"))
    (tmp_path / "root").mkdir()
    return Machine(tmp_path / "root")


def test_it_writes_hooks_and_launchers_and_says_so(machine: Machine) -> None:
    said = machine.done("install-hooks")
    assert machine.files() == {QEMU, DAEMON, ENTRY, COMMAND}
    for name in machine.files():
        assert f"{machine.root}/{name} was written." in said
        assert (machine.root / name).stat().st_mode & 0o7777 == 0o755
        assert MARK in machine.read(name).splitlines()
    stub = machine.read(QEMU).replace(f"{MARK}\n", "")
    assert stub == (REPOSITORY / "hooks/qemu").read_text()
    assert machine.read(QEMU).startswith("#!/bin/sh\n")


def test_units_are_written_when_they_are_asked_for(machine: Machine) -> None:
    machine.done("install-hooks", "--units")
    units = {f"etc/systemd/system/{p.name}" for p in (REPOSITORY / "packaging/systemd").iterdir()}
    assert units | {"etc/tmpfiles.d/vgpu-libvirt.conf"} == machine.files() - {
        *(QEMU, DAEMON, ENTRY, COMMAND)
    }
    assert (machine.root / UNIT).stat().st_mode & 0o7777 == 0o644


def test_the_hook_is_the_last_to_come_and_the_first_to_go(machine: Machine) -> None:
    lines = machine.done("install-hooks", "--units").splitlines()
    assert [QEMU in lines[-1], DAEMON in lines[-2]] == [True, True]
    lines = machine.done("uninstall-hooks").splitlines()
    assert [QEMU in lines[0], DAEMON in lines[1]] == [True, True]


def test_once_more_changes_nothing(machine: Machine) -> None:
    machine.done("install-hooks")
    before = (machine.root / QEMU).stat()
    assert machine.done("install-hooks") == "Everything is installed already.\n"
    assert (machine.root / QEMU).stat().st_ino == before.st_ino


def test_what_an_older_version_installed_is_replaced(machine: Machine) -> None:
    machine.done("install-hooks")
    (machine.root / QEMU).write_text(f"#!/bin/sh\n{MARK}\nexit 0\n")
    assert machine.done("install-hooks") == f"{machine.root}/{QEMU} was written.\n"
    assert "urn:vgpu-libvirt" in machine.read(QEMU)


def test_a_dry_run_writes_nothing(machine: Machine) -> None:
    assert "would be written" in machine.done("install-hooks", "--dry-run")
    assert machine.files() == set()
    machine.done("install-hooks")
    assert f"{machine.root}/{QEMU} would be removed." in machine.done(
        "uninstall-hooks", "--dry-run"
    )
    assert len(machine.files()) == 4


@pytest.mark.parametrize("name", [QEMU, DAEMON, ENTRY, COMMAND])
def test_a_file_of_somebody_else_is_not_overwritten_and_nothing_is_written(
    machine: Machine, name: str
) -> None:
    (machine.root / name).parent.mkdir(parents=True)
    (machine.root / name).write_text("#!/bin/sh\n# from a package\n")
    said = machine.refused("install-hooks")
    assert f"{machine.root}/{name} is not from 'virt-vgpu install-hooks'" in said
    assert machine.files() == {name}
    assert f"{machine.root}/{name} stays" in machine.done("uninstall-hooks")
    assert machine.files() == {name}


def test_pips_own_script_in_usr_bin_is_enough(machine: Machine) -> None:
    program = Program(scripts="/usr/bin")
    files = installing.plan(config.Paths(), str(machine.root), program, with_units=False)
    assert not any(file.path.endswith("/virt-vgpu") for file in files)


def test_uninstalling_removes_all_that_was_installed_and_nothing_else(machine: Machine) -> None:
    other = machine.root / "etc/libvirt/hooks/qemu.d/10-other"
    other.parent.mkdir(parents=True)
    other.write_text("#!/bin/sh\n")
    machine.done("install-hooks", "--units")
    machine.done("uninstall-hooks")
    assert machine.files() == {str(other.relative_to(machine.root))}
    assert not (machine.root / DAEMON).parent.exists()
    assert "Nothing of 'install-hooks'" in machine.done("uninstall-hooks")


@pytest.mark.promise(1)
def test_uninstalling_is_refused_while_a_claim_stands(machine: Machine) -> None:
    state = f"{machine.root}/var/lib/vgpu-libvirt"
    machine.done("install-hooks")
    store.create(state, new_claim(VF))
    said = machine.refused("uninstall-hooks")
    assert f"in use: {VF} by domain 'web1'" in said
    assert "shut these domains off first, or use --force" in said
    assert len(machine.files() & {QEMU, DAEMON, ENTRY, COMMAND}) == 4
    machine.done("uninstall-hooks", "--force")
    assert machine.files() == {f"var/lib/vgpu-libvirt/claims/{VF}.json"}


@pytest.mark.promise(4)
def test_a_claim_that_cannot_be_read_is_one(machine: Machine) -> None:
    claims = machine.root / "var/lib/vgpu-libvirt/claims"
    claims.mkdir(parents=True)
    (claims / f"{VF}.json").write_text("")
    assert f"{VF} by a claim that can't be read" in machine.refused("uninstall-hooks")


def test_nothing_half_written_or_doubled_is_ever_where_libvirt_runs_hooks(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looked at before each move, when what is moved is complete."""
    seen: set[tuple[str, ...]] = set()
    move = os.rename

    def watch(source: str, target: str) -> None:
        for kind in ("qemu", "daemon"):
            directory = machine.root / f"etc/libvirt/hooks/{kind}.d"
            seen.add(tuple(os.listdir(directory)) if directory.exists() else ())
        move(source, target)

    monkeypatch.setattr(os, "rename", watch)
    machine.done("install-hooks")
    (machine.root / QEMU).write_text(f"{MARK}\n")
    machine.done("install-hooks")
    assert seen == {(), ("50-vgpu-libvirt",)}


def test_a_launcher_runs_this_very_interpreter_and_package(machine: Machine, host: Host) -> None:
    machine.done("install-hooks")
    assert machine.read(ENTRY).startswith(f"#!{sys.executable} -BIS\n")
    host.gpu()
    done = subprocess.run(
        [machine.root / ENTRY, "web1", "prepare", "begin", "-"],
        input=domain_xml(hostdevs={"ua-x": VF}),
        capture_output=True,
        text=True,
        env=host.environment,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    done = subprocess.run(
        [machine.root / COMMAND, "list"],
        capture_output=True,
        text=True,
        env=host.environment,
        check=False,
    )
    assert done.stdout.startswith("GPU 0000:3d:00.0")


def test_an_interpreter_that_no_launcher_can_name_is_refused(tmp_path: Path) -> None:
    for path in ("/opt/my venv/bin/python3", f"/opt/{'x' * 130}/bin/python3"):
        with pytest.raises(InstallError, match="put the venv elsewhere"):
            installing.plan(config.Paths(), "", Program(path), with_units=False)


def test_a_distributions_package_is_told_that_it_has_its_own_hooks(tmp_path: Path) -> None:
    program = Program(packages=str(tmp_path))
    with pytest.raises(InstallError, match="a distribution's package brings its hooks itself"):
        installing.plan(config.Paths(), "", program, with_units=False)


@needs_root
def test_code_that_others_than_root_can_change_is_found() -> None:
    with directory_for_all() as directory:
        package = directory / "venv/vgpu_libvirt"
        package.mkdir(parents=True)
        program = Program("/usr/bin/python3", str(package.parent))
        assert installing.unsafe_part(program) is None
        package.chmod(0o777)
        assert installing.unsafe_part(program) == str(package)
        package.chmod(0o755)
        os.chown(package.parent, 65534, 65534)
        assert installing.unsafe_part(program) == str(package.parent)


def test_a_daemon_is_told_by_its_pid_file_and_its_name(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    signalled: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: signalled.append((pid, number)))
    host.process(900, "virtqemud")
    host.process(901, "sleep")
    host.write(host.root / "libvirtd.pid", "811\n")
    host.write(host.root / "virtqemud.pid", "901\n")  # stale, and the pid is another's now
    told = installing.tell_libvirt(host.paths)
    assert signalled == [(811, signal.SIGHUP)]
    assert told == ("libvirtd (pid 811) was asked to look for its hooks.",)
    host.write(host.root / "virtqemud.pid", "12345\n")
    host.write(host.root / "libvirtd.pid", "junk\n")
    (sentence,) = installing.tell_libvirt(host.paths)
    assert sentence.startswith("libvirtd couldn't be asked to look for its hooks, restart it: ")


def test_libvirt_is_told_only_of_a_first_hook_for_qemu(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without --root, on a host whose directories are all below one."""
    told: list[object] = []
    monkeypatch.setattr(installing, "tell_libvirt", lambda paths: told.append(paths) or ("Told.",))
    monkeypatch.setattr(installing, "unsafe_part", lambda _: None)
    monkeypatch.setattr(installing, "BIN", str(tmp_path / "bin"))
    runner = CliRunner(env=host.environment)
    assert runner.invoke(main, ["install-hooks"]).output.endswith("\nTold.\n")
    hook = host.root / "libvirt-etc/hooks/qemu.d/50-vgpu-libvirt"
    hook.write_text(f"#!/bin/sh\n{MARK}\n")
    assert "was written" in runner.invoke(main, ["install-hooks"]).output
    assert told == [host.paths]


@pytest.fixture
def systemd(host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host below one directory, on which systemd runs; where its commands note their calls."""
    calls = tmp_path / "calls"
    for name in ("systemctl", "systemd-tmpfiles"):
        command = host.write(tmp_path / f"fake/{name}", f'#!/bin/sh\necho "{name} $*" >>{calls}\n')
        command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/fake:{os.environ['PATH']}")
    monkeypatch.setattr(installing, "unsafe_part", lambda _: None)
    monkeypatch.setattr(installing, "BIN", str(tmp_path / "bin"))
    for module in (installing, config):
        monkeypatch.setattr(module, "UNITS", str(tmp_path / "units"))
    monkeypatch.setattr(installing, "_TMPFILES", str(tmp_path / "tmpfiles/vgpu-libvirt.conf"))
    Path(host.paths.systemd).mkdir(parents=True)
    return calls


def on_the_host(host: Host, *arguments: str) -> Result:
    environment = {**host.environment, "PATH": os.environ["PATH"]}
    return CliRunner(env=environment).invoke(main, arguments, prog_name="virt-vgpu")


def test_units_are_enabled_and_disabled_where_systemd_runs(host: Host, systemd: Path) -> None:
    assert on_the_host(host, "install-hooks", "--units").exit_code == 0
    directory = REPOSITORY / "packaging/systemd"
    wanted = sorted(p.name for p in directory.iterdir() if "[Install]" in p.read_text().split())
    later = [name for name in wanted if name.endswith(".service")]
    assert systemd.read_text().splitlines() == [
        "systemd-tmpfiles --create vgpu-libvirt.conf",
        "systemctl --quiet daemon-reload",
        f"systemctl --quiet enable {' '.join(later)}",
        f"systemctl --quiet enable --now {' '.join(n for n in wanted if n not in later)}",
    ]
    systemd.unlink()
    assert on_the_host(host, "uninstall-hooks").exit_code == 0
    units = " ".join(sorted(path.name for path in directory.iterdir()))
    assert systemd.read_text() == f"systemctl --quiet disable --now {units}\n"


def test_a_systemctl_that_fails_is_a_sentence(host: Host, systemd: Path, tmp_path: Path) -> None:
    (tmp_path / "fake/systemctl").write_text("#!/bin/sh\necho 'no\nbus' >&2\nexit 1\n")
    result = on_the_host(host, "install-hooks", "--units")
    assert result.exit_code == 1
    assert "error: 'systemctl --quiet daemon-reload' failed: no bus\n" in result.output


def test_where_systemd_does_not_run_nothing_is_enabled(host: Host, systemd: Path) -> None:
    Path(host.paths.systemd).rmdir()
    result = on_the_host(host, "install-hooks", "--units")
    assert result.output.endswith("systemd doesn't run here; nothing was enabled.\n")
    assert on_the_host(host, "uninstall-hooks").exit_code == 0
    assert not systemd.exists()


def test_it_refuses_what_is_unsafe_only_on_the_host_itself(
    host: Host, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installing, "unsafe_part", lambda _: "/home/me/venv")
    machine.done("install-hooks")
    monkeypatch.setattr(installing, "BIN", str(machine.root / "bin"))
    result = CliRunner(env=host.environment).invoke(main, ["install-hooks"], prog_name="virt-vgpu")
    assert result.exit_code == 1
    assert "/home/me/venv can be changed by others than root" in result.output
    assert not (host.root / "libvirt-etc").exists()


def test_a_venv_s_interpreter_without_site_finds_the_standard_library(tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", symlinks=True)
    python = tmp_path / "venv/bin/python3"
    program = Program(str(python), str(REPOSITORY))
    files = installing.plan(config.Paths(), str(tmp_path / "root"), program, with_units=False)
    assert installing.find(files[0]) is Found.NOTHING
    installing.write(files[0])
    assert installing.find(files[0]) is Found.SAME
    done = subprocess.run(
        [files[0].path, "web1", "prepare", "begin", "-"],
        input=domain_xml(),
        capture_output=True,
        text=True,
        env={},
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
