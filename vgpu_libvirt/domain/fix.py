# SPDX-License-Identifier: LGPL-2.1-or-later
"""Turns what people have in their definitions into what works: requests, aliases, hostdevs.

Functions of texts and values: what to change, what to say about it, and the definition that comes
of it. What they don't know stays as it is.
"""

from __future__ import annotations

import copy

from lxml import etree

from ..address import PciAddress
from ..devices import profiles as names
from ..devices.mdev_life import mdev_uuid
from ..errors import AddressError, RequestError
from ..records import TYPE_CHECKING, NamedTuple
from . import edit
from .model import ALIAS_PREFIX, NAMESPACE, PREFIX
from .respell import respell

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..address import Location
    from ..devices.model import Profile
    from .respell import Respelt

PLACEHOLDER = PciAddress(0, 0, 0, 0)  # of a hostdev whose device is yet to be chosen
_OURS = f"{{{NAMESPACE}}}"
_MDEV_ONLY = ("model", "display", "ramfb")


class Facts(NamedTuple):
    """What of the host bears on it."""

    profiles: tuple[Profile, ...]  # all that the host can name
    vfs: Mapping[PciAddress, tuple[Profile, ...]]  # vGPU VFs, and what each could be given
    has_mdev: bool  # whether it has mediated devices, so that hostdevs of type mdev may work


class Change(NamedTuple):
    """A hostdev as it is, and as it should be."""

    alias: str
    before: str
    after: str


class Fix(NamedTuple):
    """What to change in a definition."""

    document: str  # the whole of it as it will be
    metadata: str | None  # our element in it
    stale: tuple[str, ...]  # namespaces whose elements go
    changes: tuple[Change, ...]
    findings: tuple[str, ...]  # what was wrong and is corrected
    remains: tuple[str, ...]  # what is wrong and can't be corrected, since it isn't clear


class _Pair(NamedTuple):
    """A hostdev that is a vGPU's, with its request; None: it has none."""

    hostdev: etree._Element
    request: etree._Element | None


def fix(document: str, facts: Facts, profile: Profile | None) -> Fix:
    """Say what to change in DOCUMENT; PROFILE is for what asks for none.

    A hostdev that was a mediated device needs a device then: see `is_placeless` and `pointed`.
    Raises DomainXmlError, and RequestError where a profile is needed and not given.
    """
    root = edit.parse(document)
    respelt = respell(document, facts.profiles)
    fixer = _Fixer(root, respelt, facts, profile)
    fixer.run()
    metadata = None if fixer.devices is None else edit.text(fixer.devices)
    _put_metadata(root, metadata, respelt.stale)
    return Fix(
        edit.text(root),
        metadata,
        respelt.stale,
        tuple(fixer.changes),
        (*respelt.findings, *fixer.findings),
        (*respelt.remains, *fixer.remains),
    )


def is_placeless(change: Change) -> bool:
    """Whether the hostdev of CHANGE still needs a device."""
    return _address(edit.parse(change.after)) == PLACEHOLDER


def pointed(fixed: Fix, alias: str, source: Location) -> Fix:
    """FIXED with the hostdev ALIAS at SOURCE."""
    root = edit.parse(fixed.document)
    changes = []
    for change in fixed.changes:
        if change.alias != alias:
            changes.append(change)
            continue
        after = edit.repointed(change.after, source)
        changes.append(change._replace(after=after))
        for hostdev in root.iterfind("devices/hostdev"):
            if _alias(hostdev) == alias:
                _replace(hostdev, edit.parse(after))
    return fixed._replace(document=edit.text(root), changes=tuple(changes))


