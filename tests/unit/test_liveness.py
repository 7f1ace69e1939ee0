# SPDX-License-Identifier: LGPL-2.1-or-later
"""Who is alive: one table of rules, and the witnesses behind them with real processes.

Any witness for life is enough to keep a device; death needs all of them; doubt keeps it too.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from tests.unit.host import BOOT, LIBVIRTD, WEB1, WEB2, Host, domain_xml, web1
from tests.unit.support import NOBODY, VF, child, needs_root, new_claim, nobody
from vgpu_libvirt.claims import processes, witnesses
from vgpu_libvirt.claims.handles import Handles
from vgpu_libvirt.claims.inventory import LiveDomain, LiveDomains
from vgpu_libvirt.claims.liveness import Answer, State, judge
from vgpu_libvirt.claims.model import Claim, Namespaces, Phase, Process, Qemu
from vgpu_libvirt.claims.processes import Presence
from vgpu_libvirt.claims.witnesses import Witnesses, World
from vgpu_libvirt.devices.mdev_life import mdev_uuid
from vgpu_libvirt.domain.read import parse_domain

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.unit.gpus import Gpus

pytestmark = pytest.mark.promise(4)

MDEV = mdev_uuid(WEB1, "ua-vgpu0")
OWNER = f"domain 'web1' ({WEB1})"
MONITOR = "/var/lib/libvirt/qemu/domain-7-web1/monitor.sock"
ALIVE, DEAD, UNKNOWN = State.ALIVE, State.DEAD, State.UNKNOWN
NOTHING = f"nothing shows {OWNER} alive"
RUNS = "libvirt has it running as process 4001"
DAEMON_RUNS = "the daemon that started it, process 811, still runs"

# A claim between `prepare` and QEMU, and one whose QEMU is known.
STARTING = new_claim()
STARTED = new_claim(phase=Phase.RUNNING, qemu=Qemu(4001, 90210, MONITOR))
# One that libvirt is asked to plug into a QEMU.
PLUGGING = new_claim(phase=Phase.RESERVED, qemu=Qemu(4001, 90210, MONITOR))
DAEMON_LIVES = {"daemon": Presence.RUNNING, "qemu": Presence.RUNNING}


def live(uuid: str, *devices: str, pid: int = 4001, name: str = "web1") -> LiveDomain:
    domain = parse_domain(domain_xml(name, uuid))
    return LiveDomain(uuid, name, 7, Process(pid, 90210), MONITOR, frozenset(devices), domain)


def domains(*domains: LiveDomain, problem: str | None = None) -> LiveDomains:
    return LiveDomains(domains, (problem,) if problem else ())


WITH_IT = domains(live(WEB1, VF))
WITHOUT_IT = domains(live(WEB1))
TAKEN = domains(live(WEB2, VF, pid=5001, name="web2"))
# What libvirt answers, outside hooks.
INACTIVE = Answer(frozenset({WEB2}), frozenset({STARTING.claim_id}))
ACTIVE = Answer(frozenset({WEB1, WEB2}), frozenset({STARTING.claim_id}))
ASKED_BEFORE = Answer(frozenset({WEB2}), frozenset({"another"}))
SILENT = Answer(frozenset(), frozenset(), "libvirt doesn't answer")
LET_GO = f"{OWNER} runs, but has let {VF} go"
NEVER_GOT = f"{OWNER} runs, but never got {VF}"
QUIET = World(
    boot_id=BOOT,
    since_boot=600.0,
    namespaces=Namespaces(4026531836, 4026531840),
    domains=domains(),
    handles=Handles({}, ()),
    listeners=(),
)
GONE = Witnesses(Presence.GONE, Presence.GONE, None, frozenset(), ())


class Row(NamedTuple):
    """One rule: what differs from a claim whose owner has left no trace, and the verdict."""

    rule: str
    claim: Claim
    verdict: State
    evidence: str
    world: Mapping[str, Any] = MappingProxyType({})
    seen: Mapping[str, Any] = MappingProxyType({})
    over: bool = False
    libvirt: Answer | None = None


ROWS = [
    # --- no trace ---
    Row("a QEMU that is gone, and nothing else", STARTED, DEAD, NOTHING),
    Row("a start whose daemon is gone", STARTING, DEAD, NOTHING),
    # --- any one witness for life is enough ---
    Row(
        "libvirt's inventory lists the domain",
        STARTED,
        ALIVE,
        RUNS,
        {"domains": WITH_IT},
    ),
    Row(
        "a handle on the device, whoever has it",
        STARTED,
        ALIVE,
        f"{VF} is held open by process 77, 4001",
        seen={"holders": frozenset({4001, 77})},
    ),
    Row(
        "the lock on its pid file",
        STARTED,
        ALIVE,
        "its pid file is locked by process 4001",
        seen={"pid_file_owner": 4001},
    ),
    Row(
        "the QEMU of the claim",
        STARTED,
        ALIVE,
        "its QEMU, process 4001, runs",
        seen={"qemu": Presence.RUNNING},
    ),
    Row(
        "the monitor of the claim listens",
        STARTED,
        ALIVE,
        f"its monitor {MONITOR} listens",
        {"listeners": ("/run/x.sock", MONITOR)},
    ),
    Row(
        "a monitor listens in the directory of a start whose QEMU nobody has noted",
        STARTING,
        ALIVE,
        f"its monitor {MONITOR} listens",
        {"listeners": (MONITOR,)},
    ),
    Row(
        "a long name is cut to 20 characters there",
        STARTING._replace(domain_name="abcdefghijklmnopqrst-and-more"),
        ALIVE,
        "its monitor /x/domain-7-abcdefghijklmnopqrst/monitor.sock listens",
        {"listeners": ("/x/domain-7-abcdefghijklmnopqrst/monitor.sock",)},
    ),
    Row(
        "another domain's monitor is none",
        STARTING,
        DEAD,
        NOTHING,
        {
            "listeners": (
                "/x/domain-17-web1/monitor.sock",
                "/x/domain-7-web12/monitor.sock",
                "/x/domain-7-web1/agent.sock",
                "/x/domain-7-web1/monitor.sock.old",
            )
        },
    ),
    Row(
        "nor is one that other programs hold: ids begin anew, and names are given again",
        STARTING,
        DEAD,
        NOTHING,
        {"listeners": (MONITOR,)},
        {"is_anothers_monitor": True},
    ),
    Row(
        "a claim without a domain id has no monitor to look for",
        STARTING._replace(domain_id=None),
        DEAD,
        NOTHING,
        {"listeners": ("/x/domain-None-web1/monitor.sock", MONITOR)},
    ),
    Row(
        "life beats doubt",
        STARTED,
        ALIVE,
        "its QEMU, process 4001, runs",
        {"boot_id": None, "listeners": None, "domains": domains(problem="unreadable")},
        {"qemu": Presence.RUNNING, "unknown": ("x",)},
    ),
    # --- between `prepare` and QEMU the daemon is the witness ---
    Row("the daemon runs", STARTING, UNKNOWN, DAEMON_RUNS, seen={"daemon": Presence.RUNNING}),
    Row(
        "whether it runs can't be seen",
        STARTING,
        UNKNOWN,
        DAEMON_RUNS,
        seen={"daemon": Presence.UNKNOWN},
    ),
    Row(
        "no daemon was found when it was claimed",
        STARTING._replace(daemon=None),
        UNKNOWN,
        "the daemon that started it isn't known",
        seen={"daemon": None},
    ),
    Row(
        "age alone proves nothing",
        STARTING,
        UNKNOWN,
        DAEMON_RUNS,
        {"since_boot": 1e9},
        {"daemon": Presence.RUNNING},
    ),
    Row(
        "a hook of the same domain and daemon says that the start is over",
        STARTING,
        DEAD,
        NOTHING,
        seen={"daemon": Presence.RUNNING},
        over=True,
    ),
    Row(
        "which ends no other doubt",
        STARTING,
        UNKNOWN,
        "unreadable",
        {"domains": domains(problem="unreadable")},
        {"daemon": Presence.RUNNING},
        over=True,
    ),
    Row(
        "and no life",
        STARTING,
        ALIVE,
        f"{VF} is held open by process 4001",
        seen={"holders": frozenset({4001})},
        over=True,
    ),
    Row(
        "once QEMU is known the daemon proves nothing any more",
        STARTED,
        DEAD,
        NOTHING,
        seen={"daemon": Presence.RUNNING},
    ),
    # --- reservations ---
    Row(
        "a reservation within its time",
        STARTING._replace(phase=Phase.RESERVED),
        UNKNOWN,
        DAEMON_RUNS,
        {"since_boot": STARTING.since_boot + 60},
        {"daemon": Presence.RUNNING},
    ),
    Row(
        "a reservation that lapsed",
        STARTING._replace(phase=Phase.RESERVED),
        DEAD,
        NOTHING,
        {"since_boot": STARTING.since_boot + 60.1},
        {"daemon": Presence.RUNNING},
    ),
    Row(
        "a lapse only means that the witnesses decide",
        STARTING._replace(phase=Phase.RESERVED),
        ALIVE,
        f"{VF} is held open by process 4001",
        {"since_boot": STARTING.since_boot + 9999},
        {"holders": frozenset({4001})},
    ),
    Row(
        "a claim that is more than a reservation doesn't lapse",
        STARTING._replace(phase=Phase.CLAIMED),
        UNKNOWN,
        DAEMON_RUNS,
        {"since_boot": STARTING.since_boot + 9999},
        {"daemon": Presence.RUNNING},
    ),
    # --- undecidable means keep ---
    Row(
        "an incomplete inventory",
        STARTED,
        UNKNOWN,
        "unreadable",
        {"domains": domains(problem="unreadable")},
    ),
    Row("something that can't be looked at", STARTED, UNKNOWN, "fd", seen={"unknown": ("fd",)}),
    Row(
        "a QEMU that can't be looked at",
        STARTED,
        UNKNOWN,
        "its QEMU, process 4001, can't be looked at",
        seen={"qemu": Presence.UNKNOWN},
    ),
    Row(
        "an unknown boot",
        STARTED,
        UNKNOWN,
        "this boot's id (boot_id) can't be read",
        {"boot_id": None},
    ),
    Row(
        "unreadable sockets",
        STARTED,
        UNKNOWN,
        "the list of Unix sockets (net/unix) can't be read",
        {"listeners": None},
    ),
    Row(
        "claimed in another pid namespace",
        STARTED,
        UNKNOWN,
        "it was claimed in another pid namespace",
        {"namespaces": Namespaces(1, 4026531840)},
    ),
    Row(
        "claimed in another net namespace",
        STARTED,
        UNKNOWN,
        "it was claimed in another net namespace",
        {"namespaces": Namespaces(4026531836, 1)},
    ),
    Row(
        "namespaces that one side couldn't tell are no doubt",
        STARTED._replace(namespaces=Namespaces(None, 4026531840)),
        DEAD,
        NOTHING,
        {"namespaces": Namespaces(4026531836, None)},
    ),
    # --- another boot ---
    Row("no QEMU outlives a boot", STARTED, DEAD, NOTHING, {"boot_id": "other"}),
    Row(
        "its pid is somebody else's then, whatever the start time",
        STARTED,
        DEAD,
        NOTHING,
        {"boot_id": "other"},
        {"qemu": Presence.RUNNING},
    ),
    Row(
        "its daemon's pid too",
        STARTING,
        DEAD,
        NOTHING,
        {"boot_id": "other"},
        {"daemon": Presence.RUNNING},
    ),
    Row(
        "an unknown daemon is gone with its boot",
        STARTING._replace(daemon=None),
        DEAD,
        NOTHING,
        {"boot_id": "other"},
        {"daemon": None},
    ),
    Row(
        "namespaces have other numbers under another kernel",
        STARTED,
        DEAD,
        NOTHING,
        {"boot_id": "other", "namespaces": Namespaces(4026531836, 4026531833)},
    ),
    Row(
        "domain ids begin anew, so the monitor is another run's",
        STARTED,
        DEAD,
        NOTHING,
        {"boot_id": "other", "listeners": (MONITOR,)},
    ),
    Row(
        "a handle on the device counts in every boot",
        STARTED,
        ALIVE,
        f"{VF} is held open by process 9",
        {"boot_id": "other"},
        {"holders": frozenset({9})},
    ),
    Row(
        "so does the inventory",
        STARTED,
        ALIVE,
        RUNS,
        {"boot_id": "other", "domains": WITH_IT},
    ),
    Row(
        "and an inventory that is incomplete",
        STARTED,
        UNKNOWN,
        "unreadable",
        {"boot_id": "other", "domains": domains(problem="unreadable")},
    ),
    Row(
        "and what can't be looked at",
        STARTED,
        UNKNOWN,
        "fd",
        {"boot_id": "other"},
        {"unknown": ("fd",)},
    ),
    # --- libvirt's own answer, where it could be asked ---
    Row(
        "a libvirt that says inactive ends a start",
        STARTING,
        DEAD,
        NOTHING,
        seen={"daemon": Presence.RUNNING},
        libvirt=INACTIVE,
    ),
    Row(
        "of an unknown daemon too",
        STARTING._replace(daemon=None),
        DEAD,
        NOTHING,
        seen={"daemon": None},
        libvirt=INACTIVE,
    ),
    Row(
        "but not one that began after the question",
        STARTING,
        UNKNOWN,
        DAEMON_RUNS,
        seen={"daemon": Presence.RUNNING},
        libvirt=ASKED_BEFORE,
    ),
    Row(
        "nor one that is yet to come",
        STARTING._replace(phase=Phase.RESERVED, daemon=None, since_boot=590.0),
        UNKNOWN,
        "the daemon that started it isn't known",
        seen={"daemon": None},
        libvirt=INACTIVE,
    ),
    Row(
        "and it outweighs no other witness",
        STARTED,
        ALIVE,
        "its QEMU, process 4001, runs",
        seen={"qemu": Presence.RUNNING},
        libvirt=INACTIVE,
    ),
    Row(
        "nor a doubt",
        STARTED,
        UNKNOWN,
        "fd",
        seen={"unknown": ("fd",)},
        libvirt=INACTIVE,
    ),
    Row(
        "a libvirt that says active is enough",
        STARTING,
        ALIVE,
        "libvirt says that it is active",
        libvirt=ACTIVE,
    ),
    Row(
        "one that runs and is silent is a doubt",
        STARTED,
        UNKNOWN,
        "libvirt doesn't answer",
        libvirt=SILENT,
    ),
    Row(
        "and ends no start",
        STARTING,
        UNKNOWN,
        DAEMON_RUNS,
        seen={"daemon": Presence.RUNNING},
        libvirt=SILENT._replace(asked_after=frozenset({STARTING.claim_id})),
    ),
    Row(
        "an active domain may have let the device go",
        STARTED,
        DEAD,
        LET_GO,
        {"domains": WITHOUT_IT},
        libvirt=ACTIVE,
    ),
    # --- let go: unplugged, or ejected by the guest ---
    Row(
        "a complete inventory has it without the device",
        STARTED,
        DEAD,
        LET_GO,
        {"domains": WITHOUT_IT},
    ),
    Row(
        "its running QEMU and monitor are no objection",
        STARTED,
        DEAD,
        LET_GO,
        {"domains": WITHOUT_IT, "listeners": (MONITOR,)},
        {"qemu": Presence.RUNNING, "pid_file_owner": 4001},
    ),
    Row(
        "not while a handle is open",
        STARTED,
        ALIVE,
        f"{VF} is held open by process 4001",
        {"domains": WITHOUT_IT},
        {"holders": frozenset({4001})},
    ),
    Row(
        "not by an incomplete inventory",
        STARTED,
        ALIVE,
        RUNS,
        {"domains": domains(live(WEB1), problem="unreadable")},
    ),
    Row(
        "not when handles can't be seen",
        STARTED,
        ALIVE,
        RUNS,
        {"domains": WITHOUT_IT},
        {"unknown": ("fd",)},
    ),
    Row(
        "not before it ever ran with it: a device may be plugged in",
        STARTED._replace(phase=Phase.CONFIGURED),
        ALIVE,
        RUNS,
        {"domains": WITHOUT_IT},
    ),
    Row(
        "what should have been released is let go too",
        STARTED._replace(phase=Phase.RELEASE_PENDING),
        DEAD,
        LET_GO,
        {"domains": WITHOUT_IT},
    ),
    # --- never plugged in: the claim is a reservation of a domain that runs ---
    Row(
        "libvirt may be about to plug it in",
        PLUGGING,
        ALIVE,
        RUNS,
        {"domains": WITHOUT_IT, "since_boot": PLUGGING.since_boot + 60},
        DAEMON_LIVES,
    ),
    Row(
        "not any more once it has lapsed",
        PLUGGING,
        DEAD,
        NEVER_GOT,
        {"domains": WITHOUT_IT, "since_boot": PLUGGING.since_boot + 60.1},
        DAEMON_LIVES,
    ),
    Row(
        "nor once the daemon that was asked is gone",
        PLUGGING,
        DEAD,
        NEVER_GOT,
        {"domains": WITHOUT_IT},
        {"qemu": Presence.RUNNING},
    ),
    Row(
        "nor once it has answered",
        PLUGGING,
        DEAD,
        NEVER_GOT,
        {"domains": WITHOUT_IT},
        DAEMON_LIVES,
        over=True,
    ),
    Row(
        "nor in another boot, whatever its clock says",
        PLUGGING._replace(boot_id="another"),
        DEAD,
        NEVER_GOT,
        {"domains": WITHOUT_IT},
        {"daemon": Presence.UNKNOWN, "qemu": Presence.GONE},
    ),
    Row(
        "it was plugged in, and will be noted",
        PLUGGING,
        ALIVE,
        RUNS,
        {"domains": WITH_IT, "since_boot": PLUGGING.since_boot + 9999},
        DAEMON_LIVES,
    ),
    Row(
        "QEMU has it open, and libvirt will list it",
        PLUGGING,
        ALIVE,
        f"{VF} is held open by process 4001",
        {"domains": WITHOUT_IT, "since_boot": PLUGGING.since_boot + 9999},
        {**DAEMON_LIVES, "holders": frozenset({4001})},
    ),
    Row(
        "its domain ended before",
        PLUGGING,
        DEAD,
        NOTHING,
        seen={"daemon": Presence.RUNNING},
    ),
    Row(
        "a reservation for a start lapses while its domain runs, too",
        STARTING._replace(phase=Phase.RESERVED, daemon=None),
        DEAD,
        NEVER_GOT,
        {"domains": WITHOUT_IT, "since_boot": STARTING.since_boot + 60.1},
        {"daemon": None, "qemu": None},
    ),
    # --- somebody else who lives has the device by now ---
    Row(
        "its holder is no sign of the owner's life",
        STARTED,
        DEAD,
        NOTHING,
        {"domains": TAKEN},
        {"holders": frozenset({5001})},
    ),
    Row(
        "a second holder is",
        STARTED,
        ALIVE,
        f"{VF} is held open by process 4001, 5001",
        {"domains": TAKEN},
        {"holders": frozenset({4001, 5001})},
    ),
    Row(
        "the owner may still live",
        STARTED,
        ALIVE,
        "its QEMU, process 4001, runs",
        {"domains": TAKEN},
        {"qemu": Presence.RUNNING, "holders": frozenset({5001})},
    ),
    Row(
        "or have let it go",
        STARTED,
        DEAD,
        LET_GO,
        {"domains": domains(live(WEB1), *TAKEN.domains)},
        {"holders": frozenset({5001})},
    ),
]


UNREAD = {  # what an incomplete inventory is to a VF; nobody else can have a mediated device
    "which ends no other doubt": (DEAD, NOTHING),
    "an incomplete inventory": (DEAD, NOTHING),
    "and an inventory that is incomplete": (DEAD, NOTHING),
    "not by an incomplete inventory": (DEAD, LET_GO),
}


def of_mdev(row: Row) -> Row:
    """The same rule for a mediated device."""
    state, evidence = UNREAD.get(row.rule, (row.verdict, row.evidence))
    world = dict(row.world)
    if "domains" in world:
        there = (
            one._replace(devices=frozenset(MDEV if name == VF else name for name in one.devices))
            for one in world["domains"].domains
        )
        world["domains"] = LiveDomains(tuple(there), world["domains"].problems)
    return row._replace(
        claim=row.claim._replace(device=MDEV, backend="mdev"),
        verdict=state,
        evidence=evidence.replace(VF, MDEV),
        world=world,
    )


@pytest.mark.parametrize(
    "row",
    [*ROWS, *map(of_mdev, ROWS)],
    ids=[f"{row.rule}-{kind}" for kind in ("vendor-vfio", "mdev") for row in ROWS],
)
@pytest.mark.promise(5)
def test_the_verdict(row: Row) -> None:
    seen = GONE._replace(qemu=Presence.GONE if row.claim.qemu else None)._replace(**row.seen)
    verdict = judge(row.claim, QUIET._replace(**row.world), seen, 60.0, row.over, row.libvirt)
    assert verdict.state is row.verdict
    owner = (OWNER, row.claim.owner)
    assert row.evidence.replace(*owner) in verdict.evidence
    assert verdict.why == "; ".join(verdict.evidence)
    taken = row.verdict is DEAD and row.world.get("domains", domains()).using(row.claim.device)
    assert verdict.other == (taken or None)


def test_all_rules_that_an_incomplete_inventory_bears_on_are_there() -> None:
    assert UNREAD.keys() <= {row.rule for row in ROWS}


def test_all_the_evidence_is_told() -> None:
    world = QUIET._replace(domains=WITH_IT, listeners=(MONITOR,))
    seen = GONE._replace(qemu=Presence.RUNNING, pid_file_owner=4001, holders=frozenset({4001}))
    assert judge(STARTED, world, seen, 60.0).evidence == (
        RUNS,
        f"{VF} is held open by process 4001",
        "its pid file is locked by process 4001",
        "its QEMU, process 4001, runs",
        f"its monitor {MONITOR} listens",
    )


def test_all_doubts_are_told() -> None:
    world = QUIET._replace(
        boot_id=None,
        listeners=None,
        namespaces=Namespaces(1, 2),
        domains=domains(problem="unreadable"),
    )
    seen = GONE._replace(daemon=Presence.RUNNING, unknown=("fd",))
    verdict = judge(STARTING, world, seen, 60.0)
    assert verdict.state is UNKNOWN
    assert verdict.why == (
        "unreadable; fd; it was claimed in another pid namespace; it was claimed in another net "
        "namespace; this boot's id (boot_id) can't be read; the list of Unix sockets (net/unix) "
        "can't be read; " + DAEMON_RUNS
    )


# --- the witnesses, on a host in a directory ---


def look(host: Host, claim: Claim) -> tuple[World, Witnesses]:
    world = witnesses.look_around(host.paths)
    return world, witnesses.look_at(host.paths, claim, world, host.context().nodes)


def test_what_is_seen_of_a_running_domain(host: Host, gpus: Gpus) -> None:
    device = gpus.device()
    gpus.set_type(device, 1152)
    group, _ = host.nodes(device)
    host.run_domain("web1", WEB1, 4001, web1(device), opens=(group,))
    world, seen = look(host, STARTED._replace(device=device))
    assert (world.boot_id, world.namespaces) == (BOOT, (None, None))
    assert seen == (Presence.RUNNING, Presence.RUNNING, None, frozenset({4001}), (), False)


@pytest.mark.parametrize("number", [0, 1], ids=["group", "device"])
def test_either_node_shows_a_holder(host: Host, gpus: Gpus, number: int) -> None:
    device = gpus.device()
    gpus.set_type(device, 1152)
    host.process(4001, opens=(host.nodes(device)[number],))
    other = gpus.device("web2")
    gpus.set_type(other, 1152)
    host.process(4002, opens=host.nodes(other))
    assert look(host, STARTED._replace(device=device))[1].holders == {4001}


def test_what_cannot_be_seen_of_the_device_is_unknown(host: Host, gpus: Gpus) -> None:
    device = gpus.device()
    gpus.set_type(device, 1152)
    (host.place(device) / "iommu_group").unlink()
    (host.place(device) / "iommu_group").mkdir()
    assert look(host, STARTED._replace(device=device))[1].unknown == (
        f"the IOMMU group of {device}: invalid argument",
    )


def test_a_device_that_is_gone_has_no_holder(host: Host) -> None:
    assert look(host, STARTED)[1] == (Presence.GONE, Presence.RUNNING, None, frozenset(), (), False)


def unix(host: Host, text: str | bytes) -> None:
    head = b"Num       RefCount Protocol Flags    Type St Inode Path\n"
    data = text.encode() if isinstance(text, str) else text
    (host.proc / "net/unix").write_bytes(head + data)


def listeners(host: Host) -> tuple[str, ...] | None:
    return witnesses.look_around(host.paths).listeners


LISTENING = "0000000000000000: 00000002 00000000 00010000 0001 01 51966 "
CONNECTED = "0000000000000000: 00000003 00000000 00000000 0001 03 51967 "


def test_only_listening_sockets_count(host: Host) -> None:
    unix(host, f"{CONNECTED}{MONITOR}\n{LISTENING}{MONITOR}.x\n{LISTENING.rstrip()}\n")
    assert listeners(host) == (f"{MONITOR}.x",)


def test_names_that_any_user_can_bind_hide_and_break_nothing(host: Host) -> None:
    unix(
        host,
        LISTENING.encode()
        + b"@\xff\xfe with blanks \x1c\x85 and\nnewlines: x y z zzz 0001 01 5 q\n"
        + CONNECTED.encode()
        + b"@1\n"
        + LISTENING.encode()
        + MONITOR.encode()
        + b"\n",
    )
    paths = listeners(host)
    assert paths is not None
    assert paths[-1] == MONITOR
    assert len(paths) == 2


@pytest.mark.parametrize(
    ("name", "command", "is_anothers"),
    [
        ("qemu-system-x86", f"qemu-system-x86_64 -uuid {WEB1}", False),
        ("qemu-system-x86", f"qemu-system-x86_64 -uuid {WEB2}", True),
        ("libvirtd", "/usr/sbin/libvirtd", False),
        ("nc", "nc -lU monitor.sock", True),
    ],
)
def test_a_monitor_is_whose_process_holds_it(
    host: Host, name: str, command: str, is_anothers: bool
) -> None:
    unix(host, f"{LISTENING}{MONITOR}\n")
    host.process(5000, name, command=command, opens=("socket:[51966]",))
    assert look(host, STARTED)[1].is_anothers_monitor is is_anothers
    host.end(5000)
    assert not look(host, STARTED)[1].is_anothers_monitor, "nobody seems to hold it: undecided"


def test_sockets_that_cannot_be_read_are_no_empty_list(host: Host) -> None:
    (host.proc / "net/unix").unlink()
    assert listeners(host) is None


def test_a_pid_file_of_every_spelling_is_looked_at(host: Host) -> None:
    run = Path(host.paths.libvirt_run) / "qemu"
    for name, file in (("a&b", "a&amp;b"), ("a&b", "a&b"), ("<'\">", "&lt;&apos;&quot;&gt;")):
        path = host.write(run / f"{file}.pid", "4001\n")
        claim = new_claim(domain_name=name)
        assert look(host, claim)[1].unknown == ()
        path.unlink()
        path.mkdir()
        with_lock = look(host, claim)[1]
        assert (with_lock.pid_file_owner, with_lock.unknown) == (None, ())
        path.rmdir()
        path.symlink_to(path)
        assert look(host, claim)[1].unknown == (
            f"the pid file {run}/{name}.pid can't be read: too many levels of symbolic links",
        )
        path.unlink()


def test_a_spelling_too_long_for_a_file_is_no_doubt(host: Host) -> None:
    """Sixty ampersands are a fine name, and escaped they are longer than any file's."""
    name = "&" * 60
    host.write(Path(host.paths.libvirt_run) / f"qemu/{name}.pid", "4001\n")
    assert look(host, new_claim(domain_name=name))[1].unknown == ()


