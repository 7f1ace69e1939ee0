# SPDX-License-Identifier: LGPL-2.1-or-later
"""What the project is for: domains get VFs, keep them, and give them back; on real VFIO."""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path

import pytest

from tests.lab.guest import (
    DRIVERS,
    OUR_HOOK,
    PROFILE,
    PROFILE_ID,
    VF1,
    VF2,
    claim,
    define,
    holds,
    hook,
    is_running,
    qemu_pid,
    refused,
    set_driver,
    start,
    type_of,
    until,
    uuid_of,
    virsh,
    writes_to,
)

pytestmark = pytest.mark.promise(1, 2)

NAIVE_HOOK = f"""#!/bin/bash
# What people write themselves: set the type at prepare, 0 at release, of each hostdev in the XML.
x="0x([0-9a-f]+)"
vfs=$(sed -nE "s/ *<address domain='$x' bus='$x' slot='$x' function='$x'\\/>.*/\\1:\\2:\\3.\\4/p")
for vf in $vfs; do
  file=/sys/bus/pci/devices/$vf/nvidia/current_vgpu_type
  [ -e "$file" ] || continue
  case $2 in
    prepare) [ "$(cat "$file")" = {PROFILE_ID} ] || echo {PROFILE_ID} >"$file" ;;
    release) echo 0 >"$file" ;;
  esac
done
exit 0
"""


@pytest.mark.parametrize("driver", DRIVERS)
def test_two_domains_get_two_vfs_and_give_them_back(driver: str) -> None:
    set_driver(**DRIVERS[driver])
    start("web1", VF1)
    start("web2", VF2)
    for name, vf in (("web1", VF1), ("web2", VF2)):
        assert type_of(vf) == PROFILE_ID
        assert holds(name, vf)
        mine = claim(vf)
        assert mine is not None
        assert mine["phase"] == "running"
        assert mine["domain_uuid"] == uuid_of(name)
        assert mine["qemu"]["pid"] == qemu_pid(name)
        assert mine["profile"] == {"id": int(PROFILE_ID), "name": PROFILE}
        assert Path(f"/proc/{mine['daemon']['pid']}/comm").read_text() == "libvirtd\n"
    virsh("destroy", "web1")
    assert (type_of(VF1), claim(VF1)) == ("0", None)
    assert type_of(VF2) == PROFILE_ID
    assert is_running("web2")
    virsh("destroy", "web2")
    assert (type_of(VF2), claim(VF2)) == ("0", None)


@pytest.mark.parametrize("errno_in_use", [1, 16, 0], ids=["EPERM", "EBUSY", "let through"])
def test_a_failed_start_on_anothers_vf_does_not_touch_it(errno_in_use: int) -> None:
    set_driver(errno_in_use=errno_in_use)
    start("web1", VF1)
    before, mine = writes_to(VF1), claim(VF1)
    define("web3", VF1)
    said = refused("start", "web3")
    assert (
        f"vgpu-libvirt: {VF1} belongs to domain 'web1' ({uuid_of('web1')}): libvirt has it "
        f"running as process {qemu_pid('web1')}; run 'virt-vgpu sync', which points the hostdev "
        "'ua-vgpu0' of domain 'web3' at another VF if there is one, then start it again"
    ) in said
    assert writes_to(VF1) == before, "not even a write that the driver refuses"
    assert type_of(VF1) == PROFILE_ID
    assert claim(VF1) == mine
    assert is_running("web1")
    assert holds("web1", VF1)


def test_a_naive_hook_destroys_the_running_guests_vgpu() -> None:
    """Why the project exists: same story, the hook that everybody writes first."""
    OUR_HOOK.unlink()
    hook("50-naive", NAIVE_HOOK)
    set_driver(errno_in_use=0)
    start("web1", VF1)
    assert type_of(VF1) == PROFILE_ID
    define("web3", VF1)
    assert "in use by driver QEMU, domain web1" in refused("start", "web3")
    assert is_running("web1")
    assert holds("web1", VF1)
    assert type_of(VF1) == "0", "web1 runs on, its vGPU is gone"


def test_a_naive_hook_kills_a_guest_that_is_just_starting() -> None:
    """The driver's refusal doesn't help before QEMU has the VF open; ours holds there too."""
    slow = "#!/bin/sh\ncat >/dev/null\n[ \"$1 $2\" != 'web1 start' ] || sleep 6\n"
    for ours in (False, True):
        if not ours:
            shutil.move(OUR_HOOK, "/tmp/our-hook")
            hook("50-naive", NAIVE_HOOK)
        else:
            (OUR_HOOK.parent / "50-naive").unlink()
            shutil.move("/tmp/our-hook", OUR_HOOK)
        hook("60-slow", slow)
        define("web1", VF1)
        define("web3", VF1)
        first = subprocess.Popen(
            ["virsh", "start", "web1"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        assert until(lambda: type_of(VF1) == PROFILE_ID)
        time.sleep(1)
        said = refused("start", "web3")
        assert (first.wait(60) == 0) is ours
        assert is_running("web1") is ours
        if ours:
            # libvirtd listens on the monitor for QEMU by then; before, it is the witness itself
            assert f"{VF1} belongs to domain 'web1'" in said
            assert type_of(VF1) == PROFILE_ID
