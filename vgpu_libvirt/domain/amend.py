# SPDX-License-Identifier: LGPL-2.1-or-later
"""Completes the document of a program that writes its own: hostdevs, and a UUID.

Whatever else the program wrote stays, byte for byte.
"""

from __future__ import annotations

import re
import uuid
from xml.parsers import expat

from ..address import PciAddress
from ..errors import DomainXmlError
from ..records import TYPE_CHECKING, NamedTuple
from . import edit, splice

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..address import Location

_HOSTDEV = ["domain", "devices", "hostdev"]
_EMPTY = re.compile(rb"""(<[^\s/>]+(?:\s+[^\s=]+\s*=\s*(?:"[^"]*"|'[^']*'))*)\s*/>""")


class _Places(NamedTuple):
    """Where, in bytes, the tags begin that end these elements; an empty element's only tag too."""

    domain: int
    devices: int | None
    has_uuid: bool
    hostdevs: dict[str, _Hostdev]  # by their aliases


class _Hostdev(NamedTuple):
    """Where a hostdev stands, in bytes, and of what type it is."""

    begin: int
    end: int
    kind: str


def with_uuid(document: str) -> str:
    """DOCUMENT with a random UUID where it has none, as libvirt would make it.

    So it can be known before libvirt sees it. Raises DomainXmlError.
    """
    data = document.encode()
    places = _find(data)
    if places.has_uuid:
        return document
    return _inserted(data, places.domain, f"<uuid>{uuid.uuid4()}</uuid>").decode()


def pointing(document: str, sources: Mapping[str, Location]) -> str:
    """DOCUMENT with a hostdev at each of SOURCES, which are by alias; missing ones are added.

    Of a hostdev that stays a PCI device only the address changes; others are written anew.
    Raises DomainXmlError, also for a hostdev with such an alias that names no device at all.
    """
    data = document.encode()
    there = _find(data).hostdevs
    addresses = {
        alias: source
        for alias, source in sources.items()
        if isinstance(source, PciAddress) and alias in there and there[alias].kind != "mdev"
    }
    data = splice.repointed(data, addresses)
    for alias in sources.keys() & there.keys() - addresses.keys():
        at = _find(data).hostdevs[alias]
        after = edit.repointed(data[at.begin : at.end].decode(), sources[alias])
        data = b"".join([data[: at.begin], after.encode(), data[at.end :]])
    added = "".join(edit.hostdev(a, at) for a, at in sources.items() if a not in there)
    if not added:
        return data.decode()
    places = _find(data)
    if places.devices is None:
        return _inserted(data, places.domain, f"<devices>{added}</devices>").decode()
    return _inserted(data, places.devices, added).decode()


def _find(document: bytes) -> _Places:
    parser = expat.ParserCreate()
    path: list[str] = []
    begins: list[int] = []  # of the tags that opened what is in PATH
    ends: dict[str, int] = {}
    hostdevs: dict[str, _Hostdev] = {}
    kind = ""
    alias: str | None = None
    has_uuid = False

    def start(name: str, attributes: dict[str, str]) -> None:
        nonlocal has_uuid, kind, alias
        path.append(name)
        begins.append(parser.CurrentByteIndex)
        has_uuid = has_uuid or path == ["domain", "uuid"]
        if path == _HOSTDEV:
            kind, alias = attributes.get("type", ""), None
        elif path == [*_HOSTDEV, "alias"]:
            alias = attributes.get("name", "")

    def end(_name: str) -> None:
        begin = begins.pop()
        if path == _HOSTDEV and alias is not None:
            last = document.index(b">", parser.CurrentByteIndex) + 1
            hostdevs[alias] = _Hostdev(begin, last, kind)
        if len(path) == 1 or path == ["domain", "devices"]:
            is_empty = _EMPTY.match(document, begin)  # then this is told after its tag
            ends["/".join(path)] = begin if is_empty else parser.CurrentByteIndex
        path.pop()

    parser.StartElementHandler = start
    parser.EndElementHandler = end
    try:
        parser.Parse(document, True)
    except expat.ExpatError as error:
        raise DomainXmlError(f"not well-formed XML: {error}") from error
    if "domain" not in ends:
        raise DomainXmlError("not a domain's document")
    return _Places(ends["domain"], ends.get("domain/devices"), has_uuid, hostdevs)


def _inserted(document: bytes, at: int, text: str) -> bytes:
    """DOCUMENT with TEXT at the end of the element whose last tag is at AT."""
    empty = _EMPTY.match(document, at)
    if empty is None:
        return b"".join([document[:at], text.encode(), document[at:]])
    name = empty[1][1:].split()[0]
    return b"".join(
        [document[:at], empty[1], b">", text.encode(), b"</", name, b">", document[empty.end() :]]
    )
