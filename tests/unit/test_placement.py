# SPDX-License-Identifier: LGPL-2.1-or-later
"""Where a vGPU goes, why it can't go anywhere, and how many more there could be.

A GPU is written as its bus, what the driver lists for its free devices, and its devices:

    .        free                           +        free, but another definition points at it
    web1=8Q  web1's, programmed             web1~8Q  web1's, claimed but not programmed yet
    web1%8Q  a dead owner's: a start would clear it, and then could have it
    8Q       programmed, claimed by nobody  %8Q      the same, where [policy] foreign is "reset"
    ?        unreadable                     !        without a type, but somebody has it open
    x        with an unreadable claim       #        free, but cordoned

`3d@1` is a GPU on NUMA node 1, `3d#` a cordoned one. `m3d` is one of mediated devices, which are
made on its VFs, and `p3d` one that has no VFs, and makes them itself.
"""

from __future__ import annotations

import random
import re
import time

import pytest

from vgpu_libvirt import placement
from vgpu_libvirt.address import PciAddress
from vgpu_libvirt.capacity import Host, bound, cleared, host, startable, use_of
from vgpu_libvirt.claims.model import Claim, Namespaces, Phase
from vgpu_libvirt.claims.store import Claims
from vgpu_libvirt.devices.catalogue import Catalogue
from vgpu_libvirt.devices.model import Device, Gpu, Inventory, Profile
from vgpu_libvirt.domain.model import Request
from vgpu_libvirt.errors import RequestError
from vgpu_libvirt.placement import Company, Placed
from vgpu_libvirt.together import Choice, Wish, place

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 48)
ALL = " ".join(f"{size}Q" for size in SIZES)
CARD = "L40S"
BACKENDS = {False: "vendor-vfio", True: "mdev"}


def profile(name: str, card: str = CARD) -> Profile:
    """`8Q`, of a card; names that tell no size are allowed."""
    size = re.match(r"\d+", name)
    return Profile(1000 + int(size[0]) if size else 999, f"NVIDIA {card}-{name}")


def mdev_profile(name: str, card: str = CARD) -> Profile:
    """The same, as GPUs of mediated devices list it."""
    by_number = profile(name, card)
    return by_number._replace(id=f"nvidia-{by_number.id}")


def claim(device: Device, owner: str, what: Profile) -> Claim:
    return Claim(
        device.name, BACKENDS[device.is_mdev], str(device.gpu), what, "id", Phase.CONFIGURED,
        "aaaaaaaa-0000-0000-0000-000000000001", owner, 1, "ua-vgpu0", "boot", 0.0, 0.0, None, None,
        Namespaces(None, None),
    )  # fmt: skip


