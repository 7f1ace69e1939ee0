# SPDX-License-Identifier: LGPL-2.1-or-later
"""`start`: on which device a domain starts, what is left where it doesn't, and what is refused."""

from __future__ import annotations

import errno
import json
from typing import TYPE_CHECKING

import libvirt
import pytest

from tests.unit.desk import Desk, pointed
from tests.unit.fake_libvirt import Domain, error
from tests.unit.gpus import GPU, refusing
from tests.unit.host import WEB1, WEB2, domain_xml, web1, web2
from vgpu_libvirt import fs
from vgpu_libvirt.address import PciAddress
from vgpu_libvirt.claims import locks, store
from vgpu_libvirt.claims.model import Phase
from vgpu_libvirt.devices import hardware, profiles
from vgpu_libvirt.domain.read import parse_domain

if TYPE_CHECKING:
    from tests.unit.fake_libvirt import Connection
    from tests.unit.gpus import Gpus
    from tests.unit.host import Host
    from vgpu_libvirt.claims.model import Claim

LABEL = f"domain 'web1' ({WEB1})"
BOTH = {"ua-a": "NVIDIA L40S-8Q", "ua-b": "NVIDIA L40S-8Q"}


class Starts(Desk):
    """Domains that aren't running are started there."""

    def start(self, *arguments: str) -> str:
        return self.do("start", "web1", *arguments)

    def refused(self, *arguments: str) -> str:
        """Start what must fail; it leaves no reservation."""
        said = self.fails("start", "web1", *arguments)
        assert not [claim for claim in self.claims() if claim.phase is Phase.RESERVED]
        return said

    def reserve(self, device: str, document: str, **changes: object) -> Claim:
        """A reservation, as a start that was killed leaves it."""
        known = hardware.discover(self.host.paths.sysfs).profiles
        (profile,) = profiles.find("NVIDIA L40S-8Q", known)
        context = self.host.context()._replace(daemon=None)
        gpu = PciAddress.parse(GPU)
        claim = context.new_claim(parse_domain(document), "ua-vgpu0", device, gpu, profile)
        claim = claim._replace(phase=Phase.RESERVED, domain_id=None, **changes)
        store.create(self.host.paths.state, claim)
        return claim


@pytest.fixture
def desk(host: Host, connection: Connection, gpus_or_vfs: Gpus) -> Starts:
    return Starts(host, connection, gpus_or_vfs.places)


def test_what_points_right_stays_and_starts(desk: Starts) -> None:
    domain = desk.define(web1(desk.vfs[2], number=None))
    said = desk.start()
    assert domain.writes == ["create"]
    assert domain.hooks == ["prepare", "start"]
    assert (domain.active, domain.started_paused) == (True, False)
    assert desk.host.type_of(desk.vfs[2]) == "1152"
    assert said == (
        f"{LABEL} runs, with 'ua-vgpu0' (NVIDIA L40S-8Q) at {desk.vfs[2]} of GPU 0000:3d:00.0, "
        "since its definition points there already.\n"
    )


@pytest.mark.promise(2)
def test_the_reservation_is_what_prepare_finds(desk: Starts, gpus: Gpus) -> None:
    device = gpus.device()
    domain = desk.define(web1(device, number=None))
    seen: list[Claim | None] = []

    def hook(operation: str, document: str) -> object:
        if operation == "prepare":
            seen.append(desk.host.claim(device))
        return desk.host.hook(operation, document)

    domain.hook = hook  # type: ignore[assignment]
    desk.start()
    (reserved,) = seen
    taken = desk.host.claim(device)
    assert reserved is not None
    assert taken is not None
    assert (reserved.phase, reserved.daemon, reserved.domain_id) == (Phase.RESERVED, None, None)
    assert (reserved.domain_uuid, reserved.alias) == (WEB1, "ua-vgpu0")
    assert (taken.phase, taken.daemon) == (Phase.CONFIGURED, (811, 4242))
    assert taken.claim_id != reserved.claim_id
    assert gpus.type_of(device) == 1152


