# SPDX-License-Identifier: LGPL-2.1-or-later
"""Carved devices: for domains that don't ask, handed out and taken back by nobody but a person."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import pytest

from tests.unit.desk import pointed
from tests.unit.host import LIBVIRTD, WEB1, WEB2, domain_xml, web1
from tests.unit.mdev_host import MdevHost, Type
from tests.unit.test_sync import reconcile
from vgpu_libvirt import fs, libvirt_api, report
from vgpu_libvirt.address import PciAddress
from vgpu_libvirt.claims import locks, store
from vgpu_libvirt.claims.liveness import State
from vgpu_libvirt.claims.model import Phase, Process
from vgpu_libvirt.errors import StoreError
from vgpu_libvirt.lifecycle import carve as carver
from vgpu_libvirt.lifecycle.context import Context
from vgpu_libvirt.survey import look

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from tests.unit.desk import Desk
    from tests.unit.host import Host
    from vgpu_libvirt.report import Report

GPU = "0000:3d:00.0"
NEXT_BOOT = "99999999-8888-7777-6666-555555555555"
ONLY_1Q = "ID    : vGPU Name\n1147  : NVIDIA L40S-1Q\n"


@pytest.fixture(autouse=True)
def we_run(host: Host) -> None:
    host.process(os.getpid(), "virt-vgpu", start=777)


def carve(desk: Desk, *wanted: str) -> str:
    return desk.do("carve", "--gpu", GPU, *(wanted or ("L40S-8Q=2",)))


def plain(vf: str, uuid: str = WEB1, name: str = "web1") -> str:
    """A domain with a hostdev at VF, that asks for nothing."""
    return domain_xml(name, uuid, None, {"ua-nova": vf})


def run_plain(desk: Desk, vf: str, pid: int = 4001) -> str:
    """A domain that asks for nothing starts on VF."""
    host, xml = desk.host, plain(vf)
    assert host.hook("prepare", xml) == (0, "", "")
    assert host.hook("start", xml) == (0, "", "")
    host.run_domain("web1", WEB1, pid, xml, opens=(host.nodes(vf)[0],))
    return xml


def reboot(host: Host, *vfs: str) -> None:
    host.write(host.proc / "sys/kernel/random/boot_id", NEXT_BOOT + "\n")
    host.end(os.getpid())
    for vf in vfs:
        host.set_type(vf, 0)


def see(desk: Desk) -> Report:
    return report.build(look(desk.host.config))


def carved(desk: Desk) -> list[str]:
    """The devices that are carved, and have the type."""
    found = [claim.device for claim in desk.claims() if claim.phase is Phase.CARVED]
    assert all(desk.host.type_of(device) == "1152" for device in found)
    return sorted(found)


# --- carving ---


@pytest.mark.promise(3)
def test_it_programs_free_devices_and_keeps_them_as_no_domains(desk: Desk) -> None:
    first, second, third, _ = desk.vfs
    said = carve(desk)
    assert said == f"{first} is carved as NVIDIA L40S-8Q.\n{second} is carved as NVIDIA L40S-8Q.\n"
    assert carved(desk) == [first, second]
    assert desk.host.type_of(third) == "0"
    written = json.loads((desk.host.state / f"claims/{first}.json").read_text())
    assert (written["version"], written["phase"]) == (1, "carved")
    assert [written[key] for key in ("domain_uuid", "domain_name", "alias")] == [None] * 3


def test_carved_by_count_more_or_in_all(desk: Desk) -> None:
    carve(desk, "L40S-8Q=1")
    carve(desk, "L40S-8Q=1")
    assert carved(desk) == desk.vfs[:2]
    carve(desk, "L40S-8Q=3", "--total")
    assert carved(desk) == desk.vfs[:3]
    before = desk.host.tree()
    assert carve(desk, "L40S-8Q=3", "--total").startswith("Nothing had to be carved: ")
    assert carve(desk, "1152=1", "--total").startswith("Nothing had to be carved: ")
    assert desk.host.tree() == before


def test_json_is_what_novas_device_spec_takes(desk: Desk) -> None:
    first, second, *_ = desk.vfs
    carve(desk, "L40S-8Q=1")
    spec = carve(desk, "L40S-8Q=1", "--json")
    assert spec == f'[{{"address": "{second}", "managed": "no"}}]\n'
    both = [{"address": vf, "managed": "no"} for vf in (first, second)]
    assert json.loads(carve(desk, "L40S-8Q=2", "--total", "--json")) == both


@pytest.mark.promise(9)
def test_dry_runs_write_nothing(desk: Desk) -> None:
    before = desk.host.tree()
    assert f"{desk.vfs[0]} would be carved as NVIDIA L40S-8Q." in carve(
        desk, "L40S-8Q=2", "--dry-run"
    )
    spec = json.loads(carve(desk, "L40S-8Q=2", "--dry-run", "--json"))
    assert [each["address"] for each in spec] == desk.vfs[:2]
    assert desk.host.tree() == before
    carve(desk)
    before = desk.host.tree()
    assert "would not be carved any more" in desk.do("uncarve", GPU, "--dry-run")
    assert desk.host.tree() == before


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        ("L40S-8Q=5", f"no device for L40S-8Q ('L40S-8Q 5 of 5') beside 'L40S-8Q 1 of 5' at {GPU}"),
        ("L40S-9Q=1", "profile 'L40S-9Q' is unknown on this host"),
    ],
)
def test_where_there_is_no_room_one_sentence_says_why(desk: Desk, wanted: str, why: str) -> None:
    said = desk.fails("carve", "--gpu", GPU, wanted)
    assert why.replace(GPU, desk.vfs[0]) in said
    assert desk.claims() == ()


def test_the_same_profile_by_two_names_is_refused(desk: Desk) -> None:
    said = desk.fails("carve", "--gpu", GPU, "L40S-8Q=1", "1152=1")
    assert said == "'L40S-8Q' and '1152' are the same profile; name it once\n"


def test_another_gpu_is_named(desk: Desk) -> None:
    said = desk.fails("carve", "--gpu", "0000:99:00.0", "L40S-8Q=1")
    assert "GPU 0000:99:00.0 is not on this host, has no VFs, or is excluded by [policy]; " in said


@pytest.mark.parametrize("wanted", ["L40S-8Q", "L40S-8Q=0", "=2", "L40S-8Q=x", "L40S-8Q=-1"])
def test_wrong_usage(desk: Desk, wanted: str) -> None:
    assert desk.call("carve", "--gpu", GPU, wanted).exit_code == 2
    assert desk.call("carve", wanted).exit_code == 2
    assert desk.call("carve", "--gpu", GPU).exit_code == 2
    assert desk.call("uncarve", "gpu0").exit_code == 2


def test_cordons_and_exclusions_are_respected(desk: Desk) -> None:
    first, second, third, _ = desk.vfs
    desk.host.set_policy(exclude=(PciAddress.parse(first),))
    desk.do("cordon", second)
    carve(desk, "L40S-8Q=1")
    assert carved(desk) == [third]
    desk.do("cordon", GPU)
    assert f"{GPU} is cordoned" in desk.fails("carve", "--gpu", GPU, "L40S-8Q=1")


@pytest.mark.promise(2)
def test_a_cordon_that_comes_in_between_counts_under_the_lock(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    carve_it = carver.carve

    def with_cordon(*arguments: object) -> object:
        desk.do("cordon", GPU)
        return carve_it(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(carver, "carve", with_cordon)
    assert f"{GPU} is cordoned" in desk.fails("carve", "--gpu", GPU, "L40S-8Q=1")
    assert desk.claims() == ()


@pytest.mark.promise(3)
def test_the_claim_is_on_disk_before_the_first_write(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    write = fs.write_attribute

    def watched(path: str, text: str) -> None:
        claim = desk.host.claim(desk.vfs[0])
        seen.append(claim and (claim.phase, claim.domain_uuid, claim.daemon))
        write(path, text)

    monkeypatch.setattr(fs, "write_attribute", watched)
    carve(desk, "L40S-8Q=1")
    assert seen == [(Phase.CLAIMED, "", Process(os.getpid(), 777))]


@pytest.mark.promise(3)
def test_all_or_nothing(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    write = fs.write_attribute

    def refused_at_the_second(path: str, text: str) -> None:
        if desk.vfs[1] in path:
            raise OSError(5, "Input/output error")
        write(path, text)

    monkeypatch.setattr(fs, "write_attribute", refused_at_the_second)
    said = desk.fails("carve", "--gpu", GPU, "L40S-8Q=3")
    assert f"the driver did not put NVIDIA L40S-8Q on {desk.vfs[1]}" in said
    assert desk.claims() == ()
    assert {desk.host.type_of(vf) for vf in desk.vfs} == {"0"}


@pytest.mark.promise(3, 4)
def test_what_will_not_clear_stays_visibly_for_sync(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = fs.write_attribute

    def refuses(path: str, text: str) -> None:
        if desk.vfs[1] in path or text == "0":
            raise OSError(5, "Input/output error")
        write(path, text)

    with monkeypatch.context() as patch:
        patch.setattr(fs, "write_attribute", refuses)
        said = desk.fails("carve", "--gpu", GPU, "L40S-8Q=2")
    assert f"{desk.vfs[0]} stays claimed until it can be cleared: " in said
    (claim,) = desk.claims()
    assert claim.phase is Phase.RELEASE_PENDING
    assert "waits to be given back by the administrator's carve" in see(desk).problems[0]
    desk.host.end(os.getpid())
    assert reconcile(desk.host).released == (desk.vfs[0],)
    assert desk.host.type_of(desk.vfs[0]) == "0"


@pytest.mark.promise(3)
def test_a_store_that_fails_at_the_last_write_leaves_what_it_says(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace = store.replace
    calls = []

    def full(state: str, claim: object) -> None:
        calls.append(claim)
        if len(calls) == 2:
            raise StoreError("the claim can't be written: no space left on device")
        replace(state, claim)  # type: ignore[arg-type]

    monkeypatch.setattr(store, "replace", full)
    said = desk.fails("carve", "--gpu", GPU, "L40S-8Q=2")
    assert f"{desk.vfs[0]} is carved; 'virt-vgpu uncarve' gives it back" in said
    assert carved(desk) == [desk.vfs[0]]
    assert desk.host.type_of(desk.vfs[1]) == "0"


@pytest.mark.promise(1)
def test_a_device_that_is_open_by_now_is_not_written_to(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    vf = desk.vfs[0]
    device = next(d for d in look(desk.host.config).host.inventory.devices if d.name == vf)
    desk.host.process(5000, opens=(desk.host.nodes(vf)[1],))
    assert device.creatable
    profile = next(each for each in device.creatable if each.id == 1152)
    monkeypatch.setattr(fs, "write_attribute", lambda *_: pytest.fail("a write"))
    with pytest.raises(Exception, match=f"{vf} is held open by process 5000"):
        carver.carve(desk.host.config, [carver.Piece(device, profile)])
    assert desk.claims() == ()


@pytest.mark.promise(4)
def test_what_a_killed_carve_left_comes_back_but_not_while_it_works(desk: Desk) -> None:
    carve(desk, "L40S-8Q=1")
    vf = desk.vfs[0]
    claim = desk.host.claim(vf)
    assert claim is not None
    store.replace(desk.host.paths.state, claim._replace(phase=Phase.CLAIMED))
    kept = reconcile(desk.host).kept
    assert f"the daemon that may start a domain with it, process {os.getpid()}" in kept[0].reason
    desk.host.end(os.getpid())
    assert reconcile(desk.host).released == (vf,)
    assert desk.host.type_of(vf) == "0"


# --- who may have it ---


@pytest.mark.promise(6)
def test_a_domain_that_does_not_ask_may_use_it_and_it_stays(desk: Desk) -> None:
    carve(desk)
    vf, host = desk.vfs[0], desk.host
    before = host.claim(vf)
    xml = run_plain(desk, vf)
    for operation in ("started", "reconnect"):
        assert host.hook(operation, xml) == (0, "", "")
    assert reconcile(host).released == ()
    host.end_domain("web1", 4001)
    for operation in ("stopped", "release"):
        assert host.hook(operation, xml) == (0, "", "")
    assert reconcile(host, active=frozenset(), asked_after=frozenset()).released == ()
    assert host.daemon_hook() == (0, "", "")
    assert host.claim(vf) == before
    assert carved(desk) == desk.vfs[:2]


def test_but_not_two_at_once_and_not_one_without_a_type(desk: Desk) -> None:
    carve(desk)
    vf, host = desk.vfs[0], desk.host
    run_plain(desk, vf)
    other = plain(vf, WEB2, "web2")
    assert "a vGPU in use by the running domain 'web1'" in host.hook("prepare", other).stderr
    host.set_type(desk.vfs[1], 0)
    assert host.hook("prepare", plain(desk.vfs[1], WEB2, "web2")) == (0, "", "")
    refused = host.hook("start", plain(desk.vfs[1], WEB2, "web2"))
    assert "a VF without a vGPU type" in refused.stderr


@pytest.mark.promise(2)
def test_a_domain_that_asks_is_refused_by_name_of_the_carve(desk: Desk) -> None:
    carve(desk)
    vf, host = desk.vfs[0], desk.host
    before = host.tree()
    for xml in (web1(vf), web1(vf, "L40S-4Q")):
        refused = host.hook("prepare", xml)
        assert refused.status == 1
        assert (
            f"{vf} belongs to the administrator's carve: it is carved, for domains that don't ask "
            "for a vGPU, until 'virt-vgpu uncarve'; run 'virt-vgpu sync'"
        ) in refused.stderr
        assert host.hook("release", xml).status == 0
    changed = {path for path, text in host.tree().items() if before.get(path) != text}
    assert not any("/claims/" in path or "current_vgpu_type" in path for path in changed)


def test_sync_points_such_a_definition_elsewhere_and_leaves_plain_hostdevs(desk: Desk) -> None:
    carve(desk)
    first, second, third, _ = desk.vfs
    asks = desk.define(web1(first, number=None))
    both = desk.define(
        domain_xml(
            "web2",
            WEB2,
            {"ua-vgpu0": "L40S-8Q"},
            {"ua-vgpu0": desk.vfs[3], "ua-nova": second},
            number=None,
        )
    )
    done = json.loads(desk.do("sync", "--json"))["repointed"]
    assert [(each["from"], each["to"]) for each in done] == [(first, third)]
    assert pointed(asks) == {"ua-vgpu0": third}
    assert pointed(both) == {"ua-vgpu0": desk.vfs[3], "ua-nova": second}


@pytest.mark.promise(1, 2)
def test_a_live_domain_that_asks_does_not_adopt_it(desk: Desk) -> None:
    carve(desk)
    vf, host = desk.vfs[0], desk.host
    before = host.claim(vf)
    host.run_domain("web1", WEB1, 4001, web1(vf), opens=(host.nodes(vf)[0],))
    reconnected = host.hook("reconnect", web1(vf))
    assert reconnected.status == 0
    assert "in use by domain 'web1', but claimed by the administrator's carve" in reconnected.stderr
    reconcile(host)
    assert host.claim(vf) == before
    (problem,) = see(desk).problems
    assert problem == (
        f"'ua-vgpu0' of the running domain 'web1' ({WEB1}) asks for a vGPU, but has the carved "
        f"{vf}; it gets one of its own at its next start"
    )


@pytest.mark.promise(2)
def test_no_choice_takes_it_and_it_counts_as_used(desk: Desk) -> None:
    before = json.loads(desk.do("profiles", "--json"))
    carve(desk, "L40S-8Q=3")
    after = json.loads(desk.do("profiles", "--json"))
    count = {one["id"]: one["startable"] for one in before}
    assert (count[1152], {o["id"]: o["startable"] for o in after}[1152]) == (4, 1)
    carve(desk, "L40S-8Q=1")
    desk.define(domain_xml("web1", WEB1, number=None))
    said = desk.fails("attach", "web1", "--profile", "L40S-8Q")
    assert f"{GPU} has no free VF (4 VFs carved)" in said


# --- what is shown ---


def test_list_and_status_show_it(desk: Desk) -> None:
    carve(desk)
    first, second, *_ = desk.vfs
    run_plain(desk, first)
    rows = [line.split() for line in desk.do("list").splitlines() if line.startswith("  0000:")]
    assert rows[0] == [first, "NVIDIA", "L40S-8Q", "in-use", "web1", "carved"]
    assert rows[1] == [second, "NVIDIA", "L40S-8Q", "claimed", "carved"]
    said = desk.do("status")
    assert f"{second}  NVIDIA L40S-8Q  carved\n  alive: it is carved, for domains" in said
    assert f"the running domain 'web1' ({WEB1}) has it" in said
    assert "Problems" not in said
    shown = json.loads(desk.do("status", "--json"))
    assert shown["gpus"][0]["devices"][1]["claim"] == {
        "domain_uuid": None,
        "domain_name": None,
        "alias": None,
        "phase": "carved",
    }
    assert shown["gpus"][0]["devices"][1]["state"] == "claimed"
    assert shown["claims"][0]["domain_uuid"] is None


def test_a_cordon_says_that_it_is_still_there(desk: Desk) -> None:
    carve(desk, "L40S-8Q=1")
    assert f"still there: {desk.vfs[0]}" in desk.do("cordon", GPU)


def test_release_says_to_uncarve(desk: Desk) -> None:
    carve(desk, "L40S-8Q=1")
    for options in ((), ("--force",)):
        assert desk.fails("release", desk.vfs[0], *options) == (
            f"{desk.vfs[0]} is kept: it is carved, for domains that don't ask for a vGPU; "
            f"'virt-vgpu uncarve {desk.vfs[0]}' gives it back\n"
        )
    assert carved(desk) == [desk.vfs[0]]


@pytest.mark.promise(1)
def test_a_type_that_somebody_writes_over_it_is_reported_and_left(desk: Desk) -> None:
    carve(desk, "L40S-8Q=1")
    vf = desk.vfs[0]
    for other in (1150, 0):
        desk.host.set_type(vf, other)
        assert reconcile(desk.host).renewed == ()
        assert desk.host.type_of(vf) == str(other)
        (problem,) = see(desk).problems
        assert f"{vf} was given NVIDIA L40S-8Q (1152) for the administrator's carve, but" in problem


# --- after a reboot ---


@pytest.mark.promise(3)
def test_it_is_programmed_again_after_a_reboot(desk: Desk) -> None:
    carve(desk)
    host = desk.host
    before = [claim.claim_id for claim in desk.claims()]
    reboot(host, *desk.vfs)
    host.end(LIBVIRTD)
    (first, second) = desk.vfs[:2]
    problems = see(desk).problems
    assert [p.partition(" is carved as NVIDIA L40S-8Q (1152), but ")[0] for p in problems] == [
        first,
        second,
    ]
    tree = host.tree()
    assert f"{first}, which is carved, would be programmed again." in desk.do(
        "sync", "--files-only", "--dry-run"
    )
    assert host.tree() == tree
    said = desk.do("sync", "--files-only")
    assert f"{first}, which is carved, was programmed again." in said
    assert carved(desk) == [first, second]
    assert [claim.claim_id for claim in desk.claims()] == before
    assert {claim.boot_id for claim in desk.claims()} == {NEXT_BOOT}
    assert see(desk).problems == ()
    assert json.loads(desk.do("sync", "--files-only", "--json"))["renewed"] == []


def test_where_the_driver_refuses_it_says_so_and_the_next_sync_tries_again(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    carve(desk, "L40S-8Q=1")
    vf = desk.vfs[0]
    reboot(desk.host, vf)

    def refuses(_path: str, _text: str) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(fs, "write_attribute", refuses)
        kept = reconcile(desk.host).kept
        assert f"the driver did not put NVIDIA L40S-8Q on {vf}" in kept[0].reason
        assert kept[0].is_doubtful
        (problem,) = see(desk).problems
        assert "hasn't been programmed since the reboot: the driver did not put NVIDIA" in problem
        tree = desk.host.tree()
        reconcile(desk.host)
        assert desk.host.tree() == tree
    assert reconcile(desk.host).renewed == (vf,)
    assert see(desk).problems == ()


@pytest.mark.promise(1)
def test_not_over_a_type_of_somebody_elses(desk: Desk) -> None:
    carve(desk, "L40S-8Q=1")
    vf = desk.vfs[0]
    reboot(desk.host, vf)
    desk.host.set_type(vf, 1150)
    outcome = reconcile(desk.host)
    assert outcome.renewed == ()
    assert "somebody else set it" in outcome.kept[0].reason
    assert desk.host.type_of(vf) == "1150"
    assert any("but has type 1150" in problem for problem in see(desk).problems)


@pytest.mark.promise(1)
@pytest.mark.parametrize("how", ["open", "live", "locked", "excluded"])
def test_nor_while_somebody_has_it(desk: Desk, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    carve(desk, "L40S-8Q=1")
    vf, host = desk.vfs[0], desk.host
    reboot(host, vf)
    monkeypatch.setattr(fs, "write_attribute", lambda *_: pytest.fail("a write"))
    if how == "open":
        host.process(5000, opens=(host.nodes(vf)[1],))
    elif how == "live":
        host.run_domain("web1", WEB1, 4001, plain(vf))
    elif how == "excluded":
        host.set_policy(exclude=(PciAddress.parse(GPU),))
    held: AbstractContextManager[None] = locks.devices(host.paths.state, [vf], 0)
    if how == "locked":
        with held:
            outcome = reconcile(host)
    else:
        outcome = reconcile(host)
    assert outcome.renewed == ()
    assert len(outcome.kept) == 1


@pytest.mark.promise(2)
def test_nor_what_was_given_back_and_taken_meanwhile(desk: Desk) -> None:
    carve(desk, "L40S-8Q=1")
    vf, host = desk.vfs[0], desk.host
    claim = host.claim(vf)
    assert claim is not None
    reboot(host, vf)
    store.drop(host.paths.state, vf)
    with locks.devices(host.paths.state, [vf], 0):
        carver.renew(Context(host.config), claim)
    assert (host.type_of(vf), host.claim(vf)) == ("0", None)


def test_another_driver_numbers_its_types_anew(desk: Desk) -> None:
    carve(desk, "L40S-8Q=1")
    vf = desk.vfs[0]
    reboot(desk.host, vf)
    desk.host.set_list(vf, "ID    : vGPU Name\n1152  : NVIDIA L40S-12Q\n2152  : NVIDIA L40S-8Q\n")
    assert reconcile(desk.host).renewed == (vf,)
    assert desk.host.type_of(vf) == "2152"
    claim = desk.host.claim(vf)
    assert claim is not None
    assert claim.profile.id == 2152


def test_what_the_driver_no_longer_offers_is_a_problem(desk: Desk) -> None:
    carve(desk, "L40S-8Q=1")
    vf = desk.vfs[0]
    reboot(desk.host, vf)
    desk.host.set_list(vf, ONLY_1Q)
    assert "which the driver doesn't offer there now" in reconcile(desk.host).kept[0].reason
    assert desk.host.type_of(vf) == "0"


@pytest.mark.promise(3)
def test_libvirts_start_does_it_where_no_boot_unit_ran(desk: Desk) -> None:
    carve(desk, "L40S-8Q=1")
    reboot(desk.host, desk.vfs[0])
    assert desk.host.daemon_hook() == (0, "", "")
    assert carved(desk) == [desk.vfs[0]]


# --- giving back ---


@pytest.mark.promise(3)
def test_uncarve_clears_and_forgets(desk: Desk) -> None:
    carve(desk, "L40S-8Q=3")
    first, second, third, _ = desk.vfs
    assert desk.do("uncarve", first) == f"{first} is not carved any more.\n"
    assert (desk.host.claim(first), desk.host.type_of(first)) == (None, "0")
    assert carved(desk) == [second, third]
    desk.do("uncarve", GPU)
    assert desk.claims() == ()
    assert {desk.host.type_of(vf) for vf in desk.vfs} == {"0"}


@pytest.mark.promise(1)
def test_what_a_guest_has_stays_and_is_named_and_the_others_go(desk: Desk) -> None:
    carve(desk)
    first, second, *_ = desk.vfs
    run_plain(desk, first)
    before = desk.host.claim(first)
    result = desk.call("uncarve", GPU)
    assert result.exit_code == 1
    assert f"{second} is not carved any more." in result.output
    assert f"error: {first} stays: the running domain 'web1' ({WEB1}) has it" in result.output
    assert desk.host.claim(first) == before
    assert carved(desk) == [first]
    assert desk.host.type_of(second) == "0"


@pytest.mark.promise(1)
def test_a_domain_without_an_open_handle_counts(desk: Desk) -> None:
    carve(desk, "L40S-8Q=1")
    vf = desk.vfs[0]
    desk.host.run_domain("web1", WEB1, 4001, plain(vf))
    result = desk.call("uncarve", vf)
    assert (result.exit_code, desk.host.type_of(vf)) == (1, "1152")
    assert f"{vf} stays: the running domain 'web1' ({WEB1}) has it" in result.output


@pytest.mark.promise(1, 4, 5)
@pytest.mark.parametrize("how", ["open", "inventory", "silence", "unreadable process"])
def test_nor_while_that_cannot_be_told(
    desk: Desk, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    carve(desk, "L40S-8Q=1")
    vf, host = desk.vfs[0], desk.host
    before = host.claim(vf)
    if how == "open":
        host.process(5000, opens=(host.nodes(vf)[1],))
    elif how == "inventory":
        host.write(host.status_file("other"), "<domstatus")
    elif how == "unreadable process":
        host.write(host.proc / "5000" / "fd", "not a directory")
    else:
        monkeypatch.setattr(desk.connection, "listAllDomains", _fails)
    monkeypatch.setattr(fs, "write_attribute", lambda *_: pytest.fail("a write"))
    said = desk.fails("uncarve", vf)
    assert said.startswith(f"{vf} stays: ")
    assert host.claim(vf) == before


def _fails(_flags: int) -> None:
    import libvirt

    raise libvirt.libvirtError("broken")


@pytest.mark.promise(1)
@pytest.mark.parametrize("known", [True, False], ids=["libvirt-knows", "libvirt-does-not"])
def test_a_start_that_passed_prepare_is_seen_by_libvirts_word(desk: Desk, known: bool) -> None:
    """Between `prepare` and QEMU no file shows it; libvirt has it active."""
    carve(desk, "L40S-8Q=1")
    vf, host = desk.vfs[0], desk.host
    assert host.hook("prepare", plain(vf)) == (0, "", "")
    if known:
        desk.define(plain(vf), active=True)
        said = desk.fails("uncarve", vf)
        assert said == (
            f"{vf} stays: libvirt says that domain 'web1' ({WEB1}), which is active, has it\n"
        )
        assert carved(desk) == [vf]
    else:
        desk.do("uncarve", vf)
        assert host.type_of(vf) == "0"


@pytest.mark.promise(1)
def test_from_before_libvirt_is_asked_no_new_start_passes(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    carve(desk, "L40S-8Q=1")
    vf, host = desk.vfs[0], desk.host
    ask = libvirt_api.ask
    seen = []

    def asked(*arguments: object) -> object:
        seen.append(host.hook("prepare", plain(vf)))
        return ask(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(libvirt_api, "ask", asked)
    desk.do("uncarve", vf)
    assert seen[0].status == 3
    assert "a vGPU that belongs to the administrator's carve" in seen[0].stderr


@pytest.mark.promise(8)
def test_no_lock_is_held_while_libvirt_is_asked(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    carve(desk, "L40S-8Q=1")
    state, ask = desk.host.paths.state, libvirt_api.ask

    def asked(*arguments: object) -> object:
        with locks.devices(state, [desk.vfs[0]], 0), locks.host(state, 0):
            return ask(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(libvirt_api, "ask", asked)
    desk.do("uncarve", desk.vfs[0])
    assert desk.claims() == ()


@pytest.mark.promise(4)
def test_a_killed_uncarve_is_finished_once_the_starts_of_then_are_over(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    carve(desk, "L40S-8Q=1")
    vf, host = desk.vfs[0], desk.host
    earlier = frozenset(each.claim_id for each in desk.claims())

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(libvirt_api, "ask", killed)
        assert desk.call("uncarve", vf).exit_code == 130
    claim = host.claim(vf)
    assert claim is not None
    assert (claim.phase, claim.daemon) == (Phase.RELEASE_PENDING, Process(LIBVIRTD, 4242))
    kept = reconcile(host).kept
    assert "the daemon that may start a domain with it, process 811, still runs" in kept[0].reason
    # Who asked before the mark, or only after UUIDs, has nothing to say.
    ids = frozenset([claim.claim_id])
    for answer in (
        {"asked_after": earlier, "devices": {}},
        {"asked_after": ids},
        {"asked_after": ids, "devices": {vf: "domain 'web1'"}},
    ):
        assert reconcile(host, active=frozenset(), **answer).released == ()
    assert host.type_of(vf) == "1152"
    assert f"{vf} was given back." in desk.do("sync")
    assert (host.claim(vf), host.type_of(vf)) == (None, "0")


@pytest.mark.promise(4)
def test_or_by_the_next_uncarve_or_reboot(desk: Desk) -> None:
    carve(desk)
    first, second, *_ = desk.vfs
    for vf in (first, second):
        claim = desk.host.claim(vf)
        assert claim is not None
        pending = claim._replace(
            phase=Phase.RELEASE_PENDING, daemon=Process(LIBVIRTD, 4242), error="busy"
        )
        store.replace(desk.host.paths.state, pending)
    assert desk.do("uncarve", first) == f"{first} is not carved any more.\n"
    reboot(desk.host, second)
    assert reconcile(desk.host).released == (second,)


def test_a_busy_driver_leaves_it_pending_and_sync_tries_again(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    carve(desk, "L40S-8Q=1")
    vf = desk.vfs[0]

    def busy(_path: str, _text: str) -> None:
        raise OSError(16, "Device or resource busy")

    with monkeypatch.context() as patch:
        patch.setattr(fs, "write_attribute", busy)
        said = desk.fails("uncarve", vf)
    assert f"{vf} stays until it can be cleared: the driver did not clear" in said
    claim = desk.host.claim(vf)
    assert claim is not None
    assert claim.phase is Phase.RELEASE_PENDING
    assert f"{vf} was given back." in desk.do("sync")
    assert desk.claims() == ()


@pytest.mark.promise(1)
def test_nobody_elses_type_is_cleared(desk: Desk) -> None:
    carve(desk, "L40S-8Q=1")
    vf = desk.vfs[0]
    desk.host.set_type(vf, 1150)
    assert "not the 1152 that we wrote" in desk.fails("uncarve", vf)
    assert desk.host.type_of(vf) == "1150"


def test_a_device_that_is_gone_can_be_forgotten(desk: Desk) -> None:
    carve(desk, "L40S-8Q=1")
    vf = desk.vfs[0]
    desk.host.pci(vf).rename(desk.host.root / "gone")
    assert "which is not on this host any more; 'virt-vgpu uncarve' drops" in see(desk).problems[0]
    desk.do("uncarve", vf)
    assert desk.claims() == ()


def test_where_no_libvirt_runs_files_are_enough(desk: Desk) -> None:
    carve(desk, "L40S-8Q=1")
    desk.host.end(LIBVIRTD)
    desk.do("uncarve", desk.vfs[0])
    assert desk.claims() == ()


def test_what_is_not_carved_is_said(desk: Desk) -> None:
    first, second, third, _ = desk.vfs
    carve(desk, "L40S-8Q=1")
    assert desk.host.hook("prepare", web1(second)).status == 0
    desk.host.write(desk.host.state / f"claims/{third}.json", "{")
    assert desk.fails("uncarve", "0000:99:00.0") == (
        f"nothing is carved at 0000:99:00.0; carved: {first}\n"
    )
    assert f"it belongs to domain 'web1' ({WEB1}); 'virt-vgpu release'" in desk.fails(
        "uncarve", second
    )
    assert "is not valid JSON" in desk.fails("uncarve", third)


def test_the_verdict_names_what_is_seen(desk: Desk) -> None:
    carve(desk, "L40S-8Q=1")
    seen = look(desk.host.config)
    verdict = seen.verdicts[desk.vfs[0]]
    assert verdict.state is State.ALIVE
    assert verdict.evidence == (
        "it is carved, for domains that don't ask for a vGPU, until 'virt-vgpu uncarve'",
    )


def test_only_vfs_are_carved(desk: Desk) -> None:
    """Another GPU of the host makes mediated devices, and calls the same profile by another id."""
    mdev_gpu = "0000:5e:00.0"
    kind = Type("nvidia-558", "NVIDIA L40S-8Q", "4", None)
    MdevHost(desk.host.root, desk.host.sysfs).parent(mdev_gpu, [kind])
    assert "has no VFs" in desk.fails("carve", "--gpu", mdev_gpu, "L40S-8Q=1")
    carve(desk, "nvidia-558=2")
    assert carved(desk) == desk.vfs[:2]
