# SPDX-License-Identifier: LGPL-2.1-or-later
"""A long walk: ten domains, six devices, plain `virsh start` and `destroy`, a sync after each.

Whatever the host has room for starts at the first try; the test counts the room itself, from the
types that are set. $VGPU_LIBVIRT_STEPS: how many steps.
"""

from __future__ import annotations

import json
import os
import random
import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from lxml import etree

from tests.conftest import COUNTS
from tests.lab import guest
from tests.lab.guest import claim, define_request, holds, refused, run, sync, type_of, virsh

if TYPE_CHECKING:
    from collections.abc import Iterator

STEPS = int(os.environ.get("VGPU_LIBVIRT_STEPS", "24"))
SEED = int(os.environ.get("VGPU_LIBVIRT_SEED", "1"))
CONFIG = Path("/etc/vgpu-libvirt/config.toml")
FRAMEBUFFER = 24  # GB
SIZES = {"914": 4, "916": 8, "917": 12}  # by the profiles' ids
PROFILES = {"FAKE24-4Q": 4, "FAKE24-8Q": 8, "FAKE24-12Q": 12}
DOMAINS = {
    f"web{number}": profile
    for number, profile in enumerate(
        ["FAKE24-8Q"] * 4 + ["FAKE24-12Q"] * 3 + ["FAKE24-4Q"] * 3,
    )
}
# What a refusal names: whose the device is, or what its GPU runs.
REASON = re.compile(r"vgpu-libvirt: .*(belongs to domain 'web\d'|its GPU \S+ runs web\d: )")


def vfs_of(gpu: str) -> list[str]:
    links = Path(f"/sys/bus/pci/devices/{gpu}").glob("virtfn*")
    return sorted(os.path.basename(os.readlink(link)) for link in links)


@pytest.fixture
def gpus(clean: None) -> Iterator[dict[str, list[str]]]:
    """GPU -> its VFs; three of each, the others are excluded."""
    del clean
    all_vfs = {gpu: vfs_of(gpu) for gpu in ("0000:01:00.0", "0000:02:00.0")}
    CONFIG.parent.mkdir(exist_ok=True)
    excluded = [vf for vfs in all_vfs.values() for vf in vfs[3:]]
    CONFIG.write_text(f"[policy]\nexclude = {json.dumps(excluded)}\n")
    yield {gpu: vfs[:3] for gpu, vfs in all_vfs.items()}
    CONFIG.unlink()


def has_room(profile: str, gpus: dict[str, list[str]]) -> bool:
    """Whether a VF is free where this size, and no other, is, or nothing yet, and it fits."""
    size = PROFILES[profile]
    for vfs in gpus.values():
        there = [SIZES[kind] for vf in vfs if (kind := type_of(vf)) != "0"]
        room = len(there) < len(vfs) and sum(there) + size <= FRAMEBUFFER
        if room and set(there) <= {size}:
            return True
    return False


def definition(name: str, without: str = "hostdev/source") -> str:
    """The definition of a domain, but for what sync may change in it."""
    root = etree.fromstring(virsh("dumpxml", "--inactive", name))
    for path in without.split():
        for element in root.findall(f"devices/{path}"):
            parent = element.getparent()
            assert parent is not None
            parent.remove(element)
    etree.indent(root)
    return etree.tostring(root, encoding="unicode")


def where(name: str) -> str:
    """The device that the domain's QEMU should have."""
    address = etree.fromstring(virsh("dumpxml", name)).find("devices/hostdev/source/address")
    assert address is not None
    parts = [int(address.get(key, ""), 16) for key in ("domain", "bus", "slot", "function")]
    return "{:04x}:{:02x}:{:02x}.{:x}".format(*parts)


@pytest.mark.promise(2, 3)
@pytest.mark.usefixtures("clean")
def test_whatever_there_is_room_for_starts_at_the_first_try(gpus: dict[str, list[str]]) -> None:
    for name, profile in DOMAINS.items():
        define_request(name, profile=profile)
    # With its hostdev comes the port that libvirt plugs it into.
    bare = {name: definition(name, "hostdev controller") for name in DOMAINS}
    sync()
    assert {name: definition(name, "hostdev controller") for name in DOMAINS} == bare
    whole = {name: definition(name) for name in DOMAINS}

    chance = random.Random(SEED)
    running: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for step in range(STEPS):
        name = chance.choice(sorted(DOMAINS))
        counts["steps"] += 1
        if name in running:
            virsh("destroy", name)
            counts["destroyed"] += 1
            assert type_of(running.pop(name)) == "0"
        elif has_room(DOMAINS[name], gpus):
            answer = run("virsh", "--quiet", "start", name)
            assert answer.status == 0, f"step {step}, {running}: {answer.output}"
            counts["started"] += 1
            running[name] = vf = where(name)
            assert SIZES[type_of(vf)] == PROFILES[DOMAINS[name]]
            assert holds(name, vf)
        else:
            said = refused("start", name)
            assert REASON.search(said), f"step {step}, {running}: {said}"
            counts["refused, as there was no room"] += 1
        assert len(set(running.values())) == len(running)
        assert {vf for vfs in gpus.values() for vf in vfs if type_of(vf) != "0"} == set(
            running.values()
        )
        counts["re-pointed"] += len(sync()["repointed"])
        print(f"step {step}: {name} {DOMAINS[name]}; running {len(running)}; {dict(counts)}")

    for name in running:
        virsh("destroy", name)
    sync()
    for vf in (vf for vfs in gpus.values() for vf in vfs):
        assert (type_of(vf), claim(vf)) == ("0", None)
    assert {name: definition(name) for name in DOMAINS} == whole
    assert not list((guest.CLAIMS.parent / "edits").glob("*.json"))
    if directory := os.environ.get(COUNTS):
        Path(directory).mkdir(parents=True, exist_ok=True)
        Path(directory, "walk.json").write_text(json.dumps({"walk": counts}))
