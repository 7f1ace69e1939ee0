# SPDX-License-Identifier: LGPL-2.1-or-later
"""Which parents of mediated devices a host has, what each offers, and which mdevs exist."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

import pytest

from tests.unit.mdev_host import A2, GVT, MTTY, P40, MdevHost, Type
from tests.unit.support import directory_for_all, needs_root, nobody
from vgpu_libvirt.devices import mdev, profiles
from vgpu_libvirt.devices.mdev_model import Mdev, MdevProfile, Parents
from vgpu_libvirt.errors import DeviceError

if TYPE_CHECKING:
    from pathlib import Path

    from vgpu_libvirt.devices.mdev_model import Parent

UUID = "83b8f4f2-509f-382f-3c1e-e6bfe0fa1001"
OTHER_UUID = "83b8f4f2-509f-382f-3c1e-e6bfe0fa1002"
A2_PF, A2_VF = "0000:08:00.0", "0000:08:01.7"


@pytest.fixture
def host(tmp_path: Path) -> MdevHost:
    return MdevHost(tmp_path)


def found(host: MdevHost, **more: object) -> dict[str, list[str]]:
    parents = mdev.discover(host.path, **more)  # type: ignore[arg-type]
    return {gpu.name: [parent.name for parent in gpu.parents] for gpu in parents.gpus}


def only(host: MdevHost) -> Parent:
    (gpu,) = mdev.discover(host.path).gpus
    (parent,) = gpu.parents
    return parent


def a40_2q(**changes: object) -> Type:
    """Another VF's type of its own; no description, as newer drivers have it."""
    return Type("nvidia-558", "NVIDIA A40-2Q", "1", None)._replace(**changes)


# --- parents and their GPUs ---


def test_parents_stand_with_their_gpu_in_the_order_of_numbers(host: MdevHost) -> None:
    host.parent("mtty", MTTY)
    for vf in ("0000:41:01.0", "0000:41:00.4"):
        host.parent(vf, [a40_2q()], gpu="0000:41:00.0")
    host.parent("10001:80:00.4", [a40_2q()], gpu="10001:80:00.0")
    host.parent("ffff:01:00.0", P40)
    assert list(found(host).items()) == [
        ("0000:41:00.0", ["0000:41:00.4", "0000:41:01.0"]),
        ("ffff:01:00.0", ["ffff:01:00.0"]),
        ("10001:80:00.0", ["10001:80:00.4"]),
        ("mtty", ["mtty"]),
    ]


def test_a_gpu_without_vfs_and_a_parent_that_is_no_pci_device_are_their_own(
    host: MdevHost,
) -> None:
    host.parent("0000:84:00.0", P40)
    host.parent("mtty", MTTY)
    assert mdev.gpu_of(host.path, "0000:84:00.0") == "0000:84:00.0"
    assert mdev.gpu_of(host.path, "mtty") == "mtty"


@pytest.mark.parametrize("exclude", ["0000:41:00.0", "0000:41:00.4", "mtty"])
def test_what_is_excluded_does_not_show(host: MdevHost, exclude: str) -> None:
    host.parent("0000:41:00.4", [a40_2q()], gpu="0000:41:00.0")
    host.parent("mtty", MTTY)
    left = {"0000:41:00.0": ["0000:41:00.4"], "mtty": ["mtty"]}
    left.pop("mtty" if exclude == "mtty" else "0000:41:00.0")
    assert found(host, exclude=(exclude,)) == left


def test_numa_nodes_are_the_gpus_own(host: MdevHost) -> None:
    host.parent("0000:41:00.4", [a40_2q()], gpu="0000:41:00.0")
    host.gpu("0000:41:00.0", node=1)
    host.parent("mtty", MTTY)
    gpus = mdev.discover(host.path).gpus
    assert [(gpu.name, gpu.numa_node) for gpu in gpus] == [("0000:41:00.0", 1), ("mtty", None)]


