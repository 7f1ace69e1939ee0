# SPDX-License-Identifier: LGPL-2.1-or-later
"""What people without root may do, and the sentence for what they may not."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import libvirt
import pytest
from click.testing import CliRunner

from tests.unit.fake_libvirt import Connection, Domain
from tests.unit.host import WEB1, Host, domain_xml, web1, web2
from tests.unit.support import NOBODY, directory_for_all, needs_root, nobody
from tests.unit.test_lifecycle import start
from tests.unit.test_pointing import where
from vgpu_libvirt import by_sync, trigger
from vgpu_libvirt.cli.main import main

if TYPE_CHECKING:
    from collections.abc import Iterator

    from click.testing import Result

pytestmark = needs_root

LABEL = f"domain 'web1' ({WEB1})"


class User:
    """A user of libvirt's group, on a host whose store, devices and processes are root's."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.vfs = host.gpu()
        self.connection = Connection()
        os.chmod(host.root, 0o755)
        host.state.mkdir(exist_ok=True)
        self.allow_asking()

    def allow_asking(self) -> None:
        trigger.ask(self.host.paths)
        trigger.take(self.host.paths)
        self.wanted = Path(self.host.paths.runtime) / "wanted"
        os.chown(self.wanted, -1, NOBODY)
        self.wanted.chmod(0o777)  # we become nobody without his groups

    def define(self, document: str) -> Domain:
        domain = Domain(document)
        self.connection.domains.append(domain)

        def hook(operation: str, xml: str) -> object:
            os.seteuid(0)
            try:
                return self.host.hook(operation, xml)
            finally:
                os.seteuid(NOBODY)

        domain.hook = hook  # type: ignore[assignment]
        return domain

    def call(self, *arguments: str) -> Result:
        with nobody():
            return CliRunner().invoke(
                main, arguments, env=self.host.environment, prog_name="virt-vgpu"
            )

    def does(self, *arguments: str) -> str:
        done = self.call(*arguments)
        assert (done.exit_code, done.exception) == (0, None), done.output
        return done.output

    def refused(self, *arguments: str) -> str:
        done = self.call(*arguments)
        assert (done.exit_code, done.output.count("\n")) == (1, 1), done.output
        return done.output.removeprefix("virt-vgpu: error: ").rstrip()


@pytest.fixture
def user(monkeypatch: pytest.MonkeyPatch) -> Iterator[User]:
    with directory_for_all() as directory:
        there = User(Host(directory))
        monkeypatch.setattr(libvirt, "open", lambda _uri: there.connection)
        monkeypatch.setattr(by_sync, "PATIENCE", 3.0)
        yield there


class System(threading.Thread):
    """The system's sync as far as the user sees it: it takes the wish, and points or doesn't."""

    def __init__(self, user: User, domain: Domain, goes: str | None) -> None:
        super().__init__(daemon=True)
        self.user, self.domain, self.goes = user, domain, goes

    def run(self) -> None:
        path = Path(trigger.path(self.user.host.paths))
        while not path.exists():
            time.sleep(0.01)
        path.unlink()
        time.sleep(0.2)
        if self.goes:
            self.domain.document = Domain(web1(self.goes, number=None)).document


def test_what_points_right_starts_without_a_wish(user: User) -> None:
    domain = user.define(web1(user.vfs[1], number=None))
    assert user.does("start", "web1") == (
        f"{LABEL} runs, with 'ua-vgpu0' (NVIDIA L40S-8Q) at {user.vfs[1]} of GPU 0000:3d:00.0, "
        "since its definition points there already.\n"
    )
    assert domain.active
    assert os.listdir(user.wanted) == ["sync"], "the hook's"


@pytest.mark.parametrize("paused", [False, True])
def test_a_sync_is_asked_for_and_waited_for(user: User, paused: bool) -> None:
    assert user.host.hook("prepare", web2(user.vfs[0])).status == 0
    trigger.take(user.host.paths)
    domain = user.define(web1(user.vfs[0], number=None))
    System(user, domain, user.vfs[2]).start()
    said = user.does("start", "web1", *(["--paused"] if paused else []))
    assert f"'ua-vgpu0' (NVIDIA L40S-8Q) at {user.vfs[2]} of GPU" in said
    assert (domain.active, domain.started_paused) == (True, paused)
    assert domain.writes == ["create"], "it edits nothing itself"


def test_a_missing_hostdev_comes_by_the_sync(user: User) -> None:
    domain = user.define(domain_xml(requests={"ua-vgpu0": "1152"}, number=None))
    System(user, domain, user.vfs[0]).start()
    user.does("start", "web1")
    assert domain.active