@pytest.mark.promise(2)
def test_what_is_reserved_is_nobody_elses_turn(desk: Starts) -> None:
    desk.reserve(desk.vfs[0], web1(desk.vfs[0]))
    assert "belongs to domain 'web1'" in desk.host.hook("prepare", web2(desk.vfs[0])).stderr


def test_a_hostdev_whose_device_is_taken_is_pointed_elsewhere(desk: Starts) -> None:
    assert desk.host.hook("prepare", web2(desk.vfs[0])).status == 0
    domain = desk.define(web1(desk.vfs[0], number=None))
    said = desk.start()
    assert domain.writes == ["detachDeviceFlags", "attachDeviceFlags", "create"]
    assert pointed(domain) == {"ua-vgpu0": desk.vfs[1]}
    assert "bus='0x05'" in domain.XMLDesc(2).replace('"', "'")  # the guest's address
    assert f"at {desk.vfs[1]} of GPU 0000:3d:00.0, since only GPU 0000:3d:00.0 can take" in said


def test_a_missing_hostdev_is_added(desk: Starts, gpus: Gpus) -> None:
    domain = desk.define(domain_xml(requests={"ua-vgpu0": "L40S-8Q"}, number=None))
    desk.start()
    assert pointed(domain) == {"ua-vgpu0": gpus.device()}
    assert domain.active


def test_other_definitions_are_left_their_devices(desk: Starts) -> None:
    desk.define(web2(desk.vfs[0]))
    domain = desk.define(domain_xml(requests={"ua-vgpu0": "1152"}, number=None))
    desk.start()
    assert pointed(domain) == {"ua-vgpu0": desk.vfs[1]}


def test_several_vgpus_start_on_devices_of_their_own(desk: Starts) -> None:
    desk.host.gpu("0000:5e:00.0")
    document = domain_xml(
        requests='<vgpu:device alias="ua-a" profile="1152" apart="gpu"/>'
        '<vgpu:device alias="ua-b" profile="1152"/>',
        hostdevs={"ua-a": desk.vfs[0], "ua-b": desk.vfs[1]},
        number=None,
    )
    domain = desk.define(document)
    said = desk.start()
    assert pointed(domain) == {"ua-a": desk.vfs[0], "ua-b": "0000:5e:00.4"}
    assert "'ua-a' (NVIDIA L40S-8Q) at 0000:3d:00.4 of GPU 0000:3d:00.0, since its defin" in said
    assert "; 'ua-b' (NVIDIA L40S-8Q) at 0000:5e:00.4 of GPU 0000:5e:00.0, since " in said


def test_paused(desk: Starts, gpus: Gpus) -> None:
    domain = desk.define(web1(gpus.device(), number=None))
    assert f"{LABEL} is started, and paused, with 'ua-vgpu0'" in desk.start("--paused")
    assert domain.started_paused


@pytest.mark.promise(9)
def test_a_dry_run(desk: Starts) -> None:
    assert desk.host.hook("prepare", web2(desk.vfs[0])).status == 0
    domain = desk.define(web1(desk.vfs[0], number=None))
    before = desk.host.tree()
    assert desk.start("--dry-run") == (
        f"{LABEL} would start with 'ua-vgpu0' (NVIDIA L40S-8Q) at 0000:3d:00.5 of GPU "
        "0000:3d:00.0, since only GPU 0000:3d:00.0 can take it now. Nothing was written.\n"
    )
    assert (domain.writes, domain.active) == ([], False)
    assert desk.host.tree() == before


# --- devices that refuse ---


