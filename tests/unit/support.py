# SPDX-License-Identifier: LGPL-2.1-or-later
"""What several test files need: other processes, another user, a directory that is anyone's."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.unit.host import BOOT, REPOSITORY, WEB1
from vgpu_libvirt.claims.model import Claim, Namespaces, Phase, Process
from vgpu_libvirt.devices.model import Profile

if TYPE_CHECKING:
    from collections.abc import Iterator

NOBODY = 65534
VF = "0000:3d:00.4"
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@contextlib.contextmanager
def nobody() -> Iterator[None]:
    """Be an ordinary user for a while, whom permissions stop; one already, if tests aren't root."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if user == 0:
            os.seteuid(0)


@contextlib.contextmanager
def directory_for_all() -> Iterator[Path]:
    """A directory that every user can reach; pytest's own are closed to others."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name)
        path.chmod(0o755)
        yield path


def python(program: str, *arguments: str | Path) -> list[str | Path]:
    """The command that runs a PROGRAM with this checkout."""
    start = f"import sys; sys.dont_write_bytecode = True; sys.path.insert(0, {str(REPOSITORY)!r})\n"
    return [sys.executable, "-ISc", start + program, *arguments]


@contextlib.contextmanager
def child(
    program: str, *arguments: str | Path, **options: object
) -> Iterator[subprocess.Popen[str]]:
    """A process that runs PROGRAM; it has printed its first line, and is killed at the end."""
    process = subprocess.Popen(  # type: ignore[call-overload]
        python(program, *arguments),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        **options,
    )
    try:
        process.first_line = process.stdout.readline().strip()
        yield process
    finally:
        process.kill()
        process.communicate()


def new_claim(device: str = VF, **changes: object) -> Claim:
    """A claim of web1 that has been programmed and waits for its QEMU."""
    claim = Claim(
        device=device,
        backend="vendor-vfio",
        gpu="0000:3d:00.0",
        profile=Profile(1152, "NVIDIA L40S-8Q"),
        claim_id="0123456789abcdef0123456789abcdef",
        phase=Phase.CONFIGURED,
        domain_uuid=WEB1,
        domain_name="web1",
        domain_id=7,
        alias="ua-vgpu0",
        boot_id=BOOT,
        created=1790000000.0,
        since_boot=512.5,
        daemon=Process(811, 4242),
        qemu=None,
        namespaces=Namespaces(4026531836, 4026531840),
    )
    return claim._replace(**changes)  # type: ignore[arg-type]