class _Fixer:
    def __init__(
        self, root: etree._Element, respelt: Respelt, facts: Facts, profile: Profile | None
    ) -> None:
        self._root = root
        self._facts = facts
        self._profile = profile
        self._taken = {str(alias.get("name")) for alias in root.iterfind("devices/*/alias")} | {
            str(request.get("alias")) for request in respelt.requests
        }
        self._requests = respelt.requests
        self.devices = respelt.root
        self.changes: list[Change] = []
        self.findings: list[str] = []
        self.remains: list[str] = []

    def run(self) -> None:
        asked = {request.get("alias") for request in self._requests}
        hostdevs = [h for h in self._root.iterfind("devices/hostdev") if self._is_vgpu(h, asked)]
        for pair in self._pairs(hostdevs):
            self._mend(pair)
        for request in self._requests:
            if not request.get("alias"):
                alias = self._new_alias()
                request.set("alias", alias)
                self.findings.append(f"a request has the alias '{alias}' now")
            if not request.get("profile"):
                where = f"the request '{request.get('alias')}'"
                request.set("profile", self._needed(where, self._facts.profiles).name)
                self.findings.append(f"{where} has a profile now")

    def _is_vgpu(self, hostdev: etree._Element, asked: set[str | None]) -> bool:
        if hostdev.get("mode") != "subsystem":
            return False
        if hostdev.get("type") == "mdev":
            # Where there are mediated devices, one that nobody asked us for may be anybody's.
            is_meant = not self._facts.has_mdev or self._profile or _alias(hostdev) in asked
            return hostdev.get("model") == "vfio-pci" and bool(is_meant)
        alias = _alias(hostdev)
        is_asked = alias is not None and alias in asked
        return hostdev.get("type") == "pci" and (is_asked or _address(hostdev) in self._facts.vfs)

    def _pairs(self, hostdevs: list[etree._Element]) -> list[_Pair]:
        """Find each hostdev's request: by its alias, else where only one can be meant."""
        by_alias = {request.get("alias"): request for request in self._requests}
        found = [_Pair(hostdev, by_alias.get(_alias(hostdev) or "")) for hostdev in hostdevs]
        paired = [pair.request for pair in found if pair.request is not None]
        open_ = [request for request in self._requests if request not in paired]
        lonely = [pair for pair in found if pair.request is None]
        is_clear = len(open_) == len(lonely) and (
            len(open_) == 1 or not any(_alias(pair.hostdev) for pair in lonely)
        )
        if open_ and lonely and not is_clear:
            self.remains.append(
                "which hostdev is which request's can't be told; give each hostdev the <alias "
                f"name='{ALIAS_PREFIX}...'/> of its request"
            )
            return [pair for pair in found if pair.request is not None]
        if open_ and lonely:
            new = {id(p.hostdev): request for p, request in zip(lonely, open_, strict=True)}
            return [_Pair(p.hostdev, new.get(id(p.hostdev), p.request)) for p in found]
        return found

    def _mend(self, pair: _Pair) -> None:
        hostdev, request = pair
        before = edit.text(_copy(hostdev))
        alias = _alias(hostdev)
        name = alias or (request.get("alias") if request is not None else None)
        name = name or self._new_alias()
        where = f"the hostdev '{name}'"
        address = _address(hostdev)
        if request is None:
            self._ask(name, address, hostdev)
        elif request.get("alias") != name:
            self.findings.append(f"the request for {where} has its alias now")
            request.set("alias", name)
        if alias is None:
            self.findings.append(f"the hostdev at {_source(hostdev)} has the alias '{name}' now")
            etree.SubElement(hostdev, "alias", name=name)
        if hostdev.get("type") == "mdev" and not self._facts.has_mdev:
            self._make_pci(hostdev, where)
        if hostdev.get("type") == "mdev":
            self._name_as_made(hostdev, name, where)
        elif hostdev.get("managed") != "no":
            if hostdev.get("managed") == "yes":
                self.findings.append(
                    f"{where} has managed='no' now: libvirt would have unbound the driver that "
                    "makes the vGPU"
                )
            hostdev.set("managed", "no")
        after = edit.text(_copy(hostdev))
        if after != before:
            self.changes.append(Change(name, before, after))

    def _ask(self, alias: str, address: PciAddress | None, hostdev: etree._Element) -> None:
        offered = self._facts.vfs.get(address, ()) if address else ()
        profile = self._needed(
            f"the hostdev at {_source(hostdev)}", offered or self._facts.profiles
        )
        if self.devices is None:
            self.devices = etree.Element(f"{_OURS}devices", nsmap={PREFIX: NAMESPACE})
        request = etree.SubElement(self.devices, f"{_OURS}device")
        request.set("alias", alias)
        request.set("profile", profile.name)
        self.findings.append(f"the hostdev '{alias}' has a request for {profile.name} now")

    def _make_pci(self, hostdev: etree._Element, where: str) -> None:
        for key in _MDEV_ONLY:
            hostdev.attrib.pop(key, "")
        hostdev.set("type", "pci")
        hostdev.set("managed", "no")
        source = hostdev.find("source")
        assert source is not None
        for child in list(source):
            source.remove(child)
        etree.SubElement(
            source, "address", domain="0x0000", bus="0x00", slot="0x00", function="0x0"
        )
        self.findings.append(
            f"{where} is a PCI device now: this host has no mediated devices, but VFs"
        )

    def _name_as_made(self, hostdev: etree._Element, alias: str, where: str) -> None:
        uuid = mdev_uuid(self._root.findtext("uuid", ""), alias)
        address = hostdev.find("source/address")
        if address is not None and address.get("uuid") != uuid:
            address.set("uuid", uuid)
            self.findings.append(f"{where} names the mediated device that is made for it now")

    def _needed(self, where: str, could: tuple[Profile, ...]) -> Profile:
        if self._profile is None:
            raise RequestError(
                f"{where} asks for no profile; say with --profile which it shall have: "
                f"{names.listed(could) or 'this host offers none now'}"
            )
        return self._profile

    def _new_alias(self) -> str:
        number = 0
        while (name := f"{ALIAS_PREFIX}vgpu{number}") in self._taken:
            number += 1
        self._taken.add(name)
        return name


