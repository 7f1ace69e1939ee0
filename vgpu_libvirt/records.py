# SPDX-License-Identifier: LGPL-2.1-or-later
"""`typing.NamedTuple` at a fifth of its price, and `TYPE_CHECKING` without the import of typing.

libvirt waits while a hook starts. The import of typing costs that half as much as all of Python's
start, and each class that it makes is compiled from text; a hook has forty of them. To type
checkers these are typing's own.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NamedTuple as NamedTuple
else:
    from _collections import _tuplegetter

    class _Kind(type):
        """Makes annotations the fields of a class; what is derived from that is an ordinary one."""

        def __new__(cls, name, bases, space):
            if bases[0].__base__ is tuple:
                fields = tuple(space.get("__annotations__", ()))
                space["_fields"] = space["__match_args__"] = fields
                space["_field_defaults"] = {key: space[key] for key in fields if key in space}
                for number, key in enumerate(fields):
                    space[key] = _tuplegetter(number, f"Alias for field number {number}")
                space.setdefault("__slots__", ())
            return type.__new__(cls, name, bases, space)

    class NamedTuple(tuple, metaclass=_Kind):
        """A tuple whose items have names."""

        __slots__ = ()
        _fields = ()
        _field_defaults = {}

        def __new__(cls, *values, **named):
            rest = cls._fields[len(values) :]
            if rest:
                defaults = cls._field_defaults
                try:
                    values += tuple(
                        [named.pop(key) if key in named else defaults[key] for key in rest]
                    )
                except KeyError as error:
                    raise TypeError(f"{cls.__name__} lacks the field {error}") from None
            if named or len(values) != len(cls._fields):
                raise TypeError(f"{cls.__name__} has no such fields: {values} {named}")
            return tuple.__new__(cls, values)

        @classmethod
        def _make(cls, values):
            return cls(*values)

        def _replace(self, **changes):
            values = [changes.pop(*each) for each in zip(self._fields, self)]  # noqa: B905
            if changes:
                raise ValueError(f"{type(self).__name__} has no fields {list(changes)}")
            return tuple.__new__(type(self), values)

        def _asdict(self):
            return dict(zip(self._fields, self))  # noqa: B905

        def __repr__(self):
            named = ", ".join([f"{key}={value!r}" for key, value in self._asdict().items()])
            return f"{type(self).__name__}({named})"

        def __getnewargs__(self):
            return tuple(self)
