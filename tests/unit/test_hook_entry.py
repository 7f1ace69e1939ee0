# SPDX-License-Identifier: LGPL-2.1-or-later
"""The entry point of the hook: what it takes in, how it answers, and how little it imports."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from bench.installed import install
from tests.unit.host import LIBVIRTD, WEB1, WEB2, Host, domain_xml, entry_point, web1, web2
from tests.unit.support import VF, directory_for_all, nobody, python
from vgpu_libvirt import hook
from vgpu_libvirt.claims import store

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.unit.gpus import Gpus

NS = "urn:vgpu-libvirt:domain:1"
USAGE = "usage: vgpu-libvirt-hook NAME OPERATION SUBOPERATION EXTRA <XML\n"
MAY_REFUSE = ["prepare", "start", "migrate", "restore"]
MAY_NOT = ["started", "stopped", "release", "reconnect", "attach"]
HOSTDEV = domain_xml(hostdevs={"ua-x": VF})
USB = domain_xml(
    hostdevs="<hostdev mode='subsystem' type='usb'><source><address bus='1' device='2'/>"
    "</source></hostdev>"
)


class Answer:
    """What the entry point does with its arguments and a document."""

    def __init__(self, host: Host, document: bytes | str, *arguments: str) -> None:
        stdin = io.BytesIO(document if isinstance(document, bytes) else document.encode())
        stderr = io.StringIO()
        environment = {**host.environment, "VGPU_LIBVIRT_PARENT": str(LIBVIRTD)}
        streams = hook.Streams(stdin, io.BytesIO(), stderr)
        self.status = hook.main(list(arguments), streams, environment)
        self.unread = stdin.read()
        self.stderr = stderr.getvalue()


def run(host: Host, operation: str, document: bytes | str) -> Answer:
    return Answer(host, document, "web1", operation, "begin", "-")


def refusal(host: Host, operation: str, document: bytes | str) -> str:
    """The one sentence with which a start is refused."""
    answer = run(host, operation, document)
    assert answer.status == 1
    assert answer.stderr.startswith("vgpu-libvirt: ")
    assert answer.stderr.endswith("\n")
    assert answer.stderr.count("\n") == 1
    return answer.stderr.removeprefix("vgpu-libvirt: ").rstrip()


# --- usage ---


@pytest.mark.parametrize("operation", [*MAY_REFUSE, *MAY_NOT, "hibernate"])
@pytest.mark.parametrize(
    "document", [b"", b"<domain", b"\xff" * 100_000, web1(VF).encode()], ids=["", "x", "y", "z"]
)
def test_the_document_is_always_read_to_its_end(
    host: Host, operation: str, document: bytes
) -> None:
    assert run(host, operation, document).unread == b""
    assert Answer(host, document, "web1", operation).unread == b""
    assert Answer(host, document).unread == b""


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        ([], 2),
        (["web1"], 2),
        (["web1", ""], 2),
        (["web1", "prepare"], 2),
        (["web1", "start", "begin"], 2),
        (["web1", "restore", "begin", "-", "more"], 2),
        (["web1", "release"], 0),
        (["web1", "started", "begin", "-", "more"], 0),
        (["web1", "hibernate"], 0),
    ],
)
def test_wrong_usage_is_told_where_it_can_kill_no_guest(
    host: Host, arguments: list[str], status: int
) -> None:
    answer = Answer(host, web1(VF), *arguments)
    assert (answer.status, answer.stderr) == (status, USAGE if status else "")


@pytest.mark.parametrize("operation", ["hibernate", "PREPARE", "prepare ", "-h", "--help"])
def test_an_operation_that_we_do_not_know_is_nothing(host: Host, operation: str) -> None:
    before = host.tree()
    answer = run(host, operation, "no XML at all")
    assert (answer.status, answer.stderr) == (0, "")
    assert host.tree() == before


# --- documents that can't be read ---

BROKEN = [
    (b"", "not well-formed XML: no element found: line 1, column 0"),
    (b"\xff\xfe<domain/>", "the domain's XML is not in UTF-8"),
    (b"<domain", "not well-formed XML: unclosed token: line 1, column 0"),
    (b"<network/>", "a document of <network>, not of <domain>"),
    (b"<domain/>", "a domain without name or UUID"),
]


@pytest.mark.parametrize(("document", "reason"), BROKEN)
@pytest.mark.parametrize("operation", [*MAY_REFUSE, *MAY_NOT])
def test_what_is_no_domain_is_told_and_nobody_is_refused(
    host: Host, operation: str, document: bytes, reason: str
) -> None:
    answer = run(host, operation, document)
    assert (answer.status, answer.stderr) == (0, f"vgpu-libvirt: {reason}\n")


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        (f"<!-- '{NS}'", "not well-formed XML"),
        (f"\xff'{NS}'".encode("latin-1"), "the domain's XML is not in UTF-8"),
        (web1(VF)[:-9], "not well-formed XML"),
    ],
)
@pytest.mark.parametrize("operation", MAY_REFUSE)
def test_one_that_may_ask_is_refused(
    host: Host, operation: str, document: bytes | str, reason: str
) -> None:
    assert refusal(host, operation, document).startswith(reason)
    for harmless in MAY_NOT:
        assert run(host, harmless, document).status == 0


def test_a_request_that_cannot_be_understood_is_refused(host: Host) -> None:
    host.gpu()
    sentence = refusal(host, "prepare", web1(VF).replace("profile=", "porfile="))
    assert "'web1' can't be understood: unknown attribute 'porfile'" in sentence


@pytest.mark.parametrize("newline", ["&#10;", "&#13;", "&#x2028;", "&#x85;"])
def test_a_refusal_is_one_line_whatever_the_request_says(host: Host, newline: str) -> None:
    host.gpu()
    sentence = refusal(host, "prepare", web1(VF, f"NVIDIA{newline}L40S-8Q"))
    assert sentence.startswith("profile 'NVIDIA L40S-8Q' is unknown")


# --- whatever is broken with us ---


def break_config(host: Host) -> None:
    (host.root / "config.toml").write_text("[paths\n")


def break_store(host: Host) -> None:
    shutil.rmtree(host.state, ignore_errors=True)
    host.state.write_text("")


def break_lock(host: Host) -> None:
    (host.state / "lock").unlink(missing_ok=True)
    (host.state / "lock").mkdir(parents=True)


def break_inventory(host: Host) -> None:
    host.write(host.status_file("bad"), "<domst")


def break_proc(host: Host) -> None:
    shutil.rmtree(host.proc)


def break_sysfs(host: Host) -> None:
    shutil.rmtree(host.sysfs)


BREAK = [break_config, break_store, break_lock, break_inventory, break_proc, break_sysfs]


@pytest.mark.promise(6)
@pytest.mark.parametrize("spoil", BREAK)
@pytest.mark.parametrize("xml", [domain_xml(), USB, HOSTDEV], ids=["plain", "usb", "pci"])
def test_a_domain_that_did_not_ask_starts_whatever_is_broken(
    host: Host, spoil: Callable[[Host], None], xml: str
) -> None:
    host.gpu()
    host.set_type(VF, 1152)
    spoil(host)
    for operation in (*MAY_REFUSE, *MAY_NOT):
        assert run(host, operation, xml).status == 0


@pytest.mark.promise(7)
@pytest.mark.parametrize("spoil", BREAK)
def test_no_guest_dies_whatever_is_broken(
    host: Host, gpus: Gpus, spoil: Callable[[Host], None]
) -> None:
    xml = web1(gpus.device())
    assert run(host, "prepare", xml).status == 0
    spoil(host)
    for operation in MAY_NOT:
        assert run(host, operation, xml).status == 0
    assert host.sysfs.exists() is (spoil is not break_sysfs)


@pytest.mark.parametrize("spoil", [break_config, break_store, break_lock, break_proc, break_sysfs])
def test_one_that_asks_is_refused_with_a_sentence(
    host: Host, gpus: Gpus, spoil: Callable[[Host], None]
) -> None:
    device = gpus.device()
    spoil(host)
    refusal(host, "prepare", web1(device))
    assert not host.sysfs.exists() or gpus.type_of(device) == 0


def test_a_start_goes_on_though_other_domains_status_cannot_be_read(host: Host, gpus: Gpus) -> None:
    break_inventory(host)
    assert run(host, "prepare", web1(gpus.device())).status == 0


@pytest.mark.promise(7)
def test_a_bug_of_ours_is_one_sentence_and_kills_nobody(
    host: Host, gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bug is planted in the standard library, where no code of ours expects it."""
    xml = web1(gpus.device())

    def broken(_path: str) -> list[str]:
        raise ZeroDivisionError("two\nlines")

    monkeypatch.setattr(os, "listdir", broken)
    sentence = "internal error, please report it: ZeroDivisionError: two lines"
    assert refusal(host, "prepare", xml) == sentence
    for operation in MAY_NOT:
        answer = run(host, operation, xml)
        assert (answer.status, answer.stderr) in (
            (0, f"vgpu-libvirt: {sentence}\n"),
            (0, ""),
        )
    for operation in (*MAY_REFUSE, *MAY_NOT):
        assert run(host, operation, HOSTDEV).status == 0


