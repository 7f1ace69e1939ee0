# SPDX-License-Identifier: LGPL-2.1-or-later
"""`list --watch`: in place on a terminal, below each other elsewhere, until Ctrl-C."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from tests.unit.host import REPOSITORY
from vgpu_libvirt.cli.main import main

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.unit.host import Host

SECONDS = 30  # that anything is waited for
CODE = "from vgpu_libvirt.cli.main import main; main(prog_name='virt-vgpu')"


class Watch:
    """A `list --watch` as a process of its own, whose output is read as it comes."""

    def __init__(self, host: Host, *arguments: str, on_terminal: bool) -> None:
        self._reader, writer = pty.openpty() if on_terminal else os.pipe()
        self.text = ""
        self.process = subprocess.Popen(
            [sys.executable, "-c", CODE, "list", "--watch", "0.2", *arguments],
            cwd=REPOSITORY,
            env={**host.environment, "TERM": "xterm", "LC_ALL": "C.UTF-8", "COLUMNS": "200"},
            stdin=subprocess.DEVNULL,
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
        )
        os.close(writer)

    def until(self, seen: Callable[[str], bool]) -> str:
        """Read until what came is as it should be."""
        end = time.monotonic() + SECONDS
        while not seen(self.text):
            assert time.monotonic() < end, self.text
            if select.select([self._reader], [], [], 0.1)[0]:
                self.text += os.read(self._reader, 65536).decode()
        return self.text

    def interrupt(self) -> tuple[int, str]:
        """Exit status and stderr after Ctrl-C."""
        self.process.send_signal(signal.SIGINT)
        _, stderr = self.process.communicate(timeout=SECONDS)
        os.close(self._reader)
        return self.process.returncode, stderr


@pytest.mark.parametrize("on_terminal", [False, True])
def test_it_shows_what_changes_and_ends_without_a_word(host: Host, on_terminal: bool) -> None:
    vf = host.gpu()[0]
    watch = Watch(host, on_terminal=on_terminal)
    watch.until(lambda text: "4 free of 4 VFs" in text)
    host.set_type(vf, 1152)
    text = watch.until(lambda text: "3 free, 1 foreign of 4 VFs" in text)
    assert ("\x1b[" in text) is on_terminal, "the terminal's is drawn over"
    assert watch.interrupt() == (0, "")


def test_without_a_terminal_each_is_whole(host: Host) -> None:
    host.gpu()
    watch = Watch(host, on_terminal=False)
    shown = watch.until(lambda text: text.count("GPU 0000:3d:00.0") >= 3).split("\n\n")
    watch.interrupt()
    assert (
        shown[0]
        == shown[1]
        == CliRunner().invoke(main, ["list"], env=host.environment).output.rstrip("\n")
    )


def test_json_is_a_stream_of_documents(host: Host) -> None:
    host.gpu()
    watch = Watch(host, "--json", on_terminal=False)
    text = watch.until(lambda text: text.count('"problems"') >= 2)
    assert watch.interrupt() == (0, "")
    first, end = json.JSONDecoder().raw_decode(text)
    assert first["gpus"][0]["address"] == "0000:3d:00.0"
    assert text[end:].lstrip().startswith("{")


@pytest.mark.promise(9)
def test_it_writes_nothing(host: Host) -> None:
    host.gpu()
    before = host.tree()
    watch = Watch(host, on_terminal=False)
    watch.until(lambda text: text.count("GPU") >= 2)
    watch.interrupt()
    assert host.tree() == before


def test_a_reader_that_goes_away_ends_it(host: Host) -> None:
    host.gpu()
    shell = subprocess.run(
        ["bash", "-c", f'{sys.executable} -c "{CODE}" list --watch 0.1 | head -n 1'],
        cwd=REPOSITORY,
        env=host.environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert shell.stdout.startswith("GPU 0000:3d:00.0")
    assert shell.stderr == ""


def test_what_breaks_meanwhile_ends_it_with_a_sentence(host: Host) -> None:
    host.gpu()
    watch = Watch(host, on_terminal=False)
    watch.until(lambda text: "GPU" in text)
    host.write(host.root / "config.toml", "[paths\n")
    _, stderr = watch.process.communicate(timeout=SECONDS)
    assert watch.process.returncode == 1
    assert "is not valid TOML" in stderr
    assert stderr.count("\n") == 1


@pytest.mark.parametrize("seconds", ["0", "-1", "x"])
def test_a_pause_that_is_none_is_wrong_usage(host: Host, seconds: str) -> None:
    result = CliRunner().invoke(main, ["list", "--watch", seconds], env=host.environment)
    assert result.exit_code == 2
