# SPDX-License-Identifier: LGPL-2.1-or-later
"""Our NamedTuple does what typing's does."""

from __future__ import annotations

import copy
import pickle
import typing
from typing import Any

import pytest

from vgpu_libvirt import records
from vgpu_libvirt.address import PciAddress


class Theirs(typing.NamedTuple):
    """A record."""

    one: int
    two: str = "b"
    three: tuple[int, ...] = ()

    @property
    def both(self) -> str:
        return f"{self.one}{self.two}"


class Ours(records.NamedTuple):
    """A record."""

    one: int
    two: str = "b"
    three: tuple[int, ...] = ()

    @property
    def both(self) -> str:
        return f"{self.one}{self.two}"


class Derived(Ours):
    """With room of its own."""

    def __init__(self, *_values: object) -> None:
        self.more = self.one + 1


CALLS: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((1,), {}),
    ((1, "x"), {}),
    ((1, "x", (2,)), {}),
    ((), {"one": 1}),
    ((1,), {"three": (2,)}),
    ((), {"three": (2,), "one": 1, "two": None}),
]


@pytest.mark.parametrize(("values", "named"), CALLS)
def test_it_is_made_and_looks_as_theirs(values: Any, named: Any) -> None:
    ours, theirs = Ours(*values, **named), Theirs(*values, **named)
    assert ours == theirs == tuple(ours)
    assert hash(ours) == hash(theirs)
    assert repr(ours) == repr(theirs).replace("Theirs", "Ours")
    assert ours._asdict() == theirs._asdict()
    assert list(ours._asdict()) == list(theirs._asdict())
    assert (ours.one, ours.two, ours.three, ours.both) == (
        *(theirs.one, theirs.two, theirs.three, theirs.both),
    )
    assert ours._replace(two="y") == theirs._replace(two="y")
    assert type(ours._replace(two="y")) is Ours
    assert pickle.loads(pickle.dumps(ours)) == copy.deepcopy(ours) == ours


@pytest.mark.parametrize(
    ("values", "named"),
    [((), {}), ((1, 2, 3, 4), {}), ((1,), {"four": 4}), ((1,), {"one": 1}), ((), {"two": 2})],
)
def test_a_wrong_call_is_refused_as_theirs(values: Any, named: Any) -> None:
    for kind in (Theirs, Ours):
        with pytest.raises(TypeError):
            kind(*values, **named)
    for kind in (Theirs, Ours):
        with pytest.raises((TypeError, ValueError)):
            kind(1)._replace(four=4)


def test_what_is_known_of_the_class() -> None:
    assert Ours._fields == Theirs._fields
    assert Ours._field_defaults == Theirs._field_defaults
    assert Ours.__match_args__ == Theirs.__match_args__
    assert Ours.__doc__ == Theirs.__doc__
    assert issubclass(Ours, tuple)
    assert Ours._make([1, "x", ()]) == Theirs._make([1, "x", ()])
    with pytest.raises(AttributeError):
        Ours(1).one = 2  # type: ignore[misc]
    with pytest.raises(AttributeError):
        Ours(1).four = 2  # type: ignore[attr-defined]
    match Ours(1):
        case Ours(one, two):
            assert (one, two) == (1, "b")


def test_what_is_derived_is_an_ordinary_class() -> None:
    derived = Derived(1, "x")
    assert (derived, derived.more) == (Ours(1, "x"), 2)
    assert Derived._fields == Ours._fields


def test_ours_are_made_of_it() -> None:
    assert PciAddress.__mro__ == (PciAddress, records.NamedTuple, tuple, object)
