# SPDX-License-Identifier: LGPL-2.1-or-later
"""The shim, where a program attaches a hostdev at which its domain asks for a vGPU, or detaches."""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING, Any

import libvirt
import pytest

from tests.unit.fake_libvirt import error as libvirt_error
from tests.unit.host import WEB1, domain_xml, hostdev_xml, web2
from tests.unit.program import failing, pointed, taken
from vgpu_libvirt import fs, trigger
from vgpu_libvirt.claims import locks
from vgpu_libvirt.claims.model import Phase
from vgpu_libvirt.shim import plugging

if TYPE_CHECKING:
    from tests.unit.fake_libvirt import Domain
    from tests.unit.program import Program

LIVE, CONFIG = libvirt.VIR_DOMAIN_AFFECT_LIVE, libvirt.VIR_DOMAIN_AFFECT_CONFIG
BOTH = LIVE | CONFIG
ASKS = domain_xml(requests={"ua-vgpu0": "NVIDIA L40S-8Q"})
PID = 4001
FULL = "ID    : vGPU Name\n"


def hostdev(vf: str, alias: str = "ua-vgpu0", managed: str = "no") -> str:
    """What a program attaches; it chooses the guest's address itself, and comments."""
    return hostdev_xml(alias, vf, managed).strip()


def show(program: Program, domain: Domain) -> None:
    """Let the host show what of DOMAIN runs."""
    document = domain.XMLDesc(0)
    if (program.host.proc / str(PID)).exists():
        program.host.end(PID)
    opens = tuple(program.host.nodes(vf)[0] for vf in pointed(document).values())
    program.host.run_domain(domain.name(), domain.UUIDString(), PID, document, opens)


def run(program: Program, document: str = ASKS, **more: bool) -> Domain:
    """A domain that runs, which was started without us."""
    domain = program.define(document, active=True, **more)
    domain.changed = lambda: show(program, domain)
    show(program, domain)
    return domain


def sides(domain: Domain) -> tuple[dict[str | None, str], dict[str | None, str]]:
    """Where the hostdevs of what runs point, and those of the definition."""
    return pointed(domain.XMLDesc(0)), pointed(domain.XMLDesc(libvirt.VIR_DOMAIN_XML_INACTIVE))


# --- what runs ---


@pytest.mark.promise(2, 3)
@pytest.mark.parametrize("how", ["flags", "keyword", "current", "no flags"])
def test_what_runs_gets_a_vgpu_where_it_asks_for_one(program: Program, how: str) -> None:
    taken(program, first := program.vfs[0])
    domain, document = run(program), hostdev(first)
    result = {
        "flags": lambda: domain.attachDeviceFlags(document, LIVE),
        "keyword": lambda: domain.attachDeviceFlags(flags=LIVE, xml=document),
        "current": lambda: domain.attachDeviceFlags(document),
        "no flags": lambda: domain.attachDevice(document),
    }[how]()
    assert result == 0
    vf = program.vfs[1]
    assert sides(domain) == ({"ua-vgpu0": vf}, {})
    assert program.host.type_of(vf) == "1152"
    claim = program.claims()[vf]
    assert (claim.domain_uuid, claim.alias, claim.phase) == (WEB1, "ua-vgpu0", Phase.RUNNING)
    assert trigger.is_set(program.host.paths)


def test_where_it_points_it_stays_if_that_can_serve_it(program: Program) -> None:
    domain = run(program)
    domain.attachDeviceFlags(hostdev(program.vfs[2]), LIVE)
    assert sides(domain)[0] == {"ua-vgpu0": program.vfs[2]}


def test_all_else_of_the_document_is_as_the_program_wrote_it(program: Program) -> None:
    taken(program, program.vfs[0])
    domain = run(program)
    rom = hostdev(program.vfs[0]).replace("</hostdev>", "<rom bar='off'/></hostdev>")
    domain.attachDeviceFlags(rom, LIVE)
    live = domain.XMLDesc(0)
    assert '<rom bar="off"/>' in live
    assert re.search(r'<address type="pci" domain="0x0000" bus="0x05"', live)


def test_both_sides_get_the_same_device(program: Program) -> None:
    taken(program, program.vfs[0])
    domain = run(program)
    domain.attachDeviceFlags(hostdev(program.vfs[0]), BOTH)
    assert sides(domain) == ({"ua-vgpu0": program.vfs[1]}, {"ua-vgpu0": program.vfs[1]})
    assert list(program.reserved()) == []


