# SPDX-License-Identifier: LGPL-2.1-or-later
"""How a mediated device is made, given parameters and removed: every write that is made."""

from __future__ import annotations

import errno
import subprocess
import sys
import uuid
from typing import TYPE_CHECKING

import pytest

from tests.unit.host import REPOSITORY
from tests.unit.mdev_host import A2, MTTY, Driver, MdevHost
from vgpu_libvirt import fs
from vgpu_libvirt.devices import mdev, mdev_life
from vgpu_libvirt.devices.mdev_life import create, mdev_uuid, remove, set_params
from vgpu_libvirt.devices.mdev_model import Mdev
from vgpu_libvirt.errors import DeviceError, InUseError, RewrittenError, VgpuError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.promise(1, 3)

WEB1 = "aaaaaaaa-0000-0000-0000-000000000001"
UUID = mdev_uuid(WEB1, "ua-vgpu0")
GPU, VF, OTHER_VF = "0000:08:00.0", "0000:08:01.7", "0000:08:01.6"
OTHER_GPU, OTHER_GPUS_VF = "0000:09:00.0", "0000:09:00.4"
TYPE, OTHER_TYPE, FULL_TYPE = "nvidia-746", "nvidia-751", "nvidia-747"


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Driver:
    host = MdevHost(tmp_path)
    types = [each for each in A2 if each.id in (TYPE, OTHER_TYPE, FULL_TYPE)]
    for vf in (VF, OTHER_VF):
        host.parent(vf, types, gpu="0000:08:00.0")
    host.parent(OTHER_GPUS_VF, types, gpu=OTHER_GPU)
    host.parent("mtty", MTTY)
    driver = Driver(host)
    monkeypatch.setattr(mdev_life, "time", driver.clock)
    monkeypatch.setattr(fs, "write_attribute", driver.write_attribute)
    return driver


def there(driver: Driver) -> Mdev | None:
    return mdev.read_mdev(driver.host.path, UUID)


def make(
    driver: Driver,
    type_id: str = TYPE,
    parent: str = VF,
    guard: Callable[[], None] | None = None,
) -> None:
    create(driver.host.path, parent, type_id, UUID, guard or driver.guard)


def take_away(
    driver: Driver,
    seconds: float = 0.3,
    guard: Callable[[], None] | None = None,
    **more: object,
) -> None:
    deadline = driver.clock.now + seconds
    remove(driver.host.path, UUID, TYPE, GPU, guard or driver.guard, deadline, **more)  # type: ignore[arg-type]


@pytest.fixture
def made(driver: Driver) -> Driver:
    """A driver that has made UUID, and forgotten how."""
    make(driver)
    driver.log.clear()
    return driver


def refuses(answer: VgpuError) -> Callable[[], None]:
    def guard() -> None:
        raise answer

    return guard


def replaced(driver: Driver, type_id: str, parent: str) -> Callable[[], None]:
    """Somebody else puts another mdev in its place, once."""

    def change() -> None:
        if (driver.host.mdevs / UUID).is_symlink():
            driver.host.end_mdev(UUID)
        driver.host.mdev(UUID, parent, type_id)
        driver.before_write = driver.after_write = lambda: None

    return change


# --- its UUID ---


@pytest.mark.parametrize(
    "alias", ["ua-vgpu0", "ua-vgpu1", "ua-\N{LATIN SMALL LETTER E WITH ACUTE}"]
)
@pytest.mark.parametrize(
    "domain", [WEB1, WEB1.upper(), "83b8f4f2-509f-382f-3c1e-e6bfe0fa1001", str(uuid.NAMESPACE_DNS)]
)
def test_the_uuid_is_that_of_rfc_4122(domain: str, alias: str) -> None:
    assert mdev_uuid(domain, alias) == str(uuid.uuid5(uuid.UUID(domain), alias))


