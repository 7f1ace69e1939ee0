# SPDX-License-Identifier: LGPL-2.1-or-later
"""What `virsh start` says instead of doing damage, and who never hears of us."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.lab.guest import (
    OTHER_GPU_VF,
    VF1,
    VF2,
    define,
    driver_of,
    refused,
    start,
    type_of,
    virsh,
)


def test_managed_is_refused_before_libvirt_unbinds_the_driver() -> None:
    define("web1", VF1, managed="yes")
    assert "has managed='yes', with which libvirt would unbind the driver" in refused(
        "start", "web1"
    )
    assert driver_of(VF1) == "nvidia"
    define("plain", VF2, profile=None, managed="yes")
    assert "a VF for vGPUs, with managed='yes'" in refused("start", "plain")
    assert driver_of(VF2) == "nvidia"


def test_a_vf_without_a_type_is_refused_with_a_sentence_instead_of_a_riddle() -> None:
    define("plain", VF1, profile=None)
    said = refused("start", "plain")
    assert f"a hostdev of domain 'plain' points at {VF1}, a VF without a vGPU type" in said


def test_a_profile_that_does_not_fit_beside_what_runs() -> None:
    start("web1", VF1)
    define("web2", VF2, profile="FAKE24-12Q")
    said = refused("start", "web2")
    assert f"{VF2} can't be given NVIDIA FAKE24-12Q now, since its GPU 0000:01:00.0 runs" in said
    assert "NVIDIA FAKE24-4Q (914)" in said
    assert type_of(VF2) == "0"
    define("web2", OTHER_GPU_VF, profile="FAKE24-12Q")
    virsh("start", "web2")
    assert type_of(OTHER_GPU_VF) == "917"


@pytest.mark.promise(6)
def test_domains_that_did_not_ask_start_whatever_is_broken() -> None:
    config = Path("/etc/vgpu-libvirt/config.toml")
    config.parent.mkdir(exist_ok=True)
    config.write_text("[policy\n")
    try:
        start("plain")
        define("web1", VF1)
        said = refused("start", "web1")
        assert f"{config} is not valid TOML" in said
    finally:
        config.unlink()
    entry = Path("/usr/bin/vgpu-libvirt-hook")
    shutil.move(entry, "/tmp/entry")
    try:
        virsh("destroy", "plain")
        virsh("start", "plain")
        assert f"{entry} is missing or not executable" in refused("start", "web1")
    finally:
        shutil.move("/tmp/entry", entry)