def test_a_bystander_is_refused_with_a_status_of_its_own(host: Host) -> None:
    host.gpu()
    assert run(host, "prepare", web2(VF)).status == 0
    answer = run(host, "prepare", HOSTDEV)
    assert answer.status == 3
    assert answer.stderr.startswith(
        f"vgpu-libvirt: a hostdev of domain 'web1' points at {VF}, a vGPU that belongs to domain "
        f"'web2' ({WEB2})"
    )


@pytest.mark.parametrize("operation", ["migrate", "restore"])
def test_a_filter_changes_nothing_it_was_not_asked_to(host: Host, operation: str) -> None:
    host.gpu()
    before = host.tree()
    for xml in (domain_xml(), USB, HOSTDEV):
        answer = run(host, operation, xml)
        assert (answer.status, answer.stderr) == (0, "")
    assert host.tree() == before


def test_without_the_stubs_word_the_parent_is_our_own(host: Host) -> None:
    host.gpu()
    for parent in ("", "x", "-1", "\u0664"):
        environment = {**host.environment, "VGPU_LIBVIRT_PARENT": parent}
        arguments = ["web1", "prepare", "begin", "-"]
        streams = hook.Streams(io.BytesIO(web1(VF).encode()), io.BytesIO(), io.StringIO())
        assert hook.main(arguments, streams, environment) == 0
        claim = store.read(host.paths.state, VF)
        assert claim is not None
        assert claim.daemon is None
        (host.state / f"claims/{VF}.json").unlink()
        host.set_type(VF, 0)


