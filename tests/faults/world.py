# SPDX-License-Identifier: LGPL-2.1-or-later
"""A host whose sysfs is the simulated driver, and a libvirt that runs its hooks in libvirt's order.

`check_promises` is the one place that says what must hold, whatever happened before.
"""

from __future__ import annotations

import copy
import fcntl
import os
import re
import shutil
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from tests.faults.driver import Client
from tests.unit.host import L40S, LIBVIRTD, WEB1, WEB2, Host, Result, domain_xml, hostdev_xml
from vgpu_libvirt.address import PciAddress
from vgpu_libvirt.claims import inventory, store
from vgpu_libvirt.claims.model import Phase
from vgpu_libvirt.devices import backend
from vgpu_libvirt.devices.backend import is_mdev
from vgpu_libvirt.devices.mdev_life import mdev_uuid

if TYPE_CHECKING:
    from pathlib import Path

    from tests.faults.driver import Write

VENDOR_VFIO, MDEV = BACKENDS = ("vendor-vfio", "mdev")
ANY = "any"  # where a mediated device shall be
# The profiles that a GPU of mediated devices has here: each is some files more that all read.
FEW = re.compile(r"ID .*|(?:1147|1148|1152|1153) .*")
NEXT_BOOT = "99999999-8888-7777-6666-555555555555"


class Guest(NamedTuple):
    """A domain with one vGPU at each of PLACES; without a PROFILE it has them, and asks for none.

    A place is a VF, or ANY: a mediated device is made where there is room, and named by its domain.
    """

    name: str
    uuid: str
    number: int
    places: tuple[str, ...]
    profile: str = "NVIDIA L40S-8Q"
    params: str = ""  # of mediated devices

    @property
    def devices(self) -> tuple[str, ...]:
        """What its vGPUs are called."""
        return tuple(map(self.device, range(len(self.places))))

    def device(self, number: int) -> str:
        place = self.places[number]
        return mdev_uuid(self.uuid, f"ua-vgpu{number}") if place == ANY else place

    @property
    def xml(self) -> str:
        aliases = {f"ua-vgpu{number}": name for number, name in enumerate(self.devices)}
        params = f" params='{self.params}'" if self.params else ""
        requests = "".join(
            f"<vgpu:device alias='{alias}' profile='{self.profile}'{params}/>"
            for alias in (aliases if self.profile else ())
        )
        hostdevs = "".join(
            mdev_hostdev(alias, name) if is_mdev(name) else hostdev_xml(alias, name)
            for alias, name in aliases.items()
        )
        return domain_xml(self.name, self.uuid, requests, hostdevs, self.number)


def mdev_hostdev(alias: str, uuid: str) -> str:
    return (
        "    <hostdev mode='subsystem' type='mdev' managed='no' model='vfio-pci'>\n"
        f"      <source><address uuid='{uuid}'/></source>\n      <alias name='{alias}'/>\n"
        "      <address type='pci' domain='0x0000' bus='0x05' slot='0x00' function='0x0'/>\n"
        "    </hostdev>\n"
    )


def web1(*places: str, **more: str) -> Guest:
    return Guest("web1", WEB1, 7, places, **more)


def web2(*places: str, **more: str) -> Guest:
    return Guest("web2", WEB2, 8, places, **more)


