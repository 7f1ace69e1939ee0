# SPDX-License-Identifier: LGPL-2.1-or-later
"""Which domains run, by libvirt's status files and their processes; and when that isn't certain."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.unit.host import WEB1, WEB2, Host, domain_xml, web1, web2
from tests.unit.support import NOBODY, VF, directory_for_all, nobody
from vgpu_libvirt.claims.inventory import LiveDomain, Only, live_domain, live_domains
from vgpu_libvirt.claims.model import Process
from vgpu_libvirt.domain.read import parse_domain

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.promise(5)

OTHER = "0000:3d:00.5"


@pytest.fixture
def running(host: Host) -> Host:
    """A host on which web1 runs with VF."""
    host.run_domain("web1", WEB1, 4001, web1(VF))
    return host


def names(host: Host) -> list[str]:
    """The names of the live domains of a complete inventory."""
    live = live_domains(host.paths)
    assert live.problems == ()
    assert live.complete
    return [domain.name for domain in live.domains]


def problem(host: Host) -> str:
    """Why the inventory is incomplete, without the path in front."""
    live = live_domains(host.paths)
    assert not live.complete
    (sentence,) = live.problems
    assert sentence.startswith(f"the status file {host.paths.libvirt_run}/qemu/")
    return sentence.partition(".xml ")[2]


# --- complete ---


def test_what_is_told_of_a_running_domain(running: Host) -> None:
    (domain,) = live_domains(running.paths).domains
    assert domain == LiveDomain(
        WEB1,
        "web1",
        7,
        Process(4001, 90210),
        "/var/lib/libvirt/qemu/domain-7-web1/monitor.sock",
        frozenset({VF}),
        parse_domain(web1(VF)),
    )


def test_domains_are_found_by_uuid_and_by_device(running: Host) -> None:
    running.run_domain("web2", WEB2, 4002, web2(OTHER), number=8)
    live = live_domains(running.paths)
    by_uuid, using = live.by_uuid(WEB2), live.using(OTHER)
    assert by_uuid is not None
    assert by_uuid == using
    assert by_uuid.name == "web2"
    assert live.by_uuid("no") is live.using("0000:3d:00.6") is None


def test_the_devices_are_pci_and_mediated_ones(host: Host) -> None:
    mdev = "c4d3a1f6-0000-0000-0000-00000000000a"
    xml = domain_xml(
        hostdevs="<hostdev mode='subsystem' type='pci'><source><address bus='0x3d' function='4'/>"
        "</source></hostdev><hostdev mode='subsystem' type='mdev'><source>"
        f"<address uuid='{mdev}'/></source></hostdev><hostdev mode='subsystem' type='usb'>"
        "<source><address bus='1' device='2'/></source></hostdev>"
    )
    host.run_domain("web1", WEB1, 4001, xml)
    assert live_domains(host.paths).domains[0].devices == {VF, mdev}


@pytest.mark.parametrize("missing", ["qemu", ""])
def test_no_directory_no_domains(host: Host, missing: str) -> None:
    if not missing:
        Path(host.paths.libvirt_run).parent.mkdir(parents=True, exist_ok=True)
    else:
        Path(host.paths.libvirt_run).mkdir()
    assert names(host) == []


@pytest.mark.parametrize(
    "name", ["web1.xml.new", "web1.pid", "web1.xml~", ".web1.xml.swp", "autostart", "driver.pid"]
)
def test_other_files_are_no_status_files(running: Host, name: str) -> None:
    running.status_file("web1").with_name(name).write_text("<domst")
    assert names(running) == ["web1"]


def test_a_file_that_vanishes_while_we_look_is_a_domain_that_ended(
    running: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory still named it when it was listed."""
    listed = [*os.listdir(running.status_file("web1").parent), "web2.xml"]
    monkeypatch.setattr(os, "listdir", lambda _path: listed)
    assert names(running) == ["web1"]


# --- a status file counts together with its process ---


def dead(host: Host) -> None:
    host.end(4001)


def zombie(host: Host) -> None:
    host.end(4001)
    host.process(4001, state="Z")


