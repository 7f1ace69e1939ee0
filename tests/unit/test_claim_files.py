# SPDX-License-Identifier: LGPL-2.1-or-later
"""Claim files: strict to read, whole or absent at any instant, exclusive to create."""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
import shutil
import socket
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.unit.host import WEB1, WEB2
from tests.unit.support import VF, child, directory_for_all, new_claim, nobody, python
from vgpu_libvirt.claims import model, store
from vgpu_libvirt.claims.model import Claim, Namespaces, Phase, Qemu
from vgpu_libvirt.devices.model import Profile
from vgpu_libvirt.errors import ClaimedError, ClaimUnreadableError, StoreError

pytestmark = pytest.mark.promise(2, 3, 5)

OTHER = "0000:3d:00.5"
FULL = new_claim(
    phase=Phase.RUNNING,
    domain_name="gr\u00fcn\U0001f600 & <co>",
    qemu=Qemu(4001, 90210, "/var/lib/libvirt/qemu/domain-7-web1/monitor.sock"),
    adopted=True,
    error='it "said" no\n',
)
BARE = new_claim(domain_id=None, daemon=None, namespaces=Namespaces(None, None))


@pytest.fixture
def state(tmp_path: Path) -> str:
    return str(tmp_path / "state")


@pytest.fixture
def file(state: str) -> Path:
    """Where VF's claim file goes; nothing is there yet."""
    path = Path(state) / "claims" / f"{VF}.json"
    path.parent.mkdir(parents=True)
    return path


def text_with(**changes: Any) -> str:
    return json.dumps({**FULL.to_json(), **changes})


def unreadable(state: str, device: str = VF) -> str:
    """Why the claim on DEVICE can't be read; told for the file and for the whole store alike."""
    with pytest.raises(ClaimUnreadableError) as caught:
        store.read(state, device)
    claims = store.read_all(state)
    assert claims.unreadable[device] == str(caught.value)
    assert str(caught.value) in claims.problems
    assert device not in claims.readable
    start = f"the claim file {state}/claims/{device}.json is "
    end = f"; {device} stays as it is until that is mended"
    sentence = str(caught.value)
    assert sentence.startswith(start)
    assert sentence.endswith(end)
    return sentence.removeprefix(start).removesuffix(end)


# --- reading ---


@pytest.mark.parametrize("claim", [FULL, BARE], ids=["full", "bare"])
@pytest.mark.parametrize("phase", list(Phase))
@pytest.mark.parametrize("is_no_domains", [False, True], ids=["owned", "no-domains"])
def test_what_was_written_is_read(
    state: str, claim: Claim, phase: Phase, is_no_domains: bool
) -> None:
    claim = claim._replace(phase=phase)
    if is_no_domains or phase is Phase.CARVED:
        claim = claim._replace(domain_uuid="", domain_name="", alias="")
    store.create(state, claim)
    assert store.read(state, VF) == claim
    assert store.read_all(state) == ({VF: claim}, {}, ())


def test_the_file_is_the_one_that_is_documented(state: str) -> None:
    store.create(state, new_claim(qemu=Qemu(4001, 90210, "/m")))
    assert json.loads((Path(state) / "claims" / f"{VF}.json").read_text()) == {
        "version": 1,
        "device": VF,
        "backend": "vendor-vfio",
        "gpu": "0000:3d:00.0",
        "profile": {"id": 1152, "name": "NVIDIA L40S-8Q"},
        "claim_id": "0123456789abcdef0123456789abcdef",
        "phase": "configured",
        "domain_uuid": WEB1,
        "domain_name": "web1",
        "domain_id": 7,
        "alias": "ua-vgpu0",
        "boot_id": "11111111-2222-3333-4444-555555555555",
        "created": 1790000000.0,
        "since_boot": 512.5,
        "daemon": {"pid": 811, "start": 4242},
        "qemu": {"pid": 4001, "start": 90210, "monitor": "/m"},
        "namespaces": {"pid": 4026531836, "net": 4026531840},
        "adopted": False,
        "error": None,
    }


def test_an_empty_store_has_no_claims(state: str) -> None:
    assert store.read_all(state) == ({}, {}, ())
    assert store.read(state, VF) is None
    assert not Path(state).exists(), "reading makes no directory"


