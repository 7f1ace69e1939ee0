# SPDX-License-Identifier: LGPL-2.1-or-later
"""Writers of one definition that meet, or are killed: it stays right and whole.

Each writer is stopped before and after each of its calls to libvirt. There another one comes, of
ours or not, or it is killed.
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import libvirt
import pytest
from lxml import etree

from tests.unit.fake_libvirt import Connection, Domain
from tests.unit.host import WEB1, Host, domain_xml, hostdev_xml, web1, web2
from tests.unit.test_lifecycle import start
from vgpu_libvirt import edits, pointing
from vgpu_libvirt.claims import locks
from vgpu_libvirt.cli import main as command_line
from vgpu_libvirt.domain.read import parse_domain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CALLS = ("XMLDesc", "setMetadata", "attachDeviceFlags", "detachDeviceFlags", "createWithFlags")
WRITERS = {
    "sync": ["sync"],
    "start": ["start", "web1"],
    "attach": ["attach", "web1", "--config", "--profile", "L40S-8Q"],
    "detach": ["detach", "web1", "--config", "--alias", "ua-vgpu0"],
    "fix-xml": ["fix-xml", "web1", "--profile", "L40S-8Q"],
}
ROM = '<rom bar="off"/>'  # of the hostdevs, to be kept
FOREIGN = "<note>kept</note>"
REASONS = ("runs already", "asks for no vGPU", "has no vGPU")
WAIT = 20.0  # seconds that nothing here should take


class StoppedDomain(Domain):
    """A domain that calls GATE around each call that matters; its definition is kept in FILE."""

    gate: Callable[[str], None] = staticmethod(lambda _where: None)
    file: Path | None = None

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name not in CALLS:
            return found

        def gated(*arguments: object) -> object:
            self.gate(f"before {name}")
            answer = found(*arguments)
            if self.file:
                self.file.write_bytes(etree.tostring(self.document))
            self.gate(f"after {name}")
            return answer

        return gated


class Desk:
    """A host with web1, whose hostdev points at a device that web2 has taken."""

    def __init__(
        self, host: Host, monkeypatch: pytest.MonkeyPatch, has_nameless: bool = True
    ) -> None:
        self.host, self.has_nameless = host, has_nameless
        self.vfs = host.gpu(vfs=8)
        assert host.hook("prepare", web2(self.vfs[0])).status == 0
        asked = hostdev_xml("ua-vgpu0", self.vfs[0]).replace("<alias", "<rom bar='off'/><alias")
        nameless = hostdev_xml("x", self.vfs[3]).replace("<alias name='x'/>", "<rom bar='off'/>")
        nameless = nameless.replace("bus='0x05'", "bus='0x06'")
        document = domain_xml(
            requests={"ua-vgpu0": "NVIDIA L40S-8Q"},
            hostdevs=asked + (nameless if has_nameless else ""),
            number=None,
        ).replace("</metadata>", f"<other xmlns='urn:other'>{FOREIGN}</other></metadata>")
        self.domain = StoppedDomain(document)
        self.domain.hook = host.hook
        self.connection = Connection(self.domain, Domain(web2(self.vfs[0])))
        self.connection.domains[1].active = True
        monkeypatch.setattr(libvirt, "open", lambda _uri: self.connection)
        for name, value in host.environment.items():
            monkeypatch.setenv(name, value)

    def write(self, writer: str, may_tell: str | None = None) -> None:
        """Be WRITER. Raises what it fails with, click's exception or our own."""
        if writer == "sync":  # the rest of it is no writer of definitions
            outcome = pointing.point(self.host.config, self.connection)
            told = [*outcome.problems, *outcome.notes]
            assert not [problem for problem in told if not may_tell or may_tell not in problem]
        else:
            command_line.main.main(WRITERS[writer], "virt-vgpu", standalone_mode=False)

    def parsed(self) -> Any:
        return parse_domain(etree.tostring(self.domain.document, encoding="unicode"))

    def check_whole(self, *writers: str, any_place: bool = False) -> None:
        """All that was asked for has one hostdev, with what is special about it; none is left over.

        WRITERS are those that did their work. ANY_PLACE: somebody else may have their addresses in
        the guest.
        """
        asked = [request.alias for request in self.parsed().requests]
        aliases = [hostdev.alias for hostdev in self.parsed().hostdevs]
        assert sorted(filter(None, aliases)) == sorted(asked)
        assert len(set(asked)) == len(asked)
        assert aliases.count(None) == (self.has_nameless and "fix-xml" not in writers)
        addresses = [hostdev.address for hostdev in self.parsed().hostdevs]
        assert len(set(addresses)) == len(addresses)
        content = self.domain.content().decode()
        assert FOREIGN in content
        assert not list((self.host.state / "edits").glob("*.json"))
        if "ua-vgpu0" in asked:
            assert str(self.parsed().hostdev("ua-vgpu0").address) != self.vfs[0]
        if any_place:
            assert all(ROM in text for text in self.hostdevs())
            return
        other = [text for text in self.hostdevs() if 'bus="0x06"' in text]
        assert [ROM in text for text in other] == [True] * self.has_nameless
        first = [text for text in self.hostdevs() if 'bus="0x05"' in text]
        if "detach" in writers:
            assert not first
        else:
            assert len(first) == 1
            assert ROM in first[0]
            assert 'name="ua-vgpu0"' in first[0]

    def hostdevs(self) -> list[str]:
        found = self.domain.document.findall("devices/hostdev")
        return [etree.tostring(hostdev, encoding="unicode") for hostdev in found]