def test_a_device_that_refuses_is_followed_by_the_next(
    desk: Starts, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusing(monkeypatch, *desk.vfs[:2])
    domain = desk.define(web1(desk.vfs[0], number=None))
    assert f"at {desk.vfs[2]} of" in desk.start()
    assert [claim.device for claim in desk.claims()] == [desk.vfs[2]]
    assert pointed(domain) == {"ua-vgpu0": desk.vfs[2]}
    assert domain.hooks == [*["prepare", "stopped", "release"] * 2, "prepare", "start"]


def test_where_all_refuse_the_drivers_word_is_told(
    desk: Starts, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusing(monkeypatch, *desk.vfs)
    domain = desk.define(web1(desk.vfs[0], number=None))
    assert desk.refused() == (
        f"{LABEL} can't be started: the driver did not put NVIDIA L40S-8Q on {desk.vfs[3]}: "
        f"input/output error (before that, {', '.join(desk.vfs[:3])} failed)\n"
    )
    assert desk.claims() == ()
    assert pointed(domain) == {"ua-vgpu0": desk.vfs[3]}
    assert not list((desk.host.state / "edits").glob("*.json"))


def test_of_several_all_or_none_stay(desk: Starts, monkeypatch: pytest.MonkeyPatch) -> None:
    refusing(monkeypatch, *desk.vfs[1:])
    desk.define(domain_xml(requests=BOTH, number=None))
    assert "the driver did not put" in desk.refused()
    assert desk.claims() == ()
    assert {desk.host.type_of(vf) for vf in desk.vfs} == {"0"}


def test_a_failure_that_no_device_is_to_blame_for_is_told_at_once(desk: Starts, gpus: Gpus) -> None:
    domain = desk.define(web1(gpus.device(), number=None))
    domain.qemu_fails = "cannot access storage file '/gone'"
    assert desk.refused() == f"{LABEL} can't be started: cannot access storage file '/gone'\n"
    assert domain.writes == ["create"]
    assert desk.claims() == ()
    assert gpus.type_of(gpus.device()) == 0


def test_a_device_that_qemu_cannot_open_is_followed_by_the_next(desk: Starts) -> None:
    domain = desk.define(web1(desk.vfs[0], number=None))
    domain.qemu_fails = f"vfio {desk.vfs[0]}: failed to open /dev/vfio/1"
    assert f"vfio {desk.vfs[0]}: failed to open" in desk.refused()
    assert domain.writes.count("create") == 2


def test_a_device_that_goes_between_choice_and_reservation(
    desk: Starts, monkeypatch: pytest.MonkeyPatch
) -> None:
    domain = desk.define(web1(desk.vfs[0], number=None))
    real = locks.devices
    left = [1]

    def late(state: str, names: object, deadline: float) -> object:
        if left:
            left.pop()
            assert desk.host.hook("prepare", web2(desk.vfs[0])).status == 0
        return real(state, names, deadline)  # type: ignore[arg-type]

    monkeypatch.setattr(locks, "devices", late)
    desk.start()
    assert pointed(domain) == {"ua-vgpu0": desk.vfs[1]}


@pytest.mark.promise(1)
def test_a_lost_race_with_another_start_of_the_same_domain(desk: Starts, gpus: Gpus) -> None:
    """Somebody else's start wins while ours points; what it has isn't ours to touch."""
    device = gpus.device()
    domain = desk.define(web1(device, number=None))

    def create(_flags: int) -> int:
        assert desk.host.hook("prepare", web1(device)).status == 0
        domain.active = True
        raise error(libvirt.VIR_ERR_OPERATION_INVALID, "domain is already running")

    domain.createWithFlags = create  # type: ignore[method-assign]
    assert "can't be started: domain is already running" in desk.refused()
    (claim,) = desk.claims()
    assert (claim.device, claim.phase) == (device, Phase.CONFIGURED)
    assert gpus.type_of(device) == 1152


def test_an_interrupt_leaves_no_reservation(desk: Starts, gpus: Gpus) -> None:
    domain = desk.define(web1(gpus.device(), number=None))

    def create(_flags: int) -> int:
        raise KeyboardInterrupt

    domain.createWithFlags = create  # type: ignore[method-assign]
    assert desk.call("start", "web1").exit_code == 130
    assert desk.claims() == ()


@pytest.mark.promise(8)
def test_no_lock_is_held_while_libvirt_is_called(desk: Starts, gpus: Gpus) -> None:
    domain = desk.define(domain_xml(requests={"ua-vgpu0": "L40S-8Q"}, number=None))
    real = domain.attachDeviceFlags
    tried = []

    def attach(text: str, flags: int) -> int:
        state = desk.host.paths.state
        with locks.devices(state, [*desk.vfs, gpus.device()], 0), locks.host(state, 0):
            tried.append(text)
        return real(text, flags)

    domain.attachDeviceFlags = attach  # type: ignore[method-assign]
    desk.start()
    assert tried


def test_a_hook_that_libvirt_does_not_run_is_told(desk: Starts, gpus: Gpus) -> None:
    domain = desk.define(web1(gpus.device(), number=None))
    domain.hook = None
    result = desk.call("start", "web1")
    assert result.exit_code == 1
    assert f"was started, but {gpus.device()} not prepared for it: libvirt didn't" in result.output


@pytest.mark.promise(1, 3)
@pytest.mark.parametrize("type_id", [1152, 1149])
def test_a_type_that_somebody_sets_on_a_reserved_device_is_not_ours(
    desk: Starts, type_id: int
) -> None:
    domain = desk.define(web1(desk.vfs[0], number=None))

    def hook(operation: str, document: str) -> object:
        if operation == "prepare":
            desk.host.set_type(desk.vfs[0], type_id)
        return desk.host.hook(operation, document)

    domain.hook = hook  # type: ignore[assignment]
    desk.start()
    assert desk.host.type_of(desk.vfs[0]) == str(type_id)
    assert [claim.device for claim in desk.claims()] == [desk.vfs[1]]


# --- what earlier starts left ---


@pytest.mark.parametrize("number", [0, 1])
def test_a_killed_start_stands_in_nobodys_way(desk: Starts, number: int) -> None:
    document = web1(desk.vfs[0], number=None)
    domain = desk.define(document)
    desk.reserve(desk.vfs[number], document)
    desk.start()
    assert pointed(domain) == {"ua-vgpu0": desk.vfs[0]}
    assert [claim.device for claim in desk.claims()] == [desk.vfs[0]]


def test_a_reservation_goes_with_the_failed_start_it_was_for(desk: Starts, gpus: Gpus) -> None:
    document = web1(gpus.device(), number=None)
    desk.define(document)
    desk.reserve(gpus.device(), document)
    assert desk.host.hook("release", document) == (0, "", "")
    assert desk.claims() == ()


def test_anothers_reservation_is_not_taken(desk: Starts) -> None:
    claim = desk.reserve(desk.vfs[0], web2(desk.vfs[0]))
    domain = desk.define(web1(desk.vfs[0], number=None))
    desk.start()
    assert pointed(domain) == {"ua-vgpu0": desk.vfs[1]}
    assert desk.host.claim(desk.vfs[0]) == claim


def test_anothers_reservation_that_lapsed_is(desk: Starts) -> None:
    desk.reserve(desk.vfs[0], web2(desk.vfs[0]), since_boot=0.0)
    domain = desk.define(web1(desk.vfs[0], number=None))
    desk.host.set_policy(reserve_timeout=0.001)
    desk.start()
    assert pointed(domain) == {"ua-vgpu0": desk.vfs[0]}


@pytest.mark.promise(3)
def test_a_lapsed_reservation_goes_without_a_write(desk: Starts, gpus: Gpus) -> None:
    """Nothing was written for it, so a type that is there is somebody else's."""
    device = gpus.device("web2")
    desk.reserve(device, web2(device), since_boot=0.0)
    gpus.set_type(device, 1152)
    desk.host.set_policy(reserve_timeout=0.001)
    assert desk.host.daemon_hook() == (0, "", "")
    assert (desk.claims(), gpus.type_of(device)) == ((), 1152)


def test_its_own_leftover_is_used_again(desk: Starts, gpus: Gpus) -> None:
    """libvirt's word that the domain is off ends what its daemon alone keeps."""
    device = gpus.device()
    assert desk.host.hook("prepare", web1(device)).status == 0
    domain = desk.define(web1(device, number=None))
    assert "; what is on it" not in desk.start()
    assert (domain.writes, pointed(domain)) == (["create"], {"ua-vgpu0": device})


def test_a_foreign_type_is_left_to_prepare(desk: Starts) -> None:
    desk.host.set_policy(foreign="reset")
    desk.host.set_type(desk.vfs[0], 1152)
    domain = desk.define(web1(desk.vfs[0], number=None))
    desk.start()
    claim = desk.host.claim(desk.vfs[0])
    assert claim is not None
    assert (claim.phase, domain.writes) == (Phase.CONFIGURED, ["create"])


def test_a_change_that_was_killed_is_finished_first(desk: Starts) -> None:
    domain = desk.define(domain_xml(requests={"ua-vgpu0": "1152"}, number=None))
    other = Domain(web1(desk.vfs[1], number=None))
    hostdev = libvirt_hostdev(other)
    edits = desk.host.state / "edits"
    change = {"domain_uuid": WEB1, "alias": "ua-vgpu0", "before": hostdev, "after": hostdev}
    desk.host.write(edits / f"{WEB1}.ua-vgpu0.json", json.dumps(change))
    desk.start()
    assert pointed(domain) == {"ua-vgpu0": desk.vfs[1]}
    assert domain.writes == ["attachDeviceFlags", "create"]
    assert "bus='0x05'" in domain.XMLDesc(2).replace('"', "'")


def libvirt_hostdev(domain: Domain) -> str:
    from vgpu_libvirt.domain import edit

    found = edit.find_hostdev(domain.XMLDesc(2), "ua-vgpu0")
    assert found
    return found


# --- what is refused ---


def test_active_transient_unknown_saved_and_plain_domains_are_refused(desk: Starts) -> None:
    assert "there is no domain 'web1'" in desk.refused()
    domain = desk.define(web1(desk.vfs[0], number=None), active=True)
    assert f"{LABEL} runs already" in desk.refused()
    domain.persistent = False
    assert "is transient: it has no definition to start from" in desk.refused()
    domain.persistent, domain.active, domain.saved = True, False, True
    assert "has a saved state, which names its devices itself; run 'virsh start web1'" in (
        desk.refused()
    )
    desk.connection.domains.clear()
    plain = desk.define(domain_xml(number=None))
    assert "asks for no vGPU; start it with 'virsh start web1'" in desk.refused()
    assert plain.writes == []


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        (
            domain_xml(requests='<vgpu:device alias="ua-a" type="1"/>'),
            "can't be understood: unknown attribute 'type'",
        ),
        (web1("0000:3d:00.4", managed="yes"), "'ua-vgpu0' of domain 'web1'"),
        (web1("0000:3d:00.4", managed="yes"), "has managed='yes', with which it gets no vGPU"),
        (
            web1("0000:3d:00.4").replace("type='pci' managed", "type='usb' managed"),
            "has type 'usb', with which it gets no vGPU",
        ),
    ],
)
def test_what_fix_xml_mends_is_refused(desk: Starts, document: str, reason: str) -> None:
    domain = desk.define(document)
    said = desk.refused()
    assert reason in said
    assert "run 'virt-vgpu fix-xml web1'" in said
    assert domain.writes == []


