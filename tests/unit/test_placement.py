# SPDX-License-Identifier: LGPL-2.1-or-later
"""Where a vGPU goes, why it can't go anywhere, and how many more there could be.

A GPU is written as its bus, what the driver lists for its free devices, and its devices:

    .        free                           +        free, but another definition points at it
    web1=8Q  web1's, programmed             web1~8Q  web1's, claimed but not programmed yet
    8Q       programmed, claimed by nobody  !        without a type, but somebody has it open
    ?        unreadable                     x        with an unreadable claim
"""

from __future__ import annotations

import re
from typing import NamedTuple

import pytest

from vgpu_libvirt import placement
from vgpu_libvirt.address import PciAddress
from vgpu_libvirt.capacity import Host, bound, host, startable, use_of
from vgpu_libvirt.claims.model import Claim, Namespaces, Phase
from vgpu_libvirt.claims.store import Claims
from vgpu_libvirt.devices.model import Device, Gpu, Inventory, Profile
from vgpu_libvirt.domain.model import Request
from vgpu_libvirt.errors import RequestError

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 48)
ALL = " ".join(f"{size}Q" for size in SIZES)
CARD = "L40S"


def profile(name: str, card: str = CARD) -> Profile:
    """`8Q`, of a card; names that tell no size are allowed."""
    size = re.match(r"\d+", name)
    return Profile(1000 + int(size[0]) if size else 999, f"NVIDIA {card}-{name}")


def claim(device: Device, owner: str, what: Profile) -> Claim:
    return Claim(
        device.name, "vendor-vfio", str(device.gpu), what, "id", Phase.CONFIGURED,
        "aaaaaaaa-0000-0000-0000-000000000001", owner, 1, "ua-vgpu0", "boot", 0.0, 0.0, None, None,
        Namespaces(None, None),
    )  # fmt: skip


