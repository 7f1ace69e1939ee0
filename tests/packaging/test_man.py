# SPDX-License-Identifier: LGPL-2.1-or-later
"""The manual: it says what the code says, and man(1) and mandoc(1) find nothing wrong with it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import click
import pytest

from tests.packaging.conftest import ENVIRONMENT, run
from tests.unit.host import REPOSITORY
from vgpu_libvirt import config
from vgpu_libvirt.cli.main import main
from vgpu_libvirt.domain.model import Request

if TYPE_CHECKING:
    from pathlib import Path

BY_HAND = REPOSITORY / "packaging/man"
EXAMPLE = REPOSITORY / "packaging/config.toml"


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    directory = tmp_path_factory.mktemp("man")
    done = run("/usr/bin/python3", REPOSITORY / "packaging/make-man", directory)
    assert done.returncode == 0, done.stdout
    return [*directory.iterdir(), *BY_HAND.iterdir()]


def test_every_page_is_clean(pages: list[Path]) -> None:
    for page in pages:
        command = ["man", "--warnings", "-E", "UTF-8", "-l", "-Tutf8", "-Z", str(page)]
        shown = run("sh", "-c", '"$@" 2>&1 >/dev/null', "sh", *command)
        assert (shown.returncode, shown.stdout) == (0, ""), page
        linted = run("mandoc", "-Tlint", "-W", "style", page)
        assert (linted.returncode, linted.stdout) == (0, ""), page


def test_every_verb_and_option_is_in_the_manual(pages: list[Path]) -> None:
    context = click.Context(main, info_name="virt-vgpu")
    overview = next(page for page in pages if page.name == "virt-vgpu.1").read_text()
    for verb in main.list_commands(context):
        page = next(page for page in pages if page.name == f"virt-vgpu-{verb}.1").read_text()
        assert verb.replace("-", "\\-") in overview
        command = main.get_command(context, verb)
        assert command is not None
        for parameter in command.params:
            for option in parameter.opts if isinstance(parameter, click.Option) else ():
                assert option.replace("-", "\\-") in page


def test_pages_that_others_point_to_are_there(pages: list[Path]) -> None:
    there = {page.name for page in pages} | {"virsh.1"}
    for page in pages:
        text = page.read_text().replace("\\-", "-")
        for name, section in re.findall(r"^\.BR (\S+) \((\d)\)", text, re.MULTILINE):
            assert f"{name}.{section}" in there, page


def defaults() -> dict[str, str]:
    """`table.key` -> its default, as TOML writes it."""
    toml = {str: '"{}"', float: "{}", tuple: "[]"}
    tables = {"paths": config.Paths()._asdict(), "policy": config.Policy()._asdict()}
    tables["libvirt"] = {"uri": config.Config().uri}
    tables["sriov"] = config.Sriov()._asdict()
    return {
        f"{table}.{key}": toml[type(value)].format(value)
        for table, values in tables.items()
        for key, value in values.items()
    }


def test_the_page_of_the_configuration_has_each_key_with_its_default() -> None:
    table, found = "", {}
    for line in (BY_HAND / "vgpu-libvirt.toml.5").read_text().splitlines():
        if line.startswith(".SH"):
            table = line.partition("[")[2].partition("]")[0]
        elif match := re.fullmatch(r'\.BR (\w+) " = (.+)"', line):
            value = match[2].replace("\\(dq", '"').replace("\\-", "-")
            found[f"{table}.{match[1]}"] = value
    assert found == defaults()


def test_the_example_is_comments_alone_and_has_every_default(tmp_path: Path) -> None:
    text = EXAMPLE.read_text()
    assert all(line.startswith("#") for line in text.splitlines() if line)
    assert config.parse(text, "config.toml") == config.Config()
    uncommented = re.sub(r"^#(?=\[|\w+ = )", "", text, flags=re.MULTILINE)
    assert config.parse(uncommented, "config.toml") == config.Config()
    found, table = {}, ""
    for line in uncommented.splitlines():
        if line.startswith("["):
            table = line.strip("[]")
        elif match := re.match(r'(\w+) = ("[^"]*"|\S+)', line):
            found[f"{table}.{match[1]}"] = match[2]
    assert found == defaults()


def test_comments_alone_do_not_cost_a_hook_the_import_of_tomllib() -> None:
    program = (
        f"import sys; sys.path.insert(0, {str(REPOSITORY)!r})\nfrom vgpu_libvirt import config\n"
        f"config.load({{'VGPU_LIBVIRT_CONFIG': {str(EXAMPLE)!r}}})\nprint('tomllib' in sys.modules)"
    )
    assert run("/usr/bin/python3", "-BIS", "-c", program).stdout == "False\n"


def test_the_page_of_requests_has_each_attribute() -> None:
    text = (BY_HAND / "vgpu-libvirt.7").read_text()
    section = text.partition(".SH ATTRIBUTES")[2].partition(".SH ")[0]
    assert re.findall(r"^\.TP\n\.B (\S+)", section, re.MULTILINE) == list(Request._fields)


def test_the_pages_can_be_made_again_to_the_byte(tmp_path: Path) -> None:
    for name in ("one", "two"):
        environment = {**ENVIRONMENT, "SOURCE_DATE_EPOCH": "1790000000"}
        command = ["/usr/bin/python3", REPOSITORY / "packaging/make-man", tmp_path / name]
        assert run(*command, env=environment).returncode == 0
    for page in (tmp_path / "one").iterdir():
        assert page.read_bytes() == (tmp_path / "two" / page.name).read_bytes()
        assert " 2026-09-21 " in page.read_text()
