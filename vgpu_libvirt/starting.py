# SPDX-License-Identifier: LGPL-2.1-or-later
"""Starting a domain in one step: devices are chosen, reserved and pointed at, then it is created.

libvirt copies a definition before the first hook of a start, so an address must be right by then.
A reservation keeps the device for exactly this start. No lock is held while libvirt is called.
"""

from __future__ import annotations

from typing import Protocol

from . import choosing, edits, events, journal, libvirt_api, trying, unfinished
from .claims import store
from .claims.liveness import Answer, State
from .domain import edit
from .domain.match import Wanted
from .domain.read import parse_domain
from .errors import LibvirtError, RequestError, StoreError, VgpuError
from .lifecycle.context import Context
from .lifecycle.reserve import Wish, reserve, unreserve
from .records import TYPE_CHECKING, NamedTuple
from .revert import Revert
from .survey import look, nodes_of
from .unfinished import Edit

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

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
    started, claims = start_by(
        config, connection, definition, lambda found: libvirt_api.create(found, paused)
    )
    check_taken(config, definition.label, claims)
    return started


def start_by(
    config: Config, connection: Any, definition: Definition, create: Callable[[Definition], None]
) -> tuple[Started, tuple[Claim, ...]]:
    """Start the domain of DEFINITION by CREATE, which raises LibvirtError; else as `start`.

    Returns what was reserved for it, too.
    """
    _check(definition)
    try:
        with edits.alone(config, definition.uuid):
            if left := edits.finish_alone(config, connection, definition.uuid):
                raise LibvirtError(left[0])
            defined = _Defined(config, connection, definition, create)
            places, claims = try_devices(config, connection, defined)
    except StoreError as error:
        raise _who_may(error, config) from error
    return Started(defined.definition, places, tuple(defined.notes)), claims


class Startable(Protocol):
    """What is to be started, and by which call."""

    def look(self) -> tuple[Context, Domain]:
        """It as it is now, and what libvirt's word says of its old claims.

        Raises VgpuError where it can't be started.
        """

    def create(self, places: tuple[Place, ...]) -> None:
        """Point it at PLACES, for which its devices are reserved, and start it.

        Raises LibvirtError.
        """


class _Defined:
    """A persistent domain."""

    def __init__(
        self,
        config: Config,
        connection: Any,
        definition: Definition,
        create: Callable[[Definition], None],
    ) -> None:
        self._config = config
        self._connection = connection
        self._create = create
        self.definition = definition
        self.notes: list[str] = []  # on what re-pointing changed besides

    def look(self) -> tuple[Context, Domain]:
        self.definition, context = startable(self._config, self._connection, self.definition.uuid)
        return context, parse_domain(self.definition.document)

    def create(self, places: tuple[Place, ...]) -> None:
        for place in places:
            if place.moves:
                change = _edit(self.definition, place)
                note = edits.apply(self._config.paths.state, self.definition, change)
                self.notes += [note] if note else []
                owner = self.definition.uuid, self.definition.name, place.request.alias
                event = events.repointed(*owner, place.came, place)
                journal.tell(self._config.paths, event)
        self._create(self.definition)


def try_devices(
    config: Config, connection: Any, startable: Startable
) -> tuple[tuple[Place, ...], tuple[Claim, ...]]:
    """Start STARTABLE on devices that are reserved for it; where one refuses, on others.

    Returns where, and what was reserved. Raises VgpuError; then nothing is left reserved.
    """
    refused: dict[str, None] = {}  # devices, in the order in which they were tried
    failure: VgpuError | None = None
    for _ in range(trying.MOST_TRIES):
        context, domain = startable.look()
        try:
            places = choose(context, connection, domain, frozenset(refused))
        except RequestError as error:
            failure = failure or error
            break
        try:
            claims = _start(context, startable, domain, places)
        except StoreError as error:
            raise _who_may(error, config) from error
        except VgpuError as error:
            failure = error
            named = trying.to_blame(error, (place.device for place in places))
            if not named:
                break
            refused |= dict.fromkeys(named)
        else:
            return places, claims
    assert failure is not None
    told = trying.with_tried(failure, refused)
    journal.refused(config.paths, "start", domain, told)
    raise told


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
    pointed = pointed_by_others(connection, domain.uuid)
    host = _as_its_own(context, look(config), domain.uuid)
    host = host._replace(pointed=pointed, busy=host.busy | refused)
    return choosing.places(domain, nodes_of(config, domain), config.policy.placement, host)


def pointed_by_others(connection: Any, uuid: str) -> frozenset[str]:
    """The devices at which definitions other than that of UUID point. Raises LibvirtError."""
    return choosing.pointed_by(choosing.others(libvirt_api.definitions(connection), uuid))


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
    context: Context, startable: Startable, domain: Domain, places: tuple[Place, ...]
) -> tuple[Claim, ...]:
    """Reserve, re-point and create; on failure nothing stays reserved. Return what was."""
    wishes = [
        Wish(Wanted(place.request, place.source), place.device, place.profile) for place in places
    ]
    claims = reserve(context, domain, wishes)
    left: list[str] = []

    def give_up() -> None:
        left.extend(unreserve(_judging(context.config, startable), claims))

    try:
        with Revert() as undo:
            undo.add(give_up)
            startable.create(places)
    except LibvirtError as error:
        raise LibvirtError("; ".join([str(error), *left])) from error
    return claims


def check_taken(config: Config, label: str, claims: tuple[Claim, ...]) -> None:
    """Check that `prepare` took over what was reserved for the started domain LABEL.

    Raises LibvirtError.
    """
    for claim in claims:
        now = store.read(config.paths.state, claim.device)
        if now and now.claim_id == claim.claim_id:
            raise LibvirtError(
                f"{label} was started, but {claim.device} not prepared for it: libvirt didn't run "
                "our hook; see that it is installed, and that libvirt was reloaded since"
            )


def _judging(config: Config, startable: Startable) -> Context:
    """With libvirt's word that the start is over, where it gives it."""
    try:
        return startable.look()[0]
    except VgpuError:
        return Context(config)


def _edit(definition: Definition, place: Place) -> Edit:
    alias = place.request.alias
    before = edit.find_hostdev(definition.document, alias)
    after = edit.pointing(before, alias, place.source)
    return Edit(definition.uuid, alias, before, after)


def _who_may(error: StoreError, config: Config) -> StoreError:
    if not unfinished.is_denied(error):
        return error
    return StoreError(
        f"only root may reserve devices in {config.paths.state}; run 'virt-vgpu start' with sudo, "
        "or 'virsh start', which takes the devices that the definition points at"
    )