@pytest.mark.parametrize("arguments", [[], ["--dry-run"]])
def test_no_device_is_refused_with_the_owners(desk: Starts, arguments: list[str]) -> None:
    assert desk.host.hook("prepare", web2(desk.vfs[0])).status == 0
    for vf in desk.vfs:
        desk.host.set_list(vf, "")
    domain = desk.define(web1(desk.vfs[0], number=None))
    said = desk.refused(*arguments)
    assert "no device for L40S-8Q: 0000:3d:00.0 is full (owners web2)" in said
    assert domain.writes == []


def test_who_may_not_write_the_store_is_told_who_may(
    desk: Starts, monkeypatch: pytest.MonkeyPatch
) -> None:
    domain = desk.define(web1(desk.vfs[0], number=None))

    def deny(path: str) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", path)

    monkeypatch.setattr(fs, "make_directory", deny)
    said = desk.refused()
    assert (
        f"only root may reserve devices in {desk.host.paths.state}; run 'virt-vgpu start'" in said
    )
    assert domain.writes == []
    desk.start("--dry-run")


def test_the_domain_may_be_named_by_uuid(desk: Starts) -> None:
    desk.define(web1(desk.vfs[0], name="web2", uuid=WEB2, number=None))
    assert desk.call("start", WEB2.upper()).exit_code == 0
