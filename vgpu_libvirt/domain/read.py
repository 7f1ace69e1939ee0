# SPDX-License-Identifier: LGPL-2.1-or-later
"""Reads domain XML and status XML, with expat alone: lxml would cost each hook 31 ms."""

from __future__ import annotations

from xml.parsers import expat

from .. import sets
from ..address import PciAddress
from ..errors import AddressError, DomainXmlError, RequestError
from ..records import TYPE_CHECKING
from .model import ALIAS_PREFIX, NAMESPACE, Domain, Hostdev, Request, Status

if TYPE_CHECKING:
    from collections.abc import Callable

_GAP = " "  # between namespace and name: no URI contains one
_DEVICES = f"{NAMESPACE}{_GAP}devices"
_DEVICE = f"{NAMESPACE}{_GAP}device"
CHOICES = {  # of a request's attributes
    "placement": ("spread", "pack"),
    "numa": ("prefer", "require", "ignore"),
    "apart": ("gpu",),
    "together": ("gpu",),
}


def parse_domain(text: str) -> Domain:
    """Read a domain's XML, as hooks and `virsh dumpxml` give it. Raises DomainXmlError."""
    reader = _Reader("domain")
    reader.read(text)
    return reader.domain()


def parse_status(text: str) -> Status:
    """Read a status file of libvirt's (`<domstatus>`). Raises DomainXmlError."""
    reader = _Reader("domstatus")
    reader.read(text)
    return Status(reader.domain(), sets.number(reader.root.get("pid", "")), reader.monitor)


def is_status(text: str) -> bool:
    """Whether TEXT is a whole status file of libvirt's, which has a thousand of them checked.

    libvirt writes one aside and renames it, so what could be wrong with it is that it was cut off,
    or that blocks of it are zeros. False: perhaps not, and only `parse_status` can tell.
    """
    head, begin, rest = text.partition("<domstatus ")
    element = rest.partition(">")[0]
    _, end, after = rest.partition("</domstatus>")
    has_all = begin and " pid='" in element and "<name>" in rest and "<uuid>" in rest and end
    is_more = "<" in head.replace("<!--", "", 1) or after.strip() or "\0" in text
    return bool(has_all) and not is_more


def parse_set(text: str) -> set[int]:
    """Read a set of numbers as libvirt and sysfs write it: `0-3,^2,8`. Raises DomainXmlError."""
    try:
        return sets.parse(text)
    except ValueError as error:
        raise DomainXmlError(str(error)) from error


class _Place:
    """An element that we look at: what to do at its begin and end, and what to look at inside.

    `other` is for the elements inside that have no place of their own.
    """

    __slots__ = ("begin", "end", "inside", "other")

    def __init__(
        self,
        begin: Callable[[_Reader, str, dict[str, str]], None] | None = None,
        end: Callable[[_Reader], None] | None = None,
        inside: dict[str, _Place] | None = None,
        other: _Place | None = None,
    ) -> None:
        self.begin = begin
        self.end = end
        self.inside = inside or {}
        self.other = other or self


class _Reader:
    """Collects what we want of one document.

    A status file has hundreds of elements, a host a thousand of them, and hooks read them all: what
    is of no interest costs a look-up, and no text of it is ever seen.
    """

    def __init__(self, root: str) -> None:
        self._root_name = root
        self._places = [_Place(inside={root: _ROOTS[root]})]  # from there to where we are
        self._parser = expat.ParserCreate(namespace_separator=_GAP)
        self._text: list[str] = []
        self._hostdev: dict[str, str] = {}
        self._source: dict[str, str] | None = None
        self._alias: str | None = None
        self._hostdevs: list[Hostdev] = []
        self._requests: list[Request] = []
        self._request_error: str | None = None
        self._attributes: dict[str, str] = {}
        self._name = self._uuid = ""
        self._nodes: set[int] = set()
        self._cpus: set[int] = set()
        self.root: dict[str, str] = {}
        self.monitor: str | None = None

    def read(self, text: str) -> None:
        self._parser.StartElementHandler = self._start_root
        self._parser.EndElementHandler = self._end
        self._parser.StartDoctypeDeclHandler = _refuse_doctype
        try:
            self._parser.Parse(text, True)
        except expat.ExpatError as error:
            raise DomainXmlError(f"not well-formed XML: {error}") from error

    def domain(self) -> Domain:
        if not self._name or not self._uuid:
            raise DomainXmlError("a domain without name or UUID")
        return Domain(
            self._name,
            self._uuid.lower(),
            sets.number(self._attributes.get("id", "")),
            tuple(self._requests),
            tuple(self._hostdevs),
            frozenset(self._nodes),
            frozenset(self._cpus),
            self._request_error,
        )

    def _start_root(self, name: str, attributes: dict[str, str]) -> None:
        if name != self._root_name:
            raise DomainXmlError(f"a document of <{name}>, not of <{self._root_name}>")
        self.root = attributes
        self._parser.StartElementHandler = self._start
        self._start(name, attributes)

    def _start(self, name: str, attributes: dict[str, str]) -> None:
        here = self._places[-1]
        place = here.inside.get(name, here.other)
        self._places.append(place)
        if place.begin:
            place.begin(self, name, attributes)

    def _end(self, _name: str) -> None:
        place = self._places.pop()
        if place.end:
            place.end(self)

    def begin_domain(self, _name: str, attributes: dict[str, str]) -> None:
        self._attributes = attributes

    def begin_monitor(self, _name: str, attributes: dict[str, str]) -> None:
        self.monitor = attributes.get("path")

    def begin_text(self, _name: str, _attributes: dict[str, str]) -> None:
        self._text.clear()
        self._parser.CharacterDataHandler = self._text.append

    def end_name(self) -> None:
        self._parser.CharacterDataHandler = None
        self._name = "".join(self._text)

    def end_uuid(self) -> None:
        self._parser.CharacterDataHandler = None
        self._uuid = "".join(self._text).strip()

    def begin_numatune(self, _name: str, attributes: dict[str, str]) -> None:
        self._nodes |= parse_set(attributes.get("nodeset", ""))

    def begin_vcpu(self, _name: str, attributes: dict[str, str]) -> None:
        self._cpus |= parse_set(attributes.get("cpuset", ""))

    def begin_hostdev(self, _name: str, attributes: dict[str, str]) -> None:
        self._hostdev = attributes
        self._source = self._alias = None

    def begin_source(self, _name: str, attributes: dict[str, str]) -> None:
        self._source = attributes

    def begin_alias(self, _name: str, attributes: dict[str, str]) -> None:
        self._alias = attributes.get("name")

    def end_hostdev(self) -> None:
        if self._hostdev.get("mode") == "subsystem":
            self._hostdevs.append(_hostdev(self._hostdev, self._source, self._alias))

    def begin_devices(self, _name: str, attributes: dict[str, str]) -> None:
        if attributes:
            self._complain(f"unknown attribute '{min(attributes)}' of <devices>")

    def begin_request(self, _name: str, attributes: dict[str, str]) -> None:
        try:
            self._requests.append(_request(attributes))
        except RequestError as error:
            self._complain(str(error))

    def begin_unknown(self, name: str, _attributes: dict[str, str]) -> None:
        self._complain(f"unknown element <{name.split(_GAP)[-1]}>")

    def begin_metadata(self, name: str, attributes: dict[str, str]) -> None:
        if name.startswith(f"{NAMESPACE}{_GAP}"):
            self.begin_unknown(name, attributes)

    def _complain(self, problem: str) -> None:
        self._request_error = self._request_error or problem


