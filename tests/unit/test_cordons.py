# SPDX-License-Identifier: LGPL-2.1-or-later
"""Cordons: nothing new there, who runs there stays, and a damaged one stops nobody."""

from __future__ import annotations

import json
import os
import threading
import time
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from tests.unit.host import WEB1, domain_xml, web1, web2
from tests.unit.mdev_host import A2, MdevHost
from tests.unit.test_lifecycle import start
from vgpu_libvirt import report
from vgpu_libvirt.address import PciAddress
from vgpu_libvirt.claims import cordons, locks
from vgpu_libvirt.claims.cordons import Cordon
from vgpu_libvirt.cli.main import main
from vgpu_libvirt.devices.mdev_life import mdev_uuid
from vgpu_libvirt.errors import CordonError
from vgpu_libvirt.survey import look

if TYPE_CHECKING:
    from click.testing import Result

    from tests.unit.host import Host

GPU = "0000:3d:00.0"
PF = PciAddress.parse(GPU)


def call(host: Host, *arguments: str, **more: str) -> Result:
    return CliRunner().invoke(
        main, arguments, env={**host.environment, "SUDO_USER": "ann", **more}, prog_name="virt-vgpu"
    )


def do(host: Host, *arguments: str) -> str:
    result = call(host, *arguments)
    assert (result.exit_code, result.exception) == (0, None), result.output
    return result.output


def test_a_gpu_is_drained_and_used_again(host: Host) -> None:
    first, second, *_ = host.gpu()
    xml = start(host, first)
    day = time.strftime("%Y-%m-%d")
    said = do(host, "cordon", GPU, "--reason", "driver upgrade")
    assert said == f"{GPU} is cordoned by ann, {day}: driver upgrade; still there: web1.\n"
    refused = host.hook("prepare", web2(second))
    assert refused.status == 1
    assert f"of GPU {GPU}, which is cordoned (by ann, {day}: driver upgrade)" in refused.stderr
    assert host.claim(second) is None
    assert host.hook("start", xml) == (0, "", "")
    host.end_domain("web1", 4001)
    assert host.hook("release", xml) == (0, "", "")
    assert "nobody is there any more" in do(host, "list")
    assert do(host, "uncordon", GPU) == f"{GPU} is not cordoned any more.\n"
    assert host.hook("prepare", web2(second)) == (0, "", "")


def test_list_shows_it(host: Host) -> None:
    vfs = host.gpu()
    host.gpu("0000:5e:00.0")
    start(host, vfs[0])
    do(host, "cordon", GPU)
    do(host, "cordon", "0000:5E:00.5")
    text = do(host, "list")
    day = time.strftime("%Y-%m-%d")
    assert f"\n  cordoned by ann, {day}; still there: web1\n" in text
    assert "  0000:5e:00.5                  free, cordoned\n" in text
    gpus = json.loads(do(host, "list", "--json"))["gpus"]
    assert [gpu.get("cordoned") for gpu in gpus] == [True, None]
    assert [device.get("cordoned") for device in gpus[1]["devices"]] == [None, True, None, None]
    assert {device["state"] for device in gpus[1]["devices"]} == {"free"}
    assert f"cordoned by ann, {day}." in do(host, "profiles")
    small = [one for one in report.capacities(look(host.config)) if one.profile.id == 1145]
    assert [(str(one.gpu.address), one.startable) for one in small] == [
        (GPU, 0),
        ("0000:5e:00.0", 3),
    ]


def test_a_cordon_is_written_anew(host: Host) -> None:
    host.gpu()
    do(host, "cordon", GPU, "--reason", "one")
    do(host, "cordon", GPU, "--reason", "another")
    assert cordons.read_all(host.paths.state).held[0].reason == "another"


@pytest.mark.promise(9)
def test_dry_runs_write_nothing(host: Host) -> None:
    host.gpu()
    before = host.tree()
    assert "would be cordoned by ann" in do(host, "cordon", GPU, "--dry-run")
    assert host.tree() == before
    do(host, "cordon", GPU)
    before = host.tree()
    assert do(host, "uncordon", GPU, "--dry-run") == f"{GPU} would not be cordoned any more.\n"
    assert host.tree() == before


@pytest.mark.parametrize("target", ["0000:00:1f.3", "0000:77:00.0"])
def test_only_gpus_and_their_vfs(host: Host, target: str) -> None:
    host.gpu()
    host.pci("0000:00:1f.3").mkdir()
    result = call(host, "cordon", target)
    assert (result.exit_code, result.output.count("\n")) == (1, 1)
    assert f"{target} is neither a GPU with VFs nor one of its VFs" in result.output


def test_what_is_excluded_is_not_ours_to_cordon(host: Host) -> None:
    vf = host.gpu()[0]
    host.set_policy(exclude=(PF,))
    assert f"{GPU} is excluded by [policy]" in call(host, "cordon", vf).output


def test_a_gpu_whose_vfs_are_gone_can_be_uncordoned(host: Host) -> None:
    host.gpu()
    do(host, "cordon", GPU)
    os.rename(host.sysfs, host.root / "gone")
    do(host, "uncordon", GPU)
    result = call(host, "uncordon", GPU)
    assert result.exit_code == 1
    assert f"{GPU} itself is not cordoned; cordoned: nothing" in result.output


