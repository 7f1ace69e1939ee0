# SPDX-License-Identifier: LGPL-2.1-or-later
"""A sysfs with parents of mediated devices, and a driver that makes and removes them.

The links are as the kernel makes them. What can't be had is the kernel's side of a write, which the
`Driver` plays: `fs.write_attribute` goes to it.
"""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

DATA = Path(__file__).parent / "data/mdev"


class Type(NamedTuple):
    """A type as a catalogue of DATA has it; None: there is no such file."""

    id: str
    name: str | None
    available: str
    description: str | None
    api: str | None = "vfio-pci"


def catalogue(name: str) -> list[Type]:
    """Types in the order of the file: id, name, available instances, description."""
    lines = (DATA / f"{name}.txt").read_text().splitlines()
    return [Type(*(part.strip() for part in line.split(" | "))) for line in lines]


A2 = catalogue("a2")  # of a VF of a GPU that has a vGPU of 4 GB
P40 = catalogue("p40")  # of a GPU without VFs
# Of a VF of an idle L40S: as its list of 8Q and its neighbours, in the words of the A2's.
L40S = [
    Type(
        f"nvidia-{number}",
        f"NVIDIA L40S-{size}Q",
        "1",
        f"num_heads=4, frl_config=60, framebuffer={1024 * size}M, max_resolution=7680x4320, "
        f"max_instance={48 // size}",
    )
    for number, size in ((1148, 2), (1150, 4), (1152, 8), (1155, 24), (1156, 48))
]
MTTY = [
    Type("mtty-1", "Single port serial", "24", None),
    Type("mtty-2", "Dual port serial", "12", None),
]
GVT = [
    Type(
        "i915-GVTg_V5_4",
        None,
        "1",
        "low_gm_size: 128MB\nhigh_gm_size: 512MB\nfence: 4\nresolution: 1920x1200\nweight: 4",
    ),
    Type(
        "i915-GVTg_V5_8",
        None,
        "2",
        "low_gm_size: 64MB\nhigh_gm_size: 384MB\nfence: 4\nresolution: 1024x768\nweight: 2",
    ),
]


class MdevHost:
    """Builds the tree."""

    def __init__(self, root: Path, sysfs: Path | None = None) -> None:
        self.sysfs = sysfs or root / "sys"
        self.bus = self.sysfs / "class/mdev_bus"
        self.mdevs = self.sysfs / "bus/mdev/devices"
        self.pci = self.sysfs / "bus/pci/devices"
        for directory in (self.bus, self.mdevs, self.pci):
            directory.mkdir(parents=True, exist_ok=True)

    @property
    def path(self) -> str:
        return str(self.sysfs)

    def _place(self, name: str) -> Path:
        is_pci = ":" in name
        return self.sysfs / "devices" / ("pci0000:00" if is_pci else f"virtual/{name}") / name

    def gpu(self, name: str, node: int = -1) -> Path:
        place = self._place(name)
        place.mkdir(parents=True, exist_ok=True)
        (place / "numa_node").write_text(f"{node}\n")
        if not (self.pci / name).is_symlink():
            (self.pci / name).symlink_to(os.path.relpath(place, self.pci))
        return place

    def parent(self, name: str, types: list[Type], gpu: str | None = None) -> Path:
        """Add a parent; a VF of GPU, or its own. Return its types' directory."""
        place = self.gpu(name) if ":" in name else self._place(name)
        if gpu:
            self.gpu(gpu)
            (place / "physfn").symlink_to(f"../{gpu}")
        for each in types:
            directory = place / "mdev_supported_types" / each.id
            (directory / "devices").mkdir(parents=True)
            (directory / "create").write_text("")
            (directory / "available_instances").write_text(f"{each.available}\n")
            for file, text in (
                ("name", each.name),
                ("description", each.description),
                ("device_api", each.api),
            ):
                if text is not None:
                    (directory / file).write_text(f"{text}\n")
        (self.bus / name).symlink_to(os.path.relpath(place, self.bus))
        return place / "mdev_supported_types"

    def mdev(self, uuid: str, parent: str, type_id: str, group: int = 23) -> Path:
        """Add an mdev."""
        place = self._place(parent) / uuid
        (place / f"vfio-dev/vfio{group - 16}").mkdir(parents=True)
        (place / "remove").write_text("")
        (place / "iommu_group").symlink_to(f"../../../../kernel/iommu_groups/{group}")
        members = self.sysfs / f"kernel/iommu_groups/{group}/devices"
        members.mkdir(parents=True, exist_ok=True)
        (members / uuid).symlink_to(os.path.relpath(place, members))
        (place / "mdev_type").symlink_to(f"../mdev_supported_types/{type_id}")
        (self.mdevs / uuid).symlink_to(os.path.relpath(place, self.mdevs))
        return place

    def leave(self, place: Path) -> None:
        """Begin the removal of an mdev that is open."""
        (self.mdevs / place.name).unlink()
        (place / "mdev_type").unlink()
        (place / "remove").unlink()
        shutil.rmtree(place / "vfio-dev")

    def end_mdev(self, uuid: str) -> None:
        place = (self.mdevs / uuid).resolve()
        (self.mdevs / uuid).unlink()
        self.close(uuid)
        shutil.rmtree(place)

    def close(self, uuid: str) -> None:
        """Let VFIO go of an mdev that is leaving; its driver may not be done."""
        for link in self.sysfs.glob(f"kernel/iommu_groups/*/devices/{uuid}"):
            link.unlink()

    def tree(self) -> dict[str, str]:
        """Every file with its content, to show that nothing was written."""
        return {
            str(path): os.readlink(path) if path.is_symlink() else path.read_text()
            for path in self.sysfs.rglob("*")
            if path.is_symlink() or path.is_file()
        }


