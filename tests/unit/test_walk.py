# SPDX-License-Identifier: LGPL-2.1-or-later
"""A long walk: more domains than devices come and go by plain starts, with a sync after each.

Whatever the host has room for starts at the first try; the test counts the room itself. The lab
walks too, with a real libvirt, but not as far.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, NamedTuple

import libvirt
import pytest
from lxml import etree

from tests.unit.fake_libvirt import Connection, Domain
from tests.unit.host import domain_xml
from tests.unit.test_pointing import where
from vgpu_libvirt import pointing, sync
from vgpu_libvirt.lifecycle.context import Context

if TYPE_CHECKING:
    from tests.unit.host import Host

SIZES = {"4Q": 4, "8Q": 8, "12Q": 12, "24Q": 24}  # GB; the ids are the indices, from 900 on
GPUS = ("0000:3d:00.0", "0000:5e:00.0")
FRAMEBUFFER = 24
STEPS = 60


class Member(NamedTuple):
    """A domain that asks for one vGPU."""

    domain: Domain
    profile: str
    number: int

    @property
    def name(self) -> str:
        return self.domain.name()


class Walk:
    """The host, whose driver takes one size at a time on each GPU."""

    def __init__(self, host: Host, vfs: int, profiles: list[str]) -> None:
        self.host = host
        self.gpus = {gpu: host.gpu(gpu, vfs=vfs) for gpu in GPUS}
        self.members = [self._member(number, profile) for number, profile in enumerate(profiles, 1)]
        self.connection = Connection(*(member.domain for member in self.members))
        self.driver_lists()

    def _member(self, number: int, profile: str) -> Member:
        uuid = f"aaaaaaaa-0000-0000-0000-{number:012}"
        name = f"web{number}"
        document = domain_xml(name, uuid, {"ua-vgpu0": f"NVIDIA FAKE24-{profile}"}, number=None)
        domain = Domain(document)
        domain.hook = self.host.hook
        return Member(domain, profile, number)

    # --- the driver ---

    def sizes(self, gpu: str) -> list[int]:
        """What has a type on GPU, in GB."""
        types = [int(self.host.type_of(vf)) for vf in self.gpus[gpu]]
        return [list(SIZES.values())[kind - 900] for kind in types if kind]

    def fits(self, profile: str, gpu: str) -> bool:
        there, size = self.sizes(gpu), SIZES[profile]
        return set(there) <= {size} and sum(there) + size <= FRAMEBUFFER

    def driver_lists(self) -> None:
        for gpu, vfs in self.gpus.items():
            lines = [
                f"{900 + number} : NVIDIA FAKE24-{profile}\n"
                for number, profile in enumerate(SIZES)
                if self.fits(profile, gpu)
            ]
            for vf in vfs:
                used = self.host.type_of(vf) != "0"
                self.host.set_list(vf, "ID    : vGPU Name\n" + "".join([] if used else lines))

    # --- what happens ---

    def has_room(self, profile: str) -> bool:
        return any(
            self.fits(profile, gpu) and len(self.sizes(gpu)) < len(vfs)
            for gpu, vfs in self.gpus.items()
        )

    def start(self, member: Member) -> str | None:
        """Start it; why it was refused."""
        vf = where(member.domain)
        try:
            member.domain.createWithFlags(0)
        except libvirt.libvirtError as error:
            return str(error.get_error_message())
        finally:
            self.driver_lists()
        assert vf is not None
        document = etree.tostring(member.domain.document, encoding="unicode")
        opens = (self.host.nodes(vf)[0],)
        pid, uuid = 4000 + member.number, member.domain.UUIDString()
        self.host.run_domain(member.name, uuid, pid, document, opens, member.number)
        self.host.hook("started", document)
        return None

    def destroy(self, member: Member) -> None:
        document = etree.tostring(member.domain.document, encoding="unicode")
        self.host.end_domain(member.name, 4000 + member.number)
        member.domain.active = False
        self.host.hook("stopped", document)
        self.host.hook("release", document)
        self.driver_lists()

    def sync(self) -> None:
        sync.reconcile(Context(self.host.config), float("inf"))
        pointing.point(self.host.config, self.connection)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("vfs", "profiles"),
    [
        (3, ["8Q"] * 4 + ["12Q"] * 3 + ["4Q"] * 3),
        (3, ["12Q"] * 5 + ["24Q"] * 3 + ["8Q"] * 2),
        (2, ["4Q"] * 9 + ["24Q"]),
    ],
)
@pytest.mark.parametrize("policy", ["spread", "pack"])
def test_whatever_there_is_room_for_starts_at_the_first_try(
    host: Host, vfs: int, profiles: list[str], seed: int, policy: str
) -> None:
    host.set_policy(placement=policy)
    walk = Walk(host, vfs, profiles)
    chance = random.Random(f"{seed} {profiles} {policy}")
    walk.sync()
    for step in range(STEPS):
        member = chance.choice(walk.members)
        if member.domain.active:
            walk.destroy(member)
        else:
            has_room = walk.has_room(member.profile)
            refusal = walk.start(member)
            assert (refusal is None) == has_room, f"step {step}, {member.profile}: {refusal}"
            if refusal:
                assert "belongs to domain" in refusal or " runs " in refusal, refusal
        walk.sync()
    for member in walk.members:
        if member.domain.active:
            walk.destroy(member)
    assert not list((host.state / "claims").iterdir())
    assert {host.type_of(vf) for vfs in walk.gpus.values() for vf in vfs} == {"0"}
