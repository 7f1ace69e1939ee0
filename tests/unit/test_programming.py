# SPDX-License-Identifier: LGPL-2.1-or-later
"""How a type gets on and off a VF: every write that is made, against a driver with rules.

The kernel's side is what can't be had here: the two functions that touch an attribute go to a
driver of this file. It notes each write, and refuses what the real one refuses: a type over a type,
even the same, and 0 over 0.
"""

from __future__ import annotations

import errno
import os
import time
from typing import TYPE_CHECKING

import pytest

from vgpu_libvirt import fs
from vgpu_libvirt.address import PciAddress
from vgpu_libvirt.devices import vendor_vfio
from vgpu_libvirt.devices.model import Profile
from vgpu_libvirt.errors import DeviceError, InUseError, RewrittenError, VgpuError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

pytestmark = pytest.mark.promise(1, 3)

VF = PciAddress.parse("0000:3d:00.4")
PATH = "/sys/bus/pci/devices/0000:3d:00.4/nvidia/current_vgpu_type"
PROFILE = Profile(1152, "NVIDIA L40S-8Q")
OTHER = 1147


class Driver:
    """A VF's `current_vgpu_type`."""

    def __init__(self) -> None:
        self.type = 0
        self.log: list[str] = []  # guard, and each write as it arrives
        self.times: list[float] = []  # of the writes
        self.answers: list[int | None] = []  # errno of the next writes; None: by the rules
        self.silent = False  # accepts a type and keeps 0, as for a type that it can't make
        self.before_write: Callable[[], None] = lambda: None
        self.after_write: Callable[[], None] = lambda: None
        self.unreadable: int | None = None

    def read_text(self, path: str) -> str:
        assert path == PATH
        if self.unreadable:
            raise OSError(self.unreadable, os.strerror(self.unreadable), path)
        return f"{self.type}\n"

    def write_attribute(self, path: str, text: str) -> None:
        assert path == PATH
        self.before_write()
        self.log.append(text)
        self.times.append(time.monotonic())
        assert text.isdigit(), "the bare id, without a newline"
        wanted = int(text)
        assert not (wanted and self.type), "a type was written over a type"
        assert wanted or self.type, "0 was written over 0"
        try:
            refusal = self.answers.pop(0) if self.answers else None
            if refusal is not None:
                raise OSError(refusal, os.strerror(refusal), path)
            self.type = 0 if self.silent else wanted
        finally:
            self.after_write()

    def guard(self) -> None:
        self.log.append("guard")

    def becomes(self, value: int) -> Callable[[], None]:
        """Somebody else changes the type, once."""

        def change() -> None:
            self.type = value
            self.before_write = self.after_write = lambda: None

        return change


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    monkeypatch.setattr(fs, "read_text", driver.read_text)
    monkeypatch.setattr(fs, "write_attribute", driver.write_attribute)
    return driver


def program(driver: Driver, guard: Callable[[], None] | None = None) -> None:
    vendor_vfio.program("/sys", VF, PROFILE, guard or driver.guard)


def clear(
    driver: Driver,
    seconds: float = 0.3,
    guard: Callable[[], None] | None = None,
    may_be_in_use: bool = False,
) -> None:
    deadline = time.monotonic() + seconds
    vendor_vfio.clear("/sys", VF, PROFILE.id, guard or driver.guard, deadline, may_be_in_use)


def refuses(answer: BaseException | None) -> Callable[[], None]:
    def guard() -> None:
        if answer:
            raise answer

    return guard


def in_turn(guards: Iterable[Callable[[], None]]) -> Callable[[], None]:
    """A guard that answers otherwise each time."""
    turns = iter(guards)
    return lambda: next(turns)()


# --- a type on a VF that has none ---


def test_one_guard_then_one_write(driver: Driver) -> None:
    program(driver)
    assert driver.log == ["guard", "1152"]
    assert driver.type == 1152


@pytest.mark.parametrize("current", [1152, OTHER])
def test_a_type_is_never_written_over_a_type(driver: Driver, current: int) -> None:
    driver.type = current
    with pytest.raises(DeviceError, match=f"^{VF} has type {current} already$"):
        program(driver)
    assert "1152" not in driver.log


