# SPDX-License-Identifier: LGPL-2.1-or-later
"""`carve`, `uncarve` and the sync after a reboot as operations that tests break off."""

from __future__ import annotations

import json
import os
import shutil
import time
import uuid
from typing import TYPE_CHECKING

from tests.faults.kill import Operation
from tests.faults.world import Guest, web1
from vgpu_libvirt import carving, sync
from vgpu_libvirt.address import PciAddress
from vgpu_libvirt.claims import inventory, store
from vgpu_libvirt.claims.liveness import Answer
from vgpu_libvirt.errors import VgpuError
from vgpu_libvirt.lifecycle import carve as carver
from vgpu_libvirt.lifecycle import uncarve as uncarver
from vgpu_libvirt.lifecycle.context import Context
from vgpu_libvirt.survey import look

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TextIO

    from tests.faults.kill import Counter
    from tests.faults.world import World

GPU = PciAddress.parse("0000:3d:00.0")
COUNT = 2
STARTING = "starting.json"  # in the world's directory
OUR_PID = 3999  # of the command, on the world's host


def plain(vf: str) -> Guest:
    """A domain that asks for nothing, with a hostdev at VF."""
    return web1(vf, profile="")


class Libvirt:
    """The daemon, which knows who runs, and who is between `prepare` and QEMU."""

    def __init__(self, world: World) -> None:
        self.world = world

    def ask(self, ids: frozenset[str]) -> Answer:
        running = inventory.live_domains(self.world.paths).domains
        devices = {device: f"domain '{one.name}'" for one in running for device in one.devices}
        path = self.world.root / STARTING
        starting = json.loads(path.read_text()) if path.exists() else []
        devices |= dict.fromkeys(starting, "a domain that starts")
        return Answer(frozenset(one.uuid for one in running), ids, devices=devices)


def begins_to_start(world: World, guest: Guest) -> bool:
    """Whether `prepare` lets GUEST pass; libvirt has it active from then on."""
    passed = world.hook("prepare", guest.xml).status == 0
    if passed:
        (world.root / STARTING).write_text(json.dumps(guest.devices))
    return passed


def is_over(world: World) -> None:
    """That start ran, or failed."""
    (world.root / STARTING).unlink(missing_ok=True)


def carve_in_all(world: World) -> None:
    host = look(world.config).host
    plan = carving.plan(GPU, {"L40S-8Q": COUNT}, "pack", host, is_total=True)
    if plan.pieces:
        carver.carve(world.config, plan.pieces)


def uncarve_all(world: World, libvirt: Libvirt) -> uncarver.Outcome:
    claims = store.read_all(world.paths.state).readable.values()
    carved = [claim for claim in claims if claim.is_no_domains]
    return uncarver.uncarve(world.config, carved, libvirt.ask)


def sync_with_libvirt(world: World) -> sync.Outcome:
    ids = (claim.claim_id for claim in store.read_all(world.paths.state).readable.values())
    answer = Libvirt(world).ask(frozenset(ids))
    return sync.reconcile(Context(world.config, libvirt=answer), time.monotonic() + 5)


def _command(world: World, name: str, do: Callable[[Libvirt, TextIO], int]) -> Operation:
    """DO as a process that the world sees, until `command_is_gone`."""
    command_is_gone(world)
    world.process(OUR_PID, "virt-vgpu", start=777)

    def act(counter: Counter, stderr: TextIO) -> int:
        world.connect()  # this process's own
        os.getpid = lambda: OUR_PID  # nobody else's on that host
        libvirt = Libvirt(world)
        counter.libvirt(libvirt, "ask")
        return do(libvirt, stderr)

    return Operation(name, web1(), act)


def carve(world: World) -> Operation:
    def do(_libvirt: Libvirt, stderr: TextIO) -> int:
        try:
            carve_in_all(world)
        except VgpuError as error:
            print(f"virt-vgpu: error: {error}", file=stderr)
            return 1
        return 0

    return _command(world, "carve", do)


def uncarve(world: World) -> Operation:
    def do(libvirt: Libvirt, stderr: TextIO) -> int:
        outcome = uncarve_all(world, libvirt)
        print(*outcome.kept, sep="\n", file=stderr)
        return int(bool(outcome.kept))

    return _command(world, "uncarve", do)


def sync_at_boot(world: World) -> Operation:
    def do(_libvirt: Libvirt, _stderr: TextIO) -> int:
        return len(sync.reconcile(Context(world.config), time.monotonic() + 5).problems)

    return _command(world, "sync --files-only", do)


def power_fails(world: World) -> None:
    """And comes back; nothing of ours has run yet."""
    world.kill_libvirtd()
    for guest in list(world.running):
        world.kill_qemu(guest)
    shutil.rmtree(world.paths.libvirt_run, ignore_errors=True)
    world.call("reset")
    boot_id = world.proc / "sys/kernel/random/boot_id"
    world.write(boot_id, f"{uuid.uuid5(uuid.NAMESPACE_OID, boot_id.read_text())}\n")


def command_is_gone(world: World) -> None:
    shutil.rmtree(world.proc / str(OUR_PID), ignore_errors=True)
