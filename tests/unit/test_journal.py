# SPDX-License-Identifier: LGPL-2.1-or-later
"""One line to the host's journal for each decision; and whatever is wrong there, no hook knows."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.unit.fake_libvirt import Connection, Domain
from tests.unit.host import BOOT, LIBVIRTD, WEB1, WEB2, Host, domain_xml, web1, web2
from tests.unit.mdev_host import P40, MdevHost
from tests.unit.support import new_claim
from tests.unit.test_lifecycle import start
from vgpu_libvirt import errors, events, pointing, sync
from vgpu_libvirt.claims import store
from vgpu_libvirt.claims.model import Namespaces, Phase
from vgpu_libvirt.devices.mdev_life import mdev_uuid
from vgpu_libvirt.events import Decision, Event

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.unit.desk import Desk
    from tests.unit.host import Result

OPERATIONS = ("prepare", "start", "started", "stopped", "release", "reconnect", "attach")


class Listener:
    """A socket that takes datagrams, as the journal's does, at a path that is short enough."""

    def __init__(self, path: Path, kind: int = socket.SOCK_DGRAM) -> None:
        self.path = path
        self._socket = socket.socket(socket.AF_UNIX, kind | socket.SOCK_NONBLOCK)
        self._socket.bind(str(path))

    def datagrams(self) -> list[bytes]:
        """All that came since."""
        found = []
        with contextlib.suppress(BlockingIOError):
            while True:
                found.append(self._socket.recv(1 << 20))
        return found

    def heard(self) -> list[dict[str, list[str]]]:
        """All that came since, as the journal reads it."""
        return [parsed(datagram) for datagram in self.datagrams()]

    def decisions(self) -> list[str]:
        return [each["VGPU_DECISION"][0] for each in self.heard()]

    def close(self) -> None:
        self._socket.close()


def parsed(datagram: bytes) -> dict[str, list[str]]:
    """The fields of a datagram in the journal's native protocol."""
    fields: dict[str, list[str]] = {}
    while datagram:
        head, _, datagram = datagram.partition(b"\n")
        name, equals, value = head.partition(b"=")
        if not equals:
            size = int.from_bytes(datagram[:8], "little")
            value, end, datagram = (
                datagram[8 : 8 + size],
                datagram[8 + size : 9 + size],
                datagram[9 + size :],
            )
            assert end == b"\n"
        fields.setdefault(name.decode(), []).append(value.decode())
    return fields


@pytest.fixture
def sockets() -> Iterator[Path]:
    """A directory whose path is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="vgpu-") as name:
        yield Path(name)


def listen(host: Host, journal: Path, syslog: Path) -> None:
    """Have the host's decisions go to these sockets."""
    host.paths = host.paths._replace(journal=str(journal), syslog=str(syslog))
    host.write_config()


@pytest.fixture
def journal(host: Host, sockets: Path) -> Iterator[Listener]:
    listener = Listener(sockets / "journal")
    listen(host, listener.path, sockets / "none")
    yield listener
    listener.close()


def test_a_whole_life(host: Host, journal: Listener) -> None:
    vf = host.gpu()[0]
    start(host, vf)
    claim = host.claim(vf)
    assert claim is not None
    host.end_domain("web1", 4001)
    host.hook("release", web1(vf))
    heard = journal.heard()
    assert [each["VGPU_DECISION"] for each in heard] == [["claimed"], ["configured"], ["released"]]
    for each in heard:
        assert each["VGPU_DOMAIN_UUID"] == [WEB1]
        assert each["VGPU_DOMAIN"] == ["web1"]
        assert each["VGPU_DEVICE"] == [vf]
        assert each["VGPU_ALIAS"] == ["ua-vgpu0"]
        assert each["VGPU_PROFILE"] == ["NVIDIA L40S-8Q"]
        assert each["VGPU_CLAIM_ID"] == [claim.claim_id]
        assert each["SYSLOG_IDENTIFIER"] == ["vgpu-libvirt"]
        assert each["PRIORITY"] == ["6"]
        assert each["VGPU_EVIDENCE"][0] in each["MESSAGE"][0]
    assert heard[1]["VGPU_EVIDENCE"] == ["it reads back type 1152"]
    assert heard[2]["MESSAGE"] == [
        f"released {vf} for 'ua-vgpu0' of domain 'web1' ({WEB1}): nothing shows domain 'web1' "
        f"({WEB1}) alive"
    ]


