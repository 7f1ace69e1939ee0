# SPDX-License-Identifier: LGPL-2.1-or-later
"""What the simulated driver simulates: GPUs, their VFs with types, and what stands against a write.

The filesystem that shows them is driver.py; GPUs of mediated devices are mediated.py.
"""

from __future__ import annotations

import errno
import os
import re
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

_ROW = re.compile(r"(\d+)\s*:\s*(\S.*)")
_SIZE = re.compile(r"-(\d+)[ABCQ]$")
_HEADER = "ID    : vGPU Name\n"
DEVICES = "bus/pci/devices"

# What each driver answers; None: it takes the write.
ERRNOS: dict[str, dict[str, int | None]] = {
    "vendor": {
        "set": errno.EPERM,  # a type over a type
        "clear": errno.EPERM,  # nothing over nothing
        "open": errno.EPERM,
        "busy": errno.EBUSY,
        "unknown": errno.EIO,
        "other size": errno.EIO,
        "full": errno.EIO,
    },
    "rfc": {
        "set": None,
        "clear": None,
        "open": errno.EBUSY,
        "busy": errno.EBUSY,
        "unknown": errno.ENODEV,
        "other size": errno.EINVAL,
        "full": errno.ENOSPC,
    },
}

OPTIONS: dict[str, Any] = {
    "errnos": "vendor",
    "own_list": "empty",  # the list of a VF that has a type: "empty", or "kept"
    "header": "always",  # or "never", or "while-unused": until the GPU has its first vGPU
    "open_writes": "refused",  # or "taken": the driver itself stops nobody
    "busy_ms": 0,  # after a close, in which clearing is refused
    "busy": "refuses",  # or "blocks": the write waits that long
    "write_ms": 0,  # how long any write takes
    "cleans_ms": 0,  # after a close, when the driver removes an mdev itself; 0: never
    "memory_mib": 48 * 1024,  # of each GPU
    "max_instances": 0,  # of one type on a GPU; 0: what the memory gives
    "state": "",  # the package's state directory, to see at each write whether a claim stood
}


class Write(NamedTuple):
    """One write that sets or clears the type of a device, as the log tells it."""

    device: str
    value: str  # the type that it shall have; "0": none
    result: str  # "ok", "ignored", or the name of an errno
    before: int  # the type that the device had
    open: bool  # whether a QEMU had it open at any time during the write
    live: bool  # the same for: a living domain had it
    claimed: bool  # whether a claim file stood when the write began
    pid: int


class Attribute(NamedTuple):
    """A file: what reads it, and what takes a text and the writer's pid; either may raise."""

    read: Callable[[], str]
    write: Callable[[str, int], None] | None = None