def test_a_file_cut_off_anywhere_protects_its_device(state: str, file: Path) -> None:
    whole = model.dump(FULL)
    for end in range(len(whole.rstrip())):
        with pytest.raises(ClaimUnreadableError, match="not valid JSON"):
            model.parse(whole[:end], VF)
    file.write_text(whole[:-20])
    assert unreadable(state).startswith("not valid JSON (")


def test_a_flipped_bit_makes_another_claim_or_an_unreadable_one() -> None:
    """And never another exception, which would cost every claim on the host."""
    text = model.dump(FULL)
    unread = 0
    for position in range(len(text)):
        for bit in (0, 2, 5, 6):
            flipped = text[:position] + chr(ord(text[position]) ^ 1 << bit) + text[position + 1 :]
            try:
                assert model.parse(flipped, VF).device == VF
            except ClaimUnreadableError:
                unread += 1
    assert unread > len(text)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not valid JSON"),
        (b"\n", "not valid JSON"),
        (b"\0" * 512, "not valid JSON"),  # what a power cut leaves on some filesystems
        (b"\x7fELF\xff\xfe", "unreadable: not a text in UTF-8"),
        (b"\xef\xbb\xbf{}", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b"9" * 5000, "not valid JSON"),
        (b" " * (4 * 1024 * 1024 + 1), "unreadable: file too large"),
        (b"null", "not a JSON object"),
        (b"[]", "not a JSON object"),
        (b"{}", "of version None, but this program knows only 1"),
    ],
    ids=lambda value: repr(value[:12]) if isinstance(value, bytes) else None,
)
def test_what_is_no_claim_protects_its_device(
    state: str, file: Path, content: bytes, reason: str
) -> None:
    file.write_bytes(content)
    assert unreadable(state).startswith(reason)


@pytest.mark.parametrize("version", [0, 2, "1", None, True, 1.0, [1]])
def test_an_unknown_version_protects_its_device(state: str, file: Path, version: object) -> None:
    file.write_text(text_with(version=version))
    assert unreadable(state) == f"of version {version!r}, but this program knows only 1"


@pytest.mark.parametrize("key", Claim._fields)
def test_a_missing_key(state: str, file: Path, key: str) -> None:
    data = FULL.to_json()
    del data[key]
    file.write_text(json.dumps(data))
    assert unreadable(state) == f"wrong in its keys ({key})"


def test_an_extra_key(state: str, file: Path) -> None:
    file.write_text(text_with(colour="red"))
    assert unreadable(state) == "wrong in its keys (colour)"


NO_TEXT: tuple[object, ...] = (None, 1, True, [], {}, "", "a\0b", "\ud800")
NO_TIME: tuple[object, ...] = (None, "1", True, [], -1, 10**400, float("nan"), float("inf"))
NO_NUMBER: tuple[object, ...] = ("1", 1.5, True, [], {})
EMPTY: tuple[object, ...] = (0, "", False, [], {})
WRONG: dict[str, tuple[object, ...]] = {
    "device": NO_TEXT,
    "backend": NO_TEXT,
    "gpu": NO_TEXT,
    "profile": (None, [], {}, {"id": 1}, {"id": "1", "name": "x"}, {"id": 1, "name": None}),
    "claim_id": NO_TEXT,
    "phase": (*NO_TEXT, "Running", "running "),
    "domain_uuid": (*NO_TEXT, WEB1.upper(), WEB1[:-1], f"{WEB1}\n"),
    "domain_name": NO_TEXT,
    "domain_id": NO_NUMBER,
    "alias": NO_TEXT,
    "boot_id": NO_TEXT,
    "created": NO_TIME,
    "since_boot": NO_TIME,
    "daemon": (*EMPTY, {"pid": 1}, {"pid": 1, "start": "1"}, {"pid": 1, "start": 1, "x": 1}),
    "qemu": (*EMPTY, {"pid": 1, "start": 1}, {"pid": 1, "start": 1, "monitor": None}),
    "namespaces": (None, *EMPTY, {"pid": 1}, {"pid": 1, "net": "1"}),
    "adopted": (None, 0, 1, "no"),
    "error": (0, False, [], {}),
}


