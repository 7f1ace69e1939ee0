# SPDX-License-Identifier: LGPL-2.1-or-later
"""`hooks/qemu`: domains that didn't ask never notice us, whatever is broken behind it."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.unit.host import REPOSITORY, domain_xml, web1

if TYPE_CHECKING:
    from pathlib import Path

STUB = REPOSITORY / "hooks/qemu"
VF = "0000:3d:00.4"
PLAIN = domain_xml()
HOSTDEV = domain_xml(hostdevs={"ua-x": VF})
ASKS = web1(VF)
MAY_REFUSE = ["prepare", "start", "migrate", "restore"]
FILTERS = ["migrate", "restore"]  # which give it on
MAY_NOT = ["started", "stopped", "release", "reconnect", "attach"]

pytestmark = [
    pytest.mark.promise(6, 7),
    pytest.mark.skipif(os.geteuid() != 0, reason="the stub leaves at once for other users"),
]


def run(
    entry: Path | str, xml: str, *arguments: str, user: int | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [STUB, *arguments],
        input=xml,
        env={"PATH": os.environ["PATH"], "LC_ALL": "C", "VGPU_LIBVIRT_HOOK": str(entry)},
        capture_output=True,
        text=True,
        timeout=30,
        user=user,
    )


def hook(entry: Path | str, operation: str, xml: str) -> subprocess.CompletedProcess[str]:
    return run(entry, xml, "web1", operation, "begin", "-")


@pytest.fixture
def entry(tmp_path: Path) -> Path:
    """An entry point that notes what it was given, and does what the file `answer` says."""
    path = tmp_path / "entry"
    path.write_text(
        "#!/bin/sh\n"
        f'echo "$*" >{tmp_path}/arguments\ncat >{tmp_path}/document\n'
        f'echo "$VGPU_LIBVIRT_PARENT" >{tmp_path}/parent\n. {tmp_path}/answer\n'
    )
    path.chmod(0o755)
    (tmp_path / "answer").write_text("exit 0\n")
    return path


@pytest.mark.parametrize("operation", [*MAY_REFUSE, *MAY_NOT])
def test_a_domain_without_hostdev_or_request_never_reaches_the_entry_point(
    entry: Path, operation: str
) -> None:
    done = hook(entry, operation, PLAIN)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not (entry.parent / "document").exists()


@pytest.mark.parametrize("xml", [HOSTDEV, ASKS], ids=["hostdev", "asks"])
@pytest.mark.parametrize("operation", [*MAY_REFUSE, *MAY_NOT])
def test_others_are_handed_over_whole(entry: Path, operation: str, xml: str) -> None:
    for document in (xml, xml.rstrip("\n"), xml + "\n\n\n", xml.replace("web1", "w\\n%s$(x)ü")):
        assert hook(entry, operation, document).returncode == 0
        handed = (entry.parent / "document").read_text()
        assert handed == (document if operation in FILTERS else document.rstrip("\n"))
    assert (entry.parent / "arguments").read_text() == f"web1 {operation} begin -\n"
    assert (entry.parent / "parent").read_text() == f"{os.getpid()}\n"


@pytest.mark.parametrize("operation", MAY_REFUSE)
def test_a_refusal_of_a_domain_that_asks(entry: Path, operation: str) -> None:
    (entry.parent / "answer").write_text("echo no >&2; exit 1\n")
    done = hook(entry, operation, ASKS)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "no\n")


@pytest.mark.parametrize("operation", FILTERS)
def test_only_the_filters_of_a_domain_that_asks_may_answer(entry: Path, operation: str) -> None:
    (entry.parent / "answer").write_text("echo '<domain/>'\n")
    assert hook(entry, operation, ASKS).stdout == "<domain/>\n"
    assert hook(entry, operation, HOSTDEV).stdout == ""


@pytest.mark.parametrize("xml", [HOSTDEV, ASKS], ids=["hostdev", "asks"])
@pytest.mark.parametrize("operation", MAY_NOT)
@pytest.mark.parametrize("answer", ["exit 1", "exit 3", "exit 127", "kill -9 $$", "echo x"])
def test_what_must_not_fail_does_not(entry: Path, operation: str, xml: str, answer: str) -> None:
    (entry.parent / "answer").write_text(answer + "\n")
    done = hook(entry, operation, xml)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("operation", MAY_REFUSE)
@pytest.mark.parametrize(
    ("answer", "status"),
    [("exit 1", 0), ("exit 2", 0), ("exit 3", 1), ("exit 127", 0), ("kill -9 $$", 0)],
)
def test_a_bystander_is_refused_only_on_purpose(
    entry: Path, operation: str, answer: str, status: int
) -> None:
    (entry.parent / "answer").write_text(answer + "\n")
    assert hook(entry, operation, HOSTDEV).returncode == status


@pytest.mark.parametrize("operation", MAY_REFUSE)
@pytest.mark.parametrize("kind", ["missing", "not executable", "no interpreter", "killed"])
def test_a_broken_entry_point_blocks_those_that_ask_with_a_sentence(
    tmp_path: Path, operation: str, kind: str
) -> None:
    path = tmp_path / "entry"
    if kind != "missing":
        path.write_text(
            "#!/no/such/python\n" if kind == "no interpreter" else "#!/bin/sh\nkill -9 $$\n"
        )
        path.chmod(0o644 if kind == "not executable" else 0o755)
    done = hook(path, operation, ASKS)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"vgpu-libvirt: {path} ")
    assert last.endswith("so domain 'web1' can't get its vGPU; reinstall vgpu-libvirt")
    assert hook(path, operation, HOSTDEV).returncode == 0
    assert hook(path, operation, PLAIN).returncode == 0


@pytest.mark.parametrize("operation", MAY_NOT)
def test_a_missing_entry_point_never_kills(tmp_path: Path, operation: str) -> None:
    done = hook(tmp_path / "missing", operation, ASKS)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_broken_package_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "entry"
    text = (REPOSITORY / "packaging/vgpu-libvirt-hook.in").read_text()
    path.write_text(text.replace("@PYTHONDIR@", str(tmp_path)))
    path.chmod(0o755)
    done = hook(path, "prepare", ASKS)
    assert done.returncode == 1
    assert done.stderr == (
        f"vgpu-libvirt: the package in {tmp_path} is broken, reinstall it: "
        "No module named 'vgpu_libvirt'\n"
    )
    assert hook(path, "prepare", HOSTDEV).returncode == 0
    assert hook(path, "reconnect", ASKS).returncode == 0


def test_the_namespace_in_a_description_is_no_request(entry: Path) -> None:
    (entry.parent / "answer").write_text("exit 1\n")
    described = "<description>see urn:vgpu-libvirt:domain:1</description>"
    assert hook(entry, "prepare", domain_xml(extra=described)).returncode == 0
    assert not (entry.parent / "document").exists()


def test_the_default_namespace_form_is_a_request(entry: Path) -> None:
    (entry.parent / "answer").write_text("exit 1\n")
    metadata = "<metadata><devices xmlns='urn:vgpu-libvirt:domain:1'/></metadata>"
    assert hook(entry, "prepare", domain_xml(extra=metadata)).returncode == 1


def test_other_users_daemons_leave_at_once(entry: Path) -> None:
    entry.parent.chmod(0o777)
    done = run(entry, ASKS, "web1", "prepare", "begin", "-", user=65534)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not (entry.parent / "document").exists()


def test_an_operation_that_we_do_not_know(entry: Path) -> None:
    assert hook(entry, "hibernate", ASKS).returncode == 0
    assert not (entry.parent / "document").exists()


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        ([], 2),
        (["web1"], 2),
        (["web1", "prepare"], 2),
        (["web1", "prepare", "begin", "-", "more"], 2),
        (["web1", "release"], 0),
        (["web1", "reconnect", "begin"], 0),
        (["web1", "hibernate"], 0),
    ],
)
def test_wrong_usage(entry: Path, arguments: list[str], status: int) -> None:
    done = run(entry, ASKS, *arguments)
    assert done.returncode == status
    assert done.stderr == (
        f"usage: {STUB} NAME OPERATION SUBOPERATION EXTRA <XML\n" if status else ""
    )


def test_a_large_document_survives(entry: Path) -> None:
    big = ASKS.replace("<devices>", f"<!-- {'x' * 3_000_000} --><devices>")
    assert hook(entry, "prepare", big).returncode == 0
    assert (entry.parent / "document").read_text() == big.rstrip("\n")