def test_where_nobody_answers_it_is_said_what_to_do(user: User) -> None:
    assert user.host.hook("prepare", web2(user.vfs[0])).status == 0
    domain = user.define(web1(user.vfs[0], number=None))
    assert user.refused("start", "web1") == (
        f"{LABEL} points at no device that can serve it now, and nobody has answered the wish for "
        "a sync for 3 s; see that vgpu-libvirt-sync.path is enabled, or run 'virt-vgpu start' with "
        "sudo"
    )
    assert domain.writes == []


def test_where_the_sync_finds_nothing_the_reason_is_told(user: User) -> None:
    for vf in user.vfs:
        user.host.set_list(vf, "ID    : vGPU Name\n")
    domain = user.define(web1(user.vfs[0], number=None))
    System(user, domain, None).start()
    assert user.refused("start", "web1").startswith("profile 'NVIDIA L40S-8Q' is unknown")
    assert domain.writes == []


def test_where_the_sync_does_not_help_that_is_told(user: User) -> None:
    assert user.host.hook("prepare", web2(user.vfs[0])).status == 0
    trigger.take(user.host.paths)
    domain = user.define(web1(user.vfs[0], number=None))
    System(user, domain, None).start()
    assert user.refused("start", "web1") == (
        f"{LABEL} still points at no device that can serve it, though a sync was asked for and "
        "came; run 'virt-vgpu start' with sudo"
    )


def test_who_may_not_ask_is_told_who_may(user: User) -> None:
    assert user.host.hook("prepare", web2(user.vfs[0])).status == 0
    trigger.take(user.host.paths)
    user.wanted.chmod(0o700)
    user.define(web1(user.vfs[0], number=None))
    assert user.refused("start", "web1") == (
        f"{LABEL} points at no device that can serve it now, and only root and the group libvirt "
        f"may have that changed ({trigger.path(user.host.paths)}: permission denied); run "
        "'virt-vgpu start' with sudo"
    )


def test_what_no_sync_mends_is_told_at_once(user: User) -> None:
    user.define(domain_xml(number=None))
    assert "asks for no vGPU" in user.refused("start", "web1")
    assert os.listdir(user.wanted) == []


def test_a_definition_is_for_who_may_use_libvirt(user: User) -> None:
    domain = user.define(domain_xml(number=None))
    user.does("attach", "web1", "--profile", "L40S-8Q")
    assert where(domain) == user.vfs[0]
    user.does("fix-xml", "web1")
    user.does("detach", "web1")
    assert where(domain) is None


@pytest.mark.parametrize(
    ("arguments", "deed"),
    [
        (["sync"], "give devices back and point definitions"),
        (["sync", "--files-only"], "give devices back and point definitions"),
        (["release", "0000:3d:00.4"], "give devices back"),
        (["release", "0000:3d:00.4", "--force"], "give devices back"),
        (["cordon", "0000:3d:00.0"], "cordon"),
        (["uncordon", "0000:3d:00.0"], "uncordon"),
    ],
)
@pytest.mark.promise(9)
def test_the_store_and_the_devices_are_roots(user: User, arguments: list[str], deed: str) -> None:
    start(user.host, user.vfs[0])
    user.host.end_domain("web1", 4001)
    if arguments[0] == "uncordon":
        environment = user.host.environment
        assert CliRunner().invoke(main, ["cordon", arguments[1]], env=environment).exit_code == 0
    before = user.host.tree()
    assert user.refused(*arguments) == (
        f"only root may {deed}: {user.host.paths.state} is not yours to write; run 'virt-vgpu "
        f"{arguments[0]}' with sudo"
    )
    assert user.host.tree() == before
    user.does(*arguments, "--dry-run") if arguments != ["sync", "--files-only"] else None


@pytest.mark.promise(9)
def test_reading_verbs_show_what_they_may_and_say_what_they_hide(user: User) -> None:
    start(user.host, user.vfs[0])
    user.host.status_file("web1").chmod(0o600)
    os.chmod(user.host.proc / "4001/fd", 0o700)
    unreadable = f"the status file {user.host.status_file('web1')} can't be read: permission denied"
    before = user.host.tree()
    for verb in ("list", "status", "profiles"):
        said = user.does(verb)
        assert unreadable in said
        assert "L40S-8Q" in said
        assert "Traceback" not in said
    assert "web1" in user.does("list")
    assert "the open files of 1 process can't be read" in user.does("status")
    assert user.host.tree() == before
