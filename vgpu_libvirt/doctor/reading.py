# SPDX-License-Identifier: LGPL-2.1-or-later
"""Reads files for doctor: what is missing is None or empty, what can't be read is noted."""

from __future__ import annotations

import os

from .. import fs


def text(path: str, unseen: list[str]) -> str | None:
    """The text of PATH, or None; adds to UNSEEN why it can't be read."""
    try:
        return fs.read_text(path, errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        unseen.append(f"{path} can't be read: {fs.reason(error)}")
        return None


def names(directory: str, unseen: list[str]) -> list[str]:
    """What is in DIRECTORY, in order; adds to UNSEEN why it can't be read."""
    try:
        return sorted(os.listdir(directory))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        unseen.append(f"{directory} can't be read: {fs.reason(error)}")
        return []


def number(path: str, unseen: list[str]) -> int | None:
    """The whole number in PATH, or None."""
    digits = (text(path, unseen) or "").strip()
    return int(digits) if digits.isascii() and digits.isdigit() else None


def link(path: str) -> str | None:
    """The last part of where the link PATH points, or None where there is none."""
    try:
        return os.path.basename(os.readlink(path))
    except OSError:
        return None