# --- real processes ---

LOCK_PID_FILE = """
import fcntl, os
held = open(sys.argv[1], "w")
fcntl.lockf(held, fcntl.LOCK_EX)
print(os.getpid(), file=held, flush=True)
print("locked", flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize(("uuid", "found"), [(WEB1, True), (WEB2, False)])
def test_the_lock_on_the_pid_file_names_its_true_owner(host: Host, uuid: str, found: bool) -> None:
    """Another domain may have the name, and so the file, by now: the command line tells."""
    path = host.write(Path(host.paths.libvirt_run) / "qemu/web1.pid", "999\n")
    paths = host.paths._replace(proc="/proc")
    world = witnesses.look_around(host.paths)
    with child(LOCK_PID_FILE, path, "-uuid", uuid) as process:
        seen = witnesses.look_at(paths, new_claim(), world, lambda _: frozenset())
        assert seen.pid_file_owner == (process.pid if found else None)
        assert seen.unknown == ()
    seen = witnesses.look_at(paths, new_claim(), world, lambda _: frozenset())
    assert seen.pid_file_owner is None, "no lock outlives its process"


def test_a_lock_without_a_visible_owner_is_a_doubt(host: Host) -> None:
    """The kernel names no owner of a lock by open file description, nor one it can't show us."""
    path = host.write(Path(host.paths.libvirt_run) / "qemu/web1.pid", "999\n")
    program = """
import fcntl, struct
held = open(sys.argv[1], "w")
fcntl.fcntl(held, 37, struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 0, 0, 0))  # F_OFD_SETLK
print("locked", flush=True)
sys.stdin.readline()
"""
    with child(program, path):
        seen = look(host, new_claim())[1]
    assert seen.pid_file_owner is None
    assert seen.unknown == (
        f"the pid file {path} can't be read: locked by a process that can't be seen from here",
    )


