# SPDX-License-Identifier: LGPL-2.1-or-later
"""Asking for a sync: who does, that it costs no start anything, and what may be planted there."""

from __future__ import annotations

import grp
import os
import stat
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from tests.unit.host import LIBVIRTD, Host, domain_xml, web1, web2
from tests.unit.support import NOBODY, directory_for_all, needs_root, nobody
from tests.unit.test_hook_entry import Answer
from tests.unit.test_lifecycle import start
from vgpu_libvirt import trigger
from vgpu_libvirt.cli.main import main
from vgpu_libvirt.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Callable

    from vgpu_libvirt.config import Paths


@pytest.fixture
def paths(host: Host) -> Paths:
    return host.paths


def mode(path: str) -> int:
    return stat.S_IMODE(os.lstat(path).st_mode)


def wanted(paths: Paths) -> Path:
    return Path(paths.runtime) / "wanted"


def test_asked_for_once_or_often_it_is_there_until_it_is_taken(paths: Paths) -> None:
    assert not trigger.is_set(paths)
    for _ in range(3):
        trigger.ask(paths)
    assert trigger.is_set(paths)
    assert os.listdir(wanted(paths)) == ["sync"]
    trigger.take(paths)
    assert not trigger.is_set(paths)
    trigger.take(paths)


def test_others_may_look_at_the_directory_of_both_but_not_ask(paths: Paths) -> None:
    trigger.ask(paths)
    assert mode(paths.runtime) == 0o755
    assert mode(str(wanted(paths))) == 0o700


# --- the group ---


def group(monkeypatch: pytest.MonkeyPatch, gid: int) -> None:
    monkeypatch.setattr(
        grp, "getgrnam", lambda name: {"libvirt": SimpleNamespace(gr_gid=gid)}[name]
    )


