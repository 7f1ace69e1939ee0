# SPDX-License-Identifier: LGPL-2.1-or-later
"""Adds up what counts.py has noted since boot, for `virt-vgpu metrics`.

A sync folds the lines into `<runtime>/counts/totals`: it renames their file aside as
`lines.<number>`, adds it up, and writes the number together with the sums, so that a fold that was
killed is finished, and nothing is counted twice. What is appended to a file that is being folded is
lost.
"""

from __future__ import annotations

import bisect
import contextlib
import fcntl
import os
import re

from . import fs, jsons
from .counts import DONE, Sync, directory, make_directory
from .errors import CountsError
from .records import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .config import Paths

BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)  # seconds
_WORD = r"[a-z][a-z-]{0,30}"
_NUMBER = r"\d{1,12}(?:\.\d{1,9})?"
_HOOK = re.compile(rf"hook ({_WORD}) ({_NUMBER}) ({_WORD})", re.ASCII)
_REFUSED = re.compile(rf"refused ({_WORD}) ({_WORD})", re.ASCII)
_SYNC = re.compile(
    rf"sync ({_NUMBER}) ({_NUMBER}) (\d{{1,9}}) (\d{{1,9}}) (\d{{1,9}}) (\d{{1,9}})", re.ASCII
)
_TRIES = 3  # at reading sums that are folded meanwhile


class Totals(NamedTuple):
    """The sums since boot. Their keys are words: see `added`."""

    sums: dict[str, float]
    last: Sync | None = None
    folded: int = 0  # the number of the last file of lines that is in them


def added(totals: Totals, lines: Iterable[str]) -> Totals:
    """TOTALS with LINES; a line that was torn is passed over.

    Keys: `refused OPERATION REASON`, `hooks OPERATION BUCKET` (not cumulated), `seconds OPERATION`,
    and `syncs`, `released`, `kept`, `repointed`, `problems` of all syncs together.
    """
    sums = dict(totals.sums)
    last = totals.last

    def add(key: str, value: float = 1) -> None:
        sums[key] = sums.get(key, 0) + value

    for line in lines:
        if match := _HOOK.fullmatch(line):
            operation, seconds, result = match[1], float(match[2]), match[3]
            place = bisect.bisect_left(BUCKETS, seconds)
            add(f"hooks {operation} {BUCKETS[place] if place < len(BUCKETS) else '+Inf'}")
            add(f"seconds {operation}", seconds)
            if result != DONE:
                add(f"refused {operation} {result}")
        elif match := _REFUSED.fullmatch(line):
            add(line)
        elif match := _SYNC.fullmatch(line):
            last = Sync(float(match[1]), float(match[2]), *(int(match[n]) for n in range(3, 7)))
            add("syncs")
            for name in Sync._fields[2:]:
                add(name, getattr(last, name))
    return Totals(sums, last, totals.folded)


def read(paths: Paths) -> Totals:
    """All that was counted until now; writes nothing. Raises CountsError."""
    for _ in range(_TRIES):
        totals = _totals(paths)
        whole = added(totals, [*_lines(_aside(paths, totals)), *_lines(directory(paths), "lines")])
        if _totals(paths).folded == totals.folded:
            break
    return whole


def fold(paths: Paths) -> None:
    """Add the lines to the totals, unless somebody else does just now. Raises CountsError."""
    try:
        make_directory(paths)
        lock = os.open(
            f"{directory(paths)}/lock",
            os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW,
            0o600,
        )
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _fold(paths)
        except BlockingIOError:
            return
        finally:
            os.close(lock)
    except OSError as error:
        raise CountsError(
            f"what hooks have counted can't be added up in {directory(paths)}: {fs.reason(error)}"
        ) from error


def _fold(paths: Paths) -> None:
    totals = _totals(paths)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(_aside(paths, totals._replace(folded=totals.folded - 1)))  # it is in them
    aside = _aside(paths, totals)
    if not os.path.lexists(aside):  # else a fold was killed before it wrote its sums
        try:
            os.rename(f"{directory(paths)}/lines", aside)
        except FileNotFoundError:
            return
    new = added(totals, _lines(aside))._replace(folded=totals.folded + 1)
    fs.replace(f"{directory(paths)}/totals", _text(new), f"{directory(paths)}/new")
    os.unlink(aside)


def _totals(paths: Paths) -> Totals:
    path = f"{directory(paths)}/totals"
    try:
        data = jsons.loads(fs.read_text(path))
        last = data["last"] and Sync(*data["last"])
        sums = {str(key): float(value) for key, value in data["sums"].items()}
        return Totals(sums, last, int(data["folded"]))
    except FileNotFoundError:
        return Totals({})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        why = fs.reason(error) if isinstance(error, OSError) else "not what we write there"
        raise CountsError(
            f"the counts in {path} can't be read: {why}; remove that file, and they begin anew"
        ) from error


def _text(totals: Totals) -> str:
    return jsons.dumps(totals._asdict()) + "\n"


def _lines(*path: str) -> list[str]:
    try:
        text = fs.read_text("/".join(path), errors="replace")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CountsError(f"{'/'.join(path)} can't be read: {fs.reason(error)}") from error
    return text.splitlines()


def _aside(paths: Paths, totals: Totals) -> str:
    """Where the lines are, or will be, that come next after TOTALS."""
    return f"{directory(paths)}/lines.{totals.folded + 1}"
