# SPDX-License-Identifier: LGPL-2.1-or-later
"""`fix-xml`: what it shows, what it writes through libvirt, and what it refuses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import libvirt
import pytest

from tests.unit.desk import Desk, parsed, pointed
from tests.unit.fake_libvirt import error
from tests.unit.golden import check
from tests.unit.host import WEB1, domain_xml, hostdev_xml, web1, web2
from tests.unit.mdev_host import P40, MdevHost
from vgpu_libvirt.devices.mdev_life import mdev_uuid
from vgpu_libvirt.domain.model import Request
from vgpu_libvirt.domain.read import parse_domain

if TYPE_CHECKING:
    from click.testing import Result

    from tests.unit.fake_libvirt import Connection
    from tests.unit.host import Host

LABEL = f"domain 'web1' ({WEB1})"
ASKED = (Request("ua-vgpu0", "NVIDIA L40S-8Q"),)
MDEV = (
    "<hostdev mode='subsystem' type='mdev' managed='no' model='vfio-pci' display='on'>"
    "<source><address uuid='83e81f52-d87a-4f4a-9c1e-1d7a54b8a9a0'/></source>"
    "<address type='pci' domain='0x0000' bus='0x06' slot='0x00' function='0x0'/>"
    "<rom bar='off'/></hostdev>"
)
WRONG = "urn:vgpu-libvirt:domain:2"
MISSPELT = domain_xml(hostdevs={"ua-vgpu0": "0000:3d:00.4"}, number=None).replace(
    "<metadata></metadata>",
    f"<metadata><o:thing xmlns:o='urn:other'/><v:devices xmlns:v='{WRONG}'>"
    "<v:device alias='vgpu0' type='8Q'/></v:devices></metadata>",
)


def by_virt_manager(vf: str) -> str:
    text = hostdev_xml("x", vf, "yes").replace("      <alias name='x'/>\n", "")
    return domain_xml(hostdevs=text.replace("</source>", "</source><rom bar='off'/>"), number=None)


class Fixes(Desk):
    """Where the one domain is corrected."""

    def call(self, *arguments: str) -> Result:
        return super().call("fix-xml", "web1", *arguments)


@pytest.fixture
def desk(host: Host, connection: Connection) -> Fixes:
    return Fixes(host, connection)


def test_a_hostdev_of_virt_manager(desk: Fixes) -> None:
    domain = desk.define(by_virt_manager(desk.vfs[1]))
    check("cli/fix-virt-manager.txt", desk.do("--profile", "L40S-8Q"), desk.host.root)
    assert (parsed(domain).requests, pointed(domain)) == (ASKED, {"ua-vgpu0": desk.vfs[1]})
    assert domain.writes == ["setMetadata", "detachDeviceFlags", "attachDeviceFlags"]
    assert b'<rom bar="off"/>' in domain.content()
    assert b'bus="0x05"' in domain.content()
    document = domain.XMLDesc(libvirt.VIR_DOMAIN_XML_INACTIVE)
    assert desk.host.hook("prepare", document) == (0, "", "")
    assert desk.do() == f"{LABEL} needs no correction.\n"


def test_a_profile_is_needed_for_it(desk: Fixes) -> None:
    desk.define(by_virt_manager(desk.vfs[1]))
    said = desk.refused()
    assert f"{LABEL}: the hostdev at {desk.vfs[1]} asks for no profile; say with --profile" in said
    assert "NVIDIA L40S-8Q (1152)" in said
    assert "profile 'L40S-9Q' is unknown" in desk.refused("--profile", "L40S-9Q")


def test_a_vf_whose_driver_was_unbound_is_known_by_its_gpu(desk: Fixes) -> None:
    """As libvirt does it, when such a domain has been started."""
    domain = desk.define(by_virt_manager(desk.vfs[1]))
    nvidia = desk.host.pci(desk.vfs[1]) / "nvidia"
    nvidia.rename(nvidia.with_name("gone"))
    desk.do("--profile", "1152")
    assert pointed(domain) == {"ua-vgpu0": desk.vfs[1]}


def test_what_is_excluded_is_none_of_our_business(desk: Fixes) -> None:
    desk.define(by_virt_manager(desk.vfs[1]))
    gpu = parse_domain(web1("0000:3d:00.0")).hostdevs[0].address
    desk.host.set_policy(exclude=(gpu,))
    assert desk.do() == f"{LABEL} needs no correction.\n"


def test_a_mediated_device(desk: Fixes) -> None:
    desk.define(web2(desk.vfs[0]))
    domain = desk.define(domain_xml(hostdevs=MDEV, number=None))
    check("cli/fix-mdev.txt", desk.do("--profile", "1152"), desk.host.root)
    assert (parsed(domain).requests, pointed(domain)) == (ASKED, {"ua-vgpu0": desk.vfs[1]})
    assert b'bus="0x06"' in domain.content()
    assert b'<rom bar="off"/>' in domain.content()


def test_two_mediated_devices_get_devices_of_their_own(desk: Fixes) -> None:
    domain = desk.define(domain_xml(hostdevs=MDEV + MDEV.replace("83e8", "93e8"), number=None))
    desk.do("--profile", "1152")
    assert pointed(domain) == {"ua-vgpu0": desk.vfs[0], "ua-vgpu1": desk.vfs[1]}


def test_mediated_devices_where_the_host_has_them_stay(desk: Fixes) -> None:
    MdevHost(desk.host.root, desk.host.sysfs).parent("0000:08:00.0", P40)
    domain = desk.define(domain_xml(hostdevs=MDEV, number=None))
    assert desk.do() == f"{LABEL} needs no correction.\n"
    assert "has a request for GRID P40-4C now" in desk.do("--profile", "P40-4C")
    assert pointed(domain) == {"ua-vgpu0": mdev_uuid(WEB1, "ua-vgpu0")}
    assert "GRID P40-4C" in domain.content().decode()
    assert desk.do() == f"{LABEL} needs no correction.\n"


def test_an_entry_without_types_makes_no_host_of_mediated_devices(desk: Fixes) -> None:
    (desk.host.sysfs / "class/mdev_bus/0000:3d:00.0").mkdir(parents=True)
    domain = desk.define(domain_xml(hostdevs=MDEV, number=None))
    desk.do("--profile", "1152")
    assert pointed(domain) == {"ua-vgpu0": desk.vfs[0]}


def test_a_mediated_device_that_has_no_successor_now(desk: Fixes) -> None:
    for vf in desk.vfs[1:]:
        desk.host.set_list(vf, "")
        desk.host.set_type(vf, 1152)
    assert desk.host.hook("prepare", web2(desk.vfs[0])).status == 0
    desk.define(domain_xml(hostdevs=MDEV, number=None))
    assert "no device for L40S-8Q: 0000:3d:00.0 has no free VF" in desk.refused("--profile", "1152")


def test_a_misspelt_request_in_a_wrong_namespace(desk: Fixes) -> None:
    domain = desk.define(MISSPELT)
    check("cli/fix-misspelt.txt", desk.do(), desk.host.root)
    assert parsed(domain).requests == ASKED
    assert domain.writes == ["setMetadata", "setMetadata"]
    assert WRONG.encode() not in domain.content()
    assert b"urn:other" in domain.content()


@pytest.mark.promise(9)
@pytest.mark.parametrize("document", [by_virt_manager("0000:3d:00.5"), MISSPELT])
def test_a_dry_run(desk: Fixes, document: str) -> None:
    domain = desk.define(document)
    before = desk.host.tree()
    dry = desk.do("--profile", "1152", "--dry-run")
    assert dry.endswith("\nNothing was written.\n")
    assert domain.writes == []
    assert desk.host.tree() == before
    assert desk.do("--profile", "1152") == dry.removesuffix("\nNothing was written.\n")


def test_the_definition_of_a_running_domain(desk: Fixes) -> None:
    domain = desk.define(by_virt_manager(desk.vfs[1]), active=True)
    said = desk.do("--profile", "1152")
    assert said.endswith("\nIt runs, and goes on as it is until its next start.\n")
    assert pointed(domain) == {"ua-vgpu0": desk.vfs[1]}


def test_transient_and_unknown_domains_are_refused(desk: Fixes) -> None:
    assert "there is no domain 'web1'" in desk.refused()
    desk.define(MISSPELT, active=True, persistent=False)
    assert f"{LABEL} is transient and has no definition to correct" in desk.refused()


def test_what_is_not_clear_is_told_and_the_rest_is_done(desk: Fixes) -> None:
    text = '<vgpu:device alias="ua-vgpu0" profile="1152" colour="red"/>'
    domain = desk.define(web1(desk.vfs[0], managed="yes").replace("<vgpu:device ", text + "<x "))
    domain.document.find("metadata")[0].remove(domain.document.find("metadata")[0][1])  # type: ignore[index]
    result = desk.call()
    assert result.exit_code == 1
    assert f"what is meant in the definition of {LABEL} isn't clear: a request has 'colour', " in (
        result.output
    )
    assert "see to it with 'virsh edit web1'" in result.output
    assert pointed(domain) == {"ua-vgpu0": desk.vfs[0]}


def test_no_device_is_chosen_for_what_is_not_clear(desk: Fixes) -> None:
    text = '<vgpu:device alias="ua-vgpu0" profile="1152" colour="red"/>'
    desk.define(domain_xml(requests=text, hostdevs=MDEV))
    assert "isn't clear: a request has 'colour'" in desk.refused()


@pytest.mark.parametrize("call", ["setMetadata", "detachDeviceFlags"])
def test_what_libvirt_refuses_leaves_everything_as_it_was(desk: Fixes, call: str) -> None:
    domain = desk.define(MISSPELT.replace("managed='no'", "managed='yes'"))
    domain.refuses = (call,)
    result = desk.call()
    assert result.exit_code == 1
    assert f"{call} fails" in result.output.splitlines()[-1]
    assert WRONG.encode() in domain.content()
    assert parsed(domain).requests == ()
    assert parsed(domain).hostdevs[0].managed


def test_a_hostdev_that_cannot_be_attached_goes_back(desk: Fixes) -> None:
    domain = desk.define(by_virt_manager(desk.vfs[1]))
    before = domain.content()
    real = domain.attachDeviceFlags

    def attach(text: str, flags: int) -> int:
        if 'managed="no"' in text:
            raise error(libvirt.VIR_ERR_OPERATION_FAILED, "no room")
        return real(text, flags)

    domain.attachDeviceFlags = attach  # type: ignore[method-assign]
    result = desk.call("--profile", "1152")
    assert "the hostdev can't be attached: no room" in result.output
    assert domain.content() == before


def test_the_old_element_that_cannot_be_removed_puts_it_all_back(desk: Fixes) -> None:
    domain = desk.define(MISSPELT.replace("managed='no'", "managed='yes'"))
    real = domain.setMetadata

    def write(kind: int, text: str | None, key: str, uri: str, flags: int) -> int:
        if uri == WRONG:
            raise error(libvirt.VIR_ERR_OPERATION_FAILED, "no room")
        return real(kind, text, key, uri, flags)

    domain.setMetadata = write  # type: ignore[method-assign]
    result = desk.call()
    assert f"the metadata of {WRONG} can't be removed: no room" in result.output
    assert parsed(domain).requests == ()
    assert parsed(domain).hostdevs[0].managed
