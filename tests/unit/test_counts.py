# SPDX-License-Identifier: LGPL-2.1-or-later
"""Numbers that outlive the processes that they are about; none of it is ever worth a hook."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.unit.host import domain_xml, web1, web2
from tests.unit.support import child, directory_for_all, nobody
from vgpu_libvirt import counts, fs, totals
from vgpu_libvirt.counts import Sync
from vgpu_libvirt.errors import CountsError
from vgpu_libvirt.totals import Totals

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.unit.host import Host

NOTHING = Totals({})


def lines(host: Host) -> list[str]:
    path = Path(host.paths.runtime) / "counts/lines"
    return path.read_text().splitlines() if path.exists() else []


def words(host: Host) -> list[list[str]]:
    """Operation and result of each hook that was counted."""
    return [line.split()[1::2] for line in lines(host)]


def test_each_hook_of_a_domain_that_asks_is_a_line(host: Host) -> None:
    vf = host.gpu()[0]
    for operation in ("prepare", "start", "stopped", "release"):
        host.hook(operation, web1(vf))
    assert words(host) == [
        ["prepare", "done"],
        ["start", "done"],
        ["stopped", "done"],
        ["release", "done"],
    ]
    assert all(0 < float(line.split()[2]) < 60 for line in lines(host))


def test_a_refusal_is_counted_by_its_reason(host: Host) -> None:
    vf, other, *_ = host.gpu()
    host.hook("prepare", web1(vf))
    host.hook("prepare", web2(vf))
    host.hook("prepare", domain_xml(hostdevs={"ua-x": vf}))
    host.hook("prepare", web2(other).replace("profile=", "porfile="))
    assert [result for _, result in words(host)] == ["done", "claimed", "hostdev", "request"]


@pytest.mark.promise(6)
def test_a_bystander_that_does_no_harm_leaves_no_trace(host: Host) -> None:
    host.gpu()
    for operation in ("prepare", "start", "started", "release"):
        host.hook(operation, domain_xml(hostdevs={"ua-x": "0000:41:00.0"}))
    assert not Path(host.paths.runtime).exists()


def hook(operation: str, seconds: str, result: str = "done") -> str:
    return f"hook {operation} {seconds} {result}"


def test_lines_add_up() -> None:
    found = totals.added(
        NOTHING,
        [
            hook("prepare", "0.0099"),
            hook("prepare", "0.0100"),
            hook("prepare", "0.0101", "in-use"),
            hook("prepare", "99"),
            hook("start", "0.2"),
            "refused start claimed",
            "sync 1790000000.5 1.25 2 3 4 5",
            "sync 1790000300.5 0.25 0 3 0 1",
        ],
    )
    assert found.last == Sync(1790000300.5, 0.25, 0, 3, 0, 1)
    assert found.sums == {
        "hooks prepare 0.01": 2,
        "hooks prepare 0.025": 1,
        "hooks prepare +Inf": 1,
        "seconds prepare": pytest.approx(99.03),
        "refused prepare in-use": 1,
        "hooks start 0.25": 1,
        "seconds start": 0.2,
        "refused start claimed": 1,
        "syncs": 2,
        "released": 2,
        "kept": 6,
        "repointed": 4,
        "problems": 6,
    }


@pytest.mark.parametrize(
    "line",
    [
        "",
        "hook prepare 0.1",
        "hook prepare x done",
        "hook prepare 0.hook prepare 0.1 done",
        "hook prepare -1 done",
        "hook prepare nan done",
        "hook PREPARE 0.1 done",
        "hook prepare 0.1 done more",
        "hook prepare 0.1 d\ufffdne",
        "refused start",
        "refused start " + "x" * 40,
        "sync 1 2 3 4 5",
        "sync 1 2 3 4 5 -6",
    ],
)
def test_a_line_that_was_torn_is_passed_over(line: str) -> None:
    assert totals.added(NOTHING, [line]) == NOTHING


def test_folding_changes_nothing_of_what_is_read(host: Host) -> None:
    for number in range(3):
        counts.note_hook(host.paths, "prepare", 0.1, counts.DONE)
        counts.note_refusal(host.paths, "start", "claimed")
        before = totals.read(host.paths)
        assert before.sums["refused start claimed"] == number + 1
        totals.fold(host.paths)
        assert totals.read(host.paths)._replace(folded=0) == before._replace(folded=0)
        assert lines(host) == []
    names = sorted(os.listdir(Path(host.paths.runtime) / "counts"))
    assert names == ["lock", "new", "totals"], "and nothing is left that would grow"


FOLD = """
import os, sys
from vgpu_libvirt import totals
from vgpu_libvirt.config import Paths
left = int(sys.argv[2])
def counted(call):
    def made(*arguments, **keywords):
        global left
        left -= 1
        if left < 0:
            os._exit(9)
        return call(*arguments, **keywords)
    return made
