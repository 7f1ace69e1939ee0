# SPDX-License-Identifier: LGPL-2.1-or-later
"""A libvirt that keeps definitions in memory and does with them what the real one does.

libvirt's own test driver has no hostdevs. The real one is tried in the lab.
"""

from __future__ import annotations

from typing import Any

import libvirt
from lxml import etree


def error(code: int, message: str) -> libvirt.libvirtError:
    made = libvirt.libvirtError(message)
    made.err = (code, 0, message, 2, None, None, None, 0, 0)
    return made


class Domain:
    """A virDomain."""

    def __init__(self, document: str, active: bool = False, persistent: bool = True) -> None:
        self.document = etree.fromstring(document)
        self.active = active
        self.persistent = persistent
        self.writes: list[str] = []
        self.refuses: tuple[str, ...] = ()  # calls that fail

    def content(self) -> bytes:
        """The definition without the blanks between elements."""
        text = etree.tostring(self.document)
        return etree.tostring(etree.fromstring(text, etree.XMLParser(remove_blank_text=True)))

    def name(self) -> str:
        return str(self.document.findtext("name"))

    def UUIDString(self) -> str:  # noqa: N802
        return str(self.document.findtext("uuid"))

    def isActive(self) -> int:  # noqa: N802
        return int(self.active)

    def isPersistent(self) -> int:  # noqa: N802
        return int(self.persistent)

    def XMLDesc(self, flags: int) -> str:  # noqa: N802
        assert flags == libvirt.VIR_DOMAIN_XML_INACTIVE
        return etree.tostring(self.document, encoding="unicode")

    def setMetadata(self, kind: int, text: str | None, key: str, uri: str, flags: int) -> int:  # noqa: N802
        self._write("setMetadata", flags)
        assert kind == libvirt.VIR_DOMAIN_METADATA_ELEMENT
        metadata = self.document.find("metadata")
        if metadata is None:
            metadata = etree.SubElement(self.document, "metadata")
        for old in metadata.findall(f"{{{uri}}}*"):
            metadata.remove(old)
        if text is not None:
            given = etree.fromstring(text)
            if key in given.nsmap or uri in given.nsmap.values():
                raise error(1, "failed to create a new XML namespace")
            root = etree.SubElement(metadata, f"{{{uri}}}{given.tag}", nsmap={key: uri})
            root.attrib.update(given.attrib)
            root.extend(list(given))
            for element in root.iter(etree.Element):
                if not etree.QName(element).namespace:
                    element.tag = f"{{{uri}}}{element.tag}"
        return 0

    def attachDeviceFlags(self, text: str, flags: int) -> int:  # noqa: N802
        self._write("attachDeviceFlags", flags)
        self.document.find("devices").append(etree.fromstring(text))  # type: ignore[union-attr]
        return 0

    def detachDeviceFlags(self, text: str, flags: int) -> int:  # noqa: N802
        self._write("detachDeviceFlags", flags)
        alias = etree.fromstring(text).find("alias").get("name")  # type: ignore[union-attr]
        devices = self.document.find("devices")
        assert devices is not None
        for hostdev in devices.findall("hostdev"):
            if hostdev.find("alias").get("name") == alias:  # type: ignore[union-attr]
                devices.remove(hostdev)
        return 0

    def _write(self, call: str, flags: int) -> None:
        assert flags == libvirt.VIR_DOMAIN_AFFECT_CONFIG
        if call in self.refuses:
            raise error(libvirt.VIR_ERR_OPERATION_FAILED, f"{call} fails")
        self.writes.append(call)


class Connection:
    """A virConnect."""

    def __init__(self, *domains: Domain) -> None:
        self.domains = list(domains)

    def getURI(self) -> str:  # noqa: N802
        return "qemu:///system"

    def close(self) -> int:
        return 0

    def lookupByName(self, name: str) -> Domain:  # noqa: N802
        return self._one(name, lambda domain: domain.name())

    def lookupByUUIDString(self, uuid: str) -> Domain:  # noqa: N802
        return self._one(uuid, lambda domain: domain.UUIDString())

    def listAllDomains(self, flags: int) -> list[Domain]:  # noqa: N802
        assert flags == libvirt.VIR_CONNECT_LIST_DOMAINS_PERSISTENT
        return [domain for domain in self.domains if domain.persistent]

    def _one(self, wanted: str, key: Any) -> Domain:
        for domain in self.domains:
            if key(domain) == wanted:
                return domain
        raise error(libvirt.VIR_ERR_NO_DOMAIN, f"Domain not found: '{wanted}'")