class World(Host):
    """The host. What QEMU opens, the driver and `<proc>` both know."""

    _made = 0

    def __init__(self, root: Path, driver: Client, kind: str) -> None:
        World._made += 1
        self.driver = driver
        self.backend = kind
        self.name = f"w{os.getpid()}.{World._made}"
        super().__init__(root)
        shutil.rmtree(self.paths.sysfs)
        self.call("make")
        self.paths = self.paths._replace(sysfs=str(driver.mount / self.name))
        self.sysfs = driver.mount / self.name
        self.libvirtd = LIBVIRTD  # the pid of the daemon that runs, or ran last
        self.places: list[str] = []  # of all GPUs
        self.running: dict[Guest, int] = {}  # with the pid of its QEMU
        self.last_pid = 4000
        self.first_process = 0  # of the pid namespace, where the world has one of its own
        self.set_driver(state=self.paths.state)
        self.write_config()

    def elsewhere(self, last_pid: int) -> World:
        """The same host for another process, whose QEMUs have pids of their own."""
        other = copy.copy(self)
        other.running, other.last_pid = {}, last_pid
        return other

    def connect(self) -> None:
        """Talk to the driver by a connection of this process's own."""
        self.driver = Client(self.driver.directory)

    def close(self) -> None:
        self.call("drop")
        shutil.rmtree(self.root)

    # --- the driver ---

    def call(self, command: str, **arguments: object) -> object:
        return self.driver.call(command, world=self.name, **arguments)

    def set_driver(self, **options: object) -> None:
        self.call("set", options=options)

    @property
    def is_mdev(self) -> bool:
        """Whether its GPUs give vGPUs as mediated devices."""
        return self.backend == MDEV

    def gpu(
        self, address: str = "0000:3d:00.0", vfs: int = 4, lists: str = L40S, node: int = -1
    ) -> list[str]:
        """Add a GPU; return the places that it has for vGPUs."""
        pf = PciAddress.parse(address)
        groups = {}
        for number in range(vfs):
            slot, function = divmod(4 + number, 8)
            groups[str(pf._replace(slot=slot, function=function))] = 1000 * pf.bus + number
        if self.is_mdev:
            lists = "\n".join(filter(FEW.fullmatch, lists.splitlines()))
        self.call(
            "add_gpu", address=address, vfs=groups, lists=lists, node=node, is_mdev=self.is_mdev
        )
        places = [ANY] * vfs if self.is_mdev else list(groups)
        self.places += places
        return places

    def set_type(self, device: str, profile_id: int) -> None:
        self.call("set_type", device=device, type_id=profile_id)

    def gpu_of(self, device: str) -> str:
        """The GPU that DEVICE is on."""
        return str(backend.read_device(self.paths.sysfs, device).gpu)

    def nodes(self, device: str) -> tuple[str, str]:
        if not is_mdev(device):
            return super().nodes(device)
        place = self.sysfs / "bus/mdev/devices" / device
        (own,) = os.listdir(place / "vfio-dev")
        return f"/dev/vfio/{(place / 'iommu_group').readlink().name}", f"/dev/vfio/devices/{own}"

    @property
    def types(self) -> dict[str, int]:
        """The devices that have a type, and which."""
        return {device: kind for device, (kind, _) in self._types().items() if kind}

    def _types(self) -> dict[str, tuple[int, bool]]:
        return self.call("types")  # type: ignore[return-value]

    @property
    def log(self) -> list[Write]:
        return self.driver.log(self.name)

    # --- libvirt ---

    def end(self, pid: int) -> None:
        shutil.rmtree(self.proc / str(pid))

    def hook(self, operation: str, xml: str, parent: int | None = None) -> Result:
        return super().hook(operation, xml, self.libvirtd if parent is None else parent)

    def daemon_hook(self, parent: int | None = None) -> Result:
        return super().daemon_hook(self.libvirtd if parent is None else parent)

    def run_qemu(self, guest: Guest) -> None:
        """QEMU starts and opens its devices; then libvirt writes the status file."""
        nodes = tuple(self.nodes(device)[0] for device in guest.devices)
        self.last_pid += 1
        self.running[guest] = self.last_pid
        path = self.run_domain(
            guest.name, guest.uuid, self.last_pid, guest.xml, nodes, guest.number
        )
        assert path.exists()
        self.call("use", devices=guest.devices, is_open=True, live=True)

    def kill_qemu(self, guest: Guest) -> None:
        self.call("use", devices=guest.devices, is_open=False, live=False)
        self.end(self.running.pop(guest))

    def replug(self, guest: Guest, *places: str) -> Guest:
        """libvirt plugs in or out until GUEST, which runs, has PLACES; QEMU opens and closes."""
        pid = self.running.pop(guest)
        after = guest._replace(places=places)
        self.running[after] = pid
        self.end(pid)
        now = after.devices
        opens = tuple(self.nodes(device)[0] for device in now)
        self.run_domain(after.name, after.uuid, pid, after.xml, opens, after.number)
        gone = [device for device in guest.devices if device not in now]
        self.call("use", devices=gone, is_open=False, live=False)
        self.call("use", devices=now, is_open=True, live=True)
        return after

    def look_at(self, guest: Guest) -> Guest:
        """GUEST as it runs by now, after another process may have plugged."""
        live = inventory.live_domain(self.paths, guest.name, guest.uuid)
        assert live is not None
        now = guest._replace(places=tuple(sorted(live.devices)))
        self.running[now] = self.running.pop(guest)
        return now

    def forget(self, guest: Guest) -> None:
        """libvirt removes the domain's files."""
        self.status_file(guest.name).unlink(missing_ok=True)

    def start_fails(self, guest: Guest) -> None:
        """What libvirt does with a start that failed, at whatever point."""
        self.stop(guest)

    def start(self, guest: Guest) -> Result:
        """Start a domain as libvirt does; a refusal ends it as libvirt does."""
        for operation in ("prepare", "start"):
            result = self.hook(operation, guest.xml)
            if result.status:
                self.start_fails(guest)
                return result
        self.run_qemu(guest)
        return self.hook("started", guest.xml)

    def stop(self, guest: Guest) -> None:
        """Stop a domain as libvirt does."""
        if guest in self.running:
            self.kill_qemu(guest)
        assert self.hook("stopped", guest.xml).status == 0
        self.forget(guest)
        assert self.hook("release", guest.xml).status == 0

    def kill_libvirtd(self) -> None:
        self.end(self.libvirtd)

    def new_libvirtd(self) -> None:
        """A new daemon, which has done nothing yet."""
        self.libvirtd += 1
        self.process(self.libvirtd, "libvirtd", start=4242 + self.libvirtd)

    def start_libvirtd(self) -> None:
        """A new daemon, which reconciles, then finds its domains again."""
        self.new_libvirtd()
        for path in sorted(self.status_file("x").parent.glob("*.xml")):
            if path.stem not in {guest.name for guest in self.running}:
                path.unlink()  # a QEMU that died meanwhile
        assert self.daemon_hook().status == 0
        for guest in list(self.running):
            assert self.hook("reconnect", guest.xml).status == 0

    def restart_libvirtd(self) -> None:
        self.kill_libvirtd()
        self.start_libvirtd()

    def everything_ends(self) -> None:
        """All domains die, and the daemon; the next one reconciles."""
        self.kill_libvirtd()
        for guest in list(self.running):
            self.kill_qemu(guest)
            self.forget(guest)
        self.start_libvirtd()

    def reboot(self) -> None:
        """The power was off: no process, nothing in /run, no type."""
        self.kill_libvirtd()
        for guest in list(self.running):
            self.kill_qemu(guest)
        shutil.rmtree(self.paths.libvirt_run, ignore_errors=True)
        self.call("reset")
        self.write(self.proc / "sys/kernel/random/boot_id", NEXT_BOOT + "\n")
        self.start_libvirtd()