def test_each_hostdev_of_each_domain_has_its_own() -> None:
    assert mdev_uuid(WEB1, "ua-vgpu0") == "f8e77e62-9453-5443-85a3-711d29503e23"
    other = WEB1[:-1] + "2"
    assert len({mdev_uuid(d, a) for d in (WEB1, other) for a in ("ua-vgpu0", "ua-vgpu1")}) == 4


@pytest.mark.parametrize("text", ["", "web1", WEB1[:-2], WEB1 + "00"])
def test_what_is_no_uuid_has_none(text: str) -> None:
    with pytest.raises(ValueError, match=r"UUID|hexadecimal"):
        mdev_uuid(text, "ua-vgpu0")


def test_a_hook_that_needs_no_uuid_imports_no_hashes() -> None:
    program = (
        f"import sys; sys.path.insert(0, {str(REPOSITORY)!r}); sys.dont_write_bytecode = True\n"
        "import vgpu_libvirt.devices.vendor_vfio\nbefore = set(sys.modules)\n"
        "import vgpu_libvirt.devices.mdev_life\nprint(*set(sys.modules) - before)"
    )
    done = subprocess.run(
        [sys.executable, "-ISc", program], check=True, capture_output=True, text=True
    )
    loaded = set(done.stdout.split())
    assert "vgpu_libvirt.devices.mdev_life" in loaded
    assert loaded & {"_hashlib", "_sha1", "hashlib", "uuid"} == set()


# --- making one ---


@pytest.mark.parametrize(("parent", "type_id"), [(VF, TYPE), ("mtty", "mtty-2")])
def test_one_guard_then_one_write_of_the_bare_uuid(
    driver: Driver, parent: str, type_id: str
) -> None:
    make(driver, type_id, parent)
    assert driver.log == ["guard", f"create <- {UUID}"]
    assert there(driver) == Mdev(UUID, parent, type_id)


def test_a_guard_that_raises_stops_the_write(driver: Driver) -> None:
    with pytest.raises(InUseError, match=r"^open$"):
        make(driver, guard=refuses(InUseError("open")))
    assert driver.log == []


def test_nothing_is_made_over_one_that_is_there(made: Driver) -> None:
    with pytest.raises(DeviceError, match=f"^mdev {UUID} is there already$"):
        make(made)
    assert made.log == ["guard"]


def test_nor_over_one_that_came_while_the_guard_looked(driver: Driver) -> None:
    with pytest.raises(DeviceError, match=f"^mdev {UUID} is there already$"):
        make(driver, guard=replaced(driver, TYPE, VF))
    assert driver.log == []


def test_nor_over_one_that_is_leaving(made: Driver) -> None:
    made.host.leave((made.host.mdevs / UUID).resolve())
    with pytest.raises(DeviceError, match=f"^mdev {UUID} is there already: its removal has begun"):
        make(made, parent=OTHER_VF)
    assert made.log == ["guard"]


@pytest.mark.parametrize(("type_id", "parent"), [(OTHER_TYPE, VF), (TYPE, OTHER_VF)])
def test_another_of_its_uuid_is_somebody_elses(driver: Driver, type_id: str, parent: str) -> None:
    driver.host.mdev(UUID, parent, type_id)
    with pytest.raises(RewrittenError) as caught:
        make(driver)
    assert str(caught.value) == (
        f"mdev {UUID} is {type_id} on {parent}, not {TYPE} on {VF}; somebody else made it"
    )
    assert driver.log == ["guard"]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (errno.EIO, "input/output error"),
        (errno.EPERM, "operation not permitted"),
        (errno.ENOSPC, "no space left on device"),
        (errno.EUSERS, "too many users"),
        (errno.EINVAL, "invalid argument"),
    ],
)
def test_a_refusal_is_told_and_not_tried_again(driver: Driver, error: int, reason: str) -> None:
    driver.answers = [error]
    with pytest.raises(DeviceError) as caught:
        make(driver)
    assert str(caught.value) == (f"the driver did not make mdev {UUID} as {TYPE} on {VF}: {reason}")
    assert driver.log == ["guard", f"create <- {UUID}"]


