# SPDX-License-Identifier: LGPL-2.1-or-later
"""The shim: what a program's calls become where a domain asks for a vGPU, and when they fail."""

from __future__ import annotations

import fcntl
import gc
import logging
import os
import re
import uuid
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import libvirt
import pytest

from tests.unit import fake_libvirt
from tests.unit.host import WEB1, WEB2, domain_xml, web1
from tests.unit.program import failing, pointed, taken
from vgpu_libvirt.claims.model import Phase
from vgpu_libvirt.shim import calls, failures, local, resolve

if TYPE_CHECKING:
    from tests.unit.program import Program

ASKS = domain_xml(requests={"ua-vgpu0": "NVIDIA L40S-8Q"}, number=None)
LABEL = f"domain 'web1' ({WEB1})"


# --- createXML ---


def test_what_is_created_from_a_document_gets_its_vgpu(program: Program) -> None:
    domain = program.connection.createXML(ASKS, libvirt.VIR_DOMAIN_START_PAUSED)
    assert domain in program.connection.domains
    assert (domain.active, domain.persistent, domain.started_paused) == (True, False, True)
    (sent,) = program.connection.documents
    assert pointed(sent) == {"ua-vgpu0": program.vfs[0]}
    assert re.sub("<hostdev.*</hostdev>", "", sent, flags=re.DOTALL) == ASKS
    claim = program.claims()[program.vfs[0]]
    assert (claim.domain_uuid, claim.phase) == (WEB1, Phase.CONFIGURED)
    assert program.host.type_of(program.vfs[0]) == "1152"


def test_a_hostdev_of_a_document_is_pointed_at_a_device_that_is_free(program: Program) -> None:
    taken(program, program.vfs[0])
    program.connection.createXML(xmlDesc=web1(program.vfs[0], number=None))
    (sent,) = program.connection.documents
    assert pointed(sent) == {"ua-vgpu0": program.vfs[1]}
    assert sent == web1(program.vfs[1], number=None)


def test_a_document_that_points_right_is_sent_as_it_is(program: Program) -> None:
    program.connection.createXML(web1(program.vfs[2], number=None))
    assert program.connection.documents == [web1(program.vfs[2], number=None)]


def test_a_document_without_a_uuid_is_claimed_for_one(program: Program) -> None:
    domain = program.connection.createXML(re.sub("<uuid>.*</uuid>", "", ASKS))
    uuid.UUID(domain.UUIDString())
    assert program.claims()[program.vfs[0]].domain_uuid == domain.UUIDString()


def test_a_uuid_may_be_spelt_as_libvirt_lets_it(program: Program) -> None:
    spelt = ASKS.replace(WEB1, WEB1.upper().replace("-", ""))
    program.connection.hook = None
    program.connection.createXML(spelt)
    assert program.claims()[program.vfs[0]].domain_uuid == WEB1


def test_where_a_device_refuses_another_is_tried(program: Program) -> None:
    def hook(operation: str, document: str) -> Any:
        if operation == "prepare" and program.vfs[0] in pointed(document).values():
            answer = program.host.hook("release", document)
            return answer._replace(status=1, stderr=f"vgpu-libvirt: {program.vfs[0]} won't")
        return program.host.hook(operation, document)

    program.connection.hook = hook
    program.connection.createXML(ASKS)
    assert [pointed(sent) for sent in program.connection.documents] == [
        {"ua-vgpu0": program.vfs[0]},
        {"ua-vgpu0": program.vfs[1]},
    ]
    assert list(program.claims()) == [program.vfs[1]]


@pytest.mark.promise(2)
def test_a_start_that_fails_in_libvirt_leaves_nothing_and_shows_its_error(program: Program) -> None:
    program.connection.qemu_fails = "qemu died"
    error = failing(lambda: program.connection.createXML(ASKS))
    assert error.err == fake_libvirt.error(libvirt.VIR_ERR_INTERNAL_ERROR, "qemu died").err
    assert program.claims() == {}
    assert program.host.type_of(program.vfs[0]) == "0"


def test_a_start_that_fails_keeps_nothing_alive(program: Program) -> None:
    program.connection.qemu_fails = "qemu died"
    seen = []
    gc.disable()
    try:
        try:
            program.connection.createXML(ASKS)
        except libvirt.libvirtError as error:
            assert error.__context__ is None
            seen.append(weakref.ref(error))
        (gone,) = seen
        assert gone() is None
    finally:
        gc.enable()


