# SPDX-License-Identifier: LGPL-2.1-or-later
"""Domains that move between two hosts, each with devices of its own (tests/lab/run --peer).

Without dirty tracking, which this kernel can't do for a device, QEMU migrates a VF only when told
to, and only converges when it may stop the domain for as long as all its memory takes.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lab import guest
from tests.lab.guest import VF1
from tests.lab.peer import HERE, Peer

pytestmark = pytest.mark.skipif(
    "lab.address=" not in Path("/proc/cmdline").read_text(), reason="needs a second guest"
)


@pytest.fixture(scope="module")
def peer(lab: None) -> Peer:
    other = Peer()
    other.wait()
    return other


def migrate(name: str, *more: str) -> guest.Answer:
    guest.virsh("qemu-monitor-command", name, "--hmp", "migrate_set_parameter downtime-limit 60000")
    return guest.run(
        "virsh", "migrate", "--live", *more, name, f"qemu+tcp://{HERE}/system",
        "--migrateuri", f"tcp://{HERE}",
    )  # fmt: skip


def test_plain(peer: Peer) -> None:
    guest.start("web1", VF1, migratable=True)
    answer = migrate("web1", "--persistent")
    print(answer)
    print(peer.run("virsh", "list", "--all"))
    print(peer.claim(VF1), peer.type_of(VF1), guest.type_of(VF1))
    assert 0
