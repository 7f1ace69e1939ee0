# SPDX-License-Identifier: LGPL-2.1-or-later
"""The operations that tests break off, each on a host where it has something to do."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import pytest

from tests.faults.kill import Operation
from tests.faults.world import BACKENDS, VENDOR_VFIO, Guest, web1, web2
from vgpu_libvirt.claims import store
from vgpu_libvirt.claims.model import Phase

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tests.faults.world import World

OTHER_GPU = "0000:41:00.0"
ONLY_1Q = "ID    : vGPU Name\n1147  : NVIDIA L40S-1Q\n"


class Case(NamedTuple):
    """An operation, and how the host comes to the point where it runs."""

    name: str
    arrange: Callable[[World], Operation]
    status: int = 0  # how it ends by itself
    may_be_refused: bool = False  # the domain may be unable to start whatever is done right
    foreign: bool = False  # types of others may be there at the end
    rewritten: bool = False  # a claim stays until the administrator has seen to its device
    backends: tuple[str, ...] = BACKENDS


# For the rules of one backend.
vfs_alone, mdevs_alone = (
    pytest.mark.parametrize("backend", [backend], indirect=True) for backend in BACKENDS
)


def each(cases: Iterable[Case]) -> pytest.MarkDecorator:
    """Run a test on each of CASES, with each backend."""
    both = [(backend, case) for case in cases for backend in case.backends]
    ids = [f"{case.name}-{backend}" for backend, case in both]
    return pytest.mark.parametrize(("backend", "case"), both, indirect=["backend"], ids=ids)


def _prepare(world: World) -> Operation:
    return Operation("prepare", web1(*world.gpu(vfs=1)))


def _two(world: World) -> Guest:
    return web1(*world.gpu(vfs=1), *world.gpu(OTHER_GPU, vfs=1))


def _prepare_two(world: World) -> Operation:
    return Operation("prepare", _two(world))


def _over_leftover(phase: Phase, typed: bool, world: World) -> Operation:
    """A claim of the domain's own, from a run that nobody ended."""
    guest = web1(*world.gpu(vfs=1))
    if phase is Phase.RUNNING:
        _run_and_die(world, guest)
    else:
        assert world.hook("prepare", guest.xml).status == 0
        claim = world.claim(guest.devices[0])
        assert claim is not None
        store.replace(world.paths.state, claim._replace(phase=phase))
    if not typed:
        world.set_type(guest.devices[0], 0)
    return Operation("prepare", guest)


def _run_and_die(world: World, guest: Guest) -> None:
    assert world.start(guest).status == 0
    world.kill_qemu(guest)
    world.forget(guest)


def _take_over(world: World) -> Operation:
    (place,) = world.gpu(vfs=1)
    _run_and_die(world, web2(place))
    world.kill_libvirtd()
    world.new_libvirtd()
    return Operation("prepare", web1(place))


def _foreign(world: World) -> Operation:
    guest = web1(*world.gpu(vfs=1))
    world.set_policy(foreign="reset")
    world.set_type(guest.devices[0], 1148)
    return Operation("prepare", guest)


def _refused_profile(world: World) -> Operation:
    first, second = world.gpu(vfs=1), world.gpu(OTHER_GPU, vfs=1, lists=ONLY_1Q)
    return Operation("prepare", web1(*first, *second))


def _refusing_driver(world: World) -> Operation:
    guest = _two(world)
    world.call("fail", device=guest.devices[1], result="EIO", times=4, value=1152)
    return Operation("prepare", guest)


def _arrive(world: World) -> Operation:
    return Operation("restore", web1(*world.gpu(vfs=1)))


def _start(world: World) -> Operation:
    guest = web1(*world.gpu(vfs=1))
    assert world.hook("prepare", guest.xml).status == 0
    return Operation("start", guest)


