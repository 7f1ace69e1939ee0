# SPDX-License-Identifier: LGPL-2.1-or-later
"""What the documentation's commands need to run here, and which can't; each entry is of use."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from tests.docs.blocks import Command


class NotRun(NamedTuple):
    """Commands that no test here can run as they stand."""

    pattern: str  # matches the beginning of the command
    reason: str
    instead: str = ""  # the test that runs the same in another way


NOT_RUN = (
    NotRun("packaging/build-deb", "installs by apt from the network",
           "tests/lab/test_package.py"),
    NotRun("packaging/build-rpm", "needs dnf, which the tests' hosts don't have",
           "tests/packaging/test_rpm.py"),
    NotRun("python3 -m venv|/opt/vgpu-libvirt/bin/pip", "installs by pip from the network",
           "tests/packaging/test_wheel.py"),
    NotRun("/opt/vgpu-libvirt/bin/virt-vgpu", "would install hooks on the host that runs the tests",
           "tests/unit/test_install_hooks.py"),
    NotRun("apt |dnf ", "needs a package repository, and root on a host of its own"),
    NotRun("setsebool", "needs SELinux"),
    NotRun("/usr/lib/nvidia/sriov-manage|nvidia-smi", "the vendor's programs; there is no GPU"),
    NotRun("systemctl|journalctl", "these pages run in a lab without systemd",
           "tests/lab/test_systemd.py"),
    NotRun("virt-install|virt-vgpu exec", "needs an image to install from",
           "tests/lab/test_shim.py"),
    NotRun("virsh (save|restore|migrate)", "the lab's VFs save and migrate only when QEMU "
           "is told so, in XML that no user writes", "tests/lab/test_saved.py"),
    NotRun("openstack", "needs an OpenStack"),
    NotRun("tests/demo", "boots the lab", "tests/lab/story"),
    NotRun("python3 -m bench.speed", "takes minutes, and measures nothing beside other tests",
           "tests/unit/test_speed.py"),
    NotRun("tests/run", "is what runs this test"),
)  # fmt: skip


def why_not_run(command: Command) -> NotRun | None:
    """The entry of NOT_RUN that COMMAND matches; None: it can be run."""
    return next((one for one in NOT_RUN if re.match(one.pattern, command.text)), None)


# The documentation's GPUs are L40S at 0000:3d:00.0 and 0000:5e:00.0; the lab's are others.
_BUSES = {"3d": "01", "5e": "02"}
_VFS = {"00.4": "10.0", "00.5": "10.2", "00.6": "10.4", "00.7": "10.6", "01.0": "11.0",
        "01.1": "11.2", "01.2": "11.4"}  # fmt: skip
_PROFILES = {"1B": (1145, 901), "2B": (1146, 902), "1Q": (1147, 911), "2Q": (1148, 912),
             "3Q": (1149, 913), "4Q": (1150, 914), "6Q": (1151, 915), "8Q": (1152, 916),
             "12Q": (1153, 917), "24Q": (1155, 918)}  # fmt: skip


def for_the_lab(text: str) -> str:
    """TEXT with the lab's addresses and profiles in the place of the documentation's."""
    for bus, theirs in _BUSES.items():
        text = text.replace(f"0000:{bus}:00.0", f"0000:{theirs}:00.0")
        for vf, its in _VFS.items():
            text = text.replace(f"0000:{bus}:{vf}", f"0000:{theirs}:{its}")
            text = text.replace(_as_xml(bus, vf), _as_xml(theirs, its))
    for here, there in _PROFILES.values():
        text = re.sub(rf"\b{here}\b", str(there), text)
    return text.replace("L40S-", "FAKE24-")


def _as_xml(bus: str, vf: str) -> str:
    slot, function = vf.split(".")
    return f"bus='0x{bus}' slot='0x{slot}' function='0x{function}'"
