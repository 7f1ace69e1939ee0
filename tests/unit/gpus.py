# SPDX-License-Identifier: LGPL-2.1-or-later
"""A GPU that gives its vGPUs as VFs or as mediated devices, in the same words.

A test that takes `gpus` runs once for each of KINDS: what it says holds for both. Profiles are
called by the number that both have in their ids: 1152 is also `nvidia-1152`.
"""

from __future__ import annotations

import errno
import os

import pytest

from tests.unit.host import WEB1, WEB2, Host
from tests.unit.mdev_host import L40S, MdevHost, OneSize
from vgpu_libvirt import fs
from vgpu_libvirt.address import PciAddress
from vgpu_libvirt.devices import backend, mdev, vendor_vfio
from vgpu_libvirt.devices.mdev_life import mdev_uuid

GPU = "0000:3d:00.0"
UUIDS = {"web1": WEB1, "web2": WEB2}


class Gpus:
    """One GPU, an L40S, in a host. `places`: its VFs, on which mediated devices are made too."""

    backend: str

    def __init__(self, host: Host, monkeypatch: pytest.MonkeyPatch, vfs: int = 4) -> None:
        self.host = host
        self.places = self.add(GPU, vfs)

    def add(self, gpu: str, vfs: int = 4) -> list[str]:
        """One more GPU; return its VFs."""
        raise NotImplementedError

    def device(self, domain: str = "web1", alias: str = "ua-vgpu0") -> str:
        """What the hostdev ALIAS of a domain names: a device that nobody else is given."""
        raise NotImplementedError

    def elsewhere(self) -> str:
        """What the hostdev of web1 named on another host."""
        return self.device()

    def id_of(self, number: int) -> int | str:
        """The driver's id of a profile."""
        raise NotImplementedError

    def type_of(self, device: str) -> int:
        """The number of the profile on a device; 0: none."""
        return int(self.host.type_of(device).removeprefix("nvidia-"))

    def set_type(self, device: str, number: int) -> None:
        """Somebody else puts a profile on a device; 0: takes it off."""
        raise NotImplementedError


class Vfs(Gpus):
    """As VFs under the vendor's own VFIO driver: each device is given the next."""

    backend = vendor_vfio.BACKEND

    def __init__(self, host: Host, monkeypatch: pytest.MonkeyPatch, vfs: int = 4) -> None:
        super().__init__(host, monkeypatch, vfs)
        self._given: dict[tuple[str, str], str] = {}

    def add(self, gpu: str, vfs: int = 4) -> list[str]:
        return self.host.gpu(gpu, vfs)

    def device(self, domain: str = "web1", alias: str = "ua-vgpu0") -> str:
        return self._given.setdefault((domain, alias), self.places[len(self._given)])

    def elsewhere(self) -> str:
        return "0000:af:00.7"

    def id_of(self, number: int) -> int | str:
        return number

    def set_type(self, device: str, number: int) -> None:
        self.host.set_type(device, number)


class Mdevs(Gpus):
    """As mediated devices, one on each VF, all of one size."""

    backend = mdev.BACKEND

    def __init__(self, host: Host, monkeypatch: pytest.MonkeyPatch, vfs: int = 4) -> None:
        self.sysfs = MdevHost(host.root, host.sysfs)
        self.driver = OneSize(self.sysfs)
        self._made = 0  # by others than the driver; each has a group of its own
        monkeypatch.setattr(fs, "write_attribute", self.driver.write_attribute)
        monkeypatch.setattr(backend, "_OWN_CLEANING", 0.0)  # this driver doesn't
        super().__init__(host, monkeypatch, vfs)

    def add(self, gpu: str, vfs: int = 4) -> list[str]:
        pf = PciAddress.parse(gpu)
        numbers = range(4, 4 + vfs)
        names = [str(pf._replace(slot=each // 8, function=each % 8)) for each in numbers]
        for name in names:
            self.sysfs.parent(name, L40S, gpu=gpu)
        return names

    def device(self, domain: str = "web1", alias: str = "ua-vgpu0") -> str:
        return mdev_uuid(UUIDS[domain], alias)

    def id_of(self, number: int) -> int | str:
        return f"nvidia-{number}"

    def set_type(self, device: str, number: int) -> None:
        place = self.parent_of(device)
        if place:
            self.sysfs.end_mdev(device)
        if number:
            taken = {self.parent_of(each.name) for each in self.sysfs.mdevs.iterdir()}
            place = place or next(each for each in self.places if each not in taken)
            self._made += 1
            self.sysfs.mdev(device, place, f"nvidia-{number}", group=900 + self._made)
        self.driver.recount()

    def parent_of(self, device: str) -> str | None:
        """Where a mediated device is; None: it isn't there."""
        link = self.sysfs.mdevs / device
        return link.resolve().parent.name if link.is_symlink() else None


KINDS: tuple[type[Gpus], ...] = (Vfs, Mdevs)
# What is a rule for one kind alone.
of_vfs = pytest.mark.parametrize("gpus", [Vfs], ids=[Vfs.backend], indirect=True)
of_mdevs = pytest.mark.parametrize("gpus", [Mdevs], ids=[Mdevs.backend], indirect=True)


def refusing(monkeypatch: pytest.MonkeyPatch, *bad: str) -> None:
    """The driver puts no profile on these devices, or on what is made at these places."""
    real = fs.write_attribute

    def write(path: str, text: str) -> None:
        if text != "0" and any(f"/{name}/" in path or text == name for name in bad):
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        real(path, text)

    monkeypatch.setattr(fs, "write_attribute", write)
