# SPDX-License-Identifier: LGPL-2.1-or-later
"""Edits of a domain's definition: its request in the metadata, and the hostdev that goes with it.

Functions of texts. What they don't know (attributes, comments, other elements) stays as it is.
"""

from __future__ import annotations

from lxml import etree

from ..address import PciAddress
from ..errors import AddressError, DomainXmlError
from ..records import TYPE_CHECKING
from .model import NAMESPACE, PREFIX

if TYPE_CHECKING:
    from ..address import Location
    from .model import Request

_OURS = f"{{{NAMESPACE}}}"
_OF_KIND = ("managed", "model", "display", "ramfb")  # attributes that one type of hostdev has


def metadata(document: str) -> str | None:
    """Our element in the metadata of a domain's XML, with `vgpu:` as its prefix; None: none there.

    Raises DomainXmlError.
    """
    found = parse(document).find(f"metadata/{_OURS}devices")
    return None if found is None else text(_normal(found))


def requested_aliases(metadata: str | None) -> tuple[str, ...]:
    """The aliases of all requests in METADATA, understandable or not, once each."""
    if metadata is None:
        return ()
    found = (element.get("alias") for element in parse(metadata).iter(f"{_OURS}device"))
    return tuple(dict.fromkeys(alias for alias in found if alias))


def with_request(metadata: str | None, request: Request) -> str:
    """METADATA with one more request, after those that are there."""
    root = etree.Element(f"{_OURS}devices", nsmap={PREFIX: NAMESPACE})
    if metadata is not None:
        root = parse(metadata)
    element = etree.SubElement(root, f"{_OURS}device")
    for name, value in request._asdict().items():
        if value is not None:
            element.set(name, str(value))
    return text(root)


def without_request(metadata: str, alias: str) -> str | None:
    """METADATA without the requests for ALIAS; None where no request is left."""
    root = parse(metadata)
    for element in root.findall(f"{_OURS}device"):
        if element.get("alias") == alias:
            root.remove(element)
    return None if root.find(f"{_OURS}device") is None else text(root)


def for_libvirt(metadata: str) -> str:
    """METADATA as libvirt's setMetadata wants it: without our namespace.

    It declares the namespace itself, under the prefix that it is given, on elements that have none;
    it fails where that prefix is declared already, and a second declaration would confuse its
    readers.
    """
    root = parse(metadata)
    for element in root.iter(f"{_OURS}*"):
        element.tag = etree.QName(element).localname
    kept = [prefix for prefix, uri in root.nsmap.items() if prefix and uri != NAMESPACE]
    etree.cleanup_namespaces(root, keep_ns_prefixes=kept)
    return text(root)


def hostdev(alias: str, source: Location) -> str:
    """The XML of a hostdev for a vGPU that names SOURCE, a VF or a mediated device's UUID."""
    root = etree.Element("hostdev", mode="subsystem")
    etree.SubElement(etree.SubElement(root, "source"), "address")
    _point(root, source)
    etree.SubElement(root, "alias", name=alias)
    return text(root)


def repointed(hostdev: str, source: Location) -> str:
    """HOSTDEV with SOURCE as its device, all else as it is.

    One that becomes a PCI device loses what mediated ones alone may have (`display`, `ramfb`).
    Raises DomainXmlError.
    """
    root = parse(hostdev)
    if root.find("source/address") is None:
        raise DomainXmlError("a hostdev without a source address")
    _point(root, source)
    return text(root)


def pointing(before: str | None, alias: str, source: Location) -> str:
    """The hostdev BEFORE, or a new one with ALIAS where there is none, with SOURCE as its device.

    Raises DomainXmlError.
    """
    return hostdev(alias, source) if before is None else repointed(before, source)


def without_guest_address(hostdev: str) -> str:
    """HOSTDEV with no address in the guest, for libvirt to find it one."""
    root = parse(hostdev)
    for address in root.findall("address"):
        root.remove(address)
    return text(root)


def find_hostdev(document: str, alias: str) -> str | None:
    """The hostdev with ALIAS in a domain's XML, whole, as libvirt wants it to detach it."""
    for element in parse(document).iterfind("devices/hostdev"):
        name = element.find("alias")
        if name is not None and name.get("name") == alias:
            element.tail = None
            return text(element)
    return None


def find_same(document: str, hostdev: str) -> str | None:
    """The hostdev of a domain that libvirt takes for HOSTDEV: of its type, with its source."""
    wanted = _identity(parse(hostdev))
    for element in parse(document).iterfind("devices/hostdev"):
        if _identity(element) == wanted:
            element.tail = None
            return text(element)
    return None


def device_aliases(document: str) -> frozenset[str]:
    """The aliases of all devices in a domain's XML, of whatever kind."""
    found = parse(document).iterfind("devices/*/alias")
    return frozenset(name for element in found if (name := element.get("name")))


def _point(hostdev: etree._Element, source: Location) -> None:
    address = hostdev.find("source/address")
    assert address is not None
    kind = "mdev" if isinstance(source, str) else "pci"
    if hostdev.get("type") != kind:
        for name in _OF_KIND:
            hostdev.attrib.pop(name, "")
        address.attrib.clear()
        hostdev.set("type", kind)
        hostdev.set(*(("model", "vfio-pci") if kind == "mdev" else ("managed", "no")))
    for name, value in ({"uuid": source} if isinstance(source, str) else source.to_xml()).items():
        address.set(name, value)


def _identity(hostdev: etree._Element) -> tuple[object, ...]:
    source = hostdev.find("source/address")
    parts = {} if source is None else {str(key): str(source.attrib[key]) for key in source.attrib}
    if hostdev.get("type") != "pci":
        return hostdev.get("type"), parts
    try:
        return "pci", PciAddress.from_xml(parts)
    except AddressError:
        return "pci", parts


def _normal(element: etree._Element) -> etree._Element:
    """A copy of our element of its own, with our prefix alone for our namespace.

    Elements without a namespace become ours, as libvirt makes them at the next setMetadata.
    """
    parent = element.getparent()
    outside = {} if parent is None else parent.nsmap
    own = {
        prefix: uri
        for prefix, uri in element.nsmap.items()
        if prefix and uri != NAMESPACE and outside.get(prefix) != uri
    }
    root = etree.Element(f"{_OURS}devices", nsmap={**own, PREFIX: NAMESPACE})
    root.attrib.update(element.attrib)
    root.text = element.text
    root.extend(list(element))
    for child in root.iter(etree.Element):
        name = etree.QName(child)
        if name.namespace in (None, NAMESPACE):
            child.tag = f"{_OURS}{name.localname}"
    etree.cleanup_namespaces(root, keep_ns_prefixes=[*own, PREFIX])
    return root


def parse(document: str) -> etree._Element:
    """Read XML. Raises DomainXmlError."""
    # Libvirt's documents need no entities, and blanks between elements are its own indentation.
    parser = etree.XMLParser(resolve_entities=False, no_network=True, remove_blank_text=True)
    try:
        return etree.fromstring(document, parser)
    except etree.XMLSyntaxError as error:
        raise DomainXmlError(f"not well-formed XML: {error}") from error


def text(element: etree._Element) -> str:
    """Write XML, indented as libvirt does it."""
    etree.indent(element, "  ")
    return etree.tostring(element, encoding="unicode")
