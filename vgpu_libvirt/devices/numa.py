# SPDX-License-Identifier: LGPL-2.1-or-later
"""Which NUMA nodes a domain lives on, and which one a GPU is on."""

from __future__ import annotations

import os

from .. import fs, sets
from ..errors import DeviceError
from ..records import TYPE_CHECKING

if TYPE_CHECKING:
    from .model import Gpu


def nodes_of(sysfs: str, nodes: frozenset[int], cpus: frozenset[int]) -> frozenset[int]:
    """The nodes of a domain: those that its numatune names, else those of its pinned CPUS.

    Empty where it has neither. Raises DeviceError where the nodes of the cpus can't be read.
    """
    return nodes or _of_cpus(sysfs, cpus)


def node_of(gpu: Gpu) -> int:
    """The node of a GPU; 0 where the host has one node, or doesn't say."""
    return gpu.numa_node or 0


def _of_cpus(sysfs: str, cpus: frozenset[int]) -> frozenset[int]:
    root = f"{sysfs}/devices/system/node"
    found: set[int] = set()
    if not cpus:
        return frozenset()
    try:
        for name in os.listdir(root):
            node = sets.number(name[4:]) if name.startswith("node") else None
            if node is not None and not cpus.isdisjoint(
                sets.parse(fs.read_text(f"{root}/{name}/cpulist"))
            ):
                found.add(node)
    except OSError as error:
        raise DeviceError(f"the NUMA nodes in {root} can't be read: {fs.reason(error)}") from error
    except ValueError as error:
        raise DeviceError(f"the NUMA nodes in {root} can't be understood: {error}") from error
    return frozenset(found)
