# SPDX-License-Identifier: LGPL-2.1-or-later
"""The RPM package has what the Debian one has, and treats hooks and claims alike."""

from __future__ import annotations

import re
from pathlib import Path

from tests.packaging.conftest import run
from tests.packaging.test_deb import PROGRAMS, installed_units, modules, pages, units

ELSEWHERE = {"runtime.d", "doc", "lintian"}  # Debian's own


def listing(rpm: Path) -> dict[str, str]:
    """Path -> mode, of what isn't a directory."""
    text = run("rpm", "-qp", "--qf", r"[%{FILEMODES:perms} %{FILENAMES}\n]", rpm).stdout
    rows = [line.split(" ", 1) for line in text.splitlines()]
    return {name.lstrip("/"): mode for mode, name in rows if mode[0] != "d"}


def scriptlets(rpm: Path) -> dict[str, str]:
    text = run("rpm", "-qp", "--scripts", rpm).stdout
    parts = re.split(r"^(\w+) scriptlet \(using /bin/sh\):\n", text, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def test_it_has_what_it_should(rpm: Path) -> None:
    found = {
        re.sub(r"lib/python3\.\d+/site-packages", "lib/python3/dist-packages", name)
        for name in listing(rpm)
        if not name.endswith(".pyc")
    }
    assert modules() <= found
    assert {f"usr/lib/systemd/system/{unit}" for unit in units()} <= found
    assert {name.removesuffix(".gz") for name in pages()} <= found
    assert {name for name in PROGRAMS if not ELSEWHERE.intersection(name.split("/"))} <= found
    assert {name for name in found if name.startswith("etc/")} == {"etc/vgpu-libvirt/config.toml"}


def test_only_programs_can_be_run(rpm: Path) -> None:
    can = {name for name, mode in listing(rpm).items() if "x" in mode}
    assert can == {name for name in PROGRAMS if "runtime.d" not in name}


def test_each_module_is_compiled(rpm: Path) -> None:
    names = [Path(name) for name in listing(rpm)]
    sources = {p.parent / p.stem for p in names if p.suffix == ".py"}
    compiled = {p.parents[1] / p.name.partition(".")[0] for p in names if p.suffix == ".pyc"}
    assert sources == compiled


def test_its_scripts_are_shell_and_name_the_units(rpm: Path) -> None:
    scripts = scriptlets(rpm)
    assert set(scripts) == {"postinstall", "preuninstall", "postuninstall", "posttrans"}
    for text in scripts.values():
        # SC2043: a loop over the units to start is one, even while there is but one such unit
        done = run("shellcheck", "--shell=sh", "--exclude=SC2043", "-", input=text)
        assert (done.returncode, done.stdout) == (0, "")
        assert "@" not in text
    (preset,) = re.findall(r"systemctl preset (.+) >", scripts["posttrans"])
    assert preset.split() == sorted(installed_units())
    (started,) = re.findall(r"for unit in (.+); do", scripts["posttrans"])
    assert started.split() == [n for n in preset.split() if not n.endswith(".service")]


def test_hooks_become_live_when_no_older_file_is_left_and_go_only_with_the_last_version(
    rpm: Path,
) -> None:
    scripts = scriptlets(rpm)
    assert "vgpu-libvirt/activate" in scripts["posttrans"]
    assert "activate" not in scripts["postinstall"]
    condition, _, body = scripts["preuninstall"].partition("then\n")
    assert condition.splitlines()[-1] == 'if [ "$1" = 0 ]; '
    assert "activate --remove" in body