@pytest.mark.parametrize("arguments", [["cordon"], ["cordon", "3d:00.0"], ["uncordon", "gpu0"]])
def test_wrong_usage(host: Host, arguments: list[str]) -> None:
    assert call(host, *arguments).exit_code == 2


def test_a_reason_is_one_line(host: Host) -> None:
    host.gpu()
    assert call(host, "cordon", GPU, "--reason", "one\ntwo").exit_code == 2


def test_who_has_no_name_is_a_number(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    host.gpu()
    monkeypatch.setattr(os, "getuid", lambda: 123456789)
    call(host, "cordon", GPU, SUDO_USER="")
    assert cordons.read_all(host.paths.state).held[0].by == "user 123456789"


@pytest.mark.promise(2)
def test_a_start_that_passed_the_first_look_meets_the_cordon_under_the_lock(host: Host) -> None:
    vf = host.gpu()[0]
    results = []
    with locks.host(host.paths.state, time.monotonic() + 5):
        thread = threading.Thread(target=lambda: results.append(host.hook("prepare", web1(vf))))
        thread.start()
        held = host.state / "locks" / vf
        while not held.exists():  # it has looked for cordons, and will wait for the lock we hold
            time.sleep(0.01)
        cordons.write(host.paths.state, Cordon(PF, "root", 1789992000.0))
    thread.join()
    assert results[0].status == 1
    assert "which is cordoned (by root, 2026-09-21)" in results[0].stderr
    assert (host.claim(vf), host.type_of(vf)) == (None, "0")


GOOD = {"version": 1, "target": GPU, "by": "root", "since": 1789992000.0, "reason": None}


def test_it_is_as_it_was_written(host: Host) -> None:
    for reason in (None, "why: «so»"):
        cordon = Cordon(PF, "root", 1789992000.0, reason)
        cordons.write(host.paths.state, cordon)
        assert cordons.read(host.paths.state, PF) == cordon
    assert cordons.remove(host.paths.state, PF)
    assert not cordons.remove(host.paths.state, PF)


@pytest.mark.promise(5, 6)
@pytest.mark.parametrize(
    "spoilt",
    [
        "",
        "[]",
        "[" * 100_000,
        json.dumps({**GOOD, "version": 2}),
        json.dumps({**GOOD, "target": "0000:5e:00.0"}),
        json.dumps({**GOOD, "by": None}),
        json.dumps({**GOOD, "by": "a\nb"}),
        json.dumps({**GOOD, "since": "now"}),
        json.dumps({**GOOD, "since": 1e30}),
        json.dumps({**GOOD, "since": True}),
        json.dumps(GOOD).replace("1789992000.0", "NaN"),
        json.dumps({**GOOD, "reason": 7}),
        json.dumps({**GOOD, "more": 7}),
    ],
)
def test_a_damaged_one_is_reported_and_stops_no_start(host: Host, spoilt: str) -> None:
    vf = host.gpu()[0]
    host.write(host.state / f"cordons/{GPU}.json", spoilt)
    with pytest.raises(CordonError):
        cordons.read(host.paths.state, PF)
    (problem,) = report.build(look(host.config)).problems
    assert f"cordons/{GPU}.json can't be understood: " in problem
    assert f"{GPU} is not cordoned until it is cordoned anew" in problem
    assert host.hook("prepare", web1(vf)) == (0, "", "")
    do(host, "cordon", GPU)
    assert host.hook("prepare", web1(vf, uuid=WEB1)).status == 1


@pytest.mark.promise(5)
def test_what_is_no_cordon_is_reported(host: Host) -> None:
    host.gpu()
    host.write(host.state / "cordons/notes", "")
    host.write(host.state / "cordons/0000:3D:00.0.json", "")
    (host.state / f"cordons/{GPU}.json").mkdir()
    problems = report.build(look(host.config)).problems
    assert [problem.rpartition("/")[2] for problem in problems] == [
        "0000:3D:00.0.json is not a cordon; move it elsewhere",
        f"{GPU}.json can't be read: is a directory; {GPU} is not cordoned until it is cordoned "
        "anew",
        "notes is not a cordon; move it elsewhere",
    ]


@pytest.mark.promise(6)
def test_cordons_that_cannot_be_listed_are_one_problem(host: Host) -> None:
    vf = host.gpu()[0]
    host.write(host.state / "cordons", "a file")
    assert "the cordons in" in report.build(look(host.config)).problems[0]
    assert host.hook("prepare", web1(vf)) == (0, "", "")


@pytest.mark.parametrize("target", ["0000:08:00.0", "0000:08:01.7"])
def test_a_gpu_that_gives_mediated_devices_is_drained_too(host: Host, target: str) -> None:
    MdevHost(host.root, host.sysfs).parent("0000:08:01.7", A2, gpu="0000:08:00.0")
    do(host, "cordon", target)
    request = domain_xml(requests={"ua-vgpu0": "A2-4Q"})
    uuid = mdev_uuid(WEB1, "ua-vgpu0")
    hostdev = (
        f"<hostdev mode='subsystem' type='mdev' model='vfio-pci'><source><address uuid='{uuid}'/>"
        "</source><alias name='ua-vgpu0'/></hostdev></devices>"
    )
    answer = host.hook("prepare", request.replace("</devices>", hostdev))
    assert answer.status == 1
    assert "no device for A2-4Q: 0000:08:00.0 " in answer.stderr
    assert "cordoned" in answer.stderr
    do(host, "uncordon", target)
