# SPDX-License-Identifier: LGPL-2.1-or-later
"""People edit definitions while we point them: nothing of theirs is lost, no hostdev gone or twice.

$VGPU_LIBVIRT_SYNCS: how many syncs run, two at a time, each of which has to point every definition
elsewhere.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from lxml import etree

from tests.conftest import COUNTS
from tests.lab.guest import (
    CLAIMS,
    OTHER_GPU_VF,
    PROFILE_ID,
    VF1,
    VF2,
    VF3,
    define,
    domain_xml,
    run,
    set_type,
    sync,
    type_of,
    virsh,
)
from vgpu_libvirt.domain.read import parse_domain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SYNCS = int(os.environ.get("VGPU_LIBVIRT_SYNCS", "24"))
PLACES = {"web1": VF1, "web2": VF2, "web3": VF3, "web4": OTHER_GPU_VF}
BY_EDIT, BY_SMALL_EDITS = ("web1", "web3"), ("web2", "web4")
EDITS = CLAIMS.parent / "edits"
NEW_ADDRESS = "has another address in the guest now"

# Runs the verb once for each line that it reads: an interpreter's start costs seconds here.
SYNCER = """
import sys
from vgpu_libvirt.cli.main import main
for _ in sys.stdin:
    main(["sync", "--json"], standalone_mode=False)
    print("END", flush=True)
"""

# An editor for `virsh edit`: what it changes from one number to the next, it must find as it was.
EDITOR = """#!/bin/sh
exec sed -i -e 's/theirs {was}</theirs {will}</' \\
    -e "s|<memory unit='KiB'>.*<|<memory unit='KiB'>{memory}<|" \\
    -e "s|<currentMemory unit='KiB'>.*<|<currentMemory unit='KiB'>{memory}<|" "$1"