def test_each_key_has_its_wrong_values() -> None:
    assert WRONG.keys() == set(Claim._fields)


@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for key, values in WRONG.items() for value in values]
)
def test_a_value_of_the_wrong_kind_protects_its_device(
    state: str, file: Path, key: str, value: object
) -> None:
    file.write_text(text_with(**{key: value}))
    assert re.match(rf"wrong in '{key}[.']", unreadable(state))


def test_only_what_is_no_domains_is_carved(state: str, file: Path) -> None:
    file.write_text(text_with(phase="carved"))
    assert unreadable(state).startswith("wrong in 'phase' ('carved', but for domain ")


@pytest.mark.parametrize("key", ["domain_uuid", "domain_name", "alias"])
def test_no_domain_is_named_by_nothing(state: str, file: Path, key: str) -> None:
    nobody = dict.fromkeys(("domain_uuid", "domain_name", "alias"))
    file.write_text(text_with(**{**nobody, key: FULL.to_json()[key]}))
    assert re.match(r"wrong in '(domain_uuid|domain_name|alias)'", unreadable(state))


def test_a_claim_under_another_devices_name(state: str, file: Path) -> None:
    other = file.with_name(f"{OTHER}.json")
    other.write_text(model.dump(FULL))
    assert unreadable(state, OTHER) == f"about another device ('{VF}')"
    assert store.read(state, VF) is None


def test_one_unreadable_claim_costs_only_its_own_device(state: str, file: Path) -> None:
    file.write_text("")
    store.create(state, new_claim(OTHER))
    claims = store.read_all(state)
    assert claims.readable == {OTHER: new_claim(OTHER)}
    assert list(claims.unreadable) == [VF]
    assert claims.of_domain(WEB1) == (new_claim(OTHER),)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("directory", "unreadable: is a directory"),
        ("loop", "unreadable: too many levels of symbolic links"),
        ("link to nothing", "unreadable: a link to nothing"),
        ("endless", "unreadable: file too large"),
        ("socket", "unreadable: no such device or address"),
        ("fifo", "unreadable: not a regular file"),
        ("fifo with a writer", "unreadable: not a regular file"),
    ],
)
def test_what_is_no_file_protects_its_device_and_hangs_nobody(
    state: str, file: Path, kind: str, reason: str
) -> None:
    writer = None
    if kind == "directory":
        file.mkdir()
    elif kind == "loop":
        file.symlink_to(file)
    elif kind == "link to nothing":
        file.symlink_to(f"{file}.missing")
    elif kind == "endless":
        file.symlink_to("/dev/zero")
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as bound:
            directory = os.open(file.parent, os.O_PATH)
            bound.bind(f"/proc/self/fd/{directory}/{file.name}")
            os.close(directory)
    else:
        os.mkfifo(file)
        writer = os.open(file, os.O_RDWR) if "writer" in kind else None
    try:
        assert unreadable(state).startswith(reason)
        with pytest.raises(ClaimedError):
            store.create(state, FULL)
    finally:
        if writer is not None:
            os.close(writer)


def test_a_file_without_permission_protects_its_device() -> None:
    with directory_for_all() as directory:
        store.create(str(directory), new_claim())
        store.create(str(directory), new_claim(OTHER))
        (directory / f"claims/{VF}.json").chmod(0)
        with nobody():
            assert unreadable(str(directory)) == "unreadable: permission denied"
            assert list(store.read_all(str(directory)).readable) == [OTHER]


def test_claims_of_which_not_even_the_names_can_be_read() -> None:
    with directory_for_all() as directory:
        store.create(str(directory), new_claim())
        (directory / "claims").chmod(0)
        with nobody(), pytest.raises(StoreError) as caught:
            store.read_all(str(directory))
        (directory / "claims").chmod(0o755)
    assert str(caught.value) == f"the claims in {directory}/claims can't be read: permission denied"


def test_a_file_in_the_place_of_the_claims(state: str) -> None:
    Path(state).mkdir()
    Path(state, "claims").write_text("")
    with pytest.raises(StoreError, match="not a directory"):
        store.read_all(state)


