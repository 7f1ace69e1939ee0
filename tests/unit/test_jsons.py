# SPDX-License-Identifier: LGPL-2.1-or-later
"""Our JSON is the json module's, to the character and to the error."""

from __future__ import annotations

import json
import math
import sys
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vgpu_libvirt import jsons

TRIED = settings(
    max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    # lone surrogates too: a claim file may have any
    | st.text(st.characters(codec=None)),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@TRIED
@given(VALUES)
def test_what_is_written_is_what_json_writes(value: Any) -> None:
    assert jsons.dumps(value) == json.dumps(value, indent=1)


@TRIED
@given(VALUES)
def test_what_is_read_is_what_json_reads(value: Any) -> None:
    for text in (json.dumps(value), f" \n{json.dumps(value, indent=3, ensure_ascii=False)}\t\r\n"):
        assert jsons.loads(text) == value


@TRIED
@given(st.text('{}[]",:0123456789.eE+-truefalsnuNaIity \n\\', max_size=12))
def test_what_is_no_json_is_refused_with_the_same_words(text: str) -> None:
    said: list[object] = []
    for loads in (json.loads, jsons.loads):
        try:
            said.append(repr(loads(text)))
        except ValueError as error:
            said.append((type(error), str(error)))
    assert said[0] == said[1]


def test_numbers_that_are_none() -> None:
    assert math.isnan(jsons.loads("NaN"))
    assert jsons.loads("[Infinity, -Infinity]") == [math.inf, -math.inf]


def test_depth_is_the_same_error() -> None:
    for loads in (json.loads, jsons.loads):
        with pytest.raises(RecursionError):
            loads("[" * 100_000)


def test_a_python_without_the_c_part_uses_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "_json", None)
    assert jsons.loads('{"a": [1]}') == {"a": [1]}
    assert jsons.dumps({"a": [1]}) == json.dumps({"a": [1]}, indent=1)
