# SPDX-License-Identifier: LGPL-2.1-or-later
"""Reads domain XML and status XML, with expat alone: lxml would cost each hook 31 ms."""

from __future__ import annotations

from typing import NamedTuple
from xml.parsers import expat

from .. import sets
from ..address import PciAddress
from ..errors import AddressError, DomainXmlError, RequestError
from .model import ALIAS_PREFIX, NAMESPACE, Domain, Hostdev, Request, Status

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


def parse_set(text: str) -> set[int]:
    """Read a set of numbers as libvirt and sysfs write it: `0-3,^2,8`. Raises DomainXmlError."""
    try:
        return sets.parse(text)
    except ValueError as error:
        raise DomainXmlError(str(error)) from error


class _Element(NamedTuple):
    attributes: dict[str, str]
    children: dict[str, dict[str, str]]  # path below it -> attributes, of the last such child


class _Reader:
    """Collects what we want of one document; paths are relative to `<domain>`."""

    def __init__(self, root: str) -> None:
        self._root_name = root
        self._path: list[str] = []
        self._skip = 0 if root == "domain" else 1  # levels above <domain>
        self._text: list[str] = []
        self._hostdev: _Element | None = None
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
        parser = expat.ParserCreate(namespace_separator=_GAP)
        parser.StartElementHandler = self._start
        parser.EndElementHandler = self._end
        parser.CharacterDataHandler = self._text.append
        parser.StartDoctypeDeclHandler = _refuse_doctype
        try:
            parser.Parse(text, True)
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

    def _start(self, name: str, attributes: dict[str, str]) -> None:
        if not self._path:
            if name != self._root_name:
                raise DomainXmlError(f"a document of <{name}>, not of <{self._root_name}>")
            self.root = attributes
        self._path.append(name)
        self._text.clear()
        where = "/".join(self._path[self._skip :])
        if where == "domain":
            self._attributes = attributes
        elif self._path == ["domstatus", "monitor"]:
            self.monitor = attributes.get("path")
        elif where == "domain/devices/hostdev":
            self._hostdev = _Element(attributes, {})
        elif self._hostdev and where.startswith("domain/devices/hostdev/"):
            self._hostdev.children[where.removeprefix("domain/devices/hostdev/")] = attributes
        elif where in ("domain/numatune/memory", "domain/numatune/memnode"):
            self._nodes |= parse_set(attributes.get("nodeset", ""))
        elif where in ("domain/vcpu", "domain/cputune/vcpupin"):
            self._cpus |= parse_set(attributes.get("cpuset", ""))
        elif where.startswith("domain/metadata/"):
            self._metadata(where.removeprefix("domain/metadata/"), attributes)

    def _end(self, _name: str) -> None:
        where = "/".join(self._path[self._skip :])
        self._path.pop()
        if where == "domain/name":
            self._name = "".join(self._text)
        elif where == "domain/uuid":
            self._uuid = "".join(self._text).strip()
        elif where == "domain/devices/hostdev" and self._hostdev:
            if self._hostdev.attributes.get("mode") == "subsystem":
                self._hostdevs.append(_hostdev(self._hostdev))
            self._hostdev = None

    def _metadata(self, where: str, attributes: dict[str, str]) -> None:
        try:
            if where == f"{_DEVICES}/{_DEVICE}":
                self._requests.append(_request(attributes))
            elif where == _DEVICES:
                if attributes:
                    raise RequestError(f"unknown attribute '{min(attributes)}' of <devices>")
            elif where.startswith((f"{_DEVICES}/", f"{NAMESPACE}{_GAP}")):
                raise RequestError(f"unknown element <{where.rpartition('/')[2].split(_GAP)[-1]}>")
        except RequestError as error:
            self._request_error = self._request_error or str(error)


def _refuse_doctype(*_: object) -> None:
    # libvirt writes none, and entities could make a small document huge.
    raise DomainXmlError("a document type declaration in a domain's XML")


def _hostdev(element: _Element) -> Hostdev:
    source = element.children.get("source/address")
    address = error = None
    kind = element.attributes.get("type", "")
    if kind == "pci" and source is not None:
        try:
            address = PciAddress.from_xml(source)
        except AddressError as mistake:
            error = str(mistake)
    return Hostdev(
        kind,
        element.attributes.get("managed") == "yes",
        element.children.get("alias", {}).get("name"),
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
