# SPDX-License-Identifier: LGPL-2.1-or-later
"""What is read of a domain's XML and of libvirt's status files, and what only looks like it."""

from __future__ import annotations

import pytest

from tests.unit.host import WEB1, domain_xml, hostdev_xml, web1
from vgpu_libvirt.address import PciAddress
from vgpu_libvirt.domain.model import Hostdev, Request
from vgpu_libvirt.domain.read import parse_domain, parse_set, parse_status
from vgpu_libvirt.errors import DomainXmlError

NS = "urn:vgpu-libvirt:domain:1"
VF = PciAddress.parse("0000:3d:00.4")
WANTED = Request("ua-vgpu0", "NVIDIA L40S-8Q")


def with_metadata(metadata: str) -> str:
    return domain_xml().replace("<metadata></metadata>", f"<metadata>{metadata}</metadata>")


def requests(metadata: str) -> tuple[Request, ...]:
    domain = parse_domain(with_metadata(metadata))
    assert domain.request_error is None
    return domain.requests


def request_error(metadata: str) -> str:
    domain = parse_domain(with_metadata(metadata))
    assert domain.asks, "one that can't be understood is a request all the same"
    assert domain.request_error is not None
    return domain.request_error


def devices(content: str) -> str:
    return f"<v:devices xmlns:v='{NS}'>{content}</v:devices>"


def hostdevs(xml: str) -> tuple[Hostdev, ...]:
    return parse_domain(domain_xml(hostdevs=xml)).hostdevs


# --- the request ---


@pytest.mark.parametrize(
    "metadata",
    [
        f"<vgpu:devices xmlns:vgpu='{NS}'>"
        "<vgpu:device alias='ua-vgpu0' profile='NVIDIA L40S-8Q'/></vgpu:devices>",
        f"<x:devices xmlns:x='{NS}'>"
        "<x:device alias='ua-vgpu0' profile='NVIDIA L40S-8Q'></x:device></x:devices>",
        f"<devices xmlns='{NS}'><device profile='NVIDIA L40S-8Q' alias='ua-vgpu0'/></devices>",
        f"<a:devices xmlns:a='{NS}'>"
        f"<b:device xmlns:b='{NS}' alias='ua-vgpu0' profile='NVIDIA L40S-8Q'/></a:devices>",
        f"<a:devices xmlns:a='{NS}'>\n <!-- ours -->\n <?x y?>"
        "<a:device alias='ua-vgpu&#48;' profile='NVIDIA&#32;L40S-8Q'/>text</a:devices>",
    ],
    ids=["prefix", "other prefix", "default namespace", "mixed", "comments and references"],
)
def test_a_request_in_every_spelling_of_the_namespace(metadata: str) -> None:
    assert requests(metadata) == (WANTED,)


def test_every_attribute() -> None:
    (request,) = requests(
        devices(
            "<v:device alias='ua-x' profile='1152' gpu='0001:C8:00.0' placement='pack' "
            "numa='require' apart='gpu' together='gpu' params='frame_rate_limiter=0'/>"
        )
    )
    gpu = PciAddress(1, 0xC8, 0, 0)
    assert request == Request(
        "ua-x", "1152", gpu, "pack", "require", "gpu", "gpu", "frame_rate_limiter=0"
    )


def test_several_devices_keep_their_order() -> None:
    content = "".join(f"<v:device alias='ua-{n}' profile='{n}'/>" for n in (3, 1, 2))
    assert [request.alias for request in requests(devices(content))] == ["ua-3", "ua-1", "ua-2"]


