# SPDX-License-Identifier: LGPL-2.1-or-later
"""Reconcile: what is provably nobody's comes back, the rest stays, what runs is adopted."""

from __future__ import annotations

import contextlib
import json
import time
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from tests.unit.host import LIBVIRTD, WEB1, WEB2, domain_xml, web1, web2
from tests.unit.test_lifecycle import start
from vgpu_libvirt import sync
from vgpu_libvirt.claims import locks
from vgpu_libvirt.claims.liveness import Answer
from vgpu_libvirt.claims.model import Phase
from vgpu_libvirt.cli.main import main as virt_vgpu
from vgpu_libvirt.lifecycle.context import Context

if TYPE_CHECKING:
    from tests.unit.gpus import Gpus
    from tests.unit.host import Host


def reconcile(host: Host, dry_run: bool = False, **answer: object) -> sync.Outcome:
    libvirt = Answer(**answer) if answer else None  # type: ignore[arg-type]
    context = Context(host.config, libvirt=libvirt)
    return sync.reconcile(context, time.monotonic() + 5, dry_run)


def claim_ids(host: Host) -> frozenset[str]:
    return frozenset(
        json.loads(path.read_text())["claim_id"] for path in (host.state / "claims").iterdir()
    )


def test_nothing_to_do(host: Host, gpus: Gpus) -> None:
    assert gpus.places
    assert reconcile(host) == ((), (), (), ())


@pytest.mark.promise(3)
def test_a_dead_domains_device_comes_back(host: Host, gpus: Gpus) -> None:
    device = gpus.device()
    start(host, device)
    host.end_domain("web1", 4001)
    assert reconcile(host).released == (device,)
    assert gpus.type_of(device) == 0
    assert host.claim(device) is None


@pytest.mark.promise(9)
def test_a_dry_run_says_so_and_writes_nothing(host: Host, gpus: Gpus) -> None:
    device = gpus.device()
    start(host, device)
    host.end_domain("web1", 4001)
    before = host.tree()
    assert reconcile(host, dry_run=True).released == (device,)
    assert host.tree() == before


@pytest.mark.promise(1)
def test_a_live_domains_device_stays_and_a_second_run_changes_nothing(
    host: Host, gpus: Gpus
) -> None:
    device = gpus.device()
    start(host, device)
    for _ in range(2):
        before = host.tree()
        outcome = reconcile(host)
        assert outcome.released == ()
        assert [(kept.device, kept.is_doubtful) for kept in outcome.kept] == [(device, False)]
        assert host.tree() == before


@pytest.mark.promise(1, 4)
def test_between_prepare_and_qemu_nothing_is_taken(host: Host, gpus: Gpus) -> None:
    device = gpus.device()
    host.hook("prepare", web1(device))
    outcome = reconcile(host)
    assert outcome.released == ()
    assert "the daemon that started it, process 811, still runs" in outcome.kept[0].reason
    assert gpus.type_of(device) == 1152


@pytest.mark.promise(4)
def test_nor_where_libvirt_is_silent(host: Host, gpus: Gpus) -> None:
    device = gpus.device()
    start(host, device)
    host.end_domain("web1", 4001)
    outcome = reconcile(host, active=frozenset(), asked_after=claim_ids(host), silence="no answer")
    assert outcome.released == ()
    assert "no answer" in outcome.kept[0].reason


@pytest.mark.promise(4)
def test_libvirts_word_ends_a_start_that_came_to_nothing(host: Host, gpus: Gpus) -> None:
    device = gpus.device()
    host.hook("prepare", web1(device))
    asked = claim_ids(host)
    assert reconcile(host, active=frozenset([WEB1]), asked_after=asked).released == ()
    assert reconcile(host, active=frozenset([WEB2]), asked_after=asked).released == (device,)
    assert gpus.type_of(device) == 0


@pytest.mark.promise(1, 4)
def test_libvirts_word_says_nothing_about_a_later_claim(host: Host, gpus: Gpus) -> None:
    device = gpus.device()
    host.hook("prepare", web1(device))
    outcome = reconcile(host, active=frozenset(), asked_after=frozenset(["an older claim"]))
    assert outcome.released == ()
    assert gpus.type_of(device) == 1152


@pytest.mark.promise(1, 4)
def test_libvirts_word_does_not_kill_a_qemu_that_lives(host: Host, gpus: Gpus) -> None:
    device = gpus.device()
    start(host, device)
    host.status_file("web1").unlink()
    outcome = reconcile(host, active=frozenset(), asked_after=claim_ids(host))
    assert outcome.released == ()
    assert "held open by process 4001" in outcome.kept[0].reason


