# SPDX-License-Identifier: LGPL-2.1-or-later
"""`attach --live` and `detach --live` as operations that tests break off.

Their libvirt is a double in the same process; each call to it is one step, which is done or not.
What it does to the guest outlives whoever asked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.faults.kill import Operation
from tests.faults.world import Guest, web1
from tests.unit.fake_libvirt import Connection, Domain
from tests.unit.host import domain_xml
from vgpu_libvirt import attaching, detaching, libvirt_api, sides
from vgpu_libvirt.claims import store
from vgpu_libvirt.claims.model import Phase
from vgpu_libvirt.domain.model import Request
from vgpu_libvirt.domain.read import parse_domain
from vgpu_libvirt.errors import VgpuError

if TYPE_CHECKING:
    from typing import TextIO

    from tests.faults.kill import Counter
    from tests.faults.world import World

ALIAS = "ua-vgpu0"


class Libvirt:
    """The double, whose one domain is the guest that runs."""

    def __init__(self, world: World, guest: Guest, counter: Counter, lets_go: bool = True) -> None:
        self.world = world
        self.guest = guest
        self.domain = Domain(domain_xml(guest.name, guest.uuid, number=None), active=True)
        self.domain.live = Domain(guest.xml).document
        self.domain.lets_go = lets_go
        self.domain.changed = self._follow
        self.connection = Connection(self.domain)
        world.connect()  # this process's own
        for call in ("setMetadata", "attachDeviceFlags", "detachDeviceFlags"):
            counter.libvirt(self.domain, call)

    def sides(self) -> tuple[libvirt_api.Definition, ...]:
        definition = libvirt_api.find(self.connection, self.guest.name)
        return sides.of(definition, live=True, persistent=False)

    def _follow(self) -> None:
        """Let QEMU have what libvirt says it has."""
        hostdevs = parse_domain(self.domain.XMLDesc(0)).hostdevs
        names = tuple(sorted(str(hostdev.address or hostdev.uuid) for hostdev in hostdevs))
        if names != self.guest.devices:
            self.guest = self.world.replug(self.guest, *names)


def _told(error: VgpuError, stderr: TextIO) -> int:
    print(f"virt-vgpu: error: {error}", file=stderr)
    return 1


def plug(world: World, guest: Guest, refuses: str = "") -> Operation:
    """`attach --live`; libvirt REFUSES a call."""

    def act(counter: Counter, stderr: TextIO) -> int:
        libvirt = Libvirt(world, guest, counter)
        libvirt.domain.refuses = (refuses,)
        request = Request(ALIAS, "NVIDIA L40S-8Q")
        try:
            attaching.plug(world.config, libvirt.connection, libvirt.sides(), request)
        except VgpuError as error:
            return _told(error, stderr)
        return 0

    return Operation("attach --live", guest, act)


def unplug(world: World, guest: Guest, lets_go: bool = True) -> Operation:
    """`detach --live`; whether the guest LETS GO at once, or not while anybody waits."""

    def act(counter: Counter, stderr: TextIO) -> int:
        libvirt = Libvirt(world, guest, counter, lets_go)
        try:
            detaching.detach(world.config, libvirt.sides(), ALIAS, seconds=0)
        except VgpuError as error:
            return _told(error, stderr)
        return 0

    return Operation("detach --live", guest, act)


def running(world: World, *places: str) -> Guest:
    """A guest that runs, with a vGPU at each of PLACES."""
    guest = web1(*places)
    assert world.start(guest).status == 0
    return guest


def lapse(world: World) -> None:
    """The time of every reservation passes."""
    for claim in store.read_all(world.paths.state).readable.values():
        if claim.phase is Phase.RESERVED:
            earlier = claim._replace(since_boot=max(0.0, claim.since_boot - 120))
            store.replace(world.paths.state, earlier)