class Device:
    """What can have a type, and what stands against writes to it."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.type = 0
        self.is_broken = False
        self.ours = False  # whether the type came by a write through the filesystem
        self.open = self.live = False
        self.busy_until = 0.0
        self.failures: list[dict[str, Any]] = []
        self.holding = False  # whether writes wait until they are let go
        self.mutex = threading.Lock()

    def take(self, value: str, pid: int, act: Callable[[], str]) -> None:
        """Take one write, which ACT makes, or raise OSError; it is in the log either way."""
        options = self.world.options
        with self.mutex:
            claimed = os.path.lexists(f"{options['state']}/claims/{self.name}.json")
            seen = [self.open, self.live]
            before = self.type
            self.world.take_time(self)
            if options["busy"] == "blocks":
                time.sleep(max(0.0, self.busy_until - time.monotonic()) if before else 0.0)
            with self.world.rules:
                result = self._failure(value) or act()
            seen = [seen[0] or self.open, seen[1] or self.live]
            self.world.log.append(Write(self.name, value, result, before, *seen, claimed, pid))
            if result == "ok":
                self.settle()
        if result not in ("ok", "ignored"):
            raise OSError(getattr(errno, result), result)

    def _failure(self, value: str) -> str | None:
        for failure in self.failures:
            if failure["times"] and failure["value"] in (None, int(value)):
                failure["times"] -= 1
                if failure["result"] == "ignored":
                    self.set(0)  # as a driver that drops what it doesn't know
                return str(failure["result"])
        return None

    @property
    def is_busy(self) -> bool:
        return bool(self.type) and time.monotonic() < self.busy_until

    def set(self, type_id: int) -> None:
        """Have a type, by whatever way."""
        self.type = type_id

    def settle(self) -> None:
        """What a write that was taken still waits for."""

    def close(self) -> None:
        """QEMU closes it."""
        self.busy_until = time.monotonic() + self.world.options["busy_ms"] / 1000

    def reset(self) -> None:
        """The power was off."""
        self.set(0)
        self.ours = self.open = self.live = False
        self.busy_until = 0.0


class Vf(Device):
    """One VF of a vendor VFIO GPU."""

    def __init__(self, world: World, gpu: Gpu, name: str) -> None:
        super().__init__(world, name)
        self.gpu = gpu

    def current(self) -> str:
        return f"{self.type}\n"

    def creatable(self) -> str:
        options = self.world.options
        used = any(vf.type for vf in self.gpu.places)
        if self.type and options["own_list"] == "empty":
            rows = []
        else:
            fits = (i for i in self.gpu.types if self.gpu.refusal_of(i, self) is None)
            rows = [f"{i:<5} : {self.gpu.types[i]}\n" for i in fits]
        header = options["header"] == "always" or (options["header"] == "while-unused" and not used)
        return (_HEADER if header else "") + "".join(rows)

    def write(self, text: str, pid: int) -> None:
        """Take one write to `current_vgpu_type`."""
        is_number = re.fullmatch(r"\d{1,10}\n?", text, re.ASCII)
        value = str(int(text)) if is_number else "-1"
        self.take(value, pid, lambda: self._apply(int(value)) if is_number else "EINVAL")

    def _apply(self, wanted: int) -> str:
        refusal = self._refusal(wanted)
        if refusal and (code := ERRNOS[self.world.options["errnos"]][refusal]):
            return errno.errorcode[code]
        self.set(wanted)
        self.ours = True
        return "ok"

    def _refusal(self, wanted: int) -> str | None:
        if self.open and self.world.options["open_writes"] == "refused":
            return "open"
        if wanted == 0:
            if self.is_busy:
                return "busy"
            return None if self.type else "clear"
        if self.type and ERRNOS[self.world.options["errnos"]]["set"]:
            return "set"
        return self.gpu.refusal_of(wanted, self)


class Place(Protocol):
    """What can have one vGPU at a time."""

    is_broken: bool  # until the host boots again

    @property
    def type(self) -> int: ...


class Gpu:
    """A PF with the places for vGPUs that it has: VFs with types, or parents of mdevs."""

    def __init__(self, world: World, lists: str, node: int) -> None:
        self.world = world
        self.types = {int(row[1]): row[2].strip() for row in _ROW.finditer(lists)}
        self.node = node
        self.places: list[Place] = []

    def size(self, type_id: int) -> int:
        match = _SIZE.search(self.types.get(type_id, ""))
        return int(match[1]) * 1024 if match else 0

    def refusal_of(self, type_id: int, place: Place) -> str | None:
        """Why there is no room for one more of this type, at PLACE."""
        if type_id not in self.types:
            return "unknown"
        others = [other.type for other in self.places if other.type and other is not place]
        sizes = [self.size(other) for other in others]
        if sizes and self.size(type_id) != sizes[0]:
            return "other size"
        limit = self.world.options["max_instances"]
        full = sum(sizes) + self.size(type_id) > self.world.options["memory_mib"]
        return "full" if full or (limit and others.count(type_id) >= limit) else None


class World:
    """One host's GPUs, and the filesystem nodes that show them, by path."""

    def __init__(self, name: str, mount: str) -> None:
        self.name, self.mount = name, mount
        self.options = dict(OPTIONS)
        self.gpus: list[Gpu] = []
        self.devices: dict[str, Device] = {}
        self.log: list[Write] = []
        self.unreadable: set[str] = set()  # paths
        self.going: set[str] = set()  # paths that vanish
        self.rules = threading.RLock()  # one write at a time is judged by what others took
        self.changed = threading.Condition()
        self.waiting = 0  # writes that the test holds back
        # path -> names in a directory, target of a link, or an attribute
        self.nodes: dict[str, list[str] | str | Attribute] = {f"/{name}": []}
        self.add_directory(DEVICES)

    def add_directory(self, path: str) -> str:
        here = f"/{self.name}"
        for part in path.split("/"):
            self.add(here, part, [])
            here += f"/{part}"
        return here

    def add(self, parent: str, name: str, node: list[str] | str | Attribute) -> None:
        if f"{parent}/{name}" not in self.nodes:
            self.nodes[f"{parent}/{name}"] = node
            names = self.nodes[parent]
            assert isinstance(names, list)
            names.append(name)

    def add_gpu(
        self, address: str, vfs: dict[str, int], lists: str, node: int, is_mdev: bool = False
    ) -> None:
        """Add a GPU; VFS: address -> number of the IOMMU group."""
        gpu = Gpu(self, lists, node)
        self.gpus.append(gpu)
        pf = self.add_directory(f"{DEVICES}/{address}")
        self.add(pf, "numa_node", Attribute(lambda: f"{gpu.node}\n"))
        for number, (name, group) in enumerate(vfs.items()):
            here = self.add_directory(f"{DEVICES}/{name}")
            self.add(here, "physfn", f"../{address}")
            self.add(here, "iommu_group", f"../../kernel/iommu_groups/{group}")
            self.add(pf, f"virtfn{number}", f"../{name}")
            if is_mdev:
                from tests.faults import mediated

                gpu.places.append(mediated.Parent(self, gpu, name))
            else:
                self._add_vf(gpu, here, name, group)

    def _add_vf(self, gpu: Gpu, here: str, name: str, group: int) -> None:
        self.devices[name] = vf = Vf(self, gpu, name)
        gpu.places.append(vf)
        self.add_directory(f"{DEVICES}/{name}/vfio-dev/vfio{group + 7}")
        self.add(here, "nvidia", [])
        self.add(f"{here}/nvidia", "creatable_vgpu_types", Attribute(vf.creatable))
        self.add(f"{here}/nvidia", "current_vgpu_type", Attribute(vf.current, vf.write))

    def device(self, name: str) -> Device:
        """The device of this NAME; a mediated one, there or not, for what is no VF's."""
        from tests.faults import mediated

        return self.devices.get(name) or self.devices.setdefault(name, mediated.Mdev(self, name))

    def vanish(self, path: str) -> None:
        """Take a link or a directory away, by way of the kernel, which forgets it too."""
        self.going.add(path)
        (os.unlink if isinstance(self.nodes[path], str) else os.rmdir)(f"{self.mount}{path}")

    def forget(self, path: str) -> None:
        """What the kernel has forgotten, or will have; raises OSError where nobody said so."""
        if path not in self.going:
            raise OSError(errno.EPERM, path)
        self.going.discard(path)
        parent, _, name = path.rpartition("/")
        names = self.nodes[parent]
        assert isinstance(names, list)
        names.remove(name)
        for below in [
            each for each in list(self.nodes) if each == path or each.startswith(f"{path}/")
        ]:
            del self.nodes[below]

    def reset(self) -> None:
        """Power cycle the GPUs."""
        for device in list(self.devices.values()):
            device.reset()
        for gpu in self.gpus:
            for place in gpu.places:
                place.is_broken = False

    def take_time(self, device: Device) -> None:
        """Let a write take the time that it takes."""
        time.sleep(self.options["write_ms"] / 1000)
        with self.changed:
            self.waiting += 1
            self.changed.notify_all()
            self.changed.wait_for(lambda: not device.holding)
            self.waiting -= 1
