# SPDX-License-Identifier: LGPL-2.1-or-later
"""What becomes of claims and devices when a domain that runs gets a device, or lets one go.

libvirt runs no hook for either, so whoever asks it to plug makes the device ready before, and gives
it back after. The claim is a reservation then, by the daemon that will be asked: it lapses where
whoever asked is gone, and `sync` notes that it runs where libvirt did plug it in.
"""

from __future__ import annotations

from ..claims import inventory, locks, processes, store, witnesses
from ..claims.liveness import State
from ..claims.model import Qemu
from ..errors import KeptError, RefusedError, VgpuError
from ..records import TYPE_CHECKING
from . import learn, running, suitability
from .assign import Start, assign, release_leftover
from .context import Context
from .release import give_back, keep_visibly

if TYPE_CHECKING:
    from ..claims.inventory import LiveDomain
    from ..claims.model import Claim
    from ..config import Config
    from ..domain.match import Wanted
    from ..domain.model import Domain


def by_daemon(config: Config) -> Context:
    """For whom a device is made ready: the libvirt daemon that will be asked to plug it in.

    Raises RefusedError where none can be found.
    """
    proc = config.paths.proc
    try:
        daemon = processes.running_daemon(proc)
    except OSError as error:
        raise RefusedError(f"the processes in {proc} can't be listed: {error.strerror}") from error
    if daemon is None:
        raise RefusedError(
            f"no libvirtd or virtqemud is among the processes in {proc}; run this where it runs"
        )
    return Context(config, daemon)


def make_ready(context: Context, domain: Domain, wanted: Wanted) -> Claim:
    """Claim and program a device for DOMAIN, which runs; then libvirt can be asked to plug it in.

    Raises VgpuError where that can't be; then nothing is left, or is said to be.
    """
    paths = context.config.paths
    with locks.devices(paths.state, [wanted.device], context.lock_deadline()):
        live = _live(context, domain)
        qemu = Qemu(live.process.pid, live.process.start, live.monitor)
        deadline = context.release_deadline()
        plug = Start(context, live.domain._replace(id=live.id), deadline, [], [], True, qemu)
        _check_new(context, live, wanted)
        earlier = store.read(paths.state, wanted.device)
        if earlier and earlier.domain_uuid == domain.uuid:
            release_leftover(plug, earlier)
        suitability.check_places(context, live.domain, (wanted,))
        (claim,) = assign(plug, [wanted])
    learn.from_lists(paths, plug.seen)  # what hinders it stops nothing
    return claim


def plugged(context: Context, claim: Claim) -> list[str]:
    """Note that libvirt plugged in the device of CLAIM; return what hindered it, for a later sync.

    Raises RefusedError where the claim stands no more: then somebody else may get the device.
    """
    paths = context.config.paths
    try:
        with locks.host(paths.state, context.lock_deadline()):
            live = inventory.live_domain(paths, claim.domain_name, claim.domain_uuid)
            now = store.read(paths.state, claim.device)
            if now and now.claim_id == claim.claim_id:
                if live and (noted := running.as_running(now, live)) != now:
                    store.replace(paths.state, noted)
                return []
    except VgpuError as error:
        return [f"'virt-vgpu sync' notes that {claim.device} runs, since now it can't be: {error}"]
    raise RefusedError(
        f"{claim.device} was taken from {claim.owner} before it was plugged in: that took longer "
        "than reserve_timeout in [policy], or the domain was started anew; try again"
    )


def take_back(context: Context, claim: Claim, is_over: bool) -> list[str]:
    """Give back a device that could not be plugged in; return a sentence for what stays.

    IS_OVER: libvirt answered, so it isn't about to plug it in. Otherwise that is left to the time
    after which the claim lapses. A claim that doesn't stand any more is nobody's to give back.
    """
    try:
        with locks.devices(context.config.paths.state, [claim.device], context.lock_deadline()):
            give_back(context, claim, context.release_deadline(), start_is_over=is_over)
    except KeptError as error:
        return [f"{claim.device} stays claimed until 'virt-vgpu sync' can tell: {error}"]
    except VgpuError as error:
        hindered = keep_visibly(context, claim, str(error))
        return [f"{claim.device} stays claimed until it can be cleared: {error}", *hindered]
    return []


def track(context: Context, domain: Domain, alias: str) -> list[str]:
    """Note what runs in the claims of DOMAIN, and claim what it has as ALIAS where nobody has.

    So a claim that `started` didn't see, or one that is missing, is right when the device goes.
    Return what hindered it. Raises VgpuError where nothing can be noted at all.
    """
    live = _live(context, domain)
    problems = running.started(context, domain)
    asked = tuple(request for request in live.domain.requests if request.alias == alias)
    if not asked or live.domain.hostdev(alias) is None:
        return problems
    return problems + running.adopt(context, live.domain._replace(requests=asked), live)


def why_not_gone(context: Context, domain: Domain, device: str, claim: Claim | None) -> str:
    """What shows that DOMAIN, which ran, still has DEVICE; empty: nothing, it may be given back.

    CLAIM is the domain's on it, if there is one.
    """
    if claim:
        world = witnesses.look_around(context.config.paths, claim.daemon)
        verdict = context.judge(claim, world)
        return "" if verdict.state is State.DEAD else verdict.why
    live = inventory.live_domain(context.config.paths, domain.name, domain.uuid)
    return f"libvirt lists it in domain '{domain.name}'" if live and device in live.devices else ""


def _live(context: Context, domain: Domain) -> LiveDomain:
    paths = context.config.paths
    live = inventory.live_domain(paths, domain.name, domain.uuid)
    if live is None:
        raise RefusedError(
            f"domain '{domain.name}' ({domain.uuid}) is not among the running domains in "
            f"{paths.libvirt_run}/qemu; run this where its libvirt runs"
        )
    return live


def _check_new(context: Context, live: LiveDomain, wanted: Wanted) -> None:
    """Check that LIVE has neither the device yet nor a claim under the alias."""
    if wanted.device in live.devices:
        raise RefusedError(f"domain '{live.name}' has {wanted.device} already")
    alias = wanted.request.alias
    for claim in store.of_domain(context.config.paths.state, live.uuid):
        if claim.alias == alias and claim.device != wanted.device:
            raise RefusedError(
                f"domain '{live.name}' has a claim on another device for '{alias}'; choose another "
                "alias, or let 'virt-vgpu sync' give that one back first"
            )