def test_a_monitor_whose_path_was_unlinked_still_listens(host: Host, tmp_path: Path) -> None:
    """A real socket, by a real row of the kernel's; an accepted connection's row isn't one."""
    directory = tmp_path / "domain-7-web1"
    directory.mkdir()
    monitor = str(directory / "monitor.sock")
    here = os.open(directory, os.O_PATH)
    server = socket.socket(socket.AF_UNIX)
    client = socket.socket(socket.AF_UNIX)
    try:
        bound = monitor if len(monitor) < 100 else f"/proc/self/fd/{here}/monitor.sock"
        server.bind(bound)
        server.listen()
        client.connect(bound)
        accepted, _ = server.accept()
        os.unlink(f"/proc/self/fd/{here}/monitor.sock")
        unix_rows = Path("/proc/net/unix").read_bytes().partition(b"\n")[2]
        unix(host, unix_rows)
        assert (listeners(host) or ()).count(bound) == 1
        claim = new_claim(qemu=Qemu(4001, 1, bound))
        assert witnesses.monitor_of(claim, witnesses.look_around(host.paths)) == bound
        server.close()
        unix(host, Path("/proc/net/unix").read_bytes().partition(b"\n")[2])
        assert bound not in (listeners(host) or ()), "the connection goes on, and is no listener"
        accepted.close()
    finally:
        for each in (server, client):
            each.close()
        os.close(here)