@pytest.mark.promise(5)
def test_an_incomplete_inventory_stops_every_release(host: Host) -> None:
    vf = host.gpu()[0]
    start(host, vf)
    host.end_domain("web1", 4001)
    host.write(host.status_file("other"), "<domstatus")
    outcome = reconcile(host)
    assert outcome.released == ()
    assert str(host.status_file("other")) in outcome.kept[0].reason
    host.status_file("other").unlink()
    assert reconcile(host).released == (vf,)


@pytest.mark.promise(4)
def test_a_pending_release_is_finished(host: Host, gpus: Gpus) -> None:
    device = gpus.device()
    xml = start(host, device)
    host.status_file("web1").unlink()
    host.hook("release", xml)
    assert reconcile(host).kept[0].is_doubtful
    host.end(4001)
    assert reconcile(host).released == (device,)


@pytest.mark.promise(4)
def test_a_reservation_lapses_but_not_before_its_time(host: Host, gpus: Gpus) -> None:
    device = gpus.device()
    host.hook("prepare", web1(device))
    path = host.state / "claims" / f"{device}.json"
    reserved = {**json.loads(path.read_text()), "phase": "reserved"}
    path.write_text(json.dumps(reserved))
    assert reconcile(host).released == ()
    path.write_text(json.dumps({**reserved, "since_boot": reserved["since_boot"] - 61}))
    assert reconcile(host).released == (device,)


@pytest.mark.promise(4)
def test_a_reboot_ends_all_claims(host: Host, gpus: Gpus) -> None:
    first, second = gpus.device(), gpus.device("web2")
    start(host, first)
    host.hook("prepare", web2(second))
    host.end_domain("web1", 4001)
    host.write(host.proc / "sys/kernel/random/boot_id", "another boot\n")
    for device in (first, second):
        gpus.set_type(device, 0)
    assert set(reconcile(host).released) == {first, second}


@pytest.mark.promise(1, 4)
def test_what_a_living_domain_let_go_comes_back(host: Host, gpus: Gpus) -> None:
    first, second = gpus.device(), gpus.device(alias="ua-vgpu1")
    xml = domain_xml(
        requests={"ua-vgpu0": "L40S-8Q", "ua-vgpu1": "L40S-8Q"},
        hostdevs={"ua-vgpu0": first, "ua-vgpu1": second},
    )
    host.hook("prepare", xml)
    opens = (host.nodes(first)[0], host.nodes(second)[0])
    host.run_domain("web1", WEB1, 4001, xml, opens=opens)
    host.hook("started", xml)
    host.end(4001)
    host.run_domain("web1", WEB1, 4001, web1(first), opens=opens)
    assert reconcile(host).released == (), "QEMU still has it open"
    host.end(4001)
    host.run_domain("web1", WEB1, 4001, web1(first), opens=opens[:1])
    assert reconcile(host).released == (second,)
    assert gpus.type_of(first) == 1152


@pytest.mark.promise(1, 2)
def test_a_dead_claim_on_a_live_strangers_device_goes_without_a_write(host: Host) -> None:
    vf = host.gpu()[0]
    start(host, vf)
    host.end_domain("web1", 4001)
    host.run_domain("web2", WEB2, 4002, web2(vf), opens=(host.nodes(vf)[0],), number=8)
    assert reconcile(host).released == (vf,)
    assert host.type_of(vf) == "1152"
    claim = host.claim(vf)
    assert claim is not None
    assert (claim.domain_uuid, claim.adopted) == (WEB2, True)


@pytest.mark.promise(1)
def test_an_empty_store_adopts_and_never_clears(host: Host, gpus: Gpus) -> None:
    first, second = gpus.device(), gpus.device("web2")
    start(host, first)
    gpus.set_type(second, 1148)
    (host.state / "claims" / f"{first}.json").unlink()
    assert reconcile(host).released == ()
    claim = host.claim(first)
    assert claim is not None
    assert (claim.adopted, claim.phase) == (True, Phase.RUNNING)
    assert gpus.type_of(first) == 1152
    assert gpus.type_of(second) == 1148, "foreign"


def test_a_vf_that_is_gone_takes_its_claim_along(host: Host) -> None:
    vf = host.gpu()[0]
    start(host, vf)
    host.end_domain("web1", 4001)
    host.pci(vf).rename(host.root / "gone")
    assert reconcile(host).released == (vf,)
    assert host.claim(vf) is None


@pytest.mark.promise(3, 4)
def test_a_vf_whose_driver_is_gone_keeps_it(host: Host) -> None:
    vf = host.gpu()[0]
    start(host, vf)
    host.end_domain("web1", 4001)
    (host.pci(vf) / "nvidia").rename(host.root / "gone")
    assert reconcile(host).released == ()
    claim = host.claim(vf)
    assert claim is not None
    assert claim.phase is Phase.RELEASE_PENDING