def test_an_empty_request_asks_for_nothing() -> None:
    assert not parse_domain(with_metadata(devices(""))).asks


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (
            "<v:device alias='ua-x' profile='p' colour='red'/>",
            "unknown attribute 'colour'; known: alias, profile, gpu, placement, numa, apart, "
            "together, params",
        ),
        ("<v:device alias='ua-x'/>", "a <device> without the attribute 'profile'"),
        ("<v:device alias='ua-x' profile=''/>", "a <device> without the attribute 'profile'"),
        ("<v:device profile='p'/>", "a <device> without the attribute 'alias'"),
        (
            "<v:device alias='vgpu0' profile='p'/>",
            "alias 'vgpu0' must begin with 'ua-', since libvirt drops others; call it 'ua-vgpu0' "
            "here and in the hostdev",
        ),
        (
            "<v:device alias='ua-x' profile='p' numa='maybe'/>",
            "numa='maybe' of 'ua-x' is not known; known: prefer, require, ignore",
        ),
        (
            "<v:device alias='ua-x' profile='p' apart='host'/>",
            "apart='host' of 'ua-x' is not known; known: gpu",
        ),
        (
            "<v:device alias='ua-x' profile='p' gpu='3d:00.0'/>",
            "gpu of 'ua-x': '3d:00.0' is not a PCI address; write it as 0000:3d:00.4, domain "
            "included",
        ),
        ("<v:gpu/>", "unknown element <gpu>"),
        ("<device alias='ua-x' profile='p'/>", "unknown element <device>"),
        ("<v:device alias='ua-x' profile='p'><v:more/></v:device>", "unknown element <more>"),
        ("<v:device v:alias='ua-x' profile='p'/>", f"unknown attribute '{NS} alias'"),
    ],
)
def test_what_cannot_be_understood_is_an_error_not_a_domain_that_did_not_ask(
    content: str, error: str
) -> None:
    assert request_error(devices(content)).startswith(error)


def test_other_mistakes_in_our_metadata() -> None:
    assert request_error(f"<v:device xmlns:v='{NS}' alias='ua-x' profile='p'/>") == (
        "unknown element <device>"
    )
    assert request_error(f"<v:devices xmlns:v='{NS}' alias='ua-x'/>") == (
        "unknown attribute 'alias' of <devices>"
    )


def test_the_first_error_is_told_and_the_good_requests_are_kept() -> None:
    content = "<v:device alias='a'/><v:device alias='ua-x' profile='p'/><v:other/>"
    domain = parse_domain(with_metadata(devices(content)))
    assert domain.request_error == "a <device> without the attribute 'profile'"
    assert [request.alias for request in domain.requests] == ["ua-x"]


@pytest.mark.parametrize(
    "xml",
    [
        domain_xml(extra=f"<description>{NS} &lt;device alias='ua-x'/&gt;</description>"),
        domain_xml(extra=f"<description>{devices('<v:device/>')}</description>"),
        domain_xml(extra=f"<!-- <metadata>{devices('<v:device/>')}</metadata> -->"),
        domain_xml(extra=f"<title><![CDATA[{devices('<v:device/>')}]]></title>"),
        domain_xml(extra=devices("<v:device alias='ua-x' profile='p'/>")),
        with_metadata(f"<o:backup xmlns:o='urn:other'>{devices('<v:device/>')}</o:backup>"),
        with_metadata("<v:devices xmlns:v='urn:vgpu-libvirt:domain:2'><v:device/></v:devices>"),
        with_metadata("<devices><device alias='ua-x' profile='p'/></devices>"),
        with_metadata(f"<o:x xmlns:o='urn:other' xmlns:v='{NS}' v:devices='ua-x'/>"),
        with_metadata(f"<o:x xmlns:o='urn:other' ns='{NS}'/>"),
    ],
    ids=[
        "text of a description",
        "child of a description",
        "comment",
        "CDATA",
        "outside the metadata",
        "inside other metadata",
        "another version",
        "no namespace",
        "attribute of another element",
        "attribute's value",
    ],
)
def test_look_alikes_are_no_request(xml: str) -> None:
    domain = parse_domain(xml)
    assert not domain.asks
    assert (domain.name, domain.uuid) == ("web1", WEB1)


# --- hostdevs ---


def test_a_pci_hostdev() -> None:
    assert hostdevs(hostdev_xml("ua-vgpu0", str(VF))) == (
        Hostdev("pci", False, "ua-vgpu0", VF, None, None),
    )


@pytest.mark.parametrize(
    ("attributes", "managed"),
    [("managed='yes'", True), ("managed='no'", False), ("", False), ("managed='true'", False)],
)
def test_managed(attributes: str, managed: bool) -> None:
    (hostdev,) = hostdevs(f"<hostdev mode='subsystem' type='pci' {attributes}/>")
    assert hostdev.managed is managed


