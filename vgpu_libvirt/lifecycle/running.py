# SPDX-License-Identifier: LGPL-2.1-or-later
"""Keeping track of domains that run: the hooks `started`, `stopped` and `reconnect`.

None of them may fail: libvirt kills the guest for a failed `reconnect` or `started`. So each
returns a sentence for every problem, and none ever writes to a device.
"""

from __future__ import annotations

from ..claims import inventory, locks, store
from ..claims.model import Phase, Qemu
from ..devices import backend, profiles
from ..devices.model import Profile
from ..domain.match import match
from ..errors import VgpuError
from ..records import TYPE_CHECKING

if TYPE_CHECKING:
    from ..claims.inventory import LiveDomain
    from ..claims.model import Claim
    from ..domain.match import Wanted
    from ..domain.model import Domain
    from .context import Context


def started(context: Context, domain: Domain) -> list[str]:
    """Note in the domain's claims which QEMU it is."""
    return _note(context, domain)[1]


def _note(context: Context, domain: Domain) -> tuple[LiveDomain | None, list[str]]:
    state = context.config.paths.state
    with locks.host(state, context.lock_deadline()):
        # Model: note. Not before the lock: a hook that stood still there would note an earlier QEMU
        # in a later start's claim.
        live = inventory.live_domain(context.config.paths, domain.name, domain.uuid)
        if live is None:
            return None, [f"the QEMU of domain '{domain.name}' is not in libvirt's status files"]
        # Of others of its claims nothing is noted.
        for claim in store.of_devices(state, live.devices, domain.uuid):
            if (noted := as_running(claim, live)) != claim:
                store.replace(state, noted)
    return live, []


def as_running(claim: Claim, live: LiveDomain) -> Claim:
    """CLAIM as it should stand while its domain is LIVE.

    A device that the domain doesn't have is no longer, or not yet, its QEMU's.
    """
    if claim.device not in live.devices:
        return claim
    return _with_qemu(claim, live)._replace(phase=Phase.RUNNING)


def stopped(context: Context, domain: Domain) -> list[str]:
    """Where a claim doesn't know its QEMU, note who it was: its files are gone at `release`.

    Touches no device: libvirt still has it in its active list, and resets it after this hook.
    """
    state = context.config.paths.state
    if all(claim.qemu for claim in store.of_domain(state, domain.uuid)):
        return []
    with locks.host(state, context.lock_deadline()):
        live = inventory.live_domain(context.config.paths, domain.name, domain.uuid)
        if live is None:
            return []  # no QEMU came of this start, or it is gone altogether
        for claim in store.of_devices(state, live.devices, domain.uuid):
            if claim.qemu is None:
                store.replace(state, _with_qemu(claim, live))
    return []


def reconnect(context: Context, domain: Domain) -> list[str]:
    """Claim, for a domain that runs, what it asks for and has, where nobody has claimed it.

    So a lost store, or one from before this package, is filled again when libvirtd comes back.
    """
    live, problems = _note(context, domain)
    return problems + (adopt(context, domain, live) if live else [])


def adopt(context: Context, domain: Domain, live: LiveDomain) -> list[str]:
    """Claim what DOMAIN asks for, has, and nobody has claimed; return what hindered it."""
    if not domain.asks:
        return []
    problems = []
    # Each by itself: one whose hostdev was never plugged in costs the others nothing.
    for request in [[each] for each in domain.requests] or [[]]:
        try:
            for wanted in match(domain._replace(requests=tuple(request))):
                if wanted.device in live.devices:
                    _adopt(context, domain, wanted, live)
        except VgpuError as error:
            problems.append(str(error))
    return problems


def _adopt(context: Context, domain: Domain, wanted: Wanted, live: LiveDomain) -> None:
    paths = context.config.paths
    claim = store.read(paths.state, wanted.device)
    if claim:
        if claim.domain_uuid != domain.uuid:
            raise VgpuError(
                f"{wanted.device} is in use by domain '{domain.name}', but claimed by {claim.owner}"
            )
        return
    there = backend.read_device(paths.sysfs, wanted.device)
    current = there.type_id
    if current is None:
        raise VgpuError(str(there.error))
    if not current:
        raise VgpuError(f"{wanted.device} of the running domain '{domain.name}' has no vGPU type")
    named = profiles.find(str(current), context.known().profiles)
    profile = named[0] if named else Profile(current, _name_of(wanted, current))
    claim = context.new_claim(domain, wanted.request.alias, wanted.device, there.gpu, profile)
    adopted = _with_qemu(claim, live)._replace(phase=Phase.RUNNING, adopted=True)
    with locks.host(paths.state, context.lock_deadline()):
        now = inventory.live_domain(paths, domain.name, domain.uuid)
        if not now or now.process != live.process or wanted.device not in now.devices:
            return
        store.create(paths.state, adopted)
    context.tell("adopted", adopted, f"libvirt has it running as process {live.process.pid}")


def _name_of(wanted: Wanted, current: int | str) -> str:
    """The name to give a profile that no list shows any more: the one that was asked for."""
    asked = wanted.request.profile
    return f"type {current}" if asked.isdigit() or asked == current else asked


def _with_qemu(claim: Claim, live: LiveDomain) -> Claim:
    qemu = Qemu(live.process.pid, live.process.start, live.monitor)
    return claim._replace(domain_id=live.id, qemu=qemu, error=None)
