# SPDX-License-Identifier: LGPL-2.1-or-later
"""`virt-vgpu` with a libvirt that is a directory of definitions; changes to them are forgotten.

libvirt's own test driver has no hostdevs to attach. What libvirt and its socket cost isn't in any
number, so the calls that would go over the socket are counted: with $BENCH_CALLS to stderr.

    python3 bench/libvirt_double.py VERB...
"""

from __future__ import annotations

import functools
import os
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import libvirt
from lxml import etree

from tests.unit import fake_libvirt
from vgpu_libvirt import config, fs
from vgpu_libvirt.cli.main import main

_UUID = re.compile(r"<uuid>(.+)</uuid>")
_calls = 0


def _counted(call: Any) -> Any:
    """CALL, one of those that libvirt answers over its socket."""

    @functools.wraps(call)
    def count(*arguments: object) -> Any:
        global _calls
        _calls += 1
        return call(*arguments)

    return count


class Domain(fake_libvirt.Domain):
    """A definition, parsed only when it is changed: parsing it here is no work of ours."""

    def __init__(self, name: str, text: str, active: bool) -> None:
        super().__init__("<none/>", active)
        del self.document
        self._name = name
        self._text = text
        self._uuid = _UUID.findall(text)[0]

    @functools.cached_property
    def document(self) -> Any:
        return etree.fromstring(self._text)

    def name(self) -> str:
        return self._name

    def UUIDString(self) -> str:  # noqa: N802
        return self._uuid

    @_counted
    def XMLDesc(self, flags: int) -> str:  # noqa: N802
        return super().XMLDesc(flags) if "document" in vars(self) else self._text

    isActive = _counted(fake_libvirt.Domain.isActive)  # noqa: N815
    isPersistent = _counted(fake_libvirt.Domain.isPersistent)  # noqa: N815
    attachDeviceFlags = _counted(fake_libvirt.Domain.attachDeviceFlags)  # noqa: N815
    detachDeviceFlags = _counted(fake_libvirt.Domain.detachDeviceFlags)  # noqa: N815


class Connection(fake_libvirt.Connection):
    """A virConnect that finds a domain as fast as libvirt's own does."""

    def __init__(self, *domains: Domain) -> None:
        super().__init__(*domains)
        self._by_uuid = {domain.UUIDString(): domain for domain in domains}

    @_counted
    def lookupByUUIDString(self, uuid: str) -> fake_libvirt.Domain:  # noqa: N802
        return self._by_uuid.get(uuid) or super().lookupByUUIDString(uuid)

    @_counted
    def listAllDomains(self, flags: int) -> list[fake_libvirt.Domain]:  # noqa: N802
        if flags == libvirt.VIR_CONNECT_LIST_DOMAINS_ACTIVE:
            return [domain for domain in self.domains if domain.active]
        return super().listAllDomains(flags)


def calls() -> int:
    """How often libvirt was asked until now."""
    return _calls


def connect(_uri: str) -> Connection:
    """All definitions that the configured host has, each as it was written."""
    paths = config.load().paths
    definitions = f"{paths.libvirt_etc}/qemu"
    running = {name for name in os.listdir(f"{paths.libvirt_run}/qemu") if name.endswith(".xml")}
    return Connection(
        *(
            Domain(
                name.removesuffix(".xml"), fs.read_text(f"{definitions}/{name}"), name in running
            )
            for name in sorted(os.listdir(definitions))
        )
    )


if __name__ == "__main__":
    libvirt.open = functools.cache(connect)
    try:
        main(prog_name="virt-vgpu")
    finally:
        if "BENCH_CALLS" in os.environ:
            print(f"{_calls} calls to libvirt", file=sys.stderr)