def test_a_refusal_has_its_kind_and_the_sentence_that_the_user_saw(
    host: Host, journal: Listener
) -> None:
    vf = host.gpu()[0]
    start(host, vf)
    journal.heard()
    sentence = host.hook("prepare", web2(vf)).stderr.removeprefix("vgpu-libvirt: ").rstrip()
    (refused,) = journal.heard()
    assert refused["VGPU_DECISION"] == ["refused"]
    assert refused["VGPU_REASON"] == ["claimed"]
    assert refused["VGPU_EVIDENCE"] == [sentence]
    assert refused["VGPU_DOMAIN_UUID"] == [WEB2]
    assert refused["VGPU_DEVICE"] == [vf]
    assert refused["PRIORITY"] == ["4"]


def test_what_a_refused_start_had_claimed_is_told_to_be_released(
    host: Host, journal: Listener
) -> None:
    first, second, *_ = host.gpu()
    host.set_type(second, 1152)
    devices = {"ua-a": first, "ua-b": second}
    xml = domain_xml(requests=dict.fromkeys(devices, "NVIDIA L40S-8Q"), hostdevs=devices)
    assert host.hook("prepare", xml).status == 1
    heard = journal.heard()
    assert [each["VGPU_DECISION"][0] for each in heard] == [
        *("claimed", "configured", "released", "refused")
    ]
    assert heard[-1]["VGPU_DEVICE"] == [first, second]
    assert heard[-1]["VGPU_REASON"] == ["foreign"]


def test_a_bystander_that_would_do_harm(host: Host, journal: Listener) -> None:
    vf = host.gpu()[0]
    host.hook("prepare", web2(vf))
    journal.heard()
    host.hook("prepare", domain_xml(hostdevs={"ua-x": vf}))
    (refused,) = journal.heard()
    assert refused["VGPU_REASON"] == ["hostdev"]
    assert f"belongs to domain 'web2' ({WEB2})" in refused["VGPU_EVIDENCE"][0]


def test_what_cannot_be_given_back_is_told_once_with_its_evidence(
    host: Host, journal: Listener
) -> None:
    vf = host.gpu()[0]
    start(host, vf)
    journal.heard()
    host.hook("release", web1(vf))
    (pending,) = journal.heard()
    assert pending["VGPU_DECISION"] == ["release-pending"]
    assert "libvirt has it running as process 4001" in pending["VGPU_EVIDENCE"][0]
    host.hook("release", web1(vf))
    assert journal.heard() == []


def test_what_was_lost_is_adopted(host: Host, journal: Listener) -> None:
    vf = host.gpu()[0]
    start(host, vf)
    (host.state / f"claims/{vf}.json").unlink()
    journal.heard()
    host.hook("reconnect", web1(vf))
    (adopted,) = journal.heard()
    claim = host.claim(vf)
    assert claim is not None
    assert adopted["VGPU_DECISION"] == ["adopted"]
    assert adopted["VGPU_CLAIM_ID"] == [claim.claim_id]


def test_a_foreign_type_that_is_reset(host: Host, journal: Listener) -> None:
    vf = host.gpu()[0]
    host.set_type(vf, 1152)
    host.set_policy(foreign="reset")
    assert host.hook("prepare", web1(vf, "NVIDIA L40S-4Q")).status == 0
    assert journal.decisions() == ["foreign-reset", "released", "claimed", "configured"]


def test_a_sync_tells_what_it_gives_back_and_what_it_doubts_and_not_who_lives(
    host: Host, journal: Listener
) -> None:
    dead, alive, doubtful, *_ = host.gpu()
    start(host, dead)
    host.hook("prepare", web2(alive))
    host.run_domain("web2", WEB2, 4002, web2(alive), opens=(host.nodes(alive)[0],))
    host.hook("prepare", web1(doubtful, name="web3", uuid=WEB1.replace("1", "3")))
    host.end_domain("web1", 4001)
    journal.heard()
    sync.reconcile(host.context(), time.monotonic() + 5)
    told = {each["VGPU_DEVICE"][0]: each["VGPU_DECISION"][0] for each in journal.heard()}
    assert told == {dead: "released", doubtful: "kept"}


def test_a_definition_that_is_pointed_elsewhere(host: Host, journal: Listener) -> None:
    first, second, *_ = host.gpu()
    start(host, first)
    journal.heard()
    domain = Domain(
        domain_xml("web2", WEB2, {"ua-vgpu0": "NVIDIA L40S-8Q"}, {"ua-vgpu0": first}, number=None)
    )
    pointing.point(host.config, Connection(domain), dry_run=True)
    assert journal.heard() == []
    pointing.point(host.config, Connection(domain))
    (pointed,) = journal.heard()
    assert pointed["VGPU_DECISION"] == ["repointed"]
    assert (pointed["VGPU_DOMAIN_UUID"], pointed["VGPU_DEVICE"]) == ([WEB2], [second])
    assert f"it pointed at {first}" in pointed["VGPU_EVIDENCE"][0]