for name in ("open", "rename", "unlink", "mkdir", "write", "fsync"):
    setattr(os, name, counted(getattr(os, name)))
totals.fold(Paths(runtime=sys.argv[1]))
print("done")
"""


def test_killed_at_any_step_it_counts_nothing_twice_and_loses_nothing(host: Host) -> None:
    expected = 0
    for step in range(100):
        counts.note_refusal(host.paths, "start", "claimed")
        expected += 1
        with child(FOLD, host.paths.runtime, str(step)) as process:
            ended = process.first_line == "done"
        assert totals.read(host.paths).sums["refused start claimed"] == expected, step
        if ended:
            break
    assert step > 8
    totals.fold(host.paths)
    assert totals.read(host.paths).sums == {"refused start claimed": expected}


def test_two_at_once_fold_once(host: Host) -> None:
    counts.note_refusal(host.paths, "start", "claimed")
    totals.fold(host.paths)
    counts.note_refusal(host.paths, "start", "claimed")
    hold = (
        "import fcntl, os, sys\nfd = os.open(sys.argv[1], os.O_RDWR)\n"
        "fcntl.flock(fd, fcntl.LOCK_EX)\nprint(1, flush=True)\nsys.stdin.read()\n"
    )
    with child(hold, f"{host.paths.runtime}/counts/lock"):
        totals.fold(host.paths)
        assert len(lines(host)) == 1
        assert totals.read(host.paths).sums == {"refused start claimed": 2}


def test_without_any_sync_it_grows_to_a_limit(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counts, "_MOST_BYTES", 100)
    for _ in range(50):
        counts.note_refusal(host.paths, "start", "claimed")
    assert (Path(host.paths.runtime) / "counts/lines").stat().st_size < 150


# --- whatever is wrong there ---


def a_file(path: Path) -> None:
    path.write_text("")


def a_directory_in_its_place(path: Path) -> None:
    (path / "lines").mkdir(parents=True)


def a_fifo(path: Path) -> None:
    path.mkdir()
    os.mkfifo(path / "lines")


def a_link(path: Path) -> None:
    path.mkdir()
    (path / "lines").symlink_to("/dev/full")


@pytest.mark.promise(6, 7)
@pytest.mark.parametrize("spoil", [a_file, a_directory_in_its_place, a_fifo, a_link])
def test_no_hook_answers_otherwise_where_nothing_can_be_counted(
    host: Host, spoil: Callable[[Path], None]
) -> None:
    vf = host.gpu()[0]
    host.hook("prepare", web1(vf))
    shutil.rmtree(Path(host.paths.runtime) / "counts")
    spoil(Path(host.paths.runtime) / "counts")
    for operation in ("start", "stopped", "release"):
        assert host.hook(operation, web1(vf)) == (0, "", "")
    assert host.claim(vf) is None


@pytest.mark.promise(6, 7)
def test_nor_where_there_is_no_runtime_directory_at_all(host: Host) -> None:
    Path(host.paths.runtime).write_text("")
    assert host.hook("prepare", web1(host.gpu()[0])) == (0, "", "")


def test_a_full_disk_is_nothing_to_a_hook(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_fd: int, _data: bytes) -> int:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "write", refuse)
    counts.note_hook(host.paths, "prepare", 0.1, counts.DONE)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"sums": 1}', '{"sums": {"a": "b"}}', "\0"])
def test_sums_that_cannot_be_read_are_said(host: Host, text: str) -> None:
    totals.fold(host.paths)
    path = host.write(Path(host.paths.runtime) / "counts/totals", text)
    for work in (totals.read, totals.fold):
        with pytest.raises(CountsError, match=f"^the counts in {path} can't be read: not what we"):
            work(host.paths)


def test_who_may_not_write_there_can_read_them() -> None:
    from tests.unit.host import Host

    with directory_for_all() as directory:
        host = Host(directory / "host")
        counts.note_refusal(host.paths, "start", "claimed")
        totals.fold(host.paths)
        counts.note_refusal(host.paths, "start", "claimed")
        with nobody():
            counts.note_refusal(host.paths, "start", "claimed")
            assert totals.read(host.paths).sums == {"refused start claimed": 2}
            with pytest.raises(CountsError, match="permission denied"):
                totals.fold(host.paths)


def test_what_is_folded_while_it_is_read_is_read_once(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts.note_refusal(host.paths, "start", "claimed")
    read_text = fs.read_text
    folded = False

    def fold_meanwhile(path: str, *arguments: int, **keywords: str) -> str:
        nonlocal folded
        if path.endswith("/lines.1") and not folded:
            folded = True
            totals.fold(host.paths)
        return read_text(path, *arguments, **keywords)

    monkeypatch.setattr(fs, "read_text", fold_meanwhile)
    assert totals.read(host.paths).sums == {"refused start claimed": 1}
    assert folded
