# SPDX-License-Identifier: LGPL-2.1-or-later
"""Our failures as a program that uses libvirt-python expects them."""

from __future__ import annotations

import libvirt

from ..errors import AddressError, DomainXmlError, RefusedError, RequestError, VgpuError

_OF_THE_REQUEST = (AddressError, DomainXmlError, RefusedError, RequestError)


def as_libvirt(error: Exception) -> libvirt.libvirtError:
    """A libvirtError with the sentence of ERROR; for what is no VgpuError, one that asks for help.

    Its code says whether the request is at fault, or the host.
    """
    wrong = isinstance(error, _OF_THE_REQUEST)
    code = libvirt.VIR_ERR_CONFIG_UNSUPPORTED if wrong else libvirt.VIR_ERR_OPERATION_FAILED
    sentence = f"vgpu-libvirt: {_sentence(error)}"
    made = libvirt.libvirtError(sentence)
    # Its constructor takes what failed last in this thread, whatever that was.
    made.args = (sentence,)
    made.err = (
        code,
        libvirt.VIR_FROM_QEMU,
        sentence,
        libvirt.VIR_ERR_ERROR,
        "%s",
        sentence,
        None,
        -1,
        -1,
    )
    return made


def _sentence(error: Exception) -> str:
    if isinstance(error, VgpuError):
        return str(error)
    return f"internal error, please report it: {type(error).__name__}: {error}"