@pytest.mark.promise(2)
def test_a_device_at_which_somebody_works_is_left_to_them(host: Host, gpus: Gpus) -> None:
    device = gpus.device()
    start(host, device)
    host.end_domain("web1", 4001)
    with locks.devices(host.paths.state, [device], time.monotonic()):
        outcome = reconcile(host)
    assert outcome.released == ()
    assert outcome.kept[0].reason == "somebody is at work on it just now"


def test_what_was_given_back_is_told_though_the_host_lock_is_held_afterwards(
    host: Host, gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = gpus.device()
    start(host, device)
    host.end_domain("web1", 4001)
    host.set_policy(lock_timeout=0.2)
    with contextlib.ExitStack() as held:
        give_back = sync.give_back

        def then_lock(*arguments: object) -> None:
            give_back(*arguments)  # type: ignore[arg-type]
            held.enter_context(locks.host(host.paths.state, time.monotonic()))

        monkeypatch.setattr(sync, "give_back", then_lock)
        outcome = reconcile(host)
    assert outcome.released == (device,)
    assert any("is held by somebody else" in problem for problem in outcome.problems)


@pytest.mark.promise(5)
def test_an_unreadable_claim_is_reported_and_protects_its_device(host: Host, gpus: Gpus) -> None:
    first, second = gpus.device(), gpus.device("web2")
    start(host, first)
    host.end_domain("web1", 4001)
    path = host.write(host.state / "claims" / f"{second}.json", "{}")
    outcome = reconcile(host)
    assert outcome.released == (first,)
    assert [kept.device for kept in outcome.kept] == [second]
    assert str(path) in outcome.kept[0].reason


def test_libvirt_starts_and_hooks_daemon_reconciles(host: Host, gpus: Gpus) -> None:
    device = gpus.device()
    start(host, device)
    host.end_domain("web1", 4001)
    assert host.daemon_hook(parent=LIBVIRTD) == (0, "", "")
    assert host.claim(device) is None


def test_other_daemons_of_libvirts_do_not(host: Host, gpus: Gpus) -> None:
    device = gpus.device()
    start(host, device)
    host.end_domain("web1", 4001)
    host.process(820, "virtnetworkd", start=4300)
    assert host.daemon_hook(parent=820) == (0, "", "")
    assert host.claim(device) is not None


@pytest.mark.promise(7)
def test_hooks_daemon_never_fails(host: Host) -> None:
    host.write(host.root / "config.toml", "[policy\n")
    done = host.daemon_hook(parent=LIBVIRTD)
    assert done.status == 0
    assert "is not valid TOML" in done.stderr
    host.write_config()
    host.write(host.state, "no directory")
    assert host.daemon_hook(parent=LIBVIRTD).status == 0


def run_verb(host: Host, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, str]:
    for name, value in host.environment.items():
        monkeypatch.setenv(name, value)
    done = CliRunner().invoke(virt_vgpu, arguments)
    return done.exit_code, done.output


@pytest.mark.promise(9)
def test_the_verb_sync(host: Host, gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    device, other = gpus.device(), gpus.device("web2")
    start(host, device)
    host.end_domain("web1", 4001)
    host.end(LIBVIRTD)
    host.write(host.state / "claims" / f"{other}.json", "{}")
    status, dry = run_verb(host, monkeypatch, "sync", "--dry-run")
    assert status == 0
    assert f"{device} would be given back." in dry
    status, text = run_verb(host, monkeypatch, "sync", "--json")
    assert status == 0
    answer = json.loads(text)
    assert answer["released"] == [device]
    assert answer["repointed"] == []
    assert [kept["device"] for kept in answer["kept"]] == [other]
    assert any(str(host.state / "claims" / f"{other}.json") in each for each in answer["problems"])


@pytest.mark.promise(1, 9)
def test_the_verb_release(host: Host, gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    device, other = gpus.device(), gpus.device("web2")
    start(host, device)
    host.end(LIBVIRTD)
    status, text = run_verb(host, monkeypatch, "release", device)
    assert status == 1
    assert f"{device} is kept: domain 'web1' ({WEB1}) is alive: libvirt has it running" in text
    assert gpus.type_of(device) == 1152
    host.end_domain("web1", 4001)
    assert run_verb(host, monkeypatch, "release", device, "--dry-run")[0] == 0
    assert gpus.type_of(device) == 1152
    status, text = run_verb(host, monkeypatch, "release", device.upper())
    assert status == 0
    assert f"{device} was given back" in text
    assert gpus.type_of(device) == 0
    assert run_verb(host, monkeypatch, "release", other)[0] == 1
