# SPDX-License-Identifier: LGPL-2.1-or-later
"""Histories of a whole host that hypothesis makes up, told by what happens in them.

The machine is libvirt: it runs its hooks in libvirt's order, and knows what nobody else does: who
really lives, and with which devices. After each step the promises must hold; at the end all dies,
libvirtd comes back, and after one sync nothing is left. A failure shrinks to a short story.

$VGPU_LIBVIRT_HISTORIES: how many are made up for both backends together; CI's are the same each
time, others are not.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import Phase as Stage
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.conftest import COUNTS
from tests.faults.kill import Action, Child, Operation
from tests.faults.world import ANY, MDEV, VENDOR_VFIO, Guest, World
from tests.unit.host import domain_xml
from vgpu_libvirt import sync
from vgpu_libvirt.address import PciAddress
from vgpu_libvirt.claims import liveness, store
from vgpu_libvirt.claims.model import Phase
from vgpu_libvirt.devices.mdev_life import mdev_uuid
from vgpu_libvirt.devices.model import Profile
from vgpu_libvirt.domain.match import Wanted
from vgpu_libvirt.domain.model import Request
from vgpu_libvirt.domain.read import parse_domain
from vgpu_libvirt.errors import LockTimeoutError, VgpuError
from vgpu_libvirt.lifecycle import hotplug
from vgpu_libvirt.lifecycle.context import Context

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from vgpu_libvirt.claims.model import Claim

HISTORIES = int(os.environ.get("VGPU_LIBVIRT_HISTORIES", "500"))
DOMAINS = {
    name: f"aaaaaaaa-0000-0000-0000-00000000000{number}"
    for number, name in enumerate(("ant", "bee", "cat", "dog"), 1)
}
GPUS = {"0000:3d:00.0": 2, "0000:41:00.0": 3}
VFS = ("0000:3d:00.4", "0000:3d:00.5", "0000:41:00.4", "0000:41:00.5", "0000:41:00.6")
FOREIGN = 1148
PROFILE = Profile(1152, "NVIDIA L40S-8Q")
SHARES = {VENDOR_VFIO: 350, MDEV: 150}  # of the histories
PLAIN = domain_xml("plain", DOMAINS["ant"].replace("a", "b"), None, {"ua-x": "0000:00:1f.3"})

domains = st.sampled_from(tuple(DOMAINS))
numbers = st.integers(0, 7)  # of VFs, or of mediated devices
places = st.one_of(st.integers(0, 4).map(lambda vf: (vf,)), st.just((0, 2)), st.just((1, 3)))
FIRST_LOCK = "its first lock"
steps = st.one_of(st.just(FIRST_LOCK), st.integers(0, 90))  # or a number of a system call


def one(names: Callable[[Histories], Iterable[Any]]) -> st.SearchStrategy[Any]:
    """One of NAMES, which what happened so far decides."""
    return st.runner().flatmap(lambda machine: st.sampled_from(sorted(names(machine))))


starting = one(lambda machine: machine.starting)
serving = one(lambda machine: machine.serving)
living = one(lambda machine: machine.alive())
counted: Counter[str] = Counter()


class Histories(RuleBasedStateMachine):
    """A host with two GPUs, four domains, a libvirtd, and what became of earlier ones' hooks."""

    make_world: Callable[[], World]

    def __init__(self) -> None:
        super().__init__()
        counted["histories"] += 1
        self.world = Histories.make_world()
        self.world.set_policy(lock_timeout=1e-6, release_timeout=0.02)
        for gpu, number in GPUS.items():
            self.world.gpu(gpu, vfs=number)
        # A domain's mediated devices have names of their own, and any parent does.
        self.is_mdev = self.world.is_mdev
        self.devices = VFS
        if self.is_mdev:
            aliases = [(uuid, f"ua-vgpu{n}") for uuid in DOMAINS.values() for n in range(2)]
            self.devices = tuple(mdev_uuid(*each) for each in aliases)
        self.place: dict[str, tuple[int, ...]] = {
            name: (number,) for number, name in enumerate(DOMAINS)
        }
        self.starting: dict[str, Guest] = {}  # between `prepare` and QEMU
        self.serving: dict[str, Guest] = {}  # that libvirt has running, alive or not
        self.outliving: list[Guest] = []  # whose QEMU lives on although libvirt gave them up
        self.up = True
        self.orphans: list[tuple[Child, Guest]] = []  # hooks of daemons that are gone, and whose
        self.numbers = 6
        self.boots = 0
        self.spoilt: set[str] = set()  # devices whose claim file was truncated
        self.lost: set[str] = set()  # devices whose claim was lost
        self.foreign: set[str] = set()
        self.refusing: set[str] = set()
        self.reserved: set[str] = set()  # ids of the reservations that haven't lapsed
        self.written = 0

    # --- what libvirt does ---

    def alive(self) -> list[str]:
        """The domains that libvirt has running, and whose QEMU lives."""
        return [name for name, guest in self.serving.items() if guest in self.world.running]

    def off(self, name: str) -> bool:
        return self.up and name not in self.starting and name not in self.serving

    @initialize(names=st.sets(domains, max_size=3))
    def some_run(self, names: set[str]) -> None:
        for name in sorted(names):
            self.begins_to_start(name)
            if name in self.starting:
                self.starts(name)

    @precondition(lambda self: self.up)
    @rule(name=domains, place=places)
    def starts_at(self, name: str, place: tuple[int, ...]) -> None:
        if self.off(name):
            self.place[name] = place
            self.begins_to_start(name)
            if name in self.starting:
                self.starts(name)

    @precondition(lambda self: self.up and self.serving)
    @rule(name=serving, place=places)
    def ends_and_starts_at(self, name: str, place: tuple[int, ...]) -> None:
        self.shuts_down(name, 1)
        self.starts_at(name, place)

    @precondition(lambda self: self.serving and not self.up)
    @rule(name=domains, place=places)
    def libvirtd_comes_back_and_starts(self, name: str, place: tuple[int, ...]) -> None:
        self.libvirtd_comes_back()
        self.starts_at(name, place)

    @rule(name=domains, place=places)
    def is_pointed_at(self, name: str, place: tuple[int, ...]) -> None:
        self.place[name] = place

    def guest(self, name: str) -> Guest:
        self.numbers += 1
        here = tuple(ANY if self.is_mdev else VFS[number] for number in self.place[name])
        return Guest(name, DOMAINS[name], self.numbers, here)

    def device(self, number: int) -> str:
        return self.devices[number % len(self.devices)]

    @precondition(lambda self: self.up)
    @rule(name=domains)
    def begins_to_start(self, name: str) -> None:
        if not self.off(name):
            return
        guest = self.guest(name)
        if self.hook("prepare", guest):
            self.starting[name] = guest
        else:
            counted["refusals"] += 1
            self.ends(guest)

    @precondition(lambda self: self.starting)
    @rule(name=starting)
    def starts(self, name: str) -> None:
        guest = self.starting.pop(name)
        if self.hook("start", guest):
            self.runs(guest)
            self.hook("started", guest)
        else:
            self.ends(guest)

    def runs(self, guest: Guest) -> None:
        for other in self.world.running:
            assert not {*other.devices} & {*guest.devices}, f"{guest} starts on a device of {other}"
        for vf in guest.devices:
            assert self.world.types.get(vf), f"{guest} starts on {vf}, which has no type"
        counted["starts"] += 1
        self.world.run_qemu(guest)
        self.serving[guest.name] = guest

    @precondition(lambda self: self.starting)
    @rule(name=starting, qemu_began=st.booleans())
    def fails_to_start(self, name: str, qemu_began: bool) -> None:
        guest = self.starting.pop(name)
        if qemu_began and self.hook("start", guest):
            self.runs(guest)
            self.world.kill_qemu(guest)
        self.ends(guest)

    def ends(self, guest: Guest) -> None:
        """libvirt ends a domain, or a start, however far that came."""
        self.serving.pop(guest.name, None)
        self.hook("stopped", guest)
        self.world.forget(guest)
        self.hook("release", guest)

    @precondition(lambda self: self.up and self.serving)
    @rule(name=serving, releases=st.integers(0, 2))
    def shuts_down(self, name: str, releases: int) -> None:
        guest = self.serving.pop(name)
        if guest in self.world.running:
            self.world.kill_qemu(guest)
        self.hook("stopped", guest)
        self.world.forget(guest)
        for _ in range(releases):
            self.hook("release", guest)

    @precondition(lambda self: self.up and self.alive())
    @rule(name=living)
    def cannot_be_killed_but_libvirt_goes_on(self, name: str) -> None:
        guest = self.serving[name]
        self.outliving.append(guest)
        self.ends(guest)

    @precondition(lambda self: self.alive())
    @rule(name=living)
    def its_qemu_dies(self, name: str) -> None:
        self.world.kill_qemu(self.serving[name])

    @precondition(lambda self: self.outliving)
    @rule(which=st.integers(0, 9))
    def a_qemu_that_could_not_be_killed_ends(self, which: int) -> None:
        self.world.kill_qemu(self.outliving.pop(which % len(self.outliving)))

    @precondition(lambda self: self.up and self.alive())
    @rule(name=living)
    def loses_a_device_by_hot_unplug(self, name: str) -> None:
        guest = self.serving[name]
        if not guest.places:
            return
        self.serving[name] = self.world.replug(guest, *guest.places[:-1])

    @precondition(lambda self: self.up and self.alive())
    @rule(
        name=living,
        number=numbers,
        ends=st.sampled_from(["well", "before libvirt", "after libvirt"]),
    )
    def is_plugged_into(self, name: str, number: int, ends: str) -> None:
        """`attach --live`, which ENDS well, or killed before libvirt is asked or right after."""
        guest = self.serving[name]
        place = ANY if self.is_mdev else self.device(number)
        after = guest._replace(places=(*guest.places, place))
        vf = after.devices[-1]
        request = Request(f"ua-vgpu{len(guest.places)}", PROFILE.name)
        wanted = Wanted(request, vf if self.is_mdev else PciAddress.parse(vf))
        try:
            context = hotplug.by_daemon(self.world.config)
            claim = hotplug.make_ready(context, parse_domain(guest.xml), wanted)
        except VgpuError:
            counted["refusals"] += 1
            return
        if ends == "before libvirt":
            return
        for other in self.world.running:
            assert vf not in other.devices, f"{guest} is given a device of {other}"
        counted["plugs"] += 1
        self.serving[name] = self.world.replug(guest, *after.places)
        if ends == "well":
            assert hotplug.plugged(context, claim) == []

    @precondition(lambda self: self.up)
    @rule()
    def libvirtd_is_killed(self) -> None:
        self.world.kill_libvirtd()
        self.up = False
        self.starting.clear()

    @precondition(lambda self: not self.up)
    @rule()
    def libvirtd_comes_back(self) -> None:
        self.world.new_libvirtd()
        self.up = True
        assert self.world.daemon_hook().status == 0
        for guest in list(self.serving.values()):
            if guest in self.world.running:
                self.hook("reconnect", guest)
            else:
                self.ends(guest)

    # --- hooks that don't get to their end ---

    @precondition(lambda self: self.up)
    @rule(name=domains, step=steps, stops=st.booleans())
    def libvirtd_is_killed_in_prepare(self, name: str, step: int | str, stops: bool) -> None:
        if self.off(name):
            self.breaks_off("prepare", self.guest(name), step, stops)
            self.libvirtd_is_killed()

    @precondition(lambda self: self.up and self.starting)
    @rule(name=starting, step=steps, stops=st.booleans())
    def libvirtd_is_killed_in_started(self, name: str, step: int | str, stops: bool) -> None:
        guest = self.starting.pop(name)
        if self.hook("start", guest):
            self.runs(guest)
            self.breaks_off("started", guest, step, stops)
            self.libvirtd_is_killed()
        else:
            self.ends(guest)

    @precondition(lambda self: self.up and self.serving)
    @rule(name=serving, step=steps, stops=st.booleans(), dies=st.booleans())
    def libvirtd_is_killed_in_release(
        self, name: str, step: int | str, stops: bool, dies: bool
    ) -> None:
        guest = self.serving.pop(name)
        if guest in self.world.running:
            if dies:
                self.world.kill_qemu(guest)
            else:
                self.outliving.append(guest)
        self.hook("stopped", guest)
        self.world.forget(guest)
        self.breaks_off("release", guest, step, stops)
        self.libvirtd_is_killed()

    @precondition(lambda self: self.up)
    @rule(name=domains, step=steps)
    def its_prepare_is_killed(self, name: str, step: int | str) -> None:
        if self.off(name):
            guest = self.guest(name)
            if self.breaks_off("prepare", guest, step, False):
                self.starting[name] = guest
            else:
                self.ends(guest)

    @precondition(lambda self: self.up and self.serving)
    @rule(name=serving, step=steps)
    def its_release_is_killed(self, name: str, step: int | str) -> None:
        guest = self.serving.pop(name)
        if guest in self.world.running:
            self.world.kill_qemu(guest)
        self.hook("stopped", guest)
        self.world.forget(guest)
        self.breaks_off("release", guest, step, False)

    def breaks_off(self, operation: str, guest: Guest, step: int | str, stops: bool) -> bool:
        """Whether the hook came to its end, and succeeded, before STEP."""
        what = "stop" if stops else "kill"
        if step == FIRST_LOCK:
            locks = iter([True])
            action = Action(
                0, "before", what, lambda call: call.name == "flock" and next(locks, False)
            )
        else:
            # It takes more calls to find a place for a mediated device.
            action = Action(int(step) * (2 if self.is_mdev else 1), "before", what)
        child = Child(self.world, Operation(operation, guest), action)
        if stops and child.wait_until_stopped():
            counted["orphans"] += 1
            self.orphans.append((child, guest))
            return False
        return self.ended(child)

    def ended(self, child: Child) -> bool:
        ended = child.go_on()
        assert ended.status in (0, 1, -9), ended
        assert "internal error" not in ended.stderr, ended
        return ended.status == 0

    @precondition(lambda self: self.orphans)
    @rule(which=st.integers(0, 9))
    def an_orphan_goes_on(self, which: int) -> None:
        self.ended(self.orphans.pop(which % len(self.orphans))[0])

    @precondition(lambda self: self.orphans)
    @rule(name=domains, which=st.integers(0, 9), runs=st.booleans())
    def an_orphan_goes_on_while_its_device_goes_to(self, name: str, which: int, runs: bool) -> None:
        if not self.up:
            self.libvirtd_comes_back()
        if self.off(name):
            guest = self.orphans[which % len(self.orphans)][1]
            if self.is_mdev:
                self.place[name] = tuple(range(len(guest.places)))
            else:
                self.place[name] = tuple(map(VFS.index, guest.places))
            self.begins_to_start(name)
            if runs and name in self.starting:
                self.starts(name)
        self.an_orphan_goes_on(which)

    @precondition(lambda self: self.orphans)
    @rule(which=st.integers(0, 9))
    def an_orphan_is_killed(self, which: int) -> None:
        child, _ = self.orphans.pop(which % len(self.orphans))
        os.kill(child.pid, 9)
        child.end()

    def hook(self, operation: str, guest: Guest) -> bool:
        """Run one to its end; a domain that runs never notices."""
        result = self.world.hook(operation, guest.xml)
        assert "internal error" not in result.stderr, result
        if operation not in ("prepare", "start"):
            assert result.status == 0, result
        else:
            assert result.status in (0, 1), result
            assert result.stderr.count("\n") == result.status, result
        return result.status == 0

    # --- the rest of the world ---

    @rule(number=numbers, error=st.sampled_from(["EIO", "EBUSY"]), times=st.integers(1, 3))
    def the_driver_will_refuse_writes(self, number: int, error: str, times: int) -> None:
        vf = self.device(number)
        if vf not in self.refusing:
            self.refusing.add(vf)
            self.world.call("fail", device=vf, result=error, times=times)

    @rule(number=numbers)
    def somebody_else_sets_a_type(self, number: int) -> None:
        vf = self.device(number)
        busy = {vf for guest in self.world.running for vf in guest.devices}
        if (
            len(self.world.types) < len(VFS)
            and vf not in self.world.types
            and vf not in self.claims()
            and vf not in busy
        ):
            self.world.set_type(vf, FOREIGN)
            self.foreign.add(vf)

    @rule(number=numbers)
    def a_claim_is_truncated(self, number: int) -> None:
        vf = self.device(number)
        path = self.world.state / "claims" / f"{vf}.json"
        if path.exists():
            path.write_text(path.read_text()[:100])
            self.spoilt.add(vf)

    @precondition(lambda self: not self.orphans)
    @rule()
    def the_store_is_lost(self) -> None:
        shutil.rmtree(self.world.state / "claims", ignore_errors=True)
        self.lost.update(self.world.types)
        self.spoilt.clear()
        self.starting_ends_badly()

    def starting_ends_badly(self) -> None:
        """What the administrator does to a start can't be mended; libvirt ends it."""
        for guest in self.starting.values():
            self.ends(guest)
        self.starting.clear()

    @precondition(lambda self: self.up)
    @rule(name=domains, lapsed=st.booleans())
    def is_reserved_its_device(self, name: str, lapsed: bool) -> None:
        vf = self.guest(name).devices[0]
        if not self.off(name) or vf in self.claims() or vf in self.spoilt or vf in self.world.types:
            return
        gpu = PciAddress.parse(next(iter(GPUS) if self.is_mdev else iter([vf])))
        context = Context(self.world.config)
        claim = context.new_claim(
            parse_domain(self.guest(name).xml),
            "ua-vgpu0",
            vf,
            gpu._replace(slot=0, function=0),
            PROFILE._replace(id=f"nvidia-{PROFILE.id}") if self.is_mdev else PROFILE,
        )._replace(phase=Phase.RESERVED, domain_id=None)
        if not lapsed:
            self.reserved.add(claim.claim_id)
        else:
            claim = claim._replace(since_boot=max(0.0, claim.since_boot - 120))
        store.create(self.world.paths.state, claim)

    @precondition(lambda self: not self.boots)
    @rule()
    def the_power_fails(self) -> None:
        for child, _ in self.orphans:
            os.kill(child.pid, 9)
            child.end()
        self.orphans.clear()
        if self.up:
            self.world.kill_libvirtd()
        for guest in list(self.world.running):
            self.world.kill_qemu(guest)
        shutil.rmtree(self.world.paths.libvirt_run, ignore_errors=True)
        self.world.call("reset")
        self.boots += 1
        self.world.write(self.world.proc / "sys/kernel/random/boot_id", f"boot {self.boots}\n")
        for state in (
            self.starting,
            self.serving,
            self.outliving,
            self.lost,
            self.foreign,
            self.reserved,
        ):
            state.clear()
        self.up = False

    @rule(libvirt=st.sampled_from(["answers", "is silent", "isn't asked"]), dry_run=st.booleans())
    def sync_runs_and_libvirt(self, libvirt: str, dry_run: bool) -> None:
        before = self.world.tree() if dry_run else None
        reserved = {vf: c for vf, c in self.claims().items() if c.claim_id in self.reserved}
        try:
            self.sync(libvirt, dry_run)
        except LockTimeoutError:
            assert self.orphans and not dry_run
        after = self.claims()
        assert all(after.get(vf) == claim for vf, claim in reserved.items()), "P4: a reservation"
        assert before is None or self.world.tree() == before

    def sync(self, libvirt: str, dry_run: bool = False) -> sync.Outcome:
        answer = None
        asked_after = frozenset(claim.claim_id for claim in self.claims().values())
        if self.up and libvirt != "isn't asked":
            active = frozenset(DOMAINS[name] for name in (*self.starting, *self.serving))
            silence = "libvirt doesn't answer" if libvirt == "is silent" else None
            answer = liveness.Answer(active, asked_after, silence)
        context = Context(self.world.config, libvirt=answer)
        return sync.reconcile(context, time.monotonic() + 5, dry_run)

    @precondition(lambda self: self.up)
    @rule()
    def a_plain_domain_starts_and_ends(self) -> None:
        for operation in ("prepare", "start", "stopped", "release"):
            assert self.world.hook(operation, PLAIN) == (0, "", "")

    # --- what must hold ---

    def claims(self) -> dict[str, Claim]:
        return store.read_all(self.world.paths.state).readable

    @invariant()
    def the_promises_hold(self) -> None:
        counted["steps"] += 1
        for write in self.world.log[self.written :]:
            counted["writes"] += 1
            assert not write.open, f"P1: {write}"
            assert not write.live, f"P1: {write}"
            assert write.claimed, f"P3: {write}"
            assert write.device not in self.foreign, f"a foreign type is written over: {write}"
        self.written = len(self.world.log)
        claims = store.read_all(self.world.paths.state)
        assert set(claims.unreadable) <= self.spoilt, "P3: a claim file is whole or absent"
        types = self.world._types()
        self.lost &= {vf for vf, (kind, _) in types.items() if kind}
        for vf, (kind, ours) in types.items():
            if kind and ours and vf not in self.lost | self.spoilt:
                assert vf in claims.readable, f"P3: {vf} has our type, and no claim"
        for guest in self.world.running:
            for vf in guest.devices:
                assert types[vf][0], f"P1: {vf} of the running {guest} lost its type"
                claim = claims.readable.get(vf)
                if vf not in self.lost | self.spoilt:
                    assert claim is not None, f"P4: {vf} of the running {guest} lost its claim"
                assert claim is None or claim.domain_uuid == guest.uuid, f"P2: {claim} {guest}"
        for guest in self.starting.values():
            for vf in guest.devices:
                assert types[vf][0], f"P4: {vf} lost its type while {guest} starts"
                claim = claims.readable.get(vf)
                assert vf in self.spoilt or (claim and claim.domain_uuid == guest.uuid), (
                    f"P4: {vf} lost its claim while {guest} starts"
                )

    def teardown(self) -> None:
        try:
            if not hasattr(self, "written"):
                return
            self.everything_ends()
        finally:
            for child, _ in self.orphans:
                os.kill(child.pid, 9)
                child.end()
            self.world.close()

    def everything_ends(self) -> None:
        while self.orphans:
            self.an_orphan_goes_on(0)
        if self.up:
            self.libvirtd_is_killed()
        for guest in list(self.world.running):
            self.world.kill_qemu(guest)
        self.outliving.clear()
        self.world.set_policy(release_timeout=2.0)  # by then the driver has refused enough
        self.libvirtd_comes_back()
        self.lapse_reservations()
        self.sync("answers")
        self.the_promises_hold()
        claims = store.read_all(self.world.paths.state)
        assert set(self.world.types) <= self.foreign | self.lost | self.spoilt, "leaked types"
        assert set(claims.readable) <= self.foreign, f"leaked claims: {claims.readable}"
        again = self.sync("answers")
        assert again.released == ()
        assert store.read_all(self.world.paths.state) == claims, "a second sync changes nothing"

    def lapse_reservations(self) -> None:
        for claim in self.claims().values():
            if claim.phase is Phase.RESERVED:
                lapsed = claim._replace(since_boot=max(0.0, claim.since_boot - 120))
                store.replace(self.world.paths.state, lapsed)


@pytest.mark.promise(1, 2, 3, 4, 6, 7, 9)
def test_histories(
    new_world: Callable[[], World], backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted.clear()
    monkeypatch.setattr(sync, "_BUSY", 1e-6)
    monkeypatch.setattr(Histories, "make_world", staticmethod(new_world), raising=False)
    try:
        run_state_machine_as_test(
            Histories,
            settings=settings(
                max_examples=max(1, HISTORIES * SHARES[backend] // sum(SHARES.values())),
                stateful_step_count=40,
                derandomize="VGPU_LIBVIRT_HISTORIES" not in os.environ,
                database=None,
                deadline=None,
                print_blob=False,
                report_multiple_bugs=False,
                phases=(Stage.explicit, Stage.generate, Stage.shrink),
                suppress_health_check=list(HealthCheck),
            ),
        )
    finally:
        if directory := os.environ.get(COUNTS):
            Path(directory).mkdir(parents=True, exist_ok=True)
            counts = {f"histories {backend}": counted}
            Path(directory, f"histories-{backend}.json").write_text(json.dumps(counts))
