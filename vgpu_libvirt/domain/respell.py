# SPDX-License-Identifier: LGPL-2.1-or-later
"""Corrects the spelling of a request in a domain's metadata, where it can mean only one thing.

Functions of texts and values; what can't be told is said, and left.
"""

from __future__ import annotations

import difflib
import re

from lxml import etree

from ..address import PciAddress
from ..devices import profiles as names
from ..errors import AddressError
from ..records import TYPE_CHECKING, NamedTuple
from . import edit
from .model import ALIAS_PREFIX, NAMESPACE, PREFIX, Request
from .read import CHOICES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ..devices.model import Profile

_OURS = f"{{{NAMESPACE}}}"
_LIKE_OURS = re.compile(r"urn:vgpu[-_]?libvirt(:.*)?", re.IGNORECASE)  # any version, any case
_ALIAS = re.compile(r"[A-Za-z0-9_-]+", re.ASCII)  # what libvirt lets stand
# What people call these; what it is shows in the value.
_VAGUE = ("type", "name", "model", "vgpu", "vgpu_type", "profile_name", "profile_id")
_CLOSE = 0.75  # how alike a misspelt name must be, of 1
_SHORT_ADDRESS = re.compile(r"[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", re.IGNORECASE | re.ASCII)


class Respelt(NamedTuple):
    """Our element as it should be, the namespaces whose elements it replaces, and what to say."""

    root: etree._Element | None  # <vgpu:devices>, on its own; None: the domain has no request
    stale: tuple[str, ...]
    findings: tuple[str, ...]  # what was corrected
    remains: tuple[str, ...]  # what can't be told

    @property
    def requests(self) -> list[etree._Element]:
        """The <vgpu:device> elements."""
        return [] if self.root is None else self.root.findall(f"{_OURS}device")


def respell(document: str, profiles: Iterable[Profile]) -> Respelt:
    """Read what may be meant as a request in DOCUMENT. Raises DomainXmlError."""
    profiles = tuple(profiles)
    speller = _Speller(profiles)
    root, stale = speller.gather(document)
    if root is not None:
        speller.elements(root)
    return Respelt(root, stale, tuple(speller.findings), tuple(speller.remains))


def meant(wanted: str, profiles: Iterable[Profile]) -> tuple[Profile, ...]:
    """The profiles that WANTED may mean: by any name, in any case, or by the end of one."""
    profiles = tuple(profiles)
    low = " ".join(wanted.lower().split())
    if found := names.find(wanted, profiles):
        return found
    if found := tuple(p for p in profiles if low in (p.name.lower(), p.short_name.lower())):
        return found
    return tuple(p for p in profiles if low and p.name.lower().endswith((f"-{low}", f" {low}")))


