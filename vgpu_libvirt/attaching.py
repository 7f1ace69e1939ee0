# SPDX-License-Identifier: LGPL-2.1-or-later
"""Giving a domain one more vGPU: in its definition, plugged into what runs, or both.

For what runs, the device is claimed and programmed before libvirt is asked, with no lock held, to
plug it in. Whoever is killed in between leaves a claim that lapses, or that `sync` finds to run.
"""

from __future__ import annotations

import contextlib

from . import choosing, journal, libvirt_api, placement, sides, together, trying
from .claims import store
from .domain.match import Wanted
from .errors import LibvirtError, RequestError, StoreError, VgpuError
from .lifecycle import hotplug
from .records import TYPE_CHECKING, NamedTuple
from .revert import Revert
from .survey import look, nodes_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from .address import Location
    from .capacity import Host
    from .config import Config
    from .devices.model import Device, Inventory
    from .domain.model import Domain, Request
    from .libvirt_api import Definition
    from .lifecycle.context import Context


class Choice(NamedTuple):
    """What a domain gets, and the end of a sentence that says why there."""

    request: Request  # its profile by its full name
    device: Device  # of a mediated one, where it can be made
    source: Location  # what its hostdev names
    why: str
    inventory: Inventory  # all that the host had to choose from


def choose(
    config: Config,
    connection: Any,
    both: Sequence[Definition],
    request: Request,
    refused: frozenset[str] = frozenset(),
    preferred: str | None = None,
) -> Choice:
    """A device for REQUEST, which a domain with the sides BOTH has not yet, but those that REFUSED.

    The side that runs, if it is among them, says where its other vGPUs are. The PREFERRED device,
    if it will do. Writes nothing. Raises RequestError where there is none, LibvirtError.
    """
    domains = [sides.parsed(side) for side in both]
    domain = domains[-1]
    others = choosing.others(libvirt_api.definitions(connection), domain.uuid)
    host = look(config).host
    host = host._replace(
        pointed=choosing.pointed_by(others),
        busy=host.busy | choosing.pointed_by(domains) | refused,
    )
    request = request._replace(profile=placement.resolve(request.profile, host).name)
    nodes = nodes_of(config, domain._replace(requests=(request,)))
    device, why = _one_more(domain, request, nodes, config.policy.placement, host, preferred)
    source = choosing.source_of(device, domain, request.alias)
    return Choice(request, device, source, why, host.inventory)


def _one_more(
    domain: Domain,
    request: Request,
    nodes: frozenset[int],
    policy: str,
    host: Host,
    preferred: str | None,
) -> together.Choice:
    """The PREFERRED device, if that will do; else any. Raises RequestError."""
    others = {device.name for device in host.inventory.devices} - {preferred}
    if len(others) < len(host.inventory.devices):
        with contextlib.suppress(RequestError):
            there = host._replace(busy=host.busy | others)
            return choosing.one_more(domain, request, nodes, policy, there)
    return choosing.one_more(domain, request, nodes, policy, host)


def define(definition: Definition, choice: Choice) -> None:
    """Write CHOICE into a definition: request and hostdev, or neither. Raises LibvirtError."""
    left: list[str] = []
    try:
        with Revert() as undo:
            sides.add(definition, choice.request, choice.source, undo, left)
    except LibvirtError as error:
        raise LibvirtError("; ".join([str(error), *left])) from error


def plug(
    config: Config, connection: Any, both: Sequence[Definition], request: Request
) -> tuple[Choice, list[str]]:
    """Plug a vGPU into a domain that runs, the last of BOTH sides; return what isn't noted yet.

    Where a device refuses, others are tried. Raises VgpuError; what isn't as before is said then.
    """

    def add(choice: Choice, undo: Revert, left: list[str]) -> None:
        for side in both:
            sides.add(side, choice.request, choice.source, undo, left)

    return plug_by(config, connection, both, request, add)


def plug_by(
    config: Config,
    connection: Any,
    both: Sequence[Definition],
    request: Request,
    add: Callable[[Choice, Revert, list[str]], None],
    preferred: str | None = None,
) -> tuple[Choice, list[str]]:
    """As `plug`, by ADD, which raises LibvirtError, and says in its list what can't be undone.

    The PREFERRED device is tried first, if it will do.
    """
    context = hotplug.by_daemon(config)
    refused: dict[str, None] = {}  # devices, in the order in which they were tried
    failure: VgpuError | None = None
    left: list[str] = []  # what could not be undone
    for _ in range(trying.MOST_TRIES):
        try:
            choice = choose(config, connection, both, request, frozenset(refused), preferred)
        except RequestError as error:
            failure = failure or error
            break
        try:
            return choice, _plug(context, both, choice, add, left)
        except StoreError as error:
            raise _who_may(error, config) from error
        except VgpuError as error:
            failure = error
            if left or _is_claimed(config, both, request):
                break
            if not trying.to_blame(error, [choice.device]):
                break
            refused[choice.device.name] = None
    assert failure is not None
    told = trying.with_tried(failure, refused)
    journal.refused(config.paths, "attach", sides.parsed(both[-1]), told)
    raise told


def _plug(
    context: Context,
    both: Sequence[Definition],
    choice: Choice,
    add: Callable[[Choice, Revert, list[str]], None],
    left: list[str],
) -> list[str]:
    """Claim, program and plug in; or undo it, last first, and say in LEFT what stays."""
    live = both[-1]
    wanted = Wanted(choice.request, choice.source)
    claim = hotplug.make_ready(context, sides.parsed(live), wanted)

    def give_up() -> None:
        left.extend(hotplug.take_back(context, claim, is_over=_answers(live)))

    try:
        with Revert() as undo:
            undo.add(give_up)
            add(choice, undo, left)
            return hotplug.plugged(context, claim)
    except VgpuError as error:
        raise type(error)("; ".join([str(error), *left])) from error


def _answers(live: Definition) -> bool:
    """Whether libvirt answers still, so that what it said before was its answer."""
    try:
        libvirt_api.look_again(live)
    except LibvirtError:
        return False
    return True


def _is_claimed(config: Config, both: Sequence[Definition], request: Request) -> bool:
    """Whether what an attempt claimed for REQUEST could not be given back."""
    claims = store.of_domain(config.paths.state, both[-1].uuid)
    return any(claim.alias == request.alias for claim in claims)


def _who_may(error: StoreError, config: Config) -> StoreError:
    if not isinstance(error.__cause__, PermissionError):
        return error
    return StoreError(
        f"only root may claim devices in {config.paths.state}; run 'virt-vgpu attach --live' with "
        "sudo"
    )
