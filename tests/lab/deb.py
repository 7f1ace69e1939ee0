# SPDX-License-Identifier: LGPL-2.1-or-later
"""The Debian package that tests/run builds on the host, and a newer one."""

from __future__ import annotations

import re
from pathlib import Path

from tests.lab.guest import run

PACKAGES = Path("/run/lab/packages")
NEWER = "9.9.9"


def built() -> Path:
    """The package of this checkout."""
    (found,) = PACKAGES.glob("*.deb")
    return found


def newer(package: Path, directory: Path) -> Path:
    """PACKAGE as a later version, whose code and hook say so, made in DIRECTORY."""
    tree = directory / "tree"
    extracted = run("dpkg-deb", "--raw-extract", str(package), str(tree))
    assert extracted.status == 0, extracted.output
    for path, pattern in (
        (tree / "DEBIAN/control", r"(?m)^Version: .*$"),
        (
            tree / "usr/lib/python3/dist-packages/vgpu_libvirt/__init__.py",
            r'(?<=version__ = ").*?(?=")',
        ),
    ):
        version = f"Version: {NEWER}" if path.name == "control" else NEWER
        path.write_text(re.sub(pattern, version, path.read_text(), count=1))
    with (tree / "usr/share/vgpu-libvirt/hooks/qemu").open("a") as hook:
        hook.write("# newer\n")
    target = directory / "newer.deb"
    done = run("dpkg-deb", "-Znone", "--root-owner-group", "--build", str(tree), str(target))
    assert done.status == 0, done.output
    return target