class Writer:
    """A writer in a thread of its own, which stops at its call with NUMBER."""

    def __init__(self, desk: Desk, name: str, number: int | None = None) -> None:
        self.desk, self.name, self.number = desk, name, number
        self.failure: BaseException | None = None
        self.passed: list[str] = []  # the calls so far
        self.halted = threading.Event()  # stopped, waiting for a lock, or at its end
        self.resume = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            self.desk.write(self.name)
        except BaseException as error:
            self.failure = error
        finally:
            self.halted.set()

    def start(self) -> None:
        """Run until it is stopped, waits, or ends."""
        self.thread.start()
        assert self.halted.wait(WAIT), self.name

    def gate(self, where: str) -> None:
        self.passed.append(where)
        if len(self.passed) - 1 == self.number:
            self.halted.set()
            assert self.resume.wait(WAIT)

    def finish(self) -> None:
        self.resume.set()
        self.thread.join(WAIT)
        assert not self.thread.is_alive(), self.name


@pytest.fixture
def memory() -> Iterator[Path]:
    """A directory for many hosts, all of which fsync."""
    in_memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="vgpu-libvirt-", dir=in_memory) as directory:
        yield Path(directory)


@pytest.fixture
def desk(host: Host, monkeypatch: pytest.MonkeyPatch) -> Desk:
    return Desk(host, monkeypatch)


def calls(desk: Desk, writer: str) -> int:
    """How many calls WRITER makes when nobody comes between."""
    first = Writer(desk, writer)
    desk.domain.gate = first.gate
    first.start()
    first.finish()
    assert first.failure is None
    return len(first.passed)


