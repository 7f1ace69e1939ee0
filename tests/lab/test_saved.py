# SPDX-License-Identifier: LGPL-2.1-or-later
"""Domains that are saved, restored and reverted: another time, perhaps another device."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lab import guest
from tests.lab.guest import OTHER_GPU_VF, PROFILE_ID, VF1, VF2

FAILS = "#!/bin/sh\ncat >/dev/null\n[ \"$1 $2\" != 'web1 {}' ] || exit 1\n"


def saved(*command: str) -> None:
    """web1 runs at VF1, and is saved by COMMAND."""
    guest.start("web1", VF1, migratable=True)
    guest.let_converge("web1")
    guest.virsh(*command)
    guest.assert_free(VF1)


@pytest.mark.promise(1, 2, 3)
def test_a_saved_domain_starts_on_another_device_when_its_own_is_taken() -> None:
    saved("managedsave", "web1")
    guest.start("web2", VF1)
    taken = guest.claim(VF1)
    guest.virsh("start", "web1")
    assert guest.is_running("web1")
    assert guest.holds("web1", OTHER_GPU_VF), "policy 'spread'"
    claim = guest.claim(OTHER_GPU_VF)
    assert claim is not None
    assert (claim["phase"], guest.type_of(OTHER_GPU_VF)) == ("running", PROFILE_ID)
    assert guest.claim(VF1) == taken
    assert guest.holds("web2", VF1)
    guest.sync()
    inactive = guest.virsh("dumpxml", "--inactive", "web1")
    assert f"bus='0x{VF1[5:7]}' slot='0x{VF1[8:10]}' function='0x{VF1[11]}'" not in inactive
    guest.virsh("destroy", "web1")
    guest.assert_free(OTHER_GPU_VF)


@pytest.mark.promise(3)
def test_a_saved_domain_keeps_its_device_where_that_is_free() -> None:
    saved("managedsave", "web1")
    guest.virsh("start", "web1")
    assert guest.holds("web1", VF1)


@pytest.mark.promise(3)
@pytest.mark.parametrize("operation", ["restore", "prepare", "start"])
def test_a_restore_that_fails_keeps_the_image_and_leaves_no_claim(operation: str) -> None:
    saved("save", "web1", "/tmp/web1.save")
    script = guest.hook("60-fails", FAILS.format(operation))
    assert "60-fails" in guest.refused("restore", "/tmp/web1.save")
    script.unlink()
    guest.sync_after_lapse()
    guest.assert_free(VF1)
    guest.virsh("restore", "/tmp/web1.save")
    assert guest.holds("web1", VF1)


@pytest.mark.promise(1)
def test_a_snapshot_whose_device_is_taken_says_the_way_out() -> None:
    """Reverting runs no filter: the snapshot's own address counts."""
    path = "/tmp/web1.qcow2"
    made = guest.run("qemu-img", "create", "-q", "-f", "qcow2", path, "256M")
    assert made.status == 0, made.output
    disk = (
        f"<disk type='file' device='disk'><driver name='qemu' type='qcow2'/>"
        f"<source file='{path}'/><target dev='vda' bus='virtio'/></disk>"
    )
    guest.start("web1", VF1, migratable=True, devices=disk)
    guest.let_converge("web1")
    guest.virsh("snapshot-create-as", "web1", "before")
    guest.virsh("destroy", "web1")
    guest.start("web2", VF1)
    said = guest.refused("snapshot-revert", "web1", "before")
    assert f"{VF1} belongs to domain 'web2'" in said
    assert "virsh snapshot-edit" in said
    assert guest.holds("web2", VF1)
    snapshot = guest.virsh("snapshot-dumpxml", "web1", "before")
    assert snapshot.count("slot='0x10' function='0x0'") == 2, "as it ran, and as it is defined"
    edited = Path("/tmp/before.xml")
    edited.write_text(snapshot.replace("slot='0x10' function='0x0'", "slot='0x10' function='0x2'"))
    guest.virsh("snapshot-create", "web1", str(edited), "--redefine")
    guest.virsh("snapshot-revert", "web1", "before")
    assert guest.holds("web1", VF2)
    assert guest.holds("web2", VF1)
    guest.virsh("destroy", "web1")
    guest.virsh("snapshot-delete", "web1", "before", "--metadata")
