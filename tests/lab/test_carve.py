# SPDX-License-Identifier: LGPL-2.1-or-later
"""VFs carved for a stack that gives them to domains itself, with a real libvirt and QEMU."""

from __future__ import annotations

import json
import re

import pytest

from tests.lab.guest import (
    OTHER_GPU_VF,
    PROFILE_ID,
    assert_free,
    claim,
    define,
    holds,
    in_background,
    is_there,
    refused,
    restart_libvirtd,
    run,
    slow,
    start,
    type_of,
    until,
    virsh,
    writes_to,
)
from tests.lab.test_cli import hostdevs
from tests.lab.test_reboot import boot_id, reboot  # noqa: F401

pytestmark = pytest.mark.promise(1, 2, 3, 4)

GPU = "0000:01:00.0"


def done(*command: str) -> str:
    answer = run(*command)
    assert answer.status == 0, answer.output
    return answer.output


def stays(*targets: str) -> str:
    """Ask for what can't be given back."""
    answer = run("virt-vgpu", "uncarve", *targets)
    assert answer.status == 1, answer.output
    return answer.output


def carve(count: int = 2) -> list[str]:
    spec = json.loads(done("virt-vgpu", "carve", "--gpu", GPU, f"FAKE24-4Q={count}", "--json"))
    assert {each["managed"] for each in spec} == {"no"}
    vfs = [each["address"] for each in spec]
    assert len(vfs) == count
    for vf in vfs:
        assert_carved(vf)
    return vfs


def assert_carved(vf: str) -> None:
    mine = claim(vf)
    assert mine is not None
    assert (mine["phase"], mine["domain_uuid"]) == ("carved", None)
    assert type_of(vf) == PROFILE_ID


def test_a_domain_that_does_not_ask_has_it_and_gives_it_back_as_it_was() -> None:
    vf, other = carve()
    before = writes_to(vf)
    start("plain", vf, profile=None)
    assert holds("plain", vf)
    assert "domain 'plain'" in stays(vf)
    restart_libvirtd()
    assert holds("plain", vf)
    done("virt-vgpu", "sync")
    assert "domain 'plain'" in stays(GPU), "and the other one goes"
    assert_free(other)
    virsh("destroy", "plain")
    done("virt-vgpu", "sync")
    assert_carved(vf)
    assert writes_to(vf) == before
    virsh("start", "plain")
    virsh("destroy", "plain")
    assert_carved(vf)
    done("virt-vgpu", "uncarve", GPU)
    assert_free(vf)


def test_a_domain_that_asks_never_gets_it() -> None:
    vf, other = carve()
    define("web1", vf)
    assert f"{vf} belongs to the administrator's carve" in refused("start", "web1")
    done("virt-vgpu", "sync")
    virsh("start", "web1")
    assert hostdevs("web1")["ua-vgpu0"] not in (vf, other)
    for each in (vf, other):
        assert_carved(each)
    said = run("virt-vgpu", "release", vf)
    assert said.status == 1
    assert f"'virt-vgpu uncarve {vf}'" in said.output


@pytest.mark.usefixtures("boot_id")
def test_after_a_reboot_it_is_programmed_before_libvirt_starts() -> None:
    vf, other = carve()
    start("web1", vf, profile=None)
    start("web2", OTHER_GPU_VF)
    reboot()
    assert type_of(vf) == type_of(other) == "0"
    outcome = json.loads(done("virt-vgpu", "sync", "--files-only", "--json"))
    assert sorted(outcome["renewed"]) == sorted([vf, other])
    assert outcome["released"] == [OTHER_GPU_VF]
    for each in (vf, other):
        assert_carved(each)
    up = run("libvirtd-start")
    assert up.status == 0, up.output
    virsh("start", "web1")
    assert holds("web1", vf)
    virsh("destroy", "web1")
    assert_carved(vf)


def test_a_start_that_no_qemu_shows_yet_keeps_it() -> None:
    (vf,) = carve(1)
    define("web1", vf, profile=None)
    slow("prepare")
    starting = in_background("virsh", "start", "web1")
    assert until(is_there)
    said = stays(vf)
    assert re.search(rf"{vf} stays: .*(hasn't answered|which is active, has it)", said)
    assert_carved(vf)
    run("pkill", "-KILL", "-x", "sleep")
    starting.wait()