def test_no_framework_at_all_is_an_empty_host(host: MdevHost) -> None:
    shutil.rmtree(host.sysfs)
    assert mdev.discover(host.path) == Parents(())
    assert mdev.existing(host.path) == ()


def test_a_parent_without_types_is_none(host: MdevHost) -> None:
    """As hosts with the vendor's newer framework show them."""
    host.parent("0000:41:00.4", [], gpu="0000:41:00.0")
    host.parent("0000:41:00.5", [], gpu="0000:41:00.0")
    (host.bus / "0000:41:00.5/mdev_supported_types").mkdir()
    assert mdev.discover(host.path) == Parents(())


def test_nor_is_one_whose_mdevs_are_no_pci_devices(host: MdevHost) -> None:
    host.parent("0.0.0313", [Type("vfio_ccw-io", "I/O subchannel (Non-QDIO)", "1", None)])
    for file in host.bus.glob("0.0.0313/mdev_supported_types/*/device_api"):
        file.write_text("vfio-ccw\n")
    assert mdev.discover(host.path) == Parents(())


def test_a_parent_that_vanishes_is_none(host: MdevHost, monkeypatch: pytest.MonkeyPatch) -> None:
    host.parent("0000:41:00.4", [a40_2q()], gpu="0000:41:00.0")
    stays = host.parent("0000:41:00.5", [a40_2q()], gpu="0000:41:00.0")
    (host.bus / "0000:41:00.6").symlink_to("../../devices/pci0000:00/0000:41:00.6")
    before = mdev.read_available

    def vanishing(sysfs: str, parent: str, type_id: str) -> int:
        if parent == "0000:41:00.4":
            shutil.rmtree(stays.parents[1] / parent)
        return before(sysfs, parent, type_id)

    monkeypatch.setattr(mdev, "read_available", vanishing)
    parents = mdev.discover(host.path)
    assert [parent.name for parent in parents.gpus[0].parents] == ["0000:41:00.5"]
    assert parents.problems == ()


def test_a_bus_that_is_no_directory_is_a_problem(host: MdevHost) -> None:
    shutil.rmtree(host.bus)
    host.bus.write_text("")
    problem = f"{host.bus} can't be read: not a directory"
    assert mdev.discover(host.path) == Parents((), (problem,))


def test_a_parent_whose_gpu_cannot_be_told_costs_itself(host: MdevHost) -> None:
    types = host.parent("0000:41:00.4", [a40_2q()])
    (types.parent / "physfn").write_text("")
    host.parent("0000:41:00.5", [a40_2q()], gpu="0000:41:00.0")
    assert found(host) == {"0000:41:00.0": ["0000:41:00.5"]}
    assert mdev.discover(host.path).problems == (
        "the GPU of 0000:41:00.4 can't be told: invalid argument",
    )


def test_a_parent_whose_types_cannot_be_listed_stands_there_with_the_reason(
    host: MdevHost,
) -> None:
    types = host.parent("0000:41:00.4", [a40_2q()], gpu="0000:41:00.0")
    shutil.rmtree(types)
    types.write_text("")
    parent = only(host)
    assert (parent.offers, parent.creatable) == (None, ())
    path = f"{host.bus}/0000:41:00.4/mdev_supported_types"
    assert parent.error == f"{path} can't be read: not a directory"
    assert mdev.discover(host.path).problems == (parent.error,)


# --- what they offer ---


def test_the_recorded_catalogue_of_an_a2_on_which_a_vgpu_of_4_gb_runs(host: MdevHost) -> None:
    host.parent(A2_VF, A2, gpu=A2_PF)
    parent = only(host)
    assert (parent.name, parent.gpu, parent.error) == (A2_VF, A2_PF, None)
    assert parent.offers is not None
    assert [offer.profile.id for offer in parent.offers] == [f"nvidia-{n}" for n in range(742, 757)]
    assert [profile.name for profile in parent.creatable] == [
        "NVIDIA A2-4Q",
        "NVIDIA A2-4A",
        "NVIDIA A2-4C",
    ]
    eight = next(o for o in parent.offers if o.profile.id == "nvidia-747")
    assert eight.available == 0, "not what is on the card now"
    assert eight.profile == MdevProfile("nvidia-747", "NVIDIA A2-8Q", 8192, 2)
    assert mdev.discover(host.path).problems == ()