def build(*gpus: str, card: str = CARD) -> Host:
    """A host of GPUs written as `3d: ALL: . . .`."""
    made: list[Gpu] = []
    claims: dict[str, Claim] = {}
    unreadable: dict[str, str] = {}
    busy: set[str] = set()
    pointed: set[str] = set()
    for text in gpus:
        bus, lists, tokens = (part.strip() for part in text.split(":"))
        pf = PciAddress(0, int(bus, 16), 0, 0)
        listed = tuple(profile(name, card) for name in lists.replace("ALL", ALL).split())
        devices = []
        for number, token in enumerate(tokens.split(), 4):
            address = PciAddress(0, pf.bus, number // 8, number % 8)
            owner, mark, name = re.match(r"(?:(\w+)([=~]))?(\S+)$", token).groups()  # type: ignore[union-attr]
            free = mark == "~" or name in {".", "+", "!", "x"}
            device = Device(
                address,
                pf,
                None if name == "?" else 0 if free else profile(name, card).id,
                None if name == "?" else listed if free else (),
                "it can't be read" if name == "?" else None,
            )
            devices.append(device)
            if owner:
                claims[device.name] = claim(device, owner, profile(name, card))
            if name == "x":
                unreadable[device.name] = "not valid JSON"
            busy |= {device.name} if name == "!" else set()
            pointed |= {device.name} if name == "+" else set()
        made.append(Gpu(pf, "vendor-vfio", None, tuple(devices)))
    found = Claims(claims, unreadable, ())
    return host(Inventory(tuple(made)), found, frozenset(busy), frozenset(pointed))


def short(address: PciAddress) -> str:
    return f"{address.bus:x}:{address.slot:x}.{address.function}"


class Case(NamedTuple):
    says: str
    gpus: tuple[str, ...]
    devices: str  # that are found, best first
    wants: str = "8Q"
    policy: str = "spread"
    request: Request = Request("ua-vgpu0", "")


CHOICES = [
    Case("by address where nothing else speaks", ("3d: ALL: . . .",), "3d:0.4 3d:0.5 3d:0.6"),
    Case(
        "never one that is claimed, has a type, is open, or can't be read",
        ("3d: 8Q: web1=8Q web2~8Q 8Q ! ? x .",),
        "3d:1.2",
    ),
    Case("only where the driver lists it", ("3d: 4Q: . .", "5e: 8Q: . ."), "5e:0.4 5e:0.5"),
    Case("spread: the emptier GPU first", ("3d: 8Q: web1=8Q .", "5e: ALL: ."), "5e:0.4 3d:0.5"),
    Case(
        "pack: the fuller GPU first",
        ("3d: ALL: .", "5e: 8Q: web1=8Q ."),
        "5e:0.5 3d:0.4",
        policy="pack",
    ),
    Case(
        "the request's own policy goes first",
        ("3d: ALL: .", "5e: 8Q: web1=8Q ."),
        "5e:0.5 3d:0.4",
        request=Request("ua-vgpu0", "", placement="pack"),
    ),
    Case(
        "full is told by framebuffer, not by the number of vGPUs",
        ("3d: 8Q: web1=8Q web2=8Q .", "5e: 8Q 24Q: web3=24Q ."),
        "3d:0.6 5e:0.5",
    ),
    Case(
        "what is claimed counts before it is programmed",
        ("3d: ALL: web1~8Q .", "5e: ALL: ."),
        "5e:0.4 3d:0.5",
    ),
    Case(
        "a device of one's own, if there is one",
        ("3d: ALL: + .", "5e: ALL: +"),
        "3d:0.5 3d:0.4 5e:0.4",
    ),
    Case(
        "pack, but not more than will fit beside what others will start",
        ("3d: ALL: + .", "5e: ALL: . ."),
        "5e:0.4 5e:0.5 3d:0.5 3d:0.4",
        wants="48Q",
        policy="pack",
    ),
    Case(
        "spread counts what others will start",
        ("3d: ALL: + .", "5e: ALL: ."),
        "5e:0.4 3d:0.5 3d:0.4",
    ),
    Case(
        "a pinned GPU is the only one",
        ("3d: ALL: .", "5e: ALL: ."),
        "5e:0.4",
        request=Request("ua-vgpu0", "", gpu=PciAddress(0, 0x5E, 0, 0)),
    ),
]


@pytest.mark.parametrize("case", CHOICES, ids=lambda case: case.says)
def test_choice(case: Case) -> None:
    found = placement.rank(profile(case.wants), case.request, case.policy, build(*case.gpus))
    assert " ".join(short(device.address) for device in found.devices) == case.devices


REASONS = [
    (
        ("3d: 4Q: web1=4Q web2=4Q .", "5e: : web3=48Q ."),
        "0000:3d:00.0 runs 4 GB profiles (owners web1, web2); 0000:5e:00.0 is full (owners web3)",
    ),
    (("3d: 4Q 6Q: web1=24Q .",), "0000:3d:00.0 has no room for it (owners web1)"),
    (
        ("3d: ALL: web1=8Q 8Q 8Q ! ? x",),
        "0000:3d:00.0 has no free VF (owners web1; 2 VFs with a type that nobody claimed; 1 VF "
        "taken without a type; 2 VFs that can't be read)",
    ),
    (("3d: : . .",), "0000:3d:00.0 offers nothing, although nothing runs there"),
    (("3d: 4Q: . .",), "0000:3d:00.0 doesn't offer it"),
    ((), "this host has no GPU with VFs that can become vGPUs; enable its VFs"),
]


@pytest.mark.parametrize(("gpus", "reasons"), REASONS)
def test_reasons(gpus: tuple[str, ...], reasons: str) -> None:
    with pytest.raises(RequestError) as error:
        placement.choose(profile("8Q"), Request("ua-vgpu0", ""), "spread", build(*gpus))
    assert str(error.value) == (
        f"no device for L40S-8Q: {reasons}; 'virt-vgpu profiles' shows what could be started now"
    )


def test_a_pin_to_a_gpu_that_is_not_there() -> None:
    request = Request("ua-vgpu0", "", gpu=PciAddress(0, 1, 0, 0))
    with pytest.raises(RequestError, match=r"GPU 0000:01:00\.0 is not on this host, has no VFs"):
        placement.choose(profile("8Q"), request, "spread", build("3d: ALL: ."))


IDLE = "3d: ALL: " + ". " * 32
STARTABLE = [
    ("a GPU holds one of its largest, on however many VFs it is listed", (IDLE,), "48Q", 1),
    ("what fits by framebuffer", (IDLE,), "8Q", 6),
    ("never more than there are VFs", ("3d: ALL: . . .",), "8Q", 3),
    ("never more than list it", ("3d: 8Q: . ! ? x",), "8Q", 1),
    ("less what runs, by the size of the card", ("3d: 8Q: web1=8Q web2=8Q . . . . . .",), "8Q", 4),
    ("less what somebody else programmed", ("3d: 8Q: 8Q web2=8Q . . . . . .",), "8Q", 4),
    ("less what is claimed, though every list shows it", ("3d: ALL: web1~24Q . . . .",), "24Q", 1),
    ("no other size while a claim isn't programmed", ("3d: ALL: web1~24Q . . .",), "8Q", 0),
    ("a full GPU", ("3d: : web1=48Q . .",), "8Q", 0),
    ("at least what the driver lists", ("3d: 24Q: web1=24Q web2=24Q .",), "24Q", 1),
]  # fmt: skip


@pytest.mark.parametrize(
    ("gpus", "wants", "number"), [case[1:] for case in STARTABLE], ids=[c[0] for c in STARTABLE]
)
def test_startable(gpus: tuple[str, ...], wants: str, number: int) -> None:
    there = build(*gpus)
    assert startable(profile(wants), use_of(there.inventory.gpus[0], there)) == number


def test_the_size_of_an_unknown_card_is_told_by_an_idle_one() -> None:
    busy = "3d: 8Q: web1=8Q . . . . . ."
    alone = build(busy, card="NEW1")
    beside = build(busy, "5e: ALL: .", card="NEW1")
    wanted = profile("8Q", "NEW1")
    # Alone, all we know is that the driver still lists it.
    assert startable(wanted, use_of(alone.inventory.gpus[0], alone)) == 1
    assert bound(wanted, use_of(alone.inventory.gpus[0], alone)) == "at least"
    assert startable(wanted, use_of(beside.inventory.gpus[0], beside)) == 5


def test_a_name_without_a_size_counts_devices() -> None:
    there = build("3d: odd: . . .")
    assert startable(profile("odd"), use_of(there.inventory.gpus[0], there)) == 3
    assert bound(profile("odd"), use_of(there.inventory.gpus[0], there)) == "at most"


def test_a_size_that_is_not_known_leaves_what_is_listed() -> None:
    there = build("3d: 8Q 16Q: web1=odd . . . .")
    assert startable(profile("8Q"), use_of(there.inventory.gpus[0], there)) == 2


@pytest.mark.parametrize("wanted", ["NVIDIA L40S-8Q", "L40S-8Q", "1008"])
def test_a_profile_by_full_name_short_name_or_id(wanted: str) -> None:
    assert placement.resolve(wanted, build("3d: ALL: .")) == profile("8Q")


def test_a_profile_that_only_a_claim_knows() -> None:
    assert placement.resolve("L40S-48Q", build("3d: : web1=48Q .")) == profile("48Q")


@pytest.mark.parametrize("wanted", ["8Q", "L40S", "l40s-8q", ""])
def test_an_unknown_profile_lists_what_there_is(wanted: str) -> None:
    with pytest.raises(
        RequestError, match=r"unknown on this host, which has NVIDIA L40S-8Q \(1008"
    ):
        placement.resolve(wanted, build("3d: 8Q: ."))


def test_what_the_driver_hides_while_something_runs_may_be_there() -> None:
    with pytest.raises(RequestError) as error:
        placement.resolve("L40S-8Q", build("3d: 4Q: web1=4Q .", "5e: 4Q 6Q: web2=4Q web3=6Q ."))
    assert str(error.value) == (
        "profile 'L40S-8Q' is unknown, or doesn't fit now: the host offers NVIDIA L40S-4Q (1004), "
        "NVIDIA L40S-6Q (1006); 0000:3d:00.0 runs 4 GB profiles (owners web1); 0000:5e:00.0 runs "
        "profiles of several sizes (owners web2, web3)"
    )


def test_a_host_without_gpus() -> None:
    with pytest.raises(RequestError, match="no GPU with VFs"):
        placement.resolve("L40S-8Q", build())


def test_a_short_name_of_two_profiles_is_ambiguous() -> None:
    there = build("3d: 8Q: .")
    both = there._replace(profiles=(profile("8Q"), Profile(5, "GRID L40S-8Q")))
    with pytest.raises(RequestError, match=r"ambiguous: it could be GRID L40S-8Q \(5\), NVIDIA"):
        placement.resolve("L40S-8Q", both)