@pytest.mark.parametrize(
    "name",
    [
        ".json",
        "x.json",
        VF,
        f"{VF}.json~",
        f".{VF}.json",
        f"{VF}.json.rpmsave",
        f"{VF.upper()}.json",
        "3d:00.4.json",
        "0000:3d:00.8.json",
        "0000:3d:20.0.json",
        f"{WEB1.upper()}.json",
        "gr\u00fcn.json",
        "two\nlines.json",
        "..json",
    ],
)
def test_a_stray_file_is_reported_and_protects_nothing(state: str, file: Path, name: str) -> None:
    file.with_name(name).write_text(model.dump(FULL))
    store.create(state, new_claim(OTHER))
    assert store.read_all(state) == (
        {OTHER: new_claim(OTHER)},
        {},
        (f"{state}/claims/{name} is not a claim; move it elsewhere",),
    )


def test_a_mediated_device_is_called_by_its_uuid(state: str) -> None:
    claim = new_claim(WEB2, profile=Profile("nvidia-558", "NVIDIA A40-8Q"))
    store.create(state, claim)
    assert store.read_all(state).readable == {WEB2: claim}


@pytest.mark.parametrize("device, number", [(OTHER, "nvidia-558"), (WEB2, 1152)])
def test_a_profile_is_called_as_devices_of_its_kind_call_theirs(
    state: str, device: str, number: int | str
) -> None:
    store.create(state, new_claim(device, profile=Profile(number, "NVIDIA L40S-8Q")))
    with pytest.raises(ClaimUnreadableError, match=r"wrong in 'profile\.id'"):
        store.read(state, device)


def test_the_claims_of_a_domain_in_the_order_of_their_devices(state: str) -> None:
    for device, uuid in ((OTHER, WEB1), ("0000:41:00.4", WEB2), (VF, WEB1)):
        store.create(state, new_claim(device, domain_uuid=uuid))
    assert [claim.device for claim in store.read_all(state).of_domain(WEB1)] == [VF, OTHER]


def test_the_claims_of_one_domain_are_those_among_all(state: str, file: Path) -> None:
    assert store.of_domain(state, WEB1) == ()
    for device, uuid in ((VF, WEB1), ("0000:3d:00.6", WEB2), (OTHER, WEB1)):
        store.create(state, new_claim(device, domain_uuid=uuid))
    # It isn't its owner's UUID that this one's text has in it.
    store.create(state, new_claim("0000:3d:00.7", domain_uuid=WEB2, error=f"see {WEB1}"))
    file.with_name("0000:5e:00.4.json").write_text(f'{{"domain_uuid": "{WEB1}"')
    file.with_name("stray.txt").write_text(WEB1)
    everything = store.read_all(state)
    assert list(everything.unreadable) == ["0000:5e:00.4"]
    for uuid in (WEB1, WEB2):
        assert store.of_domain(state, uuid) == everything.of_domain(uuid) != ()


# --- writing ---


def names(state: str) -> list[str]:
    return sorted(str(path.relative_to(state)) for path in Path(state).rglob("*") if path.is_file())


def test_writing_leaves_nothing_but_the_claim(state: str) -> None:
    store.create(state, new_claim())
    assert names(state) == [f"claims/{VF}.json"]
    store.replace(state, FULL)
    assert names(state) == [f"claims/{VF}.json"]
    assert store.read(state, VF) == FULL
    store.drop(state, VF)
    assert names(state) == []


def test_a_claim_is_never_created_over_another(state: str) -> None:
    store.create(state, FULL)
    with pytest.raises(ClaimedError, match=f"^{VF} has been claimed by somebody else$"):
        store.create(state, new_claim(domain_uuid=WEB2))
    assert store.read(state, VF) == FULL


@pytest.mark.parametrize("left", ["file", "second name", "link", "directory"])
def test_what_a_killed_writer_left_does_no_harm(state: str, left: str) -> None:
    store.create(state, FULL)
    aside = Path(state) / "tmp" / f"{OTHER if left == 'directory' else VF}.json"
    claim = Path(state) / "claims" / f"{VF}.json"
    if left == "file":
        aside.write_text("{")
    elif left == "second name":
        aside.hardlink_to(claim)
    elif left == "link":
        aside.symlink_to(claim)
    else:
        aside.mkdir()
    with pytest.raises(ClaimedError):
        store.create(state, new_claim(domain_uuid=WEB2))
    assert store.read(state, VF) == FULL
    store.replace(state, new_claim())
    store.drop(state, VF)
    store.create(state, FULL)
    assert store.read_all(state) == ({VF: FULL}, {}, ())


