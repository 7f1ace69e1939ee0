# SPDX-License-Identifier: LGPL-2.1-or-later
"""Domains that move between two hosts, each with devices of its own (tests/lab/run --peer).

Without dirty tracking, which this kernel can't do for a device, QEMU migrates a VF only when told
to, and only converges when it may stop the domain for as long as all its memory takes.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.lab import guest
from tests.lab.guest import OTHER_GPU_VF, PROFILE_ID, VF1
from tests.lab.peer import HERE, Peer

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.skipif(
    "lab.address=" not in Path("/proc/cmdline").read_text(), reason="needs a second guest"
)

FAILS = "#!/bin/sh\ncat >/dev/null\n[ \"$1 $2\" != 'web1 {}' ] || exit 1\n"


@pytest.fixture(scope="module")
def _peer(lab: None) -> Peer:
    other = Peer()
    other.wait()
    return other


@pytest.fixture
def peer(_peer: Peer, clean: None) -> Iterator[Peer]:
    """The other host: another domain has the VF there that web1 has here."""
    _peer.define("taker", VF1)
    _peer.virsh("start", "taker")
    yield _peer
    for name in _peer.virsh("list", "--name").split():
        _peer.virsh("destroy", name)
    for name in _peer.virsh("list", "--all", "--name").split():
        _peer.virsh("undefine", name)
    _peer.run("sh", "-c", "rm -f /etc/libvirt/hooks/qemu.d/[!5]*")
    _peer.sync_after_lapse()
    for vf in (VF1, OTHER_GPU_VF):
        assert (_peer.claim(vf), _peer.type_of(vf)) == (None, "0")


def migrate(name: str, *more: str) -> guest.Answer:
    guest.let_converge(name)
    return guest.run(
        "virsh", "migrate", "--live", *more, name, f"qemu+tcp://{HERE}/system",
        "--migrateuri", f"tcp://{HERE}",
    )  # fmt: skip


def pointed(document: str) -> str:
    from vgpu_libvirt.domain.read import parse_domain

    hostdev = parse_domain(document).hostdev("ua-vgpu0")
    assert hostdev is not None
    return str(hostdev.address)


@pytest.mark.promise(1, 2, 3)
def test_a_domain_moves_to_a_device_that_is_free_there(peer: Peer) -> None:
    guest.start("web1", VF1, migratable=True)
    took = peer.claim(VF1)
    answer = migrate("web1", "--persistent", "--undefinesource")
    assert answer.status == 0, answer.output
    assert peer.is_running("web1")
    claim = peer.claim(OTHER_GPU_VF)
    assert claim is not None
    assert (claim["phase"], claim["domain_uuid"]) == ("running", guest.uuid_of("web1"))
    assert peer.holds("web1", OTHER_GPU_VF)
    assert peer.type_of(OTHER_GPU_VF) == PROFILE_ID
    assert guest.until(lambda: guest.claim(VF1) is None)
    guest.assert_free(VF1)
    assert peer.claim(VF1) == took, "and whose device it was there has it still"
    assert peer.holds("taker", VF1)
    peer.sync()
    inactive = peer.virsh("dumpxml", "--inactive", "web1")
    assert pointed(inactive) not in (VF1, ""), "not where another has its device"
    peer.virsh("destroy", "web1")
    assert (peer.claim(OTHER_GPU_VF), peer.type_of(OTHER_GPU_VF)) == (None, "0")
    peer.virsh("start", "web1")
    assert peer.is_running("web1")


@pytest.mark.promise(3)
@pytest.mark.parametrize("operation", ["migrate", "prepare", "start"])
def test_a_migration_that_fails_leaves_nothing_there_and_the_domain_here(
    peer: Peer, operation: str
) -> None:
    """Another script fails where the target has come so far."""
    guest.start("web1", VF1, migratable=True)
    peer.hook("60-fails", FAILS.format(operation))
    answer = migrate("web1")
    assert answer.status != 0
    assert guest.is_running("web1")
    assert guest.holds("web1", VF1)
    peer.sync_after_lapse()
    assert (peer.claim(OTHER_GPU_VF), peer.type_of(OTHER_GPU_VF)) == (None, "0")


@pytest.mark.promise(3)
def test_one_that_there_is_no_device_for_stays_here(peer: Peer) -> None:
    guest.start("web1", VF1, migratable=True)
    for gpu in ("0000:01:00.0", "0000:02:00.0"):
        peer.run("virt-vgpu", "cordon", gpu)
    answer = migrate("web1")
    for gpu in ("0000:01:00.0", "0000:02:00.0"):
        peer.run("virt-vgpu", "uncordon", gpu)
    assert answer.status != 0
    assert "no device for FAKE24-4Q" in answer.output
    assert guest.is_running("web1")
    assert guest.holds("web1", VF1)
    assert peer.claim(OTHER_GPU_VF) is None


@pytest.mark.promise(3)
def test_one_that_dies_while_it_moves_leaves_nothing(peer: Peer) -> None:
    """The target's QEMU is killed as soon as it has the device."""
    guest.start("web1", VF1, migratable=True)
    peer.hook(
        "60-kills",
        "#!/bin/sh\ncat >/dev/null\n"
        "[ \"$1 $2\" != 'web1 started' ] || pkill -KILL -f 'guest=web1,'\n",
    )
    answer = migrate("web1")
    assert answer.status != 0
    assert guest.until(lambda: guest.is_running("web1"), 30)
    assert guest.holds("web1", VF1)
    time.sleep(1)
    peer.sync_after_lapse()
    assert (peer.claim(OTHER_GPU_VF), peer.type_of(OTHER_GPU_VF)) == (None, "0")