@pytest.mark.parametrize("current", [1152, OTHER])
def test_nor_over_one_that_came_while_the_guard_looked(driver: Driver, current: int) -> None:
    with pytest.raises(DeviceError, match=f"^{VF} has type {current} already$"):
        program(driver, driver.becomes(current))
    assert driver.log == []
    assert driver.type == current


def test_a_guard_that_raises_stops_the_write(driver: Driver) -> None:
    with pytest.raises(InUseError, match=r"^open$"):
        program(driver, refuses(InUseError("open")))
    assert driver.log == []


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (errno.EPERM, "operation not permitted"),
        (errno.EIO, "input/output error"),
        (errno.EBUSY, "device or resource busy"),
        (errno.EINVAL, "invalid argument"),
        (errno.ENODEV, "no such device"),
        (errno.ENOSPC, "no space left on device"),
    ],
)
def test_a_refusal_is_told_and_not_tried_again(driver: Driver, error: int, reason: str) -> None:
    driver.answers = [error]
    with pytest.raises(DeviceError) as caught:
        program(driver)
    assert str(caught.value) == f"the driver did not put NVIDIA L40S-8Q on {VF}: {reason}"
    assert driver.log == ["guard", "1152"]


def test_a_write_that_succeeds_and_reads_0_has_failed(driver: Driver) -> None:
    driver.silent = True
    with pytest.raises(DeviceError) as caught:
        program(driver)
    assert str(caught.value).endswith(": the write succeeded, but it reads 0")
    assert driver.log == ["guard", "1152"]


def test_a_write_after_which_another_type_reads_has_failed(driver: Driver) -> None:
    driver.after_write = driver.becomes(OTHER)
    with pytest.raises(DeviceError, match=f"it reads {OTHER}$"):
        program(driver)
    assert driver.log == ["guard", "1152"]


def test_an_errno_after_which_the_type_reads_right_is_no_failure(driver: Driver) -> None:
    driver.answers = [errno.EIO]
    driver.after_write = driver.becomes(1152)
    program(driver)


def test_a_vf_that_cannot_be_read_is_not_written(driver: Driver) -> None:
    driver.unreadable = errno.EIO
    with pytest.raises(DeviceError, match="can't be read: input/output error"):
        program(driver)
    with pytest.raises(DeviceError, match="can't be read: input/output error"):
        clear(driver)
    assert not {"1152", "0"} & set(driver.log)


# --- the type off again ---


def test_clearing_is_one_guard_and_one_write(driver: Driver) -> None:
    driver.type = 1152
    clear(driver)
    assert driver.log == ["guard", "0"]
    assert driver.type == 0


def test_nothing_is_done_where_there_is_no_type(driver: Driver) -> None:
    clear(driver)
    assert driver.log == []


def test_0_is_not_written_over_a_0_that_came_while_the_guard_looked(driver: Driver) -> None:
    driver.type = 1152
    clear(driver, guard=driver.becomes(0))
    assert driver.log == []


@pytest.mark.parametrize("when", ["before", "in the guard", "after a refusal"])
def test_another_type_is_somebody_elses_and_stays(driver: Driver, when: str) -> None:
    driver.type = OTHER if when == "before" else 1152
    guard = driver.becomes(OTHER) if when == "in the guard" else driver.guard
    if when == "after a refusal":
        driver.answers = [errno.EBUSY]
        driver.after_write = driver.becomes(OTHER)
    with pytest.raises(RewrittenError) as caught:
        clear(driver, guard=guard)
    assert str(caught.value) == (
        f"{VF} has type {OTHER}, not the 1152 that we wrote; somebody else changed it"
    )
    assert driver.type == OTHER
    assert driver.log == (["guard", "0"] if when == "after a refusal" else [])


@pytest.mark.parametrize("error", [errno.EPERM, errno.EIO, errno.EBUSY, errno.EINVAL])
@pytest.mark.parametrize("times", [1, 2])
def test_a_busy_driver_is_asked_again_with_a_guard_before_each_write(
    driver: Driver, error: int, times: int
) -> None:
    driver.type = 1152
    driver.answers = [error] * times
    clear(driver, seconds=5)
    assert driver.log == ["guard", "0"] * (times + 1)