def test_an_ordinary_user_gets_a_sentence_too() -> None:
    with directory_for_all() as directory:
        host = Host(directory / "host")
        host.gpu()
        host.root.chmod(0o555)
        with nobody():
            sentence = refusal(host, "prepare", web1(VF))
        host.root.chmod(0o755)
        assert sentence.endswith("can't be opened: permission denied")
        assert host.type_of(VF) == "0"


# --- what the process loads ---

NEVER = {
    *("asyncio", "click", "dataclasses", "filelock", "inspect", "libvirt", "logging", "lxml"),
    *("pathlib", "prometheus_client", "psutil", "rich", "shutil", "socket", "subprocess"),
    *("syslog", "tempfile", "threading", "urllib"),
}
LOADED = """
import atexit, os
atexit.register(lambda: print(*sorted(sys.modules), file=open(os.environ["LOADED"], "w")))
from vgpu_libvirt.hook import run
run()
"""


def loaded(host: Host, tmp_path: Path, operation: str, xml: str) -> tuple[int, set[str]]:
    """The exit status of a hook's process, and the modules it had loaded at its end."""
    path = tmp_path / "loaded"
    done = subprocess.run(
        python(LOADED, "web1", operation, "begin", "-"),
        input=xml,
        text=True,
        capture_output=True,
        env={**host.environment, "LOADED": str(path), "VGPU_LIBVIRT_PARENT": str(LIBVIRTD)},
    )
    return done.returncode, set(path.read_text().split())


