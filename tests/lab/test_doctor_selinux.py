# SPDX-License-Identifier: LGPL-2.1-or-later
"""A host with SELinux, and with its IOMMU off, as many a firmware leaves it."""

from __future__ import annotations

from pathlib import Path

from tests.lab.guest import doctor, run

SELINUX = Path("/sys/fs/selinux")
BOOLEAN = SELINUX / "booleans/virt_hooks_unconfined"
OFF = {"iommu-off"}  # always

# Fedora's has this boolean among thousands of rules. What isn't defined here is allowed.
POLICY = """
(handleunknown allow)
(mls true)
(class process (transition dyntransition))
(classorder (process))
(sid kernel)
(sid security)
(sid unlabeled)
(sidorder (kernel security unlabeled))
(sensitivity s0)
(sensitivityorder (s0))
(category c0)
(categoryorder (c0))
(sensitivitycategory s0 (c0))
(user all_u)
(role all_r)
(type all_t)
(userrole all_u all_r)
(roletype all_r all_t)
(userlevel all_u (s0))
(userrange all_u ((s0) (s0)))
(sidcontext kernel (all_u all_r all_t ((s0) (s0))))
(sidcontext security (all_u all_r all_t ((s0) (s0))))
(sidcontext unlabeled (all_u all_r all_t ((s0) (s0))))
(genfscon selinuxfs "/" (all_u all_r all_t ((s0) (s0))))
(allow all_t self (process (transition dyntransition)))
(boolean virt_hooks_unconfined false)
"""


def load_policy() -> None:
    source, binary = Path("/tmp/policy.cil"), Path("/tmp/policy")
    source.write_text(POLICY)
    if not (SELINUX / "load").exists():
        assert run("mount", "-t", "selinuxfs", "selinuxfs", str(SELINUX)).status == 0
    newest = (SELINUX / "policyvers").read_text()
    output = ("-o", str(binary), "-f", "/dev/null")
    made = run("secilc", "-c", newest, *output, str(source))
    assert made == (0, ""), made
    with (SELINUX / "load").open("wb", buffering=0) as kernel:
        kernel.write(binary.read_bytes())


def test_a_policy_that_confines_hooks() -> None:
    load_policy()
    assert BOOLEAN.read_text().split()[0] == "0"
    assert set(doctor()) == OFF  # it denies nothing yet
    (SELINUX / "enforce").write_text("1")
    try:
        found = doctor()
        assert set(found) == {"selinux-boolean", *OFF}
        assert "virt_hooks_unconfined is off" in found["selinux-boolean"]
        BOOLEAN.write_text("1")
        (SELINUX / "commit_pending_bools").write_text("1")
        assert set(doctor()) == OFF
    finally:
        (SELINUX / "enforce").write_text("0")


def test_an_iommu_that_is_off() -> None:
    """The driver takes no VF then, but that is no trap of its own."""
    assert not any(Path("/sys/kernel/iommu_groups").iterdir())
    assert set(doctor()) == OFF