def test_a_refusal_for_want_of_room_says_so(driver: Driver) -> None:
    with pytest.raises(DeviceError) as caught:
        make(driver, FULL_TYPE)
    assert str(caught.value) == (
        f"the driver did not make mdev {UUID} as {FULL_TYPE} on {VF}: input/output error; "
        "no more of this type fit there now"
    )


@pytest.mark.parametrize(
    ("type_id", "parent"), [("nvidia-9", VF), (TYPE, "0000:08:09.0"), ("", "")]
)
def test_a_type_or_a_parent_that_is_not_there(driver: Driver, type_id: str, parent: str) -> None:
    with pytest.raises(DeviceError, match=r"did not make .*: no such file or directory$"):
        make(driver, type_id, parent)


def test_a_write_that_succeeds_and_makes_nothing_has_failed(driver: Driver) -> None:
    driver.silent = True
    with pytest.raises(DeviceError, match="the write succeeded, but there is none"):
        make(driver)


@pytest.mark.parametrize(("type_id", "parent"), [(OTHER_TYPE, VF), (TYPE, OTHER_VF)])
def test_a_write_after_which_it_is_another_has_failed(
    driver: Driver, type_id: str, parent: str
) -> None:
    driver.after_write = replaced(driver, type_id, parent)
    with pytest.raises(RewrittenError, match=f"^mdev {UUID} is {type_id} on "):
        make(driver)


def test_an_errno_after_which_it_is_there_is_no_failure(driver: Driver) -> None:
    driver.answers = [errno.EIO]
    driver.after_write = replaced(driver, TYPE, VF)
    make(driver)


def test_one_that_cannot_be_read_back_has_failed(driver: Driver) -> None:
    def spoil() -> None:
        link = driver.host.mdevs / UUID / "mdev_type"
        link.unlink()
        link.write_text("")

    driver.after_write = spoil
    with pytest.raises(DeviceError, match=f"^mdev {UUID} can't be read back"):
        make(driver)


@pytest.mark.parametrize("name", ["", "web1", "../x", UUID.upper(), f"{UUID}\n", f"{UUID}/remove"])
def test_only_a_uuid_names_an_mdev(driver: Driver, name: str) -> None:
    path, end = driver.host.path, driver.clock.now
    for work in (
        lambda: create(path, VF, TYPE, name, driver.guard),
        lambda: set_params(path, name, "x=1", driver.guard),
        lambda: remove(path, name, TYPE, GPU, driver.guard, end),
    ):
        with pytest.raises(
            DeviceError, match=r"is no mdev's UUID, which is written in lower case$"
        ):
            work()
    assert driver.log == []


# --- its parameters ---


@pytest.fixture
def params(made: Driver) -> Path:
    path = made.host.mdevs / UUID / "nvidia/vgpu_params"
    path.parent.mkdir()
    path.write_text("\n")
    return path


def give(driver: Driver, text: str, guard: Callable[[], None] | None = None) -> None:
    set_params(driver.host.path, UUID, text, guard or driver.guard)


def test_parameters_are_written_with_the_newline_that_the_driver_takes(
    made: Driver, params: Path
) -> None:
    give(made, "frame_rate_limiter=0, disable_vnc=1")
    assert made.log == ["guard", "vgpu_params <- frame_rate_limiter=0, disable_vnc=1\n"]
    assert params.read_text() == "frame_rate_limiter=0, disable_vnc=1\n"


def test_parameters_that_read_otherwise_were_not_taken(made: Driver, params: Path) -> None:
    made.silent = True
    with pytest.raises(DeviceError) as caught:
        give(made, "x=1")
    assert str(caught.value) == (
        f"the driver did not take 'x=1' as {made.host.mdevs}/{UUID}/nvidia/vgpu_params: "
        "the write succeeded, but it reads ''"
    )


def test_parameters_that_cannot_be_read_back_count_as_taken(made: Driver, params: Path) -> None:
    def hide() -> None:
        params.unlink()
        params.mkdir()

    made.after_write = hide
    give(made, "x=1")


