# SPDX-License-Identifier: LGPL-2.1-or-later
"""Syncs that nobody runs by hand: by the units, by the worker, and what autostart could not start.

The lab has no systemd; what its path units do is done here, by what the installed files say.
"""

from __future__ import annotations

import configparser
import contextlib
import fcntl
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.lab.guest import (
    PROFILE,
    SYSTEMD,
    TRIGGER,
    VF1,
    Answer,
    define,
    domain_xml,
    holds,
    is_running,
    refused,
    restart_libvirtd,
    run,
    start,
    sync,
    until,
    uuid_of,
    virsh,
)
from tests.lab.test_pointing import define_request, where
from vgpu_libvirt.domain.read import parse_domain

if TYPE_CHECKING:
    from collections.abc import Iterator

UNITS = Path("/usr/lib/systemd/system")
AUTOSTARTED = Path("/run/libvirt/qemu/autostarted")  # libvirt makes it at a boot's first start
LIBVIRTD_CONF = Path("/etc/libvirt/libvirtd.conf")


def unit(name: str, section: str, key: str) -> str:
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read(UNITS / name)
    return parser[section][key]


class PathUnits:
    """What systemd does with our path units: it doesn't watch while the service runs."""

    def __init__(self) -> None:
        self.end = threading.Event()
        self.runs: list[Answer] = []
        self.changed = threading.Lock()  # a sync is ordered after the service of changes
        self.threads = [threading.Thread(target=self.watch), threading.Thread(target=self.serve)]

    def watch(self) -> None:
        """vgpu-libvirt-changed.path"""
        directory = Path(unit("vgpu-libvirt-changed.path", "Path", "PathChanged"))
        command = unit("vgpu-libvirt-changed.service", "Service", "ExecStart").split()
        seen = self.look(directory)
        while not self.end.wait(0.1):
            if self.look(directory) != seen:
                with self.changed:
                    assert run(*command).status == 0
                    seen = self.look(directory)

    def look(self, directory: Path) -> list[tuple[str, int]]:
        return sorted((path.name, path.lstat().st_ino) for path in directory.glob("*.xml"))

    def serve(self) -> None:
        """vgpu-libvirt-sync.path"""
        trigger = Path(unit("vgpu-libvirt-sync.path", "Path", "PathExists"))
        command = unit("vgpu-libvirt-sync.service", "Service", "ExecStart").split()
        assert unit("vgpu-libvirt-sync.service", "Unit", "After").startswith("vgpu-libvirt-changed")
        while not self.end.wait(0.1):
            if trigger.exists():
                with self.changed:
                    pass
                self.runs.append(run(*command))

    def is_quiet(self) -> bool:
        return not TRIGGER.exists()


@pytest.fixture
def units(clean: None) -> Iterator[PathUnits]:
    there = PathUnits()
    for thread in there.threads:
        thread.start()
    yield there
    there.end.set()
    for thread in there.threads:
        thread.join()
    assert [answer for answer in there.runs if answer.status] == []


@pytest.fixture
def workers(clean: None) -> Iterator[None]:
    """A host without systemd; at the end no worker is left."""
    SYSTEMD.rmdir()
    yield
    SYSTEMD.mkdir()
    assert until(no_worker_runs)


def no_worker_runs() -> bool:
    if TRIGGER.exists():
        return False
    with (
        contextlib.suppress(FileNotFoundError),
        Path("/run/vgpu-libvirt/worker.lock").open() as lock,
    ):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def points(name: str, elsewhere_than: str = "") -> bool:
    """Whether a definition has its hostdev, which it hasn't while a sync moves it."""
    hostdev = parse_domain(virsh("dumpxml", "--inactive", name)).hostdev("ua-vgpu0")
    return hostdev is not None and str(hostdev.address) != elsewhere_than


# --- the units ---


def test_metadata_alone_is_enough_a_moment_later(units: PathUnits) -> None:
    define_request("web1")
    assert until(lambda: points("web1"))
    virsh("start", "web1")
    assert holds("web1", where("web1"))
    assert until(units.is_quiet)


def test_a_burst_of_definitions_is_pointed_by_few_runs(units: PathUnits) -> None:
    names = [f"web{number}" for number in range(6)]
    for name in names:
        define_request(name)
    assert until(lambda: all(points(name) for name in names))
    assert len({where(name) for name in names}) == len(names)
    assert until(units.is_quiet)
    assert len(units.runs) <= 5


