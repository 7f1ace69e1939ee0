# SPDX-License-Identifier: LGPL-2.1-or-later
"""A host with AppArmor, where libvirt has its own profile, and with a port that has no ACS."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.lab.guest import (
    OTHER_GPU_VF,
    OUR_HOOK,
    PROFILE_ID,
    VF1,
    assert_free,
    define,
    doctor,
    is_running,
    libvirtd_pid,
    refused,
    restart_libvirtd,
    run,
    start,
    type_of,
    virsh,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

PROFILE = Path("/etc/apparmor.d/usr.sbin.libvirtd")
SITE = Path("/etc/apparmor.d/local/usr.sbin.libvirtd")
ONE_GROUP = {"iommu-group-shared"}  # all VFs of the second GPU, always


@pytest.fixture(scope="session", autouse=True)
def confined(lab: None) -> None:
    """libvirtd runs under libvirt's own profile, as on any Debian or Ubuntu."""
    if not Path("/sys/kernel/security/apparmor").exists():
        assert run("mount", "-t", "securityfs", "securityfs", "/sys/kernel/security").status == 0
    load("")


@pytest.fixture
def stricter(clean: None) -> Iterator[None]:
    """The administrator has made it stricter."""
    load(f"audit deny {OUR_HOOK} x,\n")
    yield
    load("")


def load(rules: str) -> None:
    """Load the profile with the administrator's RULES, and have a libvirtd under it."""
    SITE.parent.mkdir(exist_ok=True)
    SITE.write_text(rules)
    loaded = run("apparmor_parser", "--replace", "--skip-cache", str(PROFILE))
    assert loaded.status == 0, loaded.output
    restart_libvirtd()
    assert Path(f"/proc/{libvirtd_pid()}/attr/current").read_text().startswith("libvirtd (enforce)")


@pytest.mark.promise(1, 4)
def test_under_libvirts_own_profile_our_hooks_do_all_they_must() -> None:
    start("web1", VF1)
    assert is_running("web1")
    assert type_of(VF1) == PROFILE_ID
    assert set(doctor()) == ONE_GROUP
    virsh("destroy", "web1")
    assert_free(VF1)
    assert set(doctor()) == ONE_GROUP


@pytest.mark.usefixtures("stricter")
def test_a_profile_that_keeps_our_hook_from_running() -> None:
    define("web1", VF1)
    assert "50-vgpu-libvirt" in refused("start", "web1")  # libvirt names what it can't execute
    found = doctor()
    assert set(found) == {"confinement-denials", *ONE_GROUP}
    assert found["confinement-denials"].startswith("AppArmor has kept our hooks from something")
    assert str(OUR_HOOK) in found["confinement-denials"]


def test_vfs_that_share_an_iommu_group() -> None:
    found = doctor()
    assert set(found) == ONE_GROUP
    assert OTHER_GPU_VF in found["iommu-group-shared"]
    assert VF1 not in found["iommu-group-shared"]