def presence(pid: int, start: int | None = None) -> Presence:
    if start is None:
        start = processes.read_stat("/proc", pid).start
    return processes.presence("/proc", Process(pid, start))


def wait_for_state(pid: int, state: str) -> None:
    end = time.monotonic() + 30
    while processes.read_stat("/proc", pid).state != state:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_this_process_runs() -> None:
    assert presence(os.getpid()) is Presence.RUNNING


@pytest.mark.parametrize("off", [-1, 1])
def test_another_start_time_is_another_process(off: int) -> None:
    start = processes.read_stat("/proc", os.getpid()).start
    assert presence(os.getpid(), start + off) is Presence.GONE


def test_a_child_that_died_is_gone_whether_its_parent_noticed_or_not() -> None:
    started = subprocess.Popen([sys.executable, "-ISc", "import sys; sys.stdin.read()"], stdin=-1)
    start = processes.read_stat("/proc", started.pid).start
    assert presence(started.pid, start) is Presence.RUNNING
    started.kill()
    wait_for_state(started.pid, "Z")
    assert presence(started.pid, start) is Presence.GONE
    started.wait()
    assert presence(started.pid, start) is Presence.GONE
    assert started.stdin is not None
    started.stdin.close()


def test_a_process_that_stands_still_runs() -> None:
    with child("print(flush=True); sys.stdin.read()") as process:
        os.kill(process.pid, signal.SIGSTOP)
        wait_for_state(process.pid, "T")
        assert presence(process.pid) is Presence.RUNNING