@pytest.mark.promise(8)
def test_a_whole_life_loads_only_a_small_part_of_the_standard_library(
    host: Host, tmp_path: Path
) -> None:
    host.gpu()
    xml = web1(VF)
    for operation in (*MAY_REFUSE, *MAY_NOT):
        status, modules = loaded(host, tmp_path, operation, xml)
        assert (operation, status, modules & NEVER) == (operation, 0, set())
    assert host.claim(VF) is None


def test_a_host_without_a_configuration_file_does_not_pay_for_toml(
    host: Host, tmp_path: Path
) -> None:
    (host.root / "config.toml").unlink()
    status, modules = loaded(host, tmp_path, "start", HOSTDEV)
    assert status == 0
    assert "vgpu_libvirt.config" in modules
    assert "tomllib" not in modules


def test_and_without_one_a_start_and_a_stop_load_neither_typing_nor_regular_expressions(
    host: Host, tmp_path: Path
) -> None:
    """They are half of a hook's time. tomllib, for a configuration, needs both."""
    vf = host.gpu()[0]
    note = "import atexit, sys\natexit.register(lambda: print(*sorted(sys.modules)))\n"
    entry = install(tmp_path / "installed", host.paths, note)
    for operation in ("prepare", "start", "started", "stopped", "release"):
        if operation == "started":
            host.run_domain("web1", WEB1, 4001, web1(vf))
        if operation == "release":
            host.end_domain("web1", 4001)
        done = subprocess.run(
            [entry, "web1", operation, "begin", "-"],
            input=web1(vf),
            text=True,
            capture_output=True,
            env={"PATH": os.environ["PATH"], "VGPU_LIBVIRT_PARENT": str(LIBVIRTD)},
        )
        assert (done.returncode, done.stderr) == (0, "")
        modules = set(done.stdout.split())
        assert "vgpu_libvirt.hook" in modules
        assert modules & {*NEVER, "json", "re", "tomllib", "typing"} == set()
    assert host.claim(vf) is None


@pytest.mark.promise(6)
@pytest.mark.parametrize("operation", MAY_REFUSE)
def test_a_bystander_pays_for_neither_json_nor_what_writes(
    host: Host, tmp_path: Path, operation: str
) -> None:
    host.gpu(vfs=1)
    plain = domain_xml(hostdevs={"ua-x": "0000:41:00.0"})
    status, modules = loaded(host, tmp_path, operation, plain)
    assert status == 0
    assert modules & (NEVER | {"json", "vgpu_libvirt.lifecycle.release"}) == set()


@pytest.mark.parametrize("operation", MAY_REFUSE)
def test_a_bystander_without_a_pci_hostdev_is_let_go_at_once(
    host: Host, tmp_path: Path, operation: str
) -> None:
    status, modules = loaded(host, tmp_path, operation, USB)
    assert status == 0
    assert {name for name in modules if name.startswith("vgpu_libvirt.")} == {
        "vgpu_libvirt.address",
        "vgpu_libvirt.domain",
        "vgpu_libvirt.domain.model",
        "vgpu_libvirt.domain.read",
        "vgpu_libvirt.errors",
        "vgpu_libvirt.hook",
        "vgpu_libvirt.records",
        "vgpu_libvirt.sets",
    }


def test_the_installed_entry_point_takes_nothing_from_its_surroundings(
    host: Host, tmp_path: Path
) -> None:
    host.gpu()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/json.py").write_text("raise SystemExit(9)\n")
    done = subprocess.run(
        [entry_point(tmp_path), "web1", "prepare", "begin", "-"],
        input=web1(VF),
        text=True,
        capture_output=True,
        cwd=tmp_path / "elsewhere",
        env={**host.environment, "PYTHONPATH": str(tmp_path / "elsewhere")},
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert host.type_of(VF) == "1152"
