# SPDX-License-Identifier: LGPL-2.1-or-later
"""`exec`: programs that know nothing of us, and what they can and can't notice."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.unit.host import REPOSITORY, WEB2, domain_xml, web2

if TYPE_CHECKING:
    from tests.unit.host import Host

PRELOAD = REPOSITORY / "vgpu_libvirt/preload"
MAIN = "from vgpu_libvirt.cli.main import main; main()"
ASKS = domain_xml(requests={"ua-vgpu0": "NVIDIA L40S-8Q"}, number=None, extra="<memory>9</memory>")
ASKS = ASKS.replace("type='kvm'", "type='test'").replace("<devices>", "<os><type>hvm</type></os>")
ASKS = ASKS.replace("<emulator>/usr/bin/qemu-system-x86_64</emulator>", "<devices>")


def run(*command: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1", **variables}
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def run_exec(*arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    # -I as in packaging/virt-vgpu.in
    start = f"import sys; sys.path.insert(0, {str(REPOSITORY)!r}); {MAIN}"
    return run(sys.executable, "-I", "-c", start, "exec", *arguments, **variables)


def script(directory: Path, text: str, first: str = f"#!{sys.executable}") -> Path:
    path = directory / "program"
    path.write_text(f"{first}\n{text}")
    path.chmod(0o755)
    return path


@pytest.fixture
def served(host: Host) -> dict[str, str]:
    """The variables with which libvirt's test driver is this host's libvirt."""
    Path(host.paths.state).mkdir()
    host.gpu()
    path = host.root / "config.toml"
    path.write_text(f'[libvirt]\nuri = "test:///default"\n{path.read_text()}')
    return {"VGPU_LIBVIRT_CONFIG": str(path), "DOCUMENT": ASKS}


PROGRAM = """\
import libvirt, os, sys
connection = {connect}
domain = connection.{call}(os.environ["DOCUMENT"])
if "XML" in {call!r} and not domain.isActive():
    domain.create()
