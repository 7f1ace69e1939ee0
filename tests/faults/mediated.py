# SPDX-License-Identifier: LGPL-2.1-or-later
"""The simulated driver's GPUs of mediated devices: what makes an mdev, and what removes it.

As the kernel does: it refuses a second mdev of a UUID, and no removal. One that is open leaves the
bus at once, and the write waits until it is closed.
"""

from __future__ import annotations

import errno
import threading
from typing import TYPE_CHECKING

from tests.faults.gpus import DEVICES, ERRNOS, Attribute, Device
from vgpu_libvirt.devices.mdev import UUID

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.faults.gpus import Gpu, World

LONGEST = 5.0  # seconds that a removal waits here for the close; the kernel's waits without end
VENDOR = "nvidia-"


class Parent:
    """A VF on which one mdev can be made."""

    def __init__(self, world: World, gpu: Gpu, name: str) -> None:
        self.world, self.gpu, self.name = world, gpu, name
        self.mdev: Mdev | None = None
        self.is_broken = False
        self.path = f"/{world.name}/{DEVICES}/{name}"
        world.add_directory("bus/mdev/devices")
        bus = world.add_directory("class/mdev_bus")
        world.add(bus, name, f"../../{DEVICES}/{name}")
        for type_id, kind in gpu.types.items():
            here = world.add_directory(f"{DEVICES}/{name}/mdev_supported_types/{VENDOR}{type_id}")
            described = f"framebuffer={gpu.size(type_id)}M"
            for file, text in (
                ("name", kind),
                ("description", described),
                ("device_api", "vfio-pci"),
            ):
                world.add(here, file, Attribute(lambda text=text: f"{text}\n"))  # type: ignore[misc]
            world.add(here, "devices", [])
            world.add(here, "available_instances", Attribute(self._available(type_id)))
            world.add(here, "create", Attribute(_unreadable, self._create(type_id)))

    @property
    def type(self) -> int:
        return self.mdev.type if self.mdev else 0

    def _refusal(self, type_id: int) -> str | None:
        return "full" if self.mdev or self.is_broken else self.gpu.refusal_of(type_id, self)

    def _available(self, type_id: int) -> Callable[[], str]:
        return lambda: f"{int(self._refusal(type_id) is None)}\n"

    def _create(self, type_id: int) -> Callable[[str, int], None]:
        def create(text: str, pid: int) -> None:
            if not UUID.fullmatch(uuid := text.strip()):
                raise OSError(errno.EINVAL, text)
            device = self.world.device(uuid)
            assert isinstance(device, Mdev)
            if device.parent:  # or one that is being removed would be waited for
                raise OSError(errno.EEXIST, text)
            device.take(str(type_id), pid, lambda: self._apply(device, type_id))

        return create

    def _apply(self, device: Mdev, type_id: int) -> str:
        if device.parent:
            return "EEXIST"
        refusal = self._refusal(type_id)
        if refusal and (code := ERRNOS[self.world.options["errnos"]][refusal]):
            return errno.errorcode[code]
        device.appear(self, type_id)
        device.ours = True
        return "ok"


class Mdev(Device):
    """A mediated device of one UUID, whether it exists or not."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name)
        self.parent: Parent | None = None
        self.group = 5000 + len(world.devices)
        self.params = ""
        self.is_leaving = False
        self.cleaner: threading.Timer | None = None

    # --- coming and going ---

    def appear(self, parent: Parent, type_id: int) -> None:
        """Be there, with all that shows it."""
        world, uuid = self.world, self.name
        self.type, self.parent, self.params, self.is_leaving = type_id, parent, "", False
        parent.mdev = self
        self._show(f"{VENDOR}{type_id}")
        types = f"{parent.path}/mdev_supported_types/{VENDOR}{type_id}"
        world.add(f"{types}/devices", uuid, f"../../../{uuid}")
        members = world.add_directory(f"kernel/iommu_groups/{self.group}/devices")
        where = f"{DEVICES}/{parent.name}/{uuid}"
        world.add(members, uuid, f"../../../../{where}")
        world.add(f"/{world.name}/bus/mdev/devices", uuid, f"../../../{where}")

    def _show(self, kind: str | None) -> None:
        """Show its directory; without KIND, that of one which is leaving."""
        assert self.parent
        world, here = self.world, f"{self.parent.path}/{self.name}"
        world.add(self.parent.path, self.name, [])
        world.add(here, "iommu_group", f"../../../../kernel/iommu_groups/{self.group}")
        if kind is None:
            return
        world.add(here, "mdev_type", f"../mdev_supported_types/{kind}")
        world.add(here, "vfio-dev", [])
        world.add(f"{here}/vfio-dev", f"vfio{self.group}", [])
        world.add(here, "nvidia", [])
        world.add(f"{here}/nvidia", "vgpu_params", Attribute(lambda: self.params, self._set_params))
        world.add(here, "remove", Attribute(_unreadable, self._remove))

    def leave(self) -> None:
        """Be on the bus no more."""
        assert self.parent
        kind = f"{VENDOR}{self.type}"
        self.world.vanish(f"/{self.world.name}/bus/mdev/devices/{self.name}")
        self.world.vanish(f"{self.parent.path}/mdev_supported_types/{kind}/devices/{self.name}")
        self.world.vanish(f"{self.parent.path}/{self.name}")
        self.is_leaving = True

    def end(self) -> None:
        """Be gone for good."""
        assert self.parent
        if not self.is_leaving:
            self.leave()
        else:
            self.world.vanish(f"{self.parent.path}/{self.name}")
        self.world.vanish(
            f"/{self.world.name}/kernel/iommu_groups/{self.group}/devices/{self.name}"
        )
        self.parent.mdev = self.parent = None
        self.type = 0

    # --- what is written to it ---

    def _remove(self, text: str, pid: int) -> None:
        if text.strip() != "1":
            raise OSError(errno.EINVAL, text)
        self.take("0", pid, self._apply)

    def _apply(self) -> str:
        if self.parent is None:
            return "ENODEV"
        if self.is_busy:
            return "EBUSY"
        if self.cleaner:
            self.cleaner.cancel()
            self.parent.is_broken = True  # until the host boots again
        if self.open:
            self.leave()
            self._show(None)
        else:
            self.end()
        return "ok"

    def settle(self) -> None:
        if not self.is_leaving or self.parent is None:
            return
        with self.world.changed:
            self.world.changed.wait_for(lambda: not self.open, LONGEST)
        with self.world.rules:
            self.end()

    def _set_params(self, text: str, pid: int) -> None:
        if self.open:
            raise OSError(errno.EPERM, text)
        self.params = text

    # --- what else happens to it ---

    def set(self, type_id: int) -> None:
        if self.parent:
            self.end()
        if type_id:
            parents = (place for gpu in self.world.gpus for place in gpu.places)
            free = next(p for p in parents if isinstance(p, Parent) and not p.mdev)
            self.appear(free, type_id)

    def close(self) -> None:
        super().close()
        with self.world.changed:
            self.world.changed.notify_all()
        if cleans := self.world.options["cleans_ms"]:
            self.cleaner = threading.Timer(cleans / 1000, self._clean)
            self.cleaner.start()

    def _clean(self) -> None:
        with self.mutex, self.world.rules:
            self.cleaner = None
            if self.parent and not self.open:
                self.end()


def _unreadable() -> str:
    raise OSError(errno.EACCES, "no file to read")
