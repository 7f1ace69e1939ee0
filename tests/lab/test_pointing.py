# SPDX-License-Identifier: LGPL-2.1-or-later
"""Definitions with nothing but a request: one sync, and a plain `virsh start` works."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.lab.guest import (
    PROFILE_ID,
    VF1,
    define,
    domain_xml,
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


def define_request(name: str) -> None:
    """A domain with the request in its metadata, and no hostdev."""
    document = domain_xml(name, VF1)
    begin, end = document.index("<hostdev"), document.index("</hostdev>") + len("</hostdev>")
    path = Path("/tmp") / f"{name}.xml"
    path.write_text(document[:begin] + document[end:])
    virsh("define", str(path))


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
    assert len(set(places)) == len(names)
    assert {place[:7] for place in places} == {"0000:01", "0000:02"}
    assert repointed(sync()) == []
    first = names[0]
    second = next(n for n, place in zip(names, places, strict=True) if place[:7] != places[0][:7])
    virsh("start", first)
    virsh("start", second)
    third = next(name for name in names if name not in (first, second))
    assert "can't be given NVIDIA FAKE24-24Q now" in refused("start", third)
    virsh("destroy", first)
    sync()
    virsh("start", third)
    assert is_running(second)


def test_a_change_that_is_killed_is_finished_by_the_next_sync() -> None:
    start("web1", VF1)
    define("web2", VF1)
    # the tenth call into libvirt's socket or so is in the middle of it; whichever it is
    killed = run(
        *("strace", "-f", "-qq", "-o", "/dev/null", "-e", "trace=unlink,unlinkat"),
        *("-e", "inject=unlink,unlinkat:signal=KILL:when=1", "virt-vgpu", "sync"),
    )
    assert killed.status != 0
    sync()
    assert where("web2") != VF1
    assert "<rom bar='off'/>" in virsh("dumpxml", "--inactive", "web2")
    assert not list(Path("/var/lib/vgpu-libvirt/edits").glob("*.json"))
    assert json.loads(run("virt-vgpu", "sync", "--json").output)["repointed"] == []
