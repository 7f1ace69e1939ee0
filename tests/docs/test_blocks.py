# SPDX-License-Identifier: LGPL-2.1-or-later
"""Every code block of the documentation is what it says it is, and every link leads somewhere.

Commands for the lab are run by tests/lab/test_docs.py.
"""

from __future__ import annotations

import configparser
import json
import re
import subprocess
import tomllib
from typing import TYPE_CHECKING

import pytest
from lxml import etree

from tests.docs import tables
from tests.docs.blocks import PAGES, README, REPOSITORY, Block, blocks, is_printed
from vgpu_libvirt import config
from vgpu_libvirt.cli.main import main
from vgpu_libvirt.domain.read import parse_domain
from vgpu_libvirt.events import Decision

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

BLOCKS = [block for page in PAGES for block in blocks(page)]
COMMANDS = [
    command for block in BLOCKS if block.language == "console" for command in block.commands()
]
DIAGRAMS = ("sequenceDiagram", "stateDiagram-v2", "flowchart ")


def of(language: str, where: str = "") -> list[Block]:
    return [each for each in BLOCKS if each.language == language and each.where == where]


def places(found: list[Block]) -> Callable[..., pytest.MarkDecorator]:
    return pytest.mark.parametrize("block", found, ids=[block.place for block in found])


def test_every_block_says_what_it_is() -> None:
    known = {("console", "lab"), ("console", "host"), ("sh", ""), ("xml", ""), ("xslt", ""),
             ("toml", ""), ("toml", "config"), ("ini", ""), ("hcl", ""), ("mermaid", ""),
             ("synopsis", ""), ("console-without-prompts", "host")}  # fmt: skip
    assert [one.place for one in BLOCKS if (one.language, one.where) not in known] == []
    assert len(BLOCKS) > 40


def test_commands_that_no_lab_runs_say_so() -> None:
    """A console for any host has only commands that the table of exceptions names."""
    for block in of("console", "host"):
        for command in block.commands():
            assert tables.why_not_run(command), command.place
    for block in of("console-without-prompts", "host"):
        for line in re.sub(r"\s*&&\s*", "\n", block.text).splitlines():
            text = line.split("#")[0].strip()
            found = any(re.match(one.pattern, text) for one in tables.NOT_RUN)
            assert found or not text or text.startswith(("--xml", "'./metadata")), block.place


def test_no_exception_is_stale() -> None:
    texts = [command.text for command in COMMANDS]
    for block in of("console-without-prompts", "host"):
        texts += [line.strip() for line in re.sub(r"\s*&&\s*", "\n", block.text).splitlines()]
    for one in tables.NOT_RUN:
        assert any(re.match(one.pattern, text) for text in texts), one
        assert not one.instead or (REPOSITORY / one.instead).exists(), one


def test_the_lab_runs_what_it_can() -> None:
    """No command in the lab's blocks is an exception but where what it needs is named."""
    for block in of("console", "lab"):
        for command in block.commands():
            assert not tables.why_not_run(command), command.place


def test_every_verb_that_is_named_exists() -> None:
    verbs = set(main.list_commands(None))  # type: ignore[arg-type]
    for page in PAGES:
        named = set(re.findall(r"[`'#] ?virt-vgpu ([a-z][a-z-]+)", page.read_text()))
        assert named - verbs - {"sync-"} == set(), page


@places(of("synopsis"))
def test_a_synopsis_names_every_verb(block: Block) -> None:
    named = set(
        re.findall(r"(?m)(?:^virt-vgpu |, )([a-z][a-z-]+)(?: {2,}| [A-Z\[-]|,|$)", block.text)
    )
    assert set(main.list_commands(None)) <= named  # type: ignore[arg-type]


@places([*of("xml"), *of("xslt")])
def test_xml_is_understood(block: Block) -> None:
    root = etree.fromstring(block.text.encode())
    if block.language == "xslt":
        _check_stylesheet(root)
    elif root.tag == "domain":
        assert parse_domain(block.text).asks, block.place
    else:
        domain = parse_domain(_domain_with(block.text))
        assert domain.request_error is None, block.place
        assert domain.requests or domain.hostdevs, block.place