def test_a_refusal_of_parameters_is_told(made: Driver, params: Path) -> None:
    made.answers = [errno.EPERM]
    with pytest.raises(DeviceError, match=r"did not take 'x=1' as .*: operation not permitted$"):
        give(made, "x=1")


def test_an_mdev_without_parameters_refuses_them(made: Driver) -> None:
    with pytest.raises(DeviceError, match=r"no such file or directory$"):
        give(made, "x=1")


def test_a_guard_stops_parameters(made: Driver, params: Path) -> None:
    with pytest.raises(InUseError):
        give(made, "x=1", guard=refuses(InUseError("open")))
    assert made.log == []


@pytest.mark.parametrize("text", ["", " ", "a\nb", "a\0b", "x" * 4095, "\N{EURO SIGN}" * 1365])
def test_parameters_are_one_line_that_fits_a_page(made: Driver, params: Path, text: str) -> None:
    with pytest.raises(DeviceError, match=f"can't be given to mdev {UUID}: they must be one line"):
        give(made, text)
    assert made.log == []


# --- removing one ---


def test_removing_is_one_guard_and_one_write(made: Driver) -> None:
    take_away(made)
    assert made.log == ["guard", "remove <- 1"]
    assert there(made) is None


def test_nothing_is_done_where_there_is_none(driver: Driver) -> None:
    take_away(driver)
    assert driver.log == []


def test_nothing_is_written_where_it_went_while_the_guard_looked(made: Driver) -> None:
    take_away(made, guard=lambda: made.host.end_mdev(UUID))
    assert made.log == []


@pytest.mark.parametrize(
    ("type_id", "parent", "gpu"), [(OTHER_TYPE, VF, GPU), (TYPE, OTHER_GPUS_VF, OTHER_GPU)]
)
@pytest.mark.parametrize("when", ["before", "in the guard", "after a refusal"])
def test_another_is_somebody_elses_and_stays(
    made: Driver, type_id: str, parent: str, gpu: str, when: str
) -> None:
    change = replaced(made, type_id, parent)
    guard = change if when == "in the guard" else made.guard
    if when == "before":
        change()
    if when == "after a refusal":
        made.answers = [errno.EBUSY]
        made.after_write = change
    with pytest.raises(RewrittenError) as caught:
        take_away(made, seconds=5, guard=guard)
    assert str(caught.value) == (
        f"mdev {UUID} is {type_id} on {parent} of GPU {gpu}, not {TYPE} of GPU {GPU}; somebody "
        "else made it"
    )
    assert made.log == (["guard", "remove <- 1"] if when == "after a refusal" else [])
    assert there(made) == Mdev(UUID, parent, type_id)


@pytest.mark.parametrize("error", [errno.EBUSY, errno.EAGAIN, errno.EPERM, errno.EIO])
@pytest.mark.parametrize("times", [1, 2])
def test_a_busy_driver_is_asked_again_with_a_guard_before_each_write(
    made: Driver, error: int, times: int
) -> None:
    made.answers = [error] * times
    take_away(made, seconds=5)
    assert made.log == ["guard", "remove <- 1"] * (times + 1)


def test_the_pauses_grow(made: Driver) -> None:
    made.answers = [errno.EBUSY] * 6
    take_away(made, seconds=5)
    assert made.clock.pauses == [0.05, 0.1, 0.2, 0.4, 0.5, 0.5]


def test_no_attempt_is_begun_after_the_deadline(made: Driver) -> None:
    made.answers = [errno.EBUSY] * 1000
    with pytest.raises(DeviceError) as caught:
        take_away(made, seconds=0.4)
    assert str(caught.value) == f"the driver did not remove mdev {UUID}: device or resource busy"
    assert made.clock.pauses == [0.05, 0.1, 0.2]
    assert made.log == ["guard", "remove <- 1"] * 4
    assert there(made) == Mdev(UUID, VF, TYPE)


def test_a_write_that_blocks_is_waited_for_and_then_nothing_new_begun(made: Driver) -> None:
    made.answers = [errno.EBUSY] * 2
    made.before_write = lambda: made.clock.sleep(3)
    with pytest.raises(DeviceError, match="busy"):
        take_away(made, seconds=2)
    assert made.log == ["guard", "remove <- 1"]


