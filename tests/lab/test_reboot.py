# SPDX-License-Identifier: LGPL-2.1-or-later
"""After a reboot /run, all processes, VFs and types are gone; the claims of before are not."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.lab.guest import (
    OTHER_GPU_VF,
    PROFILE_ID,
    VF1,
    VF2,
    claim,
    define,
    qemu_pid,
    run,
    start,
    type_of,
    virsh,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.promise(3, 4)

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@pytest.fixture
def boot_id() -> Iterator[None]:
    """A new boot's id in the place of the true one."""
    new = Path("/tmp/boot_id")
    new.write_text("11111111-2222-3333-4444-555555555555\n")
    yield
    run("umount", str(BOOT_ID))


def reboot() -> None:
    """Do to this host what a loss of power does, as far as we look at it."""
    daemons = [int(Path(f"/run/{name}.pid").read_text()) for name in ("libvirtd", "virtlogd")]
    for pid in (*daemons, qemu_pid("web1"), qemu_pid("web2")):
        os.kill(pid, signal.SIGKILL)
    time.sleep(1)
    shutil.rmtree("/run/libvirt")
    for gpu in ("0000:01:00.0", "0000:02:00.0"):
        numvfs = Path(f"/sys/bus/pci/devices/{gpu}/sriov_numvfs")
        count = numvfs.read_text()
        numvfs.write_text("0")
        numvfs.write_text(count)
    assert run("mount", "--bind", "/tmp/boot_id", str(BOOT_ID)).status == 0


def test_a_reboot_leaks_nothing(boot_id: None) -> None:
    start("web1", VF1)
    start("web2", OTHER_GPU_VF)
    define("web3", VF2)
    reboot()
    assert claim(VF1) is not None
    done = run("virt-vgpu", "sync", "--json")
    assert done.status == 0
    assert json.loads(done.output)["released"] == [VF1, OTHER_GPU_VF]
    assert claim(VF1) is claim(OTHER_GPU_VF) is None
    up = run("libvirtd-start")
    assert up.status == 0, up.output
    virsh("start", "web1")
    assert type_of(VF1) == PROFILE_ID


def test_without_a_sync_the_first_start_or_libvirts_own_does_it(boot_id: None) -> None:
    start("web1", VF1)
    start("web2", OTHER_GPU_VF)
    reboot()
    up = run("libvirtd-start")
    assert up.status == 0, up.output
    assert claim(VF1) is claim(OTHER_GPU_VF) is None, "hooks/daemon runs before libvirt serves"
    virsh("start", "web2")
    assert type_of(OTHER_GPU_VF) == PROFILE_ID