class _Speller:
    def __init__(self, profiles: tuple[Profile, ...]) -> None:
        self._profiles = profiles
        self.findings: list[str] = []
        self.remains: list[str] = []

    def gather(self, document: str) -> tuple[etree._Element | None, tuple[str, ...]]:
        """All that may be ours in one element, and the namespaces that it came from."""
        normal = edit.metadata(document)
        root = None if normal is None else edit.parse(normal)
        stale: dict[str, None] = {}
        for element in edit.parse(document).iterfind("metadata/*"):
            if not isinstance(element.tag, str):
                continue  # a comment
            name = etree.QName(element)
            local = _closest(name.localname, ("devices", "device"))
            is_normal = element.tag == f"{_OURS}devices"
            if is_normal or local is None or not _may_be_ours(name.namespace):
                continue
            if root is None:
                root = etree.Element(f"{_OURS}devices", nsmap={PREFIX: NAMESPACE})
            where = f"namespace '{name.namespace}'" if name.namespace else "no namespace"
            if name.namespace == NAMESPACE:
                self.findings.append(f"<{name.localname}> is now in <devices>")
            else:
                self.findings.append(f"the request in {where} is now in '{NAMESPACE}'")
            self._move(element, local, root)
            if name.namespace and name.namespace != NAMESPACE:
                stale[name.namespace] = None
        return root, tuple(stale)

    def _move(self, element: etree._Element, local: str, root: etree._Element) -> None:
        """Put the requests in ELEMENT into ROOT, but for those that are there already."""
        there = {child.get("alias") for child in root}
        for child in list(element) if local == "devices" else [element]:
            is_element = isinstance(child.tag, str)
            if not is_element or child.get("alias") is None or child.get("alias") not in there:
                child.tail = None
                root.append(child)

    def elements(self, root: etree._Element) -> None:
        """Correct ROOT and what is in it."""
        for key in list(root.attrib):
            self.remains.append(f"<devices> has the attribute '{_local(key)}', which is unknown")
        for element in list(root):
            if not isinstance(element.tag, str):
                continue
            name = etree.QName(element)
            if _closest(name.localname, ("device",)) is None or not _may_be_ours(name.namespace):
                self.remains.append(f"<devices> has the element <{name.localname}>; remove it")
                continue
            if name.localname != "device":
                self.findings.append(f"<{name.localname}> is now <device>")
            element.tag = f"{_OURS}device"
            self._attributes(element)
        if self.findings:
            etree.cleanup_namespaces(root, keep_ns_prefixes=[PREFIX])

    def _attributes(self, element: etree._Element) -> None:
        given = {str(key): str(element.attrib[key]) for key in element.attrib}
        right = {key: value for key, value in given.items() if key in Request._fields}
        meant_by: dict[str, str] = {}
        for key, value in given.items():
            if key in right:
                continue
            field, shown = self._field(key, value, right), _local(key)
            if field is None:
                known = ", ".join(Request._fields)
                self.remains.append(f"a request has '{shown}', which is unknown; known: {known}")
            elif right.get(field, value) != value:
                self.remains.append(f"a request has '{shown}' and '{field}'; remove one")
            else:
                right[field], meant_by[key] = value, field
                self.findings.append(f"'{shown}' of a request is now '{field}'")
        new: dict[str, str] = {}
        for key, value in given.items():
            field = meant_by.get(key, key)
            new[field] = self._value(field, value)
        if new != given:
            element.attrib.clear()
            element.attrib.update(new)  # type: ignore[arg-type]

    def _field(self, key: str, value: str, right: dict[str, str]) -> str | None:
        """The attribute that KEY, which is none of ours, stands for."""
        name = etree.QName(key)
        if not _may_be_ours(name.namespace):
            return None
        low = name.localname.lower().replace("-", "_")
        if low in _VAGUE:
            if "profile" not in right and meant(value, self._profiles):
                return "profile"
            if "alias" not in right and value.startswith(ALIAS_PREFIX):
                return "alias"
            return "profile" if low != "name" and "profile" not in right else None
        return _closest(low, Request._fields)

    def _value(self, field: str, value: str) -> str:
        right = value
        if field == "alias" and not value.startswith(ALIAS_PREFIX) and _ALIAS.fullmatch(value):
            right = f"{ALIAS_PREFIX}{value}"
        elif field == "profile":
            right = self._profile(value)
        elif field == "gpu":
            right = self._gpu(value)
        elif field in CHOICES and value not in CHOICES[field]:
            low = value.strip().lower()
            if low in ("yes", "true", "1") and len(CHOICES[field]) == 1:
                low = CHOICES[field][0]
            if low in CHOICES[field]:
                right = low
            else:
                allowed = ", ".join(CHOICES[field])
                self.remains.append(f"{field}='{value}' is not known; known: {allowed}")
        if right != value:
            self.findings.append(f"{field} '{value}' is now '{right}'")
        return right

    def _profile(self, value: str) -> str:
        if len(names.find(value, self._profiles)) == 1:
            return value
        found = meant(value, self._profiles)
        if len(found) == 1:
            return found[0].name
        could = f"could be {names.listed(found)}" if found else "is unknown on this host, which has"
        if not found:
            could += f" {names.listed(self._profiles) or 'none'}"
        self.remains.append(f"profile '{value}' {could}; write one of them")
        return value

    def _gpu(self, value: str) -> str:
        text = value.strip()
        try:
            PciAddress.parse(text)
        except AddressError as error:
            if _SHORT_ADDRESS.fullmatch(text):
                return f"0000:{text.lower()}"
            self.remains.append(f"gpu: {error}")
            return value
        return value


def _may_be_ours(namespace: str | None) -> bool:
    return namespace is None or bool(_LIKE_OURS.fullmatch(namespace))


def _closest(name: str, known: Iterable[str]) -> str | None:
    """The one of KNOWN that NAME is meant to be, in any case and nearly."""
    return next(iter(difflib.get_close_matches(name.lower(), list(known), 1, _CLOSE)), None)


def _local(key: object) -> str:
    return etree.QName(str(key)).localname