def test_a_definition_that_comes_while_a_sync_runs_is_seen(units: PathUnits) -> None:
    define_request("web1")
    assert until(TRIGGER.exists)
    assert until(lambda: not TRIGGER.exists()), "it has begun"
    define_request("web2")
    assert until(lambda: points("web1") and points("web2"))


def test_who_is_refused_is_pointed_elsewhere(units: PathUnits) -> None:
    start("web1", VF1)
    assert until(units.is_quiet)
    path = Path("/tmp/web2.xml")
    path.write_text(domain_xml("web2", VF1))
    virsh("define", str(path))
    assert until(lambda: points("web2", elsewhere_than=VF1))
    virsh("start", "web2")
    assert is_running("web1")


# --- the worker ---


def test_a_refused_start_asks_for_a_sync_by_itself_and_the_next_works(workers: None) -> None:
    start("web1", VF1)
    assert until(no_worker_runs)
    define("web2", VF1)
    assert f"{VF1} belongs to domain 'web1'" in refused("start", "web2")
    assert until(lambda: points("web2", elsewhere_than=VF1))
    virsh("start", "web2")
    assert is_running("web1")
    assert holds("web2", where("web2"))


# --- autostart ---


def boot_with_autostart() -> None:
    """libvirtd starts for the first time, and web1, which it should start, points at web2's."""
    start("web2", VF1)
    define("web1", VF1)
    virsh("autostart", "web1")
    assert run("libvirtd-stop").status == 0
    AUTOSTARTED.unlink()
    assert run("libvirtd-start").status == 0
    assert not is_running("web1")


def test_what_autostart_could_not_start_is_started_by_the_first_sync() -> None:
    boot_with_autostart()
    answer = sync()
    assert answer["started"] == [{"domain_uuid": uuid_of("web1"), "domain_name": "web1"}]
    assert answer["problems"] == []
    assert is_running("web1")
    assert is_running("web2")
    assert holds("web1", where("web1"))
    assert where("web1") != VF1
    virsh("destroy", "web1")
    assert sync()["started"] == [], "it stays off now"
    assert not is_running("web1")


def test_the_worker_does_so_once_libvirt_serves(workers: None) -> None:
    boot_with_autostart()
    assert until(lambda: is_running("web1"))
    assert holds("web1", where("web1"))


# --- people without root ---


@pytest.fixture
def ann() -> Iterator[None]:
    """A user of libvirt's group, with libvirt set up as Debian and others do with polkit away."""
    before = LIBVIRTD_CONF.read_text()
    LIBVIRTD_CONF.write_text(
        'unix_sock_group = "libvirt"\nunix_sock_rw_perms = "0770"\nauth_unix_rw = "none"\n'
    )
    restart_libvirtd()
    run("useradd", "--create-home", "--groups", "libvirt", "ann")
    yield
    LIBVIRTD_CONF.write_text(before)
    restart_libvirtd()


def as_ann(*arguments: str) -> Answer:
    return run("runuser", "-u", "ann", "--", "virt-vgpu", *arguments)


def test_a_user_of_libvirts_group_starts_by_the_systems_sync(ann: None, units: PathUnits) -> None:
    start("web1", VF1)
    assert until(units.is_quiet)
    units.end.set()  # nobody answers
    for thread in units.threads:
        thread.join()
    define("web2", VF1)
    sync()
    vf = where("web2")
    virsh("destroy", "web1")
    start("web1", vf)
    said = as_ann("start", "web2")
    assert said.status == 1
    assert "nobody has answered the wish for a sync for 20 s" in said.output
    server = PathUnits()
    for thread in server.threads:
        thread.start()
    try:
        said = as_ann("start", "web2")
    finally:
        server.end.set()
        for thread in server.threads:
            thread.join()
    assert said.status == 0, said.output
    assert f"'ua-vgpu0' ({PROFILE}) at {where('web2')} of GPU" in said.output
    assert where("web2") != vf
    assert is_running("web1")


def test_what_she_may_see_and_may_not_do(ann: None) -> None:
    start("web1", VF1)
    for verb in ("list", "status", "profiles"):
        shown = as_ann(verb)
        assert shown.status == 0
        assert "run as root" in shown.output, verb
    assert "web1" in as_ann("list").output
    for arguments in (["sync"], ["release", VF1], ["cordon", VF1]):
        said = as_ann(*arguments)
        assert (said.status, said.output.count("\n")) == (1, 1)
        assert said.output.startswith("virt-vgpu: error: only root may ")
    virsh("destroy", "web1")
    assert as_ann("detach", "web1").status == 0
    assert as_ann("attach", "web1", "--profile", PROFILE).status == 0