def test_the_sources_address_counts_not_the_guests() -> None:
    (hostdev,) = hostdevs(
        "<hostdev type='pci' mode='subsystem'>"
        "<address type='pci' domain='0x0001' bus='0x09' slot='0x00' function='0x0'/>"
        "<source><address bus='61' function='04'/></source></hostdev>"
    )
    assert hostdev.address == VF
    (bare,) = hostdevs(
        "<hostdev type='pci' mode='subsystem'><address type='pci' bus='9'/></hostdev>"
    )
    assert (bare.address, bare.address_error) == (None, None)


def test_a_source_address_that_cannot_be_read_says_why() -> None:
    (hostdev,) = hostdevs(
        "<hostdev type='pci' mode='subsystem'><source><address bus='0x100'/></source></hostdev>"
    )
    assert hostdev.address is None
    assert hostdev.address_error == "bus='0x100' is no part of a PCI address"


def test_a_mediated_device() -> None:
    uuid = "C4D3A1F6-0000-0000-0000-00000000000A"
    (hostdev,) = hostdevs(
        "<hostdev mode='subsystem' type='mdev' model='vfio-pci' managed='no'>"
        f"<source><address uuid='{uuid}'/></source><alias name='ua-m'/></hostdev>"
    )
    assert hostdev == Hostdev("mdev", False, "ua-m", None, None, uuid.lower())


@pytest.mark.parametrize(
    "source",
    ["", "<source/>", "<source><address/></source>", "<source><address uuid=''/></source>"],
)
def test_a_mediated_device_without_a_uuid(source: str) -> None:
    (hostdev,) = hostdevs(f"<hostdev mode='subsystem' type='mdev'>{source}</hostdev>")
    assert hostdev.uuid is None


def test_other_kinds_are_listed_without_an_address() -> None:
    (usb,) = hostdevs(
        "<hostdev mode='subsystem' type='usb'><source><vendor id='0x1'/>"
        "<address bus='1' device='2'/></source></hostdev>"
    )
    assert (usb.kind, usb.address, usb.uuid) == ("usb", None, None)
    assert hostdevs("<hostdev mode='capabilities' type='misc'><source/></hostdev>") == ()


@pytest.mark.parametrize(
    "xml",
    [
        with_metadata(f"<o:x xmlns:o='urn:o'>{hostdev_xml('ua-x', str(VF))}</o:x>"),
        with_metadata(hostdev_xml("ua-x", str(VF))),
        domain_xml(extra=hostdev_xml("ua-x", str(VF))),
        domain_xml(extra=f"<devices2>{hostdev_xml('ua-x', str(VF))}</devices2>"),
        domain_xml(
            hostdevs=f"<interface type='hostdev'>{hostdev_xml('ua-x', str(VF))}</interface>"
        ),
        domain_xml(hostdevs=f"<!-- {hostdev_xml('ua-x', str(VF))} -->"),
        domain_xml(
            hostdevs="<q:hostdev xmlns:q='urn:q' mode='subsystem' type='pci'><source>"
            "<address bus='1'/></source></q:hostdev>"
        ),
    ],
    ids=[
        "inside other metadata",
        "inside the metadata",
        "outside the devices",
        "inside an unknown element",
        "inside another device",
        "comment",
        "other namespace",
    ],
)
def test_look_alikes_are_no_hostdev(xml: str) -> None:
    assert parse_domain(xml).hostdevs == ()


def test_what_is_nested_deeper_in_a_hostdev_does_not_count() -> None:
    (hostdev,) = hostdevs(
        "<hostdev mode='subsystem' type='pci'><source><x><address bus='9'/></x>"
        "<address bus='0x3d' function='0x4'/></source>"
        "<driver><alias name='ua-no'/></driver><alias name='ua-x'/></hostdev>"
    )
    assert (hostdev.address, hostdev.alias) == (VF, "ua-x")