def test_a_call_with_wrong_arguments_leaves_nothing_and_fails_as_ever(program: Program) -> None:
    with pytest.raises(TypeError):
        program.connection.createXML(ASKS, 0, "one too many")
    with pytest.raises(TypeError):
        program.connection.createXML()
    assert program.claims() == {}


def test_a_full_host_is_a_libvirt_error_with_our_sentence(program: Program) -> None:
    for vf in program.vfs:
        program.host.set_list(vf, "ID    : vGPU Name\n")
    error = failing(lambda: program.connection.createXML(ASKS))
    sentence = str(error)
    assert sentence.startswith("vgpu-libvirt: ")
    assert error.get_error_code() == libvirt.VIR_ERR_CONFIG_UNSUPPORTED
    assert error.get_error_domain() == libvirt.VIR_FROM_QEMU
    assert error.get_error_level() == libvirt.VIR_ERR_ERROR
    assert (error.get_error_message(), error.get_str1()) == (sentence, "%s")
    assert program.connection.documents == []


@pytest.mark.parametrize(
    ("request_xml", "says"),
    [
        ('<vgpu:device alias="vgpu0" profile="1152"/>', "alias 'vgpu0' must begin with 'ua-'"),
        ('<vgpu:device alias="ua-vgpu0" profile="L40S-99Q"/>', "L40S-99Q"),
    ],
)
def test_a_request_that_is_wrong_is_a_libvirt_error(
    program: Program, request_xml: str, says: str
) -> None:
    document = domain_xml(requests=request_xml, number=None)
    error = failing(lambda: program.connection.createXML(document))
    assert says in str(error)
    assert error.get_error_code() == libvirt.VIR_ERR_CONFIG_UNSUPPORTED
    assert program.connection.documents == []


def test_a_store_that_is_broken_is_a_libvirt_error(program: Program) -> None:
    (program.host.state / "claims").write_text("no directory")
    error = failing(lambda: program.connection.createXML(ASKS))
    assert error.get_error_code() == libvirt.VIR_ERR_OPERATION_FAILED
    assert f"the claims in {program.host.state}/claims can't be read" in str(error)


def test_a_configuration_that_is_broken_is_a_libvirt_error(program: Program) -> None:
    (program.host.root / "config.toml").write_text("[paths\n")
    monkey = pytest.MonkeyPatch()
    monkey.setattr(local, "_may_write", lambda _state: True)
    with monkey.context():
        error = failing(lambda: program.connection.createXML(ASKS))
    monkey.undo()
    assert error.get_error_code() == libvirt.VIR_ERR_OPERATION_FAILED
    assert "config.toml is not valid TOML" in str(error)


def test_an_error_of_ours_is_never_an_earlier_one_of_libvirts(program: Program) -> None:
    with pytest.raises(libvirt.libvirtError):
        libvirt.open("nosuch:///")  # stays the last error of this thread
    error = failures.as_libvirt(ValueError("of ours"))
    assert str(error) == "vgpu-libvirt: internal error, please report it: ValueError: of ours"
    assert error.get_error_message() == str(error)


def test_a_domain_that_runs_is_never_reported_as_failed(
    program: Program, caplog: pytest.LogCaptureFixture
) -> None:
    program.connection.hook = None
    domain = program.connection.createXML(ASKS)
    assert domain.active
    assert "libvirt didn't run our hook" in caplog.text


# --- create ---


def test_a_definition_starts_on_a_device_that_is_free(program: Program) -> None:
    taken(program, program.vfs[0])
    domain = program.define(web1(program.vfs[0], number=None))
    assert domain.create() == 0
    assert domain.writes == ["detachDeviceFlags", "attachDeviceFlags", "create"]
    assert pointed(domain.XMLDesc(libvirt.VIR_DOMAIN_XML_INACTIVE)) == {"ua-vgpu0": program.vfs[1]}
    assert program.claims()[program.vfs[1]].phase is Phase.CONFIGURED


def test_the_flags_of_a_start_are_kept(program: Program) -> None:
    domain = program.define(ASKS)
    assert domain.createWithFlags(flags=libvirt.VIR_DOMAIN_START_PAUSED) == 0
    assert domain.started_paused


