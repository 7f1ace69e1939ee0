# SPDX-License-Identifier: LGPL-2.1-or-later
"""The Debian package: what is in it, and that Debian's own checkers find nothing."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.packaging.conftest import run
from tests.unit.host import REPOSITORY
from vgpu_libvirt import __version__
from vgpu_libvirt.cli.main import main

PYTHON = "usr/lib/python3/dist-packages"
LIB = "usr/lib/vgpu-libvirt"
PROGRAMS = {
    "usr/bin/vgpu-libvirt-hook",
    "usr/bin/virt-vgpu",
    f"{LIB}/activate",
    "usr/share/vgpu-libvirt/hooks/daemon",
    "usr/share/vgpu-libvirt/hooks/qemu",
    "usr/share/python3/runtime.d/vgpu-libvirt.rtupdate",
}
FILES = {
    "etc/vgpu-libvirt/config.toml",
    "usr/lib/tmpfiles.d/vgpu-libvirt.conf",
    "usr/share/bash-completion/completions/virt-vgpu",
    "usr/share/doc/vgpu-libvirt/changelog.gz",
    "usr/share/doc/vgpu-libvirt/copyright",
    "usr/share/doc/vgpu-libvirt/examples/apparmor",
    "usr/share/fish/vendor_completions.d/virt-vgpu.fish",
    "usr/share/man/man1/vgpu-libvirt-hook.1.gz",
    "usr/share/man/man1/virt-vgpu.1.gz",
    "usr/share/man/man5/vgpu-libvirt.toml.5.gz",
    "usr/share/man/man7/vgpu-libvirt.7.gz",
    "usr/share/zsh/vendor-completions/_virt-vgpu",
}


def modules() -> set[str]:
    package = REPOSITORY / "vgpu_libvirt"
    found = [*package.rglob("*.py"), package / "py.typed"]
    return {f"{PYTHON}/{path.relative_to(REPOSITORY)}" for path in found}


def pages() -> set[str]:
    return {f"usr/share/man/man1/virt-vgpu-{verb}.1.gz" for verb in main.list_commands(None)}


def documents() -> set[str]:
    """README.md and docs/*.md; debhelper compresses the long ones."""
    found = [REPOSITORY / "README.md", *(REPOSITORY / "docs").glob("*.md")]
    ends = {path.name: ".gz" if path.stat().st_size > 4096 else "" for path in found}
    return {f"usr/share/doc/vgpu-libvirt/{name}{end}" for name, end in ends.items()}


def units() -> set[str]:
    return {path.name for path in (REPOSITORY / "packaging/systemd").iterdir()}


def installed_units() -> set[str]:
    """The units that are to be enabled."""
    directory = REPOSITORY / "packaging/systemd"
    return {n for n in units() if "[Install]" in (directory / n).read_text().split()}


@pytest.fixture(scope="session")
def tree(deb: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package, unpacked."""
    directory = tmp_path_factory.mktemp("tree")
    assert run("dpkg-deb", "-R", deb, directory).returncode == 0
    return directory


def field(deb: Path, name: str) -> str:
    return run("dpkg-deb", "-f", deb, name).stdout.strip()


def test_it_has_exactly_what_it_should(tree: Path) -> None:
    found = {
        str(path.relative_to(tree))
        for path in tree.rglob("*")
        if not path.is_dir() and path.relative_to(tree).parts[0] != "DEBIAN"
    }
    there = {name for name in found if "systemd/system/" in name}
    assert {Path(name).name for name in there} == units()
    assert len({str(Path(name).parent) for name in there}) == 1
    assert found - there == PROGRAMS | FILES | documents() | modules() | pages()


def test_programs_can_be_run_and_nothing_else(deb: Path) -> None:
    listed = run("sh", "-c", 'dpkg-deb --fsys-tarfile "$0" | tar -tv', deb).stdout
    for line in listed.splitlines():
        mode, owner, *_, name = line.split()
        assert owner == "root/root", line
        kind = "755" if name.endswith("/") or name.removeprefix("./") in PROGRAMS else "644"
        assert mode[1:] == {"755": "rwxr-xr-x", "644": "rw-r--r--"}[kind], line


def test_dpkg_never_puts_a_file_where_libvirt_runs_every_file(deb: Path, tree: Path) -> None:
    assert not (tree / "etc/libvirt").exists()
    assert (tree / "DEBIAN/conffiles").read_text() == "/etc/vgpu-libvirt/config.toml\n"


def test_it_needs_what_the_code_imports(deb: Path) -> None:
    imported = set()
    for path in (REPOSITORY / "vgpu_libvirt").rglob("*.py"):
        names = re.findall(r"^\s*(?:import|from) ([a-z]+)", path.read_text(), re.MULTILINE)
        imported |= {"click", "filelock", "libvirt", "lxml", "psutil", "rich"}.intersection(names)
    needed = re.findall(r"python3-(\w+)", field(deb, "Depends"))
    assert sorted(needed) == sorted(imported)
    project = (REPOSITORY / "pyproject.toml").read_text()
    block = re.search(r"^dependencies = \[(.*?)\]", project, re.DOTALL | re.MULTILINE)
    assert block
    named = re.findall(r'"([a-z-]+)>=', block[1].replace("libvirt-python", "libvirt"))
    assert named == sorted(imported)


def test_all_say_the_same_version(deb: Path, rpm: Path, wheel: Path) -> None:
    assert field(deb, "Version") == __version__
    assert run("rpm", "-qp", "--qf", "%{VERSION}", rpm).stdout == __version__
    assert wheel.name.split("-")[1] == __version__


def test_every_unit_with_an_install_section_is_enabled(tree: Path) -> None:
    script = (tree / "DEBIAN/postinst").read_text()
    enabled = set(re.findall(r"deb-systemd-helper enable '([^']+)'", script))
    assert enabled == installed_units()
    assert enabled
    started = re.findall(r"deb-systemd-invoke \$_dh_action (.+) >", script)
    assert "vgpu-libvirt-sync.timer" in "".join(started)
    assert ".service" not in "".join(started)


def test_hooks_are_made_live_before_anything_is_started(tree: Path) -> None:
    script = (tree / "DEBIAN/postinst").read_text()
    assert 0 < script.index("vgpu-libvirt/activate") < script.index("deb-systemd-invoke")


def test_lintian_finds_nothing(deb: Path) -> None:
    done = run("lintian", "--allow-root", "--fail-on", "error,warning", deb)
    assert (done.returncode, re.findall("^[EW]: .*", done.stdout, re.MULTILINE)) == (0, [])


def test_a_second_build_is_the_same_to_the_byte(deb: Path, tmp_path: Path) -> None:
    done = run(REPOSITORY / "packaging/build-deb", tmp_path, umask=0o077)
    assert done.returncode == 0, done.stdout
    (again,) = tmp_path.iterdir()
    assert again.read_bytes() == deb.read_bytes()


@pytest.fixture
def system(tree: Path, tmp_path: Path) -> Path:
    """A root directory with the package."""
    shutil.copytree(tree, tmp_path / "system", symlinks=True)
    return tmp_path / "system"


def test_systemd_understands_the_units(system: Path) -> None:
    for name in ("bin/sh", "usr/bin/sh"):
        (system / name).parent.mkdir(parents=True, exist_ok=True)
        (system / name).touch(0o755)
    (directory,) = {path.parent for path in system.rglob("systemd/system/*")}
    # its own targets, to which ours are wired
    for unit in ("timers", "paths", "multi-user", "local-fs", "sysinit", "shutdown", "basic"):
        (directory / f"{unit}.target").write_text(f"[Unit]\nDescription={unit}\n")
    done = run(
        "systemd-analyze", "verify", "--man=no", f"--root={system}", *sorted(units()), timeout=60
    )
    ours = [line for line in done.stdout.splitlines() if "vgpu" in line]
    assert (done.returncode, ours) == (0, []), done.stdout


def test_the_archive_has_no_absolute_path_of_the_build(deb: Path, tree: Path) -> None:
    for path in tree.rglob("*"):
        if path.is_file() and path.suffix not in (".gz", ".py"):
            assert str(REPOSITORY) not in path.read_text(), path
            assert not re.search(r"@[A-Z]+@", path.read_text()), path
