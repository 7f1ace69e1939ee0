# SPDX-License-Identifier: LGPL-2.1-or-later
"""Compares output with a file; VGPU_LIBVIRT_UPDATE_GOLDEN=1 writes the file instead."""

from __future__ import annotations

import difflib
import os
from typing import TYPE_CHECKING

import pytest

from tests.unit.host import DATA

if TYPE_CHECKING:
    from pathlib import Path


def check(name: str, text: str, root: Path) -> None:
    """Compare TEXT, with ROOT written as ROOT, to the file NAME below data/."""
    path = DATA / name
    text = text.replace(str(root), "ROOT")
    if os.environ.get("VGPU_LIBVIRT_UPDATE_GOLDEN"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    expected = path.read_text() if path.exists() else ""
    if text != expected:
        lines = difflib.unified_diff(
            expected.splitlines(), text.splitlines(), str(path), "what was printed", lineterm=""
        )
        pytest.fail("\n".join(lines), pytrace=False)
