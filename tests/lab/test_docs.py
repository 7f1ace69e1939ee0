# SPDX-License-Identifier: LGPL-2.1-or-later
"""The commands of README.md and docs/*.md, page by page, as a reader would run them.

The lab's GPUs, profiles and addresses stand for the documentation's: see tests/docs/tables.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.docs import tables
from tests.docs.blocks import PAGES, blocks, is_printed
from tests.lab import guest

if TYPE_CHECKING:
    from pathlib import Path

# The domains of each page, shut off: as XML in the place of their hostdevs; empty: without any.
MDEV = """
    <hostdev mode='subsystem' type='mdev' managed='no' model='vfio-pci'>
      <source><address uuid='83b8f4f2-509f-382f-3c1e-e6bfe0fa1001'/></source>
    </hostdev>"""
ADDED_BY_HAND = """
    <hostdev mode='subsystem' type='pci' managed='yes'>
      <source><address domain='0x0000' bus='0x01' slot='0x10' function='0x0'/></source>
    </hostdev>"""
DOMAINS = {
    "README.md": {"web1": ""},
    "guide.md": {"web1": "", "web2": ""},
    "from-mdev.md": {"web1": MDEV},
    "openstack.md": {},
    "virt-manager.md": {"web1": ADDED_BY_HAND},
}
WITH_COMMANDS = [
    page
    for page in PAGES
    if any((each.language, each.where) == ("console", "lab") for each in blocks(page))
]


def as_shown(text: str) -> guest.Answer:
    """Run a command. `doctor` asks systemd, which the lab only pretends (see conftest)."""
    if "virt-vgpu doctor" not in text:
        return guest.run("bash", "-c", text)
    guest.SYSTEMD.rmdir()
    try:
        return guest.run("bash", "-c", text)
    finally:
        guest.SYSTEMD.mkdir()


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=[page.name for page in WITH_COMMANDS])
def test_a_page_does_what_it_says(page: Path) -> None:
    for name, devices in DOMAINS[page.name].items():
        guest.define(name, devices=devices)
    run = 0
    wrong = []
    for block in blocks(page):
        if (block.language, block.where) != ("console", "lab"):
            continue
        for command in block.commands():
            text = tables.for_the_lab(command.text)
            answer = as_shown(text)
            print(f"{command.place}# {text}\n{answer.output}")
            if (answer.status != 0) != command.fails:
                wrong.append(f"{command.place}: {text} exits with {answer.status}")
            expected = tuple(map(tables.for_the_lab, command.output))
            if missing := is_printed(expected, answer.output):
                wrong.append(f"{command.place}: {text} doesn't print '{missing}'")
            run += 1
    assert not wrong
    assert run


def test_every_page_with_commands_has_its_domains() -> None:
    assert {page.name for page in WITH_COMMANDS} == set(DOMAINS)
