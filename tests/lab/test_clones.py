# SPDX-License-Identifier: LGPL-2.1-or-later
"""Copies, new names and removals of definitions: each has a device of its own, nothing is left."""

from __future__ import annotations

import uuid
from pathlib import Path

from tests.lab.guest import (
    CLAIMS,
    PROFILE_ID,
    VF1,
    claim,
    define,
    holds,
    is_running,
    refused,
    run,
    start,
    sync,
    type_of,
    uuid_of,
    virsh,
)
from vgpu_libvirt.domain.read import parse_domain

STATE = CLAIMS.parent


def place(name: str) -> str:
    """The device that a definition's hostdev points at."""
    domain = parse_domain(virsh("dumpxml", "--inactive", name))
    assert len(domain.hostdevs) == 1
    return str(domain.hostdevs[0].address)


def copy(name: str, new: str) -> str:
    """`virsh dumpxml | sed | virsh define`; return the new domain's UUID."""
    identity = f"ff{str(uuid.uuid4())[2:]}"  # the last in order, so that the others stay
    document = virsh("dumpxml", "--inactive", name)
    document = document.replace(f"<name>{name}<", f"<name>{new}<").replace(uuid_of(name), identity)
    path = Path("/tmp") / f"{new}.xml"
    path.write_text(document)
    virsh("define", str(path))
    return identity


def kept_of(identity: str) -> list[str]:
    """The files of ours that are about a domain."""
    return [
        str(path)
        for path in STATE.rglob("*")
        if path.is_file() and (identity in path.name or identity in path.read_text())
    ]


def test_copies_start_beside_what_they_were_copied_from() -> None:
    define("web1", VF1)
    cloned = run("virt-clone", "-o", "web1", "-n", "web2", "--auto-clone")
    assert cloned.status == 0, cloned.output
    copy("web1", "web3")
    assert [place(name) for name in ("web1", "web2", "web3")] == [VF1] * 3
    virsh("start", "web1")
    assert f"{VF1} belongs to domain 'web1'" in refused("start", "web2")
    sync()
    places = [place(name) for name in ("web1", "web2", "web3")]
    assert places[0] == VF1
    assert len(set(places)) == 3
    for name, vf in zip(("web2", "web3"), places[1:], strict=True):
        assert "<rom bar='off'/>" in virsh("dumpxml", "--inactive", name)
        virsh("start", name)
        assert (holds(name, vf), type_of(vf)) == (True, PROFILE_ID)
    assert is_running("web1")
    assert sync()["repointed"] == []


def test_nothing_is_kept_for_a_domain_that_is_gone() -> None:
    start("web1", VF1)
    virsh("destroy", "web1")
    identity = copy("web1", "web2")
    sync()
    assert place("web2") != VF1
    assert (STATE / "edits" / f"{identity}.lock").exists()
    catalogue = (STATE / "catalogue.json").read_text()
    virsh("undefine", "web2")
    answer = sync()
    assert answer["problems"] == []
    assert answer["repointed"] == []
    assert kept_of(identity) == []
    assert (STATE / "catalogue.json").read_text() == catalogue
    assert not list(CLAIMS.glob("*.json"))
    assert place("web1") == VF1


def test_an_unfinished_change_of_a_domain_that_is_gone_goes_with_it() -> None:
    define("web1", VF1)
    path = STATE / "edits" / f"{uuid_of('web1')}.ua-vgpu0.json"
    hostdev = "<hostdev/>"
    path.parent.mkdir(exist_ok=True)
    path.write_text(
        f'{{"domain_uuid": "{uuid_of("web1")}", "alias": "ua-vgpu0", "before": "{hostdev}", '
        f'"after": "{hostdev}"}}'
    )
    virsh("undefine", "web1")
    assert sync()["problems"] == []
    assert kept_of(uuid_of("web1")) == []


def test_a_new_name_changes_nothing() -> None:
    start("web1", VF1)
    virsh("destroy", "web1")
    define("web2", VF1)
    sync()
    places = {name: place(name) for name in ("web1", "web2")}
    assert len(set(places.values())) == 2
    virsh("domrename", "web2", "www")
    assert sync()["repointed"] == []
    assert place("www") == places["web2"]
    virsh("start", "www")
    owner = claim(places["web2"])
    assert owner is not None
    assert (owner["domain_name"], owner["domain_uuid"]) == ("www", uuid_of("web2"))
    virsh("start", "web1")
    for name in ("www", "web1"):
        virsh("destroy", name)
    assert not list(CLAIMS.glob("*.json"))
