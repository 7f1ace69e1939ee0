# SPDX-License-Identifier: LGPL-2.1-or-later
"""Makes the VFs of the GPUs that [sriov] in the configuration lists, after a boot took them away.

The vendor's program takes the driver off the GPU and puts it back, under whatever runs there. So it
is run only for a GPU that has no VF, that nobody uses, and where both can be told.
"""

from __future__ import annotations

import os
import time
from enum import Enum, auto
from typing import TYPE_CHECKING, NamedTuple

from . import fs
from .claims import locks, witnesses
from .devices import mdev, vendor_programs, vendor_vfio
from .devices.vendor_programs import ENABLED
from .errors import DeviceError, SriovError

if TYPE_CHECKING:
    from collections.abc import Callable

    from .address import PciAddress
    from .claims.witnesses import World
    from .config import Config, Paths

_DRIVER = "nvidia"
_ATTEMPTS = 5  # while others have the GPU open
# Seconds:
_ATTEMPT_PAUSE = 1.0
_SETTLES = 20.0  # at boot, until the driver has taken the GPU, or who else makes VFs is done
_VFS_COME = 30.0  # after the program has ended; drivers make VFs on their own time
_PAUSE = 0.2


class Seen(NamedTuple):
    """A GPU as it is now."""

    gpu: PciAddress
    is_there: bool
    is_vf: bool
    driver: str | None
    can_have: int | None  # VFs; None: it has no SR-IOV
    number: int  # of VFs that it has, as the kernel counts
    links: int  # to VFs
    ready: int  # VFs that can be given a vGPU
    taken: tuple[str, ...] = ()  # who has a vGPU or a file of it open: parts of a sentence
    doubts: tuple[str, ...] = ()  # what can't be told about that

    @property
    def has(self) -> int:
        """How many VFs there are, or are just being made."""
        return max(self.number, self.links)

    @property
    def is_whole(self) -> bool:
        """Whether it has VFs, all of which can be given vGPUs."""
        return self.driver == _DRIVER and 0 < self.number == self.links == self.ready


class Act(Enum):
    """What is to be done."""

    DO = auto()
    LEAVE = auto()  # it is as it should be
    REFUSE = auto()


class Decision(NamedTuple):
    """What is to be done, and the sentence that says why or why not."""

    act: Act
    why: str = ""


def whether_to_make(seen: Seen) -> Decision:
    """Whether the VFs of a GPU are to be made."""
    gpu = seen.gpu
    if not seen.is_there:
        return Decision(Act.REFUSE, f"{gpu} is not on this host; correct [sriov]")
    if seen.is_vf:
        return Decision(Act.REFUSE, f"{gpu} is a VF; name its GPU in [sriov] instead")
    if seen.can_have is None:
        return Decision(Act.REFUSE, f"{gpu} has no SR-IOV; is it switched off in the firmware?")
    if seen.has:
        if seen.ready == seen.has:
            return Decision(Act.LEAVE, f"{gpu} has {_vfs(seen.has)} already")
        return Decision(
            Act.REFUSE,
            f"{gpu} has {_vfs(seen.has)} already, but only {seen.ready} that can be given vGPUs; "
            "look whether nvidia-vgpu-mgr runs, and into 'dmesg'",
        )
    if seen.driver != _DRIVER:
        now = f"is bound to {seen.driver}" if seen.driver else "has no driver"
        return Decision(
            Act.REFUSE, f"{gpu} {now}, so no VFs are made; it needs the vendor's driver"
        )
    return _if_nobody_is_there(seen, f"no VFs of {gpu} are made")


def whether_to_mix(seen: Seen, mode: str) -> Decision:
    """Whether a GPU, with MODE as the vendor words it, is to be told to mix sizes."""
    gpu = seen.gpu
    if mode == ENABLED:
        return Decision(Act.LEAVE, f"{gpu} mixes sizes already")
    if mode != "Disabled":
        return Decision(
            Act.REFUSE, f"{gpu} can't mix sizes: its mode is '{mode}', as in MIG or on older GPUs"
        )
    if not seen.has:
        return Decision(Act.REFUSE, f"{gpu} has no VFs, and making them would undo mixed sizes")
    return _if_nobody_is_there(seen, f"{gpu} is not told to mix sizes")


def serve(config: Config, gpu: PciAddress, dry_run: bool = False) -> tuple[str, ...]:
    """Do what [sriov] says for GPU, and return it as sentences; with DRY_RUN what would be done.

    Raises SriovError for what was refused or failed, LockTimeoutError, StoreError.
    """
    if gpu in config.policy.exclude:
        raise SriovError(f"{gpu} is in [sriov], but [policy] excludes it; correct one of them")
    said = [_make(config, gpu, dry_run)]
    if gpu in config.sriov.mixed_size:
        try:
            said.append(_mix(config, gpu, dry_run))
        except SriovError as error:
            raise SriovError(f"{'; '.join([*said, str(error)])}") from error
    return tuple(said)


def look(paths: Paths, gpu: PciAddress) -> Seen:
    """Look at GPU, and at who uses it or any of its VFs."""
    bare = _look_at_device(paths, gpu)
    vfs = vendor_vfio.virtual_functions(paths.sysfs, gpu)
    world = witnesses.look_around(paths)
    taken, doubts = [], [*world.handles.unknown[:1], *world.domains.problems[:1]]
    for function in (gpu, *vfs):
        try:
            taken += _who_is_on(paths, function, world)
        except DeviceError as error:
            doubts.append(str(error))
        except OSError as error:
            doubts.append(f"{function} can't be looked at: {fs.reason(error)}")
    return bare._replace(taken=tuple(taken), doubts=tuple(doubts))


