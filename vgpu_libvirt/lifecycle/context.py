# SPDX-License-Identifier: LGPL-2.1-or-later
"""For whom we act, and the guards that every write to a device goes through."""

from __future__ import annotations

import os
import time

from ..claims import handles, liveness, processes, store, witnesses
from ..claims.model import Claim, Phase
from ..devices import backend
from ..errors import CatalogueError, DeviceError, InUseError, RefusedError
from ..records import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..address import Location
    from ..claims.handles import Handles
    from ..claims.liveness import Answer, Verdict
    from ..claims.model import Process
    from ..claims.witnesses import World
    from ..config import Config
    from ..devices.catalogue import Catalogue
    from ..devices.model import Profile
    from ..domain.model import Domain


class Context(NamedTuple):
    """The configuration, and whose hook this is; the command line's is nobody's."""

    config: Config
    daemon: Process | None = None  # the libvirt daemon that runs the hook
    domain_uuid: str | None = None
    libvirt: Answer | None = None  # what libvirt answered, where it could be asked

    @property
    def daemon_runs(self) -> bool:
        """Whether our daemon is known and still there; an orphaned hook's isn't."""
        return witnesses.running(self.config.paths, self.daemon)

    def lock_deadline(self) -> float:
        """The `time.monotonic()` until which a lock is waited for, from now."""
        return time.monotonic() + self.config.policy.lock_timeout

    def release_deadline(self) -> float:
        """The `time.monotonic()` after which no new attempt on a busy driver is begun, from now."""
        return time.monotonic() + self.config.policy.release_timeout

    def new_claim(
        self, domain: Domain, alias: str, device: str, gpu: Location, profile: Profile
    ) -> Claim:
        """A fresh claim of DOMAIN on DEVICE, with an id that no other ever has.

        Raises RefusedError where the boot can't be told, without which a claim proves nothing.
        """
        proc = self.config.paths.proc
        boot_id = processes.boot_id(proc)
        if boot_id is None:
            raise RefusedError(
                f"{device} can't be claimed, since {proc}/sys/kernel/random/boot_id can't be read"
            )
        return Claim(
            device=device,
            backend=backend.name_of(device),
            gpu=str(gpu),
            profile=profile,
            claim_id=os.urandom(16).hex(),
            phase=Phase.CLAIMED,
            domain_uuid=domain.uuid,
            domain_name=domain.name,
            domain_id=domain.id,
            alias=alias,
            boot_id=boot_id,
            created=time.time(),
            since_boot=processes.since_boot(),
            daemon=self.daemon,
            qemu=None,
            namespaces=processes.namespaces(proc),
        )

    def tell(self, decision: str, claim: Claim, evidence: str) -> None:
        """Tell the host's journal what was decided about CLAIM, and why. Never fails."""
        from .. import events, journal  # which a bystander doesn't pay for

        event = events.of_claim(events.Decision(decision), claim, evidence)
        journal.tell(self.config.paths, event)

    def known(self) -> Catalogue:
        """Every profile that the host can name: in a list, in the catalogue, or in a claim.

        Raises StoreError.
        """
        from ..devices import catalogue, hardware  # what most hooks don't need

        paths = self.config.paths
        try:
            remembered = catalogue.read(paths.state)
        except CatalogueError:
            remembered = catalogue.Catalogue()  # `virt-vgpu status` reports it
        claims = store.read_all(paths.state).readable.values()
        listed = hardware.discover(paths.sysfs).profiles
        return catalogue.known(listed, remembered, [claim.profile for claim in claims])

    def nodes(self, device: str) -> frozenset[str]:
        """The VFIO nodes of DEVICE. Raises DeviceError."""
        return backend.vfio_nodes(self.config.paths.sysfs, device)

    def judge(self, claim: Claim, world: World, start_is_over: bool = False) -> Verdict:
        """The verdict on CLAIM.

        A start of the very domain whose hook we are, by the very daemon that runs us, is over; and
        what was reserved for one without a daemon's hook was reserved for this one.
        """
        ours = claim.domain_uuid == self.domain_uuid and (
            (claim.daemon is not None and claim.daemon == self.daemon)
            or (claim.is_mere_reservation and self.daemon_runs)
        )
        return liveness.judge(
            claim,
            world,
            witnesses.look_at(self.config.paths, claim, world, self.nodes),
            self.config.policy.reserve_timeout,
            start_is_over or ours,
            self.libvirt,
        )

    def write_guard(self, device: str, seen: Handles | None = None) -> Callable[[], None]:
        """A check to make right before each write to DEVICE, programming included.

        It raises InUseError unless a fresh look shows that nobody has the device open: a living
        guest's VF has been seen with type 0. SEEN: a look that was made for the first of them.
        """

        def check() -> None:
            nonlocal seen
            try:
                nodes = self.nodes(device)
            except DeviceError as error:
                raise InUseError(f"whether {device} is in use can't be told: {error}") from error
            now, seen = seen or handles.scan(self.config.paths.proc), None
            if pids := sorted(now.on(nodes)):
                raise InUseError(f"{device} is held open by {self._named(pids[0])}")
            if now.unknown:
                raise InUseError(f"whether {device} is in use can't be told: {now.unknown[0]}")

        return check

    def _named(self, pid: int) -> str:
        try:
            return f"process {pid} ({processes.read_stat(self.config.paths.proc, pid).name})"
        except (OSError, ValueError):
            return f"process {pid}"
