# SPDX-License-Identifier: LGPL-2.1-or-later
"""`attach --live` and `detach --live`: what runs, its claims, and what is left where it fails."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, Any

import libvirt
import pytest
from lxml import etree

from tests.unit.desk import pointed, requests
from tests.unit.fake_libvirt import error
from tests.unit.host import WEB1, WEB2, domain_xml, web1, web2
from vgpu_libvirt import fs, sync
from vgpu_libvirt.address import location
from vgpu_libvirt.claims import store
from vgpu_libvirt.claims.model import Phase
from vgpu_libvirt.devices import vendor_vfio
from vgpu_libvirt.domain.match import Wanted
from vgpu_libvirt.domain.model import Request
from vgpu_libvirt.domain.read import parse_domain
from vgpu_libvirt.lifecycle import hotplug
from vgpu_libvirt.lifecycle.context import Context

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.unit.desk import Desk
    from tests.unit.fake_libvirt import Domain
    from tests.unit.gpus import Gpus
    from vgpu_libvirt.claims.model import Claim

pytestmark = pytest.mark.promise(2, 3, 4)

LABEL = f"domain 'web1' ({WEB1})"
PLAIN = domain_xml()
PID = 4001
ATTACH = ("attach", "web1", "--profile", "L40S-8Q", "--live")
DETACH = ("detach", "web1", "--live", "--timeout", "0")
ASKED = Request("ua-vgpu0", "NVIDIA L40S-8Q")
CALLS = ["setMetadata live", "attachDeviceFlags live"]


def show(desk: Desk, domain: Domain) -> None:
    """Let the host show what of DOMAIN runs: its QEMU with open devices, and its status file."""
    devices = [
        each for each in pointed(domain, live=True).values() if desk.host.place(each).exists()
    ]
    if (desk.host.proc / str(PID)).exists():
        desk.host.end(PID)
    document = domain.XMLDesc(0)
    opens = tuple(desk.host.nodes(device)[0] for device in devices)
    desk.host.run_domain(domain.name(), domain.UUIDString(), PID, document, opens)


def run(desk: Desk, document: str = PLAIN, **more: bool) -> Domain:
    """A domain that runs."""
    domain = desk.define(document, active=True, **more)
    domain.changed = lambda: show(desk, domain)
    show(desk, domain)
    return domain


def end(desk: Desk, domain: Domain) -> None:
    """What libvirt does when a domain ends."""
    document = domain.XMLDesc(0)
    desk.host.end(PID)
    desk.host.hook("stopped", document)
    desk.host.status_file("web1").unlink()
    domain.active = False
    desk.host.hook("release", document)


def claim_of(desk: Desk, device: str) -> Claim:
    claim = desk.host.claim(device)
    assert claim is not None
    return claim


def assert_nothing_left(desk: Desk, domain: Domain) -> None:
    assert desk.claims() == ()
    assert desk.host.typed() == []
    for live in (True, False):
        assert (requests(domain, live), pointed(domain, live)) == ((), {})


def lapse(desk: Desk) -> None:
    """The time of every reservation passes."""
    for claim in desk.claims():
        earlier = claim._replace(since_boot=max(0.0, claim.since_boot - 61))
        store.replace(desk.host.paths.state, earlier)


def refuse_all(path: str, _text: str) -> None:
    raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), path)


def reconcile(desk: Desk) -> sync.Outcome:
    return sync.reconcile(Context(desk.host.config), float("inf"))


# --- attach ---


def test_a_running_domain_gets_a_vgpu(desk: Desk, gpus: Gpus) -> None:
    domain = run(desk)
    said = desk.do(*ATTACH)
    assert said == (
        f"'ua-vgpu0' of {LABEL} is at {gpus.device()} of GPU 0000:3d:00.0, and has NVIDIA L40S-8Q "
        "now. Why there: only GPU 0000:3d:00.0 can take it now.\n"
    )
    assert domain.writes == CALLS
    assert requests(domain, live=True) == (ASKED,)
    assert pointed(domain, live=True) == {"ua-vgpu0": gpus.device()}
    assert (requests(domain), pointed(domain)) == ((), {})
    assert gpus.type_of(gpus.device()) == 1152
    claim = claim_of(desk, gpus.device())
    assert (claim.phase, claim.domain_uuid, claim.alias) == (Phase.RUNNING, WEB1, "ua-vgpu0")
    assert claim.qemu is not None
    assert claim.qemu.pid == PID


@pytest.mark.promise(1)
def test_before_libvirt_is_asked_it_is_claimed_and_programmed_and_no_lock_is_held(
    desk: Desk, gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another domain's start must not wait for us, since libvirt may wait for it."""
    domain = run(desk)
    attach = domain.attachDeviceFlags
    seen: list[Claim] = []

    def look(text: str, flags: int) -> int:
        seen.append(claim_of(desk, gpus.device()))
        assert gpus.type_of(gpus.device()) == 1152
        assert desk.host.hook("prepare", web2(gpus.device("web2"))).status == 0
        return attach(text, flags)

    monkeypatch.setattr(domain, "attachDeviceFlags", look)
    desk.host.policy = desk.host.policy._replace(lock_timeout=0.1)
    desk.host.write_config()
    desk.do(*ATTACH)
    (claim,) = seen
    assert (claim.phase, claim.daemon) == (Phase.RESERVED, (811, 4242))
    assert not claim.is_mere_reservation


