# SPDX-License-Identifier: LGPL-2.1-or-later
"""Whether the driver of a vGPU can migrate it, as far as that shows without opening it.

VFIO tells it through an open device, which a device in use must not be opened for. A kernel with
CONFIG_VFIO_DEBUGFS (6.8 and later) shows root a directory for each VFIO device, with `migration` in
it only where the driver has that (Documentation/ABI/testing/debugfs-vfio). QEMU never migrates a
VFIO device by post-copy, whatever the driver has, and no file tells that somebody will try.
"""

from __future__ import annotations

import os


def is_supported(sysfs: str, device: str) -> bool | None:
    """Whether the driver of the device of that name can migrate it; None: it doesn't show."""
    try:
        return "migration" in os.listdir(f"{sysfs}/kernel/debug/vfio/{device}")
    except OSError:
        return None
