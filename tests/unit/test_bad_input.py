# SPDX-License-Identifier: LGPL-2.1-or-later
"""Every file that we read, spoilt in every way: no traceback, no released device, and its name.

Only permissions are not among the ways: root reads everything.
"""

from __future__ import annotations

import io
import os
import shutil
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from tests.unit.host import LIBVIRTD, WEB1, web1, web2
from tests.unit.test_lifecycle import start
from vgpu_libvirt import hook
from vgpu_libvirt.cli.main import main as virt_vgpu

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.unit.host import Host

pytestmark = pytest.mark.promise(1, 4, 5, 7)

VF, OTHER = "0000:3d:00.4", "0000:3d:00.5"
QEMU = 4001

FILES: dict[str, Callable[[Host], Path]] = {
    "configuration": lambda host: host.root / "config.toml",
    "claim": lambda host: host.state / "claims" / f"{VF}.json",
    "status file": lambda host: host.status_file("web1"),
    "pid file": lambda host: host.status_file("web1").with_suffix(".pid"),
    "current type": lambda host: host.pci(VF) / "nvidia/current_vgpu_type",
    "list": lambda host: host.pci(VF) / "nvidia/creatable_vgpu_types",
    "physfn": lambda host: host.pci(VF) / "physfn",
    "iommu_group": lambda host: host.pci(VF) / "iommu_group",
    "vfio-dev": lambda host: host.pci(VF) / "vfio-dev",
    "numa_node": lambda host: host.pci("0000:3d:00.0") / "numa_node",
    "boot id": lambda host: host.proc / "sys/kernel/random/boot_id",
    "Unix sockets": lambda host: host.proc / "net/unix",
    "QEMU's stat": lambda host: host.proc / str(QEMU) / "stat",
    "QEMU's command line": lambda host: host.proc / str(QEMU) / "cmdline",
    "QEMU's files": lambda host: host.proc / str(QEMU) / "fd",
    "libvirtd's stat": lambda host: host.proc / str(LIBVIRTD) / "stat",
    "lock": lambda host: host.state / "lock",
    "device lock": lambda host: host.state / "locks" / VF,
}


def away(path: Path) -> bytes:
    """Remove PATH, whatever it is; return what a file had in it."""
    content = b""
    if path.is_symlink():
        path.unlink()
    elif path.is_dir():
        shutil.rmtree(path)
    elif path.exists():
        content = path.read_bytes()
        path.unlink()
    path.parent.mkdir(parents=True, exist_ok=True)
    return content


WAYS: dict[str, Callable[[Path, bytes], object]] = {
    "empty": lambda path, _: path.write_bytes(b""),
    "truncated": lambda path, content: path.write_bytes(content[: len(content) // 2]),
    "binary": lambda path, _: path.write_bytes(bytes(range(256)) * 8),
    "huge": lambda path, content: path.write_bytes(content + b" " * 5_000_000),
    "other text": lambda path, _: path.write_bytes(b"version = {999}\n"),
    "a directory": lambda path, _: path.mkdir(),
    "a link to itself": lambda path, _: path.symlink_to(path.name),
    "a link to nothing": lambda path, _: path.symlink_to("nothing"),
    "a pipe": lambda path, _: os.mkfifo(path),
}

# Without its paths the configuration is of this very machine; that an empty one means the defaults,
# and half a one what it says, is right.
CASES = [
    (file, way)
    for file in FILES
    for way in WAYS
    if file != "configuration" or way not in ("empty", "truncated")
]

# What is there then is no fault: a list may be short, and half of an id is an id.
WHOLE = {("list", "empty"), ("list", "truncated"), ("current type", "truncated")}
# Where one of these is spoilt, something that we say has to name it.
NAMED = {"configuration", "claim", "status file", "current type", "list"}


def run(host: Host, operation: str, xml: str) -> tuple[int, str]:
    """A hook operation, with the environment as libvirt's daemon gives it."""
    stderr = io.StringIO()
    environment = {**host.environment, "VGPU_LIBVIRT_PARENT": str(LIBVIRTD)}
    arguments = ["x", operation, "begin", "-"]
    streams = hook.Streams(io.BytesIO(xml.encode()), io.BytesIO(), stderr)
    status = hook.main(arguments, streams, environment)
    return status, stderr.getvalue()


def verb(host: Host, *arguments: str) -> str:
    """A verb of the command line; its whole output."""
    return CliRunner(env=host.environment).invoke(virt_vgpu, arguments).output


@pytest.fixture
def running(host: Host) -> Host:
    """A host on which web1 runs with VF, and whose driver shows that in no other place."""
    host.gpu(vfs=2)
    host.set_policy(lock_timeout=0.3)
    start(host, VF, QEMU)
    host.write(host.status_file("web1").with_suffix(".pid"), f"{QEMU}\n")
    return host


@pytest.mark.parametrize(("file", "way"), CASES)
def test_a_living_guests_device_is_kept(running: Host, file: str, way: str) -> None:
    path = FILES[file](running)
    type_file = running.pci(VF) / "nvidia/current_vgpu_type"
    WAYS[way](path, away(path))
    spoilt = file == "current type"
    before = None if spoilt else type_file.read_text()
    said = []
    for operation, xml in (
        ("prepare", web2(VF)),
        ("release", web2(VF)),
        ("prepare", web2(OTHER)),
        ("release", web2(OTHER)),
        ("release", web1(VF)),
        ("reconnect", web1(VF)),
        ("started", web1(VF)),
        ("stopped", web1(VF)),
    ):
        status, text = run(running, operation, xml)
        assert status == 0 or operation == "prepare", (operation, text)
        said.append(text)
    said += [verb(running, "sync"), verb(running, "list"), verb(running, "status")]
    everything = "\n".join(said)
    assert "Traceback" not in everything
    assert "internal error" not in everything, everything
    assert spoilt or type_file.read_text() == before
    if file in NAMED and (file, way) not in WHOLE:
        assert str(path) in everything, everything


@pytest.mark.parametrize(("file", "way"), CASES)
def test_a_dead_guests_device_comes_back_or_is_kept_with_a_reason(
    running: Host, file: str, way: str
) -> None:
    running.end_domain("web1", QEMU)
    path = FILES[file](running)
    WAYS[way](path, away(path))
    status, text = run(running, "release", web1(VF))
    everything = "\n".join([text, verb(running, "sync"), verb(running, "status")])
    assert status == 0
    assert "Traceback" not in everything
    assert "internal error" not in everything, everything
    if file != "claim" and (running.state / "claims" / f"{VF}.json").exists():
        assert f"domain 'web1' ({WEB1})" in everything or str(path) in everything, everything
