# SPDX-License-Identifier: LGPL-2.1-or-later
"""What becomes of definitions that ask for a vGPU in a way that doesn't work."""

from __future__ import annotations

import pytest

from tests.unit.host import domain_xml, hostdev_xml, web1
from vgpu_libvirt.address import PciAddress
from vgpu_libvirt.devices.model import Profile
from vgpu_libvirt.domain import edit, fix
from vgpu_libvirt.domain.fix import Facts, Fix
from vgpu_libvirt.domain.model import Request
from vgpu_libvirt.domain.read import parse_domain
from vgpu_libvirt.domain.respell import meant
from vgpu_libvirt.errors import DomainXmlError, RequestError

P2Q, P8Q, B8Q = (
    Profile(1149, "NVIDIA L40S-2Q"),
    Profile(1152, "NVIDIA L40S-8Q"),
    Profile(2152, "NVIDIA L40S-8B"),
)
VF1, VF2 = "0000:3d:00.4", "0000:3d:00.5"
FACTS = Facts(
    (P2Q, P8Q, B8Q), {PciAddress.parse(VF1): (P8Q,), PciAddress.parse(VF2): (P2Q, P8Q)}, False
)
ASKED = (Request("ua-vgpu0", "NVIDIA L40S-8Q"),)
ONE = '<vgpu:device alias="ua-vgpu0" profile="1152"/>'
URN = "urn:vgpu-libvirt:domain:1"


def fixed(document: str, profile: Profile | None = P8Q, facts: Facts = FACTS) -> Fix:
    """Fix DOCUMENT; a second time nothing is left to do."""
    found = fix.fix(document, facts, profile)
    again = fix.fix(found.document, facts, None)
    assert (again.changes, again.findings, again.stale) == ((), (), ())
    assert again.document == found.document
    return found


def requests(found: Fix) -> tuple[Request, ...]:
    domain = parse_domain(found.document)
    assert domain.request_error is None
    return domain.requests


def asking(request: str) -> str:
    """A domain with REQUEST and a hostdev that has no part in it."""
    return domain_xml(requests=request)


def inside(metadata: str, hostdevs: str = "") -> str:
    text = domain_xml(hostdevs=hostdevs)
    return text.replace("<metadata></metadata>", f"<metadata>{metadata}</metadata>")


def no_alias(vf: str, managed: str = "yes") -> str:
    """A hostdev as virt-manager adds it."""
    return hostdev_xml("x", vf, managed).replace("      <alias name='x'/>\n", "")


MDEV = (
    "<hostdev mode='subsystem' type='mdev' managed='no' model='vfio-pci' display='on'>"
    "<source><address uuid='83e81f52-d87a-4f4a-9c1e-1d7a54b8a9a0'/></source>{alias}"
    "<address type='pci' domain='0x0000' bus='0x06' slot='0x00' function='0x0'/></hostdev>"
)


# --- hostdevs ---


@pytest.mark.parametrize("document", [web1(VF1), domain_xml(), asking(ONE)])
def test_what_is_right_stays(document: str) -> None:
    found = fixed(document, None)
    assert (found.changes, found.findings, found.remains) == ((), (), ())
    assert found.document == edit.text(edit.parse(document))


def test_what_virt_manager_adds() -> None:
    found = fixed(domain_xml(hostdevs=no_alias(VF1)))
    assert requests(found) == ASKED
    (change,) = found.changes
    assert 'managed="yes"' in change.before
    assert "alias" not in change.before
    assert change.after == edit.find_hostdev(web1(VF1), "ua-vgpu0").replace(  # type: ignore[union-attr]
        '  <alias name="ua-vgpu0"/>\n', ""
    ).replace("</hostdev>", '  <alias name="ua-vgpu0"/>\n</hostdev>')
    assert found.findings == (
        "the hostdev 'ua-vgpu0' has a request for NVIDIA L40S-8Q now",
        f"the hostdev at {VF1} has the alias 'ua-vgpu0' now",
        "the hostdev 'ua-vgpu0' has managed='no' now: libvirt would have unbound the driver that "
        "makes the vGPU",
    )