def _with_qemu(operation: str, world: World) -> Operation:
    """Its QEMU runs, and no claim knows it."""
    guest = web1(*world.gpu(vfs=1))
    assert world.hook("prepare", guest.xml).status == 0
    world.run_qemu(guest)
    return Operation(operation, guest)


def _reconnect(world: World) -> Operation:
    """It runs, and the store was lost."""
    guest = web1(*world.gpu(vfs=1))
    assert world.start(guest).status == 0
    _lose_claim(world, guest)
    return Operation("reconnect", guest)


def _lose_claim(world: World, guest: Guest) -> None:
    (device,) = guest.devices
    store.drop(world.paths.state, device)
    world.call("disown", device=device)  # nobody's, since nobody remembers it


def _release(world: World) -> Operation:
    guest = web1(*world.gpu(vfs=1))
    _run_and_die(world, guest)
    return Operation("release", guest)


def _release_two(world: World) -> Operation:
    guest = _two(world)
    _run_and_die(world, guest)
    return Operation("release", guest)


def _release_busy(world: World) -> Operation:
    operation = _release(world)
    world.call("fail", device=operation.guest.devices[0], result="EBUSY", times=1, value=0)
    return operation


def _release_rewritten(world: World) -> Operation:
    operation = _release(world)
    world.set_type(operation.guest.devices[0], 1148)
    return operation


def _reconcile(world: World) -> Operation:
    """One domain died, one runs and isn't noted, one runs unclaimed."""
    first, second, third, _ = world.gpu()
    dead = web2(first)
    _run_and_die(world, dead)
    guest = web1(second)
    assert world.hook("prepare", guest.xml).status == 0
    world.run_qemu(guest)
    unclaimed = Guest("web3", "aaaaaaaa-0000-0000-0000-000000000003", 9, (third,))
    assert world.start(unclaimed).status == 0
    _lose_claim(world, unclaimed)
    world.kill_libvirtd()
    world.new_libvirtd()
    return Operation("daemon", guest)


def _leftovers() -> list[Case]:
    kinds = [(phase, True) for phase in Phase if phase is not Phase.CARVED]  # that's no domain's
    kinds += [(phase, False) for phase in (Phase.RESERVED, Phase.CLAIMED)]
    return [
        Case(
            f"prepare-over-{phase}{'' if typed else '-untyped'}",
            functools.partial(_over_leftover, phase, typed),
        )
        for phase, typed in kinds
    ]


CASES = [
    Case("prepare", _prepare),
    Case("prepare-two", _prepare_two),
    *_leftovers(),
    # Another's mdev is in nobody's way but by the room that it takes; that is for a sync.
    Case("prepare-takes-over", _take_over, backends=(VENDOR_VFIO,)),
    Case("prepare-resets-foreign", _foreign, foreign=True),
    Case("prepare-refused-profile", _refused_profile, status=1, may_be_refused=True),
    Case("prepare-driver-refuses", _refusing_driver, status=1, may_be_refused=True),
    Case("arrive", _arrive),
    Case("start", _start),
    Case("started", functools.partial(_with_qemu, "started")),
    Case("stopped", functools.partial(_with_qemu, "stopped")),
    Case("reconnect-notes", functools.partial(_with_qemu, "reconnect")),
    Case("reconnect-adopts", _reconnect, may_be_refused=True, foreign=True),
    Case("release", _release),
    Case("release-two", _release_two),
    Case("release-busy", _release_busy),
    Case("release-rewritten", _release_rewritten, may_be_refused=True, rewritten=True),
    Case("reconcile", _reconcile, foreign=True),
]


def _bystander(operation: str, world: World) -> Operation:
    """A domain that asks for nothing, at a VF to which somebody else gave a type."""
    guest = web1(*world.gpu(vfs=1), profile="")
    world.set_type(guest.devices[0], 1152)
    return Operation(operation, guest)


BYSTANDERS = [
    Case(f"bystander-{operation}", functools.partial(_bystander, operation), foreign=True)
    for operation in ("prepare", "start", "started", "stopped", "release", "reconnect")
]
