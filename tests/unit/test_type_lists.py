# SPDX-License-Identifier: LGPL-2.1-or-later
"""Every shape of `creatable_vgpu_types` and `current_vgpu_type` that has been seen."""

import pytest

from tests.unit.host import DATA
from vgpu_libvirt.devices.model import Profile
from vgpu_libvirt.devices.profiles import find
from vgpu_libvirt.devices.vendor_vfio import parse_creatable, parse_current
from vgpu_libvirt.errors import DeviceError


def read(name: str) -> tuple[Profile, ...]:
    return parse_creatable((DATA / "creatable" / name).read_text())


def test_every_sample_is_in_this_file() -> None:
    tried = {
        "a40-name-first.txt",
        "configured-vf.txt",
        "full-gpu.txt",
        "h200x-no-header.txt",
        "l40s.txt",
        "lab-rfc-driver.txt",
        "lab.txt",
        "rtx-pro-6000-blackwell.txt",
    }
    assert {path.name for path in (DATA / "creatable").iterdir()} == tried


def test_header_and_padded_rows() -> None:
    profiles = read("l40s.txt")
    assert len(profiles) == 23
    assert profiles[0] == Profile(1145, "NVIDIA L40S-1B")
    assert profiles[-1] == Profile(2164, "NVIDIA L40S-3B")


def test_a_header_alone_is_a_full_gpu() -> None:
    assert read("full-gpu.txt") == ()


def test_an_empty_file_is_a_vf_with_a_vgpu() -> None:
    assert read("configured-vf.txt") == ()


def test_the_header_is_optional_and_mig_names_have_more_dashes() -> None:
    assert read("h200x-no-header.txt") == (
        Profile(1428, "NVIDIA H200X-141C"),
        Profile(1414, "NVIDIA H200X-1-18C"),
    )


def test_names_contain_blanks() -> None:
    assert read("rtx-pro-6000-blackwell.txt")[1] == Profile(
        1561, "NVIDIA RTX Pro 6000 Blackwell DC-1-24Q"
    )


def test_name_first_rows_that_peers_describe() -> None:
    assert read("a40-name-first.txt") == (Profile(558, "NVIDIA A40-2Q"),)


def test_the_lab_driver_in_both_moods() -> None:
    assert [profile.id for profile in read("lab.txt")] == [901, 917, 922]
    assert read("lab-rfc-driver.txt") == (Profile(917, "NVIDIA FAKE24-12Q"),)


def test_a_name_may_contain_a_colon_but_the_first_one_separates() -> None:
    assert parse_creatable("7 : NVIDIA X: special-1Q\n") == (Profile(7, "NVIDIA X: special-1Q"),)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("1145 NVIDIA L40S-1B\n", "1145 NVIDIA L40S-1B"),
        ("abc : NVIDIA L40S-1B\n", "abc : NVIDIA L40S-1B"),
        ("1145 :\n", "1145 :"),
        ("-5 : NVIDIA L40S-1B\n", "-5 : NVIDIA L40S-1B"),
        ("٣ : NVIDIA L40S-1B\n", "٣ : NVIDIA L40S-1B"),
        ("1145  : NVIDIA L40S-1B\nNVIDIA A40-2Q    558\n", "NVIDIA A40-2Q    558"),
        ("1145 : NVIDIA L40S-1B\n1145 : NVIDIA L40S-2B\n", "1145 : NVIDIA L40S-2B"),
    ],
)
def test_garbage_is_refused_with_its_line(text: str, line: str) -> None:
    with pytest.raises(DeviceError, match="line '") as caught:
        parse_creatable(text)
    assert f"line '{line}'" in str(caught.value)


@pytest.mark.parametrize(("text", "value"), [("0\n", 0), ("0", 0), ("1152\n", 1152)])
def test_current_type_with_and_without_newline(text: str, value: int) -> None:
    assert parse_current(text) == value


@pytest.mark.parametrize("text", ["", "\n", "-1", "none", "0x480", "1 2"])
def test_a_current_type_that_is_no_number_is_refused(text: str) -> None:
    with pytest.raises(DeviceError, match="no profile id"):
        parse_current(text)


@pytest.mark.parametrize(
    ("name", "mib"),
    [
        ("NVIDIA L40S-48Q", 49152),
        ("NVIDIA RTX6000-Ada-2Q", 2048),
        ("NVIDIA H200X-1-18C", 18432),
        ("NVIDIA A100D-1-10CME", 10240),
        ("GRID M60-0B", 512),
        ("GRID P40-2B4", 2048),
        ("NVIDIA RTX Pro 6000 Blackwell DC-4-96QGFX", 98304),
        ("i915-GVTg_V5_4", None),
    ],
)
def test_the_framebuffer_stands_in_the_name(name: str, mib: int | None) -> None:
    assert Profile(1, name).framebuffer_mib == mib


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ("NVIDIA RTX Pro 6000 Blackwell DC-1-24Q", 1),
        ("RTX Pro 6000 Blackwell DC-1-24Q", 1),
        ("1561", 1),
        ("DC-1-24Q", 0),
        ("156", 0),
        ("nvidia rtx pro 6000 blackwell dc-1-24q", 0),
        ("", 0),
    ],
)
def test_a_profile_is_found_by_its_names_and_id_only(wanted: str, found: int) -> None:
    profile = Profile(1561, "NVIDIA RTX Pro 6000 Blackwell DC-1-24Q")
    assert find(wanted, [profile, Profile(11561, "NVIDIA X-1-24Q")]) == (profile,) * found
