# SPDX-License-Identifier: LGPL-2.1-or-later
"""Starting a domain in one step: devices are chosen, reserved and pointed at, then it is created.

libvirt copies a definition before the first hook of a start, so an address must be right by then.
A reservation keeps the device for exactly this start. No lock that a hook may wait for is held
while libvirt is called; that of the definition is, from the choice to the end of the start, so that
nobody points it elsewhere in between.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from . import choosing, edits, libvirt_api, trying, unfinished
from .claims import store
from .claims.liveness import Answer, State
from .domain import edit
from .domain.match import Wanted
from .domain.read import parse_domain
from .errors import LibvirtError, RequestError, StoreError, VgpuError
from .lifecycle.context import Context
from .lifecycle.reserve import Wish, reserve, unreserve
from .revert import Revert
from .survey import look, nodes_of
from .unfinished import Edit

if TYPE_CHECKING:
    from .capacity import Host
    from .choosing import Place
    from .claims.model import Claim
    from .config import Config
    from .domain.model import Domain
    from .libvirt_api import Definition
    from .survey import Survey


def plan(config: Config, connection: Any, wanted: str) -> tuple[Definition, tuple[Place, ...]]:
    """Which device each vGPU of the domain WANTED would start on; nothing is written.

    Raises VgpuError where the domain can't be started this way, or there is no device.
    """
    definition, context = startable(config, connection, libvirt_api.find(connection, wanted).uuid)
    return definition, choose(context, connection, parse_domain(definition.document))


class Started(NamedTuple):
    """A domain that runs, its vGPUs' devices, and sentences on what else became of its hostdevs."""

    definition: Definition
    places: tuple[Place, ...]
    notes: tuple[str, ...]


def start(config: Config, connection: Any, wanted: str, paused: bool) -> Started:
    """Start the domain WANTED, each vGPU on a device that can serve it now.

    Where a device refuses, others are tried. Raises VgpuError; then nothing is left reserved.
    """
    definition = libvirt_api.find(connection, wanted)
    _check(definition)
    try:
        with edits.alone(config, definition.uuid):
            return _start_alone(config, connection, definition.uuid, paused)
    except StoreError as error:
        raise _who_may(error, config) from error


def _start_alone(config: Config, connection: Any, uuid: str, paused: bool) -> Started:
    if left := edits.finish_alone(config, connection, uuid):
        raise LibvirtError(left[0])
    refused: dict[str, None] = {}  # devices, in the order in which they were tried
    failure: VgpuError | None = None
    notes: list[str] = []
    for _ in range(trying.MOST_TRIES):
        definition, context = startable(config, connection, uuid)
        try:
            domain = parse_domain(definition.document)
            places = choose(context, connection, domain, frozenset(refused))
        except RequestError as error:
            raise trying.with_tried(failure or error, refused) from error
        try:
            claims = _start(context, connection, definition, places, paused, notes)
        except StoreError:
            raise
        except VgpuError as error:
            failure = error
            named = [
                place.device.name for place in places if trying.names(error, place.device.name)
            ]
            if not named:
                break
            refused |= dict.fromkeys(named)
        else:
            _check_taken(config, definition, claims)
            return Started(definition, places, tuple(notes))
    assert failure is not None
    raise trying.with_tried(failure, refused) from failure


def startable(config: Config, connection: Any, uuid: str) -> tuple[Definition, Context]:
    """The domain, which can be started, and what libvirt's word on that says of its old claims."""
    claims = store.of_domain(config.paths.state, uuid)
    definition = libvirt_api.look_up(connection, uuid)
    if definition is None:
        raise LibvirtError(f"domain {uuid} is gone; 'virsh list --all' shows those that are")
    _check(definition)
    answer = Answer(frozenset(), frozenset(claim.claim_id for claim in claims))
    return definition, Context(config, libvirt=answer)


