# SPDX-License-Identifier: LGPL-2.1-or-later
"""Definitions with nothing but a request: one sync, and a plain `virsh start` works."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

from tests.lab.guest import (
    PROFILE_ID,
    VF1,
    define,
    define_request,
    holds,
    is_running,
    refused,
    run,
    start,
    sync,
    type_of,
    virsh,
)
from vgpu_libvirt.domain.read import parse_domain

KILLED_BEFORE_ATTACH = """
import os, signal, sys
from vgpu_libvirt import libvirt_api
from vgpu_libvirt.cli.main import main
libvirt_api.attach = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
sys.argv[1:] = ["sync"]
main()
"""


def where(name: str) -> str:
    """The device that a definition's hostdev points at."""
    hostdev = parse_domain(virsh("dumpxml", "--inactive", name)).hostdev("ua-vgpu0")
    assert hostdev is not None
    return str(hostdev.address)


def repointed(answer: dict[str, Any]) -> list[tuple[str, str]]:
    return [(each["from"], each["to"]) for each in answer["repointed"]]


def test_metadata_alone_is_enough() -> None:
    define_request("web1")
    assert "has no hostdev with that alias" in refused("start", "web1")
    assert repointed(sync()) == [(None, VF1)]
    virsh("start", "web1")
    assert type_of(VF1) == PROFILE_ID
    assert holds("web1", VF1)


def test_a_copy_gets_a_device_of_its_own_and_keeps_all_else() -> None:
    start("web1", VF1)
    define("web2", VF1)
    before = virsh("dumpxml", "--inactive", "web2")
    assert f"{VF1} belongs to domain 'web1'" in refused("start", "web2")
    ((came, goes),) = repointed(sync())
    assert came == VF1
    assert where("web2") == goes != VF1
    old, new = parse_domain(before), parse_domain(virsh("dumpxml", "--inactive", "web2"))
    assert old._replace(hostdevs=()) == new._replace(hostdevs=())
    assert "<rom bar='off'/>" in virsh("dumpxml", "--inactive", "web2")
    virsh("start", "web2")
    assert is_running("web1")
    assert holds("web2", goes)
    assert repointed(sync()) == [], "a second time nothing changes"


def test_more_domains_than_devices_take_turns() -> None:
    names = [f"web{number}" for number in range(4)]
    for name in names:
        define(name, VF1, profile="FAKE24-24Q")  # one such fits on each of the two GPUs
    sync()
    places = [where(name) for name in names]
    assert len(set(places)) == 2
    assert repointed(sync()) == []
    first, second = (names[places.index(place)] for place in sorted(set(places)))
    virsh("start", first)
    virsh("start", second)
    third = next(name for name in names if name not in (first, second))
    assert "belongs to domain" in refused("start", third)
    virsh("destroy", first)
    sync()
    virsh("start", third)
    assert is_running(second)


def test_a_change_that_is_killed_is_finished_by_the_next_sync() -> None:
    start("web1", VF1)
    define("web2", VF1)
    # killed when the hostdev is detached, and before the new one is attached
    killed = run("python3", "-c", KILLED_BEFORE_ATTACH)
    assert killed.status == -signal.SIGKILL
    assert "<hostdev" not in virsh("dumpxml", "--inactive", "web2")
    sync()
    assert where("web2") != VF1
    assert "<rom bar='off'/>" in virsh("dumpxml", "--inactive", "web2")
    assert not list(Path("/var/lib/vgpu-libvirt/edits").glob("*.json"))
    assert json.loads(run("virt-vgpu", "sync", "--json").output)["repointed"] == []