def test_without_a_profile_it_is_asked_for() -> None:
    with pytest.raises(RequestError) as raised:
        fix.fix(domain_xml(hostdevs=no_alias(VF2)), FACTS, None)
    assert str(raised.value) == (
        f"the hostdev at {VF2} asks for no profile; say with --profile which it shall have: "
        "NVIDIA L40S-2Q (1149), NVIDIA L40S-8Q (1152)"
    )


def test_managed_alone_needs_no_profile() -> None:
    found = fixed(web1(VF1, managed="yes"), None)
    assert found.metadata == edit.metadata(web1(VF1))
    assert found.document == edit.text(edit.parse(web1(VF1)))


def test_a_managed_hostdev_of_a_request_points_nowhere() -> None:
    """Its device may be on another host: what it is shows the request."""
    assert len(fixed(web1("0000:99:00.4", managed="yes"), None).changes) == 1


@pytest.mark.parametrize("address", ["0000:3d:00.0", "0000:05:00.0"])
def test_other_devices_are_left_alone(address: str) -> None:
    hostdevs = no_alias(address) + "<hostdev mode='subsystem' type='usb'><source/></hostdev>"
    found = fixed(domain_xml(hostdevs=hostdevs), None)
    assert (found.changes, found.findings) == ((), ())


def test_aliases_of_other_devices_are_not_taken() -> None:
    other = "<interface><alias name='ua-vgpu0'/></interface>"
    found = fixed(domain_xml(hostdevs=no_alias(VF1) + no_alias(VF2) + other))
    assert [request.alias for request in requests(found)] == ["ua-vgpu1", "ua-vgpu2"]


def test_a_request_and_a_hostdev_without_alias_belong_together() -> None:
    document = domain_xml(requests={"ua-mine": "1152"}, hostdevs=no_alias(VF1))
    found = fixed(document, None)
    assert requests(found) == (Request("ua-mine", "1152"),)
    assert [change.alias for change in found.changes] == ["ua-mine"]


def test_so_do_several_in_their_order() -> None:
    document = domain_xml(
        requests={"ua-a": "1152", "ua-b": "1149"}, hostdevs=no_alias(VF1) + no_alias(VF2)
    )
    found = fixed(document, None)
    assert [(c.alias, 'function="0x4"' in c.after) for c in found.changes] == [
        ("ua-a", True),
        ("ua-b", False),
    ]


def test_one_request_with_another_alias_gets_the_hostdevs() -> None:
    document = domain_xml(requests={"ua-vgpu": "1152"}, hostdevs={"ua-vgpu0": VF1})
    found = fixed(document, None)
    assert requests(found) == (Request("ua-vgpu0", "1152"),)
    assert found.changes == ()


def test_which_is_whose_of_more_is_asked() -> None:
    document = domain_xml(
        requests={"ua-a": "1152"}, hostdevs=no_alias(VF1, "no") + no_alias(VF2, "no")
    )
    found = fix.fix(document, FACTS, P8Q)
    assert found.changes == ()
    assert "which hostdev is which request's can't be told" in found.remains[0]


@pytest.mark.parametrize("alias", ["", "<alias name='ua-old'/>"])
def test_a_mediated_device_becomes_a_pci_device(alias: str) -> None:
    found = fix.fix(domain_xml(hostdevs=MDEV.format(alias=alias)), FACTS, P8Q)
    (change,) = found.changes
    assert fix.is_placeless(change)
    assert change.alias == ("ua-old" if alias else "ua-vgpu0")
    placed = fix.pointed(found, change.alias, PciAddress.parse(VF1))
    (hostdev,) = parse_domain(placed.document).hostdevs
    assert (hostdev.kind, str(hostdev.address), hostdev.managed) == ("pci", VF1, False)
    assert hostdev.alias == change.alias
    after = placed.changes[0].after
    assert after in "\n".join(line.strip() and line[4:] for line in placed.document.splitlines())
    assert "uuid" not in after
    assert "display" not in after
    assert 'bus="0x06"' in after  # the guest's address
    assert fix.fix(placed.document, FACTS, None).changes == ()


def test_a_mediated_device_where_there_are_some_stays() -> None:
    document = domain_xml(hostdevs=MDEV.format(alias=""))
    assert fixed(document, None, FACTS._replace(has_mdev=True)).changes == ()
    other = document.replace("vfio-pci", "vfio-ccw")
    assert fixed(other, None).changes == ()


