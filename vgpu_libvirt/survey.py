# SPDX-License-Identifier: LGPL-2.1-or-later
"""One look at the whole host, for everything that shows it or chooses on it.

It takes no lock, writes nothing, and never asks libvirt; what can't be read becomes a sentence.
"""

from __future__ import annotations

from .address import PciAddress
from .capacity import host
from .claims import cordons, store, witnesses
from .claims.liveness import State, Verdict
from .claims.store import Claims
from .devices import backend, catalogue, hardware, mdev_slots, numa, vendor_vfio
from .devices.catalogue import Catalogue
from .errors import CatalogueError, DeviceError, StoreError, VgpuError
from .lifecycle.context import Context
from .records import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from .capacity import Host
    from .claims.cordons import Cordon
    from .claims.model import Claim
    from .claims.witnesses import World
    from .config import Config, Paths
    from .devices.model import Inventory
    from .domain.model import Domain


class Survey(NamedTuple):
    """What there is, whose it is, and who is alive."""

    host: Host  # without what [policy] excludes
    world: World
    verdicts: dict[str, Verdict]  # claimed device -> whether its owner lives
    elsewhere: dict[str, str]  # claimed device that the inventory lacks -> why
    problems: tuple[str, ...]  # what else couldn't be read
    cordons: tuple[Cordon, ...] = ()


def look(config: Config) -> Survey:
    """Look at the host: its processes once, however many devices it has."""
    paths = config.paths
    context = Context(config)
    inventory = hardware.discover(paths.sysfs, config.policy.exclude)
    claims, problems = _claims(paths, inventory)
    awaited = ((c.device, c.gpu, c.profile) for c in claims.readable.values())
    inventory = mdev_slots.with_awaited(inventory, awaited)
    fences = cordons.read_all(paths.state)
    remembered, forgotten = _catalogue(paths)
    daemons = (claim.daemon for claim in claims.readable.values())
    world = witnesses.look_around(paths, *daemons)
    known = {device.name for device in inventory.devices}
    problems += [*inventory.problems, *claims.problems, *world.domains.problems]
    problems += [*fences.problems, *forgotten]
    busy = {device for domain in world.domains.domains for device in domain.devices}
    # Most hosts have few open VFIO files and many VFs, whose nodes cost two look-ups each.
    for device in inventory.devices if world.handles.holders else ():
        if device.is_mdev and device.uuid is None:
            continue  # nothing that could be open
        try:
            if world.handles.on(context.nodes(device.name)):
                busy.add(device.name)
        except DeviceError as error:
            problems.append(f"whether {device.name} is in use can't be told: {error}")
    verdicts = {name: _verdict(context, claim, world) for name, claim in claims.readable.items()}
    there = host(
        inventory,
        claims,
        frozenset(busy),
        remembered=remembered,
        cordoned=frozenset(str(cordon.target) for cordon in fences.held),
    )
    may_reset = config.policy.foreign == "reset" and world.domains.complete
    return Survey(
        there._replace(dirty=_dirty(there, verdicts, may_reset and not world.handles.unknown)),
        world,
        verdicts,
        {
            name: _whereabouts(paths, name)
            for name in sorted({*claims.readable, *claims.unreadable} - known)
        },
        tuple(problems),
        fences.held,
    )


def nodes_of(config: Config, domain: Domain) -> frozenset[int]:
    """The NUMA nodes that DOMAIN lives on. Raises DeviceError where a request needs to know."""
    try:
        return numa.nodes_of(config.paths.sysfs, domain.nodes, domain.cpus)
    except DeviceError:
        if any(request.numa == "require" for request in domain.requests):
            raise
        return frozenset()


def _dirty(host: Host, verdicts: dict[str, Verdict], may_reset: bool) -> frozenset[str]:
    """The devices that a start of anybody's would clear first: see lifecycle/assign.py."""
    found = set()
    for device in host.inventory.devices:
        if device.is_mdev:
            continue  # another's is in nobody's way but by the room it takes, and sync removes it
        claim = host.claims.readable.get(device.name)
        if claim is None:
            is_ours = may_reset and bool(device.type_id)
        else:
            verdict = verdicts[device.name]
            is_ours = verdict.state is State.DEAD and verdict.other is None
            is_ours &= device.type_id in (0, claim.profile.id)
        if is_ours and device.name not in host.busy:
            found.add(device.name)
    return frozenset(found)


def _catalogue(paths: Paths) -> tuple[Catalogue, list[str]]:
    try:
        return catalogue.read(paths.state), []
    except CatalogueError as error:
        return Catalogue(), [str(error)]


def _claims(paths: Paths, inventory: Inventory) -> tuple[Claims, list[str]]:
    """The claims; where not even their names can be read, any device may be somebody's."""
    try:
        return store.read_all(paths.state), []
    except StoreError as error:
        return Claims({}, {device.name: str(error) for device in inventory.devices}, ()), [
            str(error)
        ]


def _verdict(context: Context, claim: Claim, world: World) -> Verdict:
    try:
        return context.judge(claim, world)
    except VgpuError as error:
        return Verdict(State.UNKNOWN, (str(error),))


def _whereabouts(paths: Paths, name: str) -> str:
    """Why a claimed device isn't in the inventory, as the end of a sentence about it."""
    try:
        if backend.is_mdev(name):
            there = backend.exists(paths.sysfs, name)
            return "whose GPU is none that shows" if there else "which isn't there"
        address = PciAddress.parse(name)
        if not vendor_vfio.exists(paths.sysfs, address):
            return "which is not on this host any more"
        if not vendor_vfio.is_vgpu_vf(paths.sysfs, address):
            return "which is no VF of a vGPU-capable GPU any more"
    except VgpuError as error:
        return f"which can't be looked up: {error}"
    return "which [policy] in the configuration excludes"