@pytest.mark.promise(3)
def test_the_device_is_ready_and_no_lock_is_held_when_libvirt_is_asked(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    domain = run(program)
    vf = program.vfs[0]
    attach = domain._attach

    def look(document: str, flags: int) -> None:
        assert program.host.type_of(vf) == "1152"
        assert program.claims()[vf].phase is Phase.RESERVED
        state = program.host.paths.state
        with locks.devices(state, [vf], 0), locks.host(state, 0):
            attach(document, flags)

    monkeypatch.setattr(domain, "_attach", look)
    assert domain.attachDeviceFlags(hostdev(vf), LIVE) == 0


@pytest.mark.promise(2, 3)
def test_where_libvirt_refuses_nothing_stays_and_the_error_is_its_own(program: Program) -> None:
    domain = run(program)
    domain.refuses = ("attachDeviceFlags live",)
    error = failing(lambda: domain.attachDeviceFlags(hostdev(program.vfs[0]), LIVE))
    assert str(error) == "attachDeviceFlags live fails"
    assert error.get_error_code() == libvirt.VIR_ERR_OPERATION_FAILED
    assert program.claims() == {}
    assert program.host.type_of(program.vfs[0]) == "0"


def test_where_a_device_refuses_another_is_tried(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    domain = run(program)
    attach = domain._attach

    def refuse(document: str, flags: int) -> None:
        if "function='0x4'" in document or 'function="0x4"' in document:
            raise libvirt_error(1, f"vfio {program.vfs[0]}: error getting device from group")
        attach(document, flags)

    monkeypatch.setattr(domain, "_attach", refuse)
    assert domain.attachDeviceFlags(hostdev(program.vfs[0]), LIVE) == 0
    assert sides(domain)[0] == {"ua-vgpu0": program.vfs[1]}
    assert list(program.claims()) == [program.vfs[1]]


@pytest.mark.promise(1)
def test_what_is_plugged_in_although_libvirt_reports_a_failure_keeps_its_claim(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    domain = run(program)
    attach, vf = domain._attach, program.vfs[0]

    def fail(document: str, flags: int) -> None:
        attach(document, flags)
        raise libvirt_error(1, "broken pipe")

    monkeypatch.setattr(domain, "_attach", fail)
    assert str(failing(lambda: domain.attachDeviceFlags(hostdev(vf), LIVE))) == "broken pipe"
    assert program.claims()[vf].domain_uuid == WEB1
    assert program.host.type_of(vf) == "1152"


def test_a_full_host_is_a_libvirt_error_with_our_sentence(program: Program) -> None:
    domain = run(program)
    for vf in program.vfs:
        program.host.set_list(vf, FULL)
    error = failing(lambda: domain.attachDeviceFlags(hostdev(program.vfs[0]), LIVE))
    assert str(error).startswith("vgpu-libvirt: ")
    assert error.get_error_code() == libvirt.VIR_ERR_CONFIG_UNSUPPORTED
    assert domain.writes == []


def test_a_managed_hostdev_is_refused(program: Program) -> None:
    domain = run(program)
    document = hostdev(program.vfs[0], managed="yes")
    error = failing(lambda: domain.attachDeviceFlags(document, LIVE))
    assert "has managed='yes', with which it gets no vGPU" in str(error)
    assert domain.writes == []


def test_a_call_with_wrong_arguments_fails_as_ever(program: Program) -> None:
    domain = run(program)
    with pytest.raises(TypeError):
        domain.attachDeviceFlags(hostdev(program.vfs[0]), LIVE, "one too many")  # type: ignore[call-arg]
    assert program.claims() == {}


# --- definitions ---


def test_a_definition_is_pointed_at_what_can_serve_and_takes_no_device(program: Program) -> None:
    taken(program, program.vfs[0])
    domain = program.define(ASKS)
    before = program.claims()
    assert domain.attachDeviceFlags(hostdev(program.vfs[0]), CONFIG) == 0
    assert sides(domain)[1] == {"ua-vgpu0": program.vfs[1]}
    assert program.claims() == before


@pytest.mark.parametrize("wrong", ["full", "managed"])
def test_a_definition_is_never_refused(
    program: Program, wrong: str, caplog: pytest.LogCaptureFixture
) -> None:
    domain = program.define(ASKS)
    for vf in program.vfs if wrong == "full" else []:
        program.host.set_list(vf, FULL)
    document = hostdev(program.vfs[0], managed="yes" if wrong == "managed" else "no")
    assert domain.attachDeviceFlags(document, CONFIG) == 0
    assert sides(domain)[1] == {"ua-vgpu0": program.vfs[0]}
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert f"'ua-vgpu0' of domain 'web1' ({WEB1}) is attached as it is: " in record.message


def test_each_side_goes_by_its_own_metadata(program: Program) -> None:
    """Only the definition asks: what runs gets what the program says."""
    taken(program, program.vfs[0])
    domain = run(program)
    domain.live = type(domain)(domain_xml()).document
    domain.changed = None
    domain.attachDeviceFlags(hostdev(program.vfs[0]), LIVE)
    assert sides(domain) == ({"ua-vgpu0": program.vfs[0]}, {})
    domain.attachDeviceFlags(hostdev(program.vfs[0]), CONFIG)
    assert sides(domain)[1] == {"ua-vgpu0": program.vfs[1]}


# --- what is not our business ---


@pytest.mark.promise(6)
@pytest.mark.parametrize(
    "what", ["alias", "no request", "disk", "no document", "inactive", "transient", "other flags"]
)
def test_all_else_is_passed_on_as_it_is(
    program: Program, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken(program, vf := program.vfs[0])
    document: Any = hostdev(vf, "ua-other" if what == "alias" else "ua-vgpu0")
    flags = {"transient": CONFIG, "other flags": LIVE | 4}.get(what, LIVE)
    if what == "disk":
        document = "<disk><!-- <hostdev ua- --><alias name='ua-vgpu0'/></disk>"
    elif what == "no document":
        document = "<hostdev ua-"
    asks = domain_xml() if what == "no request" else ASKS
    if what == "inactive":
        domain = program.define(asks)
    else:
        domain = run(program, asks, persistent=what != "transient")
    seen: list[Any] = []
    monkeypatch.setattr(
        type(domain).__mro__[1], "_attach", lambda _self, *arguments: seen.append(arguments)
    )
    domain.attachDeviceFlags(document, flags)
    assert {given for given, _ in seen} == {document}
    assert list(program.claims()) == [vf]


@pytest.mark.promise(6)
def test_no_mistake_of_ours_shows(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    domain = run(program, domain_xml())
    for name in ("_alias", "_sides"):
        monkeypatch.setattr(plugging, name, broken)
    assert domain.attachDeviceFlags(hostdev(program.vfs[0]), LIVE) == 0
    monkeypatch.setattr(plugging.store, "of_domain", broken)
    assert domain.detachDeviceFlags(hostdev(program.vfs[0]), LIVE) == 0


def test_an_alias_that_is_there_already_is_libvirts_to_refuse(program: Program) -> None:
    domain = run(program)
    domain.attachDeviceFlags(hostdev(program.vfs[0]), LIVE)
    before = program.claims()
    error = failing(lambda: domain.attachDeviceFlags(hostdev(program.vfs[1]), LIVE))
    assert "non unique alias" in str(error)
    assert program.claims() == before


# --- detaching ---


@pytest.mark.promise(1)
@pytest.mark.parametrize("how", ["detachDeviceFlags", "detachDeviceAlias"])
def test_after_a_detach_a_sync_is_asked_for(
    program: Program, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    domain = run(program)
    domain.attachDeviceFlags(hostdev(vf := program.vfs[0]), LIVE)
    trigger.take(program.host.paths)
    monkeypatch.setattr(fs, "write_attribute", lambda *_: pytest.fail("a write"))
    what = hostdev(vf) if how == "detachDeviceFlags" else "ua-vgpu0"
    assert getattr(domain, how)(what, LIVE) == 0
    assert trigger.is_set(program.host.paths)
    assert list(program.claims()) == [vf], "it goes when the guest has let it go"


def test_not_where_libvirt_refuses_it_or_nothing_is_ours(program: Program) -> None:
    domain = run(program)
    domain.attachDeviceFlags(hostdev(program.vfs[0]), LIVE)
    trigger.take(program.host.paths)
    error = failing(lambda: domain.detachDeviceFlags(hostdev(program.vfs[3]), LIVE))
    assert str(error) == "host device not found"
    assert not trigger.is_set(program.host.paths)
    other = program.define(web2(program.vfs[3]), active=True)
    assert other.detachDeviceFlags(hostdev(program.vfs[3]), LIVE) == 0
    assert not trigger.is_set(program.host.paths)
