# SPDX-License-Identifier: LGPL-2.1-or-later
"""The life of an assignment, hook by hook: who gets a device, who keeps it, how it comes back.

What is said of two domains at one device is said of VFs: a mediated device is one domain's alone.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from tests.unit.gpus import refusing
from tests.unit.host import BOOT, LIBVIRTD, WEB1, WEB2, domain_xml, web1, web2
from vgpu_libvirt import fs
from vgpu_libvirt.claims import inventory
from vgpu_libvirt.claims.model import Phase, Process
from vgpu_libvirt.devices.model import Profile
from vgpu_libvirt.lifecycle.release import give_back

if TYPE_CHECKING:
    from tests.unit.gpus import Gpus
    from tests.unit.host import Host
    from vgpu_libvirt.claims.inventory import LiveDomains
    from vgpu_libvirt.config import Paths


def start(host: Host, device: str, pid: int = 4001) -> str:
    """Play a whole start of web1 on DEVICE; return the XML that its later hooks get."""
    xml = web1(device)
    assert host.hook("prepare", xml).status == 0
    assert host.hook("start", xml).status == 0
    host.run_domain("web1", WEB1, pid, xml, opens=(host.nodes(device)[0],))
    assert host.hook("started", xml) == (0, "", "")
    return xml


@pytest.mark.promise(3)
def test_prepare_claims_and_programs(host: Host, gpus: Gpus) -> None:
    device = gpus.device()
    assert host.hook("prepare", web1(device)) == (0, "", "")
    claim = host.claim(device)
    assert claim is not None
    assert gpus.type_of(device) == 1152
    assert claim.phase is Phase.CONFIGURED
    assert (claim.device, claim.backend, claim.gpu) == (device, gpus.backend, "0000:3d:00.0")
    assert claim.profile == Profile(gpus.id_of(1152), "NVIDIA L40S-8Q")
    assert (claim.domain_uuid, claim.domain_name, claim.domain_id) == (WEB1, "web1", 7)
    assert claim.alias == "ua-vgpu0"
    assert claim.boot_id == BOOT
    assert claim.daemon == Process(LIBVIRTD, 4242)
    assert not claim.adopted


@pytest.mark.promise(3)
def test_the_claim_is_on_disk_before_the_first_write(
    host: Host, gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = gpus.device()
    phases = []
    write = fs.write_attribute

    def watched(path: str, text: str) -> None:
        claim = host.claim(device)
        phases.append(claim and claim.phase)
        write(path, text)

    monkeypatch.setattr(fs, "write_attribute", watched)
    xml = web1(device)
    host.hook("prepare", xml)
    host.hook("release", xml)
    assert phases == [Phase.CLAIMED, Phase.CONFIGURED], "and still there at the last one"


def test_a_profile_may_be_asked_for_by_short_name_or_id(host: Host, gpus: Gpus) -> None:
    first, second = gpus.device(), gpus.device("web2")
    assert host.hook("prepare", web1(first, "L40S-8Q")).status == 0
    assert host.hook("prepare", web2(second, str(gpus.id_of(1152)))).status == 0
    assert gpus.type_of(first) == gpus.type_of(second) == 1152


def test_started_notes_qemu(host: Host, gpus: Gpus) -> None:
    device = gpus.device()
    start(host, device)
    claim = host.claim(device)
    assert claim is not None
    assert claim.phase is Phase.RUNNING
    assert claim.qemu is not None
    assert (claim.qemu.pid, claim.qemu.start) == (4001, 90210)
    assert claim.qemu.monitor.endswith("/domain-7-web1/monitor.sock")


@pytest.mark.promise(3)
def test_a_whole_life_leaves_nothing(host: Host, gpus: Gpus) -> None:
    device = gpus.device()
    xml = start(host, device)
    host.end(4001)
    assert host.hook("stopped", xml) == (0, "", "")
    assert gpus.type_of(device) == 1152, "stopped must not touch the device"
    host.status_file("web1").unlink()
    assert host.hook("release", xml) == (0, "", "")
    assert gpus.type_of(device) == 0
    assert host.claim(device) is None


@pytest.mark.promise(1)
def test_release_comes_twice_and_late(host: Host) -> None:
    vf = host.gpu()[0]
    xml = start(host, vf)
    host.end_domain("web1", 4001)
    assert host.hook("release", xml).status == 0
    assert host.hook("prepare", web2(vf)).status == 0
    assert host.hook("release", xml) == (0, "", "")
    assert host.type_of(vf) == "1152"
    claim = host.claim(vf)
    assert claim is not None
    assert claim.domain_uuid == WEB2


@pytest.mark.promise(1, 2)
def test_a_failed_start_on_anothers_vf_leaves_it_alone(host: Host) -> None:
    vf = host.gpu()[0]
    start(host, vf)
    intruder = web2(vf)
    refused = host.hook("prepare", intruder)
    assert refused.status == 1
    assert f"{vf} belongs to domain 'web1' ({WEB1})" in refused.stderr
    # libvirt runs both after the failure, with the address of web1's VF in the XML
    assert host.hook("stopped", intruder).status == 0
    assert host.hook("release", intruder).status == 0
    assert host.type_of(vf) == "1152"
    claim = host.claim(vf)
    assert claim is not None
    assert (claim.domain_uuid, claim.phase) == (WEB1, Phase.RUNNING)


@pytest.mark.promise(3)
def test_a_start_that_died_after_prepare_gives_the_vf_back(host: Host, gpus: Gpus) -> None:
    device = gpus.device()
    xml = web1(device)
    host.hook("prepare", xml)
    assert host.hook("release", xml).status == 0
    assert gpus.type_of(device) == 0
    assert host.claim(device) is None


@pytest.mark.promise(1, 3)
def test_release_goes_by_the_store_not_by_the_xml(host: Host, gpus: Gpus) -> None:
    device, other = gpus.device(), gpus.device("web2")
    start(host, device)
    host.end_domain("web1", 4001)
    # metadata edited away and the hostdev re-pointed while it ran
    host.hook("release", domain_xml(hostdevs={"ua-x": other}))
    assert gpus.type_of(device) == 0
    assert host.claim(device) is None


def test_release_by_a_renamed_domain(host: Host, gpus: Gpus) -> None:
    device = gpus.device()
    start(host, device)
    host.end_domain("web1", 4001)
    host.hook("release", web1(device, name="renamed"))
    assert host.claim(device) is None


@pytest.mark.promise(1, 4)
def test_release_with_a_living_qemu_keeps_the_vf_visibly(host: Host, gpus: Gpus) -> None:
    device = gpus.device()
    xml = start(host, device)
    host.status_file("web1").unlink()  # old libvirts go on although they could not kill QEMU
    kept = host.hook("release", xml)
    assert kept.status == 0
    assert "held open by process 4001" in kept.stderr
    claim = host.claim(device)
    assert claim is not None
    assert claim.phase is Phase.RELEASE_PENDING
    assert claim.error is not None
    assert gpus.type_of(device) == 1152


@pytest.mark.promise(4)
def test_the_next_start_finishes_a_pending_release(host: Host, gpus: Gpus) -> None:
    device = gpus.device()
    xml = start(host, device)
    host.status_file("web1").unlink()
    host.hook("release", xml)
    host.end(4001)
    before = host.claim(device)
    assert host.hook("prepare", xml).status == 0
    after = host.claim(device)
    assert before is not None
    assert after is not None
    assert after.claim_id != before.claim_id
    assert after.phase is Phase.CONFIGURED


@pytest.mark.promise(1, 4)
def test_a_domain_that_still_lives_is_not_started_again(host: Host, gpus: Gpus) -> None:
    device = gpus.device()
    xml = start(host, device)
    host.status_file("web1").unlink()
    host.hook("release", xml)
    refused = host.hook("prepare", xml)
    assert refused.status == 1
    assert f"domain 'web1' still has {device} from an earlier run" in refused.stderr
    assert gpus.type_of(device) == 1152


@pytest.mark.promise(2, 3)
def test_a_dead_owners_vf_is_taken_over(host: Host) -> None:
    vf = host.gpu()[0]
    start(host, vf)
    host.end_domain("web1", 4001)  # libvirtd died too: no release ever came
    host.end(LIBVIRTD)
    host.process(900, "virtqemud", start=5000)
    assert host.hook("prepare", web2(vf), parent=900) == (0, "", "")
    claim = host.claim(vf)
    assert claim is not None
    assert claim.domain_uuid == WEB2
    assert host.type_of(vf) == "1152"


@pytest.mark.promise(1, 4)
def test_between_prepare_and_qemu_the_daemon_is_the_witness(host: Host) -> None:
    vf = host.gpu()[0]
    host.hook("prepare", web1(vf))
    refused = host.hook("prepare", web2(vf))
    assert refused.status == 1
    assert f"the daemon that started it, process {LIBVIRTD}, still runs" in refused.stderr
    claim = host.claim(vf)
    assert claim is not None
    assert claim.domain_uuid == WEB1


@pytest.mark.promise(1, 4)
def test_an_orphaned_release_proves_nothing(host: Host, gpus: Gpus) -> None:
    device = gpus.device()
    xml = web1(device)
    host.process(900, "libvirtd", start=5000)  # the new daemon is starting web1 now
    assert host.hook("prepare", xml, parent=900).status == 0
    host.end(LIBVIRTD)
    host.process(LIBVIRTD, "sh", start=6000)  # the old daemon's pid is another's by now
    assert host.hook("release", xml, parent=LIBVIRTD).status == 0
    claim = host.claim(device)
    assert claim is not None
    assert gpus.type_of(device) == 1152


@pytest.mark.promise(1)
def test_a_daemon_that_dies_while_an_orphan_looks_around_may_have_left_a_qemu(
    host: Host, gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = gpus.device()
    xml = web1(device)
    host.process(900, "libvirtd", start=5000)
    assert host.hook("prepare", xml, parent=900).status == 0
    look = inventory.live_domains

    def look_just_before_qemu(paths: Paths) -> LiveDomains:
        seen = look(paths)
        host.run_domain("web1", WEB1, 4001, xml)  # it hasn't opened its device yet
        host.end(900)
        return seen

    monkeypatch.setattr(inventory, "live_domains", look_just_before_qemu)
    host.end(LIBVIRTD)
    host.process(LIBVIRTD, "sh", start=6000)
    assert host.hook("release", xml, parent=LIBVIRTD).status == 0
    assert gpus.type_of(device) == 1152


def test_a_hook_behind_a_dispatcher_finds_its_daemon(host: Host, gpus: Gpus) -> None:
    device = gpus.device()
    host.process(850, "dispatcher", start=4300, parent=LIBVIRTD)
    host.process(851, "sh (deleted) x", start=4301, parent=850)
    host.hook("prepare", web1(device), parent=851)
    claim = host.claim(device)
    assert claim is not None
    assert claim.daemon == Process(LIBVIRTD, 4242)


@pytest.mark.promise(4)
def test_without_a_daemon_in_sight_nothing_is_released(host: Host, gpus: Gpus) -> None:
    device = gpus.device()
    host.process(850, "sh", start=4300)
    xml = web1(device)
    assert host.hook("prepare", xml, parent=850).status == 0
    assert "the daemon that started it isn't known" in host.hook("release", xml, parent=850).stderr
    assert gpus.type_of(device) == 1152
    host.write(host.proc / "sys/kernel/random/boot_id", "another boot\n")
    assert host.hook("release", xml, parent=850).stderr == ""
    assert gpus.type_of(device) == 0


@pytest.mark.promise(4)
def test_claims_of_another_boot_are_dead(host: Host) -> None:
    vf = host.gpu()[0]
    start(host, vf)
    host.status_file("web1").unlink()
    host.end(4001)
    host.write(host.proc / "sys/kernel/random/boot_id", "another boot\n")
    host.process(4001, "postgres", start=90210)  # the numbers of the old QEMU, by chance
    host.set_type(vf, 0)
    assert host.hook("prepare", web2(vf)).status == 0


def test_start_refuses_when_the_type_was_changed(host: Host, gpus: Gpus) -> None:
    device = gpus.device()
    xml = web1(device)
    host.hook("prepare", xml)
    gpus.set_type(device, 0)
    refused = host.hook("start", xml)
    assert refused.status == 1
    had = f"{device} had NVIDIA L40S-8Q ({gpus.id_of(1152)}) set for domain 'web1'"
    assert f"{had}, but has type 0" in refused.stderr


def test_start_refuses_without_a_claim(host: Host, gpus: Gpus) -> None:
    device = gpus.device()
    xml = web1(device)
    host.hook("prepare", xml)
    (host.state / "claims" / f"{device}.json").unlink()
    assert (
        "is not claimed for 'ua-vgpu0' of domain 'web1' any more" in host.hook("start", xml).stderr
    )


@pytest.mark.promise(3, 4)
def test_a_rewritten_device_is_kept_at_release(host: Host, gpus: Gpus) -> None:
    device = gpus.device()
    xml = web1(device)
    host.hook("prepare", xml)
    gpus.set_type(device, 1148)
    assert "; somebody else " in host.hook("release", xml).stderr
    assert gpus.type_of(device) == 1148
    claim = host.claim(device)
    assert claim is not None
    assert claim.phase is Phase.RELEASE_PENDING


@pytest.mark.promise(3)
def test_several_devices_are_all_or_nothing(
    host: Host, gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = gpus.device(), gpus.device(alias="ua-vgpu1")
    xml = domain_xml(
        requests={"ua-vgpu0": "L40S-8Q", "ua-vgpu1": "L40S-8Q"},
        hostdevs={"ua-vgpu0": first, "ua-vgpu1": second},
    )
    with monkeypatch.context() as while_it_is_so:
        refusing(while_it_is_so, second)
        refused = host.hook("prepare", xml)
    assert (refused.status, second in refused.stderr) == (1, True)
    assert gpus.type_of(first) == gpus.type_of(second) == 0
    assert host.claim(first) is host.claim(second) is None
    assert host.hook("prepare", xml).status == 0
    assert gpus.type_of(first) == gpus.type_of(second) == 1152


@pytest.mark.promise(2, 7)
def test_reconnect_adopts_a_live_domain_after_the_store_was_lost(host: Host, gpus: Gpus) -> None:
    device = gpus.device()
    xml = start(host, device)
    (host.state / "claims" / f"{device}.json").unlink()
    assert host.hook("reconnect", xml) == (0, "", "")
    claim = host.claim(device)
    assert claim is not None
    assert (claim.adopted, claim.phase, claim.domain_uuid) == (True, Phase.RUNNING, WEB1)
    assert claim.qemu is not None
    assert gpus.type_of(device) == 1152


def test_reconnect_completes_a_claim_whose_started_never_came(host: Host, gpus: Gpus) -> None:
    device = gpus.device()
    xml = web1(device)
    host.hook("prepare", xml)
    host.run_domain("web1", WEB1, 4001, xml, opens=(host.nodes(device)[0],))
    assert host.hook("reconnect", xml) == (0, "", "")
    claim = host.claim(device)
    assert claim is not None
    assert claim.phase is Phase.RUNNING


@pytest.mark.promise(7)
def test_reconnect_never_fails(host: Host, gpus: Gpus) -> None:
    device = gpus.device()
    xml = start(host, device)
    host.write(host.state / "claims" / f"{device}.json", "{")
    assert host.hook("reconnect", xml).status == 0
    host.write(host.root / "config.toml", "[policy]\nplacement = 3\n")
    assert host.hook("reconnect", xml).status == 0
    assert host.hook("release", xml).status == 0


@pytest.mark.promise(1, 3)
def test_a_foreign_type_is_kept_by_default(host: Host, gpus: Gpus) -> None:
    device = gpus.device()
    gpus.set_type(device, 1148)
    refused = host.hook("prepare", web1(device))
    assert refused.status == 1
    has = f"{device} has type {gpus.id_of(1148)}, which vgpu-libvirt didn't set"
    assert has in refused.stderr
    assert gpus.type_of(device) == 1148
    assert host.claim(device) is None


def test_a_foreign_type_is_reset_where_the_policy_says_so(host: Host, gpus: Gpus) -> None:
    device = gpus.device()
    gpus.set_type(device, 1148)
    host.set_policy(foreign="reset")
    assert host.hook("prepare", web1(device)) == (0, "", "")
    assert gpus.type_of(device) == 1152


@pytest.mark.promise(1)
def test_a_foreign_type_that_somebody_uses_is_never_reset(host: Host, gpus: Gpus) -> None:
    device = gpus.device()
    gpus.set_type(device, 1148)
    host.set_policy(foreign="reset")
    host.process(5000, opens=(host.nodes(device)[1],))
    assert f"{device} is held open by process 5000" in host.hook("prepare", web1(device)).stderr
    assert gpus.type_of(device) == 1148
    host.end(5000)
    host.write(host.status_file("broken"), "<domstatus")
    assert "can't be told" in host.hook("prepare", web1(device)).stderr
    assert gpus.type_of(device) == 1148


@pytest.mark.promise(1, 4)
def test_a_process_that_cannot_be_looked_at_stops_a_start(host: Host, gpus: Gpus) -> None:
    device = gpus.device()
    (host.proc / "5000").mkdir()
    (host.proc / "5000/fd").write_text("")
    refused = host.hook("prepare", web1(device))
    assert refused.status == 1
    assert f"whether {device} is in use can't be told: {host.proc}/5000/fd" in refused.stderr
    assert gpus.type_of(device) == 0
    assert host.claim(device) is None


@pytest.mark.promise(1)
def test_a_claim_that_was_replaced_meanwhile_is_not_given_back(host: Host, gpus: Gpus) -> None:
    device = gpus.device()
    xml = web1(device)
    host.hook("prepare", xml)
    old = host.claim(device)
    assert old is not None
    assert host.hook("release", xml).status == 0
    assert host.hook("prepare", xml).status == 0
    new = host.claim(device)
    give_back(host.context(WEB1), old, time.monotonic())
    assert host.claim(device) == new
    assert gpus.type_of(device) == 1152


@pytest.mark.promise(6)
def test_unknown_operations_are_none_of_our_business(host: Host) -> None:
    vf = host.gpu()[0]
    before = host.tree()
    assert host.hook("sleep", web1(vf)) == (0, "", "")
    assert host.tree() == before