def test_the_pauses_grow(driver: Driver) -> None:
    driver.type = 1152
    driver.answers = [errno.EBUSY] * 3
    clear(driver, seconds=5)
    first, second, third = (b - a for a, b in zip(driver.times, driver.times[1:], strict=False))
    assert 0.05 <= first < second < third


def test_a_refusal_that_did_it_all_the_same_is_enough(driver: Driver) -> None:
    driver.type = 1152
    driver.answers = [errno.EIO]
    driver.after_write = driver.becomes(0)
    clear(driver, seconds=5)
    assert driver.log == ["guard", "0"]


def test_somebody_else_may_clear_it_in_a_pause(driver: Driver) -> None:
    driver.type = 1152
    driver.answers = [errno.EBUSY]

    def guard() -> None:
        driver.guard()
        if len(driver.times) == 1:
            driver.type = 0

    clear(driver, seconds=5, guard=guard)
    assert driver.log == ["guard", "0", "guard"]


def test_no_attempt_is_begun_after_the_deadline(driver: Driver) -> None:
    driver.type = 1152
    driver.answers = [errno.EBUSY] * 1000
    end = time.monotonic() + 0.4
    with pytest.raises(DeviceError) as caught:
        clear(driver, seconds=0.4)
    assert str(caught.value) == f"the driver did not clear {VF}: device or resource busy"
    assert 2 <= len(driver.times) <= 5
    assert max(driver.times) < end + 0.1, "but for how late a sleep may return"
    assert time.monotonic() < end + 0.2
    assert driver.type == 1152


def test_past_the_deadline_there_is_still_one_attempt(driver: Driver) -> None:
    driver.type = 1152
    driver.answers = [errno.EBUSY] * 2
    with pytest.raises(DeviceError, match="busy"):
        clear(driver, seconds=-1)
    assert driver.log == ["guard", "0"]
    driver.answers = []
    clear(driver, seconds=-1)
    assert driver.type == 0


def test_a_write_that_blocks_is_waited_for_and_then_nothing_new_begun(driver: Driver) -> None:
    driver.type = 1152
    driver.answers = [errno.EBUSY] * 2
    driver.before_write = lambda: time.sleep(0.3)
    with pytest.raises(DeviceError, match="busy"):
        clear(driver, seconds=0.2)
    assert driver.log == ["guard", "0"]


def test_a_write_that_changes_nothing_is_a_failure_to_clear(driver: Driver) -> None:
    driver.type = 1152
    driver.after_write = lambda: setattr(driver, "type", 1152)
    with pytest.raises(DeviceError, match=f"did not clear {VF}: the write changed nothing$"):
        clear(driver, seconds=0.1)
    assert driver.type == 1152
    assert driver.log == ["guard", "0"] * (len(driver.log) // 2)


# --- whoever holds the device open ---


@pytest.mark.parametrize("error", [InUseError("open"), RewrittenError("x"), VgpuError("x")])
def test_what_the_guard_raises_stops_clearing(driver: Driver, error: VgpuError) -> None:
    driver.type = 1152
    with pytest.raises(type(error)):
        clear(driver, seconds=5, guard=in_turn([refuses(error)]))
    assert driver.log == []


def test_a_dying_qemu_is_waited_for(driver: Driver) -> None:
    driver.type = 1152
    open_ = refuses(InUseError("open"))
    clear(
        driver,
        seconds=5,
        guard=in_turn([open_, open_, driver.guard]),
        may_be_in_use=True,
    )
    assert driver.log == ["guard", "0"]


def test_one_that_does_not_die_is_never_written_under(driver: Driver) -> None:
    driver.type = 1152
    with pytest.raises(InUseError, match=r"^open$"):
        clear(driver, guard=refuses(InUseError("open")), may_be_in_use=True)
    assert driver.log == []
    assert driver.type == 1152


def test_the_last_failure_is_the_one_that_is_told(driver: Driver) -> None:
    driver.type = 1152
    driver.answers = [errno.EBUSY] * 100
    guards = in_turn([driver.guard, *[refuses(InUseError("open again"))] * 100])
    with pytest.raises(InUseError, match=r"^open again$"):
        clear(driver, guard=guards, may_be_in_use=True)
    assert driver.log == ["guard", "0"]