def _check(definition: Definition) -> None:
    if not definition.is_persistent:
        raise LibvirtError(
            f"{definition.label} is transient: it has no definition to start from; create it anew"
        )
    if definition.is_active:
        raise LibvirtError(f"{definition.label} runs already; there is nothing to start")
    if libvirt_api.has_saved_state(definition):
        raise LibvirtError(
            f"{definition.label} has a saved state, which names its devices itself; run 'virsh "
            f"start {definition.name}', or discard it with 'virsh managedsave-remove'"
        )
    domain = parse_domain(definition.document)
    if domain.request_error:
        raise RequestError(
            f"the vGPU request in the metadata of {definition.label} can't be understood: "
            f"{domain.request_error}; run 'virt-vgpu fix-xml {definition.name}'"
        )
    if not domain.requests:
        raise RequestError(
            f"{definition.label} asks for no vGPU; start it with 'virsh start {definition.name}'"
        )
    choosing.check_hostdevs(domain, definition.label)


def choose(
    context: Context, connection: Any, domain: Domain, refused: frozenset[str] = frozenset()
) -> tuple[Place, ...]:
    """A device for each vGPU of DOMAIN, which isn't running, but for those that REFUSED it.

    Raises RequestError where there is none, LibvirtError, StoreError.
    """
    config = context.config
    others = choosing.others(libvirt_api.definitions(connection), domain.uuid)
    host = _as_its_own(context, look(config), domain.uuid)
    host = host._replace(pointed=choosing.pointed_by(others), busy=host.busy | refused)
    return choosing.places(domain, nodes_of(config, domain), config.policy.placement, host)


def _as_its_own(context: Context, seen: Survey, uuid: str) -> Host:
    """The host as the domain with UUID may have it: what it still has from before is its own."""
    host = seen.host
    types = {device.name: device.type_id for device in host.inventory.devices}
    readable = dict(host.claims.readable)
    dirty = set(host.dirty)
    for claim in host.claims.of_domain(uuid):
        if claim.is_mere_reservation and types.get(claim.device) == 0:
            del readable[claim.device]
        elif context.judge(claim, seen.world).state is State.DEAD:
            dirty.add(claim.device)
    return host._replace(
        claims=host.claims._replace(readable=readable), dirty=frozenset(dirty - host.busy)
    )


def _start(
    context: Context,
    connection: Any,
    definition: Definition,
    places: tuple[Place, ...],
    paused: bool,
    notes: list[str],
) -> tuple[Claim, ...]:
    """Reserve, re-point and create; on failure nothing stays reserved. Return what was.

    Adds to NOTES what re-pointing changed besides.
    """
    config = context.config
    domain = parse_domain(definition.document)
    wishes = [
        Wish(Wanted(place.request, place.device.address), place.device.gpu, place.profile)
        for place in places
    ]
    claims = reserve(context, domain, wishes)
    left: list[str] = []

    def give_up() -> None:
        left.extend(unreserve(_judging(config, connection, definition.uuid), claims))

    try:
        with Revert() as undo:
            undo.add(give_up)
            for place in places:
                if place.moves:
                    change = _edit(definition, place)
                    note = edits.apply(config.paths.state, definition, change)
                    notes += [note] if note else []
            libvirt_api.create(definition, paused)
    except LibvirtError as error:
        raise LibvirtError("; ".join([str(error), *left])) from error
    return claims


def _check_taken(config: Config, definition: Definition, claims: tuple[Claim, ...]) -> None:
    """Check that `prepare` took over what was reserved for it."""
    for claim in claims:
        now = store.read(config.paths.state, claim.device)
        if now and now.claim_id == claim.claim_id:
            raise LibvirtError(
                f"{definition.label} was started, but {claim.device} not prepared for it: libvirt "
                "didn't run our hook; see that it is installed, and that libvirt was reloaded since"
            )


def _judging(config: Config, connection: Any, uuid: str) -> Context:
    """With libvirt's word that the start is over, where it gives it."""
    try:
        return startable(config, connection, uuid)[1]
    except VgpuError:
        return Context(config)


def _edit(definition: Definition, place: Place) -> Edit:
    alias, address = place.request.alias, place.device.address
    before = edit.find_hostdev(definition.document, alias)
    after = edit.repointed(before, address) if before else edit.hostdev(alias, address)
    return Edit(definition.uuid, alias, before, after)


def _who_may(error: StoreError, config: Config) -> StoreError:
    if not unfinished.is_denied(error):
        return error
    return StoreError(
        f"only root may reserve devices in {config.paths.state}; run 'virt-vgpu start' with sudo, "
        "or 'virsh start', which takes the devices that the definition points at"
    )
