# SPDX-License-Identifier: LGPL-2.1-or-later
"""What can go wrong, each with one sentence for a person: the object, the reason, the remedy."""


class VgpuError(Exception):
    """Base of all our errors; `str()` of one is a sentence fit for `virsh start` to show."""


class AddressError(VgpuError):
    """A text that is no PCI address."""


class ConfigError(VgpuError):
    """A configuration file that can't be used; names file, line and key."""


class DomainXmlError(VgpuError):
    """A document that is not the domain XML that libvirt writes."""


class RequestError(VgpuError):
    """A domain's request, or its hostdev, that can't be served as it is written."""


class DeviceError(VgpuError):
    """A device that can't be read, or didn't do what it was told."""


class FullError(DeviceError):
    """A parent that has no room for one more mediated device, as its driver says."""


class InUseError(VgpuError):
    """A device that some process holds open, or of which that can't be ruled out."""


class RewrittenError(VgpuError):
    """A device whose type is no longer the one that its claim says."""


class StoreError(VgpuError):
    """The claim store as a whole can't be read or written."""


class CatalogueError(VgpuError):
    """A catalogue of profiles that can't be read; never a reason to stop anything."""


class CordonError(VgpuError):
    """A cordon that can't be read, and so doesn't hold."""


class ClaimUnreadableError(VgpuError):
    """A claim file that can't be read or understood; it protects its device."""


class ClaimedError(VgpuError):
    """A device that has a claim already."""


class LockTimeoutError(VgpuError):
    """A lock that somebody else held for longer than `lock_timeout`."""


class RefusedError(VgpuError):
    """A start that must not go on."""


class KeptError(VgpuError):
    """A device that was not given back, because its owner isn't provably dead."""


class LibvirtError(VgpuError):
    """What libvirt answered, or that it didn't."""


class RightsError(VgpuError):
    """Something that only root may do."""


class InstallError(VgpuError):
    """Hooks that can't be installed, or not removed."""