def test_its_end_gives_it_back(desk: Desk, gpus: Gpus) -> None:
    domain = run(desk)
    desk.do(*ATTACH)
    end(desk, domain)
    assert desk.claims() == ()
    assert gpus.type_of(gpus.device()) == 0


def test_both_sides_get_the_same(desk: Desk, gpus: Gpus) -> None:
    domain = run(desk)
    assert "now, and when the domain starts again" in desk.do(*ATTACH, "--config")
    for live in (True, False):
        assert requests(domain, live) == (ASKED,)
        assert pointed(domain, live) == {"ua-vgpu0": gpus.device()}
    end(desk, domain)
    assert desk.host.hook("prepare", domain.XMLDesc(2)).status == 0


def test_the_definition_of_a_running_domain_can_be_changed_alone(desk: Desk, gpus: Gpus) -> None:
    domain = run(desk)
    desk.do(*ATTACH[:-1], "--config")
    assert domain.writes == ["setMetadata", "attachDeviceFlags"]
    assert (requests(domain), requests(domain, live=True)) == ((ASKED,), ())
    assert desk.claims() == ()


def test_a_transient_domain_gets_one_while_it_runs(desk: Desk, gpus: Gpus) -> None:
    domain = run(desk, persistent=False)
    desk.do(*ATTACH)
    assert requests(domain, live=True) == (ASKED,)
    assert "is transient and has no definition to edit; use --live alone" in desk.refused(
        *ATTACH, "--config"
    )


@pytest.mark.parametrize("verb", [ATTACH, DETACH], ids=["attach", "detach"])
def test_what_does_not_run_has_nothing_to_change_live(desk: Desk, verb: tuple[str, ...]) -> None:
    desk.define(web1(desk.vfs[0], number=None))
    assert f"{LABEL} doesn't run; leave --live out" in desk.refused(*verb)


def test_a_second_one_has_an_alias_and_a_device_of_its_own(desk: Desk) -> None:
    domain = run(desk, web1(desk.vfs[0]))
    desk.host.set_type(desk.vfs[0], 1152)
    desk.do(*ATTACH)
    assert pointed(domain, live=True) == {"ua-vgpu0": desk.vfs[0], "ua-vgpu1": desk.vfs[1]}


def test_an_alias_is_not_given_again_before_its_device_is_given_back(desk: Desk) -> None:
    run(desk)
    desk.do(*ATTACH)
    claim = claim_of(desk, desk.vfs[0])
    domain = desk.connection.domains[0]
    domain.live = parse(PLAIN)
    show(desk, domain)
    assert "has a claim on another device for 'ua-vgpu0'" in desk.refused(
        *ATTACH, "--alias", "ua-vgpu0"
    )
    desk.do(*ATTACH)
    assert pointed(domain, live=True) == {"ua-vgpu1": desk.vfs[1]}
    assert claim_of(desk, desk.vfs[0]) == claim


def parse(document: str) -> Any:
    return etree.fromstring(document)