def build(*gpus: str, card: str = CARD, remembered: str = "") -> Host:
    """A host of GPUs written as `3d: ALL: . . .`, and the profiles in its catalogue."""
    made: list[Gpu] = []
    claims: dict[str, Claim] = {}
    unreadable: dict[str, str] = {}
    busy: set[str] = set()
    pointed: set[str] = set()
    cordoned: set[str] = set()
    dirty: set[str] = set()
    for text in gpus:
        name, lists, tokens = (part.strip() for part in text.split(":"))
        kind, bus, node = re.match(r"([mp]?)(\w+)#?(?:@(\d))?$", name).groups()  # type: ignore[union-attr]
        named = mdev_profile if kind else profile
        pf = PciAddress(0, int(bus, 16), 0, 0)
        cordoned |= {str(pf)} if "#" in name else set()
        listed = tuple(named(name, card) for name in lists.replace("ALL", ALL).split())
        devices = []
        for number, token in enumerate(tokens.split(), 4):
            address = PciAddress(0, pf.bus, number // 8, number % 8) if kind != "p" else pf
            owner, mark, name = re.match(r"(?:(\w*)([=~%]))?(\S+)$", token).groups()  # type: ignore[union-attr]
            free = mark == "~" or name in {".", "+", "!", "x", "#"}
            device = Device(
                address,
                pf,
                None if name == "?" else 0 if free else named(name, card).id,
                None if name == "?" else listed if free else (),
                "it can't be read" if name == "?" else None,
                (number - 4 if kind == "p" else 0) if kind else None,
                f"uuid{number}" if kind and (owner or not free) else None,
            )
            devices.append(device)
            if owner:
                claims[device.name] = claim(device, owner, named(name, card))
            if name == "x":
                unreadable[device.name] = "not valid JSON"
            busy |= {device.name} if name == "!" else set()
            pointed |= {device.name} if name == "+" else set()
            cordoned |= {device.name} if name == "#" else set()
            dirty |= {device.name} if mark == "%" else set()
        told = tuple(mdev_profile(each, card) for each in ALL.split()) if kind else ()
        node = int(node) if node else None
        made.append(Gpu(pf, BACKENDS[bool(kind)], node, tuple(devices), told))
    there = host(
        Inventory(tuple(made)),
        Claims(claims, unreadable, ()),
        frozenset(busy),
        frozenset(pointed),
        Catalogue((*map(profile, remembered.split()),), frozenset({card} if remembered else ())),
        frozenset(cordoned),
    )
    return there._replace(dirty=frozenset(dirty))


def short(address: PciAddress) -> str:
    return f"{address.bus:x}:{address.slot:x}.{address.function}"


def wishes(text: str) -> list[Wish]:
    """`8Q pack, 4Q apart`: the vGPUs a, b, ... of a domain."""
    found = []
    for number, words in enumerate(text.split(", ")):
        size, *rest = words.split()
        said: dict[str, object] = {}
        for word in rest:
            key, _, value = word.partition("=")
            if key == "gpu":
                said[key] = PciAddress(0, int(value, 16), 0, 0)
            elif key in {"spread", "pack"}:
                said["placement"] = key
            elif key in {"prefer", "require", "ignore"}:
                said["numa"] = key
            else:
                said[key] = "gpu"
        request = Request(f"ua-{'abcdefghij'[number]}", "", **said)  # type: ignore[arg-type]
        found.append(Wish(request, profile(size)))
    return found


def nodes_of(text: str) -> frozenset[int]:
    return frozenset(map(int, text.split()))


def addresses(choices: tuple[Choice, ...]) -> str:
    return " ".join(short(choice.device.address) for choice in choices)


# Host; the domain's wishes; [policy] placement; the domain's NUMA nodes; the devices, in the order
# of the wishes, or the sentence: "-" stands for "no device for L40S", and its end is left out.
TABLE = {
    # --- what can be given at all
    "the first by address": ("3d: ALL: . . .", "8Q", "spread", "", "3d:0.4"),
    "the only one nobody has": ("3d: 8Q: web1=8Q web2~8Q 8Q ! ? x .", "8Q", "spread", "", "3d:1.2"),
    "only where it is listed": ("3d: 4Q: . . / 5e: 8Q: . .", "8Q", "spread", "", "5e:0.4"),
    "no GPU": ("", "8Q", "spread", "",
        "-8Q: this host has no GPU with VFs that can become vGPUs; enable its VFs"),
    "not offered": ("3d: 4Q: . .", "8Q", "spread", "", "-8Q: 0000:3d:00.0 doesn't offer it"),
    "nothing offered": ("3d: : . .", "8Q", "spread", "",
        "-8Q: 0000:3d:00.0 offers nothing, although nothing runs there"),
    "another size runs, or it is full": (
        "3d: 4Q: web1=4Q web2=4Q . / 5e: : web3=48Q .", "8Q", "spread", "",
        "-8Q: 0000:3d:00.0 runs 4 GB profiles (owners web1, web2); "
        "0000:5e:00.0 is full (owners web3)"),
    "no room": ("3d: 4Q 6Q: web1=24Q .", "8Q", "spread", "",
        "-8Q: 0000:3d:00.0 has no room for it (owners web1)"),
    "no free VF": ("3d: ALL: web1=8Q 8Q 8Q ! ? x", "8Q", "spread", "",
        "-8Q: 0000:3d:00.0 has no free VF (owners web1; 2 VFs with a type that nobody claimed; "
        "1 VF taken without a type; 2 VFs that can't be read)"),
    # --- what is claimed, but no list knows yet
    "a claim of the same size leaves room": ("3d: ALL: web1~24Q .", "24Q", "spread", "", "3d:0.5"),
    "claims that take all room": ("3d: ALL: web1~24Q web2~24Q .", "24Q", "spread", "",
        "-24Q: 0000:3d:00.0 has no room for it (owners web1, web2)"),
    "a claim of another size": ("3d: ALL: web1~24Q .", "8Q", "spread", "",
        "-8Q: 0000:3d:00.0 will run 24 GB profiles (owners web1)"),
    "unless the GPU shows that it takes several": (
        "3d: 4Q 8Q: web1=4Q web2~4Q .", "8Q", "spread", "", "3d:0.6"),
    # --- spread
    "spread: the emptier GPU": ("3d: 8Q: web1=8Q . / 5e: ALL: .", "8Q", "spread", "", "5e:0.4"),
    "spread: by framebuffer, not by number": (
        "3d: 8Q: web1=8Q web2=8Q . / 5e: 8Q 24Q: web3=24Q .", "8Q", "spread", "", "3d:0.6"),
    "spread: claims count": ("3d: ALL: web1~8Q . / 5e: ALL: .", "8Q", "spread", "", "5e:0.4"),
    "spread: foreign types count": ("3d: ALL: 8Q . / 5e: ALL: .", "8Q", "spread", "", "5e:0.4"),
    "spread: what others will start counts": (
        "3d: ALL: + . / 5e: ALL: .", "8Q", "spread", "", "5e:0.4"),
    "spread: equals by address": ("3d: ALL: . / 5e: ALL: .", "8Q", "spread", "", "3d:0.4"),
    "spread: the smaller share of three": (
        "3d: 8Q: web1=8Q web2=8Q . / 5e: 8Q: web3=8Q . / 8a: 24Q 8Q: web4=24Q .", "8Q", "spread",
        "", "5e:0.5"),
    # --- pack
    "pack: the fuller GPU": (
        "3d: 8Q: web1=8Q . / 5e: 8Q: web2=8Q web3=8Q .", "8Q", "pack", "", "5e:0.6"),
    "pack: no idle GPU is opened": ("3d: ALL: . / 5e: 8Q: web1=8Q .", "8Q", "pack", "", "5e:0.5"),
    "pack: this size before a fuller GPU of another": (
        "3d: 8Q 24Q: web1=24Q . / 5e: 8Q: web2=8Q .", "8Q", "pack", "", "5e:0.5"),
    "pack: a claim of this size counts": (
        "3d: ALL: . / 5e: ALL: web1~8Q .", "8Q", "pack", "", "5e:0.5"),
    "pack: but no more than will fit beside what others start": (
        "3d: ALL: + . / 5e: ALL: . .", "48Q", "pack", "", "5e:0.4"),
    "pack: an idle GPU if it must be": (
        "3d: 4Q: web1=4Q . / 5e: ALL: .", "8Q", "pack", "", "5e:0.4"),
    "pack: equals by address": ("3d: ALL: . / 5e: ALL: .", "8Q", "pack", "", "3d:0.4"),
    "the request's pack over the host's spread": (
        "3d: ALL: . / 5e: 8Q: web1=8Q .", "8Q pack", "spread", "", "5e:0.5"),
    "the request's spread over the host's pack": (
        "3d: ALL: . / 5e: 8Q: web1=8Q .", "8Q spread", "pack", "", "3d:0.4"),
    # --- a GPU that was asked for
    "a pin": ("3d: ALL: . / 5e: ALL: .", "8Q gpu=5e", "spread", "", "5e:0.4"),
    "a pin to the fuller GPU": (
        "3d: ALL: . / 5e: 8Q: web1=8Q .", "8Q gpu=5e", "spread", "", "5e:0.5"),
    "a pin to a full GPU": ("3d: ALL: . / 5e: : web1=48Q .", "8Q gpu=5e", "spread", "",
        "-8Q: 0000:5e:00.0 is full (owners web1)"),
    "a pin to no GPU": ("3d: ALL: .", "8Q gpu=99", "spread", "",
        "-8Q: GPU 0000:99:00.0 is not on this host, has no VFs, or is excluded by [policy]; the "
        "GPUs with VFs are 0000:3d:00.0"),
    # --- devices of other definitions
    "one that no other definition points at": ("3d: ALL: + .", "8Q", "spread", "", "3d:0.5"),
    "even on a fuller GPU": (
        "3d: ALL: + / 5e: 8Q: web1=8Q .", "8Q", "spread", "", "5e:0.5"),
    "one that another points at, last": ("3d: ALL: + +", "8Q", "spread", "", "3d:0.4"),
    # --- devices that a start clears first
    "clean before dirty": ("3d: 8Q: web1%8Q .", "8Q", "spread", "", "3d:0.5"),
    "clean on a fuller GPU before dirty": (
        "3d: 8Q: web1=8Q web2=8Q . / 5e: : web3%48Q", "8Q", "spread", "", "3d:0.6"),
    "a dead owner's": ("3d: : web1%48Q .", "48Q", "spread", "", "3d:0.4"),
    "a dead owner's, in another size": (
        "3d: : web1%48Q / 5e: ALL: !", "8Q", "spread", "", "3d:0.4"),
    "beside others only in their size": ("3d: 8Q: web1=8Q web2%8Q", "24Q", "spread", "",
        "-24Q: 0000:3d:00.0 has no free VF (owners web1, web2)"),
    "beside others in their size": ("3d: 8Q: web1=8Q web2%8Q", "8Q", "spread", "", "3d:0.5"),
    "clearing one of two makes no room for all": ("3d: : web1%24Q web2%24Q", "48Q", "spread", "",
        "-48Q: 0000:3d:00.0 has no free VF (owners web1, web2)"),
    "a foreign type that may be reset": ("3d: 8Q: %8Q !", "8Q", "spread", "", "3d:0.4"),
    "a foreign type that may not": ("3d: 8Q: 8Q", "8Q", "spread", "",
        "-8Q: 0000:3d:00.0 has no free VF (1 VF with a type that nobody claimed)"),
    # --- cordons
    "not on a cordoned device": ("3d: ALL: # .", "8Q", "spread", "", "3d:0.5"),
    "not on a cordoned GPU": ("3d#: ALL: . / 5e: 8Q: web1=8Q .", "8Q", "spread", "", "5e:0.5"),
    "a cordoned GPU": ("3d#: ALL: web1=8Q .", "8Q", "spread", "",
        "-8Q: 0000:3d:00.0 is cordoned (owners web1)"),
    "cordoned devices": ("3d: ALL: # # web1=8Q", "8Q", "spread", "",
        "-8Q: 0000:3d:00.0 has no free VF (owners web1; 2 VFs cordoned)"),
    "a pin to a cordoned GPU": ("3d#: ALL: . / 5e: ALL: .", "8Q gpu=3d", "spread", "",
        "-8Q: 0000:3d:00.0 is cordoned"),
    "a dirty device of a cordoned GPU": ("3d#: : web1%8Q", "8Q", "spread", "",
        "-8Q: 0000:3d:00.0 is cordoned (owners web1)"),
    # --- NUMA
    "the domain's node": ("3d@0: ALL: . / 5e@1: ALL: .", "8Q", "spread", "1", "5e:0.4"),
    "the domain's node, though fuller": (
        "3d@0: ALL: . / 5e@1: 8Q: web1=8Q .", "8Q", "spread", "1", "5e:0.5"),
    "another node if it must be": (
        "3d@0: ALL: . / 5e@1: : web1=48Q .", "8Q prefer", "spread", "1", "3d:0.4"),
    "a node, not another's device": ("3d@0: ALL: . / 5e@1: ALL: +", "8Q", "spread", "1", "3d:0.4"),
    "ignored": ("3d@0: ALL: . / 5e@1: ALL: .", "8Q ignore", "spread", "1", "3d:0.4"),
    "either of two nodes": ("3d@0: ALL: . / 5e@1: ALL: .", "8Q require", "spread", "0 1", "3d:0.4"),
    "a GPU that tells no node is on node 0": (
        "3d: ALL: . / 5e@1: ALL: .", "8Q require", "spread", "0", "3d:0.4"),
    "required": ("3d@0: ALL: . / 5e@1: : web1=48Q .", "8Q require", "spread", "1",
        "-8Q: 0000:3d:00.0 is on NUMA node 0, and the domain lives on 1; 0000:5e:00.0 is full "
        "(owners web1)"),
    "required, of nothing": ("3d@0: ALL: .", "8Q require", "spread", "",
        "'ua-a' has numa='require', but its domain has neither <numatune> nor pinned vcpus to "
        "require anything of; add one, or remove numa"),
    # --- several vGPUs of a domain
    "each its own device": ("3d: ALL: . . .", "8Q, 8Q", "spread", "", "3d:0.4 3d:0.5"),
    "spread over GPUs": ("3d: ALL: . . / 5e: ALL: . .", "8Q, 8Q", "spread", "", "3d:0.4 5e:0.4"),
    "packed on one": ("3d: ALL: . . / 5e: ALL: . .", "8Q, 8Q", "pack", "", "3d:0.4 3d:0.5"),
    "over GPUs if one has no room for both": (
        "3d: 24Q: web1=24Q . . / 5e: 24Q: web2=24Q . .", "24Q, 24Q", "pack", "", "3d:0.5 5e:0.5"),
    "two sizes on two GPUs": ("3d: ALL: . . / 5e: ALL: . .", "8Q, 4Q", "pack", "", "3d:0.4 5e:0.4"),
    "two sizes on one GPU": ("3d: ALL: . .", "8Q, 4Q", "spread", "",
        "-4Q ('ua-b') beside 'ua-a' at 0000:3d:00.4, and no other way to place them all: "
        "0000:3d:00.0 will run 8 GB profiles (1 VF for the domain's other vGPUs)"),
    "all or none": ("3d: ALL: .", "8Q, 8Q", "spread", "",
        "-8Q ('ua-b') beside 'ua-a' at 0000:3d:00.4, and no other way to place them all: "
        "0000:3d:00.0 has no free VF (1 VF for the domain's other vGPUs)"),
    "one that can't be placed at all is told alone": ("3d: 8Q: . .", "8Q, 4Q", "spread", "",
        "-4Q: 0000:3d:00.0 doesn't offer it"),
    "the first makes way for the second": (
        "3d: 8Q 24Q: . / 5e: 8Q: .", "8Q, 24Q", "spread", "", "5e:0.4 3d:0.4"),
    "and for one that is pinned": (
        "3d: ALL: . / 5e: ALL: .", "8Q, 8Q gpu=3d", "spread", "", "5e:0.4 3d:0.4"),
    "a third try": ("3d: 8Q: . / 5e: 8Q 4Q: . / 8a: 8Q 4Q 2Q: .", "8Q, 4Q, 2Q", "spread", "",
        "3d:0.4 5e:0.4 8a:0.4"),
    "apart": ("3d: ALL: . . / 5e: ALL: . .", "8Q, 8Q apart", "pack", "", "5e:0.4 3d:0.4"),
    "apart, with one GPU": ("3d: ALL: . .", "8Q, 8Q apart", "spread", "",
        "-8Q ('ua-a') beside 'ua-b' at 0000:3d:00.4, and no other way to place them all: "
        "0000:3d:00.0 has 'ua-b', from which 'ua-a' must be apart"),
    "together": ("3d: ALL: . . / 5e: ALL: . .", "8Q, 8Q together", "spread", "", "3d:0.5 3d:0.4"),
    "together where both fit": (
        "3d: 24Q: web1=24Q . . / 5e: ALL: . .", "24Q together, 24Q", "pack", "", "5e:0.4 5e:0.5"),
    "together, with no room": ("3d: 24Q: web1=24Q . . / 5e: 24Q: web2=24Q . .",
        "24Q together, 24Q", "spread", "",
        "-24Q ('ua-b') beside 'ua-a' at 0000:3d:00.5, and no other way to place them all: "
        "0000:3d:00.0 has no room for it (owners web1; 1 VF for the domain's other vGPUs); "
        "0000:5e:00.0 is not that of 'ua-a', to which 'ua-b' belongs"),
    "apart and together": ("3d: ALL: . . / 5e: ALL: . .", "8Q apart, 8Q together", "spread", "",
        "-8Q ('ua-b') beside 'ua-a' at 0000:3d:00.4, and no other way to place them all: "
        "0000:3d:00.0 has 'ua-a', from which 'ua-b' must be apart; 0000:5e:00.0 is not that of "
        "'ua-a', to which 'ua-b' belongs"),
    "two dirty devices": ("3d: : web1%24Q web2%24Q", "24Q, 24Q", "spread", "", "3d:0.4 3d:0.5"),
    # --- mediated devices: where they are made
    "the first parent by address": ("m3d: ALL: . . .", "8Q", "spread", "", "3d:0.4"),
    "beside another of its size": ("m3d: 8Q: web1=8Q . .", "8Q", "spread", "", "3d:0.5"),
    "beside one that is yet to be made": ("m3d: ALL: web1~8Q . .", "8Q", "spread", "", "3d:0.5"),
    "a parent of another size": ("m3d: 4Q: web1=4Q . .", "8Q", "spread", "",
        "-8Q: 0000:3d:00.0 runs 4 GB profiles (owners web1)"),
    "beside one of another size that is yet to be made": (
        "m3d: ALL: web1~4Q . .", "8Q", "spread", "",
        "-8Q: 0000:3d:00.0 will run 4 GB profiles (owners web1)"),
    "beside somebody else's": ("m3d: 8Q: 8Q . .", "8Q", "spread", "", "3d:0.5"),
    "parents that can't be used": ("m3d: ALL: ? # .", "8Q", "spread", "", "3d:0.6"),
    "no parent is left": ("m3d: : web1=8Q 8Q ?", "8Q", "spread", "",
        "-8Q: 0000:3d:00.0 has no room for more (owners web1; 1 place "
        "with a type that nobody claimed; 1 place that can't be read)"),
    "parents that list nothing more": ("m3d: : web1=48Q . .", "48Q", "spread", "",
        "-48Q: 0000:3d:00.0 is full (owners web1)"),
    "a GPU without VFs": ("p3d: ALL: . . . .", "8Q, 8Q", "spread", "", "3d:0.0 3d:0.0"),
    "a GPU without VFs takes no more than fits": ("p3d: ALL: . . . .", "24Q, 24Q, 24Q", "spread",
        "", "-24Q ('ua-c') beside 'ua-a' at 0000:3d:00.0, 'ua-b' at 0000:3d:00.0, and no other way "
        "to place them all: 0000:3d:00.0 has no room for it (2 places for the domain's other "
        "vGPUs)"),
    "a cordoned GPU of mediated devices": ("m3d#: ALL: . . / 5e: 8Q: web1=8Q .", "8Q", "spread",
        "", "5e:0.5"),
    # --- one profile, which GPUs of both kinds give
    "either kind: the emptier GPU": (
        "3d: 8Q: web1=8Q . / m5e: ALL: . .", "8Q", "spread", "", "5e:0.4"),
    "either kind: or the emptier VFs'": (
        "m3d: 8Q: web1=8Q . / 5e: ALL: . .", "8Q", "spread", "", "5e:0.4"),
    "either kind: pack": ("3d: ALL: . . / p5e: 8Q: web1=8Q . .", "8Q", "pack", "", "5e:0.0"),
    "either kind: equals by address": ("m3d: ALL: . / 5e: ALL: .", "8Q", "spread", "", "3d:0.4"),
    "either kind: apart": ("3d: ALL: . . / m5e: ALL: . .", "8Q, 8Q apart", "pack", "",
        "5e:0.4 3d:0.4"),
    "either kind: together": ("3d: ALL: . / m5e: ALL: . .", "8Q, 8Q together", "spread", "",
        "5e:0.5 5e:0.4"),
    "either kind: a pin": ("3d: ALL: . / p5e: ALL: . .", "8Q gpu=5e", "spread", "", "5e:0.0"),
    "either kind: the domain's node": (
        "3d@0: ALL: . / m5e@1: ALL: .", "8Q require", "spread", "1", "5e:0.4"),
    "either kind: the one without a size beside it": (
        "m3d: 4Q: web1=4Q . / 5e: ALL: .", "8Q", "pack", "", "5e:0.4"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("gpus", "wants", "policy", "nodes", "result"), list(TABLE.values()), ids=list(TABLE)
)
def test_table(gpus: str, wants: str, policy: str, nodes: str, result: str) -> None:
    there = build(*filter(None, gpus.split(" / ")))
    company = Company(nodes_of(nodes))
    if " " not in result.replace(" 3d", "").replace(" 5e", "").replace(" 8a", ""):
        assert addresses(place(wishes(wants), policy, there, company)) == result
        return
    with pytest.raises(RequestError) as error:
        place(wishes(wants), policy, there, company)
    start, end = "no device for L40S-", "; 'virt-vgpu profiles' shows what could be started now"
    assert str(error.value) == (start + result[1:] + end if result.startswith("-") else result)


def test_the_whole_order() -> None:
    there = build("3d: 8Q: web1=8Q + .", "5e: ALL: + .", "8a: 8Q: %8Q .")
    found = placement.rank(profile("8Q"), Request("ua-a", ""), "spread", there)
    order = "5e:0.5 8a:0.5 3d:0.6 8a:0.4 5e:0.4 3d:0.5"
    assert " ".join(short(device.address) for device in found.devices) == order


@pytest.mark.parametrize(
    ("gpus", "wants", "nodes", "why"),
    [
        ("3d: ALL: . .", "8Q", "", "only GPU 0000:3d:00.0 can take it now"),
        ("3d: ALL: . / 5e: ALL: .", "8Q", "", "it is the first of equals"),
        ("3d: ALL: . / 5e: ALL: .", "8Q gpu=5e", "",
         "it is on GPU 0000:5e:00.0, which was asked for"),
        ("3d: 8Q: web1=8Q . / 5e: ALL: .", "8Q", "",
         "GPU 0000:5e:00.0 has the lowest share of its framebuffer in use (0 %)"),
        ("3d: 8Q: web1=8Q . / 5e: 8Q: web1=8Q web2=8Q .", "8Q pack", "",
         "GPU 0000:5e:00.0 has the highest share of its framebuffer in use (33 %)"),
        ("3d: 8Q: web1=8Q . / 5e: ALL: .", "8Q pack", "",
         "GPU 0000:3d:00.0 already runs profiles of this size"),
        ("3d@0: ALL: . / 5e@1: ALL: .", "8Q", "1",
         "GPU 0000:5e:00.0 is on the domain's NUMA node"),
        ("3d: ALL: + / 5e: 8Q: web1=8Q .", "8Q", "", "no other definition points at it"),
        ("3d: 8Q: web1%8Q / 5e: 8Q: web2=8Q .", "8Q", "", "nothing has to be cleared first"),
        ("3d: ALL: + . / 5e: ALL: . .", "48Q pack", "",
         "GPU 0000:5e:00.0 has room for it beside the others"),
        ("3d: 8Q: web1%8Q", "8Q", "",
         "only GPU 0000:3d:00.0 can take it now; what is on it is cleared first"),
    ],
)  # fmt: skip
def test_why(gpus: str, wants: str, nodes: str, why: str) -> None:
    (choice,) = place(wishes(wants), "spread", build(*gpus.split(" / ")), Company(nodes_of(nodes)))
    assert choice.why == why


def test_beside_the_vgpus_that_a_domain_has() -> None:
    there = build("3d: ALL: . . .", "5e: ALL: . .")
    device = there.inventory.devices[0]
    has = Company(others=(Placed(Request("ua-x", ""), device, profile("24Q")),))
    for wants, expected in (
        ("8Q pack", "5e:0.4"),  # one size per GPU
        ("24Q pack", "3d:0.5"),
        ("24Q together", "3d:0.5"),
        ("24Q apart pack", "5e:0.4"),
        ("24Q, 24Q, 24Q", "5e:0.4 3d:0.5 5e:0.5"),
    ):
        assert addresses(place(wishes(wants), "spread", there, has)) == expected
    with pytest.raises(RequestError, match=r"0000:5e:00\.0 is not that of 'ua-x', to which 'ua-a'"):
        place(wishes("8Q together"), "spread", there, has)
    unknown = Company(others=(Placed(Request("ua-x", "", apart="gpu"), device),))
    assert addresses(place(wishes("8Q, 8Q"), "spread", there, unknown)) == "5e:0.4 5e:0.5"


def test_a_search_without_a_way_ends_soon() -> None:
    there = build(*(f"{bus:x}: ALL: . . . ." for bus in range(0x30, 0x38)))
    begin = time.monotonic()
    with pytest.raises(RequestError, match="no other way to place them all"):
        place(wishes(", ".join(["48Q"] * 9)), "spread", there)
    assert time.monotonic() - begin < 10
    assert len(place(wishes(", ".join(["48Q"] * 8)), "spread", there)) == 8


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


def a_way(left: list[Wish], host: Host, company: Company) -> bool:
    """Whether all that is LEFT can be placed, in whatever order and wherever: tries everything."""
    for wish in left:
        rest = [other for other in left if other is not wish]
        found = placement.rank(wish.profile, wish.request, "spread", host, company)
        for candidate in found.candidates:
            placed = Placed(wish.request, candidate.device, wish.profile)
            there = cleared(host, candidate.device) if candidate.dirty else host
            there = there._replace(planned={**there.planned, candidate.device.name: wish.profile})
            beside = company._replace(others=(*company.others, placed))
            if not rest or a_way(rest, there, beside):
                return True
    return not left


@pytest.mark.parametrize("seed", range(20))
def test_a_way_is_found_exactly_where_there_is_one(seed: int) -> None:
    dice = random.Random(seed)
    tokens = [".", ".", ".", "+", "#", "8Q", "web1=8Q", "web1~8Q", "web1=24Q", "web2%24Q", "%8Q"]
    words = ["", "", "apart", "together", "gpu=3d", "require", "pack"]
    for _ in range(12):
        gpus = [
            f"{bus}@{node}: {dice.choice(['ALL', '8Q', '8Q 24Q', '24Q'])}: "
            + " ".join(dice.choice(tokens) for _ in range(dice.randint(1, 3)))
            for node, bus in enumerate(("3d", "5e"))
        ]
        wants = ", ".join(
            f"{dice.choice(['8Q', '24Q', '48Q'])} {dice.choice(words)}".strip()
            for _ in range(dice.randint(1, 3))
        )
        there, company, wanted = build(*gpus), Company(frozenset({0})), wishes(wants)
        try:
            choices = place(wanted, "spread", there, company)
        except RequestError:
            assert not a_way(wanted, there, company), (gpus, wants)
            continue
        assert a_way(wanted, there, company)
        assert len({choice.device.name for choice in choices}) == len(wanted)
        gpus_used = [choice.device.gpu for choice in choices]
        for wish, choice in zip(wanted, choices, strict=True):
            assert there.is_free(choice.device) or there.is_dirty(choice.device)
            assert wish.request.gpu in (None, choice.device.gpu)
            assert not (wish.request.apart and gpus_used.count(choice.device.gpu) > 1)
            assert not (wish.request.together and len(set(gpus_used)) > 1)
