# SPDX-License-Identifier: LGPL-2.1-or-later
"""Domains that nobody here wrote, those of libvirt's own tests: what we don't know stays as it is.

tests/setup fetches them; $VGPU_LIBVIRT_DOMAINS says where they are.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING
from xml.parsers import expat

import pytest

from tests.unit.host import Host, hostdev_xml
from vgpu_libvirt import sync
from vgpu_libvirt.address import PciAddress
from vgpu_libvirt.domain import splice
from vgpu_libvirt.domain.read import parse_domain
from vgpu_libvirt.errors import DomainXmlError

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = os.environ.get("VGPU_LIBVIRT_DOMAINS")
ELSEWHERE = PciAddress(0, 0xAF, 0, 7)
REQUEST = (
    b"<v:devices xmlns:v='urn:vgpu-libvirt:domain:1'>"
    b"<v:device alias='ua-vgpu0' profile='L40S-8Q'/></v:devices>"
)
HOSTDEV = hostdev_xml("ua-vgpu0", str(ELSEWHERE)).encode()
FEWEST = 200

pytestmark = pytest.mark.skipif(ROOT is None, reason="tests/setup fetches libvirt's own domains")


def documents() -> Iterator[tuple[str, bytes]]:
    """Each that is a domain by libvirt's own reckoning, by name."""
    for path in sorted(Path(ROOT or "").glob("*/*.xml")):
        document = path.read_bytes()
        try:
            parse_domain(document.decode())
        except (DomainXmlError, UnicodeDecodeError):
            continue  # of networks, or not even libvirt takes it
        yield f"{path.parent.name}/{path.name}", document


def with_request(document: bytes) -> bytes:
    """DOCUMENT with a request and its hostdev put in, as text."""
    for tag, inside in ((b"metadata", REQUEST), (b"devices", HOSTDEV)):
        at = end_of_tag(document, tag.decode())
        if at is None:
            at = end_of_tag(document, "")
            inside = b"<%s>%s</%s>" % (tag, inside, tag)
        assert at is not None
        document = document[:at] + inside + document[at:]
    return document


def end_of_tag(document: bytes, name: str) -> int | None:
    """Where the start tag of the domain's child NAME ends, or of the domain itself; None: nowhere.

    An empty element has no inside to put something into.
    """
    parser = expat.ParserCreate()
    depth = 0
    found = None

    def start(tag: str, _attributes: dict[str, str]) -> None:
        nonlocal depth, found
        if found is None and (tag == name if depth == 1 else depth == 0 and not name):
            match = re.compile(rb"""<(?:[^"'>]|"[^"]*"|'[^']*')*>""").match(
                document, parser.CurrentByteIndex
            )
            if match and not match[0].endswith(b"/>"):
                found = match.end()
        depth += 1

    def end(_tag: str) -> None:
        nonlocal depth
        depth -= 1

    parser.StartElementHandler = start
    parser.EndElementHandler = end
    parser.Parse(document, True)
    return found


def without_request(document: bytes) -> bytes:
    for tag, inside in ((b"metadata", REQUEST), (b"devices", HOSTDEV)):
        document = document.replace(b"<%s>%s</%s>" % (tag, inside, tag), b"")
        document = document.replace(inside, b"")
    return document


def test_there_are_enough_of_them() -> None:
    assert sum(1 for _ in documents()) >= FEWEST


def test_a_request_goes_in_and_out_and_everything_else_stays() -> None:
    here = PciAddress(0x10001, 0x3D, 0x1F, 3)
    for name, document in documents():
        if b"urn:vgpu" in document or document.count(b"<devices/>"):
            continue
        asking = with_request(document)
        assert parse_domain(asking.decode()).asks, name
        filtered = splice.repointed(asking, {"ua-vgpu0": here})
        hostdev = parse_domain(filtered.decode()).hostdev("ua-vgpu0")
        assert hostdev is not None, name
        assert hostdev.address == here, name
        back = splice.repointed(filtered, {"ua-vgpu0": ELSEWHERE})
        assert without_request(back) == document, name


@pytest.mark.promise(6)
def test_the_filters_answer_is_the_document_with_another_address(tmp_path: Path) -> None:
    """By the hook itself, for a part of them."""
    host = Host(tmp_path)
    host.gpu()
    host.set_policy(reserve_timeout=0.001)
    tried = 0
    for number, (name, document) in enumerate(documents()):
        if number % 5 or document.count(b"<devices/>") or b"numatune" in document:
            continue
        assert host.hook("migrate", document.decode()) == (0, "", ""), name
        asking = with_request(document)
        status, stdout, stderr = host.hook("migrate", asking.decode())
        answer = stdout.encode()
        assert (status, stderr) == (0, ""), name
        assert answer != asking, name
        back = splice.repointed(answer, {"ua-vgpu0": ELSEWHERE})
        assert without_request(back) == document, name
        sync.reconcile(host.context(), time.monotonic() + 10)
        tried += 1
    assert tried > FEWEST