LEADER_DIES = """
import ctypes, os, threading, time
threading.Thread(target=time.sleep, args=(60,)).start()
print(flush=True)
ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[os.uname().machine], 0)  # exit, not _group
"""


def test_a_dead_leader_whose_thread_lives_runs() -> None:
    """Its files are open still; kill(2), waitpid(2) and psutil all call it a zombie."""
    with child(LEADER_DIES, WEB1) as process:
        wait_for_state(process.pid, "Z")
        start = processes.read_stat("/proc", process.pid).start
        assert presence(process.pid, start) is Presence.RUNNING
        assert Path(f"/proc/{process.pid}/cmdline").read_bytes() == b""
        assert processes.names_uuid("/proc", process.pid, WEB1), "its command line reads as empty"
    assert presence(process.pid, start) is Presence.GONE


@needs_root
def test_a_process_of_another_user_runs() -> None:
    with nobody():
        assert presence(os.getppid()) is Presence.RUNNING
        assert processes.presence("/proc", Process(1, 10**18)) is Presence.GONE


def test_a_name_cut_within_a_character() -> None:
    program = """
open("/proc/self/comm", "wb").write(b"\\xc3\\xa9" * 7 + b"\\xc3")
print(flush=True)
sys.stdin.read()
"""
    with child(program) as process:
        assert b"\xc3)" in Path(f"/proc/{process.pid}/stat").read_bytes()
        assert presence(process.pid) is Presence.RUNNING
        assert presence(process.pid, 1) is Presence.GONE


