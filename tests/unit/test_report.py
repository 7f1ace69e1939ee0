# SPDX-License-Identifier: LGPL-2.1-or-later
"""What the reading verbs see on a host: states, profiles, problems."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.unit.host import L40S, LIBVIRTD, WEB1, WEB2, web1, web2
from vgpu_libvirt import report
from vgpu_libvirt.address import PciAddress
from vgpu_libvirt.claims import liveness, witnesses
from vgpu_libvirt.claims.handles import Handles
from vgpu_libvirt.devices.model import Profile
from vgpu_libvirt.report import State
from vgpu_libvirt.survey import look

if TYPE_CHECKING:
    from tests.unit.gpus import Gpus
    from tests.unit.host import Host
    from vgpu_libvirt.report import Report

FULL = "ID    : vGPU Name\n"


def see(host: Host) -> Report:
    return report.build(look(host.config))


def state_of(found: Report, name: str) -> State:
    (state,) = (r.state for gpu in found.gpus for r in gpu.devices if r.device.name == name)
    return state


def states(host: Host) -> dict[str, str]:
    return {row.device.name: row.state for gpu in see(host).gpus for row in gpu.devices}


def run_web1(host: Host, device: str) -> None:
    assert host.hook("prepare", web1(device)).status == 0
    if ":" in device:
        host.set_list(device, FULL)
    host.run_domain("web1", WEB1, 4001, web1(device), opens=(host.nodes(device)[0],))
    assert host.hook("started", web1(device)).status == 0


def test_every_state(host: Host) -> None:
    vfs = host.gpu(vfs=8)
    run_web1(host, vfs[0])
    host.hook("prepare", web2(vfs[1]))
    host.set_type(vfs[2], 1152)
    host.process(5000, opens=(host.nodes(vfs[3])[1],))  # open by its cdev, without a type
    host.set_type(vfs[4], 1152)
    host.process(5001, opens=(host.nodes(vfs[4])[0],))
    host.write(host.pci(vfs[5]) / "nvidia/current_vgpu_type", "rubbish\n")
    host.write(host.state / f"claims/{vfs[6]}.json", "{")
    expected = ["in-use", "claimed", "foreign", "in-use", "in-use", "unreadable", "unreadable"]
    assert states(host) == dict(zip(vfs, [*expected, "free"], strict=True))


def test_unreadable_goes_before_in_use(host: Host, gpus: Gpus) -> None:
    device = gpus.device()
    run_web1(host, device)
    assert states(host)[device] == State.IN_USE
    host.write(host.state / f"claims/{device}.json", "{")
    assert states(host)[device] == State.UNREADABLE


def test_a_running_domain_without_a_claim_is_in_use(host: Host, gpus: Gpus) -> None:
    device = gpus.device()
    gpus.set_type(device, 1152)
    host.run_domain("web1", WEB1, 4001, web1(device))
    found = see(host)
    assert state_of(found, device) is State.IN_USE
    told = (
        f"{device} has NVIDIA L40S-8Q (1152) and is in use, but nobody claimed it; it is left "
        "alone",
    )
    assert found.problems == (told if gpus.backend == "vendor-vfio" else ())


def test_a_dead_owner_leaves_a_claimed_device(host: Host, gpus: Gpus) -> None:
    device = gpus.device()
    run_web1(host, device)
    host.end_domain("web1", 4001)
    host.end(LIBVIRTD)
    found = see(host)
    assert state_of(found, device) is State.CLAIMED
    ((_, verdict),) = found.claims
    assert verdict.state is liveness.State.DEAD


def test_a_profile_is_named_by_its_claim_a_list_or_not_at_all(host: Host) -> None:
    first, second, third, _ = host.gpu(lists=FULL)
    host.gpu("0000:5e:00.0")
    host.set_list(first, L40S)
    run_web1(host, first)
    host.set_type(second, 1150)
    host.set_type(third, 77)
    names = [row.profile and row.profile.name for row in see(host).gpus[0].devices]
    assert names == ["NVIDIA L40S-8Q", "NVIDIA L40S-4Q", "type 77", None]


@pytest.mark.parametrize("reset", ["keep", "reset"])
def test_what_nobody_claimed_is_told_with_how_to_end_it(host: Host, gpus: Gpus, reset: str) -> None:
    """But a mediated device that we didn't make is whose knows its UUID: mdevctl's, say."""
    host.set_policy(foreign=reset)
    device = gpus.device()
    gpus.set_type(device, 1152)
    found = see(host)
    assert state_of(found, device) is State.FOREIGN
    told = (
        f"{device} has NVIDIA L40S-8Q (1152), but nobody claimed it and nothing shows it in use; "
        "if it is a leftover, write 0 to its nvidia/current_vgpu_type, or set foreign = "
        '"reset" in [policy]',
    )
    assert found.problems == (told if gpus.backend == "vendor-vfio" else ())


def test_a_type_that_is_not_the_claims(host: Host) -> None:
    vf = host.gpu()[0]
    run_web1(host, vf)
    host.set_type(vf, 1150)
    found = see(host)
    assert found.gpus[0].devices[0].profile == Profile(1150, "NVIDIA L40S-4Q")
    assert found.problems == (
        f"{vf} was given NVIDIA L40S-8Q (1152) for domain 'web1' ({WEB1}), but has type 1150 now: "
        "somebody else writes to it",
    )
    host.set_type(vf, 0)
    assert "but has no type now" in see(host).problems[0]


def test_a_claim_that_waits_to_be_given_back(host: Host, gpus: Gpus) -> None:
    device = gpus.device()
    run_web1(host, device)
    assert host.hook("release", web1(device)).status == 0
    (problem,) = see(host).problems
    assert problem.startswith(f"{device} waits to be given back by domain 'web1' ({WEB1}): ")
    assert "held open by process 4001" in problem


def test_claims_on_devices_that_are_not_there(host: Host) -> None:
    gone, excluded, plain, bad = host.gpu()
    for vf in (gone, excluded, plain):
        host.hook("prepare", web1(vf))
        os.rename(host.state / f"claims/{vf}.json", host.state / f"{vf}.json")
    for vf in (gone, excluded, plain):
        os.rename(host.state / f"{vf}.json", host.state / f"claims/{vf}.json")
    host.write(host.state / f"claims/{bad}.json", "{")
    os.rename(host.pci(gone), host.root / "gone")
    os.rename(host.pci(bad), host.root / "bad")
    os.rename(host.pci(plain) / "nvidia", host.root / "nvidia")
    host.set_policy(exclude=(PciAddress.parse(excluded),))
    ends = [
        problem.partition(f"web1' ({WEB1}) has a claim on ")[2] for problem in see(host).problems
    ]
    goes = "; the claim goes once the domain is provably dead"
    assert ends[-4:-1] == [
        f"{gone}, which is not on this host any more{goes}",
        f"{excluded}, which [policy] in the configuration excludes{goes}",
        f"{plain}, which is no VF of a vGPU-capable GPU any more{goes}",
    ]
    assert see(host).problems[-1] == (
        f"an unreadable claim is on {bad}, which is not on this host any more"
    )


def test_unreadable_things_are_problems(host: Host) -> None:
    first, second, *_ = host.gpu()
    host.write(host.pci(first) / "nvidia/creatable_vgpu_types", "no table\n")
    host.write(host.state / f"claims/{second}.json", "{")
    host.write(host.status_file("web9"), "<domstatus")
    problems = "\n".join(see(host).problems)
    assert "creatable_vgpu_types can't be understood: line 'no table'" in problems
    assert f"claims/{second}.json is not valid JSON" in problems
    assert f"the status file {host.status_file('web9')} can't be understood" in problems


def test_unreadable_processes_are_one_sentence(host: Host) -> None:
    host.gpu()
    survey = look(host.config)
    unknown = [f"{host.proc}/{pid}/fd can't be read: permission denied" for pid in range(10, 322)]
    unknown.append(f"{host.proc}/10/fd/3 can't be read: permission denied")
    world = survey.world._replace(handles=Handles({}, tuple(unknown)))
    assert report.build(survey._replace(world=world)).problems == (
        "the open files of 312 processes can't be read, so devices in use may look free; run as "
        "root to see them",
    )


def test_a_store_that_cannot_be_listed_hides_every_owner(host: Host) -> None:
    vfs = host.gpu()
    host.write(host.state / "claims", "a file where a directory should be")
    assert states(host) == dict.fromkeys(vfs, State.UNREADABLE)
    assert len(see(host).problems) == 1
    assert all(one.startable == 0 for one in report.capacities(look(host.config)))


def test_json_has_the_uuid_of_what_is_mediated(host: Host, gpus: Gpus) -> None:
    device = gpus.device()
    run_web1(host, device)
    (gpu,) = report.status_json(see(host))["gpus"]
    assert (gpu["address"], gpu["backend"]) == ("0000:3d:00.0", gpus.backend)
    used, free = (
        next(each for each in gpu["devices"] if bool(each["claim"]) is taken)
        for taken in (True, False)
    )
    owner = {"domain_uuid": WEB1, "domain_name": "web1", "alias": "ua-vgpu0", "phase": "running"}
    profile = {"id": gpus.id_of(1152), "name": "NVIDIA L40S-8Q"}
    shared = {"address": used["address"], "profile": profile, "state": "in-use", "claim": owner}
    uuid = {"vendor-vfio": ({}, {}), "mdev": ({"uuid": device}, {"uuid": None})}[gpus.backend]
    assert used == {**shared, **uuid[0]}
    empty = {"address": free["address"], "profile": None, "state": "free", "claim": None}
    assert free == {**empty, **uuid[1]}
    assert {used["address"], free["address"]} <= set(gpus.places)


def test_an_excluded_gpu_is_not_shown(host: Host) -> None:
    host.gpu()
    host.gpu("0000:5e:00.0")
    host.set_policy(exclude=(PciAddress.parse("0000:3d:00.0"),))
    assert [str(row.gpu.address) for row in see(host).gpus] == ["0000:5e:00.0"]


def test_one_look_at_the_processes_for_many_devices(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = []
    real = witnesses.look_around
    monkeypatch.setattr(witnesses, "look_around", lambda *given: looks.append(1) or real(*given))
    for vf in host.gpu(vfs=4):
        host.hook("prepare", web1(vf))
    looks.clear()
    report.capacities(look(host.config))
    assert looks == [1]


def test_capacity_of_a_gpu_that_a_claim_fills(host: Host) -> None:
    first, *others = host.gpu()
    assert host.hook("prepare", web1(first, "L40S-48Q")).status == 0
    for vf in (first, *others):
        host.set_list(vf, FULL)
    assert report.profiles_json(report.capacities(look(host.config))) == [
        {
            "id": 1156,
            "name": "NVIDIA L40S-48Q",
            "gpu": "0000:3d:00.0",
            "startable": 0,
            "framebuffer_mib": 49152,
        }
    ]


def test_looking_writes_nothing(host: Host, gpus: Gpus) -> None:
    run_web1(host, gpus.device())
    before = host.tree()
    see(host)
    report.capacities(look(host.config))
    assert host.tree() == before


def test_a_host_without_a_store_stays_without(host: Host) -> None:
    host.gpu()
    assert see(host).problems == ()
    assert not Path(host.state).exists()


def test_web2_is_not_web1(host: Host, gpus: Gpus) -> None:
    """Two owners on one GPU are told apart."""
    first, second = gpus.device(), gpus.device("web2")
    run_web1(host, first)
    host.hook("prepare", web2(second))
    rows = see(host).gpus[0].devices
    owners = {row.device.name: row.claim.domain_uuid for row in rows if row.claim}
    assert owners == {first: WEB1, second: WEB2}
    assert len(rows) == 4


def test_what_a_start_would_clear_can_be_chosen(host: Host) -> None:
    dead, alive, foreign, used = host.gpu()
    run_web1(host, dead)
    assert host.hook("prepare", web2(alive)).status == 0
    for vf in (foreign, used):
        host.set_type(vf, 1152)
    host.process(5000, opens=(host.nodes(used)[0],))
    assert look(host.config).host.dirty == frozenset()
    host.end_domain("web1", 4001)
    assert look(host.config).host.dirty == {dead}
    host.set_policy(foreign="reset")
    assert look(host.config).host.dirty == {dead, foreign}
    host.set_type(dead, 1150)
    assert look(host.config).host.dirty == {foreign}, "somebody else wrote there"
    host.write(host.status_file("web9"), "<domstatus")
    assert look(host.config).host.dirty == frozenset()
