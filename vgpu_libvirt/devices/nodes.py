# SPDX-License-Identifier: LGPL-2.1-or-later
"""The device files by which a process can have a device of VFIO open."""

from __future__ import annotations

import os

from .. import fs
from ..errors import DeviceError


def vfio_nodes(directory: str, name: str) -> frozenset[str]:
    """The VFIO nodes of the device NAME in sysfs DIRECTORY, below `<dev>`.

    They are `vfio/<group>` and `vfio/devices/vfio<N>`; QEMU may hold either. A device without a
    VFIO driver has no cdev, a host without groups no group.
    Raises DeviceError where they can't be told.
    """
    nodes = set()
    try:
        nodes.add(f"vfio/{os.path.basename(os.readlink(f'{directory}/iommu_group'))}")
    except FileNotFoundError:
        pass
    except OSError as error:
        raise DeviceError(f"the IOMMU group of {name}: {fs.reason(error)}") from error
    try:
        nodes.update(f"vfio/devices/{node}" for node in os.listdir(f"{directory}/vfio-dev"))
    except FileNotFoundError:
        pass
    except OSError as error:
        raise DeviceError(f"the VFIO device of {name}: {fs.reason(error)}") from error
    return frozenset(nodes)
