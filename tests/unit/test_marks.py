# SPDX-License-Identifier: LGPL-2.1-or-later
"""A libvirt daemon that has looked for hooks says, by ours, that it found the one for domains."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.unit.host import LIBVIRTD, REPOSITORY, Host
from tests.unit.support import needs_root
from vgpu_libvirt import hook, marks
from vgpu_libvirt.claims.model import Process

if TYPE_CHECKING:
    from tests.unit.host import Result

DAEMON = Process(LIBVIRTD, 4242)
OPTIONS = [hook.DAEMON_OPTION, hook.RELOAD_OPTION]


@pytest.fixture
def installed(host: Host) -> Path:
    """Our hook, where libvirt finds it."""
    path = Path(host.paths.libvirt_etc) / "hooks/qemu.d/50-vgpu-libvirt"
    host.write(path, "#!/bin/sh\n").chmod(0o755)
    return path


def run(host: Host, option: str, parent: int = LIBVIRTD) -> Result:
    return host._run([option], b"", parent)


@pytest.mark.parametrize("option", OPTIONS)
def test_a_daemon_that_looks_for_hooks_is_noted(host: Host, installed: Path, option: str) -> None:
    assert marks.found(host.paths) == frozenset()
    assert run(host, option) == (0, "", "")
    assert marks.found(host.paths) == {DAEMON}


@pytest.mark.parametrize("option", OPTIONS)
def test_one_that_can_not_find_ours_is_not(host: Host, installed: Path, option: str) -> None:
    installed.chmod(0o644)
    assert run(host, option) == (0, "", "")
    installed.unlink()
    assert run(host, option) == (0, "", "")
    assert marks.found(host.paths) == frozenset()


def test_other_daemons_stay_noted_while_they_run(host: Host, installed: Path) -> None:
    host.process(820, "virtqemud", start=5000)
    run(host, hook.DAEMON_OPTION, 820)
    run(host, hook.DAEMON_OPTION)
    assert marks.found(host.paths) == {DAEMON, Process(820, 5000)}
    host.end(820)
    host.process(830, "virtqemud", start=6000)
    run(host, hook.DAEMON_OPTION, 830)
    assert marks.found(host.paths) == {DAEMON, Process(830, 6000)}


def test_a_daemon_without_domains_is_nothing_to_us(host: Host, installed: Path) -> None:
    host.process(820, "virtnetworkd", start=5000)
    assert run(host, hook.RELOAD_OPTION, 820) == (0, "", "")
    assert marks.found(host.paths) == frozenset()


@pytest.mark.promise(7)
@pytest.mark.parametrize("option", OPTIONS)
def test_libvirt_goes_on_where_nothing_can_be_noted(
    host: Host, installed: Path, option: str
) -> None:
    host.write(Path(host.paths.runtime), "in the way")
    assert run(host, option).status == 0


@pytest.mark.promise(7)
def test_libvirt_reloads_with_a_broken_configuration(host: Host) -> None:
    host.write(host.root / "config.toml", "what")
    done = run(host, hook.RELOAD_OPTION)
    assert (done.status, done.stderr.count("\n")) == (0, 1)
    assert "is not valid TOML" in done.stderr


@needs_root
@pytest.mark.parametrize(
    ("operation", "options"),
    [("start", [OPTIONS[0]]), ("reload", [OPTIONS[1]]), ("shutdown", []), ("", [])],
)
def test_the_stub_says_which_it_is(tmp_path: Path, operation: str, options: list[str]) -> None:
    entry, log = tmp_path / "entry", tmp_path / "log"
    entry.write_text(f'#!/bin/sh\necho "$@" >{log}\nexit 1\n')
    entry.chmod(0o755)
    command = ["sh", REPOSITORY / "hooks/daemon", "-", operation, "begin", "-"]
    environment = {"PATH": "/usr/bin:/bin", "VGPU_LIBVIRT_HOOK": str(entry)}
    assert subprocess.run(command, env=environment).returncode == 0
    assert (log.read_text().split() if log.exists() else []) == options