def _put_metadata(root: etree._Element, text: str | None, stale: tuple[str, ...]) -> None:
    """Put our element into a definition, where the old one was, and take the STALE ones out."""
    metadata = root.find("metadata")
    if metadata is None:
        if text is None:
            return
        metadata = etree.Element("metadata")
        children = [child.tag for child in root]
        behind = next((n for n in ("title", "uuid", "name") if n in children), None)
        root.insert(children.index(behind) + 1 if behind else 0, metadata)
    where = len(metadata)
    for child in list(metadata):
        if not isinstance(child.tag, str):
            continue
        name = etree.QName(child)
        if name.namespace in (NAMESPACE, *stale) or (text and child.tag in ("devices", "device")):
            where = min(where, metadata.index(child))
            metadata.remove(child)
    if text is not None:
        metadata.insert(where, edit.parse(text))


def _replace(old: etree._Element, new: etree._Element) -> None:
    parent = old.getparent()
    assert parent is not None
    parent.replace(old, new)


def _copy(element: etree._Element) -> etree._Element:
    """A copy of its own; what isn't copied is indented by whoever prints it."""
    twin = copy.deepcopy(element)
    twin.tail = None
    return twin


def _alias(hostdev: etree._Element) -> str | None:
    alias = hostdev.find("alias")
    return None if alias is None else alias.get("name")


def _address(hostdev: etree._Element) -> PciAddress | None:
    address = hostdev.find("source/address")
    if hostdev.get("type") != "pci" or address is None:
        return None
    try:
        return PciAddress.from_xml({str(key): str(address.attrib[key]) for key in address.attrib})
    except AddressError:
        return None


def _source(hostdev: etree._Element) -> str:
    """What a hostdev points at, as a sentence names it."""
    address = hostdev.find("source/address")
    uuid = None if address is None else address.get("uuid")
    return str(uuid or _address(hostdev) or "an address that can't be read")