@pytest.mark.parametrize("second", WRITERS)
@pytest.mark.parametrize("first", WRITERS)
def test_two_that_meet(
    memory: Path, monkeypatch: pytest.MonkeyPatch, first: str, second: str
) -> None:
    # A domain with a hostdev that nobody asked for, which fix-xml would mend, isn't started.
    has_nameless = "start" not in (first, second)
    total = calls(Desk(Host(memory / "alone"), monkeypatch, has_nameless), first)
    waited = 0
    real_sleep = time.sleep
    for number in range(total):
        desk = Desk(Host(memory / str(number)), monkeypatch, has_nameless)
        one, other = Writer(desk, first, number), Writer(desk, second)
        writers = {one.thread: one, other.thread: other}
        desk.domain.gate = lambda where, writers=writers: (
            writers[threading.current_thread()].gate(where)
            if threading.current_thread() in writers
            else None
        )

        def sleep(seconds: float, other: Writer = other) -> None:
            if threading.current_thread() is other.thread:
                other.halted.set()
            real_sleep(seconds)

        with monkeypatch.context() as patch:
            patch.setattr(locks.time, "sleep", sleep)
            one.start()
            assert len(one.passed) == number + 1
            other.start()
            waited += other.thread.is_alive()
            one.finish()
            other.finish()
        where = f"{second} at {one.passed[number]}, call {number} of {first}"
        done = [writer.name for writer in (one, other) if not writer.failure]
        for failure in filter(None, (one.failure, other.failure)):
            assert any(reason in str(failure) for reason in REASONS), f"{where}: {failure!r}"
        desk.domain.gate = lambda _where: None
        desk.write("sync")
        try:
            desk.check_whole(*done)
        except AssertionError as error:
            raise AssertionError(f"{where}: {etree.tostring(desk.domain.document)!r}") from error
    assert waited


@pytest.mark.promise(8)
def test_no_hook_waits_for_who_writes_a_definition(host: Host) -> None:
    """So libvirt may be called while its lock is held."""
    vf = host.gpu()[0]
    host.set_policy(lock_timeout=0.01)
    with edits.alone(host.config, WEB1):
        start(host, vf)
        host.end_domain("web1", 4001)
        for operation in ("stopped", "release", "prepare", "start"):
            assert host.hook(operation, web1(vf)) == (0, "", "")
        assert "lock" not in host.daemon_hook().stderr


def at_call(desk: Desk, number: int, act: Callable[[], None]) -> None:
    """Let somebody ACT at the call with NUMBER."""
    passed = []

    def gate(where: str) -> None:
        passed.append(where)
        if len(passed) - 1 == number:
            act()

    desk.domain.gate = gate


def redefine(desk: Desk) -> None:
    """What `virsh edit` does to other parts: reads, changes, defines."""
    document = desk.domain.document
    etree.SubElement(document, "description").text = "theirs"
    other = document.find("metadata/{urn:other}other")
    assert other is not None
    etree.SubElement(other, "{urn:other}more").text = "theirs"


def plug(desk: Desk) -> None:
    """`virsh attach-device --config`; libvirt gives it the first address in the guest."""
    taken = [each.get("bus") for each in desk.domain.document.iterfind("devices/*/address")]
    bus = next(bus for bus in ("0x05", "0x07") if bus not in taken)
    devices = desk.domain.document.find("devices")
    assert devices is not None
    address = f"<address type='pci' domain='0x0000' bus='{bus}' slot='0x00' function='0x0'/>"
    devices.append(etree.fromstring(f"<interface type='user'>{address}</interface>"))


@pytest.mark.parametrize("what", [redefine, plug])
@pytest.mark.parametrize("writer", ["sync", "detach", "fix-xml"])
def test_nothing_of_an_editor_who_knows_no_lock_is_lost(
    memory: Path, monkeypatch: pytest.MonkeyPatch, writer: str, what: Callable[[Desk], None]
) -> None:
    for number in range(calls(Desk(Host(memory / "alone"), monkeypatch), writer)):
        desk = Desk(Host(memory / str(number)), monkeypatch)
        at_call(desk, number, lambda desk=desk: what(desk))  # type: ignore[misc]
        desk.write(writer, may_tell="has another address in the guest now")
        desk.domain.gate = lambda _where: None
        desk.write("sync")
        desk.check_whole(writer, any_place=what is plug)
        content = desk.domain.content().decode()
        if what is plug:
            assert content.count("<interface") == 1
        else:
            assert content.count("theirs") == 2