# --- metadata ---


@pytest.mark.parametrize(
    ("written", "findings"),
    [
        ('alias="ua-vgpu0" type="NVIDIA L40S-8Q"', ["'type' of a request is now 'profile'"]),
        ('alias="ua-vgpu0" name="NVIDIA L40S-8Q"', ["'name' of a request is now 'profile'"]),
        ('name="ua-vgpu0" profile="NVIDIA L40S-8Q"', ["'name' of a request is now 'alias'"]),
        ('alias="ua-vgpu0" Profile="NVIDIA L40S-8Q"', ["'Profile' of a request is now 'profile'"]),
        ('allias="ua-vgpu0" proflie="NVIDIA L40S-8Q"', ["'allias' of a request is now 'alias'"]),
        ('vgpu:alias="ua-vgpu0" profile="NVIDIA L40S-8Q"', ["'alias' of a request is now 'alias'"]),
        ('alias="vgpu0" profile="NVIDIA L40S-8Q"', ["alias 'vgpu0' is now 'ua-vgpu0'"]),
        ('alias="ua-vgpu0" profile="8Q"', ["profile '8Q' is now 'NVIDIA L40S-8Q'"]),
        ('alias="ua-vgpu0" profile="l40s-8q"', ["profile 'l40s-8q' is now 'NVIDIA L40S-8Q'"]),
        ('alias="ua-vgpu0" model="8Q"', ["'model' of a request is now 'profile'"]),
        ('profile="NVIDIA L40S-8Q"', ["a request has the alias 'ua-vgpu0' now"]),
        ('alias="ua-vgpu0"', ["the request 'ua-vgpu0' has a profile now"]),
    ],
)
def test_a_misspelt_request(written: str, findings: list[str]) -> None:
    found = fixed(asking(f"<vgpu:device {written}/>"))
    assert requests(found) == ASKED
    assert found.remains == ()
    assert set(findings) <= set(found.findings)


@pytest.mark.parametrize("element", ["vgpu:Device", "vgpu:devcie", "device"])
def test_a_misspelt_element(element: str) -> None:
    text = f'<{element} alias="ua-vgpu0" profile="NVIDIA L40S-8Q"/>'
    assert requests(fixed(asking(text))) == ASKED


@pytest.mark.parametrize(
    ("written", "right"),
    [
        ('gpu="3D:00.0"', {"gpu": PciAddress(0, 0x3D, 0, 0)}),
        ('placement="Pack"', {"placement": "pack"}),
        ('apart="yes"', {"apart": "gpu"}),
        ('NUMA="require"', {"numa": "require"}),
    ],
)
def test_values(written: str, right: dict[str, object]) -> None:
    found = fixed(asking(f'<vgpu:device alias="ua-vgpu0" profile="1152" {written}/>'))
    assert requests(found) == (Request("ua-vgpu0", "1152", **right),)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("written", "remains"),
    [
        ('profile="8"', "profile '8' is unknown on this host, which has NVIDIA L40S-2Q (1149), "),
        ('profile="A40-8Q"', "profile 'A40-8Q' is unknown on this host"),
        ('profile="1152" colour="red"', "a request has 'colour', which is unknown; known: alias,"),
        ('profile="1152" type="1149"', "a request has 'type', which is unknown"),
        ('profile="1152" Profile="1149"', "a request has 'Profile' and 'profile'; remove one"),
        ('profile="1152" placement="left"', "placement='left' is not known; known: spread, pack"),
        ('profile="1152" gpu="first"', "gpu: 'first' is not a PCI address"),
    ],
)
def test_what_is_not_clear_is_said_and_stays(written: str, remains: str) -> None:
    document = asking(f'<vgpu:device alias="ua-vgpu0" {written}/>')
    found = fixed(document)
    assert remains in found.remains[0]
    assert (found.findings, found.document) == ((), edit.text(edit.parse(document)))