def test_a_profile_that_can_not_be_made_now_is_known_all_the_same(host: MdevHost) -> None:
    host.parent(A2_VF, A2, gpu=A2_PF)
    names = {profile.name for profile in mdev.discover(host.path).profiles}
    assert names == {each.name for each in A2}


def test_availability_is_each_parents_own(host: MdevHost) -> None:
    """After the first vGPU of a GPU, its own VF has room for none, the others for its size."""
    host.parent("0000:08:01.6", [each._replace(available="0") for each in A2], gpu=A2_PF)
    host.parent("0000:08:01.7", A2, gpu=A2_PF)
    (gpu,) = mdev.discover(host.path).gpus
    four = MdevProfile("nvidia-746", "NVIDIA A2-4Q", 4096, 4)
    assert [parent.room(four) for parent in gpu.parents] == [0, 1]
    assert [len(parent.creatable) for parent in gpu.parents] == [0, 3]


def test_a_gpu_that_is_its_own_parent_has_room_for_several(host: MdevHost) -> None:
    host.parent("0000:84:00.0", P40)
    room = {offer.profile.short_name: offer.available for offer in only(host).offers or ()}
    assert room == {
        "P40-2B": 12, "P40-2B4": 12, "P40-1B4": 24, "P40-4C": 6, "P40-6C": 4, "P40-8C": 3,
        "P40-12C": 2,
    }  # fmt: skip


@pytest.mark.parametrize("name", ["NVIDIA A40-8Q", "GRID A40-8Q", "A40-8Q"])
def test_a_profile_is_found_by_name_without_the_prefix_and_by_id(host: MdevHost, name: str) -> None:
    host.parent("0000:41:00.4", [a40_2q(), a40_2q(id="nvidia-562", name=name)], gpu="0000:41:00.0")
    known = mdev.discover(host.path).profiles
    for wanted in (name, "A40-8Q", "nvidia-562"):
        assert [each.id for each in profiles.find(wanted, known)] == ["nvidia-562"]  # type: ignore[arg-type]
        assert found(host, wanted=wanted) == {"0000:41:00.0": ["0000:41:00.4"]}
        ((offer,),) = (
            p.offers or () for p in mdev.discover(host.path, wanted=wanted).gpus[0].parents
        )
        assert (offer.profile.id, offer.available) == ("nvidia-562", 1)
    for wanted in ("8Q", "a40-8q", "562", "A40"):
        assert profiles.find(wanted, known) == ()  # type: ignore[arg-type]
        assert mdev.discover(host.path, wanted=wanted).profiles == ()


def test_mtty_has_names_of_its_own_and_no_framebuffer(host: MdevHost) -> None:
    host.parent("mtty", MTTY)
    one, two = mdev.discover(host.path).profiles
    assert (one, two) == (
        MdevProfile("mtty-1", "Single port serial"),
        MdevProfile("mtty-2", "Dual port serial"),
    )
    assert two.framebuffer_mib is None
    assert two.is_meant_by("mtty-2")
    assert two.is_meant_by("Dual port serial")


def test_intels_types_have_their_directory_for_a_name(host: MdevHost) -> None:
    host.parent("0000:00:02.0", GVT)
    four, eight = mdev.discover(host.path).profiles
    assert (four.id, four.name) == ("i915-GVTg_V5_4", "i915-GVTg_V5_4")
    assert eight == MdevProfile("i915-GVTg_V5_8", "i915-GVTg_V5_8", None, None)
    assert eight.framebuffer_mib is None


