# SPDX-License-Identifier: LGPL-2.1-or-later
"""Who holds a VFIO file open: told of trees in the shape of /proc, and of real processes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.unit.support import child, needs_root, nobody
from vgpu_libvirt.claims.handles import Handles, scan

if TYPE_CHECKING:
    from tests.unit.host import Host

pytestmark = pytest.mark.promise(1, 4)

QEMU = 4001


def holders(host: Host) -> dict[str, set[int]]:
    handles = scan(host.paths.proc)
    assert handles.unknown == ()
    return {node: set(pids) for node, pids in handles.holders.items()}


@pytest.mark.parametrize(
    ("target", "node"),
    [
        ("/dev/vfio/61", "vfio/61"),
        ("/dev/vfio/devices/vfio7", "vfio/devices/vfio7"),
        ("/dev/vfio/61 (deleted)", "vfio/61"),
        ("/dev/vfio/devices/vfio7 (deleted)", "vfio/devices/vfio7"),
        ("/run/libvirt/qemu/7-web1.dev/vfio/61", "vfio/61"),
        ("/run/libvirt/qemu/7-web1.dev/vfio/devices/vfio7", "vfio/devices/vfio7"),
        ("/vfio/61", "vfio/61"),
        ("/mnt/vfio/dev/vfio/61", "vfio/61"),
    ],
)
def test_a_group_or_a_device_of_its_own_under_any_mount(host: Host, target: str, node: str) -> None:
    host.process(QEMU, opens=("/dev/kvm", target, "anon_inode:kvm-vm"))
    assert holders(host) == {node: {QEMU}}
    assert scan(host.paths.proc).on(frozenset({node, "vfio/99"})) == {QEMU}


@pytest.mark.parametrize(
    "target",
    [
        "/dev/null",
        "socket:[42]",
        "anon_inode:[vfio-device]",
        "/dev/vfio",
        "/srv/vfio61",
        "pipe:[1]",
    ],
)
def test_other_files_are_no_handles(host: Host, target: str) -> None:
    host.process(QEMU, opens=(target,))
    assert holders(host) == {}


def test_groups_whose_numbers_begin_alike_are_others(host: Host) -> None:
    host.process(QEMU, opens=("/dev/vfio/61",))
    assert scan(host.paths.proc).on(frozenset({"vfio/6", "vfio/610", "vfio/vfio"})) == frozenset()


def test_all_holders_are_told(host: Host) -> None:
    host.process(QEMU, opens=("/dev/vfio/61", "/dev/vfio/61", "/dev/vfio/vfio"))
    host.process(4002, opens=("/dev/vfio/61",))
    assert holders(host) == {"vfio/61": {QEMU, 4002}, "vfio/vfio": {QEMU}}


def test_the_threads_that_outlived_their_leader_show_its_files(host: Host) -> None:
    host.process(QEMU, state="Z")
    for name in ("0", "1"):
        (host.proc / f"{QEMU}/fd" / name).unlink(missing_ok=True)
    thread = host.proc / f"{QEMU}/task/4009/fd"
    thread.mkdir(parents=True)
    (thread / "12").symlink_to("/dev/vfio/61")
    assert holders(host) == {"vfio/61": {QEMU}}


def test_a_zombie_through_and_through_holds_nothing(host: Host) -> None:
    host.process(QEMU, state="Z")
    (host.proc / f"{QEMU}/fd/0").unlink()
    assert holders(host) == {}


def test_processes_that_vanish_under_the_scan_are_no_doubt(host: Host) -> None:
    (host.proc / "5000").mkdir()  # no fd: gone
    (host.proc / "5001/task").mkdir(parents=True)
    host.process(QEMU, opens=("/dev/vfio/61",))
    assert holders(host) == {"vfio/61": {QEMU}}


def test_what_is_no_process_is_passed_over(host: Host) -> None:
    for name in ("self", "sys", "net", "12a"):
        path = host.proc / name / "fd"
        if not path.parent.is_symlink():
            path.mkdir(parents=True)
            (path / "3").symlink_to("/dev/vfio/61")
    assert holders(host) == {}


@pytest.mark.parametrize("what", ["fd", "task"])
def test_a_directory_that_cannot_be_listed_is_unknown(host: Host, what: str) -> None:
    directory = host.proc / "5000"
    directory.mkdir()
    if what == "task":
        (directory / "fd").mkdir()
    (directory / what).write_text("")
    host.process(QEMU, opens=("/dev/vfio/61",))
    handles = scan(host.paths.proc)
    assert handles.unknown == (f"{directory}/{what} can't be read: not a directory",)
    assert handles.on(frozenset({"vfio/61"})) == {QEMU}, "what can be seen is seen all the same"


def test_a_link_that_cannot_be_read_is_unknown(host: Host) -> None:
    host.process(QEMU, opens=("/dev/vfio/61",))
    (host.proc / f"{QEMU}/fd/9").write_text("")
    handles = scan(host.paths.proc)
    assert handles.unknown == (f"{host.proc}/{QEMU}/fd/9 can't be read: invalid argument",)
    assert handles.on(frozenset({"vfio/61"})) == {QEMU}


def test_no_proc_at_all_is_unknown(tmp_path: Path) -> None:
    assert scan(f"{tmp_path}/proc") == Handles(
        {}, (f"{tmp_path}/proc can't be read: no such file or directory",)
    )


def test_a_proc_that_hides_processes_is_unknown(host: Host) -> None:
    """Under hidepid, or systemd's ProtectProc, QEMU isn't even listed, and nothing fails."""
    host.end(1)
    assert scan(host.paths.proc).unknown == (
        f"{host.proc} doesn't show process 1, so it may hide others too",
    )


# --- real processes; regular files serve, since a path is all that is looked at ---

OPEN = """
import os
opened = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
if len(sys.argv) > 2:
    os.unlink(sys.argv[1])
