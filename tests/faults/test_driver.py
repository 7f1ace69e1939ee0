# SPDX-License-Identifier: LGPL-2.1-or-later
"""Drivers with other habits: whatever they list, refuse, delay or ignore, the promises hold."""

from __future__ import annotations

import errno
import itertools
import os
from typing import TYPE_CHECKING

import pytest

from tests.faults.world import Guest, check_nothing_leaked, check_promises, web1, web2

if TYPE_CHECKING:
    from tests.faults.world import World

HABITS = [
    dict(zip(("errnos", "own_list", "header"), habits, strict=True))
    for habits in itertools.product(
        ("vendor", "rfc"), ("empty", "kept"), ("always", "never", "while-unused")
    )
]


def refusal(world: World, vf: str, value: str) -> str | None:
    """The errno with which the driver refuses a write; None: it takes it."""
    file = os.open(world.pci(vf) / "nvidia/current_vgpu_type", os.O_WRONLY | os.O_TRUNC)
    try:
        os.write(file, value.encode())
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    finally:
        os.close(file)
    return None


@pytest.mark.parametrize(
    ("errnos", "answers"),
    [
        ("vendor", ["EINVAL", "EIO", "EPERM", None, "EPERM", "EIO", "EPERM", None]),
        ("rfc", ["EINVAL", "ENODEV", None, None, None, "EINVAL", "EBUSY", None]),
    ],
)
def test_the_simulated_drivers_rules(world: World, errnos: str, answers: list[str | None]) -> None:
    first, second, *_ = world.gpu()
    world.set_driver(errnos=errnos)
    given = [
        refusal(world, first, "junk"),
        refusal(world, first, "99999"),
        refusal(world, first, "0"),
        refusal(world, first, "1152"),
        refusal(world, first, "1152"),
        refusal(world, second, "1148"),
    ]
    world.call("use", vfs=[first], is_open=True, live=True)
    given.append(refusal(world, first, "0"))
    world.call("use", vfs=[first], is_open=False, live=False)
    given.append(refusal(world, first, "0"))
    assert given == answers
    log = world.log
    assert [write.result for write in log] == [answer or "ok" for answer in answers]
    assert [write.open for write in log] == [False] * 6 + [True, False]
    assert {write.pid for write in log} == {os.getpid()}


def test_the_simulated_drivers_lists_shrink(world: World) -> None:
    first, second, *_ = world.gpu()
    path = world.pci(second) / "nvidia/creatable_vgpu_types"
    assert path.read_text().count("\n") == 24
    refusal(world, first, "1156")
    assert path.read_text() == "ID    : vGPU Name\n"
    world.set_driver(header="while-unused")
    assert path.read_text() == ""


@pytest.mark.parametrize("habits", HABITS, ids=["-".join(habits.values()) for habits in HABITS])
def test_lives_under_a_driver_with_other_habits(world: World, habits: dict[str, str]) -> None:
    world.set_driver(**habits)
    first, second, third, _ = world.gpu()
    one, two = web1(first, second), web2(third)
    for _ in range(2):
        assert world.start(one).status == 0
        assert world.start(two).status == 0
        check_promises(world)
        world.stop(one)
        world.stop(two)
    check_nothing_leaked(world)


def test_more_than_fits_is_refused_with_what_runs(world: World) -> None:
    vfs = world.gpu(vfs=8)
    for number, vf in enumerate(vfs[:6]):
        guest = Guest(f"vm{number}", f"{number:08}-0000-0000-0000-000000000000", number + 1, (vf,))
        assert world.start(guest).status == 0
    refused = world.start(web1(vfs[6]))
    assert refused.status == 1
    assert "NVIDIA L40S-8Q" in refused.stderr
    assert len(world.types) == 6
    check_promises(world)
    world.everything_ends()
    check_nothing_leaked(world)


@pytest.mark.parametrize("result", ["EIO", "ENOSPC", "EBUSY", "ENODEV", "ENOMEM", "ignored"])
def test_a_type_that_the_driver_does_not_set(world: World, result: str) -> None:
    vf = world.gpu()[0]
    world.call("fail", vf=vf, result=result)
    refused = world.start(web1(vf))
    assert refused.status == 1
    assert f"the driver did not put NVIDIA L40S-8Q on {vf}" in refused.stderr
    check_nothing_leaked(world)
    assert world.start(web1(vf)).status == 0


@pytest.mark.parametrize("result", ["EIO", "EPERM", "EBUSY", "ignored"])
@pytest.mark.parametrize("times", [1, 1000])
def test_a_type_that_the_driver_does_not_clear(world: World, result: str, times: int) -> None:
    vf = world.gpu()[0]
    guest = web1(vf)
    assert world.start(guest).status == 0
    world.call("fail", vf=vf, result=result, times=times, value=0)
    world.stop(guest)
    check_promises(world)
    if times == 1 or result == "ignored":  # this driver drops the type all the same
        check_nothing_leaked(world)
    else:
        claim = world.claim(vf)
        assert claim is not None
        assert claim.error is not None
        assert world.types == {vf: 1152}
        assert world.start(guest).status == 1


@pytest.mark.parametrize("attribute", ["current", "creatable"])
def test_an_attribute_that_cannot_be_read(world: World, attribute: str) -> None:
    vf, other, *_ = world.gpu()
    world.call("hide", vf=vf, attribute=attribute, hidden=True)
    refused = world.start(web1(vf))
    assert refused.status == 1
    assert f"{attribute}_vgpu_type" in refused.stderr
    assert world.log == []
    assert world.start(web2(other)).status == 0
    world.call("hide", vf=vf, attribute=attribute, hidden=False)
    assert world.start(web1(vf)).status == 0
    world.call("hide", vf=vf, attribute=attribute, hidden=True)
    world.everything_ends()
    check_promises(world)
    world.call("hide", vf=vf, attribute=attribute, hidden=False)
    world.restart_libvirtd()
    check_nothing_leaked(world)


@pytest.mark.parametrize("busy", ["refuses", "blocks"])
def test_a_driver_that_is_busy_after_the_close(world: World, busy: str) -> None:
    world.set_driver(busy_ms=120, busy=busy)
    guest = web1(world.gpu()[0])
    for _ in range(2):
        assert world.start(guest).status == 0
        world.stop(guest)
        check_nothing_leaked(world)