def our_libvirtd(world: World) -> None:
    """Let this very process be the daemon, so that hooks that it starts find it."""
    world.kill_libvirtd()
    world.libvirtd = os.getpid()
    world.process(world.libvirtd, "libvirtd", start=4242)


def check_promises(world: World) -> None:
    """What holds at any instant at which no process of ours runs."""
    _nothing_was_done_to_the_living(world)
    claims = store.read_all(world.paths.state)
    assert claims.unreadable == {}, "a claim file is whole or absent"
    assert claims.problems == (), "nothing but claims stands among the claims"
    owners = Counter(
        (claim.domain_uuid, claim.alias)
        for claim in claims.readable.values()
        if claim.phase is Phase.RUNNING
    )
    assert all(number == 1 for number in owners.values()), "one device for each request"
    types = world._types()
    for device, (kind, ours) in types.items():
        if kind and ours:
            assert device in claims.readable, f"{device} has our type {kind}, and no claim"
    for guest in world.running:
        for device in guest.devices:
            assert types[device][0], f"{device} of the running {guest.name} lost its type"
            claim = claims.readable.get(device)
            is_carved = claim is not None and claim.phase is Phase.CARVED and not guest.profile
            assert claim is None or is_carved or claim.domain_uuid == guest.uuid
    _no_lock_is_held(world)


def _nothing_was_done_to_the_living(world: World) -> None:
    for write in world.log:
        assert not write.open, f"a write to a device that a QEMU had open: {write}"
        assert not write.live, f"a write to a device of a living domain: {write}"
        assert write.claimed, f"a write to a device without a claim: {write}"


def _no_lock_is_held(world: World) -> None:
    for path in (world.state / "lock", *(world.state / "locks").glob("*")):
        if path.exists():
            with path.open() as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def check_nothing_leaked(world: World, foreign: frozenset[str] = frozenset()) -> None:
    """What holds once everything is dead and sync has run: no types but FOREIGN ones, no claims."""
    check_promises(world)
    assert set(world.types) <= foreign
    assert store.read_all(world.paths.state).readable == {}
