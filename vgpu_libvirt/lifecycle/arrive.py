# SPDX-License-Identifier: LGPL-2.1-or-later
"""A domain comes from elsewhere: the hooks `migrate` and `restore`, which may refuse it.

Its document names devices of another host or another time. These are libvirt's only hooks whose
answer counts: the document, with other devices in it. What is made ready here is a reservation,
since nothing else may follow: libvirt runs no `release` where such an operation fails. `prepare`
takes it over, or it lapses.
"""

from __future__ import annotations

from .. import choosing, trying
from ..address import PciAddress
from ..capacity import narrowed
from ..claims import locks, store
from ..claims.liveness import State
from ..claims.model import Phase
from ..devices import mdev
from ..devices.model import location_order
from ..domain import splice
from ..domain.match import Wanted, uuid_of
from ..errors import RefusedError, RequestError, VgpuError
from ..records import TYPE_CHECKING
from ..survey import look, nodes_of
from . import learn
from .assign import Start, assign, release_leftover
from .release import give_back, keep_visibly

if TYPE_CHECKING:
    from ..choosing import Place
    from ..claims.model import Claim
    from ..domain.model import Domain, Request
    from ..survey import Survey
    from .context import Context


def arrive(context: Context, domain: Domain, document: bytes) -> bytes:
    """Make a device ready for each vGPU that DOMAIN asks for; return DOCUMENT pointing at them.

    All or none. Where a device refuses, others are tried. Raises VgpuError with the sentence for
    the user where that can't be; then nothing stays reserved, or is said to.
    """
    _check_understood(domain)
    _end_earlier_arrivals(context, domain)
    refused: dict[str, None] = {}  # devices, in the order in which they were tried
    failure: VgpuError | None = None
    for _ in range(trying.MOST_TRIES):
        try:
            places = _choose(context, domain, frozenset(refused))
        except RequestError as error:
            failure = failure or error
            break
        there = {
            place.request.alias: place.source
            for place in places
            if isinstance(place.source, PciAddress)
        }
        answer = splice.repointed(document, there)
        try:
            _make_ready(context, domain, places)
        except VgpuError as error:
            failure = error
            named = trying.to_blame(error, (place.device for place in places))
            if not named:
                break
            refused |= dict.fromkeys(named)
        else:
            return answer
    assert failure is not None
    raise trying.with_tried(failure, refused)


def _check_understood(domain: Domain) -> None:
    """Check that each request has a hostdev that can be pointed elsewhere. Raises RequestError."""
    label = f"domain '{domain.name}' ({domain.uuid})"
    if domain.request_error:
        raise RequestError(
            f"the vGPU request in the metadata of {label} can't be understood: "
            f"{domain.request_error}"
        )
    choosing.check_hostdevs(domain, label)
    for request in domain.requests:
        hostdev = domain.hostdev(request.alias)
        if hostdev is None or not (hostdev.address or hostdev.uuid):
            raise RequestError(
                f"{label} asks for a vGPU at '{request.alias}', but comes without a hostdev of "
                "that alias with a source address; run 'virt-vgpu sync' where it is defined"
            )
        if hostdev.kind == "mdev":
            uuid_of(domain, request, hostdev)  # no other can be put in its place


def _end_earlier_arrivals(context: Context, domain: Domain) -> None:
    """Give back what DOMAIN was reserved when it was to come before, and didn't."""
    state = context.config.paths.state
    for claim in store.of_domain(state, domain.uuid):
        if claim.phase is Phase.RESERVED and claim.qemu is None and not claim.is_mere_reservation:
            try:
                with locks.devices(state, [claim.device], context.lock_deadline()):
                    give_back(context, claim, context.release_deadline())
            except VgpuError as error:  # another device does as well
                keep_visibly(context, claim, str(error))


def _choose(context: Context, domain: Domain, refused: frozenset[str]) -> tuple[Place, ...]:
    """A device for each request, none of them one that DOMAIN still has from before.

    Raises RefusedError where DOMAIN runs here, RequestError where there is no device.
    """
    seen = look(context.config)
    had = seen.host.claims.of_domain(domain.uuid)
    _check_gone(domain, seen, had)
    host = seen.host._replace(busy=seen.host.busy | refused | {claim.device for claim in had})
    policy = context.config.policy.placement
    nodes = nodes_of(context.config, domain)
    # What a QEMU has saved of one kind of device it can't load into the other.
    vfs = [gpu for gpu in host.inventory.gpus if gpu.backend != mdev.BACKEND]
    makers = [gpu for gpu in host.inventory.gpus if gpu.backend == mdev.BACKEND]
    places: list[Place] = []
    for kind, gpus in (("pci", vfs), ("mdev", makers)):
        requests = tuple(r for r in domain.requests if _kind(domain, r) == kind)
        if requests:
            there = narrowed(host, gpus)
            places += choosing.places(domain._replace(requests=requests), nodes, policy, there)
    return tuple(places)


def _kind(domain: Domain, request: Request) -> str:
    hostdev = domain.hostdev(request.alias)
    assert hostdev is not None  # that was checked
    return hostdev.kind


def _check_gone(domain: Domain, seen: Survey, had: tuple[Claim, ...]) -> None:
    runs = seen.world.domains.by_uuid(domain.uuid) is not None
    alive = [c for c in had if seen.verdicts[c.device].state is State.ALIVE]
    if runs or alive:
        why = f" ({seen.verdicts[alive[0].device].why})" if alive else ""
        raise RefusedError(
            f"domain '{domain.name}' ({domain.uuid}) runs on this host already{why}; a second one "
            "would take its vGPUs"
        )


def _make_ready(context: Context, domain: Domain, places: tuple[Place, ...]) -> None:
    """Reserve and program the devices of PLACES; on failure give back those that were."""
    state = context.config.paths.state
    wanted = sorted(
        (Wanted(place.request, place.source) for place in places),
        key=lambda each: location_order(each.source),
    )
    start = Start(context, domain, context.release_deadline(), [], [], reserves=True)
    with locks.devices(state, [each.device for each in wanted], context.lock_deadline()):
        # A mediated device has the name that it had; in place of another VF, another was chosen.
        for claim in store.of_domain(state, domain.uuid):
            if claim.device in (each.device for each in wanted):
                release_leftover(start, claim)
        assign(start, wanted)
    learn.from_lists(context.config.paths, start.seen)  # what hinders it stops nothing
