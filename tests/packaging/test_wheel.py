# SPDX-License-Identifier: LGPL-2.1-or-later
"""The wheel has all modules, and what `virt-vgpu install-hooks` installs."""

from __future__ import annotations

import venv
import zipfile
from typing import TYPE_CHECKING

import pytest

from tests.packaging.conftest import ENVIRONMENT, run
from tests.packaging.test_deb import modules, units
from tests.unit.host import REPOSITORY, domain_xml

if TYPE_CHECKING:
    from pathlib import Path

    from tests.unit.host import Host

DATA = {
    "vgpu_libvirt/hooks/daemon",
    "vgpu_libvirt/hooks/qemu",
    "vgpu_libvirt/packaging/tmpfiles/vgpu-libvirt.conf",
    "vgpu_libvirt/packaging/vgpu-libvirt-hook.in",
    "vgpu_libvirt/packaging/virt-vgpu.in",
}


def test_it_has_exactly_what_it_should(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    found = {name for name in names if ".dist-info/" not in name}
    data = DATA | {f"vgpu_libvirt/packaging/systemd/{unit}" for unit in units()}
    assert (
        found
        == {f"vgpu_libvirt/{name.partition('/vgpu_libvirt/')[2]}" for name in modules()} | data
    )


@pytest.fixture
def environment(wheel: Path, tmp_path: Path) -> Path:
    """A venv with the wheel; its libraries are the distribution's."""
    venv.create(tmp_path / "venv", system_site_packages=True, symlinks=True, with_pip=True)
    done = run(
        *(tmp_path / "venv/bin/python", "-m", "pip", "install", "--quiet", "--no-deps"),
        *("--no-index", "--disable-pip-version-check", wheel),
    )
    assert done.returncode == 0, done.stdout
    return tmp_path / "venv"


def test_hooks_of_a_venv_run_its_package(environment: Path, tmp_path: Path, host: Host) -> None:
    root = tmp_path / "root"
    done = run(environment / "bin/virt-vgpu", "install-hooks", "--units", "--root", root)
    assert done.returncode == 0, done.stdout
    hook = root / "etc/libvirt/hooks/qemu.d/50-vgpu-libvirt"
    assert hook.exists()
    assert (root / "etc/systemd/system/vgpu-libvirt-sync.service").exists()
    entry = root / "usr/bin/vgpu-libvirt-hook"
    assert str(environment) in entry.read_text()
    assert str(REPOSITORY) not in entry.read_text()
    xml = domain_xml(hostdevs={"ua-x": "0000:3d:00.4"})
    for operation in ("prepare", "release"):
        bare = {**ENVIRONMENT, **host.environment}
        done = run(entry, "web1", operation, "begin", "-", input=xml, env=bare)
        assert (done.returncode, done.stdout) == (0, "")
    command = root / "usr/bin/virt-vgpu"
    assert run(command, "--version").stdout.startswith("virt-vgpu, version")
    done = run(command, "uninstall-hooks", "--root", root)
    assert done.returncode == 0, done.stdout
    assert not [path for path in root.rglob("*") if not path.is_dir()]
