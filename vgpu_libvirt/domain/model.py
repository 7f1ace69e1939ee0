# SPDX-License-Identifier: LGPL-2.1-or-later
"""The words for what a domain's XML says, and the namespace of the request in it."""

from __future__ import annotations

from ..records import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ..address import PciAddress

NAMESPACE = "urn:vgpu-libvirt:domain:1"
PREFIX = "vgpu"  # what our own tools write; any other, or none, is read too
ALIAS_PREFIX = "ua-"  # libvirt silently drops other aliases that users give


class Request(NamedTuple):
    """One `<vgpu:device>`: a vGPU that the domain asks for, to be found at the hostdev ALIAS."""

    alias: str
    profile: str
    gpu: PciAddress | None = None
    placement: str | None = None  # spread | pack
    numa: str | None = None  # prefer | require | ignore
    apart: str | None = None  # gpu
    together: str | None = None  # gpu
    params: str | None = None  # mdev's vgpu_params


def unfit(kind: str, managed: bool) -> str | None:
    """What of a hostdev's type and MANAGED keeps it from getting a vGPU; None: nothing does.

    libvirt unbinds the driver of a managed PCI device, and knows no managed mediated ones.
    """
    if kind not in ("pci", "mdev"):
        return f"type '{kind}'"
    return "managed='yes'" if managed and kind == "pci" else None


class Hostdev(NamedTuple):
    """One `<hostdev>` of mode 'subsystem'."""

    kind: str  # pci | mdev | usb | ...
    managed: bool
    alias: str | None
    address: PciAddress | None  # of a pci hostdev's source; None: there is no source address
    address_error: str | None  # why the source's address can't be read
    uuid: str | None  # of a mdev hostdev's source

    @property
    def hindrance(self) -> str | None:
        """What of it keeps it from getting a vGPU; None: nothing does."""
        return unfit(self.kind, self.managed)


class Domain(NamedTuple):
    """What we read of a domain."""

    name: str
    uuid: str
    id: int | None  # of the running or starting domain; absent in some hooks
    requests: tuple[Request, ...]
    hostdevs: tuple[Hostdev, ...]
    nodes: frozenset[int]  # host NUMA nodes that its numatune names; empty: none
    cpus: frozenset[int]  # host cpus that its vcpus are pinned to; empty: not pinned
    request_error: str | None = None  # what in our metadata can't be understood

    @property
    def asks(self) -> bool:
        """Whether the domain asks for a vGPU, understandably or not."""
        return bool(self.requests or self.request_error)

    def hostdev(self, alias: str) -> Hostdev | None:
        """The hostdev with this alias, or None."""
        return next((hostdev for hostdev in self.hostdevs if hostdev.alias == alias), None)


class Status(NamedTuple):
    """A status file of libvirt's: a domain with its QEMU."""

    domain: Domain
    pid: int | None
    monitor: str | None
