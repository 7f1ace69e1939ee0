# SPDX-License-Identifier: LGPL-2.1-or-later
"""What libvirt's autostart could not start runs after the first sync that reaches libvirt."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import libvirt
import pytest
from click.testing import CliRunner

from tests.unit.fake_libvirt import Connection, Domain, error
from tests.unit.host import LIBVIRTD, WEB1, WEB2, Host, web1, web2
from tests.unit.test_pointing import where
from vgpu_libvirt import fs, refused
from vgpu_libvirt.claims.model import Process
from vgpu_libvirt.cli.main import main

if TYPE_CHECKING:
    from collections.abc import Callable

DAEMON = Process(LIBVIRTD, 4242)


class Boot:
    """A host whose libvirt has run its autostart: web2 has the device that web1 points at."""

    def __init__(self, host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
        self.host = host
        self.paths = host.paths
        self.vfs = host.gpu()
        other = web2(self.vfs[0])
        assert host.hook("prepare", other).status == 0
        host.run_domain("web2", WEB2, 4002, other, opens=(host.nodes(self.vfs[0])[0],), number=8)
        self.domain = Domain(web1(self.vfs[0], number=None))
        self.domain.hook = host.hook
        self.domain.starts_at_boot = True
        self.connection = Connection(self.domain)
        monkeypatch.setattr(libvirt, "open", lambda _uri: self.connection)

    def autostart(self) -> None:
        """What libvirt does before it serves."""
        with pytest.raises(libvirt.libvirtError, match="belongs to domain 'web2'"):
            self.domain.createWithFlags(0)
        self.domain.writes.clear()

    def sync(self, *arguments: str) -> str:
        done = CliRunner().invoke(
            main, ["sync", *arguments], env=self.host.environment, prog_name="virt-vgpu"
        )
        assert (done.exit_code, done.exception) == (0, None), done.output
        return done.output

    def notes(self) -> list[str]:
        directory = Path(self.paths.runtime) / "refused"
        return os.listdir(directory) if directory.exists() else []

    def served(self) -> frozenset[Process]:
        return refused.served(self.paths)


@pytest.fixture
def boot(host: Host, monkeypatch: pytest.MonkeyPatch) -> Boot:
    return Boot(host, monkeypatch)


LINE = "Domain 'web1', which libvirt's autostart could not start, was started.\n"


def test_a_refused_autostart_is_made_good_once_libvirt_serves(boot: Boot) -> None:
    boot.autostart()
    assert refused.notes(boot.paths) == {WEB1: DAEMON}
    assert LINE in boot.sync()
    assert boot.domain.active
    assert where(boot.domain) == boot.vfs[1]
    assert (boot.notes(), boot.served()) == ([], {DAEMON})


def test_programs_are_told_too(boot: Boot) -> None:
    boot.autostart()
    answer = json.loads(boot.sync("--json"))
    assert answer["started"] == [{"domain_uuid": WEB1, "domain_name": "web1"}]
    assert json.loads(boot.sync("--json"))["started"] == []


@pytest.mark.promise(9)
def test_a_dry_run_says_so_and_keeps_the_note(boot: Boot) -> None:
    boot.autostart()
    before = boot.host.tree()
    assert LINE.replace("was", "would be") in boot.sync("--dry-run")
    assert boot.host.tree() == before
    assert boot.domain.writes == []
    assert LINE in boot.sync()


def test_a_domain_that_does_not_start_at_boot_is_left(boot: Boot) -> None:
    boot.domain.starts_at_boot = False
    boot.autostart()
    boot.sync()
    assert (boot.domain.active, boot.notes()) == (False, [])


@pytest.mark.parametrize("now", ["runs", "gone", "transient"])
def test_what_runs_by_then_or_has_no_definition_is_left(boot: Boot, now: str) -> None:
    boot.autostart()
    if now == "gone":
        boot.connection.domains.clear()
    boot.domain.active = now == "runs"
    boot.domain.persistent = now != "transient"
    boot.sync()
    assert "create" not in boot.domain.writes
    assert boot.notes() == []


def test_after_the_first_sync_a_refusal_is_its_users_affair(boot: Boot) -> None:
    boot.sync()
    boot.domain = Domain(web1(boot.vfs[0], number=None))
    boot.domain.hook, boot.domain.starts_at_boot = boot.host.hook, True
    boot.connection.domains[:] = [boot.domain]
    boot.autostart()
    assert boot.notes() == []
    note(boot.paths.runtime, f"{DAEMON.pid} {DAEMON.start}\n")
    boot.sync()
    assert (boot.domain.active, boot.notes()) == (False, [])


def note(runtime: str, text: str) -> None:
    path = Path(runtime) / "refused" / WEB1
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize("text", ["811 9\n", "", "x\n", "811\n", "811 4242 1\n", "\u0664 1\n"])
def test_a_note_of_another_daemon_or_none_is_only_removed(boot: Boot, text: str) -> None:
    note(boot.paths.runtime, text)
    boot.sync()
    assert (boot.domain.active, boot.notes()) == (False, [])


def test_a_restarted_daemon_is_another(boot: Boot) -> None:
    boot.sync()
    boot.host.end(LIBVIRTD)
    boot.host.process(LIBVIRTD, "libvirtd", start=5555)
    note(boot.paths.runtime, f"{LIBVIRTD} 5555\n")
    assert LINE in boot.sync()
    assert boot.served() == {Process(LIBVIRTD, 5555)}


def test_one_that_still_cannot_start_is_told_and_tried_no_more(boot: Boot) -> None:
    boot.autostart()
    boot.domain.qemu_fails = "cannot access storage file '/gone'"
    (problem,) = json.loads(boot.sync("--json"))["problems"]
    assert problem == (
        f"what libvirt could not start at boot still isn't: domain 'web1' ({WEB1}) can't be "
        "started: cannot access storage file '/gone'"
    )
    boot.domain.qemu_fails = None
    boot.sync()
    assert (boot.domain.active, boot.notes()) == (False, [])


def test_one_that_is_refused_again_meanwhile_is_tried_no_more(
    boot: Boot, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_path: str, _text: str) -> None:
        raise OSError(5, "Input/output error")

    boot.autostart()
    with monkeypatch.context() as patch:
        patch.setattr(fs, "write_attribute", fail)
        (problem,) = json.loads(boot.sync("--json"))["problems"]
    assert "the driver did not put NVIDIA L40S-8Q on" in problem
    assert boot.notes() == []
    boot.sync()
    assert not boot.domain.active


def test_a_saved_domain_is_restored_by_libvirt(boot: Boot) -> None:
    boot.autostart()
    boot.domain.saved = True
    boot.sync()
    assert boot.domain.active
    assert boot.domain.writes[-1] == "create"


def test_a_libvirt_that_does_not_answer_is_not_reached(
    boot: Boot, monkeypatch: pytest.MonkeyPatch
) -> None:
    def connect(_uri: str) -> None:
        raise error(38, "no")

    boot.autostart()
    with monkeypatch.context() as patch:
        patch.setattr(libvirt, "open", connect)
        boot.sync()
    boot.sync("--files-only")
    assert (boot.served(), boot.notes()) == (frozenset(), [WEB1])
    assert LINE in boot.sync()


def test_who_is_killed_in_the_middle_has_the_rest_started(
    boot: Boot, monkeypatch: pytest.MonkeyPatch
) -> None:
    boot.autostart()
    kill: list[Callable[[], None]] = [lambda: (_ for _ in ()).throw(KeyboardInterrupt())]
    real = refused.forget

    def forget(paths: object, uuid: str) -> None:
        if kill:
            kill.pop()()
        real(paths, uuid)  # type: ignore[arg-type]

    monkeypatch.setattr(refused, "forget", forget)
    assert CliRunner().invoke(main, ["sync"], env=boot.host.environment).exit_code == 130
    assert LINE in boot.sync()


def test_what_cannot_be_noted_is_nothing_to_a_hook(boot: Boot) -> None:
    boot.host.write(Path(boot.paths.runtime) / "refused", "no directory")
    boot.autostart()
    (problem,) = json.loads(boot.sync("--json"))["problems"]
    assert problem.startswith("what libvirt could not start at boot can't be told: ")


def test_a_refusal_by_an_unknown_daemon_or_of_an_odd_uuid_is_not_noted(boot: Boot) -> None:
    refused.note(boot.paths, WEB1, None)
    refused.note(boot.paths, "../../etc/passwd", DAEMON)
    assert boot.notes() == []


def test_notes_are_whole_or_not_there(boot: Boot, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_path: str, _text: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(fs, "write_new", fail)
    boot.autostart()
    assert boot.notes() == []
