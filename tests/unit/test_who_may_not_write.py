# SPDX-License-Identifier: LGPL-2.1-or-later
"""A user of libvirt's group may edit definitions, but not write to our directory.

`attach`, `detach` and `fix-xml` work for them all the same, without lock and saved edits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import libvirt
import pytest
from click.testing import CliRunner
from lxml import etree

from tests.unit.fake_libvirt import Connection, Domain
from tests.unit.host import Host, domain_xml, hostdev_xml
from tests.unit.support import directory_for_all, nobody
from vgpu_libvirt import pointing
from vgpu_libvirt.cli.main import main
from vgpu_libvirt.domain.read import parse_domain

if TYPE_CHECKING:
    from collections.abc import Iterator

EDITS = {
    "attach": ["attach", "web1", "--profile", "L40S-8Q"],
    "detach": ["detach", "web1", "--alias", "ua-vgpu0"],
    "fix-xml": ["fix-xml", "web1", "--profile", "L40S-8Q"],
}


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Host, Domain]]:
    """A host whose state belongs to root, and web1 with a hostdev that fix-xml would mend."""
    with directory_for_all() as root:
        host = Host(root)
        first, second, *_ = host.gpu()
        host.state.mkdir(mode=0o755)
        mended = hostdev_xml("ua-vgpu1", second, "yes").replace("bus='0x05'", "bus='0x06'")
        document = domain_xml(
            requests={"ua-vgpu0": "NVIDIA L40S-8Q"},
            hostdevs=hostdev_xml("ua-vgpu0", first) + mended,
            number=None,
        )
        domain = Domain(document)
        monkeypatch.setattr(libvirt, "open", lambda _uri: Connection(domain))
        root.chmod(0o755)
        host.state.chmod(0o555)  # also where the tests aren't root
        yield host, domain
        host.state.chmod(0o755)


def asked(domain: Domain) -> dict[str, bool]:
    """Alias of each request -> whether it has a hostdev that gets a vGPU."""
    parsed = parse_domain(etree.tostring(domain.document, encoding="unicode"))
    hostdevs = {each.alias: not each.managed for each in parsed.hostdevs}
    return {each.alias: hostdevs.get(each.alias, False) for each in parsed.requests}


def hostdevs(domain: Domain) -> list[bytes]:
    found = etree.fromstring(domain.content()).iter("hostdev")
    return sorted(etree.tostring(each) for each in found)


@pytest.mark.parametrize(
    ("verb", "then"),
    [
        ("attach", {"ua-vgpu0": True, "ua-vgpu2": True}),
        ("detach", {}),
        ("fix-xml", {"ua-vgpu0": True, "ua-vgpu1": True}),
    ],
)
def test_they_edit_all_the_same(
    world: tuple[Host, Domain], verb: str, then: dict[str, bool]
) -> None:
    host, domain = world
    before = host.tree()
    with nobody():
        result = CliRunner().invoke(main, EDITS[verb], env=host.environment)
    assert (result.exit_code, result.exception) == (0, None), result.output
    assert asked(domain) == then
    assert host.tree() == before


@pytest.mark.parametrize("verb", EDITS)
@pytest.mark.parametrize("call", ["attachDeviceFlags", "detachDeviceFlags"])
def test_what_libvirt_refuses_them_is_put_back(
    world: tuple[Host, Domain], verb: str, call: str
) -> None:
    host, domain = world
    before = hostdevs(domain)
    requests = asked(domain)
    real, left = getattr(domain, call), [1]

    def refuse_once(*arguments: object) -> object:
        if left:
            left.pop()
            raise libvirt.libvirtError("refused")
        return real(*arguments)

    setattr(domain, call, refuse_once)
    with nobody():
        result = CliRunner().invoke(main, EDITS[verb], env=host.environment)
    if left:
        assert result.exit_code == 0, "it makes no such call"
        return
    assert result.exit_code == 1
    assert result.output.count("\n") == 1 or verb == "fix-xml"
    assert "Traceback" not in result.output
    assert hostdevs(domain) == before
    assert asked(domain) == requests


def test_their_sync_says_what_it_could_not_write(world: tuple[Host, Domain]) -> None:
    host, domain = world
    host.set_list("0000:3d:00.4", "")
    for hostdev in domain.document.findall("devices/hostdev")[1:]:
        parent = hostdev.getparent()
        assert parent is not None
        parent.remove(hostdev)
    with nobody():
        outcome = pointing.point(host.config, Connection(domain))
    assert outcome.repointed == ()
    assert any("can't be opened: permission denied" in problem for problem in outcome.problems)
    assert domain.writes == []