_ANYTHING = _Place()  # and all that is in it: nothing to us
_UNKNOWN = _Place(_Reader.begin_unknown)  # and all that is in it


def _place(
    begin: Callable[[_Reader, str, dict[str, str]], None] | None = None,
    end: Callable[[_Reader], None] | None = None,
    other: _Place = _ANYTHING,
    **inside: _Place,
) -> _Place:
    return _Place(begin, end, inside, other)


_DOMAIN = _place(
    _Reader.begin_domain,
    name=_place(_Reader.begin_text, _Reader.end_name),
    uuid=_place(_Reader.begin_text, _Reader.end_uuid),
    vcpu=_place(_Reader.begin_vcpu),
    cputune=_place(vcpupin=_place(_Reader.begin_vcpu)),
    numatune=_place(memory=_place(_Reader.begin_numatune), memnode=_place(_Reader.begin_numatune)),
    devices=_place(
        hostdev=_place(
            _Reader.begin_hostdev,
            _Reader.end_hostdev,
            source=_place(address=_place(_Reader.begin_source)),
            alias=_place(_Reader.begin_alias),
        )
    ),
    metadata=_Place(
        inside={
            _DEVICES: _Place(
                _Reader.begin_devices,
                inside={_DEVICE: _Place(_Reader.begin_request, other=_UNKNOWN)},
                other=_UNKNOWN,
            )
        },
        other=_place(_Reader.begin_metadata),
    ),
)
_ROOTS = {
    "domain": _DOMAIN,
    "domstatus": _place(monitor=_place(_Reader.begin_monitor), domain=_DOMAIN),
}


def _refuse_doctype(*_: object) -> None:
    # libvirt writes none, and entities could make a small document huge.
    raise DomainXmlError("a document type declaration in a domain's XML")


def _hostdev(
    attributes: dict[str, str], source: dict[str, str] | None, alias: str | None
) -> Hostdev:
    address = error = None
    kind = attributes.get("type", "")
    if kind == "pci" and source is not None:
        try:
            address = PciAddress.from_xml(source)
        except AddressError as mistake:
            error = str(mistake)
    return Hostdev(
        kind,
        attributes.get("managed") == "yes",
        alias,
        address,
        error,
        source.get("uuid", "").lower() or None if kind == "mdev" and source else None,
    )


def _request(attributes: dict[str, str]) -> Request:
    unknown = sorted(attributes.keys() - set(Request._fields))
    if unknown:
        raise RequestError(f"unknown attribute '{unknown[0]}'; known: {', '.join(Request._fields)}")
    for name in ("alias", "profile"):
        if not attributes.get(name):
            raise RequestError(f"a <device> without the attribute '{name}'")
    alias = attributes["alias"]
    if not alias.startswith(ALIAS_PREFIX):
        raise RequestError(
            f"alias '{alias}' must begin with '{ALIAS_PREFIX}', since libvirt drops others; "
            f"call it '{ALIAS_PREFIX}{alias}' here and in the hostdev"
        )
    for name, choices in CHOICES.items():
        if name in attributes and attributes[name] not in choices:
            raise RequestError(
                f"{name}='{attributes[name]}' of '{alias}' is not known; "
                f"known: {', '.join(choices)}"
            )
    gpu = None
    if "gpu" in attributes:
        try:
            gpu = PciAddress.parse(attributes["gpu"])
        except AddressError as error:
            raise RequestError(f"gpu of '{alias}': {error}") from error
    return Request(**{**attributes, "gpu": gpu})  # type: ignore[arg-type]