"""


class Syncer:
    """A process that runs `virt-vgpu sync` when told."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", SYNCER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def begin(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        lines = list(iter(self.process.stdout.readline, "END\n"))
        return dict(json.loads("".join(lines)))


@pytest.fixture
def syncers() -> Iterator[tuple[Syncer, Syncer]]:
    both = Syncer(), Syncer()
    yield both
    for syncer in both:
        syncer.process.kill()
        syncer.process.wait()


@pytest.fixture
def foreign(clean: None) -> Iterator[Callable[[set[str]], None]]:
    """Gives VFs a type that we didn't set, and takes it from those that had one."""
    del clean
    have: set[str] = set()

    def put(vfs: set[str]) -> None:
        for vf in have:
            set_type(vf, "0")
        for vf in vfs:
            set_type(vf, PROFILE_ID)
        have.clear()
        have.update(vfs)

    yield put
    put(set())


def definition(name: str) -> str:
    """The definition as it is on libvirt's disk."""
    return Path(f"/etc/libvirt/qemu/{name}.xml").read_text()


def place(name: str) -> str | None:
    hostdev = parse_domain(definition(name)).hostdev("ua-vgpu0")
    return str(hostdev.address) if hostdev else None


def with_theirs(name: str, number: int) -> str:
    """A domain with a description, and metadata of another namespace."""
    document = domain_xml(name, PLACES[name]).replace(
        "</metadata>",
        f"<t:other xmlns:t='urn:theirs'><t:n>theirs {number}</t:n></t:other></metadata>",
    )
    return document.replace("<memory ", f"<description>theirs {number}</description><memory ")


def elsewhere(document: str) -> bytes:
    """What of a definition is none of our business."""
    root = etree.fromstring(document, etree.XMLParser(remove_blank_text=True))
    for path in ("devices/hostdev", "devices/controller"):
        for element in root.findall(path):
            parent = element.getparent()
            assert parent is not None
            parent.remove(element)
    return etree.tostring(root)


class Editor(threading.Thread):
    """Somebody who edits until told to stop, and looks each time whether the last edit is there."""

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        self.names = names
        self.numbers = dict.fromkeys(names, 0)
        self.counts: Counter[str] = Counter()
        self.stopping = threading.Event()
        self.lost: list[str] = []

    def run(self) -> None:
        while not self.stopping.is_set() and not self.lost:
            for name in self.names:
                self.edit(name, self.numbers[name])

    def edit(self, name: str, number: int) -> None:
        raise NotImplementedError

    def end(self) -> None:
        self.stopping.set()
        self.join()
        assert not self.lost


class VirshEdit(Editor):
    """`virsh edit`, with a program for an editor."""

    def edit(self, name: str, number: int) -> None:
        script = Path("/tmp") / f"edit-{name}"
        memory = 64 * 1024 + 1024 * (number % 8)
        script.write_text(EDITOR.format(was=number, will=number + 1, memory=memory))
        script.chmod(0o755)
        if definition(name).count(f"theirs {number}<") != 2:
            self.lost.append(f"edit {number} of {name}: {definition(name)}")
        answer = run("env", f"EDITOR={script}", "virsh", "--quiet", "edit", name)
        # Without a terminal to ask at, it defines nothing then, and may exit with 0.
        if "changed by another user" in answer.output:
            self.counts["virsh edit, asked since we had changed it too"] += 1
        elif answer.status == 0 and "not changed" not in answer.output:
            self.numbers[name] = number + 1
            self.counts["virsh edit"] += 1
        else:
            self.lost.append(answer.output)


class SmallEdits(Editor):
    """The verbs of virsh that change one thing each."""

    def edit(self, name: str, number: int) -> None:
        document = etree.fromstring(virsh("dumpxml", "--inactive", name))
        found = (
            document.findtext("description"),
            document.findtext("metadata/{urn:theirs}other/{urn:theirs}n"),
            [mac.get("address") for mac in document.iterfind("devices/interface/mac")],
        )
        macs = [mac(number)] if number else []
        if found != (f"theirs {number}", f"theirs {number}", macs):
            self.lost.append(f"edit {number} of {name}: {found}")
        virsh("desc", "--config", name, f"theirs {number + 1}")
        text = f"<other><n>theirs {number + 1}</n></other>"
        virsh("metadata", name, "urn:theirs", "--config", "--key", "t", "--set", text)
        if number:
            virsh("detach-interface", name, "user", "--config", "--mac", mac(number))
        device = Path("/tmp") / f"device-{name}.xml"
        device.write_text(
            f"<interface type='user'><mac address='{mac(number + 1)}'/>"
            "<model type='virtio'/></interface>"
        )
        virsh("attach-device", name, str(device), "--config")
        self.numbers[name] = number + 1
        self.counts["virsh desc, metadata, detach-interface, attach-device"] += 1


def mac(number: int) -> str:
    return f"52:54:00:00:{number // 256:02x}:{number % 256:02x}"


@pytest.mark.promise(6)
def test_nothing_of_theirs_is_lost_and_no_hostdev(
    syncers: tuple[Syncer, Syncer], foreign: Callable[[set[str]], None]
) -> None:
    for name in PLACES:
        path = Path("/tmp") / f"{name}.xml"
        path.write_text(with_theirs(name, 0))
        virsh("define", str(path))
    editors = VirshEdit(BY_EDIT), SmallEdits(BY_SMALL_EDITS)
    for editor in editors:
        editor.start()
    counts: Counter[str] = Counter()
    try:
        while counts["syncs"] < SYNCS and not any(editor.lost for editor in editors):
            foreign({vf for name in PLACES if (vf := place(name))})
            for syncer in syncers:
                syncer.begin()
            for syncer in syncers:
                answer = syncer.answer()
                counts["syncs"] += 1
                counts["re-pointed"] += len(answer["repointed"])
                counts[f"hostdev that {NEW_ADDRESS}"] += sum(
                    NEW_ADDRESS in problem for problem in answer["problems"]
                )
    finally:
        for editor in editors:
            editor.stopping.set()
        for editor in editors:
            editor.join()
    for editor in editors:
        assert not editor.lost
        counts += editor.counts
    print(dict(counts))

    sync()
    for name in PLACES:
        document = definition(name)
        hostdevs = etree.fromstring(document).findall("devices/hostdev")
        assert len(hostdevs) == 1
        assert b'<rom bar="off"/>' in etree.tostring(hostdevs[0]).replace(b"'", b'"')
    places = [str(place(name)) for name in PLACES]
    assert len(set(places)) == len(places)
    assert {type_of(vf) for vf in places} == {"0"}
    for name in BY_EDIT:
        number = editors[0].numbers[name]
        assert definition(name).count(f"theirs {number}<") == 2
    for name in BY_SMALL_EDITS:
        number = editors[1].numbers[name]
        assert definition(name).count(f"theirs {number}<") == 2
        assert definition(name).count("<interface") == 1
    assert not list(EDITS.glob("*.json"))
    assert counts["re-pointed"] >= SYNCS
    if directory := os.environ.get(COUNTS):
        Path(directory).mkdir(parents=True, exist_ok=True)
        Path(directory, "editors.json").write_text(json.dumps({"editors": counts}))


def test_who_defines_a_stale_copy_keeps_what_is_theirs_and_the_next_sync_points_it_right(
    foreign: Callable[[set[str]], None],
) -> None:
    """As virt-manager does it: nobody asks. It takes our change back, never we theirs."""
    define("web1", VF1)
    stale = virsh("dumpxml", "--inactive", "web1")
    foreign({VF1})
    sync()
    first = place("web1")
    assert first not in (None, VF1)
    path = Path("/tmp/web1.xml")
    path.write_text(re.sub("<memory ", "<description>theirs</description><memory ", stale))
    virsh("define", str(path))
    before = virsh("dumpxml", "--inactive", "web1")
    assert place("web1") == VF1
    sync()
    assert place("web1") == first
    after = virsh("dumpxml", "--inactive", "web1")
    assert "<description>theirs</description>" in after
    assert elsewhere(after) == elsewhere(before)
    assert after.count("<hostdev") == 1
    assert "<rom bar='off'/>" in after