@pytest.mark.parametrize("text", ["", "4001", "4001 (x) S 1 2 3", "4001 (x) S" + " x" * 30])
def test_a_stat_that_cannot_be_understood_is_unknown(host: Host, text: str) -> None:
    host.write(host.proc / "4001/stat", text)
    assert processes.presence(host.paths.proc, Process(4001, 1)) is Presence.UNKNOWN


def test_a_process_is_told_by_its_command_line() -> None:
    with child("print(flush=True); sys.stdin.read()", "-uuid", WEB1) as process:
        assert processes.names_uuid("/proc", process.pid, WEB1)
        assert not processes.names_uuid("/proc", process.pid, WEB2)
    assert not processes.names_uuid("/proc", process.pid, WEB1)


# --- which daemon ---


def test_the_daemon_is_the_nearest_ancestor_of_that_name(host: Host) -> None:
    host.process(700, "libvirtd", start=700)
    host.process(900, "virtqemud", start=900, parent=700)
    host.process(901, "dispatch (x) S 1", parent=900)
    host.process(902, "sh", parent=901)
    proc = host.paths.proc
    assert processes.daemon_above(proc, 902) == Process(900, 900)
    assert processes.daemon_above(proc, 900) == Process(900, 900)
    assert processes.daemon_above(proc, 700) == Process(700, 700)
    assert processes.daemon_above(proc, LIBVIRTD) == Process(LIBVIRTD, 4242)