@needs_root
def test_libvirts_group_may_ask(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    group(monkeypatch, NOBODY)
    trigger.let_group_ask(host.paths)
    status = wanted(host.paths).stat()
    assert (status.st_uid, status.st_gid, mode(str(wanted(host.paths)))) == (0, NOBODY, 0o770)
    trigger.let_group_ask(host.paths)


def test_without_that_group_nobody_else_may(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grp, "getgrnam", {}.__getitem__)
    trigger.ask(paths)
    trigger.let_group_ask(paths)
    assert mode(str(wanted(paths))) == 0o700


@needs_root
def test_a_member_asks_and_root_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    with directory_for_all() as directory:
        host = Host(directory)
        group(monkeypatch, os.getegid())
        trigger.let_group_ask(host.paths)
        wanted(host.paths).chmod(0o770)
        with nobody():  # whose group is still ours
            trigger.ask(host.paths)
            trigger.ask(host.paths)
        assert os.lstat(trigger.path(host.paths)).st_uid == NOBODY
        trigger.ask(host.paths)
        trigger.take(host.paths)
        assert not trigger.is_set(host.paths)


def test_a_stranger_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    with directory_for_all() as directory:
        host = Host(directory)
        trigger.ask(host.paths)
        trigger.take(host.paths)
        wanted(host.paths).chmod(0o000 if os.geteuid() else 0o700)
        with nobody(), pytest.raises(PermissionError):
            trigger.ask(host.paths)
        wanted(host.paths).chmod(0o700)
        assert not trigger.is_set(host.paths)


# --- what may be planted ---


def a_link(path: Path, aside: Path) -> None:
    path.symlink_to(aside / "victim")


def a_link_to_a_file(path: Path, aside: Path) -> None:
    (aside / "victim").write_text("precious\n")
    path.symlink_to(aside / "victim")


def a_fifo(path: Path, aside: Path) -> None:
    os.mkfifo(path)


def a_directory(path: Path, aside: Path) -> None:
    (path / "in/it").mkdir(parents=True)
    (path / "link").symlink_to(aside)
    (aside / "victim").write_text("precious\n")


PLANTED = [a_link, a_link_to_a_file, a_fifo, a_directory]


@pytest.mark.parametrize("plant", PLANTED)
def test_whatever_is_planted_counts_as_asked_and_goes(
    host: Host, tmp_path: Path, plant: Callable[[Path, Path], None]
) -> None:
    aside = tmp_path / "aside"
    aside.mkdir()
    wanted(host.paths).mkdir(parents=True)
    plant(Path(trigger.path(host.paths)), aside)
    before = {path: path.read_text() for path in aside.iterdir()}
    asking = threading.Thread(target=trigger.ask, args=(host.paths,), daemon=True)
    asking.start()
    asking.join(5)
    assert not asking.is_alive(), "it hangs"
    assert trigger.is_set(host.paths)
    trigger.take(host.paths)
    assert not trigger.is_set(host.paths)
    assert {path: path.read_text() for path in aside.iterdir()} == before
    trigger.ask(host.paths)
    assert os.path.isfile(trigger.path(host.paths))


@needs_root
def test_the_directory_itself_is_no_link_that_we_follow(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group(monkeypatch, NOBODY)
    Path(host.paths.runtime).mkdir()
    (tmp_path / "aside").mkdir(mode=0o700)
    wanted(host.paths).symlink_to(tmp_path / "aside")
    with pytest.raises(OSError, match="directory"):
        trigger.let_group_ask(host.paths)
    assert mode(str(tmp_path / "aside")) == 0o700


def test_one_that_cannot_be_removed_is_told(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_path: str) -> None:
        raise OSError(30, "Read-only file system")

    trigger.ask(host.paths)
    monkeypatch.setattr(os, "unlink", refuse)
    with pytest.raises(StoreError, match="wanted/sync can't be removed: Read-only file system"):
        trigger.take(host.paths)


# --- the definitions ---


def test_every_change_of_the_definitions_shows(host: Host) -> None:
    directory = Path(host.paths.libvirt_etc) / "qemu"
    seen = [trigger.definitions(host.paths)]
    assert seen == [frozenset()]

    def differs() -> bool:
        now = trigger.definitions(host.paths)
        seen.append(now)
        return now not in seen[:-1]

    host.write(directory / "web1.xml", "<domain/>")
    assert differs()
    host.write(directory / "web2.xml", "<domain/>")
    assert differs()
    host.write(directory / "web1.xml.new", "<domain/>")
    assert not differs(), "it isn't that of a domain yet"
    os.utime(directory / "web1.xml.new", ns=(0, (directory / "web1.xml").stat().st_mtime_ns))
    (directory / "web1.xml.new").rename(directory / "web1.xml")
    assert differs(), "the time is the same, the file is another"
    os.utime(directory / "web1.xml", ns=(0, 1))
    assert differs()
    (directory / "web1.xml").rename(directory / "web3.xml")
    assert differs()
    (directory / "web2.xml").unlink()
    assert differs()
    (directory / "autostart").mkdir()
    assert not differs()


# --- hooks ask ---


def test_a_claim_a_release_and_a_refusal_ask(host: Host) -> None:
    vf = host.gpu()[0]
    for operation, xml, status in (
        ("prepare", web1(vf), 0),
        ("prepare", web2(vf), 1),
        ("release", web1(vf), 0),
    ):
        assert host.hook(operation, xml).status == status
        assert trigger.is_set(host.paths)
        trigger.take(host.paths)


def test_what_changes_no_claim_does_not(host: Host) -> None:
    vf = host.gpu()[0]
    xml = start(host, vf)
    trigger.take(host.paths)
    for operation in ("start", "started", "stopped", "reconnect", "attach"):
        host.hook(operation, xml)
        assert not trigger.is_set(host.paths), operation


@pytest.mark.promise(6)
def test_bystanders_do_not(host: Host) -> None:
    host.gpu()
    xml = domain_xml(hostdevs={"ua-x": "0000:00:1f.3"})
    for operation in ("prepare", "start", "started", "stopped", "release"):
        host.hook(operation, xml)
    assert not Path(host.paths.runtime).exists()


def test_a_daemon_that_starts_asks_and_others_do_not(host: Host) -> None:
    host.process(820, "virtnetworkd", start=4300)
    host.daemon_hook(parent=820)
    assert not trigger.is_set(host.paths)
    host.daemon_hook()
    assert trigger.is_set(host.paths)


def no_directory(paths: Paths) -> None:
    Path(paths.runtime).write_text("no directory")


def no_parent(paths: Paths) -> None:
    Path(paths.runtime).symlink_to("nowhere/at/all")


def a_file_for_a_directory(paths: Paths) -> None:
    Path(paths.runtime).mkdir()
    wanted(paths).write_text("no directory")


@pytest.mark.promise(7)
@pytest.mark.parametrize("spoil", [no_directory, no_parent, a_file_for_a_directory])
def test_what_hinders_asking_is_nothing_to_a_hook(
    host: Host, spoil: Callable[[Paths], None]
) -> None:
    vf = host.gpu()[0]
    spoil(host.paths)
    assert host.hook("prepare", web1(vf)) == (0, "", "")
    refused = host.hook("prepare", web2(vf))
    assert (refused.status, refused.stderr.count("\n")) == (1, 1)
    assert host.hook("release", web1(vf)) == (0, "", "")
    assert host.daemon_hook() == (0, "", "")


def test_systemd_asks_by_the_entry_point(host: Host) -> None:
    answer = Answer(host, b"", "--want-sync")
    assert (answer.status, answer.stderr) == (0, "")
    assert trigger.is_set(host.paths)
    trigger.take(host.paths)
    wanted(host.paths).rmdir()
    a_file_for = wanted(host.paths)
    a_file_for.write_text("no directory")
    answer = Answer(host, b"", "--want-sync")
    assert answer.status == 1
    assert answer.stderr.startswith("vgpu-libvirt: no sync can be asked for or run: ")


def test_verbs_that_change_what_is_free_ask_too(host: Host) -> None:
    vf = host.gpu()[0]
    start(host, vf)
    host.end_domain("web1", 4001)
    host.end(LIBVIRTD)
    for arguments in (["release", vf], ["cordon", vf], ["uncordon", vf]):
        trigger.take(host.paths)
        done = CliRunner().invoke(main, [*arguments, "--dry-run"], env=host.environment)
        assert (done.exit_code, trigger.is_set(host.paths)) == (0, False), done.output
        done = CliRunner().invoke(main, arguments, env=host.environment)
        assert (done.exit_code, trigger.is_set(host.paths)) == (0, True), done.output
