# SPDX-License-Identifier: LGPL-2.1-or-later
"""The simulated driver and worlds on it; and hypothesis keeps nothing in the checkout."""

import os
import tempfile

from hypothesis.configuration import set_hypothesis_home_dir

from tests.faults.conftest import driver, new_world

__all__ = ["driver", "new_world"]

if "HYPOTHESIS_STORAGE_DIRECTORY" not in os.environ:
    set_hypothesis_home_dir(f"{tempfile.gettempdir()}/vgpu-libvirt-hypothesis")
