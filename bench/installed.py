# SPDX-License-Identifier: LGPL-2.1-or-later
"""The hook as a package installs it, compiled, for a host in a directory.

A configuration file would root it there as well, but costs a hook the import of tomllib, and most
hosts have none. So the copy has other default paths instead.
"""

from __future__ import annotations

import compileall
import shutil
from typing import TYPE_CHECKING

from tests.unit.host import REPOSITORY
from vgpu_libvirt import config

if TYPE_CHECKING:
    from pathlib import Path

PYTHON = "/usr/bin/python3"
STUB = str(REPOSITORY / "hooks/qemu")


def install(directory: Path, paths: config.Paths, prelude: str = "") -> str:
    """Install below DIRECTORY for a host with PATHS; return the entry point.

    PRELUDE is run by the entry point first, with the package in reach.
    """
    shutil.copytree(
        REPOSITORY / "vgpu_libvirt",
        directory / "vgpu_libvirt",
        ignore=shutil.ignore_patterns("__pycache__"),
        dirs_exist_ok=True,
    )
    module = directory / "vgpu_libvirt/config.py"
    text = module.read_text()
    defaults = [
        (f'DEFAULT_FILE = "{config.DEFAULT_FILE}"', f'DEFAULT_FILE = "{directory}/none.toml"'),
        *(
            (f'    {key}: str = "{default}"', f'    {key}: str = "{getattr(paths, key)}"')
            for key, default in config.Paths()._asdict().items()
        ),
    ]
    for old, new in defaults:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    module.write_text(text)
    assert compileall.compile_dir(directory / "vgpu_libvirt", quiet=1)
    entry = directory / "vgpu-libvirt-hook"
    script = (REPOSITORY / "packaging/vgpu-libvirt-hook.in").read_text()
    script = script.replace("@PYTHONDIR@", str(directory)).replace("\ntry:\n", f"\n{prelude}try:\n")
    entry.write_text(script)
    entry.chmod(0o755)
    return str(entry)
