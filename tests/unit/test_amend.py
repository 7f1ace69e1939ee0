# SPDX-License-Identifier: LGPL-2.1-or-later
"""A program's document is completed: what it wrote stays, byte for byte."""

from __future__ import annotations

import re
import uuid

import pytest

from tests.unit.host import domain_xml
from vgpu_libvirt.address import PciAddress
from vgpu_libvirt.domain import amend
from vgpu_libvirt.domain.read import parse_domain
from vgpu_libvirt.errors import DomainXmlError

HERE, THERE = PciAddress(0, 0x3D, 0, 4), PciAddress(0, 0x3D, 0, 5)
HEAD = "<name>w\u00e9b</name><uuid>aaaaaaaa-0000-0000-0000-000000000001</uuid>"
ADDED = re.compile(r"<hostdev.*</hostdev>", re.DOTALL)


def pointed(document: str) -> dict[str | None, str]:
    return {hostdev.alias: str(hostdev.address) for hostdev in parse_domain(document).hostdevs}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            f"<?xml version='1.0' encoding='UTF-8'?><!-- \u2603 -->\n<domain>{HEAD}<devices>\n"
            "<disk/><!-- </devices> --></devices><x/></domain>\n",
            None,
        ),
        (
            f"<domain>{HEAD}<devices/>\t</domain>",
            f"<domain>{HEAD}<devices></devices>\t</domain>",
        ),
        (
            f"<domain>{HEAD}<devices a='/>' /></domain>",
            f"<domain>{HEAD}<devices a='/>'></devices></domain>",
        ),
        (
            f"<domain>{HEAD}<metadata><devices/></metadata></domain>",
            f"<domain>{HEAD}<metadata><devices/></metadata><devices></devices></domain>",
        ),
    ],
)
def test_a_missing_hostdev_is_added(before: str, after: str | None) -> None:
    done = amend.pointing(before, {"ua-a": HERE})
    assert pointed(done) == {"ua-a": str(HERE)}
    assert ADDED.sub("", done) == (after or before)


def test_one_is_pointed_elsewhere_and_one_added() -> None:
    before = domain_xml(hostdevs={"ua-a": str(HERE), "ua-other": "0000:01:00.0"})
    done = amend.pointing(before, {"ua-b": HERE, "ua-a": THERE})
    assert pointed(done) == {"ua-a": str(THERE), "ua-other": "0000:01:00.0", "ua-b": str(HERE)}


def test_nothing_to_do_changes_nothing() -> None:
    before = domain_xml(hostdevs={"ua-a": str(HERE)})
    assert amend.pointing(before, {}) == before


def test_a_uuid_is_made_where_there_is_none() -> None:
    before = f"<domain>{HEAD}<os><uuid>b</uuid></os></domain>"
    assert amend.with_uuid(before) == before
    bare = re.sub("<uuid>a.*?</uuid>", "", before)
    done = amend.with_uuid(bare)
    made = parse_domain(done).uuid
    assert str(uuid.UUID(made)) == made
    assert done.replace(f"<uuid>{made}</uuid>", "") == bare
    assert parse_domain(amend.with_uuid(bare)).uuid != made


@pytest.mark.parametrize("document", ["", "<domain>", "<domain></domain><a/>", "<network/>"])
def test_what_is_no_domain_is_said(document: str) -> None:
    with pytest.raises(DomainXmlError):
        amend.with_uuid(document)


def test_a_hostdev_that_names_no_device_is_said() -> None:
    document = domain_xml(hostdevs="<hostdev><alias name='ua-a'/></hostdev>")
    with pytest.raises(DomainXmlError, match="no hostdev 'ua-a' with a source address"):
        amend.pointing(document, {"ua-a": HERE})
