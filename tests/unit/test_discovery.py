# SPDX-License-Identifier: LGPL-2.1-or-later
"""Which GPUs and VFs a host has, told by `physfn`, `virtfnN` and `nvidia/` alone."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

import pytest

from vgpu_libvirt.address import PciAddress
from vgpu_libvirt.devices import vendor_vfio
from vgpu_libvirt.devices.model import Inventory
from vgpu_libvirt.devices.vendor_vfio import discover
from vgpu_libvirt.errors import DeviceError

if TYPE_CHECKING:
    from tests.unit.host import Host

HEADER_ONLY = "ID    : vGPU Name\n"
parse = PciAddress.parse


def found(host: Host, *exclude: str) -> dict[str, list[str]]:
    inventory = discover(host.paths.sysfs, tuple(map(parse, exclude)))
    return {str(gpu.address): [vf.name for vf in gpu.devices] for gpu in inventory.gpus}


def problems(host: Host) -> tuple[str, ...]:
    return discover(host.paths.sysfs).problems


def test_gpus_with_their_vfs_in_the_order_of_numbers(host: Host) -> None:
    last = host.gpu("10001:80:00.0", vfs=2)
    first = host.gpu("0000:3d:00.0", vfs=6)
    middle = host.gpu("ffff:01:00.0", vfs=1)
    assert list(found(host).items()) == [
        ("0000:3d:00.0", first),
        ("ffff:01:00.0", middle),
        ("10001:80:00.0", last),
    ]
    assert first[-1] == "0000:3d:01.1", "with ARI, VFs spill into the next slot"
    assert problems(host) == ()


def test_what_a_device_is_told_to_be(host: Host) -> None:
    vf = host.gpu("0001:c8:00.0", vfs=1, node=1)[0]
    host.set_type(vf, 1152)
    (gpu,) = discover(host.paths.sysfs).gpus
    (device,) = gpu.devices
    assert (str(gpu.address), gpu.backend, gpu.numa_node) == ("0001:c8:00.0", "vendor-vfio", 1)
    assert (device.name, str(device.gpu), device.type_id) == (vf, "0001:c8:00.0", 1152)
    assert device.creatable is not None
    assert len(device.creatable) == 23
    assert device.error is None


def test_no_pci_at_all_is_an_empty_host(host: Host) -> None:
    shutil.rmtree(host.sysfs)
    assert discover(host.paths.sysfs) == Inventory((), ())


def test_a_bus_that_is_no_directory_is_a_problem(host: Host) -> None:
    shutil.rmtree(host.sysfs / "bus/pci/devices")
    root = host.write(host.sysfs / "bus/pci/devices", "")
    assert discover(host.paths.sysfs) == Inventory((), (f"{root} can't be read: not a directory",))


def test_other_devices_are_none_of_our_business(host: Host) -> None:
    vfs = host.gpu(vfs=1)
    host.write(host.pci("0000:00:02.0") / "class", "0x030000\n")
    host.write(host.pci("0000:41:00.4") / "mdev_supported_types/nvidia-256/name", "GRID T4-1B\n")
    (host.pci("0000:41:00.4") / "physfn").symlink_to("../0000:41:00.0")
    host.write(host.sysfs / "bus/pci/devices/not-an-address/nvidia/current_vgpu_type", "0\n")
    assert found(host) == {"0000:3d:00.0": vfs}
    assert problems(host) == ()


def test_a_gpu_without_vfs_and_one_whose_vfs_offer_no_vgpu_do_not_show(host: Host) -> None:
    host.write(host.pci("0000:41:00.0") / "sriov_numvfs", "0\n")
    for vf in host.gpu("0000:3d:00.0"):
        shutil.rmtree(host.pci(vf) / "nvidia")
    assert found(host) == {}
    assert problems(host) == ()
    assert not vendor_vfio.is_gpu(host.paths.sysfs, parse("0000:3d:00.0"))


def test_a_pf_is_no_vf_even_with_an_nvidia_directory(host: Host) -> None:
    vfs = host.gpu()
    (host.pci("0000:3d:00.0") / "nvidia").mkdir()
    assert found(host) == {"0000:3d:00.0": vfs}
    assert problems(host) == ()


def test_a_vf_is_told_by_physfn_alone_whatever_its_class(host: Host) -> None:
    vfs = host.gpu()
    for vf, kind in zip(vfs, ("0x030000", "0x030200", "0x038000", "0xffffff"), strict=True):
        host.write(host.pci(vf) / "class", kind + "\n")
        host.write(host.pci(vf) / "device", "0x26b9\n")
    assert found(host) == {"0000:3d:00.0": vfs}


def test_physfn_may_dangle_and_still_names_the_gpu(host: Host) -> None:
    vfs = host.gpu()
    shutil.rmtree(host.pci("0000:3d:00.0"))
    assert found(host) == {"0000:3d:00.0": vfs}
    assert discover(host.paths.sysfs).gpus[0].numa_node is None


def test_a_vf_whose_gpu_cannot_be_told_costs_that_vf(host: Host) -> None:
    vfs = host.gpu()
    (host.pci(vfs[1]) / "physfn").unlink()
    (host.pci(vfs[1]) / "physfn").symlink_to("../somewhere")
    assert found(host) == {"0000:3d:00.0": [vfs[0], *vfs[2:]]}
    assert problems(host) == (
        f"the GPU of {vfs[1]} can't be told: 'somewhere' is not a PCI address; "
        "write it as 0000:3d:00.4, domain included",
    )


@pytest.mark.parametrize(
    ("attribute", "content", "reason"),
    [
        ("current_vgpu_type", None, "can't be read: no such file or directory"),
        ("current_vgpu_type", "directory", "can't be read: is a directory"),
        ("current_vgpu_type", b"", "can't be understood: '' is no profile id"),
        ("current_vgpu_type", b"-1\n", "can't be understood: '-1' is no profile id"),
        ("current_vgpu_type", b"0x480\n", "can't be understood: '0x480' is no profile id"),
        ("current_vgpu_type", b"9" * 5000, f"can't be understood: '{'9' * 40}' is no profile id"),
        ("current_vgpu_type", b"\xff", "can't be read: not a text in UTF-8"),
        ("creatable_vgpu_types", None, "can't be read: no such file or directory"),
        ("creatable_vgpu_types", b"\xff", "can't be read: not a text in UTF-8"),
        (
            "creatable_vgpu_types",
            b"ID : vGPU Name\nN/A : x\n",
            "can't be understood: line 'N/A : x' is no row of profile id and name",
        ),
    ],
)
def test_an_attribute_that_cannot_be_read_costs_that_vf_alone(
    host: Host, attribute: str, content: bytes | str | None, reason: str
) -> None:
    vfs = host.gpu()
    path = host.pci(vfs[1]) / "nvidia" / attribute
    path.unlink()
    if content == "directory":
        path.mkdir()
    elif isinstance(content, bytes):
        path.write_bytes(content)
    inventory = discover(host.paths.sysfs)
    assert inventory.problems == (f"{path} {reason}",)
    assert [device.name for device in inventory.devices] == vfs
    assert [device.error for device in inventory.devices] == [None, f"{path} {reason}", None, None]
    damaged = inventory.devices[1]
    assert (damaged.type_id is None) == (attribute == "current_vgpu_type")
    assert (damaged.creatable is None) == (attribute == "creatable_vgpu_types")


def test_a_row_with_an_endless_id_costs_that_vf(host: Host) -> None:
    vfs = host.gpu()
    host.set_list(vfs[0], f"{'9' * 5000} : NVIDIA L40S-8Q\n")
    assert [device.creatable is None for device in discover(host.paths.sysfs).devices] == [
        True,
        False,
        False,
        False,
    ]


def test_two_errors_of_one_vf_are_both_told(host: Host) -> None:
    vf = host.gpu(vfs=1)[0]
    shutil.rmtree(host.pci(vf) / "nvidia")
    (host.pci(vf) / "nvidia").mkdir()
    (error,) = problems(host)
    assert "current_vgpu_type can't be read" in error
    assert "creatable_vgpu_types can't be read" in error


@pytest.mark.parametrize("text", [HEADER_ONLY, ""])
def test_a_full_gpu_stays_in_the_list(host: Host, text: str) -> None:
    vfs = host.gpu()
    for vf in vfs:
        host.set_list(vf, text)
    inventory = discover(host.paths.sysfs)
    assert [device.name for device in inventory.devices] == vfs
    assert {device.creatable for device in inventory.devices} == {()}
    assert inventory.problems == ()


@pytest.mark.parametrize(
    ("exclude", "left"),
    [
        (["0000:3d:00.0"], {"0000:41:00.0": ["0000:41:00.4", "0000:41:00.5"]}),
        (
            ["0000:3d:00.5", "0000:41:00.0"],
            {"0000:3d:00.0": ["0000:3d:00.4"]},
        ),
        (["0000:3d:00.4", "0000:3d:00.5", "0000:41:00.0"], {}),
    ],
)
def test_what_is_excluded_does_not_show(
    host: Host, exclude: list[str], left: dict[str, list[str]]
) -> None:
    host.gpu("0000:3d:00.0", vfs=2)
    host.gpu("0000:41:00.0", vfs=2)
    assert found(host, *exclude) == left


def test_what_is_excluded_is_no_problem_either(host: Host) -> None:
    vf = host.gpu(vfs=2)[0]
    (host.pci(vf) / "nvidia/current_vgpu_type").unlink()
    assert discover(host.paths.sysfs, (parse(vf),)).problems == ()
    assert discover(host.paths.sysfs, (parse("0000:3d:00.0"),)).problems == ()


def test_the_vfs_of_a_gpu_come_in_the_order_of_their_numbers(host: Host) -> None:
    vfs = host.gpu(vfs=12)
    assert [
        str(vf) for vf in vendor_vfio.virtual_functions(host.paths.sysfs, parse("0000:3d:00.0"))
    ] == vfs


def test_virtfn_links_that_lead_nowhere_are_passed_over(host: Host) -> None:
    vfs = host.gpu(vfs=2)
    pf = host.pci("0000:3d:00.0")
    (pf / "virtfn2").symlink_to("../gone")
    (pf / "virtfn3").write_text("")
    (pf / "virtfnx").symlink_to(f"../{vfs[0]}")
    assert [
        str(vf) for vf in vendor_vfio.virtual_functions(host.paths.sysfs, parse("0000:3d:00.0"))
    ] == vfs
    (pf / "virtfn0").unlink()
    (pf / "virtfn0").symlink_to("../0000:3d:1f.7")
    assert vendor_vfio.is_gpu(host.paths.sysfs, parse("0000:3d:00.0"))
    assert vendor_vfio.virtual_functions(host.paths.sysfs, parse("0000:ff:00.0")) == []


def test_a_device_exists_or_not_or_cannot_be_told(host: Host) -> None:
    vf = host.gpu()[0]
    sysfs = host.paths.sysfs
    assert vendor_vfio.exists(sysfs, parse(vf))
    assert not vendor_vfio.exists(sysfs, parse("0000:3d:1f.7"))
    shutil.rmtree(host.sysfs / "bus")
    with pytest.raises(DeviceError, match=r"is sysfs mounted\?$"):
        vendor_vfio.exists(sysfs, parse(vf))


def test_a_vf_has_a_node_of_its_group_and_one_of_its_own(host: Host) -> None:
    vf = host.gpu()[0]
    sysfs, address = host.paths.sysfs, parse(vf)
    group, own = (node.removeprefix("/dev/") for node in host.nodes(vf))
    assert vendor_vfio.vfio_nodes(sysfs, address) == {group, own}
    shutil.rmtree(host.pci(vf) / "vfio-dev")
    assert vendor_vfio.vfio_nodes(sysfs, address) == {group}
    (host.pci(vf) / "iommu_group").unlink()
    assert vendor_vfio.vfio_nodes(sysfs, address) == frozenset()


@pytest.mark.parametrize("name", ["iommu_group", "vfio-dev"])
def test_nodes_that_cannot_be_told_are_no_empty_set(host: Host, name: str) -> None:
    vf = host.gpu()[0]
    path = host.pci(vf) / name
    path.unlink() if path.is_symlink() else shutil.rmtree(path)
    path.write_text("")
    with pytest.raises(DeviceError, match=vf):
        vendor_vfio.vfio_nodes(host.paths.sysfs, parse(vf))


@pytest.mark.parametrize(
    ("text", "node"), [("1\n", 1), ("0\n", 0), ("-1\n", None), ("", None), ("x", None)]
)
def test_the_numa_node(host: Host, text: str, node: int | None) -> None:
    host.gpu()
    host.write(host.pci("0000:3d:00.0") / "numa_node", text)
    assert discover(host.paths.sysfs).gpus[0].numa_node == node


def test_looking_writes_nothing(host: Host) -> None:
    host.gpu()
    before = host.tree()
    times = {path: os.stat(path).st_mtime_ns for path in before if not os.path.islink(path)}
    discover(host.paths.sysfs)
    assert host.tree() == before
    assert times == {path: os.stat(path).st_mtime_ns for path in times}