# --- the rest of a domain ---


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("a &amp; b", "a & b"),
        ("&lt;x&gt;&apos;&quot;", "<x>'\""),
        ("gr\u00fcn\U0001f600", "gr\u00fcn\U0001f600"),
        ("a<!-- -->b", "ab"),
        ("<![CDATA[<c>]]>", "<c>"),
        (" lead", " lead"),
        ("-r $(x) %s \\n;", "-r $(x) %s \\n;"),
        ("x" * 200, "x" * 200),
    ],
)
def test_odd_names(written: str, name: str) -> None:
    assert parse_domain(domain_xml(name=written)).name == name


def test_names_and_uuids_elsewhere_do_not_count() -> None:
    xml = domain_xml(
        extra="<sysinfo><name>no</name><uuid>no</uuid></sysinfo><genid>no</genid>",
        hostdevs="<disk><name>no</name><uuid>no</uuid></disk>",
    )
    domain = parse_domain(xml)
    assert (domain.name, domain.uuid) == ("web1", WEB1)


def test_a_uuid_is_lower_case_and_without_blanks() -> None:
    assert parse_domain(domain_xml(uuid=f"\n {WEB1.upper()} ")).uuid == WEB1


@pytest.mark.parametrize(
    ("number", "read"),
    [("7", 7), ("0", 0), ("-1", None), ("", None), ("x", None), ("9" * 5000, None)],
)
def test_the_domains_id(number: str, read: int | None) -> None:
    assert parse_domain(domain_xml(number=None).replace("'kvm'", f"'kvm' id='{number}'")).id == read


def test_no_id() -> None:
    assert parse_domain(domain_xml(number=None)).id is None


def test_numatune_and_pinned_cpus() -> None:
    domain = parse_domain(
        domain_xml(
            extra="<vcpu placement='static' cpuset='0-3,^2'>4</vcpu>"
            "<cputune><vcpupin vcpu='0' cpuset='8'/><emulatorpin cpuset='63'/></cputune>"
            "<numatune><memory mode='strict' nodeset='1'/><memnode cellid='0' nodeset='2-3'/>"
            "</numatune>"
        )
    )
    assert domain.nodes == {1, 2, 3}
    assert domain.cpus == {0, 1, 3, 8}
    unpinned = "<vcpu>4</vcpu><numatune><memory mode='strict' placement='auto'/></numatune>"
    domain = parse_domain(domain_xml(extra=unpinned))
    assert (domain.nodes, domain.cpus) == (frozenset(), frozenset())


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("", set()),
        ("0", {0}),
        ("0-2,5", {0, 1, 2, 5}),
        ("0-7,^3-5", {0, 1, 2, 6, 7}),
        (" 1 , 2\n", {1, 2}),
        ("3-1", set()),
        ("0-65535", set(range(65536))),
    ],
)
def test_sets_of_numbers(text: str, numbers: set[int]) -> None:
    assert parse_set(text) == numbers


@pytest.mark.parametrize(
    "text",
    [
        *("x", "1-", "-1", "^", "1--2", "1-+2", "1_0", "0x1", "1 2", "\u0664"),
        *("0-65536", "0-9999999999999999999", "0-99999999999999999999", "9" * 5000),
    ],
)
def test_what_is_no_set_of_numbers(text: str) -> None:
    with pytest.raises(DomainXmlError, match=r"is (no set of numbers|too large a set)$"):
        parse_set(text)


# --- what is no domain ---

ENTITIES = (
    '<!DOCTYPE d [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;">]>'
    f"<domain><name>&b;</name><uuid>{WEB1}</uuid></domain>"
)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "not well-formed XML: no element found"),
        ("web1", "not well-formed XML: syntax error"),
        ("<domain>", "not well-formed XML: no element found"),
        (domain_xml() + "x", "not well-formed XML: junk after document element"),
        (domain_xml()[:-20], "not well-formed XML"),
        ("<domain>\0</domain>", "not well-formed XML"),
        ("<domain><x:y/></domain>", "not well-formed XML: unbound prefix"),
        ("<network><name>x</name></network>", "a document of <network>, not of <domain>"),
        ("<domstatus/>", "a document of <domstatus>, not of <domain>"),
        (
            domain_xml().replace("<domain ", "<domain xmlns='urn:x' "),
            "a document of <urn:x domain>",
        ),
        (domain_xml(name=""), "a domain without name or UUID"),
        (domain_xml(uuid=" "), "a domain without name or UUID"),
        (ENTITIES, "a document type declaration in a domain's XML"),
        ("<!DOCTYPE domain><domain/>", "a document type declaration in a domain's XML"),
        ("<domain><name>&b;</name></domain>", "not well-formed XML: undefined entity"),
        (domain_xml(extra="<vcpu cpuset='all'>1</vcpu>"), "'all' is no set of numbers"),
    ],
)
def test_what_is_no_domain(text: str, reason: str) -> None:
    with pytest.raises(DomainXmlError) as caught:
        parse_domain(text)
    assert str(caught.value).startswith(reason)