def test_types_stand_in_the_order_of_their_numbers(host: MdevHost) -> None:
    ids = ["nvidia-1000", "nvidia-99", "nvidia-558"]
    host.parent("0000:41:00.4", [a40_2q(id=each) for each in ids], gpu="0000:41:00.0")
    assert [o.profile.id for o in only(host).offers or ()] == sorted(ids, key=lambda i: int(i[7:]))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("num_heads=4, frl_config=60, framebuffer=8192M, max_instance=6", (8192, 6)),
        ("framebuffer = 512M", (512, None)),
        ("max_instance=24, framebuffer=2048M\n", (2048, 24)),
        ("num_heads=4, max_resolution=7680x4320", (None, None)),
        ("framebuffer=8192", (None, None)),
        ("framebuffer=8G, max_instance=many", (None, None)),
        ("framebuffer=0M, max_instance=0", (None, None)),
        ("framebuffer=-1M", (None, None)),
        ("old_framebuffer=1M", (None, None)),
        ("", (None, None)),
        (GVT[0].description, (None, None)),
    ],
)
def test_a_description(text: str, told: tuple[int | None, int | None]) -> None:
    assert mdev.parse_description(text) == told


@pytest.mark.parametrize(
    ("name", "description", "mib"),
    [
        ("NVIDIA A40-8Q", "framebuffer=8192M, max_instance=6", 8192),
        ("NVIDIA A100D-1-10C", "framebuffer=9728M", 9728),
        ("NVIDIA A40-8Q", None, 8192),
        ("NVIDIA A40-8Q", "num_heads=4", 8192),
        ("GRID M60-0B", None, 512),
        ("GRID P40-2B4", "", 2048),
        ("NVIDIA A100D-1-10CME", None, 10240),
        ("mine", "framebuffer=3072M", 3072),
        ("mine", None, None),
    ],
)
def test_the_framebuffer_is_the_descriptions_else_the_names(
    host: MdevHost, name: str, description: str | None, mib: int | None
) -> None:
    host.parent("0000:41:00.4", [a40_2q(name=name, description=description)], gpu="0000:41:00.0")
    (profile,) = mdev.discover(host.path).profiles
    assert profile.framebuffer_mib == mib


@pytest.mark.parametrize("file", ["device_api", "name", "available_instances"])
def test_a_type_that_cannot_be_read_costs_itself(host: MdevHost, file: str) -> None:
    types = host.parent("0000:41:00.4", A2, gpu="0000:41:00.0")
    (types / "nvidia-746" / file).unlink()
    (types / "nvidia-746" / file).mkdir()
    parent = only(host)
    assert parent.error is None
    bad = next(o for o in parent.offers or () if o.profile.id == "nvidia-746")
    path = f"{host.bus}/0000:41:00.4/mdev_supported_types/nvidia-746/{file}"
    assert (bad.available, bad.error) == (None, f"{path} can't be read: is a directory")
    assert [each.name for each in parent.creatable] == ["NVIDIA A2-4A", "NVIDIA A2-4C"]
    assert mdev.discover(host.path).problems == (bad.error,)


@pytest.mark.parametrize("text", ["", "many\n", "-1\n", "1 2\n", "1" * 20])
def test_room_that_is_no_number_is_none(host: MdevHost, text: str) -> None:
    types = host.parent("0000:41:00.4", [a40_2q()], gpu="0000:41:00.0")
    (types / "nvidia-558/available_instances").write_text(text)
    (offer,) = only(host).offers or ()
    assert offer.available is None
    assert offer.error is not None
    assert offer.error.endswith(f"can't be understood: '{text.strip()}' is no number")


def test_a_description_that_cannot_be_read_is_done_without_and_told(host: MdevHost) -> None:
    types = host.parent("0000:41:00.4", A2, gpu="0000:41:00.0")
    (types / "nvidia-746/description").unlink()
    (types / "nvidia-746/description").mkdir()
    offer = next(o for o in only(host).offers or () if o.profile.id == "nvidia-746")
    assert (offer.available, offer.profile.framebuffer_mib) == (1, 4096)
    assert offer.error is not None
    assert mdev.discover(host.path).problems == (offer.error,)