class Clock:
    """Stands in for the module `time`, so that a slow machine fails no test."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.pauses: list[float] = []
        self.at: dict[float, Callable[[], None]] = {}  # what happens when

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds
        for when in [when for when in self.at if when <= self.now]:
            self.at.pop(when)()


class Driver:
    """The kernel's side of each write; it notes them all, and the guard's calls between them."""

    def __init__(self, host: MdevHost) -> None:
        self.host = host
        self.clock = Clock()
        self.log: list[str] = []  # "guard", and each write as FILE <- TEXT
        self.answers: list[int | None] = []  # errno of the next writes; None: by the rules
        self.silent = False  # takes everything and does nothing
        self._made = 0  # each mdev has a group of its own
        self.before_write: Callable[[], None] = lambda: None
        self.after_write: Callable[[], None] = lambda: None

    def guard(self) -> None:
        self.log.append("guard")

    def write_attribute(self, path: str, text: str) -> None:
        self.before_write()
        file = os.path.basename(path)
        self.log.append(f"{file} <- {text}")
        try:
            refusal = self.answers.pop(0) if self.answers else None
            if refusal is None and not os.path.exists(path):
                refusal = errno.ENOENT
            if refusal is not None:
                raise OSError(refusal, os.strerror(refusal), path)
            if not self.silent:
                getattr(self, f"_{file}")(Path(path), text)
        finally:
            self.after_write()

    def _create(self, path: Path, text: str) -> None:
        if (self.host.mdevs / text).is_symlink():
            raise OSError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        type_id = path.parent.name
        available = path.parent / "available_instances"
        if int(available.read_text()) == 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        available.write_text(f"{int(available.read_text()) - 1}\n")
        self._made += 1
        self.host.mdev(text, path.resolve().parents[2].name, type_id, group=22 + self._made)

    def _remove(self, path: Path, text: str) -> None:
        assert text == "1"
        self.host.end_mdev(path.parent.name)

    def _vgpu_params(self, path: Path, text: str) -> None:
        path.write_text(f"{text[:-1]}\n")  # the last character is taken for the line's end

    def _current_vgpu_type(self, path: Path, text: str) -> None:
        path.write_text(text)  # a VF of another GPU


class OneSize(Driver):
    """Of GPUs whose mdevs are all of one size; a VF takes one, a GPU without VFs all that fit."""

    def _create(self, path: Path, text: str) -> None:
        super()._create(path, text)
        self.recount()

    def _remove(self, path: Path, text: str) -> None:
        super()._remove(path, text)
        self.recount()

    def recount(self) -> None:
        """Say anew what could be made where, as the driver does at every look."""
        mdevs = [link.resolve() for link in self.host.mdevs.iterdir()]
        sizes: dict[str, list[str]] = {}
        for place in mdevs:
            sizes.setdefault(self._gpu(place.parent), []).append(self._size(place / "mdev_type"))
        taken = {place.parent.name for place in mdevs}
        for parent in (link.resolve() for link in self.host.bus.iterdir()):
            here = sizes.get(self._gpu(parent), [])
            is_vf = self._gpu(parent) != parent.name
            for kind in (parent / "mdev_supported_types").iterdir():
                room = int((kind / "description").read_text().rpartition("max_instance=")[2])
                room -= len(here)
                if {self._size(kind), *here} != {self._size(kind)}:
                    room = 0
                if is_vf:
                    room = min(room, parent.name not in taken)
                (kind / "available_instances").write_text(f"{int(room)}\n")

    @staticmethod
    def _gpu(parent: Path) -> str:
        link = parent / "physfn"
        return os.path.basename(os.readlink(link)) if link.is_symlink() else parent.name

    @staticmethod
    def _size(kind: Path) -> str:
        return (kind / "description").read_text().partition("framebuffer=")[2].partition(",")[0]