@pytest.mark.parametrize("name", ["libvirtd-x", "virtlogd", "virtnodedevd", "libvirt", "systemd"])
def test_other_daemons_are_none(host: Host, name: str) -> None:
    host.process(900, name)
    assert processes.daemon_above(host.paths.proc, 900) is None


def test_a_chain_that_breaks_off_or_never_ends_has_no_daemon(host: Host) -> None:
    host.process(900, "sh", parent=901)
    assert processes.daemon_above(host.paths.proc, 900) is None
    host.process(901, "sh", parent=900)
    assert processes.daemon_above(host.paths.proc, 900) is None
    assert processes.daemon_above(host.paths.proc, 0) is None
    assert processes.daemon_above("/nonexistent", 900) is None


def test_an_ancestor_of_an_odd_name_is_no_end_of_the_search(host: Host) -> None:
    host.process(901, "sh", parent=LIBVIRTD)
    path = host.proc / "901/stat"
    path.write_bytes(path.read_bytes().replace(b"(sh)", b"(\xff\xfe)\n)"))
    assert processes.daemon_above(host.paths.proc, 901) == Process(LIBVIRTD, 4242)


# --- this boot ---


def test_this_boot_and_these_namespaces_are_told_by_the_kernel() -> None:
    assert processes.boot_id("/proc") == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    ours = processes.namespaces("/proc")
    assert ours.pid == os.stat("/proc/self/ns/pid").st_ino
    assert ours.net == os.stat("/proc/self/ns/net").st_ino


def test_a_proc_that_does_not_tell_them(tmp_path: Path) -> None:
    assert processes.boot_id(str(tmp_path)) is None
    assert processes.namespaces(str(tmp_path)) == (None, None)
    (tmp_path / "self/ns").mkdir(parents=True)
    (tmp_path / "self/ns/pid").symlink_to("pid:[]")
    assert processes.namespaces(str(tmp_path)) == (None, None)


def test_the_daemon_of_the_host_is_the_oldest_that_runs(host: Host) -> None:
    """What it forks has its name, until it is something else."""
    proc = host.paths.proc
    host.process(700, "libvirtd", start=9000, parent=LIBVIRTD)
    host.process(600, "virtqemud", start=4000, state="Z")
    assert processes.running_daemon(proc) == Process(LIBVIRTD, 4242)
    host.end(LIBVIRTD)
    host.end(700)
    assert processes.running_daemon(proc) is None


@needs_root
def test_one_that_a_user_runs_is_not_the_hosts(host: Host) -> None:
    host.process(700, "libvirtd", start=10)
    os.chown(host.proc / "700", NOBODY, NOBODY)
    assert processes.running_daemon(host.paths.proc) == Process(LIBVIRTD, 4242)