def test_what_a_type_is_is_read_once_for_a_gpu_and_its_room_on_each_parent(
    host: MdevHost,
) -> None:
    host.parent("0000:41:00.4", [a40_2q(description="framebuffer=2048M")], gpu="0000:41:00.0")
    other = host.parent("0000:41:00.5", [a40_2q(available="0")], gpu="0000:41:00.0")
    (other / "nvidia-558/name").unlink()
    first, second = mdev.discover(host.path).gpus[0].parents
    assert first.offers is not None
    assert second.offers is not None
    assert first.offers[0].profile == second.offers[0].profile
    assert (first.offers[0].available, second.offers[0].available) == (1, 0)


@needs_root
@pytest.mark.promise(9)
def test_who_may_not_read_is_told_so() -> None:
    with directory_for_all() as directory:
        host = MdevHost(directory)
        types = host.parent("0000:41:00.4", [a40_2q()], gpu="0000:41:00.0")
        (types / "nvidia-558/available_instances").chmod(0)
        with nobody():
            (offer,) = only(host).offers or ()
    assert offer.error is not None
    assert offer.error.endswith("can't be read: permission denied")


@pytest.mark.promise(9)
def test_looking_writes_nothing(host: MdevHost) -> None:
    host.parent(A2_VF, A2, gpu=A2_PF)
    host.mdev(UUID, A2_VF, "nvidia-746")
    before = host.tree()
    mdev.discover(host.path)
    mdev.existing(host.path)
    mdev.vfio_nodes(host.path, UUID)
    assert host.tree() == before


# --- mdevs that exist ---


def test_an_mdev_has_its_parent_and_its_type(host: MdevHost) -> None:
    host.parent(A2_VF, A2, gpu=A2_PF)
    host.parent("mtty", MTTY)
    host.mdev(UUID, A2_VF, "nvidia-746")
    host.mdev(OTHER_UUID, "mtty", "mtty-2")
    assert mdev.existing(host.path) == (
        Mdev(UUID, A2_VF, "nvidia-746"),
        Mdev(OTHER_UUID, "mtty", "mtty-2"),
    )
    assert mdev.read_mdev(host.path, OTHER_UUID) == Mdev(OTHER_UUID, "mtty", "mtty-2")


def test_an_mdev_that_is_not_there_is_none(host: MdevHost) -> None:
    assert mdev.read_mdev(host.path, UUID) is None
    assert mdev.vfio_nodes(host.path, UUID) == frozenset()


@pytest.mark.promise(1)
def test_an_mdev_whose_removal_waits_for_qemu_is_not_gone(host: MdevHost) -> None:
    """The kernel has taken it off the bus by then, with its type and its cdev."""
    host.parent("mtty", MTTY)
    host.parent(A2_VF, A2, gpu=A2_PF)
    host.leave(host.mdev(UUID, A2_VF, "nvidia-746", group=23))
    reason = f"its removal has begun, and waits until {UUID} is closed"
    assert mdev.read_mdev(host.path, UUID) == Mdev(UUID, A2_VF, None, reason)
    assert mdev.existing(host.path) == (Mdev(UUID, A2_VF, None, reason),)
    assert mdev.vfio_nodes(host.path, UUID) == {"vfio/23"}, "which QEMU has open"


@pytest.mark.promise(1)
def test_nor_is_one_whose_parent_goes_with_its_driver(host: MdevHost) -> None:
    """The parent is off mdev_bus by then; only the IOMMU group still tells."""
    host.parent(A2_VF, A2, gpu=A2_PF)
    host.leave(host.mdev(UUID, A2_VF, "nvidia-746", group=23))
    (host.bus / A2_VF).unlink()
    there = mdev.read_mdev(host.path, UUID)
    assert there is not None
    assert (there.parent, there.type_id) == (A2_VF, None)
    assert mdev.vfio_nodes(host.path, UUID) == {"vfio/23"}