def test_a_profile_that_could_be_several_is_asked() -> None:
    facts = FACTS._replace(profiles=(P8Q, Profile(7, "NVIDIA A40-8Q")))
    found = fixed(asking('<vgpu:device alias="ua-a" profile="8Q"/>'), facts=facts)
    assert found.remains == (
        "profile '8Q' could be NVIDIA A40-8Q (7), NVIDIA L40S-8Q (1152); write one of them",
    )
    assert meant("  nvidia   L40S-8Q ", FACTS.profiles) == (P8Q,)
    assert meant("", FACTS.profiles) == ()


def test_unknown_elements_and_attributes_around_requests_are_said() -> None:
    found = fixed(inside(f'<devices xmlns="{URN}" later="1"><x xmlns="urn:x"/></devices>'))
    assert found.remains == (
        "<devices> has the attribute 'later', which is unknown",
        "<devices> has the element <x>; remove it",
    )


@pytest.mark.parametrize(
    "urn",
    [
        "urn:vgpu-libvirt:domain:2",
        "urn:vgpu-libvirt:domain",
        "URN:VGPU-libvirt:domain:1",
        "urn:vgpu_libvirt:domain:1",
        "urn:vgpu-libvirt",
    ],
)
def test_a_wrong_namespace(urn: str) -> None:
    request = '<v:device alias="ua-vgpu0" profile="NVIDIA L40S-8Q"/><!-- by hand -->'
    other = '<o:thing xmlns:o="urn:other"/>'
    found = fixed(inside(f'{other}<v:devices xmlns:v="{urn}">{request}</v:devices>'))
    assert requests(found) == ASKED
    assert (found.stale, f'"{urn}"' in found.document) == ((urn,), False)
    assert found.findings == (f"the request in namespace '{urn}' is now in '{URN}'",)
    assert "<!-- by hand -->" in found.document
    assert "urn:other" in found.document
    assert found.metadata is not None
    assert found.metadata.startswith('<vgpu:devices xmlns:vgpu="urn:vgpu-libvirt:domain:1">')


def test_other_namespaces_are_none_of_our_business() -> None:
    text = '<d:devices xmlns:d="urn:other"><d:device alias="ua-a" profile="1152"/></d:devices>'
    found = fixed(inside(text), None)
    assert (found.metadata, found.stale, found.findings) == (None, (), ())


def test_a_request_without_its_element_around_it_or_without_a_namespace() -> None:
    lone = f'<v:device xmlns:v="{URN}" alias="ua-vgpu0" profile="NVIDIA L40S-8Q"/>'
    found = fixed(inside(lone))
    assert (requests(found), found.stale) == (ASKED, ())
    none = '<devices><device alias="ua-vgpu0" profile="NVIDIA L40S-8Q"/></devices>'
    found = fixed(inside(none))
    assert (requests(found), found.stale) == (ASKED, ())
    assert "<device " not in found.document


def test_what_was_moved_already_is_not_there_twice() -> None:
    """A correction that was killed before the old element was removed."""
    request = 'alias="ua-vgpu0" profile="NVIDIA L40S-8Q"'
    both = (
        f'<v:devices xmlns:v="{URN}"><v:device {request}/></v:devices>'
        f'<w:devices xmlns:w="{URN}2"><w:device {request}/></w:devices>'
    )
    found = fixed(inside(both))
    assert (requests(found), found.stale) == (ASKED, (f"{URN}2",))


def test_comments_and_order_stay() -> None:
    text = (
        f'<vgpu:devices xmlns:vgpu="{URN}"><!-- one -->'
        '<vgpu:device profile="8Q" alias="ua-a" placement="pack"/></vgpu:devices>'
    )
    found = fixed(inside(text))
    assert found.metadata == (
        f'<vgpu:devices xmlns:vgpu="{URN}">\n  <!-- one -->\n'
        '  <vgpu:device profile="NVIDIA L40S-8Q" alias="ua-a" placement="pack"/>\n</vgpu:devices>'
    )


def test_metadata_that_is_missing_is_added_where_libvirt_has_it() -> None:
    document = domain_xml(hostdevs=no_alias(VF1)).replace("  <metadata></metadata>\n", "")
    assert "</uuid>\n  <metadata>\n" in fixed(document).document


def test_no_xml() -> None:
    with pytest.raises(DomainXmlError):
        fix.fix("<domain>", FACTS, None)
