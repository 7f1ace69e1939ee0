# SPDX-License-Identifier: LGPL-2.1-or-later
"""A libvirt that keeps domains in memory and does with them what the real one does.

libvirt's own test driver has no hostdevs. The real one is tried in the lab.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import libvirt
from lxml import etree

from vgpu_libvirt.address import PciAddress

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.unit.host import Result


def error(code: int, message: str) -> libvirt.libvirtError:
    made = libvirt.libvirtError(message)
    made.args = (message,)  # its constructor takes what failed last in this thread
    made.err = (code, 0, message, 2, None, None, None, 0, 0)
    return made


def source(hostdev: etree._Element) -> tuple[object, ...]:
    """By what libvirt tells hostdevs apart."""
    address = hostdev.find("source/address")
    assert address is not None
    if hostdev.get("type") == "mdev":
        return "mdev", address.get("uuid")
    return hostdev.get("type"), PciAddress.from_xml({str(k): str(v) for k, v in address.items()})


def alias(device: etree._Element) -> str | None:
    found = device.find("alias")
    return None if found is None else found.get("name")


def guest_address(device: etree._Element) -> tuple[object, ...] | None:
    found = device.find("address[@type='pci']")
    return None if found is None else tuple(sorted(found.items()))


class Domain:
    """A virDomain."""

    def __init__(self, document: str, active: bool = False, persistent: bool = True) -> None:
        self.document = etree.fromstring(document)
        self.live = etree.fromstring(document)  # what runs, while it is active
        self.active = active
        self.changed: Callable[[], None] | None = None  # told when its QEMU has other devices
        self.lets_go = True  # whether the guest lets a device go when it is asked to
        self.going: list[etree._Element] = []  # hostdevs that the guest was asked to let go
        self.persistent = persistent
        self.writes: list[str] = []
        self.refuses: tuple[str, ...] = ()  # calls that fail
        self.hook: Callable[[str, str], Result] | None = None  # runs an operation with a document
        self.qemu_fails: str | None = None  # what QEMU dies of
        self.saved = False  # whether `virsh managedsave` left something
        self.starts_at_boot = False
        self.started_paused: bool | None = None
        self.hooks: list[str] = []  # operations that were run
        self.connection: Connection | None = None

    def content(self) -> bytes:
        """The definition without the blanks between elements."""
        text = etree.tostring(self.document)
        return etree.tostring(etree.fromstring(text, etree.XMLParser(remove_blank_text=True)))

    def connect(self) -> Connection | None:
        return self.connection

    def name(self) -> str:
        return str(self.document.findtext("name"))

    def UUIDString(self) -> str:  # noqa: N802
        return str(self.document.findtext("uuid"))

    def ID(self) -> int:  # noqa: N802
        return 7 if self.active else -1

    def isActive(self) -> int:  # noqa: N802
        return int(self.active)

    def isPersistent(self) -> int:  # noqa: N802
        return int(self.persistent)

    def XMLDesc(self, flags: int) -> str:  # noqa: N802
        assert flags in (0, libvirt.VIR_DOMAIN_XML_INACTIVE)
        is_live = self.active and not flags
        return etree.tostring(self.live if is_live else self.document, encoding="unicode")

    def setMetadata(self, kind: int, text: str | None, key: str, uri: str, flags: int) -> int:  # noqa: N802
        document = self._write("setMetadata", flags)
        assert kind == libvirt.VIR_DOMAIN_METADATA_ELEMENT
        metadata = document.find("metadata")
        if metadata is None:
            metadata = etree.SubElement(document, "metadata")
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
        self._tell(document)
        return 0

    def hasManagedSaveImage(self) -> int:  # noqa: N802
        return int(self.saved)

    def autostart(self) -> int:
        return int(self.starts_at_boot)

    def create(self) -> int:
        return self.createWithFlags(0)

    def createWithFlags(self, flags: int = 0) -> int:  # noqa: N802
        if self.active:
            raise error(libvirt.VIR_ERR_OPERATION_INVALID, "domain is already running")
        self.writes.append("create")
        live = etree.fromstring(etree.tostring(self.document))
        live.set("id", "7")
        document = etree.tostring(live, encoding="unicode")
        failure = next(
            (failed for name in ("prepare", "start") if (failed := self._run(name, document))),
            self.qemu_fails and error(libvirt.VIR_ERR_INTERNAL_ERROR, self.qemu_fails),
        )
        if failure:
            for name in ("stopped", "release"):
                self._run(name, document)
            raise failure
        self.active = True
        self.live = live
        self.started_paused = flags == libvirt.VIR_DOMAIN_START_PAUSED
        return 0

    def _run(self, operation: str, document: str) -> libvirt.libvirtError | None:
        if self.hook is None:
            return None
        self.hooks.append(operation)
        done = self.hook(operation, document)
        if not done.status:
            return None
        return error(
            libvirt.VIR_ERR_HOOK_SCRIPT_FAILED,
            "Hook script execution failed: internal error: Child process (LC_ALL=C PATH=/usr/bin "
            f"HOME=/root /etc/libvirt/hooks/qemu {self.name()} {operation} begin -) unexpected "
            f"exit status {done.status}: {done.stderr}",
        )

    def attachDevice(self, xml: str) -> int:  # noqa: N802
        return self.attachDeviceFlags(xml, libvirt.VIR_DOMAIN_AFFECT_LIVE)

    def attachDeviceFlags(self, xml: str, flags: int = 0) -> int:  # noqa: N802
        for side in self._affected(flags):
            self._attach(xml, side)
        return 0

    def _affected(self, flags: int) -> list[int]:
        """The sides that FLAGS name, in the order in which they change."""
        current = (
            libvirt.VIR_DOMAIN_AFFECT_LIVE if self.active else libvirt.VIR_DOMAIN_AFFECT_CONFIG
        )
        sides = (libvirt.VIR_DOMAIN_AFFECT_CONFIG, libvirt.VIR_DOMAIN_AFFECT_LIVE)
        return [side for side in sides if side & (flags or current)]

    def _attach(self, text: str, flags: int) -> None:
        document = self._write("attachDeviceFlags", flags)
        device = etree.fromstring(text)
        devices = document.find("devices")
        assert devices is not None
        if not (name := alias(device) or "").startswith("ua-"):
            for element in device.findall("alias"):
                device.remove(element)
        elif name in map(alias, devices):
            raise error(
                libvirt.VIR_ERR_CONFIG_UNSUPPORTED,
                f"unsupported configuration: non unique alias detected: {name}",
            )
        if device.tag == "hostdev" and source(device) in map(source, devices.findall("hostdev")):
            raise error(libvirt.VIR_ERR_OPERATION_INVALID, "device is already in the domain")
        if (place := guest_address(device)) and place in map(guest_address, devices):
            raise error(libvirt.VIR_ERR_XML_ERROR, "Attempted double use of PCI Address")
        devices.append(device)
        self._tell(document)

    def detachDeviceAlias(self, alias: str, flags: int = 0) -> int:  # noqa: N802
        for side in self._affected(flags):
            is_live = side == libvirt.VIR_DOMAIN_AFFECT_LIVE
            devices = (self.live if is_live else self.document).findall("devices/hostdev")
            named = [each for each in devices if each.find(f"alias[@name='{alias}']") is not None]
            self.detachDeviceFlags(etree.tostring(named[0], encoding="unicode"), side)
        return 0

    def detachDeviceFlags(self, text: str, flags: int) -> int:  # noqa: N802
        document = self._write("detachDeviceFlags", flags)
        wanted = source(etree.fromstring(text))
        devices = document.find("devices")
        assert devices is not None
        for hostdev in devices.findall("hostdev"):
            if source(hostdev) == wanted:
                break
        else:
            raise error(libvirt.VIR_ERR_DEVICE_MISSING, "host device not found")
        if document is self.document:
            devices.remove(hostdev)
        elif hostdev in self.going:
            name = hostdev.find("alias").get("name")  # type: ignore[union-attr]
            raise error(
                libvirt.VIR_ERR_INTERNAL_ERROR,
                "internal error: unable to execute QEMU command 'device_del': Device "
                f"{name} is already in the process of unplug",
            )
        else:
            self.going.append(hostdev)
            if self.lets_go:
                self.let_go()
        return 0

    def let_go(self) -> None:
        """The guest lets go what it was asked to, as it does at a reset at the latest."""
        for hostdev in self.going:
            hostdev.getparent().remove(hostdev)  # type: ignore[union-attr]
        self.going.clear()
        self._tell(self.live)

    def _tell(self, document: etree._Element) -> None:
        if document is self.live and self.changed:
            self.changed()

    def _write(self, call: str, flags: int) -> etree._Element:
        """Note the call; return the document that it changes."""
        assert flags in (libvirt.VIR_DOMAIN_AFFECT_CONFIG, libvirt.VIR_DOMAIN_AFFECT_LIVE)
        is_live = flags == libvirt.VIR_DOMAIN_AFFECT_LIVE
        if is_live and not self.active:
            raise error(libvirt.VIR_ERR_OPERATION_INVALID, "domain is not running")
        call += " live" if is_live else ""
        if call in self.refuses:
            raise error(libvirt.VIR_ERR_OPERATION_FAILED, f"{call} fails")
        self.writes.append(call)
        return self.live if is_live else self.document


class Connection:
    """A virConnect."""

    def __init__(self, *domains: Domain) -> None:
        self.version = 11_003_000
        self.domains = list(domains)
        self.kind = Domain  # the class of the domains that it makes
        self.uri = "qemu:///system"
        self.documents: list[str] = []  # that were defined or created
        self.hook: Callable[[str, str], Result] | None = None  # of the domains that it makes
        self.qemu_fails: str | None = None

    def getURI(self) -> str:  # noqa: N802
        return self.uri

    def getLibVersion(self) -> int:  # noqa: N802
        return self.version

    def close(self) -> int:
        return 0

    def lookupByName(self, name: str) -> Domain:  # noqa: N802
        return self._one(name, lambda domain: domain.name())

    def lookupByUUIDString(self, uuid: str) -> Domain:  # noqa: N802
        return self._one(uuid, lambda domain: domain.UUIDString())

    def listAllDomains(self, flags: int) -> list[Domain]:  # noqa: N802
        if flags == libvirt.VIR_CONNECT_LIST_DOMAINS_ACTIVE:
            return [domain for domain in self.domains if domain.active]
        assert flags == libvirt.VIR_CONNECT_LIST_DOMAINS_PERSISTENT
        return [domain for domain in self.domains if domain.persistent]

    def defineXML(self, xml: str) -> Domain:  # noqa: N802
        self.documents.append(xml)
        domain = self.kind(xml)
        same = [old for old in self.domains if old.UUIDString() == domain.UUIDString()]
        for old in same:
            domain.active = domain.active or old.active
            self.domains.remove(old)
        return self.add(domain)

    def createXML(self, xmlDesc: str, flags: int = 0) -> Domain:  # noqa: N802, N803
        self.documents.append(xmlDesc)
        domain = self.add(self.kind(xmlDesc, persistent=False))
        try:
            domain.createWithFlags(flags)
        except libvirt.libvirtError:
            self.domains.remove(domain)
            raise
        return domain

    def add(self, domain: Domain) -> Domain:
        domain.connection = self
        domain.hook = domain.hook or self.hook
        domain.qemu_fails = domain.qemu_fails or self.qemu_fails
        self.domains.append(domain)
        return domain

    def _one(self, wanted: str, key: Any) -> Domain:
        for domain in self.domains:
            if key(domain) == wanted:
                return domain
        raise error(libvirt.VIR_ERR_NO_DOMAIN, f"Domain not found: '{wanted}'")
