# SPDX-License-Identifier: LGPL-2.1-or-later
"""What is left of a directory tree after a power cut, by the calls that were made on it.

POSIX promises no more than: a file's content as of its last fsync, and a directory's names as of
the directory's. Filesystems keep more; what they keep lies between that and everything.
"""

from __future__ import annotations

import posixpath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from tests.faults.kill import Call

STATE = "state"


class File:
    """A file, under any number of names."""

    def __init__(self, content: str, synced: str = "") -> None:
        self.content, self.synced = content, synced


class Disk:
    """The store; a name without a File is a directory."""

    def __init__(self, root: Path) -> None:
        """As it is at ROOT, all of it long on the disk."""
        self.names: dict[str, File | None] = {STATE: None}
        for path in sorted(root.rglob("*")):
            text = path.read_text() if path.is_file() else ""
            name = f"{STATE}/{path.relative_to(root)}"
            self.names[name] = File(text, text) if path.is_file() else None
        self.durable = dict(self.names)

    def apply(self, call: Call) -> None:
        """Make a call; those that failed, or aren't about the store, change nothing."""
        path = call.path
        if call.result != "ok" or not path.startswith(STATE):
            return
        if call.name == "mkdir":
            self.names[path] = None
        elif call.name == "open" and call.detail == "create":
            self.names.setdefault(path, File(""))
        elif call.name == "unlink":
            del self.names[path]
        elif call.name == "link":
            self.names[call.detail] = self.names[path]
        elif call.name == "rename":
            self.names[call.detail] = self.names.pop(path)
        elif call.name == "write":
            self._file(path).content += call.detail
        elif call.name == "fsync":
            self._sync(path)

    def _file(self, path: str) -> File:
        file = self.names[path]
        assert file is not None
        return file

    def _sync(self, path: str) -> None:
        file = self.names[path]
        if file:
            file.synced = file.content
            return
        for name in {*self.names, *self.durable}:
            if posixpath.dirname(name) == path:
                if name in self.names:
                    self.durable[name] = self.names[name]
                else:
                    del self.durable[name]

    def left(self, kept: str) -> dict[str, str | None]:
        """What is there after a power cut; None: a directory.

        KEPT: "fsynced" is what must be, "names" all names but only contents that were fsynced,
        "all" everything.
        """
        if kept == "fsynced":
            reachable = {name for name in self.durable if self._is_reachable(name)}
            return {name: _text(self.durable[name], False) for name in sorted(reachable)}
        return {name: _text(file, kept == "all") for name, file in sorted(self.names.items())}

    def _is_reachable(self, name: str) -> bool:
        return name == STATE or (
            name in self.durable and self._is_reachable(posixpath.dirname(name))
        )


def _text(file: File | None, whole: bool) -> str | None:
    return file and (file.content if whole else file.synced)


def write(left: dict[str, str | None], root: Path) -> None:
    """Put what was LEFT at ROOT, where nothing is."""
    for name, text in left.items():
        path = root / posixpath.relpath(name, STATE)
        if text is None:
            path.mkdir()
        else:
            path.write_text(text)