print(domain.XMLDesc())
"""


@pytest.mark.parametrize("call", ["createXML", "defineXML", "createLinux"])
@pytest.mark.parametrize(
    "connect",
    ["libvirt.open('test:///default')", "libvirt.openAuth('test:///default', [[], None, None])"],
)
def test_an_unmodified_program_gets_its_vgpu(
    host: Host, tmp_path: Path, served: dict[str, str], call: str, connect: str
) -> None:
    program = script(tmp_path, PROGRAM.format(call=call, connect=connect))
    assert "<hostdev" not in run(program, **served).stdout
    done = run_exec("--", program, **served)
    assert done.returncode == 0, done.stderr
    assert "<address domain='0x0000' bus='0x3d' slot='0x00' function='0x4'/>" in done.stdout
    claim = host.claim("0000:3d:00.4")
    assert claim is not None  # nobody runs our hook there, and the shim says so
    assert "libvirt didn't run our hook" in done.stderr


WAYS = {
    "defineXML": "domain = defined",
    "lookupByName": "domain = connection.lookupByName('web1')",
    "lookupByUUIDString": "domain = connection.lookupByUUIDString(defined.UUIDString())",
    "listAllDomains": "domain = connection.listAllDomains(2)[0]",  # inactive
    "getDomain": "domain = defined.snapshotCreateXML('<domainsnapshot/>').getDomain()",
    "an event": "domain = found[0]",
    "a class of its own": "class Own(libvirt.virDomain): pass\n"
    "defined.__class__ = Own; domain = defined",
}


@pytest.mark.parametrize("way", WAYS)
def test_wherever_a_domain_comes_from_its_start_is_seen_to(
    host: Host, tmp_path: Path, served: dict[str, str], way: str
) -> None:
    program = script(
        tmp_path,
        "import libvirt, os\n"
        "libvirt.virEventRegisterDefaultImpl()\n"
        "connection = libvirt.open('test:///default')\n"
        "found = []\n"
        "connection.domainEventRegisterAny(\n"
        "    None, libvirt.VIR_DOMAIN_EVENT_ID_LIFECYCLE, lambda c, d, *_: found.append(d), None)\n"
        "defined = connection.defineXML(os.environ['DOCUMENT'])\n"
        "while not found: libvirt.virEventRunDefaultImpl()\n"
        f"{WAYS[way]}\n"
        "print(isinstance(domain, libvirt.virDomain), domain.create())\n",
    )
    done = run_exec("--", program, **served)
    assert done.stdout == "True 0\n", done.stderr
    claim = host.claim("0000:3d:00.4")
    assert claim is not None
    assert claim.domain_name == "web1"


def test_a_read_only_connection_stays_one(tmp_path: Path, served: dict[str, str]) -> None:
    text = PROGRAM.format(call="defineXML", connect="libvirt.openReadOnly('test:///default')")
    done = run_exec("--", script(tmp_path, text), **served)
    assert "libvirtError: operation forbidden: read only access" in done.stderr


def test_what_fails_on_our_side_is_a_libvirt_error(
    host: Host, tmp_path: Path, served: dict[str, str]
) -> None:
    (host.state / "claims").write_text("no directory")
    text = PROGRAM.format(call="createXML", connect="libvirt.open('test:///default')")
    done = run_exec("--", script(tmp_path, text), **served)
    assert done.returncode == 1
    assert "\nlibvirt.libvirtError: vgpu-libvirt: the claims in" in done.stderr


# --- the launcher ---


def test_the_program_takes_its_place_with_its_arguments_and_status(tmp_path: Path) -> None:
    program = script(tmp_path, "import sys; print(sys.argv[1:]); sys.exit(7)")
    done = run_exec(program, "-x", "--", "a b")
    assert (done.returncode, done.stdout, done.stderr) == (7, "['-x', '--', 'a b']\n", "")


def test_it_is_found_in_the_path(tmp_path: Path) -> None:
    script(tmp_path, "print('found')")
    assert run_exec("--", "program", PATH=str(tmp_path)).stdout == "found\n"


def test_without_a_program_it_is_wrong_usage() -> None:
    for arguments in ([], ["--"]):
        done = run_exec(*arguments)
        assert done.returncode == 2
        assert "Missing argument 'PROGRAM" in done.stderr


def test_a_program_that_is_not_there_or_cannot_be_run(tmp_path: Path) -> None:
    done = run_exec("--", "nosuch", "-x")
    assert done.returncode == 127
    assert done.stderr == "virt-vgpu: error: nosuch can't be run: no such file or directory\n"
    plain = tmp_path / "plain"
    plain.write_text("")
    done = run_exec(plain)
    assert done.returncode == 126
    assert done.stderr == f"virt-vgpu: error: {plain} can't be run: permission denied\n"


def test_a_broken_pipe_ends_the_program_as_ever() -> None:
    done = run_exec("sh", "-c", "kill -PIPE $$; echo lives on")
    assert (done.returncode, done.stdout) == (-13, "")


@pytest.mark.parametrize(
    ("first", "option"),
    [
        ("#!/usr/bin/python3 -I", "-I, which passes over PYTHONPATH"),
        ("#!/usr/bin/python3.11 -sE", "-E, which passes over PYTHONPATH"),
        ("#! /usr/bin/env -S A=b python3 -uS", "-S, which passes over sitecustomize"),
        ("#!/usr/bin/python3 -sP", None),
        ("#!/usr/bin/python3 -WIgnore", None),
        ("#!/bin/sh -E", None),
    ],
)
def test_a_python_that_will_not_run_the_shim_is_named(
    tmp_path: Path, first: str, option: str | None
) -> None:
    program = script(tmp_path, "", first)
    said = run_exec("--", program).stderr.splitlines()[:1]
    warning = f"virt-vgpu: warning: {program} runs without the shim: it runs Python with {option}"
    assert (said == [warning]) == bool(option)


@pytest.mark.parametrize(
    ("arguments", "warned"), [(["-I", "-c", ""], True), (["-c", "", "-I"], False)]
)
def test_a_python_that_is_the_program_itself(arguments: list[str], warned: bool) -> None:
    done = run_exec(sys.executable, *arguments)
    assert ("it runs Python with -I" in done.stderr) == warned


# --- what a program can see ---


@pytest.mark.promise(6)
def test_a_program_without_libvirt_sees_nothing_of_us() -> None:
    show = (
        "import sys; print(sys.path, sorted(sys.modules), getattr(sys.modules.get('sitecustomize'),"
        " '__file__', None))"
    )
    done = run_exec(sys.executable, "-c", show)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == run(sys.executable, "-c", show).stdout


def test_its_own_sitecustomize_is_run(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('mine')\n")
    show = "import sitecustomize; print(sitecustomize.__file__)"
    done = run_exec(sys.executable, "-c", show, PYTHONPATH=str(tmp_path))
    assert done.stdout == f"mine\n{tmp_path}/sitecustomize.py\n"


def test_a_sitecustomize_that_fails_says_so_as_ever(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("1 / 0\n")
    done = run_exec(sys.executable, "-c", "print(1)", PYTHONPATH=str(tmp_path))
    plain = run(sys.executable, "-c", "print(1)", PYTHONPATH=str(tmp_path))
    assert (done.stdout, done.stderr) == (plain.stdout, plain.stderr)
    assert "ZeroDivisionError" in done.stderr


def test_children_inherit_it() -> None:
    # `libvirt` isn't loaded by our loader alone: what it is afterwards is what it would be.
    child = "import libvirt, sys; print('vgpu_libvirt' in sys.modules, libvirt.__loader__.path)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    done = run_exec(sys.executable, "-c", parent)
    assert done.stdout.startswith("True /"), done.stderr
    assert done.stdout.endswith("/libvirt.py\n")


@pytest.mark.promise(6)
def test_a_program_that_cannot_have_the_shim_goes_on_with_one_warning(tmp_path: Path) -> None:
    package = tmp_path / "vgpu_libvirt"
    shutil.copytree(PRELOAD, package / "preload")
    (package / "__init__.py").write_text("import nosuch\n")
    done = run(
        sys.executable,
        "-c",
        "import libvirt; print(libvirt.open('test:///default').getURI())",
        PYTHONPATH=str(package / "preload"),
    )
    assert (done.returncode, done.stdout) == (0, "test:///default\n")
    assert done.stderr == (
        f"vgpu-libvirt: no vGPUs for what {sys.executable} starts, since {package} can't be used "
        "there: ModuleNotFoundError: No module named 'nosuch'\n"
    )


def test_a_python_without_libvirt_says_so_as_ever() -> None:
    show = "import sys; sys.path[:] = []\ntry: import libvirt\nexcept ImportError as e: print(e)"
    done = run_exec(sys.executable, "-c", show)
    assert (done.stdout, done.stderr) == ("No module named 'libvirt'\n", "")


def cpu_seconds(**variables: str) -> float:
    """What a Python costs that does nothing; on a busy host the clock says little."""
    environment = {"PATH": os.environ["PATH"], **variables}
    pid = os.posix_spawn(sys.executable, [sys.executable, "-c", "pass"], environment)
    _, status, usage = os.wait4(pid, 0)
    assert status == 0
    return usage.ru_utime + usage.ru_stime


def test_other_programs_start_as_fast(tmp_path: Path) -> None:
    shutil.copytree(PRELOAD, tmp_path, dirs_exist_ok=True)
    subprocess.run([sys.executable, "-m", "compileall", "-q", tmp_path], check=True)
    pairs = [(cpu_seconds(), cpu_seconds(PYTHONPATH=str(tmp_path))) for _ in range(30)]
    plain, under = (min(column) for column in zip(*pairs, strict=True))
    assert under / plain <= 1.3


def test_a_domain_that_asks_for_nothing_is_started_as_ever(
    host: Host, tmp_path: Path, served: dict[str, str]
) -> None:
    served["DOCUMENT"] = ASKS.replace("urn:vgpu-libvirt:domain:1", "urn:x")
    text = PROGRAM.format(call="createXML", connect="libvirt.open('test:///default')")
    program = script(tmp_path, text)
    plain, under = run(program, **served), run_exec("--", program, **served)
    assert (under.stdout, under.stderr) == (plain.stdout, plain.stderr)
    assert "<uuid>" in plain.stdout
    assert not (host.state / "claims").exists()


def test_a_hostdev_of_a_document_is_pointed_elsewhere(
    host: Host, tmp_path: Path, served: dict[str, str]
) -> None:
    host.run_domain("web2", WEB2, 4001, web2("0000:3d:00.4"))
    served["DOCUMENT"] = ASKS.replace(
        "<devices>",
        "<devices><hostdev mode='subsystem' type='pci' managed='no'><source><address domain='0' "
        "bus='0x3d' slot='0' function='4'/></source><alias name='ua-vgpu0'/></hostdev>",
    )
    text = PROGRAM.format(call="createXML", connect="libvirt.open('test:///default')")
    done = run_exec("--", script(tmp_path, text), **served)
    assert "bus='0x3d' slot='0x00' function='0x5'/>" in done.stdout, done.stderr
