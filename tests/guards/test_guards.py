# SPDX-License-Identifier: LGPL-2.1-or-later
"""Each guard is needed: with it taken out of a copy of the package, a test fails that names why."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

REPOSITORY = Path(__file__).parents[2]


class Guard(NamedTuple):
    """A guard, how to take it out, and the test that must fail then."""

    what: str
    file: str
    text: str
    instead: str
    test: str


LIFECYCLE = "test_lifecycle.py::"
REFUSALS = "test_refusals.py::"
SYNC = "test_sync.py::"
FORCE = "test_force.py::"
CORDONS = "test_cordons.py::"
MDEV_LIFE = "test_mdev_life.py::"
MDEVS = "../faults/test_mdevs.py::"
LATE = "../faults/test_late.py::"
HOTPLUG = "test_hotplug.py::"
CARVE = "test_carve.py::"
_LOCKED = (
    "        with locks.devices(context.config.paths.state, [claim.device], "
    "time.monotonic() + _BUSY):\n            "
)

GUARDS = [
    Guard(
        "nobody has the device open",
        "lifecycle/context.py",
        "if pids := sorted(now.on(nodes)):",
        "if False and (pids := sorted(now.on(nodes))):",
        REFUSALS + "test_an_open_vf_by_group_and_by_cdev",
    ),
    Guard(
        "what can't be looked at may have it open",
        "lifecycle/context.py",
        "if now.unknown:",
        "if False:",
        LIFECYCLE + "test_a_process_that_cannot_be_looked_at_stops_a_start",
    ),
    Guard(
        "an earlier start is over only for the domain whose hook asks",
        "lifecycle/context.py",
        "claim.domain_uuid == self.domain_uuid",
        "True",
        LIFECYCLE + "test_between_prepare_and_qemu_the_daemon_is_the_witness",
    ),
    Guard(
        "and only by the daemon that runs the hook",
        "lifecycle/context.py",
        "and claim.daemon == self.daemon",
        "",
        LIFECYCLE + "test_an_orphaned_release_proves_nothing",
    ),
    Guard(
        "the daemon is a witness between prepare and QEMU",
        "claims/liveness.py",
        "elif not (start_is_over or _start_has_lapsed(claim, world, witnesses, reserve_timeout)):",
        "elif False:",
        SYNC + "test_between_prepare_and_qemu_nothing_is_taken",
    ),
    Guard(
        "libvirt's word is about older claims only",
        "claims/liveness.py",
        "or claim.claim_id not in self.asked_after",
        "",
        SYNC + "test_libvirts_word_says_nothing_about_a_later_claim",
    ),
    Guard(
        "an incomplete list of domains stops releases",
        "claims/liveness.py",
        "doubts = [*unlisted, *witnesses.unknown]",
        "doubts = [*witnesses.unknown]",
        SYNC + "test_an_incomplete_inventory_stops_every_release",
    ),
    Guard(
        "libvirt's silence is no answer",
        "claims/liveness.py",
        "if libvirt and libvirt.silence:",
        "if False:",
        SYNC + "test_nor_where_libvirt_is_silent",
    ),
    Guard(
        "open handles are a sign of life",
        "claims/liveness.py",
        "    if holders:\n        pids",
        "    if False:\n        pids",
        "test_liveness.py",
    ),
    Guard(
        "a stranger's live device is left alone",
        "lifecycle/release.py",
        "if verdict.other is None and",
        "if",
        SYNC + "test_a_dead_claim_on_a_live_strangers_device_goes_without_a_write",
    ),
    Guard(
        "what was only reserved is not cleared",
        "lifecycle/release.py",
        "and wrote and",
        "and",
        "test_cli_start.py::test_a_lapsed_reservation_goes_without_a_write",
    ),
    Guard(
        "a type on what was only reserved is somebody else's",
        "lifecycle/assign.py",
        "if device.type_id and reserved and reserved.is_mere_reservation:",
        "if False:",
        "test_cli_start.py::test_a_type_that_somebody_sets_on_a_reserved_device_is_not_ours",
    ),
    Guard(
        "release judges",
        "lifecycle/release.py",
        "if verdict.state is not State.DEAD:",
        "if False:",
        LIFECYCLE + "test_an_orphaned_release_proves_nothing",
    ),
    Guard(
        "release goes by the claim's id",
        "lifecycle/release.py",
        "return current if current and current.claim_id == claim.claim_id else None",
        "return claim",
        LIFECYCLE + "test_a_claim_that_was_replaced_meanwhile_is_not_given_back",
    ),
    Guard(
        "what can't be given back is marked",
        "lifecycle/release.py",
        "problems += keep_visibly(context, claim, str(error))",
        "pass",
        LIFECYCLE + "test_release_with_a_living_qemu_keeps_the_vf_visibly",
    ),
    Guard(
        "another's type is never cleared",
        "devices/vendor_vfio.py",
        "if current not in (0, expected):",
        "if False:",
        LIFECYCLE + "test_a_rewritten_device_is_kept_at_release",
    ),
    Guard(
        "the claim comes first",
        "lifecycle/assign.py",
        "(store.replace if is_claimed else store.create)(paths.state, claim)",
        "pass",
        LIFECYCLE + "test_the_claim_is_on_disk_before_the_first_write",
    ),
    Guard(
        "a start that fails is undone",
        "lifecycle/assign.py",
        "undo.add(lambda: _take_back(start, claim))",
        "pass",
        LIFECYCLE + "test_several_devices_are_all_or_nothing",
    ),
    Guard(
        "a device of a running domain is not given away",
        "lifecycle/suitability.py",
        "if user and user.uuid != domain.uuid:",
        "if False:",
        REFUSALS + "test_a_vf_of_a_live_domain_without_a_claim",
    ),
    Guard(
        "start looks again",
        "lifecycle/start.py",
        "if current != claim.profile.id:",
        "if False:",
        LIFECYCLE + "test_start_refuses_when_the_type_was_changed",
    ),
    Guard(
        "an unreadable claim protects its device",
        "claims/store.py",
        "unreadable[device] = str(error)",
        "pass",
        SYNC + "test_an_unreadable_claim_is_reported_and_protects_its_device",
    ),
    Guard(
        "managed hostdevs are refused",
        "domain/match.py",
        "if hostdev.managed:",
        "if False:",
        REFUSALS + "test_managed",
    ),
    Guard(
        "force takes nothing from the living",
        "lifecycle/release.py",
        "if verdict.state is State.ALIVE:",
        "if False:",
        FORCE + "test_never_from_the_living",
    ),
    Guard(
        "nor while the list of domains is incomplete",
        "lifecycle/release.py",
        "if not world.domains.complete and not backend.is_mdev(claim.device):",
        "if False:",
        FORCE + "test_no_vf_while_the_list_of_running_domains_is_incomplete",
    ),
    Guard(
        "nor what another running domain has",
        "lifecycle/release.py",
        "if user := world.domains.using(claim.device):",
        "if False and (user := world.domains.using(claim.device)):",
        FORCE + "test_every_other_guard_stands",
    ),
    Guard(
        "nor from where its holders can't be seen",
        "lifecycle/release.py",
        "if world.handles.unknown or (is_blind and theirs is not None):",
        "if False:",
        FORCE + "test_every_other_guard_stands",
    ),
    Guard(
        "and all of it is looked at again right before the write",
        "lifecycle/release.py",
        "if by_force\n",
        "if False\n",
        FORCE + "test_what_happens_right_before_the_write_is_seen",
    ),
    Guard(
        "a cordon counts under the host lock",
        "lifecycle/assign.py",
        "suitability.check_cordons(start.context, start.domain, wanted, device)",
        "pass",
        CORDONS + "test_a_start_that_passed_the_first_look_meets_the_cordon_under_the_lock",
    ),
    Guard(
        "what libvirt may be about to plug in is not taken before it lapsed",
        "claims/liveness.py",
        "if claim.phase is Phase.RESERVED and is_over else None",
        "if claim.phase is Phase.RESERVED else None",
        HOTPLUG + "test_what_never_was_plugged_in_comes_back_when_it_has_lapsed",
    ),
    Guard(
        "nor while QEMU has it open",
        "claims/liveness.py",
        "if not doubts and not holders and (how := _without_it(claim, world, over)):",
        "if not doubts and (how := _without_it(claim, world, over)):",
        "test_liveness.py::test_the_verdict",
    ),
    Guard(
        "what was to be plugged into a QEMU is not taken over while that may live",
        "lifecycle/prepare.py",
        "return (claim.phase, claim.qemu) == (Phase.RESERVED, None) and any(",
        "return claim.phase is Phase.RESERVED and any(",
        HOTPLUG + "test_but_not_while_the_old_qemu_lives",
    ),
    Guard(
        "what was plugged in without a claim is taken out",
        "lifecycle/hotplug.py",
        "if now and now.claim_id == claim.claim_id:",
        "if now:",
        HOTPLUG + "test_a_claim_that_went_meanwhile_is_not_plugged_in",
    ),
    Guard(
        "libvirt's silence is not the end of a plug",
        "attaching.py",
        "is_over=_answers(live)",
        "is_over=True",
        HOTPLUG + "test_where_libvirt_falls_silent_the_device_is_kept_until_it_must_have_failed",
    ),
    Guard(
        "nothing new is placed on what is cordoned",
        "capacity.py",
        "and not self.is_cordoned(device)",
        "",
        "test_placement.py::test_table",
    ),
    Guard(
        "an mdev is removed only after a look at who has it open",
        "devices/mdev_life.py",
        "        try:\n            guard()\n        except InUseError",
        "        try:\n            pass\n        except InUseError",
        MDEV_LIFE + "test_removing_is_one_guard_and_one_write",
    ),
    Guard(
        "and only one that is still what was made",
        "devices/mdev_life.py",
        "if gpu != expected_gpu or there.type_id not in (None, expected_type):",
        "if False:",
        MDEVS + "test_an_mdev_that_somebody_made_anew_is_kept",
    ),
    Guard(
        "and not before its driver had time to",
        "devices/mdev_life.py",
        "if time.monotonic() >= not_before:",
        "if True:",
        MDEV_LIFE + "test_a_driver_that_removes_it_itself_is_left_to_do_it",
    ),
    Guard(
        "whose time is given where a QEMU had it",
        "devices/backend.py",
        'cleans = was_used and kind.startswith("nvidia-")',
        "cleans = False",
        "../faults/test_driver.py::test_an_mdev_that_its_driver_removes_itself_is_left_to_it",
    ),
    Guard(
        "no mdev is made over another of its UUID",
        "devices/mdev_life.py",
        "if there := read_mdev(sysfs, uuid):\n        if there.error:",
        "if False and (there := read_mdev(sysfs, uuid)):\n        if there.error:",
        MDEV_LIFE + "test_nothing_is_made_over_one_that_is_there",
    ),
    Guard(
        "an mdev that nobody claimed is somebody else's",
        "lifecycle/assign.py",
        'if context.config.policy.foreign != "reset":',
        "if False:",
        MDEVS + "test_an_mdev_of_its_uuid_that_nobody_claimed_is_left_alone",
    ),
    Guard(
        "a domain has the mdevs of its own name alone",
        "domain/match.py",
        "if hostdev.uuid != wanted:",
        "if False:",
        MDEVS + "test_another_domains_mdev_is_refused",
    ),
    Guard(
        "and what did not ask has none",
        "lifecycle/bystander.py",
        "elif uuid := hostdev.uuid:",
        "elif False and (uuid := hostdev.uuid):",
        MDEVS + "test_a_domain_that_did_not_ask_gets_no_others_mdev",
    ),
    Guard(
        "what was claimed since a start looked takes its room",
        "lifecycle/parents.py",
        "inventory = mdev_slots.with_awaited(host.inventory, awaited)",
        "inventory = host.inventory",
        MDEVS + "test_the_last_room_that_was_claimed_since_a_start_looked_is_not_claimed_again",
    ),
    Guard(
        "a parent that refused is not asked again",
        "lifecycle/parents.py",
        "busy=host.busy | there",
        "busy=host.busy",
        MDEVS + "test_where_the_driver_refuses_it_is_made_elsewhere",
    ),
    Guard(
        "one at which others were faster has not refused",
        "lifecycle/assign.py",
        "if not isinstance(error, FullError):",
        "if True:",
        MDEVS + "test_a_parent_at_which_others_were_faster_has_not_refused",
    ),
    Guard(
        "what a killed arrival left without parameters gets them",
        "lifecycle/assign.py",
        "elif params is not None:",
        "elif False:",
        "../faults/test_killed.py::"
        "test_an_mdev_that_was_killed_before_its_parameters_has_them_at_the_next_start",
    ),
    Guard(
        "what is reserved is for the profile that was asked for then",
        "lifecycle/prepare.py",
        "and profiles.find(each.request.profile, [claim.profile])",
        "",
        "../faults/test_killed.py::test_what_is_reserved_for_another_profile_is_made_anew",
    ),
    Guard(
        "a late release goes by the id of the claim, not by the name of the mdev",
        "lifecycle/release.py",
        "    if standing is None:\n        return\n    claim = standing\n",
        "    claim = standing or claim\n",
        LATE + "test_a_release_of_the_start_before_finds_the_device_of_the_next",
    ),
    Guard(
        "and holds the device's lock from its look to its write",
        "lifecycle/release.py",
        "with locks.devices(context.config.paths.state, [claim.device], context.lock_deadline()):",
        "if True:",
        LATE + "test_nobody_begins_while_a_late_release_is_about_to_write",
    ),
    Guard(
        "a held device lock is somebody at work",
        "sync.py",
        _LOCKED + "give_back(",
        "        if True:\n            give_back(",
        SYNC + "test_a_device_at_which_somebody_works_is_left_to_them",
    ),
    Guard(
        "and at a carved one after a reboot",
        "sync.py",
        _LOCKED + "renew(",
        "        if True:\n            renew(",
        CARVE + "test_nor_while_somebody_has_it",
    ),
    Guard(
        "what is carved is alive",
        "claims/liveness.py",
        "if claim.phase is Phase.CARVED:",
        "if False:",
        CARVE + "test_the_verdict_names_what_is_seen",
    ),
    Guard(
        "domains that don't ask may use it",
        "lifecycle/bystander.py",
        "if claim is None or claim.phase is Phase.CARVED:",
        "if claim is None:",
        CARVE + "test_a_domain_that_does_not_ask_may_use_it_and_it_stays",
    ),
    Guard(
        "a carve's claim comes first",
        "lifecycle/carve.py",
        "store.create(paths.state, claim)",
        "pass",
        CARVE + "test_the_claim_is_on_disk_before_the_first_write",
    ),
    Guard(
        "a carve that fails is undone",
        "lifecycle/carve.py",
        "undo.add(lambda: _take_back(context, claim, left))",
        "pass",
        CARVE + "test_all_or_nothing",
    ),
    Guard(
        "a cordon counts for a carve under the host lock",
        "lifecycle/carve.py",
        "if cordon := cordons.first(paths.state, (address, gpu)):",
        "if False and (cordon := cordons.first(paths.state, (address, gpu))):",
        CARVE + "test_a_cordon_that_comes_in_between_counts_under_the_lock",
    ),
    Guard(
        "after a reboot nothing is written over another's type",
        "lifecycle/carve.py",
        "if current not in (0, claim.profile.id):",
        "if False:",
        CARVE + "test_not_over_a_type_of_somebody_elses",
    ),
    Guard(
        "nor under a running domain",
        "lifecycle/carve.py",
        "if user := world.domains.using(claim.device):",
        "if False and (user := world.domains.using(claim.device)):",
        CARVE + "test_nor_while_somebody_has_it",
    ),
    Guard(
        "nor by a claim that stands no more",
        "lifecycle/carve.py",
        "if standing is None or standing.claim_id != claim.claim_id or not",
        "standing = claim\n    if not",
        CARVE + "test_nor_what_was_given_back_and_taken_meanwhile",
    ),
    Guard(
        "who gives a carved device back says so before libvirt is asked",
        "lifecycle/uncarve.py",
        "store.replace(paths.state, marked)",
        "pass",
        CARVE + "test_from_before_libvirt_is_asked_no_new_start_passes",
    ),
    Guard(
        "what libvirt said before that counts no more",
        "lifecycle/uncarve.py",
        "claim_id=os.urandom(16).hex(),",
        "",
        CARVE + "test_a_killed_uncarve_is_finished_once_the_starts_of_then_are_over",
    ),
    Guard(
        "libvirt's word on a carved device is about who has it",
        "claims/liveness.py",
        "return self.devices is not None",
        "return True",
        CARVE + "test_a_killed_uncarve_is_finished_once_the_starts_of_then_are_over",
    ),
    Guard(
        "and who is active with it keeps it",
        "claims/liveness.py",
        'return [f"libvirt says that {user}, which is active, has it"] if user else []',
        "return []",
        CARVE + "test_a_start_that_passed_prepare_is_seen_by_libvirts_word",
    ),
    Guard(
        "what a guest has stays carved",
        "claims/liveness.py",
        "if user := world.domains.using(claim.device):",
        "if False and (user := world.domains.using(claim.device)):",
        CARVE + "test_a_domain_without_an_open_handle_counts",
    ),
]


def needs(guard: Guard) -> pytest.MarkDecorator:
    """What a guard's test can't do without, where that isn't plain Python."""
    is_simulated = guard.test.startswith("../faults/")
    missing = os.geteuid() != 0 or not os.access("/dev/fuse", os.R_OK | os.W_OK)
    return pytest.mark.skipif(
        is_simulated and missing, reason="only root can mount the simulated driver, on /dev/fuse"
    )


