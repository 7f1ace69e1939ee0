# SPDX-License-Identifier: LGPL-2.1-or-later
"""Undo that stands next to do."""

from __future__ import annotations

from .records import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Self


class Revert:
    """A block that, left by an exception, undoes what was added in it, last first.

    An undo function must not raise: what it can't undo it has to leave visibly.
    """

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def add(self, undo: Callable[[], None]) -> None:
        """Say how to undo what comes next."""
        self._undo.append(undo)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            while self._undo:
                self._undo.pop()()