def test_and_at_a_mediated_device_which_has_its_own_name(host: Host, journal: Listener) -> None:
    MdevHost(host.root, host.sysfs).parent("0000:08:00.0", P40)
    domain = Domain(domain_xml("web2", WEB2, {"ua-vgpu0": "GRID P40-4C"}, number=None))
    pointing.point(host.config, Connection(domain))
    (pointed,) = journal.heard()
    assert pointed["VGPU_DEVICE"] == [mdev_uuid(WEB2, "ua-vgpu0")]


def test_what_the_command_line_starts_is_reserved_first(desk: Desk, sockets: Path) -> None:
    journal = Listener(sockets / "journal")
    listen(desk.host, journal.path, sockets / "none")
    desk.define(domain_xml(requests={"ua-vgpu0": "NVIDIA L40S-8Q"}, number=None))
    desk.do("start", "web1")
    assert journal.decisions() == ["reserved", "repointed", "claimed", "configured"]
    journal.close()


def test_a_reservation_that_nobody_took_lapses(desk: Desk, sockets: Path) -> None:
    journal = Listener(sockets / "journal")
    listen(desk.host, journal.path, sockets / "none")
    host = desk.host
    claim = new_claim(phase=Phase.RESERVED, boot_id=BOOT, daemon=None)
    store.create(host.paths.state, claim._replace(namespaces=Namespaces(None, None)))
    host.set_policy(reserve_timeout=0.001)
    sync.reconcile(host.context(), time.monotonic() + 5)
    assert journal.decisions() == ["lapsed"]
    journal.close()


def test_a_start_that_the_command_line_refuses(desk: Desk, sockets: Path) -> None:
    journal = Listener(sockets / "journal")
    listen(desk.host, journal.path, sockets / "none")
    for vf in desk.vfs:
        desk.host.set_type(vf, 1152)
    desk.define(domain_xml(requests={"ua-vgpu0": "NVIDIA L40S-8Q"}, number=None))
    sentence = desk.fails("start", "web1").rstrip()
    (refused,) = journal.heard()
    assert refused["VGPU_EVIDENCE"] == [sentence]
    assert refused["VGPU_REASON"] == ["no-room"]
    journal.close()


# --- who listens ---


def test_without_a_journal_it_goes_to_syslog(host: Host, sockets: Path) -> None:
    syslog = Listener(sockets / "log")
    listen(host, sockets / "none", syslog.path)
    vf = host.gpu()[0]
    host.hook("prepare", web1(vf))
    claim = host.claim(vf)
    assert claim is not None
    assert syslog.datagrams()[0].decode() == (
        f"<30>vgpu-libvirt[{os.getpid()}]: claimed {vf} for 'ua-vgpu0' of domain 'web1' ({WEB1}): "
        f"nobody had it [decision=claimed domain_uuid={WEB1} device={vf} "
        f"claim_id={claim.claim_id}]"
    )
    syslog.close()


def test_with_a_journal_nothing_goes_to_syslog(
    host: Host, journal: Listener, sockets: Path
) -> None:
    syslog = Listener(sockets / "log")
    listen(host, journal.path, syslog.path)
    host.hook("prepare", web1(host.gpu()[0]))
    assert len(journal.heard()) == 2
    assert syslog.datagrams() == []
    syslog.close()


def test_where_neither_is_nobody_says_more_than_ever(desk: Desk, sockets: Path) -> None:
    listen(desk.host, sockets / "none", sockets / "none")
    vf = desk.vfs[0]
    assert desk.host.hook("prepare", web1(vf)) == (0, "", "")
    desk.host.run_domain("web1", WEB1, 4001, web1(vf))
    desk.host.end_domain("web1", 4001)
    desk.host.end(LIBVIRTD)
    assert desk.do("release", vf) == (
        f"{vf} was given back: domain 'web1' ({WEB1}) is dead: nothing shows domain 'web1' "
        f"({WEB1}) alive.\n"
    )


@pytest.mark.promise(9)
@pytest.mark.parametrize(
    "command", ["list", "profiles", "status", "metrics", "sync --dry-run", "release --dry-run VF"]
)
def test_who_only_looks_tells_nothing(host: Host, journal: Listener, command: str) -> None:
    from click.testing import CliRunner

    from vgpu_libvirt.cli.main import main

    vf = host.gpu()[0]
    start(host, vf)
    host.end_domain("web1", 4001)
    host.end(LIBVIRTD)  # else libvirt would be asked
    journal.heard()
    before = host.tree()
    arguments = command.replace("VF", vf).split()
    assert CliRunner().invoke(main, arguments, env=host.environment).exit_code == 0
    assert journal.heard() == []
    assert host.tree() == before