def test_a_domain_cut_off_anywhere_is_no_domain() -> None:
    xml = web1(str(VF)).rstrip()
    for end in range(len(xml)):
        with pytest.raises(DomainXmlError):
            parse_domain(xml[:end])


# --- status files ---

COMMENT = """<!--
WARNING: THIS IS AN AUTO-GENERATED FILE. CHANGES TO IT ARE LIKELY TO BE
OVERWRITTEN AND LOST. Changes to this xml configuration should be made using:
  virsh edit web1
or other application using the libvirt API.
-->

"""


def status(attributes: str = "pid='4001'", inside: str = "", xml: str | None = None) -> str:
    """A status file in the shape that libvirt 9 to 11 write."""
    return f"""{COMMENT}<domstatus state='running' reason='booted' {attributes}>
  <taint flag='high-privileges'/>
  <monitor path='/var/lib/libvirt/qemu/domain-7-web1/monitor.sock' type='unix'/>
  <namespaces>
    <mount/>
  </namespaces>
  <vcpus>
    <vcpu id='0' pid='4042'/>
  </vcpus>
  <qemuCaps>
    <flag name='vfio-pci.host'/>
  </qemuCaps>
  <devices>
    <device alias='ua-vgpu0'/>
    <device alias='video0'/>
  </devices>
  <libDir path='/var/lib/libvirt/qemu/domain-7-web1'/>
  <job type='none' async='none'/>
{inside}{web1(str(VF)) if xml is None else xml}</domstatus>
"""


def test_a_status_file() -> None:
    read = parse_status(status())
    assert (read.pid, read.monitor) == (4001, "/var/lib/libvirt/qemu/domain-7-web1/monitor.sock")
    assert (read.domain.name, read.domain.uuid, read.domain.id) == ("web1", WEB1, 7)
    assert read.domain.requests == (WANTED,)
    assert [hostdev.address for hostdev in read.domain.hostdevs] == [VF]


@pytest.mark.parametrize("pid", ["", "-1", "x", "0x10", "1.5", "9" * 5000, "\u0664"])
def test_a_status_file_without_a_pid_that_could_be_one(pid: str) -> None:
    assert parse_status(status(f"pid='{pid}'")).pid is None
    assert parse_status(status("")).pid is None


def test_look_alikes_in_a_status_file() -> None:
    inside = (
        "<job type='x'><monitor path='/no'/><domain id='9'><name>no</name></domain></job>"
        f"<migration>{hostdev_xml('ua-no', '0000:41:00.4')}</migration>"
        f"<devices>{hostdev_xml('ua-no', '0000:41:00.4')}</devices>"
        f"<metadata>{devices('<v:device/>')}</metadata><name>no</name><uuid>no</uuid>"
    )
    assert parse_status(status(inside=inside)) == parse_status(status())


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (web1(str(VF)), "a document of <domain>, not of <domstatus>"),
        (status(xml=""), "a domain without name or UUID"),
        (status()[:-3], "not well-formed XML"),
        (COMMENT, "not well-formed XML: no element found"),
        ("", "not well-formed XML: no element found"),
    ],
)
def test_what_is_no_status_file(text: str, reason: str) -> None:
    with pytest.raises(DomainXmlError) as caught:
        parse_status(text)
    assert str(caught.value).startswith(reason)


def test_a_status_file_without_a_monitor() -> None:
    text = status().replace("monitor path", "agent path")
    assert parse_status(text).monitor is None