print("open", flush=True)
sys.stdin.readline()
"""
# The leader ends, and a thread of its process goes on: what QEMU with vhost workers can look like.
LEADER_DIES = """
import ctypes, os, threading, time
opened = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
threading.Thread(target=time.sleep, args=(60,)).start()
print("open", flush=True)
ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[os.uname().machine], 0)  # exit, not _group
"""


def group(tmp_path: Path) -> tuple[Path, str]:
    """A file whose path ends as a group's, under a number that is nobody else's."""
    number = f"{os.getpid()}{os.urandom(4).hex()}"
    path = tmp_path / "vfio" / number
    path.parent.mkdir()
    return path, f"vfio/{number}"


@pytest.mark.parametrize("more", [[], ["unlink"]], ids=["there", "deleted"])
def test_a_process_that_has_it_open(tmp_path: Path, more: list[str]) -> None:
    path, node = group(tmp_path)
    with child(OPEN, path, *more) as process:
        assert scan("/proc").on(frozenset({node})) == {process.pid}
    assert scan("/proc").on(frozenset({node})) == frozenset()


def test_this_process_counts_too(tmp_path: Path) -> None:
    path, node = group(tmp_path)
    with path.open("w"):
        assert scan("/proc").on(frozenset({node})) == {os.getpid()}


@needs_root
def test_a_dead_leader_whose_thread_lives(tmp_path: Path) -> None:
    path, node = group(tmp_path)
    with child(LEADER_DIES, path) as process:
        stat = Path(f"/proc/{process.pid}/stat")
        while stat.read_text().rpartition(")")[2].split()[0] != "Z":
            pass
        assert os.listdir(f"/proc/{process.pid}/fd") == []
        assert scan("/proc").on(frozenset({node})) == {process.pid}
    assert scan("/proc").on(frozenset({node})) == frozenset()


@needs_root
def test_another_user_sees_that_it_does_not_see(tmp_path: Path) -> None:
    path, node = group(tmp_path)
    with child(OPEN, path) as process, nobody():
        handles = scan("/proc")
        assert handles.on(frozenset({node})) == frozenset()
        assert f"/proc/{process.pid}/fd can't be read: permission denied" in handles.unknown
