# SPDX-License-Identifier: LGPL-2.1-or-later
"""Points hostdevs elsewhere in a document and leaves every other byte of it alone.

For the hooks `migrate` and `restore`, whose answer libvirt takes in the document's place, and in
which other scripts may have had a hand. Comments, CDATA, blanks, quotes and encoding stay, since
only the values of four attributes are replaced, at the places where expat says that they are.
"""

from __future__ import annotations

import re
from xml.parsers import expat

from ..errors import DomainXmlError
from ..records import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..address import PciAddress

_ADDRESS = ["domain", "devices", "hostdev", "source", "address"]
_ALIAS = ["domain", "devices", "hostdev", "alias"]
_TAG = re.compile(rb"""<address(?:\s+[^\s=]+\s*=\s*(?:"[^"]*"|'[^']*'))*\s*""", re.ASCII)
_ATTRIBUTE = rb"""(\s%s\s*=\s*)("[^"]*"|'[^']*')"""


class _Hostdev(NamedTuple):
    alias: str | None
    at: int | None  # byte at which the tag of its source's address begins


def repointed(document: bytes, places: Mapping[str, PciAddress]) -> bytes:
    """DOCUMENT with the hostdev of each alias in PLACES pointing at that address.

    Raises DomainXmlError where it isn't XML that we can count bytes in, or lacks one of them.
    """
    found = {hostdev.alias: hostdev.at for hostdev in _hostdevs(document)}
    starts: dict[int, PciAddress] = {}
    for alias, address in places.items():
        if (at := found.get(alias)) is None:
            raise DomainXmlError(f"there is no hostdev '{alias}' with a source address")
        starts[at] = address
    parts = []
    end = 0
    for at, address in sorted(starts.items()):
        tag = _TAG.match(document, at)
        if tag is None:
            raise DomainXmlError("it is in an encoding in which bytes can't be counted")
        parts += [document[end:at], _pointing(tag[0], address)]
        end = tag.end()
    return b"".join([*parts, document[end:]])


def _hostdevs(document: bytes) -> list[_Hostdev]:
    parser = expat.ParserCreate()
    path: list[str] = []
    found: list[_Hostdev] = []

    def start(name: str, attributes: dict[str, str]) -> None:
        path.append(name)
        if path == _ADDRESS[:3]:
            found.append(_Hostdev(None, None))
        elif path == _ADDRESS:
            found[-1] = found[-1]._replace(at=parser.CurrentByteIndex)
        elif path == _ALIAS:
            found[-1] = found[-1]._replace(alias=attributes.get("name"))

    def end(_name: str) -> None:
        path.pop()

    parser.StartElementHandler = start
    parser.EndElementHandler = end
    try:
        parser.Parse(document, True)
    except expat.ExpatError as error:
        raise DomainXmlError(f"not well-formed XML: {error}") from error
    return found


def _pointing(tag: bytes, address: PciAddress) -> bytes:
    """The tag of an `<address>`, up to its end, with the values of ADDRESS."""
    for name, value in address.to_xml().items():
        pattern = _ATTRIBUTE % name.encode()
        text = value.encode()

        def put(match: re.Match[bytes], text: bytes = text) -> bytes:
            quote = match[2][:1]
            return match[1] + quote + text + quote

        tag, number = re.subn(pattern, put, tag, count=1)
        if not number:  # libvirt writes all four, but the first may be left out
            body = tag.rstrip()
            tag = b"%s %s='%s'%s" % (body, name.encode(), text, tag[len(body) :])
    return tag
