# SPDX-License-Identifier: LGPL-2.1-or-later
"""JSON as the `json` module reads and writes it, without that module's import.

libvirt waits for hooks, and json imports the regular expressions, which a hook has no other use
for: together a third of Python's start. What parses and quotes is json's own, in C; where another
Python has no such thing, it is json itself.
"""

from __future__ import annotations

import contextlib

from .records import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_BLANKS = " \t\n\r"


class _Kinds:
    """What json.JSONDecoder tells its scanner by default."""

    strict = True
    object_hook = object_pairs_hook = None
    parse_float, parse_int, parse_constant = float, int, float  # the last for NaN and Infinity


def _in_c() -> tuple[Callable[[str, int], tuple[Any, int]], Callable[[str], str]]:
    import _json

    scan = _json.make_scanner(_Kinds)  # type: ignore[arg-type]  # anything with these attributes
    return scan, _json.encode_basestring_ascii


def loads(text: str) -> Any:
    """What TEXT says. Raises ValueError where it isn't JSON, and RecursionError."""
    with contextlib.suppress(ImportError, AttributeError, StopIteration):
        scan, _ = _in_c()
        value, end = scan(text, len(text) - len(text.lstrip(_BLANKS)))
        if not text[end:].strip(_BLANKS):
            return value
    import json  # which says what is wrong

    return json.loads(text)


def dumps(value: Any) -> str:
    """VALUE as `json.dumps(value, indent=1)` writes it; of dicts with texts for keys, and lists."""
    try:
        _, quote = _in_c()
    except (ImportError, AttributeError):
        import json

        return json.dumps(value, indent=1)
    return "".join(_parts(value, quote, "\n"))


def _parts(value: Any, quote: Callable[[str], str], line: str) -> list[str]:
    """VALUE in pieces; LINE begins a line at its depth."""
    if isinstance(value, str):
        return [quote(value)]
    if value is None or isinstance(value, bool):
        return [{None: "null", True: "true", False: "false"}[value]]
    if isinstance(value, int | float):
        return [repr(value)]
    inner = f"{line} "
    parts: list[str] = []
    if isinstance(value, dict):
        for key, item in value.items():
            parts += [",", inner, quote(key), ": ", *_parts(item, quote, inner)]
        return ["{", *parts[1:], line, "}"] if parts else ["{}"]
    for item in value:
        parts += [",", inner, *_parts(item, quote, inner)]
    return ["[", *parts[1:], line, "]"] if parts else ["[]"]