def test_a_hostdev_whose_address_in_the_guest_was_taken_gets_another(desk: Desk) -> None:
    desk.domain.gate = lambda where: plug(desk) if where == "after detachDeviceFlags" else None
    (told,) = pointing.point(desk.host.config, desk.connection).notes
    assert told == (
        f"domain 'web1' ({WEB1}): a hostdev has another address in the guest now, since it can't "
        f"be attached at its own any more: domain 'web1' ({WEB1}): the hostdev can't be attached: "
        "Attempted double use of PCI Address"
    )
    (hostdev,) = [text for text in desk.hostdevs() if "ua-vgpu0" in text]
    assert ROM in hostdev
    assert "bus='0x05'" not in hostdev.replace('"', "'")


def test_the_verb_tells_it_though_its_last_look_sees_nothing_of_it(
    desk: Desk, capsys: pytest.CaptureFixture[str]
) -> None:
    desk.domain.gate = lambda where: plug(desk) if where == "after detachDeviceFlags" else None
    command_line.main.main(["sync", "--json"], "virt-vgpu", standalone_mode=False)
    problems = json.loads(capsys.readouterr().out)["problems"]
    assert [each for each in problems if "has another address in the guest now" in each]


def test_a_stale_copy_that_is_defined_meanwhile_is_pointed_right_by_the_next_sync(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An editor who waits too long takes our change back. `virsh edit` asks before it does."""
    for number in range(calls(Desk(Host(memory / "alone"), monkeypatch), "sync")):
        desk = Desk(Host(memory / str(number)), monkeypatch)
        stale = etree.tostring(desk.domain.document)

        def define(desk: Desk = desk, stale: bytes = stale) -> None:
            desk.domain.document = etree.fromstring(stale)
            redefine(desk)

        at_call(desk, number, define)
        pointing.point(desk.host.config, desk.connection)
        desk.domain.gate = lambda _where: None
        desk.write("sync")
        desk.check_whole()
        assert desk.domain.content().decode().count("theirs") == 2


def test_a_hostdev_that_the_user_removes_meanwhile_stays_away(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(calls(Desk(Host(memory / "alone"), monkeypatch), "sync")):
        desk = Desk(Host(memory / str(number)), monkeypatch)

        def remove(desk: Desk = desk) -> None:
            request = desk.domain.document.find("metadata/{urn:vgpu-libvirt:domain:1}devices")
            assert request is not None
            metadata = request.getparent()
            assert metadata is not None
            metadata.remove(request)
            for hostdev in desk.domain.document.findall("devices/hostdev[alias]"):
                parent = hostdev.getparent()
                assert parent is not None
                parent.remove(hostdev)

        at_call(desk, number, remove)
        pointing.point(desk.host.config, desk.connection)
        desk.domain.gate = lambda _where: None
        pointing.point(desk.host.config, desk.connection)
        assert not [text for text in desk.hostdevs() if "ua-vgpu0" in text]
        assert not list((desk.host.state / "edits").glob("*.json"))


@pytest.mark.parametrize("writer", WRITERS)
def test_killed_at_each_call_it_is_finished_or_was_never_begun(
    memory: Path, monkeypatch: pytest.MonkeyPatch, writer: str
) -> None:
    has_nameless = writer != "start"
    total = calls(Desk(Host(memory / "alone"), monkeypatch, has_nameless), writer)
    done = 0
    for number in range(total):
        desk = Desk(Host(memory / str(number)), monkeypatch, has_nameless)
        desk.domain.file = memory / f"{number}.xml"
        desk.domain.file.write_bytes(etree.tostring(desk.domain.document))
        pid = os.fork()
        if not pid:
            at_call(desk, number, lambda: os.kill(os.getpid(), signal.SIGKILL))
            desk.write(writer)
            os._exit(0)  # not reached
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
        desk.domain.document = etree.fromstring(desk.domain.file.read_bytes())
        desk.write("sync")
        asked = {request.alias for request in desk.parsed().requests}
        is_done = {"detach": not asked, "fix-xml": len(asked) > 1}.get(writer, False)
        desk.check_whole(*[writer] * is_done)
        done += is_done
    assert writer not in ("detach", "fix-xml") or 0 < done < total