def test_a_store_that_cannot_be_written() -> None:
    with directory_for_all() as directory:
        state = str(directory)
        store.create(state, FULL)
        closed = [directory / name for name in ("claims", "tmp")]
        for each in closed:
            each.chmod(0o555)
        with nobody():
            writes = (
                functools.partial(store.create, state, new_claim(OTHER)),
                functools.partial(store.replace, state, new_claim()),
                functools.partial(store.drop, state, VF),
            )
            for write in writes:
                with pytest.raises(StoreError) as caught:
                    write()
                sentence = str(caught.value)
                assert re.fullmatch(
                    rf"the claim on \S+ can't be written in {state}: permission denied", sentence
                )
        assert store.read_all(state) == ({VF: FULL}, {}, ())
        for each in closed:
            each.chmod(0o755)


def test_a_full_disk_leaves_the_old_claim(state: str) -> None:
    """RLIMIT_FSIZE, since a full disk can't be had: the write ends short."""
    store.create(state, FULL)
    program = """
import resource, signal
from vgpu_libvirt.claims import model, store
from vgpu_libvirt.errors import StoreError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
for write in (store.replace, store.create):
    try:
        write(sys.argv[1], model.parse(sys.argv[2], "0000:3d:00.4"))
    except StoreError as error:
        print(error)
"""
    done = subprocess.run(
        python(program, state, model.dump(new_claim())), capture_output=True, text=True, check=True
    )
    assert done.stdout == f"the claim on {VF} can't be written in {state}: file too large\n" * 2
    assert store.read_all(state) == ({VF: FULL}, {}, ())


CREATE_AT_ONCE = """
from vgpu_libvirt.claims import locks, model, store
from vgpu_libvirt.errors import ClaimedError
import time
state, number, text = sys.argv[1:]
claim = model.parse(text, "0000:3d:00.4")._replace(claim_id=number)
print("ready", flush=True)
sys.stdin.readline()
for device in range(8):
    try:
        with locks.host(state, time.monotonic() + 30):
            store.create(state, claim._replace(device=f"0000:3d:00.{device}"))
        print(device)
    except ClaimedError:
        pass
"""