@pytest.mark.parametrize(
    "guard", [pytest.param(guard, id=guard.what, marks=needs(guard)) for guard in GUARDS]
)
def test_without_it_a_test_fails(guard: Guard, tmp_path: Path) -> None:
    for name in ("vgpu_libvirt", "tests", "hooks", "packaging"):
        ignored = shutil.ignore_patterns("__pycache__", "lab", "data/cli")
        shutil.copytree(REPOSITORY / name, tmp_path / name, ignore=ignored)
    shutil.copy(REPOSITORY / "pyproject.toml", tmp_path)
    source = tmp_path / "vgpu_libvirt" / guard.file
    text = source.read_text()
    assert text.count(guard.text) == 1, f"{guard.file} has not one place like that any more"

    def run() -> subprocess.CompletedProcess[str]:
        # Under another root the test is the same; only its exit status matters.
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "VGPU"))}
        return subprocess.run(
            [
                *(
                    sys.executable,
                    "-m",
                    "pytest",
                    "-qx",
                    "-p",
                    "no:cacheprovider",
                    "-p",
                    "no:xdist",
                ),
                f"--basetemp={tmp_path / 'run'}",
                os.path.normpath(f"tests/unit/{guard.test}"),
            ],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
        )

    source.write_text(text.replace(guard.text, guard.instead))
    without = run()
    assert without.returncode == 1, without.stdout
    assert "AssertionError" in without.stdout or "Failed" in without.stdout, without.stdout
