# SPDX-License-Identifier: LGPL-2.1-or-later
"""Definitions are pointed at devices that could serve them now; all else in them stays."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
from lxml import etree

from tests.unit.fake_libvirt import Connection, Domain
from tests.unit.host import WEB1, WEB2, domain_xml, hostdev_xml, web1, web2
from tests.unit.test_lifecycle import start
from vgpu_libvirt import edits, libvirt_api, pointing, unfinished
from vgpu_libvirt.address import PciAddress
from vgpu_libvirt.claims import locks
from vgpu_libvirt.domain import edit
from vgpu_libvirt.errors import LibvirtError
from vgpu_libvirt.unfinished import Edit

if TYPE_CHECKING:
    from tests.unit.gpus import Gpus
    from tests.unit.host import Host

WEB3 = "aaaaaaaa-0000-0000-0000-000000000003"
ASKS = {"ua-vgpu0": "NVIDIA L40S-8Q"}
EMPTY = "ID    : vGPU Name\n"


def asking(name: str, uuid: str, vf: str | None = None) -> Domain:
    """A definition that asks for a vGPU, with or without its hostdev."""
    hostdevs = {"ua-vgpu0": vf} if vf else None
    return Domain(domain_xml(name, uuid, ASKS, hostdevs, number=None))


def point(host: Host, *domains: Domain, dry_run: bool = False) -> pointing.Outcome:
    return pointing.point(host.config, Connection(*domains), dry_run)


def where(domain: Domain, alias: str = "ua-vgpu0") -> str | None:
    """The device that a hostdev of a definition points at."""
    from vgpu_libvirt.domain.read import parse_domain

    hostdev = parse_domain(etree.tostring(domain.document, encoding="unicode")).hostdev(alias)
    return str(hostdev.address or hostdev.uuid) if hostdev else None


def settled(host: Host, *domains: Domain) -> None:
    """A second run changes nothing."""
    before = [domain.content() for domain in domains]
    again = point(host, *domains)
    assert again.repointed == ()
    assert [domain.content() for domain in domains] == before


def test_a_missing_hostdev_is_added(host: Host, gpus: Gpus) -> None:
    first = gpus.device()
    domain = asking("web1", WEB1)
    outcome = point(host, domain)
    assert outcome.repointed == ((WEB1, "web1", "ua-vgpu0", None, first),)
    assert where(domain) == first
    settled(host, domain)


def test_what_is_right_stays(host: Host) -> None:
    *_, last = host.gpu()
    domain = asking("web1", WEB1, last)
    settled(host, domain)
    assert domain.writes == []


def test_a_device_that_another_domain_has_is_left_for_another(host: Host) -> None:
    first, second, *_ = host.gpu()
    start(host, first)
    domain = asking("web2", WEB2, first)
    assert point(host, domain).repointed == ((WEB2, "web2", "ua-vgpu0", first, second),)
    settled(host, domain)


@pytest.mark.parametrize("what", ["gone", "foreign", "full", "unreadable"])
def test_a_device_that_can_serve_nobody_is_left(host: Host, what: str) -> None:
    first, second, *_ = host.gpu()
    domain = asking("web1", WEB1, first)
    if what == "gone":
        host.pci(first).rename(host.root / "away")
    elif what == "foreign":
        host.set_type(first, 1148)
    elif what == "full":
        host.set_list(first, EMPTY)
    else:
        host.set_list(first, "?\n")
    assert [move.goes for move in point(host, domain).repointed] == [second]
    settled(host, domain)


def test_of_two_that_cannot_both_stay_on_a_gpu_one_moves(host: Host) -> None:
    first, second, *_ = host.gpu()
    other = host.gpu("0000:5e:00.0")[0]
    asks = dict.fromkeys(("ua-a", "ua-b"), "NVIDIA L40S-48Q")
    domain = Domain(domain_xml("web1", WEB1, asks, {"ua-a": first, "ua-b": second}, number=None))
    assert point(host, domain).repointed == ((WEB1, "web1", "ua-b", second, other),)
    settled(host, domain)


def test_everything_else_of_the_hostdev_stays(host: Host) -> None:
    first, second, *_ = host.gpu()
    start(host, first)
    hostdev = hostdev_xml("ua-vgpu0", first).replace(
        "<alias", "<driver name='vfio'/><rom bar='off'/><boot order='2'/><alias"
    )
    domain = Domain(domain_xml("web2", WEB2, ASKS, hostdev, number=None))
    before = domain.content().decode()
    point(host, domain)
    assert where(domain) == second
    assert domain.content().decode() == before.replace('function="0x4"', 'function="0x5"').replace(
        "function='0x4'", "function='0x5'"
    )


def test_each_gets_a_device_of_its_own_while_there_are_enough(host: Host) -> None:
    first, second, *_ = host.gpu(vfs=2)
    twins = [asking("web1", WEB1, first), asking("web2", WEB2, first)]
    assert point(host, *twins).repointed == ((WEB2, "web2", "ua-vgpu0", first, second),)
    settled(host, *twins)
    third = asking("web3", WEB3)
    point(host, *twins, third)
    assert where(third) in (first, second), "then they share"
    settled(host, *twins, third)


def test_they_are_spread_over_the_gpus_by_what_each_will_take(host: Host) -> None:
    first, second = host.gpu()[0], host.gpu("0000:5e:00.0")[0]
    request = {"ua-vgpu0": "NVIDIA L40S-48Q"}  # one fits on each GPU
    domains = [
        Domain(domain_xml(name, uuid, request, number=None))
        for name, uuid in (("web1", WEB1), ("web2", WEB2))
    ]
    assert {move.goes for move in point(host, *domains).repointed} == {first, second}


def test_nobody_takes_the_right_device_of_one_that_comes_later(host: Host) -> None:
    first, second, *_ = host.gpu(vfs=2)
    domains = [asking("web1", WEB1), asking("web2", WEB2, first)]
    assert point(host, *domains).repointed == ((WEB1, "web1", "ua-vgpu0", None, second),)


def test_a_running_domains_definition_keeps_its_own_device(host: Host, gpus: Gpus) -> None:
    first = gpus.device()
    start(host, first)
    domain = Domain(web1(first), active=True)
    settled(host, domain)
    assert domain.writes == []


def test_a_hostdev_whose_request_is_gone_goes(host: Host) -> None:
    first, second, *_ = host.gpu()
    both = {"ua-vgpu0": first, "ua-vgpu1": second}
    domain = Domain(domain_xml("web1", WEB1, ASKS, both, number=None))
    assert point(host, domain).repointed == ((WEB1, "web1", "ua-vgpu1", second, None),)
    assert where(domain, "ua-vgpu1") is None
    settled(host, domain)


@pytest.mark.promise(6)
def test_who_did_not_ask_is_not_touched(host: Host) -> None:
    first, second, *_ = host.gpu()
    plain = Domain(domain_xml("plain", WEB1, None, {"ua-x": first}, number=None))
    asks = asking("web2", WEB2)
    point(host, plain, asks)
    assert plain.writes == []
    assert where(asks) == second, "and what it points at is the last that others choose"


def test_who_cannot_be_served_is_left_and_reported(host: Host) -> None:
    for vf in host.gpu(vfs=2):
        host.set_list(vf, EMPTY)
    domain = asking("web1", WEB1, "0000:3d:00.4")
    outcome = point(host, domain)
    assert outcome.repointed == ()
    assert domain.writes == []
    assert any("domain 'web1' can't be served now: " in problem for problem in outcome.problems)


def test_a_managed_hostdev_is_for_fix_xml(host: Host) -> None:
    first = host.gpu()[0]
    domain = Domain(web1(first, managed="yes"))
    assert any(
        "run 'virt-vgpu fix-xml web1'" in problem for problem in point(host, domain).problems
    )
    assert domain.writes == []


@pytest.mark.promise(9)
def test_a_dry_run_writes_nothing(host: Host, gpus: Gpus) -> None:
    domain = asking("web1", WEB1)
    before = host.tree()
    assert [move.goes for move in point(host, domain, dry_run=True).repointed] == [gpus.device()]
    assert domain.writes == []
    assert host.tree() == before


def test_a_change_that_was_killed_half_way_is_finished(host: Host) -> None:
    first, second, *_ = host.gpu()
    domain = asking("web1", WEB1, first)
    document = etree.tostring(domain.document, encoding="unicode")
    before = edit.find_hostdev(document, "ua-vgpu0")
    assert before is not None
    after = before.replace('function="0x4"', 'function="0x5"')
    domain.refuses = ("attachDeviceFlags",)
    definition = libvirt_api.find(Connection(domain), "web1")
    with pytest.raises(LibvirtError):
        edits.apply(host.paths.state, definition, Edit(WEB1, "ua-vgpu0", before, after))
    assert where(domain) is None, "detached, and neither could be attached"
    domain.refuses = ()
    assert point(host, domain).problems == ()
    assert where(domain) == second
    assert not list((host.state / "edits").glob("*.json"))
    settled(host, domain)


def test_an_unfinished_change_that_cannot_be_read_is_reported(host: Host) -> None:
    host.gpu()
    path = host.write(host.state / "edits" / f"{WEB1}.ua-vgpu0.json", "{")
    assert any(str(path) in note for note in point(host, asking("web1", WEB1)).notes)


def test_what_somebody_changed_meanwhile_stays(host: Host) -> None:
    first, second, third, *_ = host.gpu()
    start(host, first)
    domain = asking("web2", WEB2, first)
    connection = Connection(domain)
    lookup = connection.lookupByUUIDString

    def changed(uuid: str) -> Domain:
        domain.document = etree.fromstring(web2(third))
        return lookup(uuid)

    connection.lookupByUUIDString = changed  # type: ignore[method-assign]
    assert pointing.point(host.config, connection).repointed == ()
    assert where(domain) == third
    assert second


def test_nothing_piles_up_for_domains_that_are_gone(host: Host) -> None:
    first, *_ = host.gpu()
    start(host, first)
    web2, web3 = asking("web2", WEB2, first), asking("web3", WEB3, first)
    point(host, web2, web3)
    edits_of = host.state / "edits"
    assert sorted(path.name for path in edits_of.glob("*")) == [
        ".new",
        f"{WEB2}.lock",
        f"{WEB3}.lock",
    ]
    # killed while it saved, and after it did
    host.write(edits_of / ".new" / f"{WEB3}.ua-vgpu0.json", "{")
    change = Edit(WEB3, "ua-vgpu0", None, "<hostdev/>")
    unfinished.save(host.paths.state, change._replace(alias="ua-vgpu1"))
    assert point(host, web2).problems == ()
    assert [path.name for path in edits_of.rglob("*")] == [".new", f"{WEB2}.lock"]


@pytest.mark.promise(9)
def test_a_dry_run_removes_nothing_either(host: Host) -> None:
    host.gpu()
    host.write(host.state / "edits" / f"{WEB3}.lock", "")
    before = host.tree()
    point(host, asking("web1", WEB1), dry_run=True)
    assert host.tree() == before


def test_a_definition_that_somebody_holds_is_left_and_the_others_are_pointed(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, *_ = host.gpu()
    monkeypatch.setattr(pointing, "_BUSY", 0.1)
    web1, web2 = asking("web1", WEB1), asking("web2", WEB2)
    with locks.definition(host.paths.state, WEB1, time.monotonic()):
        outcome = point(host, web1, web2)
    assert [move.domain_uuid for move in outcome.repointed] == [WEB2]
    assert any(f"{WEB1}.lock is held by somebody else" in each for each in outcome.problems)
    assert {point(host, web1, web2).repointed[0].goes} <= {first, second}


def test_one_unfinished_change_that_cannot_be_finished_costs_no_other(host: Host) -> None:
    first, second, *_ = host.gpu()
    broken = host.write(host.state / "edits" / f"{WEB1}.ua-a.json", "{")
    domain = asking("web1", WEB1)
    hostdev = edit.hostdev("ua-vgpu0", PciAddress.parse(second))
    unfinished.save(host.paths.state, Edit(WEB1, "ua-vgpu0", hostdev, hostdev))
    (problem,) = point(host, domain).notes
    assert problem.startswith(f"the unfinished change {broken} stays: it can't be understood")
    assert where(domain) == second, "and not a new one"
    assert first


def test_a_device_that_another_hostdev_of_the_domain_took_meanwhile_is_left_to_it(
    host: Host,
) -> None:
    first, second, third, *_ = host.gpu()
    start(host, first)
    domain = asking("web2", WEB2, first)
    connection = Connection(domain)
    lookup = connection.lookupByUUIDString
    both = {"ua-vgpu0": "NVIDIA L40S-8Q", "ua-vgpu1": "NVIDIA L40S-8Q"}
    attached = domain_xml("web2", WEB2, both, {"ua-vgpu0": first, "ua-vgpu1": second}, number=None)

    def changed(uuid: str) -> Domain:
        connection.lookupByUUIDString = lookup  # type: ignore[method-assign]
        domain.document = etree.fromstring(attached)
        return lookup(uuid)

    connection.lookupByUUIDString = changed  # type: ignore[method-assign]
    outcome = pointing.point(host.config, connection)
    assert (outcome.repointed, outcome.problems) == ((), ())
    assert [move.goes for move in point(host, domain).repointed] == [third]
    assert (where(domain), where(domain, "ua-vgpu1")) == (third, second)
