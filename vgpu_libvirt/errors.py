# SPDX-License-Identifier: LGPL-2.1-or-later
"""What can go wrong, each with one sentence for a person: the object, the reason, the remedy."""


class VgpuError(Exception):
    """Base of all our errors; `str()` of one is a sentence fit for `virsh start` to show.

    KIND is a word for what is counted, by the cause of a refusal; see `kind`.
    """

    kind = "other"


class AddressError(VgpuError):
    """A text that is no PCI address."""

    kind = "request"


class ConfigError(VgpuError):
    """A configuration file that can't be used; names file, line and key."""

    kind = "config"


class DomainXmlError(VgpuError):
    """A document that is not the domain XML that libvirt writes."""

    kind = "request"


class RequestError(VgpuError):
    """A domain's request, or its hostdev, that can't be served as it is written."""

    kind = "request"


class NoRoomError(RequestError):
    """A profile that fits nowhere now, or not where it was to be."""

    kind = "no-room"


class DeviceError(VgpuError):
    """A device that can't be read, or didn't do what it was told."""

    kind = "device"


class FullError(DeviceError):
    """A parent that has no room for one more mediated device, as its driver says."""

    kind = "no-room"


class InUseError(VgpuError):
    """A device that some process holds open, or of which that can't be ruled out."""

    kind = "in-use"


class RewrittenError(VgpuError):
    """A device whose type is no longer the one that its claim says."""

    kind = "rewritten"


class StoreError(VgpuError):
    """The claim store as a whole can't be read or written."""

    kind = "store"


class CatalogueError(VgpuError):
    """A catalogue of profiles that can't be read; never a reason to stop anything."""


class CountsError(VgpuError):
    """Counts of what hooks did that can't be read or written; never a reason to stop anything."""


class CordonError(VgpuError):
    """A cordon that can't be read, and so doesn't hold."""


class ClaimUnreadableError(VgpuError):
    """A claim file that can't be read or understood; it protects its device."""

    kind = "claim-unreadable"


class ClaimedError(VgpuError):
    """A device that has a claim already."""

    kind = "claimed"


class LockTimeoutError(VgpuError):
    """A lock that somebody else held for longer than `lock_timeout`."""

    kind = "lock"


class RefusedError(VgpuError):
    """A start that must not go on."""


class OwnedError(RefusedError):
    """A device of somebody else, who isn't provably dead."""

    kind = "claimed"


class OpenError(RefusedError):
    """A device in use by a running domain that has no claim on it."""

    kind = "in-use"


class ForeignError(RefusedError):
    """A device with a type that we didn't set."""

    kind = "foreign"


class CordonedError(RefusedError):
    """A device on which nothing new is put."""

    kind = "cordoned"


class KeptError(VgpuError):
    """A device that was not given back, because its owner isn't provably dead."""

    kind = "claimed"


class LibvirtError(VgpuError):
    """What libvirt answered, or that it didn't."""

    kind = "libvirt"


class SriovError(VgpuError):
    """VFs, or a mode of a GPU, that were not made or set, and why."""


class RightsError(VgpuError):
    """Something that only root may do."""

    kind = "rights"


class InstallError(VgpuError):
    """Hooks that can't be installed, or not removed."""


def kind(error: BaseException) -> str:
    """The kind of ERROR: that of its deepest cause that has one of its own."""
    found = VgpuError.kind
    cause: BaseException | None = error
    while isinstance(cause, VgpuError):
        found = cause.kind if cause.kind != VgpuError.kind else found
        cause = cause.__cause__
    return found if isinstance(error, VgpuError) else "internal"
