# SPDX-License-Identifier: LGPL-2.1-or-later
"""What the Tab key offers, and that it offers nothing rather than an error."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from tests.unit.fake_libvirt import Connection, Domain
from tests.unit.host import web1
from tests.unit.support import directory_for_all, new_claim, nobody
from vgpu_libvirt import libvirt_api
from vgpu_libvirt.address import PciAddress
from vgpu_libvirt.claims import cordons, store
from vgpu_libvirt.claims.cordons import Cordon
from vgpu_libvirt.cli import complete
from vgpu_libvirt.cli.main import main

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.unit.host import Host

GPU, VF = "0000:3d:00.0", "0000:3d:00.4"


def offered(host: Host, *words: str) -> list[str]:
    """What is offered for the last of WORDS, which is half-written."""
    line = " ".join(["virt-vgpu", *words])
    environment = {
        **host.environment,
        "_VIRT_VGPU_COMPLETE": "fish_complete",
        "COMP_WORDS": line,
        "COMP_CWORD": words[-1],
    }
    result = CliRunner().invoke(main, [], env=environment, prog_name="virt-vgpu")
    assert not result.exception or isinstance(result.exception, SystemExit)
    lines = result.output.split()  # click prints an empty one where it has nothing
    assert all("," in line for line in lines), result.output
    return [line.partition(",")[2] for line in lines]


def define(host: Host, *names: str) -> None:
    for name in names:
        host.write(host.root / f"libvirt-etc/qemu/{name}.xml", "<domain/>")


@pytest.mark.parametrize("verb", ["start", "attach", "detach", "fix-xml"])
def test_domains_come_from_libvirts_files(host: Host, verb: str) -> None:
    define(host, "web1", "web2", "db1")
    (host.root / "libvirt-etc/qemu/networks").mkdir()
    assert offered(host, verb, "web") == ["web1", "web2"]


def test_a_name_with_a_space_is_not_offered(host: Host) -> None:
    define(host, "web1", "web 2")
    assert offered(host, "start", "web") == ["web1"]


def test_gpus_devices_profiles_and_claims(host: Host) -> None:
    host.gpu(vfs=2)
    assert offered(host, "cordon", "0000:3d") == [GPU, VF, "0000:3d:00.5"]
    assert offered(host, "attach", "web1", "--gpu", "0") == [GPU]
    assert "L40S-8Q" in offered(host, "attach", "web1", "--profile", "L40S")
    assert offered(host, "release", "0000") == []
    store.create(host.paths.state, new_claim(VF))
    assert offered(host, "release", "0000") == [VF]


def test_only_what_is_cordoned_can_be_uncordoned(host: Host) -> None:
    host.gpu()
    cordons.write(host.paths.state, Cordon(PciAddress.parse(GPU), "root", time.time()))
    assert offered(host, "uncordon", "0000") == [GPU]


def test_a_profile_with_spaces_in_its_name_is_offered_by_its_id(host: Host) -> None:
    host.gpu(lists="ID    : vGPU Name\n1500  : NVIDIA RTX Pro 6000 Blackwell DC-4Q\n")
    assert offered(host, "attach", "web1", "--profile", "1") == ["1500"]


def test_a_broken_configuration_or_host_offers_nothing(host: Host) -> None:
    assert offered(host, "start", "w") == []
    define(host, "web1")
    host.write(host.root / "config.toml", "nonsense")
    for words in (["start", "w"], ["cordon", "0"], ["attach", "w", "--profile", "L"]):
        assert offered(host, *words) == []


@pytest.fixture
def closed_host() -> Iterator[Host]:
    """A host whose definitions only root can read, as libvirt has them."""
    from tests.unit.host import Host

    with directory_for_all() as directory:
        host = Host(directory / "host")
        define(host, "web1")
        (host.root / "libvirt-etc/qemu").chmod(0)
        yield host
        (host.root / "libvirt-etc/qemu").chmod(0o755)


def test_users_who_cannot_read_the_files_ask_libvirt(
    closed_host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(libvirt_api.libvirt, "open", lambda _: Connection(Domain(web1(VF))))
    with nobody():
        assert offered(closed_host, "start", "w") == ["web1"]


def test_a_libvirt_that_does_not_run_is_not_started(
    closed_host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    def connect(_: str) -> None:
        raise AssertionError("asked")

    monkeypatch.setattr(libvirt_api.libvirt, "open", connect)
    closed_host.end(811)
    with nobody():
        assert offered(closed_host, "start", "w") == []


def test_a_silent_libvirt_is_not_waited_for(
    closed_host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(complete, "_ANSWER", 0.2)
    answers = threading.Event()

    def connect(_: str) -> Connection:
        answers.wait(60)
        return Connection(Domain(web1(VF)))

    monkeypatch.setattr(libvirt_api.libvirt, "open", connect)
    with nobody():
        assert offered(closed_host, "start", "w") == []
    assert not answers.is_set()
    answers.set()
