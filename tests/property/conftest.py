# SPDX-License-Identifier: LGPL-2.1-or-later
"""The simulated driver and worlds on it; and hypothesis keeps nothing in the checkout."""

import os
import tempfile

from hypothesis.configuration import set_hypothesis_home_dir

from tests.faults.conftest import backend, driver, new_world, quick_drivers

__all__ = ["backend", "driver", "new_world", "quick_drivers"]

if "HYPOTHESIS_STORAGE_DIRECTORY" not in os.environ:
    set_hypothesis_home_dir(f"{tempfile.gettempdir()}/vgpu-libvirt-hypothesis")
