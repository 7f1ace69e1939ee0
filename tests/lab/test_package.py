# SPDX-License-Identifier: LGPL-2.1-or-later
"""The Debian package's whole life, over guests that run: they never notice any of it.

tests/run builds the package on the host, and installs it here in place of the checkout.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.lab import deb
from tests.lab.deb import NEWER
from tests.lab.guest import (
    CLAIMS,
    HOOKS,
    OUR_HOOK,
    PROFILE_ID,
    SYSTEMD,
    VF1,
    VF2,
    assert_free,
    claim,
    define,
    domain_xml,
    holds,
    is_running,
    restart_libvirtd,
    run,
    start,
    sync,
    type_of,
    virsh,
    writes_to,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.promise(1, 3, 7)


def dpkg(*arguments: str | Path) -> str:
    done = run("dpkg", *map(str, arguments))
    assert done.status == 0, done.output
    return done.output


@pytest.fixture(scope="session")
def package() -> Path:
    return deb.built()


@pytest.fixture(scope="session")
def newer(package: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return deb.newer(package, tmp_path_factory.mktemp("newer"))


@pytest.fixture(autouse=True)
def installed(clean: None, package: Path) -> Iterator[None]:
    yield
    wanted = run("dpkg-deb", "-f", str(package), "Version").output.strip()
    now = run("dpkg-query", "-W", "-f", "${db:Status-Status} ${Version}", "vgpu-libvirt").output
    if now != f"installed {wanted}":
        dpkg("--install", package)


@contextmanager
def an_untouched_guest() -> Iterator[None]:
    """web1 runs on VF1; whatever is done inside, it still does, with its vGPU and its claim."""
    start("web1", VF1)
    before, writes = claim(VF1), writes_to(VF1)
    yield
    assert is_running("web1")
    assert holds("web1", VF1)
    assert type_of(VF1) == PROFILE_ID
    assert writes_to(VF1) == writes
    assert claim(VF1) == before


@contextmanager
def hooks_all_the_time() -> Iterator[None]:
    """libvirt's hooks of a domain that has a hostdev run one after the other; all succeed."""
    xml = domain_xml("other", VF2, profile=None)
    ended: list[tuple[int, str]] = []
    over = threading.Event()

    def run_hooks() -> None:
        while not over.is_set():
            try:
                done = run(str(OUR_HOOK), "other", "release", "end", "-", stdin=xml)
            except FileNotFoundError:
                ended.append((-1, "no hook"))
            else:
                ended.append((done.status, done.output))

    thread = threading.Thread(target=run_hooks)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(60)
    assert len(ended) > 3
    assert set(ended) == {(0, "")}


def hook_files() -> list[str]:
    return sorted(path.name for path in HOOKS.iterdir())


def version() -> str:
    return run("virt-vgpu", "--version").output.split()[-1]


def test_an_upgrade_over_a_running_guest(newer: Path) -> None:
    with an_untouched_guest():
        with hooks_all_the_time():
            dpkg("--install", newer)
        assert version() == NEWER
        assert OUR_HOOK.read_text().endswith("# newer\n")
        assert hook_files() == [OUR_HOOK.name]
        listed = run("virt-vgpu", "list")
        assert listed.status == 0
        assert "web1" in listed.output
    virsh("destroy", "web1")
    assert_free(VF1)


def test_what_is_unpacked_but_not_configured_serves_as_before(newer: Path) -> None:
    before = version()
    with an_untouched_guest():
        dpkg("--unpack", newer)
        assert version() == before
        assert hook_files() == [OUR_HOOK.name]
        start("web2", VF2)
        assert holds("web2", VF2)
        virsh("destroy", "web2")
        assert_free(VF2)
        dpkg("--configure", "vgpu-libvirt")
        assert version() == NEWER


def test_removal_leaves_guest_and_claim_and_the_next_installation_carries_on(package: Path) -> None:
    with an_untouched_guest():
        said = dpkg("--remove", "vgpu-libvirt")
        assert "the claims in /var/lib/vgpu-libvirt/claims stay" in said
        assert not OUR_HOOK.exists()
        assert not shutil.which("virt-vgpu")
        assert not Path("/usr/lib/vgpu-libvirt").exists()
    virsh("destroy", "web1")
    assert type_of(VF1) == PROFILE_ID, "nobody is there to clear it"
    dpkg("--install", package)
    assert sync()["released"] == [VF1]
    assert_free(VF1)


def test_purge_leaves_the_store_while_a_guest_has_a_claim(package: Path) -> None:
    with an_untouched_guest():
        said = dpkg("--purge", "vgpu-libvirt")
        assert "/var/lib/vgpu-libvirt is left" in said
    dpkg("--install", package)
    virsh("destroy", "web1")
    assert_free(VF1)
    assert "is left" not in dpkg("--purge", "vgpu-libvirt")
    assert not CLAIMS.parent.exists()
    assert not Path("/etc/vgpu-libvirt").exists()


def test_a_libvirt_that_had_no_hooks_finds_those_that_come(package: Path) -> None:
    dpkg("--remove", "vgpu-libvirt")
    restart_libvirtd()
    SYSTEMD.rmdir()  # its systemctl isn't here
    dpkg("--install", package)
    SYSTEMD.mkdir()
    define("web1", VF1)
    virsh("start", "web1")
    assert claim(VF1) is not None
    virsh("destroy", "web1")
    assert_free(VF1)


def test_hooks_find_compiled_code(package: Path) -> None:
    command = ["/usr/bin/python3", "-BISv", "/usr/bin/vgpu-libvirt-hook", "a", "started", "b", "-"]
    done = subprocess.run(
        command, input=domain_xml("a", VF1), capture_output=True, text=True, env=os.environ
    )
    ours = [line for line in done.stderr.splitlines() if "/vgpu_libvirt/" in line]
    assert any("matches" in line for line in ours)
    assert not [line for line in ours if line.startswith("# code object from '")
                and line.endswith(".py'")], "nothing was compiled anew"  # fmt: skip