def _make(config: Config, gpu: PciAddress, dry_run: bool) -> str:
    paths = config.paths
    if dry_run:
        decision = whether_to_make(look(paths, gpu))
        if decision.act is Act.REFUSE:
            raise SriovError(decision.why)
        return decision.why or f"the VFs of {gpu} would be made"
    _until(lambda: _is_settled(_look_at_device(paths, gpu)), _SETTLES)
    with locks.devices(paths.state, [str(gpu)], time.monotonic() + config.policy.lock_timeout):
        for attempt in range(_ATTEMPTS):
            if attempt:
                time.sleep(_ATTEMPT_PAUSE)
            decision = whether_to_make(look(paths, gpu))  # anew each time, right before it
            if decision.act is Act.REFUSE:
                raise SriovError(decision.why)
            if decision.act is Act.LEAVE:
                return decision.why
            ran = vendor_programs.make_vfs(paths, gpu)
            if not ran.is_locked_out:
                break
        else:
            raise SriovError(
                f"no VFs of {gpu} could be made, since something has it open: {ran}; stop what "
                "watches or uses GPUs (nvidia-persistenced, dcgm, nvidia-smi), and run 'virt-vgpu "
                "sriov'"
            )
        _until(lambda: _look_at_device(paths, gpu).is_whole, _VFS_COME)
        now = _look_at_device(paths, gpu)
    if not now.is_whole:
        driver = "" if now.driver == _DRIVER else f", whose driver is {now.driver or 'gone'} now,"
        raise SriovError(
            f"{gpu}{driver} has {_vfs(now.has)}, of which {now.ready} can be given vGPUs: {ran}"
        )
    return f"{gpu} has {_vfs(now.has)} now"


def _mix(config: Config, gpu: PciAddress, dry_run: bool) -> str:
    paths = config.paths
    if dry_run:
        seen = look(paths, gpu)
        if not seen.has:
            return f"{gpu} would then be told to mix sizes"
        decision = whether_to_mix(seen, vendor_programs.mixed_mode(paths, gpu))
        if decision.act is Act.REFUSE:
            raise SriovError(decision.why)
        return decision.why or f"{gpu} would be told to mix sizes"
    vfs = vendor_vfio.virtual_functions(paths.sysfs, gpu)
    names = [str(gpu), *map(str, vfs)]  # nobody of ours sets a first type meanwhile
    with locks.devices(paths.state, names, time.monotonic() + config.policy.lock_timeout):
        mode = vendor_programs.mixed_mode(paths, gpu)
        decision = whether_to_mix(look(paths, gpu), mode)
        if decision.act is Act.REFUSE:
            raise SriovError(decision.why)
        if decision.act is Act.LEAVE:
            return decision.why
        ran = vendor_programs.mix_sizes(paths, gpu)
        mode = vendor_programs.mixed_mode(paths, gpu)
    if mode != ENABLED:
        raise SriovError(f"{gpu} was told to mix sizes, but its mode is '{mode}': {ran}")
    return f"{gpu} mixes sizes now"


def _if_nobody_is_there(seen: Seen, undone: str) -> Decision:
    if seen.taken:
        return Decision(Act.REFUSE, f"{undone}: {', '.join(seen.taken)}")
    if seen.doubts:
        return Decision(
            Act.REFUSE, f"{undone}, since it can't be told who uses it: {seen.doubts[0]}"
        )
    return Decision(Act.DO)


def _look_at_device(paths: Paths, gpu: PciAddress) -> Seen:
    directory = vendor_vfio.directory(paths.sysfs, gpu)
    try:
        names = os.listdir(directory)
    except OSError:
        return Seen(gpu, False, False, None, None, 0, 0, 0)
    ready = [
        vf
        for vf in vendor_vfio.virtual_functions(paths.sysfs, gpu)
        if vendor_vfio.is_vgpu_vf(paths.sysfs, vf) or _has_mdev_types(paths, vf)
    ]
    return Seen(
        gpu,
        True,
        "physfn" in names,
        vendor_vfio.driver_of(paths.sysfs, gpu),
        _number(f"{directory}/sriov_totalvfs"),
        _number(f"{directory}/sriov_numvfs") or 0,
        sum(name.startswith("virtfn") for name in names),
        len(ready),
    )


def _is_settled(seen: Seen) -> bool:
    if seen.can_have is None:
        return True  # nothing to wait for
    return seen.is_whole if seen.has else seen.driver is not None


def _who_is_on(paths: Paths, function: PciAddress, world: World) -> list[str]:
    """Who uses a GPU or VF, as parts of a sentence. Raises DeviceError where it can't be told."""
    who = []
    if domain := world.domains.using(str(function)):
        who.append(f"{function} is in use by domain '{domain.name}'")
    directory = vendor_vfio.directory(paths.sysfs, function)
    if pids := world.handles.on(vendor_vfio.vfio_nodes(paths.sysfs, function)):
        who.append(f"{function} is open in process {min(pids)}")
    if vendor_vfio.is_vgpu_vf(paths.sysfs, function):
        if type_id := vendor_vfio.read_current(paths.sysfs, function):
            who.append(f"{function} has type {type_id}")
    elif any(mdev.UUID.fullmatch(name) for name in os.listdir(directory)):
        who.append(f"{function} has a mediated device")
    return who


def _has_mdev_types(paths: Paths, vf: PciAddress) -> bool:
    return os.path.isdir(f"{vendor_vfio.directory(paths.sysfs, vf)}/mdev_supported_types")


def _number(path: str) -> int | None:
    try:
        return int(fs.read_text(path))
    except (OSError, ValueError):
        return None


def _vfs(number: int) -> str:
    return "1 VF" if number == 1 else f"{number} VFs"


def _until(condition: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(_PAUSE)
