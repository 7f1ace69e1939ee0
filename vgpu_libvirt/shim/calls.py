# SPDX-License-Identifier: LGPL-2.1-or-later
"""Stands between a program and libvirt-python, so that nothing shows but what is done.

The methods of libvirt's classes are replaced in place: domains come from many calls and callbacks,
and programs ask for their class. A call of which we want nothing is made as the program made it.
Nothing may be wanted of it because of a mistake of ours, and never does one surface there.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import threading
import traceback
import weakref
from typing import TYPE_CHECKING, Any

from ..errors import LibvirtError
from . import failures

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    # Looks at a call, without any effect; returns how to make it, or None: as it is.
    See = Callable[["Call"], Callable[["Call"], Any] | None]

log = logging.getLogger("vgpu_libvirt")

served: weakref.WeakSet[Any] = weakref.WeakSet()  # connections of ours

# libvirt-python gives a migrated domain the connection that it came from.
_destinations: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
_thread = threading.local()


class Call:
    """A call of a method, which can be made as it is, and with another document."""

    def __init__(
        self, method: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> None:
        self._method = method
        self._arguments = arguments
        self._keywords = keywords
        self.result: Any = None
        self.succeeded = False
        self.failure: Exception | None = None  # of the last time that it was made

    def __call__(self, document: str | None = None) -> Any:
        """Make it, with DOCUMENT as its first argument; None: as it is."""
        arguments, keywords = self._arguments, self._keywords
        if document is not None:
            bound = inspect.signature(self._method).bind(*arguments, **keywords)
            bound.arguments[list(bound.signature.parameters)[1]] = document
            arguments, keywords = bound.args, bound.kwargs
        self.failure = None
        try:
            self.result = self._method(*arguments, **keywords)
        except Exception as error:
            self.failure = error
            raise
        self.succeeded = True
        return self.result

    def argument(self, name: str) -> Any:
        """What is given for the parameter NAME; None: nothing. Raises TypeError for wrong calls."""
        signature = inspect.signature(self._method)
        return signature.bind(*self._arguments, **self._keywords).arguments.get(name)

    def takes(self, name: str) -> bool:
        """Whether the method has a parameter NAME."""
        return name in inspect.signature(self._method).parameters

    @property
    def document(self) -> str | None:
        """Its first argument, where that is a text. Raises TypeError for wrong calls."""
        _, name, *_ = inspect.signature(self._method).parameters
        value = self.argument(name)
        return value if isinstance(value, str) else None

    @property
    def owner(self) -> Any:
        """The virConnect or virDomain whose method it is."""
        return self._arguments[0]

    @property
    def connection(self) -> Any:
        """The virConnect that it goes through."""
        if not hasattr(self.owner, "connect"):
            return self.owner
        return _destinations.get(self.owner) or self.owner.connect()


def wrap(owner: type, name: str, see: See) -> None:
    """Have SEE look at every call of the method NAME of the class OWNER, if it has one."""
    original = getattr(owner, name, None)
    if original is None:
        return

    @functools.wraps(original)
    def method(*arguments: Any, **keywords: Any) -> Any:
        call = Call(original, arguments, keywords)
        how = _look(call, see)
        # Not by CALL, which would keep the error that it raises, and so all that this has seen.
        return _carry_out(call, how) if how else original(*arguments, **keywords)

    setattr(owner, name, method)


def came_to(domain: Any, connection: Any) -> None:
    """Remember that a migrated DOMAIN is at CONNECTION now."""
    _destinations[domain] = connection


def _look(call: Call, see: See) -> Callable[[Call], Any] | None:
    if getattr(_thread, "inside", False):
        return None  # one of our own
    try:
        with _inside():
            return see(call) if call.connection in served else None
    except Exception:  # whatever it is, the program's call comes first
        log.debug("a call is passed on unseen", exc_info=True)
        return None


def _carry_out(call: Call, how: Callable[[Call], Any]) -> Any:
    with _inside():
        try:
            return how(call)
        except Exception as error:
            failure = _as_seen(call, error)
            _forget_frames(error)
    if failure is None:
        return call.result
    try:
        raise failure
    finally:
        call.failure = None
        del failure


def _as_seen(call: Call, error: Exception) -> Exception | None:
    """What the program sees of ERROR; None: nothing, since its call has succeeded before that."""
    if call.succeeded:
        log.warning("%s", error)
        return None
    if call.failure and (error is call.failure or isinstance(error, LibvirtError)):
        return call.failure
    seen: Exception = failures.as_libvirt(error)
    seen.__cause__ = error
    return seen


def _forget_frames(error: BaseException | None) -> None:
    """Let go what ERROR keeps by its traceback: a connection ends with its last reference."""
    done = set()
    while error and id(error) not in done:
        done.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


@contextlib.contextmanager
def _inside() -> Iterator[None]:
    _thread.inside = True
    try:
        yield
    finally:
        _thread.inside = False
