# SPDX-License-Identifier: LGPL-2.1-or-later
"""One `virt-vgpu sync` looks until nothing has happened since it looked; no event is lost."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import libvirt
import pytest
from click.testing import CliRunner
from lxml import etree

from tests.unit.fake_libvirt import Connection, Domain
from tests.unit.host import LIBVIRTD, Host, web1
from tests.unit.test_lifecycle import start
from tests.unit.test_pointing import WEB3, asking, where
from vgpu_libvirt import pointing, sync, trigger, until_quiet
from vgpu_libvirt.cli import keep
from vgpu_libvirt.cli.main import main

if TYPE_CHECKING:
    from collections.abc import Callable

    from vgpu_libvirt.config import Paths


class Site:
    """A host with a libvirt whose definitions are files too, and a sync that can be disturbed."""

    def __init__(self, host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
        self.host = host
        self.vfs = host.gpu()
        self.connection = Connection()
        self.patch = monkeypatch
        self.looks = 0
        monkeypatch.setattr(libvirt, "open", lambda _uri: self.connection)
        self.wrap(sync, "reconcile", before=self._count)

    def _count(self) -> None:
        self.looks += 1

    @property
    def paths(self) -> Paths:
        return self.host.paths

    def define(self, domain: Domain, is_seen: bool = True) -> Domain:
        """As libvirt does: it knows the definition, then it is on disk; an edit writes it again.

        Without IS_SEEN nothing on disk shows it, as with what a claim or release changes.
        """
        self.connection.domains.append(domain)
        for call in ("attachDeviceFlags", "detachDeviceFlags", "setMetadata"):
            self.wrap(domain, call, after=lambda: self.save(domain))
        if is_seen:
            self.save(domain)
        return domain

    def save(self, domain: Domain) -> None:
        path = Path(self.paths.libvirt_etc) / f"qemu/{domain.name()}.xml"
        text = etree.tostring(domain.document, encoding="unicode") + "\n" * self.looks
        self.host.write(path.with_suffix(".xml.new"), text).rename(path)

    def wrap(
        self,
        module: object,
        name: str,
        before: Callable[[], None] = lambda: None,
        after: Callable[[], None] = lambda: None,
    ) -> None:
        real = getattr(module, name)

        def wrapped(*arguments: object, **more: object) -> object:
            before()
            result = real(*arguments, **more)
            after()
            return result

        self.patch.setattr(module, name, wrapped)

    def sync(self, *arguments: str) -> dict[str, list[object]]:
        done = CliRunner().invoke(
            main, ["sync", "--json", *arguments], env=self.host.environment, prog_name="virt-vgpu"
        )
        assert (done.exit_code, done.exception) == (0, None), done.output
        return dict(json.loads(done.output))


@pytest.fixture
def site(host: Host, monkeypatch: pytest.MonkeyPatch) -> Site:
    return Site(host, monkeypatch)


# --- how often it looks ---


def test_where_nothing_changes_it_looks_once(site: Site) -> None:
    site.define(asking("web1", WEB3, site.vfs[0]))
    trigger.ask(site.paths)
    assert site.sync()["problems"] == []
    assert site.looks == 1
    assert not trigger.is_set(site.paths)


def test_its_own_edits_cost_one_more_look(site: Site) -> None:
    domain = site.define(asking("web1", WEB3))
    assert len(site.sync()["repointed"]) == 1
    assert (site.looks, where(domain)) == (2, site.vfs[0])
    site.sync()
    assert site.looks == 3


def test_a_burst_of_wishes_makes_one_run(site: Site) -> None:
    for _ in range(5):
        site.host.hook("prepare", web1(site.vfs[0]))
    site.sync()
    assert site.looks == 1


@pytest.mark.promise(9)
@pytest.mark.parametrize("option", ["--dry-run", "--files-only"])
def test_a_dry_run_and_one_at_boot_leave_the_wish_and_look_once(site: Site, option: str) -> None:
    site.define(asking("web1", WEB3))
    site.wrap(sync, "reconcile", after=lambda: trigger.ask(site.paths))
    trigger.ask(site.paths)
    assert len(site.sync(option)["repointed"]) == (option == "--dry-run")
    assert site.looks == 1
    assert trigger.is_set(site.paths)


@pytest.mark.promise(9)
def test_a_dry_run_writes_nothing_there_either(site: Site) -> None:
    site.define(asking("web1", WEB3))
    before = site.host.tree()
    site.sync("--dry-run")
    assert site.host.tree() == before


def test_at_boot_libvirt_is_not_asked_though_its_socket_is_there(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    def connect(_uri: str) -> None:
        raise AssertionError("it would wait for us")

    start(site.host, site.vfs[0])
    site.host.end_domain("web1", 4001)
    monkeypatch.setattr(libvirt, "open", connect)
    assert site.sync("--files-only")["released"] == [site.vfs[0]]


@pytest.mark.parametrize("what", ["wishes", "definitions"])
def test_it_gives_up_with_a_reason(site: Site, what: str) -> None:
    domain = site.define(asking("web1", WEB3, site.vfs[0]))

    def disturb() -> None:
        if what == "wishes":
            trigger.ask(site.paths)
        else:
            site.save(domain)

    site.wrap(sync, "reconcile", after=disturb)
    problems = site.sync()["problems"]
    assert site.looks == until_quiet.MOST_LOOKS
    begin = "somebody asked for a sync" if what == "wishes" else "the definitions changed"
    assert problems == [
        f"{begin} during each of {until_quiet.MOST_LOOKS} looks, so what changed last may not have "
        "been seen; the next sync sees to it"
    ]
    assert trigger.is_set(site.paths) is (what == "wishes"), "so that the next one comes at once"


def test_what_several_looks_did_is_told_once(site: Site) -> None:
    start(site.host, site.vfs[0])
    site.host.end_domain("web1", 4001)
    first = site.define(asking("web2", WEB3))
    answer = site.sync()
    assert site.looks == 2
    assert answer["released"] == [site.vfs[0]]
    assert [each["to"] for each in answer["repointed"]] == [where(first)]  # type: ignore[index]


def test_definitions_that_cannot_be_read_are_told(site: Site) -> None:
    site.host.write(Path(site.paths.libvirt_etc) / "qemu", "no directory")
    (problem,) = site.sync()["problems"]
    assert str(problem).startswith(f"{site.paths.libvirt_etc}/qemu can't be read, so a definition")
    assert site.looks == 1


def test_an_interrupted_sync_leaves_the_wish(site: Site) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    trigger.ask(site.paths)
    site.wrap(pointing, "point", before=interrupt)
    done = CliRunner().invoke(main, ["sync"], env=site.host.environment)
    assert done.exit_code == 130
    assert trigger.is_set(site.paths)


# --- no event is lost ---

# Where something happens: before or after each thing that a sync does.
POINTS = [
    (module, name, when)
    for module, name in (
        (trigger, "take"),
        (trigger, "definitions"),
        (keep, "_context"),
        (sync, "reconcile"),
        (pointing, "point"),
        (pointing, "look"),
        (trigger, "is_set"),
    )
    for when in ("before", "after")
]
POINT_NAMES = [f"{when} {module.__name__.split('.')[-1]}.{name}" for module, name, when in POINTS]


def run_until_quiet(site: Site) -> int:
    """What systemd and the worker do: run a sync while the trigger is there. How many were run."""
    runs = 0
    while not runs or os.path.lexists(trigger.path(site.paths)):
        site.sync()
        runs += 1
        assert runs < 5
    return runs


@pytest.mark.parametrize("occasion", [1, 2, 3])
@pytest.mark.parametrize(("module", "name", "when"), POINTS, ids=POINT_NAMES)
def test_an_event_at_any_point_of_a_run_is_seen(
    site: Site, module: object, name: str, when: str, occasion: int
) -> None:
    """Something that only the trigger shows, as what a hook changes."""
    calls = 0
    new = asking("web3", WEB3)

    def happen() -> None:
        nonlocal calls
        calls += 1
        if calls == occasion:
            site.define(new, is_seen=False)
            trigger.ask(site.paths)

    site.define(asking("web1", "aaaaaaaa-0000-0000-0000-000000000009"))  # its edit: a second look
    site.wrap(module, name, **{when: happen})
    trigger.ask(site.paths)
    run_until_quiet(site)
    if calls < occasion:  # no run came there so often, so it comes between two
        calls = occasion - 1
        happen()
        run_until_quiet(site)
    assert where(new), "the definition was never looked at"


@pytest.mark.parametrize(("module", "name", "when"), POINTS[3:-2], ids=POINT_NAMES[3:-2])
def test_a_definition_alone_is_seen_before_the_last_check(
    site: Site, module: object, name: str, when: str
) -> None:
    """Nobody has touched the trigger yet; the definitions themselves show it."""
    new = asking("web3", WEB3)

    def happen() -> None:
        if new not in site.connection.domains:
            site.define(new)

    site.wrap(module, name, **{when: happen})
    site.sync()
    assert where(new), "the definition was never looked at"


def test_after_the_last_check_the_trigger_stays(site: Site) -> None:
    new = asking("web3", WEB3)

    def happen() -> None:
        if new not in site.connection.domains:
            site.define(new)
            trigger.ask(site.paths)

    site.wrap(until_quiet, "repeat", after=happen)
    site.sync()
    assert where(new) is None
    assert trigger.is_set(site.paths)
    assert run_until_quiet(site) == 1
    assert where(new)


# --- a libvirt that starts, or is busy ---


def test_a_libvirt_that_does_not_listen_yet_is_waited_for(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.unit.fake_libvirt import error

    domain = site.define(asking("web1", WEB3))
    refusals = [3]

    def connect(_uri: str) -> Connection:
        if refusals[0]:
            refusals[0] -= 1
            raise error(38, "Failed to connect socket: Connection refused")
        return site.connection

    monkeypatch.setattr(libvirt, "open", connect)
    monkeypatch.setattr(keep, "_PAUSE", 0.01)
    assert site.sync("--wait")["problems"] == []
    assert where(domain)


@pytest.mark.parametrize("wait", [True, False])
def test_a_libvirt_that_runs_a_hook_is_waited_for(
    site: Site, monkeypatch: pytest.MonkeyPatch, wait: bool
) -> None:
    start(site.host, site.vfs[0])
    domain = site.define(asking("web2", WEB3))

    def connect(_uri: str) -> Connection:
        time.sleep(0.3)
        return site.connection

    monkeypatch.setattr(libvirt, "open", connect)
    monkeypatch.setattr(keep, "_ANSWER", 0.05)
    answer = site.sync(*(["--wait"] if wait else []))
    assert bool(where(domain)) is wait
    assert bool(answer["problems"]) is not wait


def test_but_not_for_ever_and_not_without_wait(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.unit.fake_libvirt import error

    calls = []

    def connect(uri: str) -> Connection:
        calls.append(uri)
        raise error(38, "Failed to connect socket: Connection refused")

    monkeypatch.setattr(libvirt, "open", connect)
    (problem,) = site.sync()["problems"]
    assert "no definition was looked at: libvirt can't be reached" in str(problem)
    assert len(calls) == 1
    monkeypatch.setattr(keep, "_STARTING", 0.1)
    monkeypatch.setattr(keep, "_PAUSE", 0.03)
    assert site.sync("--wait")["problems"] == [problem]
    assert len(calls) > 3


def test_where_no_daemon_runs_nobody_is_waited_for(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    def connect(_uri: str) -> None:
        raise AssertionError("its socket would start one")

    site.host.end(LIBVIRTD)
    monkeypatch.setattr(libvirt, "open", connect)
    assert site.sync("--wait")["problems"] == []