@pytest.mark.promise(3)
def test_nor_is_one_that_is_closed_while_its_driver_is_not_done(host: MdevHost) -> None:
    host.parent(A2_VF, A2, gpu=A2_PF)
    host.leave(host.mdev(UUID, A2_VF, "nvidia-746"))
    host.close(UUID)
    there = mdev.read_mdev(host.path, UUID)
    assert there is not None
    assert (there.parent, there.type_id) == (A2_VF, None)
    assert mdev.vfio_nodes(host.path, UUID) == frozenset()


@pytest.mark.promise(4)
def test_where_parents_cannot_be_listed_an_mdev_may_still_be_there(host: MdevHost) -> None:
    shutil.rmtree(host.bus)
    host.bus.write_text("")
    reason = f"{host.bus} can't be read: not a directory"
    assert mdev.read_mdev(host.path, UUID) == Mdev(UUID, None, None, reason)


@pytest.mark.promise(4)
def test_where_groups_cannot_be_read_its_nodes_cannot_be_told(host: MdevHost) -> None:
    host.parent(A2_VF, A2, gpu=A2_PF)
    host.leave(host.mdev(UUID, A2_VF, "nvidia-746", group=23))
    group = host.sysfs / "kernel/iommu_groups/23/devices"
    shutil.rmtree(group)
    group.write_text("")
    path = f"{group}/{UUID}"
    with pytest.raises(DeviceError, match=f"^{path} can't be read: not a directory$"):
        mdev.vfio_nodes(host.path, UUID)


def test_an_mdev_that_vanishes_while_it_is_read_is_none(
    host: MdevHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.parent(A2_VF, A2, gpu=A2_PF)
    host.mdev(UUID, A2_VF, "nvidia-746")
    before = os.readlink

    def vanishing(path: str) -> str:
        if path.endswith("/mdev_type"):
            host.end_mdev(UUID)
        return before(path)

    monkeypatch.setattr(os, "readlink", vanishing)
    assert mdev.read_mdev(host.path, UUID) is None


def test_an_mdev_that_cannot_be_read_costs_itself(host: MdevHost) -> None:
    host.parent(A2_VF, A2, gpu=A2_PF)
    host.mdev(UUID, A2_VF, "nvidia-746")
    (host.mdevs / OTHER_UUID).write_text("")
    bad = f"{host.mdevs}/{OTHER_UUID} can't be read: invalid argument"
    assert mdev.existing(host.path) == (
        Mdev(UUID, A2_VF, "nvidia-746"),
        Mdev(OTHER_UUID, None, None, bad),
    )


def test_mdevs_that_cannot_be_listed_are_no_empty_list(host: MdevHost) -> None:
    shutil.rmtree(host.mdevs)
    host.mdevs.write_text("")
    with pytest.raises(DeviceError, match=f"^{host.mdevs} can't be read: not a directory$"):
        mdev.existing(host.path)


def test_an_mdev_has_a_node_of_its_group_and_one_of_its_own(host: MdevHost) -> None:
    host.parent(A2_VF, A2, gpu=A2_PF)
    place = host.mdev(UUID, A2_VF, "nvidia-746", group=23)
    assert mdev.vfio_nodes(host.path, UUID) == {"vfio/23", "vfio/devices/vfio7"}
    shutil.rmtree(place / "vfio-dev")
    assert mdev.vfio_nodes(host.path, UUID) == {"vfio/23"}


@pytest.mark.parametrize("name", ["iommu_group", "vfio-dev"])
def test_nodes_that_cannot_be_told_are_no_empty_set(host: MdevHost, name: str) -> None:
    host.parent(A2_VF, A2, gpu=A2_PF)
    path = host.mdev(UUID, A2_VF, "nvidia-746") / name
    path.unlink() if path.is_symlink() else shutil.rmtree(path)
    path.write_text("")
    with pytest.raises(DeviceError, match=UUID):
        mdev.vfio_nodes(host.path, UUID)