@pytest.mark.promise(9)
def test_a_dry_run_writes_nothing(desk: Desk, gpus: Gpus) -> None:
    domain = run(desk)
    before = desk.host.tree()
    said = desk.do(*ATTACH, "--config", "--dry-run")
    assert f"The definition of {LABEL} would have in its <metadata>:" in said
    assert f"The running {LABEL} would have in its <metadata>:" in said
    assert said.count('<alias name="ua-vgpu0"/>') == 2
    assert said.endswith("Nothing was written.\n")
    desk.do(*ATTACH)
    domain.writes.clear()
    before = desk.host.tree()
    said = desk.do(*DETACH, "--dry-run")
    assert "(no request for a vGPU)" in said
    assert "This would be removed from its <devices>:" in said
    assert (domain.writes, desk.host.tree()) == ([], before)


def test_what_others_ask_for_meanwhile_stays(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written while the device was being programmed."""
    domain = run(desk)
    program = vendor_vfio.program

    def dawdle(*arguments: Any) -> None:
        domain.live = parse(domain_xml(requests={"ua-x": "1152"}))
        program(*arguments)

    monkeypatch.setattr(vendor_vfio, "program", dawdle)
    desk.do(*ATTACH)
    assert [request.alias for request in requests(domain, live=True)] == ["ua-x", "ua-vgpu0"]


# --- what stands in the way ---


@pytest.mark.parametrize("refuses", ["setMetadata live", "attachDeviceFlags live"])
@pytest.mark.parametrize("options", [(), ("--config",)], ids=["live", "both"])
def test_what_libvirt_refuses_is_undone(
    desk: Desk, gpus: Gpus, refuses: str, options: tuple[str, ...]
) -> None:
    domain = run(desk)
    domain.refuses = (refuses,)
    assert f"{refuses} fails" in desk.fails(*ATTACH, *options)
    assert_nothing_left(desk, domain)


def test_where_a_device_refuses_the_next_is_taken(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    domain = run(desk)
    write = fs.write_attribute

    def refuse(path: str, text: str) -> None:
        if desk.vfs[0] in path and text != "0":
            raise OSError(5, "Input/output error")
        write(path, text)

    monkeypatch.setattr(fs, "write_attribute", refuse)
    desk.do(*ATTACH)
    assert pointed(domain, live=True) == {"ua-vgpu0": desk.vfs[1]}
    assert [claim.device for claim in desk.claims()] == [desk.vfs[1]]


def test_so_it_is_where_qemu_says_that_it_was_the_device(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    domain = run(desk)
    attach = domain.attachDeviceFlags

    def refuse(text: str, flags: int) -> int:
        if 'function="0x4"' in text:
            raise error(1, f"vfio {desk.vfs[0]}: error getting device from group 9")
        return attach(text, flags)

    monkeypatch.setattr(domain, "attachDeviceFlags", refuse)
    desk.do(*ATTACH)
    assert pointed(domain, live=True) == {"ua-vgpu0": desk.vfs[1]}
    assert [claim.device for claim in desk.claims()] == [desk.vfs[1]]
    assert requests(domain, live=True) == (ASKED,)


def test_when_all_refuse_all_are_told(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    domain = run(desk)
    monkeypatch.setattr(vendor_vfio, "_write", lambda *_: "Input/output error")
    said = desk.refused(*ATTACH)
    assert f"did not put NVIDIA L40S-8Q on {desk.vfs[3]}" in said
    assert f"(before that, {', '.join(desk.vfs[:3])} failed)" in said
    assert_nothing_left(desk, domain)


def test_a_plug_that_is_reported_as_failed_but_happened_is_undone(
    desk: Desk, gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    domain = run(desk)
    attach = domain.attachDeviceFlags

    def fail(text: str, flags: int) -> int:
        attach(text, flags)
        raise error(1, "the device list can't be updated")

    monkeypatch.setattr(domain, "attachDeviceFlags", fail)
    desk.refused(*ATTACH)
    assert_nothing_left(desk, domain)


def test_one_that_the_guest_does_not_let_go_is_told_and_stays_claimed(
    desk: Desk, gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    domain = run(desk)
    domain.lets_go = False
    attach = domain.attachDeviceFlags

    def fail(text: str, flags: int) -> int:
        attach(text, flags)
        raise error(1, "the device list can't be updated")

    monkeypatch.setattr(domain, "attachDeviceFlags", fail)
    said = desk.fails(*ATTACH)
    assert "'ua-vgpu0' is plugged in nevertheless: run 'virt-vgpu detach web1 --live" in said
    assert f"{gpus.device()} stays claimed" in said
    reconcile(desk)
    assert claim_of(desk, gpus.device()).phase is Phase.RUNNING
    assert gpus.type_of(gpus.device()) == 1152


@pytest.mark.promise(1)
def test_where_libvirt_falls_silent_the_device_is_kept_until_it_must_have_failed(
    desk: Desk, gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody knows whether libvirtd, or QEMU, is still at it."""
    domain = run(desk)

    def fall_silent(_text: str, _flags: int) -> int:
        for call in ("isActive", "XMLDesc", "setMetadata"):
            monkeypatch.setattr(domain, call, lambda *_: fall_silent("", 0))
        raise error(libvirt.VIR_ERR_RPC, "End of file while reading data")

    monkeypatch.setattr(domain, "attachDeviceFlags", fall_silent)
    result = desk.call(*ATTACH)
    assert result.exit_code == 1
    assert f"{gpus.device()} stays claimed until 'virt-vgpu sync' can tell" in result.output
    assert reconcile(desk).released == ()
    assert claim_of(desk, gpus.device()).phase is Phase.RESERVED
    lapse(desk)
    assert reconcile(desk).released == (gpus.device(),)
    assert gpus.type_of(gpus.device()) == 0


@pytest.mark.promise(1)
@pytest.mark.parametrize("lets_go", [True, False])
def test_a_claim_that_went_meanwhile_is_not_plugged_in(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, lets_go: bool
) -> None:
    """libvirt took so long that the claim lapsed, and the device is another's by now."""
    domain = run(desk)
    attach = domain.attachDeviceFlags

    def dawdle(text: str, flags: int) -> int:
        lapse(desk)
        assert desk.host.hook("prepare", web2(desk.vfs[0])).status == 0
        return attach(text, flags)

    monkeypatch.setattr(domain, "attachDeviceFlags", dawdle)
    if lets_go:  # then with another device all is well
        monkeypatch.setattr(domain, "let_go", once(monkeypatch, domain, attach))
        assert f"is at {desk.vfs[1]}" in desk.do(*ATTACH)
        assert pointed(domain, live=True) == {"ua-vgpu0": desk.vfs[1]}
    else:
        domain.lets_go = False
        said = desk.fails(*ATTACH)
        assert f"{desk.vfs[0]} was taken from {LABEL} before it was plugged in" in said
        assert "and 'ua-vgpu0' is plugged in nevertheless" in said
    assert claim_of(desk, desk.vfs[0]).domain_uuid == WEB2
    assert desk.host.type_of(desk.vfs[0]) == "1152"


def once(monkeypatch: pytest.MonkeyPatch, domain: Domain, attach: object) -> Callable[[], None]:
    """The guest's letting go, after which libvirt is quick again."""
    let_go = domain.let_go

    def go() -> None:
        let_go()
        monkeypatch.setattr(domain, "attachDeviceFlags", attach)

    return go


def test_a_claim_that_cannot_be_noted_is_noted_by_sync(
    desk: Desk, gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    domain = run(desk)
    attach = domain.attachDeviceFlags

    def fill(text: str, flags: int) -> int:
        attach(text, flags)
        monkeypatch.setattr(fs, "write_new", refuse)
        return 0

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(domain, "attachDeviceFlags", fill)
    assert f"Note: 'virt-vgpu sync' notes that {gpus.device()} runs" in desk.do(*ATTACH)
    monkeypatch.undo()
    reconcile(desk)
    assert claim_of(desk, gpus.device()).phase is Phase.RUNNING


def test_a_domain_that_ends_meanwhile_leaves_nothing(
    desk: Desk, gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    domain = run(desk)

    def die(_text: str, _flags: int) -> int:
        end(desk, domain)
        raise error(libvirt.VIR_ERR_OPERATION_INVALID, "domain is not running")

    monkeypatch.setattr(domain, "attachDeviceFlags", die)
    assert desk.fails(*ATTACH) == (
        f"{LABEL}: the hostdev can't be attached: domain is not running\n"
    )
    assert_nothing_left(desk, domain)


def test_a_host_that_does_not_show_libvirt_is_refused(desk: Desk, gpus: Gpus) -> None:
    domain = run(desk)
    desk.host.status_file("web1").unlink()
    assert f"{LABEL} is not among the running domains in" in desk.refused(*ATTACH)
    desk.host.end(811)
    assert "no libvirtd or virtqemud is among the processes" in desk.refused(*ATTACH)
    assert domain.writes == []


@pytest.mark.parametrize("live", [True, False])
def test_a_request_that_cannot_be_understood_is_refused(desk: Desk, live: bool) -> None:
    odd = domain_xml(requests='<vgpu:device alias="ua-a" profile="1" colour="red"/>')
    if live:
        domain = run(desk, odd)
        domain.document = parse(PLAIN)
        assert "mend it with 'virsh metadata web1 --live --edit'" in desk.refused(*ATTACH)
    else:
        desk.define(odd)
        assert "run 'virt-vgpu fix-xml web1'" in desk.refused(*ATTACH[:-1])


# --- who was killed on the way ---


def left_behind(desk: Desk, gpus: Gpus) -> Domain:
    """A domain that runs, and a claim for it by somebody who was killed before he asked libvirt."""
    domain = run(desk)
    context = hotplug.by_daemon(desk.host.config)
    wanted = Wanted(ASKED, location(gpus.device()))
    hotplug.make_ready(context, parse_domain(domain.XMLDesc(0)), wanted)
    return domain


def test_what_never_was_plugged_in_comes_back_when_it_has_lapsed(desk: Desk, gpus: Gpus) -> None:
    left_behind(desk, gpus)
    assert reconcile(desk).released == ()
    assert desk.host.hook("prepare", web2(gpus.device())).status == 1
    lapse(desk)
    assert reconcile(desk).released == (gpus.device(),)
    assert gpus.type_of(gpus.device()) == 0


def test_or_when_libvirtd_is_gone(desk: Desk, gpus: Gpus) -> None:
    left_behind(desk, gpus)
    desk.host.end(811)
    assert reconcile(desk).released == (gpus.device(),)


@pytest.mark.promise(1)
def test_what_qemu_has_open_never_lapses(desk: Desk, gpus: Gpus) -> None:
    """Between QEMU's opening it and libvirt's listing it."""
    left_behind(desk, gpus)
    lapse(desk)
    desk.host.end(PID)
    opens = (desk.host.nodes(gpus.device())[0],)
    desk.host.run_domain("web1", WEB1, PID, PLAIN, opens)
    assert reconcile(desk).released == ()
    assert gpus.type_of(gpus.device()) == 1152


@pytest.mark.promise(1)
def test_what_libvirt_did_plug_in_is_found_to_run(desk: Desk, gpus: Gpus) -> None:
    domain = left_behind(desk, gpus)
    domain.live = parse(web1(gpus.device()))
    show(desk, domain)
    lapse(desk)
    assert reconcile(desk).released == ()
    assert claim_of(desk, gpus.device()).phase is Phase.RUNNING


def test_a_driver_that_is_busy_costs_no_more_than_a_later_sync(
    desk: Desk, gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What can't be cleared is release-pending, and need not lapse a second time."""
    left_behind(desk, gpus)
    lapse(desk)
    with monkeypatch.context() as busy:
        busy.setattr(fs, "write_attribute", refuse_all)
        (kept,) = reconcile(desk).kept
    assert "the driver did not " in kept.reason
    assert claim_of(desk, gpus.device()).phase is Phase.RELEASE_PENDING
    assert reconcile(desk).released == (gpus.device(),)


def test_its_domains_end_takes_it_along(desk: Desk, gpus: Gpus) -> None:
    domain = left_behind(desk, gpus)
    end(desk, domain)
    assert_nothing_left(desk, domain)


def test_its_domains_next_start_takes_it_anew_even_at_the_same_place(
    desk: Desk, gpus: Gpus
) -> None:
    left_behind(desk, gpus)
    desk.host.end_domain("web1", PID)
    before = claim_of(desk, gpus.device())
    assert desk.host.hook("prepare", web1(gpus.device())) == (0, "", "")
    after = claim_of(desk, gpus.device())
    assert (after.phase, after.qemu) == (Phase.CONFIGURED, None)
    assert after.claim_id != before.claim_id


@pytest.mark.promise(1)
def test_but_not_while_the_old_qemu_lives(desk: Desk, gpus: Gpus) -> None:
    """It may still open what it was told to."""
    left_behind(desk, gpus)
    desk.host.status_file("web1").unlink()
    refused = desk.host.hook("prepare", web1(gpus.device()))
    assert refused.status == 1
    assert f"its QEMU, process {PID}, runs" in refused.stderr
    assert claim_of(desk, gpus.device()).phase is Phase.RESERVED


def test_force_takes_nothing_from_the_living(desk: Desk, gpus: Gpus) -> None:
    left_behind(desk, gpus)
    assert "not even --force takes a device from the living" in desk.refused(
        "release", gpus.device(), "--force"
    )


def test_a_device_that_was_for_it_can_be_detached(desk: Desk, gpus: Gpus) -> None:
    left_behind(desk, gpus)
    said = desk.fails(*DETACH)
    assert f"'ua-vgpu0' ({gpus.device()}) of {LABEL} was being plugged in, and may still be" in said
    lapse(desk)
    assert f"{gpus.device()} was given back" in desk.do(*DETACH)
    assert desk.claims() == ()


# --- detach ---


def test_what_the_guest_lets_go_is_given_back(desk: Desk, gpus: Gpus) -> None:
    domain = run(desk)
    desk.do(*ATTACH)
    domain.writes.clear()
    assert desk.do(*DETACH) == (
        f"{LABEL} has no vGPU 'ua-vgpu0' any more; {gpus.device()} was given back.\n"
    )
    assert domain.writes == ["detachDeviceFlags live", "setMetadata live"]
    assert_nothing_left(desk, domain)


def test_the_guest_may_take_its_time(
    desk: Desk, gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    domain = run(desk)
    desk.do(*ATTACH)
    domain.lets_go = False
    monkeypatch.setattr("vgpu_libvirt.detaching.time.sleep", lambda _: domain.let_go())
    assert f"{gpus.device()} was given back" in desk.do("detach", "web1", "--live")
    assert_nothing_left(desk, domain)


@pytest.mark.promise(1)
def test_what_it_does_not_let_go_in_time_stays_until_it_does(desk: Desk, gpus: Gpus) -> None:
    domain = run(desk)
    desk.do(*ATTACH)
    domain.lets_go = False
    for _ in range(2):  # asking again is no failure of its own
        said = desk.fails(*DETACH)
        assert (
            f"the guest of {LABEL} has not let 'ua-vgpu0' ({gpus.device()}) go within 0 s" in said
        )
        assert "so it stays; once the guest has, 'virt-vgpu sync' gives it back" in said
        assert reconcile(desk).released == ()
        assert claim_of(desk, gpus.device()).phase is Phase.RUNNING
        assert gpus.type_of(gpus.device()) == 1152
        assert requests(domain, live=True) == (ASKED,)
    domain.let_go()
    assert reconcile(desk).released == (gpus.device(),)
    assert desk.do(*DETACH) == f"{LABEL} has no vGPU 'ua-vgpu0' any more.\n"
    assert_nothing_left(desk, domain)


@pytest.mark.promise(1)
def test_libvirts_word_is_not_enough_while_it_is_open(
    desk: Desk, gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    domain = run(desk)
    desk.do(*ATTACH)
    domain.changed = lambda: desk.host.write(
        desk.host.status_file("web1"),
        desk.host.status_file("web1")
        .read_text()
        .replace("<hostdev", "<gone")
        .replace("</hostdev", "</gone"),
    )
    assert f"{gpus.device()} is held open by process {PID}" in desk.fails(*DETACH)
    assert gpus.type_of(gpus.device()) == 1152
    assert claim_of(desk, gpus.device())


def test_one_whose_start_nobody_noted_is_given_back_too(desk: Desk, gpus: Gpus) -> None:
    """`started` was killed, so the claim doesn't know its QEMU."""
    document = web1(gpus.device())
    assert desk.host.hook("prepare", document).status == 0
    domain = run(desk, document)
    desk.do(*DETACH)
    assert desk.claims() == ()
    assert gpus.type_of(gpus.device()) == 0
    assert requests(domain, live=True) == ()
    assert requests(domain) == (ASKED,)


def test_and_one_whose_claim_was_lost(desk: Desk, gpus: Gpus) -> None:
    document = web1(gpus.device())
    gpus.set_type(gpus.device(), 1152)
    run(desk, document)
    assert f"{gpus.device()} was given back" in desk.do(*DETACH)
    assert gpus.type_of(gpus.device()) == 0


def test_one_that_cannot_be_claimed_is_detached_and_said(desk: Desk) -> None:
    run(desk, web1(desk.vfs[0]))  # without a type
    said = desk.do(*DETACH)
    assert said == (
        f"{LABEL} has no vGPU 'ua-vgpu0' any more.\n"
        f"Note: {desk.vfs[0]} of the running domain 'web1' has no vGPU type.\n"
    )


def test_what_is_nobodys_request_is_detached_and_left_alone(desk: Desk, gpus: Gpus) -> None:
    """A type that we didn't write is not ours to clear."""
    device = gpus.device(alias="ua-x")
    gpus.set_type(device, 1148)
    run(desk, domain_xml(hostdevs={"ua-x": device}))
    said = desk.do(*DETACH, "--alias", "ua-x")
    assert said == f"{LABEL} has no vGPU 'ua-x' any more.\n"
    assert gpus.type_of(device) == 1148


def test_from_both_sides(desk: Desk, gpus: Gpus) -> None:
    domain = run(desk)
    desk.do(*ATTACH, "--config")
    desk.do(*DETACH, "--config")
    assert_nothing_left(desk, domain)


def test_from_the_definition_alone_while_it_runs(desk: Desk, gpus: Gpus) -> None:
    domain = run(desk)
    desk.do(*ATTACH, "--config")
    desk.do("detach", "web1", "--config")
    assert (requests(domain), pointed(domain)) == ((), {})
    assert pointed(domain, live=True) == {"ua-vgpu0": gpus.device()}
    assert claim_of(desk, gpus.device()).phase is Phase.RUNNING


def test_a_detach_that_libvirt_refuses_changes_nothing(desk: Desk, gpus: Gpus) -> None:
    domain = run(desk)
    desk.do(*ATTACH, "--config")
    domain.refuses = ("detachDeviceFlags live",)
    assert "the hostdev can't be detached" in desk.refused(*DETACH, "--config")
    for live in (True, False):
        assert requests(domain, live) == (ASKED,)
        assert pointed(domain, live) == {"ua-vgpu0": gpus.device()}
    assert claim_of(desk, gpus.device()).phase is Phase.RUNNING


def test_a_claim_that_cannot_be_read_stops_it(desk: Desk, gpus: Gpus) -> None:
    """What is let go could not be given back."""
    domain = run(desk)
    desk.do(*ATTACH)
    (desk.host.state / f"claims/{gpus.device()}.json").write_text("{")
    assert "stays as it is until that is mended" in desk.refused(*DETACH)
    assert pointed(domain, live=True) == {"ua-vgpu0": gpus.device()}


def test_a_driver_that_will_not_clear_leaves_it_to_sync(
    desk: Desk, gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    domain = run(desk)
    desk.do(*ATTACH)
    with monkeypatch.context() as busy:
        busy.setattr(fs, "write_attribute", refuse_all)
        said = desk.fails(*DETACH)
    assert f"'ua-vgpu0' of {LABEL} is detached, but {gpus.device()} stays claimed" in said
    assert requests(domain, live=True) == ()
    assert claim_of(desk, gpus.device()).phase is Phase.RELEASE_PENDING
    assert reconcile(desk).released == (gpus.device(),)


def test_a_domain_that_ends_while_it_is_waited_for(
    desk: Desk, gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    domain = run(desk)
    desk.do(*ATTACH)
    domain.lets_go = False
    monkeypatch.setattr("vgpu_libvirt.detaching.time.sleep", lambda _: end(desk, domain))
    desk.do("detach", "web1", "--live")
    assert desk.claims() == ()
    assert gpus.type_of(gpus.device()) == 0


@pytest.mark.parametrize("lost", ["the store", "nothing"])
def test_a_request_that_was_never_plugged_in_costs_the_others_nothing(
    desk: Desk, gpus: Gpus, lost: str
) -> None:
    """Killed between the metadata and the hostdev; then the store is lost, and adopted anew."""
    document = domain_xml(
        requests={"ua-vgpu0": "L40S-8Q", "ua-vgpu1": "L40S-8Q"},
        hostdevs={"ua-vgpu0": gpus.device()},
    )
    gpus.set_type(gpus.device(), 1152)
    domain = run(desk, document)
    if lost == "nothing":
        reconcile(desk)
    assert reconcile(desk).released == ()
    assert claim_of(desk, gpus.device()).phase is Phase.RUNNING
    assert desk.do(*DETACH, "--alias", "ua-vgpu1") == (
        f"{LABEL} has no vGPU 'ua-vgpu1' any more.\n"
    )
    assert requests(domain, live=True) == (Request("ua-vgpu0", "L40S-8Q"),)