@places([*of("toml"), *of("toml", "config")])
def test_toml_is_a_configuration(block: Block) -> None:
    config.parse(block.text, block.place)


def test_the_configuration_reference_has_every_key_and_its_default() -> None:
    block = _reference()
    tables_there = tomllib.loads(block.text)
    assert config.parse(block.text, block.place) == config.Config()
    for table, keys in _known().items():
        assert set(keys) <= set(tables_there[table]), table


@places(of("ini"))
def test_ini_files_can_be_read(block: Block) -> None:
    parser = configparser.ConfigParser(interpolation=None, strict=True)
    parser.read_string(block.text)
    for section in parser.sections():
        for key in ("device_spec", "alias"):
            if value := parser[section].get(key):
                json.loads(value)


@places(of("sh"))
def test_scripts_are_clean(block: Block) -> None:
    command = ["shellcheck", "--shell=sh", "--exclude=SC2148", "-"]
    done = subprocess.run(command, input=block.text, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout


@places(of("hcl"))
def test_hcl_is_balanced(block: Block) -> None:
    """There is no parser of HCL here; what is written wrong is mostly a bracket."""
    text = re.sub(r'"[^"\n]*"', "", re.sub(r"(?s)<<-(\w+)\n.*?\n\s*\1", "", block.text))
    for opening, closing in ("{}", "[]", "()"):
        assert text.count(opening) == text.count(closing), block.place


@places(of("mermaid"))
def test_diagrams_are_of_a_kind_that_code_hosts_draw(block: Block) -> None:
    assert block.text.startswith(DIAGRAMS)
    assert ";" not in block.text, "which ends a statement in Mermaid"


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"(?ms)^```.*?^```", "", page.read_text())
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https://", target):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), target
        if anchor:
            assert anchor in _anchors(there), target


def test_pictures_are_small_and_shown() -> None:
    text = "".join(page.read_text() for page in PAGES)
    for picture in (REPOSITORY / "docs/images").glob("*.png"):
        assert picture.stat().st_size < 100_000
        assert f"(images/{picture.name})" in text


def test_the_guide_names_every_decision() -> None:
    text = (REPOSITORY / "docs/guide.md").read_text()
    named = text[text.index("`VGPU_DECISION` is one of") :].partition(".")[0]
    assert set(re.findall(r"`([a-z-]+)`", named)) == {str(each) for each in Decision}


def test_the_index_has_every_page() -> None:
    text = README.read_text()
    for page in PAGES:
        assert page == README or f"docs/{page.name}" in text, page


def test_what_is_printed_is_compared_loosely_but_in_order() -> None:
    said = "GPU a  2 used\n  VF1   in-use  web1\n  VF2   free\n"
    assert is_printed(("GPU ... 2 used", "...", "VF1 in-use web1"), said) is None
    assert is_printed(("VF2 free", "VF1 in-use web1"), said) == "VF1 in-use web1"
    assert is_printed(("VF1 in-use",), said) == "VF1 in-use"


def _reference() -> Block:
    (block,) = of("toml", "config")
    return block


def _known() -> dict[str, tuple[str, ...]]:
    return {table: tuple(keys) for table, keys in config._KEYS.items()}


def _domain_with(part: str) -> str:
    metadata, devices = ("", part) if part.startswith("<hostdev") else (part, "")
    if not metadata.startswith("<metadata"):
        metadata = f"<metadata>{metadata}</metadata>"
    return (
        "<domain type='kvm'><name>web1</name><uuid>5b9b1f6c-6b0a-4f52-9d7c-2f7c6d1f0a01</uuid>"
        f"{metadata}<devices>{devices}</devices></domain>"
    )


def _check_stylesheet(root: etree._Element) -> None:
    before = etree.fromstring(_domain_with("<app:it xmlns:app='urn:other'/>"))
    after = etree.tostring(etree.XSLT(root)(before), encoding="unicode")
    (request,) = parse_domain(after).requests
    assert (request.alias, request.profile) == ("ua-vgpu0", "NVIDIA L40S-8Q")


def _anchors(page: Path) -> set[str]:
    """The headings' anchors, as code hosts make them."""
    heads = re.findall(r"(?m)^#+ (.*)$", page.read_text())
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}