def test_past_the_deadline_there_is_still_one_attempt(made: Driver) -> None:
    take_away(made, seconds=-1)
    assert there(made) is None


def test_a_write_that_changes_nothing_is_a_failure(made: Driver) -> None:
    made.silent = True
    with pytest.raises(DeviceError, match=f"not remove mdev {UUID}: the write changed nothing$"):
        take_away(made, seconds=0.1)


def test_a_refusal_that_did_it_all_the_same_is_enough(made: Driver) -> None:
    made.answers = [errno.EIO]
    made.after_write = lambda: made.host.end_mdev(UUID)
    take_away(made, seconds=5)
    assert made.log == ["guard", "remove <- 1"]


def test_a_driver_that_removes_it_itself_is_left_to_do_it(made: Driver) -> None:
    """Some do it when QEMU has closed it, and break where somebody was faster."""
    begin = made.clock.now
    made.clock.at[begin + 1] = lambda: made.host.end_mdev(UUID)
    take_away(made, seconds=5, not_before=begin + 3)
    assert made.log == []
    assert made.clock.now < begin + 1.6


def test_but_not_for_longer_than_was_said(made: Driver) -> None:
    begin = made.clock.now
    take_away(made, seconds=5, not_before=begin + 3)
    assert made.log == ["guard", "remove <- 1"]
    assert begin + 3 <= made.clock.now < begin + 3.6


def test_one_whose_removal_waits_for_its_user_is_waited_for_and_not_written(made: Driver) -> None:
    made.host.leave((made.host.mdevs / UUID).resolve())
    with pytest.raises(DeviceError) as caught:
        take_away(made)
    assert str(caught.value) == (
        f"mdev {UUID} is not removed: its removal has begun, and waits until {UUID} is closed"
    )
    assert made.log == []


def test_a_removal_that_takes_it_off_the_bus_has_not_removed_it(made: Driver) -> None:
    made.silent = True
    made.after_write = lambda: made.host.leave((made.host.mdevs / UUID).resolve())
    with pytest.raises(DeviceError, match="its removal has begun"):
        take_away(made)
    assert made.log == ["guard", "remove <- 1"]


def test_one_that_cannot_be_read_is_not_removed(made: Driver) -> None:
    link = made.host.mdevs / UUID / "mdev_type"
    link.unlink()
    link.write_text("")
    with pytest.raises(DeviceError, match=f"^mdev {UUID} is not removed: {made.host.mdevs}"):
        take_away(made)
    assert made.log == []


# --- whoever holds it open ---


@pytest.mark.parametrize("error", [InUseError("open"), RewrittenError("x"), VgpuError("x")])
def test_what_the_guard_raises_stops_removing(made: Driver, error: VgpuError) -> None:
    with pytest.raises(type(error)):
        take_away(made, seconds=5, guard=refuses(error))
    assert made.log == []
    assert there(made) == Mdev(UUID, VF, TYPE)


def test_a_dying_qemu_is_waited_for(made: Driver) -> None:
    guards = iter([refuses(InUseError("open")), refuses(InUseError("open")), made.guard])
    take_away(made, seconds=5, guard=lambda: next(guards)(), may_be_in_use=True)
    assert made.log == ["guard", "remove <- 1"]


def test_but_not_for_ever(made: Driver) -> None:
    with pytest.raises(InUseError, match=r"^open$"):
        take_away(made, seconds=0.4, guard=refuses(InUseError("open")), may_be_in_use=True)
    assert made.clock.pauses == [0.05, 0.1, 0.2]
    assert made.log == []


def test_any_other_refusal_of_the_guard_ends_it_at_once(made: Driver) -> None:
    with pytest.raises(VgpuError, match=r"^x$"):
        take_away(made, seconds=30, guard=refuses(VgpuError("x")), may_be_in_use=True)
    assert made.clock.pauses == []
