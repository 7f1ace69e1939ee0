# SPDX-License-Identifier: LGPL-2.1-or-later
"""Completion in bash, with the words broken as bash breaks them: at blanks and at colons."""

from __future__ import annotations

import re
import shlex
import sys
from typing import TYPE_CHECKING

import pytest

from tests.packaging.conftest import ENVIRONMENT, run
from tests.unit.host import REPOSITORY

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.unit.host import Host

    Complete = Callable[[str], list[str]]


def completion(shell: str) -> str:
    done = run("sh", REPOSITORY / "packaging/make-completion", shell)
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture
def complete(host: Host, tmp_path: Path) -> Complete:
    """Presses Tab at the end of a line, on a host with two GPUs and a domain."""
    host.gpu()
    host.gpu("0000:4e:00.0")
    host.write(host.root / "libvirt-etc/qemu/web1.xml", "<domain/>")
    command = tmp_path / "bin/virt-vgpu"
    command.parent.mkdir()
    command.write_text(
        f"#!{sys.executable}\nimport sys\nsys.path.insert(0, {str(REPOSITORY)!r})\n"
        "from vgpu_libvirt.cli.main import main\nmain(prog_name='virt-vgpu')\n"
    )
    command.chmod(0o755)
    (tmp_path / "completion").write_text(completion("bash"))
    path = f"{command.parent}:{ENVIRONMENT['PATH']}"

    def press_tab(line: str) -> list[str]:
        words = re.findall(r":+|[^\s:]+", line) + ([""] if line.endswith(" ") else [])
        script = f"""
. /usr/share/bash-completion/bash_completion
. {tmp_path}/completion
COMP_LINE={shlex.quote(line)} COMP_POINT={len(line)} COMP_TYPE=9
COMP_WORDS=({shlex.join(words)}) COMP_CWORD={len(words) - 1} COMPREPLY=()
set -- $(complete -p virt-vgpu)
while [ "$1" != -F ]; do shift; done
"$2" virt-vgpu
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
        environment = {**ENVIRONMENT, **host.environment, "PATH": path, "LC_ALL": "C.UTF-8"}
        done = run("bash", "--norc", "-c", script, env=environment)
        return done.stdout.split()

    return press_tab


def test_verbs_domains_and_options(complete: Complete) -> None:
    assert complete("virt-vgpu st") == ["status", "start"]
    assert complete("virt-vgpu start ") == ["web1"]
    assert complete("virt-vgpu attach web1 --nu") == ["--numa"]
    assert complete("virt-vgpu attach web1 --profile L40S-8") == ["L40S-8A", "L40S-8Q"]


def test_addresses_are_completed_across_their_colons(complete: Complete) -> None:
    assert "0000:4e:00.0" in complete("virt-vgpu cordon ")
    # bash replaces only what follows the last colon
    assert complete("virt-vgpu cordon 0000:4e:00.") == ["00.0", "00.4", "00.5", "00.6", "00.7"]
    assert complete("virt-vgpu attach web1 --gpu 0000:3") == ["3d:00.0"]


def test_zsh_gets_a_file_that_acts_when_it_is_autoloaded() -> None:
    text = completion("zsh")
    assert text.startswith("#compdef virt-vgpu\n")
    assert "loadautofunc" in text


def test_fish_gets_its_own() -> None:
    assert "complete --no-files --command virt-vgpu" in completion("fish")
