# SPDX-License-Identifier: LGPL-2.1-or-later
"""The catalogue of profiles: what goes in, what comes out, and that nothing hangs on it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.unit.host import L40S, Host, web1, web2
from vgpu_libvirt import report
from vgpu_libvirt.address import PciAddress
from vgpu_libvirt.devices import catalogue
from vgpu_libvirt.devices.catalogue import Catalogue, learned
from vgpu_libvirt.devices.model import Profile
from vgpu_libvirt.devices.vendor_vfio import parse_creatable
from vgpu_libvirt.errors import CatalogueError
from vgpu_libvirt.lifecycle import learn
from vgpu_libvirt.survey import look

if TYPE_CHECKING:
    from pathlib import Path

Q8, Q4 = Profile(1152, "NVIDIA L40S-8Q"), Profile(1150, "NVIDIA L40S-4Q")
A40 = Profile(558, "NVIDIA A40-2Q")
MIG = Profile(1561, "NVIDIA RTX Pro 6000 Blackwell DC-1-24Q")
FULL = "ID    : vGPU Name\n"


def path(host: Host) -> Path:
    return host.state / "catalogue.json"


def test_it_is_as_it_was_written(tmp_path: Path) -> None:
    state = str(tmp_path / "state")
    assert catalogue.read(state) == Catalogue()
    for number, complete in enumerate((frozenset[str](), frozenset({"L40S"}))):
        made = Catalogue(tuple(sorted((Q8, Q4, A40, MIG))), complete)
        catalogue.write(state, made)
        assert catalogue.read(state) == made, number


def test_what_is_learned_adds_up() -> None:
    some = learned(Catalogue(), [Q8])
    assert some == Catalogue((Q8,))
    assert learned(some, [Q4], [A40]) == Catalogue((A40, Q4, Q8), frozenset({"A40"}))
    assert not learned(some, [Q4]).is_complete
    assert learned(some, (), [Q4]).is_complete


@pytest.mark.parametrize("new", [Profile(1152, "NVIDIA L40S-9Q"), Profile(77, "NVIDIA L40S-8Q")])
def test_what_a_new_driver_numbers_anew_replaces_the_old(new: Profile) -> None:
    old = Catalogue((Q4, Q8), frozenset({"L40S"}))
    assert learned(old, [new]) == Catalogue(tuple(sorted((Q4, new))))


def test_a_name_that_could_not_be_read_back_is_not_learned() -> None:
    odd = [Profile(0, "NVIDIA L40S-8Q"), Profile(2**32, "X"), Profile(3, "a\x07b"), Profile(4, " ")]
    assert learned(Catalogue(), odd, odd) == Catalogue()


def test_a_list_is_believed_before_the_catalogue_and_that_before_a_claim() -> None:
    asked = Profile(1152, "L40S-8Q")
    assert catalogue.known([], Catalogue((Q8,)), [asked]).profiles == (Q8,)
    new = Profile(1152, "NVIDIA L40S-8X")
    assert catalogue.known([new], Catalogue((Q8,)), [asked]).profiles == (new,)
    assert catalogue.known([], Catalogue(), [asked]).profiles == (asked,)


GOOD = {"version": 1, "cards": {"L40S": {"complete": True, "profiles": {"1152": "NVIDIA L40S-8Q"}}}}


@pytest.mark.parametrize(
    "spoilt",
    [
        "",
        "[]",
        "[" * 100_000,
        "nul",
        '{"version": 1}',
        json.dumps({**GOOD, "version": 2}),
        json.dumps({**GOOD, "version": True}),
        json.dumps({**GOOD, "more": 1}),
        json.dumps({**GOOD, "cards": []}),
        json.dumps(GOOD).replace("true", "1"),
        json.dumps(GOOD).replace('"L40S"', '"A40"'),
        json.dumps(GOOD).replace('"1152"', '"01152"'),
        json.dumps(GOOD).replace('"1152"', '"-1"'),
        json.dumps(GOOD).replace('"1152"', '"٣"'),
        json.dumps(GOOD).replace('"1152"', '"99999999999"'),
        json.dumps(GOOD).replace("8Q", "8Q\\n"),
        json.dumps(GOOD).replace('"NVIDIA L40S-8Q"', "7"),
        json.dumps(GOOD).replace('{"1152": "NVIDIA L40S-8Q"}', "{}"),
        json.dumps(
            {
                "version": 1,
                "cards": {
                    card: {"complete": False, "profiles": {"1": f"NVIDIA {card}-8Q"}}
                    for card in ("A", "B")
                },
            }
        ),
    ],
)
@pytest.mark.promise(5, 6)
def test_one_that_cannot_be_read_is_reported_kept_and_stops_nothing(
    host: Host, spoilt: str
) -> None:
    vf, second, *_ = host.gpu()
    host.write(path(host), spoilt)
    with pytest.raises(CatalogueError, match=r"catalogue\.json can't be understood: .*; remove it"):
        catalogue.read(host.paths.state)
    assert host.hook("prepare", web1(vf)) == (0, "", "")
    assert host.hook("prepare", web2(second, "L40S-9Q")).status == 1
    problems = report.build(look(host.config)).problems
    assert [problem for problem in problems if "the catalogue of profiles" in problem] == [
        learn.from_lists(host.paths, [Q8])
    ]
    assert path(host).read_text() == spoilt


@pytest.mark.promise(5, 6)
def test_nor_does_one_that_is_no_file(host: Host) -> None:
    vf = host.gpu()[0]
    path(host).mkdir(parents=True)
    assert host.hook("prepare", web1(vf)) == (0, "", "")
    assert "catalogue.json can't be read: is a directory" in look(host.config).problems[0]


def test_a_start_remembers_what_its_device_listed(host: Host) -> None:
    first, second, *_ = host.gpu()
    assert host.hook("prepare", web1(first)).status == 0
    found = catalogue.read(host.paths.state)
    assert (set(found.profiles), found.complete) == (set(parse_creatable(L40S)), frozenset())
    written = path(host).stat().st_mtime_ns, path(host).stat().st_ino
    assert host.hook("prepare", web2(second)).status == 0
    assert (path(host).stat().st_mtime_ns, path(host).stat().st_ino) == written, "nothing new"


@pytest.mark.promise(9)
def test_a_start_that_is_refused_remembers_nothing(host: Host) -> None:
    vf = host.gpu()[0]
    assert host.hook("prepare", web1(vf, "L40S-9Q")).status == 1
    assert not path(host).exists()


def test_what_an_idle_gpu_lists_is_all(host: Host) -> None:
    host.gpu()
    host.gpu("0000:5e:00.0", lists="558 : NVIDIA A40-2Q\n")
    host.set_type("0000:5e:00.5", 558)
    assert learn.from_inventory(host.config, look(host.config).host.inventory) is None
    found = catalogue.read(host.paths.state)
    assert (A40 in found.profiles, found.complete) == (True, frozenset({"L40S"}))


def test_what_runs_on_an_excluded_vf_makes_no_gpu_idle(host: Host) -> None:
    vf = host.gpu()[0]
    host.set_type(vf, 1155)
    host.set_policy(exclude=(PciAddress.parse(vf),))
    learn.from_inventory(host.config, look(host.config).host.inventory)
    assert catalogue.read(host.paths.state).complete == frozenset()


def test_types_and_sizes_that_no_list_shows_any_more_are_known(host: Host) -> None:
    vfs = host.gpu(lists=L40S.replace("L40S", "NEW1"))
    learn.from_inventory(host.config, look(host.config).host.inventory)
    host.set_type(vfs[0], 1155)
    host.set_list(vfs[0], FULL)
    for vf in vfs[1:]:
        host.set_list(vf, "1155 : NVIDIA NEW1-24Q\n")
    seen = look(host.config)
    assert report.build(seen).gpus[0].devices[0].profile == Profile(1155, "NVIDIA NEW1-24Q")
    (one,) = report.capacities(seen)
    assert (one.startable, one.bound) == (1, ""), "of 48 GB, as the catalogue tells"


def test_a_domain_that_runs_unclaimed_gets_the_drivers_name(host: Host) -> None:
    vf = host.gpu()[0]
    learn.from_inventory(host.config, look(host.config).host.inventory)
    for each in [*host.gpu("0000:5e:00.0", lists=FULL), vf]:
        host.set_list(each, FULL)
    host.set_type(vf, 1152)
    host.run_domain("web1", "aaaaaaaa-0000-0000-0000-000000000001", 4001, web1(vf, "L40S-8Q"))
    assert host.hook("reconnect", web1(vf, "L40S-8Q")) == (0, "", "")
    claim = host.claim(vf)
    assert claim is not None
    assert claim.profile == Q8


@pytest.mark.promise(9)
def test_looking_never_writes_it(host: Host) -> None:
    host.gpu()
    report.build(look(host.config))
    assert not host.state.exists()