def test_a_call_that_makes_another_is_seen_to_once(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    real = resolve.starting.start_by

    def counted(*arguments: Any) -> Any:
        seen.append(arguments)
        return real(*arguments)

    monkeypatch.setattr(resolve.starting, "start_by", counted)
    program.define(ASKS).create()  # which calls createWithFlags there
    assert len(seen) == 1


@pytest.mark.promise(2)
def test_a_definition_that_fails_to_start_leaves_no_reservation(program: Program) -> None:
    domain = program.define(ASKS)
    domain.qemu_fails = "qemu died"
    assert str(failing(domain.create)) == "qemu died"
    assert program.claims() == {}


def test_a_start_that_our_hook_refuses_shows_libvirts_error(program: Program) -> None:
    domain = program.define(ASKS)
    domain.hook = lambda operation, document: program.host.hook(operation, document)._replace(
        status=int(operation == "prepare"), stderr="vgpu-libvirt: no"
    )
    error = failing(domain.create)
    assert error.get_error_code() == libvirt.VIR_ERR_HOOK_SCRIPT_FAILED
    assert str(error).endswith("unexpected exit status 1: vgpu-libvirt: no")
    assert program.reserved() == []


@pytest.mark.parametrize("state", ["active", "saved"])
def test_what_libvirt_starts_or_refuses_itself_is_left_to_it(program: Program, state: str) -> None:
    domain = program.define(web1(program.vfs[0], number=None))
    setattr(domain, state, True)
    if state == "active":
        assert str(failing(domain.create)) == "domain is already running"
    else:
        taken(program, program.vfs[0])
        assert f"{program.vfs[0]} belongs to domain 'web2'" in str(failing(domain.create))
    assert program.reserved() == []


def test_libvirts_own_file_tells_which_domains_to_ask_about(program: Program) -> None:
    directory = Path(program.host.paths.libvirt_etc) / "qemu"
    directory.mkdir(parents=True)
    domain = program.define(domain_xml(number=None))
    domain.XMLDesc = None  # type: ignore[method-assign, assignment]  # must not be called
    assert domain.create() == 0
    domain.active = False
    (directory / "web1.xml").write_text(domain_xml(number=None))
    assert domain.create() == 0


# --- defineXML ---


def test_a_definition_gets_the_hostdev_that_it_lacks_and_takes_no_device(program: Program) -> None:
    program.connection.defineXML(ASKS)
    (sent,) = program.connection.documents
    assert pointed(sent) == {"ua-vgpu0": program.vfs[0]}
    assert re.sub("<hostdev.*</hostdev>", "", sent, flags=re.DOTALL) == ASKS
    assert program.claims() == {}


def test_a_definition_is_pointed_at_what_can_serve(program: Program) -> None:
    taken(program, program.vfs[0])
    program.connection.defineXML(xml=web1(program.vfs[0], number=None))
    assert program.connection.documents == [web1(program.vfs[1], number=None)]


def test_definitions_are_pointed_at_devices_of_their_own(program: Program) -> None:
    program.connection.defineXML(ASKS)
    program.connection.defineXML(
        domain_xml("web2", WEB2, {"ua-vgpu0": "NVIDIA L40S-8Q"}, number=None)
    )
    first, second = (pointed(sent)["ua-vgpu0"] for sent in program.connection.documents)
    assert first != second


def test_the_definition_of_a_running_domain_stays_at_its_device(program: Program) -> None:
    running = program.connection.createXML(web1(program.vfs[1], number=None))
    program.host.run_domain("web1", WEB1, 4001, web1(program.vfs[1]))
    program.connection.defineXML(web1(program.vfs[1], number=None))
    assert running.active
    assert program.connection.documents[-1] == web1(program.vfs[1], number=None)


@pytest.mark.parametrize("wrong", ["full", "request", "managed", "config"])
def test_a_definition_is_never_refused(
    program: Program, wrong: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = ASKS
    if wrong == "full":
        for vf in program.vfs:
            program.host.set_list(vf, "ID    : vGPU Name\n")
    elif wrong == "request":
        document = ASKS.replace("ua-vgpu0", "vgpu0")
    elif wrong == "managed":
        document = web1(program.vfs[0], managed="yes", number=None)
    else:
        (program.host.root / "config.toml").write_text("[paths\n")
        monkeypatch.setattr(local, "_may_write", lambda _state: True)
    program.connection.defineXML(document)
    assert program.connection.documents == [document]
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.message.startswith(f"{LABEL} is defined as it is: ")


# --- what is not our business ---


@pytest.mark.promise(6)
@pytest.mark.parametrize("call", ["createXML", "defineXML", "create"])
def test_without_a_request_no_mistake_of_ours_shows(
    program: Program, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    for module, name in ((local, "settings_for"), (resolve, "parse_domain"), (resolve, "_asking")):
        monkeypatch.setattr(module, name, broken)
    document = domain_xml(number=None, extra="<!-- urn:vgpu-libvirt:domain:1 -->")
    if call == "create":
        assert program.define(document).create() == 0
    else:
        getattr(program.connection, call)(document)
        assert program.connection.documents == [document]


def test_with_a_request_a_mistake_of_ours_is_a_libvirt_error(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(resolve.starting, "look", broken)
    error = failing(lambda: program.connection.createXML(ASKS))
    assert error.get_error_code() == libvirt.VIR_ERR_OPERATION_FAILED
    assert "internal error, please report it: ZeroDivisionError: oops" in str(error)


@pytest.mark.parametrize("document", [None, 5, "", "<domain>", "<a/>", ASKS.replace("web1", "")])
def test_what_is_no_document_of_a_domain_is_left_to_libvirt(
    program: Program, document: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake_libvirt.Connection, "add", lambda self, domain: domain)
    seen = []
    monkeypatch.setattr(program.connection, "kind", lambda xml, **_: seen.append(xml) or object())
    with pytest.raises(AttributeError):
        program.connection.createXML(document)
    assert seen == [document]


@pytest.mark.parametrize(
    "uri",
    [
        "qemu:///session",
        "test:///default",
        "lxc:///",
        "qemu+ssh://host/system",
        "qemu+ssh:///system",
        "qemu:///embed?root=/tmp",
        "qemu+tls://localhost/system",
        "qemu+unix:///system?socket=/tmp/tunnel",
    ],
)
def test_other_hypervisors_are_left_alone(
    program: Program, uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    program.connection.uri = uri
    monkeypatch.setattr(program.connection, "getHostname", lambda: "elsewhere", raising=False)
    program.connection.defineXML(ASKS)
    assert program.connection.documents == [ASKS]


@pytest.mark.parametrize("uri", ["qemu+unix:///system", "qemu:///system?socket=/run/other"])
def test_the_same_libvirt_by_another_name(
    program: Program, uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    program.connection.uri = uri
    here = os.uname().nodename
    monkeypatch.setattr(program.connection, "getHostname", lambda: here, raising=False)
    program.connection.defineXML(ASKS)
    assert program.connection.documents != [ASKS]


def test_connections_of_others_are_left_alone(program: Program) -> None:
    calls.served.discard(program.connection)
    program.connection.defineXML(ASKS)
    assert program.connection.documents == [ASKS]


def test_who_may_not_write_to_the_store_is_left_alone(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_, **__: False)
    program.connection.defineXML(ASKS)
    assert program.connection.documents == [ASKS]


def test_a_migrated_domain_is_where_it_went(program: Program) -> None:
    elsewhere = type(program.connection)()
    elsewhere.uri = "qemu+ssh://host/system"
    calls.served.add(elsewhere)

    class Moving(fake_libvirt.Domain):
        def migrate3(self, dconn: object, params: object, flags: int = 0) -> fake_libvirt.Domain:
            copy = program.connection.kind(ASKS)
            copy.connection = program.connection  # as libvirt-python has it
            return copy

    resolve.interpose(type(program.connection), Moving)
    moving = program.connection.add(Moving(ASKS))
    arrived = moving.migrate3(elsewhere, {})
    assert arrived.connect() is program.connection
    assert arrived.create() == 0
    assert program.claims() == {}


@pytest.mark.promise(8)
def test_no_lock_of_ours_is_held_while_libvirt_is_called(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = set()

    def watched(name: str, method: Any) -> Any:
        def call(*arguments: Any, **keywords: Any) -> Any:
            seen.add(name)
            for path in (program.host.state / "lock", *program.host.state.glob("locks/*")):
                if path.exists():
                    with path.open() as file:
                        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return method(*arguments, **keywords)

        return call

    for kind in (fake_libvirt.Connection, fake_libvirt.Domain):
        for name, method in vars(kind).items():
            if name[0] != "_" and name not in ("add", "content") and callable(method):
                monkeypatch.setattr(kind, name, watched(name, method))
    connections = type("Connection", (fake_libvirt.Connection,), {})
    domains = type("Domain", (fake_libvirt.Domain,), {})
    resolve.interpose(connections, domains)
    connection = connections()
    connection.kind, connection.hook = domains, program.host.hook
    calls.served.add(connection)
    taken(program, program.vfs[0])
    connection.add(domains(web1(program.vfs[0], number=None))).create()
    with pytest.raises(libvirt.libvirtError):
        connection.createXML(domain_xml(requests={"ua-vgpu0": "nosuch"}, number=None))
    assert {"createWithFlags", "attachDeviceFlags", "listAllDomains", "getURI"} <= seen