# --- whatever is wrong there ---


def absent(_path: Path) -> None:
    pass


def dead(path: Path) -> None:
    Listener(path).close()


def plain_file(path: Path) -> None:
    path.write_text("")


def directory(path: Path) -> None:
    path.mkdir()


def link_to_nothing(path: Path) -> None:
    path.symlink_to("nothing")


def stream(path: Path) -> Listener:
    return Listener(path, socket.SOCK_STREAM)


def full(path: Path) -> Listener:
    """One whose reader stands still."""
    listener = Listener(path)
    sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
    with sender, contextlib.suppress(BlockingIOError):
        while True:
            sender.sendto(b"x", str(path))
    return listener


def a_life(host: Host) -> list[Result]:
    """What hooks answer in two lives, one of which is refused, and to a bystander that harms."""
    vf = host.gpu()[0]
    documents = [web1(vf), web2(vf), domain_xml(hostdevs={"ua-x": vf})]
    answers = [host.hook("prepare", web1(vf))]
    host.run_domain("web1", WEB1, 4001, web1(vf))
    answers += [host.hook(operation, xml) for operation in OPERATIONS for xml in documents]
    host.end_domain("web1", 4001)
    answers += [host.hook("release", web1(vf)), host.daemon_hook()]
    assert host.claim(vf) is None
    return answers


@pytest.mark.promise(6, 7)
@pytest.mark.parametrize(
    "spoil", [absent, dead, plain_file, directory, link_to_nothing, stream, full]
)
@pytest.mark.parametrize("where", ["journal", "syslog"])
def test_no_hook_answers_otherwise_whatever_is_wrong_with_the_socket(
    tmp_path: Path, sockets: Path, spoil: Callable[[Path], Listener | None], where: str
) -> None:
    well, ill = Host(tmp_path / "well"), Host(tmp_path / "ill")
    listener = Listener(sockets / "well")
    listen(well, listener.path, sockets / "none")
    broken = spoil(sockets / "ill")
    if where == "journal":
        listen(ill, sockets / "ill", sockets / "none")
    else:
        listen(ill, sockets / "none", sockets / "ill")
    began = time.monotonic()
    answers = a_life(ill)
    assert time.monotonic() - began < 20  # none waited for a reader
    expected = [
        answer._replace(stderr=answer.stderr.replace("/well/", "/ill/")) for answer in a_life(well)
    ]
    assert answers == expected
    assert {answer.status for answer in answers} == {0, 1, 3}
    assert listener.datagrams()
    for each in (listener, broken):
        if each:
            each.close()


@pytest.mark.promise(6, 7)
def test_nor_where_the_path_is_longer_than_any_sockets(host: Host) -> None:
    listen(host, Path("/" + "x" * 200), Path("/" + "y" * 200))
    assert host.hook("prepare", web1(host.gpu()[0])) == (0, "", "")


# --- what it looks like ---


def test_a_value_of_several_lines_stays_whole() -> None:
    event = Event(Decision.REFUSED, WEB1, "web1", evidence="no\nMESSAGE=forged\n")
    fields = parsed(events.for_journal(event))
    assert fields["VGPU_EVIDENCE"] == ["no\nMESSAGE=forged\n"]
    assert fields["MESSAGE"] == [f"refused for domain 'web1' ({WEB1}): no MESSAGE=forged"]
    assert events.for_syslog(event, 7).count(b"\n") == 0


@pytest.mark.parametrize("text", ["x" * 1_000_000, "\udcff" * 100_000, "\0\x1b[31m", "€" * 9999])
def test_any_text_fits(host: Host, journal: Listener, text: str) -> None:
    from vgpu_libvirt import journal as teller

    name = text[:50_000]
    teller.tell(host.paths, Event(Decision.REFUSED, WEB1, name, name, (name,), evidence=text))
    (datagram,) = journal.datagrams()
    assert b"VGPU_DECISION=refused\n" in datagram
    assert len(datagram) < 64_000


def test_a_refusal_is_of_the_kind_of_its_deepest_cause() -> None:
    def chained(*chain: Exception) -> Exception:
        for error, cause in itertools.pairwise(chain):
            error.__cause__ = cause
        return chain[0]

    refused, owned = errors.RefusedError("a"), errors.OwnedError("b")
    assert errors.kind(refused) == "other"
    assert errors.kind(chained(errors.RefusedError("a"), owned)) == "claimed"
    assert errors.kind(chained(errors.OwnedError("a"), errors.DeviceError("b"))) == "device"
    assert errors.kind(chained(errors.StoreError("a"), OSError("b"))) == "store"
    assert errors.kind(ZeroDivisionError("a")) == "internal"