def test_of_many_processes_one_creates_a_claim(state: str) -> None:
    workers = [
        subprocess.Popen(
            python(CREATE_AT_ONCE, state, str(number), model.dump(new_claim())),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(6)
    ]
    for worker in workers:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "ready\n"
    created = {}
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.write("\n")
        worker.stdin.flush()
    for number, worker in enumerate(workers):
        created[str(number)] = worker.communicate(timeout=30)[0].split()
        assert worker.returncode == 0
    assert Counter(itertools.chain(*created.values())) == dict.fromkeys("01234567", 1)
    for device, claim in store.read_all(state).readable.items():
        assert device[-1] in created[claim.claim_id]


REPLACE_FOR_EVER = """
from vgpu_libvirt.claims import model, store
claim = model.parse(sys.argv[2], "0000:3d:00.4")
print("ready", flush=True)
while True:
    for letter in "ab":
        store.replace(sys.argv[1], claim._replace(claim_id=letter, error=letter * 5000))
"""


def test_a_reader_sees_the_old_claim_or_the_new_one(state: str) -> None:
    store.create(state, new_claim(claim_id="a", error="a" * 5000))
    seen = Counter[str]()
    end = time.monotonic() + 20
    with child(REPLACE_FOR_EVER, state, model.dump(new_claim())):
        while time.monotonic() < end and min(seen["a"], seen["b"]) < 100:
            claim = store.read(state, VF)
            assert claim is not None
            assert claim.error == claim.claim_id * 5000
            seen[claim.claim_id] += 1
    assert set(seen) == {"a", "b"}


# --- killed at any instant ---

STRACE = shutil.which("strace")
# Every system call with which a writer changes the filesystem, or makes a change durable.
CALLS = "openat,write,fsync,close,link,rename,unlink,mkdir"
STEP = """
from vgpu_libvirt.claims import model, store
import os
state, verb, text = sys.argv[1:]
claim = model.parse(text, "0000:3d:00.4")
model.dump(claim)
os.getcwd()  # the mark after which calls count
if verb == "drop":
    store.drop(state, claim.device)
else:
    getattr(store, verb)(state, claim)
"""


NEW = new_claim(claim_id="new", error="n" * 3000)


def prepared(directory: Path, verb: str, number: int) -> str:
    state = str(directory / f"{verb}{number}")
    store.create(state, new_claim(OTHER))
    if verb != "create":
        store.create(state, new_claim(claim_id="old"))
    return state


def traced(state: str, verb: str, *options: str) -> list[str]:
    """Make the change under strace; return the lines of its trace."""
    trace = Path(state).with_suffix(".trace")
    command = [str(STRACE), "-o", str(trace), "-e", f"trace={CALLS},getcwd", *options]
    subprocess.run([*command, *python(STEP, state, verb, model.dump(NEW))], capture_output=True)
    return trace.read_text().splitlines()


@pytest.mark.skipif(STRACE is None, reason="strace is not installed")
@pytest.mark.parametrize("verb", ["create", "replace", "drop"])
def test_killed_at_any_system_call_the_store_is_whole_and_the_next_writer_works(
    tmp_path: Path, verb: str
) -> None:
    state = prepared(tmp_path, verb, 0)
    lines = traced(state, verb)
    assert lines[-1] == "+++ exited with 0 +++"
    calls = [line.partition("(")[0] for line in lines if "(" in line]
    # What Python does before the change and at its own end is left out.
    mark = len(calls) - calls[::-1].index("getcwd")
    last = max(n for n, line in enumerate(lines) if line.startswith(("close(", "unlink(")))
    assert {"openat", "fsync", "close"} <= set(calls[mark : last + 1])
    results = []
    for number in range(mark, last + 1):
        state = prepared(tmp_path, verb, number)
        when = calls[: number + 1].count(calls[number])
        lines = traced(state, verb, "-e", f"inject={calls[number]}:signal=KILL:when={when}")
        assert lines[-1] == "+++ killed by SIGKILL +++"
        results.append(outcome(state, verb))
    assert results == sorted(results, reverse=True), "one call makes the change"
    assert set(results) == {"old", "new"}, "kills fell on both sides of it"


def outcome(state: str, verb: str) -> str:
    """Whether the change was made when the process was killed; the store is whole either way."""
    claims = store.read_all(state)
    assert (claims.unreadable, claims.problems) == ({}, ())
    assert claims.readable[OTHER] == new_claim(OTHER)
    claim = claims.readable.get(VF)
    before = None if verb == "create" else new_claim(claim_id="old")
    after = None if verb == "drop" else NEW
    assert claim in (before, after)
    store.replace(state, FULL)
    store.drop(state, VF)
    store.create(state, FULL)
    assert store.read(state, VF) == FULL
    assert names(state) == [f"claims/{VF}.json", f"claims/{OTHER}.json"]
    return "new" if claim == after else "old"


@pytest.mark.skipif(STRACE is None, reason="strace is not installed")
@pytest.mark.parametrize(
    ("verb", "order"),
    [
        ("create", ["write FILE", "fsync FILE", "link", "fsync DIRECTORY", "unlink"]),
        ("replace", ["write FILE", "fsync FILE", "rename", "fsync DIRECTORY"]),
        ("drop", ["unlink", "fsync DIRECTORY"]),
    ],
)
def test_a_change_is_durable_before_anything_follows(
    tmp_path: Path, verb: str, order: list[str]
) -> None:
    """The file's content before its name, and the name before the caller goes on to the device."""
    state = os.path.realpath(prepared(tmp_path, verb, 0))
    lines = traced(state, verb, "-y")
    assert lines[-1] == "+++ exited with 0 +++"
    places = {f"<{state}/tmp/{VF}.json>": " FILE", f"<{state}/claims>": " DIRECTORY"}
    steps = []
    for line in lines:
        call = line.partition("(")[0]
        where = next((name for place, name in places.items() if place in line), "")
        if call in ("link", "rename", "unlink") or (where and call in ("write", "fsync")):
            steps.append(f"{call}{where}" if call in ("write", "fsync") else call)
    assert steps == order
