# SPDX-License-Identifier: LGPL-2.1-or-later
"""`release --force`: for owners of whom we can't know that they are dead, never for the living."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.unit.gpus import of_mdevs, of_vfs
from tests.unit.host import LIBVIRTD, WEB1, WEB2, domain_xml, web1
from tests.unit.test_lifecycle import start
from tests.unit.test_sync import run_verb
from vgpu_libvirt import libvirt_api
from vgpu_libvirt.claims.liveness import Answer
from vgpu_libvirt.claims.model import Namespaces
from vgpu_libvirt.devices import backend

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.unit.gpus import Gpus


class Doubtful:
    """A host where web1 was being started when something went wrong, and libvirt is silent."""

    def __init__(self, gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gpus = gpus
        self.host = host = gpus.host
        self.patch = monkeypatch
        self.device = gpus.device()
        silent = Answer(frozenset(), frozenset(), "libvirt runs, but hasn't answered for 10 s")
        monkeypatch.setattr(libvirt_api, "ask", lambda *_: silent)
        assert host.hook("prepare", web1(self.device)) == (0, "", "")

    def release(self, *options: str) -> tuple[int, str]:
        return run_verb(self.host, self.patch, "release", self.device, *options)

    def kept(self, *options: str) -> str:
        """Release, which must fail in one line and not touch the device."""
        status, text = self.release(*options)
        assert (status, text.count("\n")) == (1, 1), text
        assert self.gpus.type_of(self.device) == 1152
        assert self.host.claim(self.device) is not None
        return text

    def change_claim(self, **changes: object) -> None:
        path = self.host.state / f"claims/{self.device}.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.fixture
def doubtful(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> Doubtful:
    return Doubtful(gpus, monkeypatch)


@pytest.mark.promise(4)
def test_only_by_force_and_with_the_evidence(doubtful: Doubtful) -> None:
    evidence = (
        f"domain 'web1' ({WEB1}) is not provably dead: the daemon that started it, process "
        f"{LIBVIRTD}, still runs; libvirt runs, but hasn't answered for 10 s"
    )
    assert doubtful.kept() == (
        f"virt-vgpu: error: {doubtful.device} is kept: {evidence}; if you know that it is gone, "
        "use --force\n"
    )
    status, text = doubtful.release("--force")
    assert (status, text) == (0, f"{doubtful.device} was given back: {evidence}.\n")
    assert (doubtful.host.claim(doubtful.device), doubtful.gpus.type_of(doubtful.device)) == (
        None,
        0,
    )


@pytest.mark.promise(9)
def test_a_dry_run(doubtful: Doubtful) -> None:
    before = doubtful.host.tree()
    status, text = doubtful.release("--force", "--dry-run")
    assert (status, "would be given back: domain 'web1'" in text) == (0, True)
    assert doubtful.host.tree() == before


@pytest.mark.promise(1)
def test_never_from_the_living(doubtful: Doubtful) -> None:
    start(doubtful.host, doubtful.device)
    text = doubtful.kept("--force")
    assert "is alive: libvirt has it running as process 4001" in text
    assert "not even --force takes a device from the living" in text
    assert "--force" not in doubtful.kept()


@pytest.mark.promise(1)
def test_not_where_libvirt_says_it_is_active(doubtful: Doubtful) -> None:
    active = Answer(frozenset([WEB1]), frozenset())
    doubtful.patch.setattr(libvirt_api, "ask", lambda *_: active)
    assert "libvirt says that it is active" in doubtful.kept("--force")


def dies(doubtful: Doubtful) -> None:
    """QEMU died, but its libvirt is silent: not provably dead."""
    start(doubtful.host, doubtful.device)
    doubtful.host.end_domain("web1", 4001)


def opened(doubtful: Doubtful) -> None:
    doubtful.host.process(6000, "strange", opens=(doubtful.host.nodes(doubtful.device)[1],))


def unreadable_process(doubtful: Doubtful) -> None:
    doubtful.host.process(6000)
    directory = doubtful.host.proc / "6000/fd"
    for file in directory.iterdir():
        file.unlink()
    directory.rmdir()
    directory.write_text("")


def unknown_nodes(doubtful: Doubtful) -> None:
    group = doubtful.host.place(doubtful.device) / "iommu_group"
    group.unlink()
    group.mkdir()


def unreadable_status(doubtful: Doubtful) -> None:
    doubtful.host.write(doubtful.host.status_file("web9"), "<domstatus")


def another_domain(doubtful: Doubtful) -> None:
    doubtful.host.run_domain(
        "web2", WEB2, 4002, domain_xml("web2", WEB2, hostdevs={"ua-x": doubtful.device}), number=8
    )


def another_namespace(doubtful: Doubtful) -> None:
    doubtful.change_claim(namespaces=Namespaces(1, None)._asdict())
    for name, number in (("pid", 2), ("net", 3)):
        link = doubtful.host.proc / f"self/ns/{name}"
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(f"{name}:[{number}]")


@pytest.mark.promise(1, 4, 5)
@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (opened, "is alive: {device} is held open by process 6000"),
        (unreadable_process, "and who has it open can't be told from here"),
        (unknown_nodes, "whether {device} is in use can't be told"),
        (another_domain, f"and the running domain 'web2' ({WEB2}) has the device"),
        (another_namespace, "and who has it open can't be told from here"),
    ],
)
@pytest.mark.parametrize("before", [lambda _: None, dies])
def test_every_other_guard_stands(
    doubtful: Doubtful,
    before: Callable[[Doubtful], None],
    spoil: Callable[[Doubtful], None],
    reason: str,
) -> None:
    before(doubtful)
    spoil(doubtful)
    assert reason.format(device=doubtful.device) in doubtful.kept("--force")


@of_vfs
@pytest.mark.promise(5)
@pytest.mark.parametrize("before", [lambda _: None, dies])
def test_no_vf_while_the_list_of_running_domains_is_incomplete(
    doubtful: Doubtful, before: Callable[[Doubtful], None]
) -> None:
    before(doubtful)
    before_the_write(doubtful, unreadable_status)
    for _ in range(2):  # unreadable from the first look on at the second try
        incomplete = "while the list of running domains is incomplete, not even --force"
        assert incomplete in doubtful.kept("--force")


@of_mdevs
@pytest.mark.promise(5)
@pytest.mark.parametrize("before", [lambda _: None, dies])
def test_but_a_mediated_device_which_nobody_else_can_have(
    doubtful: Doubtful, before: Callable[[Doubtful], None]
) -> None:
    before(doubtful)
    unreadable_status(doubtful)
    assert doubtful.release("--force")[0] == 0
    assert doubtful.gpus.type_of(doubtful.device) == 0


@pytest.mark.promise(1)
def test_from_the_hosts_own_namespace_all_processes_are_seen(doubtful: Doubtful) -> None:
    another_namespace(doubtful)
    link = doubtful.host.proc / "self/ns/pid"
    link.unlink()
    link.symlink_to("pid:[4026531836]")
    assert doubtful.release("--force")[0] == 0


def born(doubtful: Doubtful) -> None:
    doubtful.host.run_domain("web1", WEB1, 4001, web1(doubtful.device))


def claimed_anew(doubtful: Doubtful) -> None:
    doubtful.change_claim(claim_id="f" * 32)


@pytest.mark.promise(1, 2)
@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (opened, "is held open by process 6000"),
        (born, "libvirt has it running as process 4001"),
        (another_domain, "and the running domain 'web2'"),
        (claimed_anew, "is not provably dead"),
    ],
)
def test_what_happens_right_before_the_write_is_seen(
    doubtful: Doubtful, event: Callable[[Doubtful], None], reason: str
) -> None:
    before_the_write(doubtful, event)
    assert reason in doubtful.kept("--force")


def before_the_write(doubtful: Doubtful, event: Callable[[Doubtful], None]) -> None:
    real = backend.clear

    def clear(*arguments: object, **more: object) -> None:
        event(doubtful)
        real(*arguments, **more)  # type: ignore[arg-type]

    doubtful.patch.setattr(backend, "clear", clear)


@pytest.mark.promise(2)
def test_a_claim_that_was_replaced_meanwhile_stays(doubtful: Doubtful) -> None:
    from vgpu_libvirt.cli import keep

    real = keep.give_back

    def late(*arguments: object, **more: object) -> None:
        doubtful.change_claim(claim_id="f" * 32)
        real(*arguments, **more)  # type: ignore[arg-type]

    doubtful.patch.setattr(keep, "give_back", late)
    doubtful.release("--force")
    assert doubtful.host.claim(doubtful.device) is not None
    assert doubtful.gpus.type_of(doubtful.device) == 1152


@pytest.mark.promise(1)
def test_a_type_that_we_did_not_write_stays(doubtful: Doubtful) -> None:
    doubtful.gpus.set_type(doubtful.device, 1150)
    status, text = doubtful.release("--force")
    assert status == 1
    assert "; somebody else " in text
    assert doubtful.gpus.type_of(doubtful.device) == 1150


@pytest.mark.promise(5)
def test_an_unreadable_claim_protects_its_device(doubtful: Doubtful) -> None:
    doubtful.host.write(doubtful.host.state / f"claims/{doubtful.device}.json", "{")
    status, text = doubtful.release("--force")
    assert (status, "stays as it is until that is mended" in text) == (1, True)
    assert doubtful.gpus.type_of(doubtful.device) == 1152