def zombie_with_a_thread(host: Host) -> None:
    zombie(host)
    (host.proc / "4001/task/4009").mkdir()
    (host.proc / "4001/cmdline").write_text("")


def recycled(host: Host) -> None:
    host.end(4001)
    host.process(4001, "sleep", command="sleep 60", start=99999)


def recycled_by_another_domain(host: Host) -> None:
    host.end(4001)
    host.process(4001, command=f"qemu-system-x86_64 -uuid {WEB2}", start=99999)


def recycled_by_the_kernel(host: Host) -> None:
    host.end(4001)
    host.process(4001, "kworker/0:1")
    (host.proc / "4001/cmdline").write_text("")
    fields = ["I", "2", "0", "0", "0", "-1", str(0x04208060), *["0"] * 12, "99999"]
    (host.proc / "4001/stat").write_text(f"4001 (kworker/0:1) {' '.join(fields)}\n")


def recycled_with_odd_bytes(host: Host) -> None:
    """A name of 15 bytes, cut within a character, as the kernel cuts names."""
    recycled(host)
    for name in ("stat", "cmdline"):
        path = host.proc / "4001" / name
        path.write_bytes(path.read_bytes().replace(b"sleep", b"\xc3\xa9\xc3"))


def unreadable_command_line(host: Host) -> None:
    path = host.proc / "4001/cmdline"
    path.unlink()
    path.mkdir()


def odd_name(host: Host) -> None:
    path = host.proc / "4001/stat"
    path.write_text(path.read_text().replace("(qemu-system-x86)", "(a) S 1 (b\nc) d)"))


@pytest.mark.parametrize(
    ("what", "lives"),
    [
        (dead, False),
        (zombie, False),
        (zombie_with_a_thread, True),
        (recycled, False),
        (recycled_by_another_domain, False),
        (recycled_by_the_kernel, False),
        (recycled_with_odd_bytes, False),
        (unreadable_command_line, True),
        (odd_name, True),
    ],
)
def test_a_status_file_counts_with_its_process(
    running: Host, what: Callable[[Host], None], lives: bool
) -> None:
    what(running)
    assert names(running) == (["web1"] if lives else [])


def test_a_stale_file_says_nothing_of_others(running: Host) -> None:
    running.run_domain("web2", WEB2, 4002, web2(OTHER))
    running.end(4001)
    assert names(running) == ["web2"]
    assert live_domains(running.paths).using(VF) is None


# --- incomplete ---


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "can't be understood: not well-formed XML: no element found: line 1, column 0"),
        (b"\0" * 4096, "can't be understood: not well-formed XML: not well-formed (invalid token)"),
        (b"\xff\xfe", "can't be read: not a text in UTF-8"),
        (b"<domain/>", "can't be understood: a document of <domain>, not of <domstatus>"),
        (
            b"<domstatus pid='4001'/>",
            "can't be understood: a domain without name or UUID",
        ),
        (b"<!DOCTYPE x><x/>", "can't be understood: a document type declaration"),
        (b" " * (5 * 1024 * 1024), "can't be read: file too large"),
    ],
    ids=["empty", "zeros", "binary", "domain", "nothing in it", "doctype", "huge"],
)
def test_one_file_that_cannot_be_understood_makes_the_inventory_incomplete(
    running: Host, content: bytes, reason: str
) -> None:
    running.status_file("bad").write_bytes(content)
    assert problem(running).startswith(reason)
    assert [domain.name for domain in live_domains(running.paths).domains] == ["web1"]


def test_a_file_cut_off_anywhere_makes_the_inventory_incomplete(running: Host) -> None:
    file = running.status_file("web1")
    text = file.read_text().rstrip()
    for end in range(0, len(text), 7):
        file.write_text(text[:end])
        assert not live_domains(running.paths).complete


