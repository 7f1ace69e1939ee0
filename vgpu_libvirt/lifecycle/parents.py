# SPDX-License-Identifier: LGPL-2.1-or-later
"""Where a mediated device shall be made: its name says nothing of that, so it is chosen late."""

from __future__ import annotations

from .. import placement, together
from ..capacity import narrowed
from ..choosing import placed_beside
from ..claims import store
from ..devices import mdev, mdev_slots
from ..errors import RequestError
from ..records import TYPE_CHECKING, NamedTuple
from ..survey import nodes_of

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from ..capacity import Host
    from ..devices.model import Device, Profile
    from ..domain.match import Wanted
    from ..domain.model import Domain
    from .context import Context


class Parent(NamedTuple):
    """A slot in which a mediated device can be made, and the profile as its parent lists it."""

    device: Device
    profile: Profile


def choose(
    context: Context,
    domain: Domain,
    wanted: Sequence[Wanted],
    refused: Collection[str],
    host: Host,
) -> Parent:
    """Where to make the first of WANTED, so that the others, mediated too, find room beside it.

    HOST was looked at before; what has been claimed since counts, if the caller holds the host
    lock. What DOMAIN asks for besides is where it is. On none of the parents in REFUSED. Raises
    RequestError, with the reason for each GPU; StoreError.
    """
    claims = store.read_all(context.config.paths.state)
    # What is only reserved for them is theirs.
    ours = {each.device for each in wanted}
    others = {name: one for name, one in claims.readable.items() if name not in ours}
    awaited = ((each.device, each.gpu, each.profile) for each in others.values())
    inventory = mdev_slots.with_awaited(host.inventory, awaited)
    # By where they are: what stands for one that is claimed already has its name, not a slot's.
    there = {d.name for d in inventory.devices if d.is_mdev and str(d.address) in refused}
    host = host._replace(
        inventory=inventory, claims=claims._replace(readable=others), busy=host.busy | there
    )
    company = placed_beside(domain, {each.request.alias for each in wanted}, host)
    company = company._replace(nodes=nodes_of(context.config, domain))
    host = narrowed(host, (gpu for gpu in host.inventory.gpus if gpu.backend == mdev.BACKEND))
    if not host.inventory.gpus:
        raise RequestError(
            f"the hostdev '{wanted[0].request.alias}' of domain '{domain.name}' is a mediated "
            "device, and no GPU of this host makes these; run 'virt-vgpu sync', which points it at "
            "a VF if there is one"
        )
    wishes = [
        together.Wish(each.request, placement.resolve(each.request.profile, host))
        for each in wanted
    ]
    first, *_ = together.place(wishes, context.config.policy.placement, host, company)
    profile = first.device.listed(wishes[0].profile)
    assert profile is not None  # what lists it was chosen
    return Parent(first.device, profile)
