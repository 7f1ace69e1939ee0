# SPDX-License-Identifier: LGPL-2.1-or-later
"""The tests here run in the lab's guest (tests/lab/run); elsewhere none is collected.

They share one boot and one libvirtd. Each begins and ends on a host without domains, types, claims
and other hooks than ours, with the driver's parameters as the vendor's. As if systemd ran, hooks
start no worker; nothing is there that would run a sync, but the tests.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

# Where systemd is process 1, all is begun as on any host; see tests/lab/run --systemd.
UNDER_SYSTEMD = ["test_systemd.py"]

collect_ignore_glob = [] if "LAB_GUEST" in os.environ else ["*"]
if Path("/run/systemd/private").exists():
    collect_ignore_glob += [
        path.name
        for path in Path(__file__).parent.glob("test_*.py")
        if path.name not in UNDER_SYSTEMD
    ]
else:
    collect_ignore_glob += UNDER_SYSTEMD


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "after_reboot: of a boot that follows that of the others")


@pytest.fixture(scope="session", autouse=True)
def lab() -> None:
    """The driver, VFs and libvirtd, once."""
    from tests.lab import guest

    guest.SYSTEMD.mkdir(parents=True)
    listen = ["LAB_LISTEN=1"] if "lab.address=" in Path("/proc/cmdline").read_text() else []
    up = guest.run("env", *listen, "lab-up")
    assert up.status == 0, up.output


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    """Nothing of one test is there in the next."""
    yield
    from tests.lab import guest

    guest.set_driver(**guest.DRIVERS["vendor"], busy_ms=0, write_ms=0)
    # a hook that a failed test left asleep would hold libvirt, and all that follows
    guest.run("pkill", "-KILL", "-x", "sleep")
    for name in guest.virsh("list", "--name").split():
        guest.virsh("destroy", name)
    for name in guest.virsh("list", "--all", "--name").split():
        guest.virsh("undefine", name)
    for script in guest.HOOKS.iterdir():
        if script != guest.OUR_HOOK:
            script.unlink()
    if not guest.OUR_HOOK.exists():
        guest.run("cp", "/lab/hooks/qemu", str(guest.OUR_HOOK))
    shutil.rmtree("/run/vgpu-libvirt", ignore_errors=True)
    for kind in ("claims/*.json", "cordons/*.json", "edits/*.json", "catalogue.json"):
        for path in guest.CLAIMS.parent.glob(kind):
            path.unlink()
    for vf in (guest.VF1, guest.VF2, guest.VF3, guest.OTHER_GPU_VF):
        if guest.has_driver(vf) and guest.type_of(vf) != "0":
            guest.set_type(vf, "0")


@pytest.fixture
def bystander(clean: None) -> Iterator[None]:
    """Another guest, with a vGPU on the same GPU, that nothing may touch."""
    from tests.lab import guest

    guest.start("bystander", guest.VF2)
    writes = guest.writes_to(guest.VF2)
    mine = guest.claim(guest.VF2)
    yield
    assert guest.is_running("bystander")
    assert guest.holds("bystander", guest.VF2)
    assert guest.type_of(guest.VF2) == guest.PROFILE_ID
    assert guest.writes_to(guest.VF2) == writes
    now = guest.claim(guest.VF2)
    assert mine is not None
    assert now is not None
    assert now["claim_id"] == mine["claim_id"]