def test_so_does_one_of_a_domain_that_nobody_asked_for(running: Host) -> None:
    """Of those only the ends are looked at, and whether blocks of it were never written."""
    only = Only(frozenset({OTHER}), whole=True)
    file = running.status_file("web1")
    text = file.read_text().rstrip()
    assert live_domains(running.paths, only) == ((), ())
    for end in range(0, len(text), 7):
        file.write_text(text[:end])
        assert not live_domains(running.paths, only).complete
        file.write_text(text[:end].ljust(len(text), "\0"))
        assert not live_domains(running.paths, only).complete
    file.write_text(text.replace("<devices", "\0" * 8, 1) + "\n")
    assert not live_domains(running.paths, only).complete
    file.write_text(text + text)
    assert not live_domains(running.paths, only).complete


@pytest.mark.parametrize("pid", ["", "-1", "x", "9" * 5000])
def test_a_file_that_names_no_process(running: Host, pid: str) -> None:
    file = running.status_file("web1")
    file.write_text(file.read_text().replace("pid='4001'", f"pid='{pid}'"))
    assert problem(running) == "can't be understood: it names no process"


def test_a_set_of_cpus_without_end_costs_one_file(running: Host) -> None:
    xml = web2(OTHER, extra=f"<vcpu cpuset='0-{'9' * 30}'>1</vcpu>")
    running.run_domain("web2", WEB2, 4002, xml)
    assert problem(running).startswith("can't be understood: '0-999")
    assert live_domains(running.paths).by_uuid(WEB1) is not None


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("directory", "can't be read: is a directory"),
        ("loop", "can't be read: too many levels of symbolic links"),
        ("link to nothing", "can't be read: a link to nothing"),
        ("fifo", "can't be read: not a regular file"),
    ],
)
def test_what_is_no_file_hangs_nobody(running: Host, kind: str, reason: str) -> None:
    file = running.status_file("bad")
    if kind == "directory":
        file.mkdir()
    elif kind == "fifo":
        os.mkfifo(file)
    else:
        file.symlink_to(file if kind == "loop" else f"{file}.missing")
    assert problem(running) == reason


def test_a_process_whose_stat_is_garbage(running: Host) -> None:
    (running.proc / "4001/stat").write_text("4001 (qemu")
    assert problem(running) == f"can't be understood: {running.proc}/4001/stat is too short"


def test_a_process_that_cannot_be_looked_at(running: Host) -> None:
    (running.proc / "4001/stat").unlink()
    (running.proc / "4001/stat").mkdir()
    assert problem(running) == "can't be read: is a directory"


def test_a_directory_that_cannot_be_listed() -> None:
    with directory_for_all() as directory:
        host = Host(directory / "host")
        host.run_domain("web1", WEB1, 4001, web1(VF))
        qemu = Path(host.paths.libvirt_run) / "qemu"
        qemu.chmod(0)
        with nobody():
            live = live_domains(host.paths)
        qemu.chmod(0o755)
        assert live == ((), (f"{qemu} can't be read: permission denied",))
        host.status_file("web1").chmod(0)
        if os.geteuid() != NOBODY:
            with nobody():
                assert problem(host) == "can't be read: permission denied"


def test_a_file_in_the_place_of_the_directory(host: Host) -> None:
    host.write(Path(host.paths.libvirt_run) / "qemu", "")
    live = live_domains(host.paths)
    assert live.problems == (f"{host.paths.libvirt_run}/qemu can't be read: not a directory",)


# --- one domain ---


def test_one_domain_is_found_by_its_name_alone(running: Host) -> None:
    running.status_file("bad").write_text("")
    found = live_domain(running.paths, "web1", WEB1)
    assert found is not None
    assert found.uuid == WEB1


@pytest.mark.parametrize("file", ["a&amp;b", "renamed", "x" * 200])
def test_one_domain_is_found_under_whatever_name_its_file_has(running: Host, file: str) -> None:
    shutil.move(running.status_file("web1"), running.status_file(file))
    for name in ("web1", "a&b", "x" * 300, ""):
        found = live_domain(running.paths, name, WEB1)
        assert found is not None
        assert found.name == "web1"


def test_another_domain_of_that_name_is_another(running: Host) -> None:
    assert live_domain(running.paths, "web1", WEB2) is None


def test_one_domain_that_ended(running: Host) -> None:
    running.end(4001)
    assert live_domain(running.paths, "web1", WEB1) is None
