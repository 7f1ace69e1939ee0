# SPDX-License-Identifier: LGPL-2.1-or-later
"""`metrics`: what Prometheus reads of it, and that node_exporter never reads half of it."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families

from tests.unit.host import LIBVIRTD, web1, web2
from vgpu_libvirt import counts, totals
from vgpu_libvirt.claims.model import Phase
from vgpu_libvirt.cli.main import main

if TYPE_CHECKING:
    from click.testing import Result

    from tests.unit.host import Host

Samples = dict[tuple[str, ...], float]


@pytest.fixture
def busy(host: Host) -> Host:
    """A host with a domain that runs, a refusal, a foreign type and a sync."""
    first, second, *_ = host.gpu()
    host.hook("prepare", web1(first))
    host.hook("prepare", web2(first))
    host.set_type(second, 1150)
    host.end(LIBVIRTD)
    call(host, "sync")
    return host


def call(host: Host, *arguments: str) -> Result:
    result = CliRunner(mix_stderr=False).invoke(
        main, arguments, env=host.environment, prog_name="virt-vgpu"
    )
    assert result.exit_code == 0, result.stderr
    return result


def read(text: str) -> dict[str, Samples]:
    """Sample name -> labels' values, in the order of their names -> value."""
    found: dict[str, Samples] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = tuple(value for _, value in sorted(sample.labels.items()))
            samples = found.setdefault(sample.name.removeprefix("vgpu_libvirt_"), {})
            assert labels not in samples, "a series comes once"
            samples[labels] = sample.value
    return found


def test_what_there_is(busy: Host) -> None:
    found = read(call(busy, "metrics").stdout)
    gpu = "0000:3d:00.0"
    assert found["devices"] == {
        (gpu, "unreadable"): 0,
        (gpu, "in-use"): 0,
        (gpu, "claimed"): 0,
        (gpu, "foreign"): 1,
        (gpu, "free"): 3,
    }
    assert found["claims"] == {(str(phase),): 0 for phase in Phase}
    assert found["gpu_cordoned"] == {(gpu,): 0}
    shown = json.loads(call(busy, "profiles", "--json").stdout)
    assert found["startable_vgpus"] == {
        (one["gpu"], one["name"], str(one["id"])): one["startable"] for one in shown
    }
    problems = json.loads(call(busy, "status", "--json").stdout)["problems"]
    assert found["problems"] == {(): len(problems)}


def test_what_was_done(busy: Host) -> None:
    found = read(call(busy, "metrics").stdout)
    assert found["refusals_total"] == {("prepare", "claimed"): 1}
    buckets = found["hook_duration_seconds_bucket"]
    assert buckets[("+Inf", "prepare")] == 2 == found["hook_duration_seconds_count"][("prepare",)]
    assert 0 < found["hook_duration_seconds_sum"][("prepare",)] < 60
    assert found["sync_runs_total"] == {(): 1}
    assert found["sync_outcomes_total"] == {("released",): 1, ("kept",): 0, ("repointed",): 0}
    assert found["sync_last_kept"] == {(): 0}
    assert found["sync_problems_total"] == found["sync_last_problems"] == {(): 1}
    now = Path(busy.paths.runtime, "counts/totals").stat().st_mtime
    assert found["sync_last_run_timestamp_seconds"][()] == pytest.approx(now, abs=5)
    assert 0 < found["sync_last_duration_seconds"][()] < 60


def test_buckets_are_cumulated(host: Host) -> None:
    for seconds in (0.005, 0.02, 0.02, 3, 60):
        counts.note_hook(host.paths, "release", seconds, counts.DONE)
    found = read(call(host, "metrics").stdout)
    series = found["hook_duration_seconds_bucket"]
    numbers = [series[(bound, "release")] for bound in (*map(str, totals.BUCKETS), "+Inf")]
    assert numbers == [1, 3, 3, 3, 3, 3, 3, 3, 4, 4, 5]
    assert found["hook_duration_seconds_sum"] == {("release",): pytest.approx(63.045)}


def test_it_is_as_promtool_wants_it(busy: Host) -> None:
    """The rules of `promtool check metrics`, and of the text format."""
    text = call(busy, "metrics").stdout
    assert text.endswith("\n")
    families: dict[str, str] = {}
    last = ""
    for line in text.splitlines():
        if match := re.fullmatch(r"# HELP (\S+) (\S.*)", line):
            last = match[1]
            assert last not in families, "one HELP a family, and its samples together"
            assert not last.endswith(("_gauge", "_counter"))
            families[last] = ""
        elif match := re.fullmatch(r"# TYPE (\S+) (gauge|counter|histogram)", line):
            assert match[1] == last
            families[last] = match[2]
        else:
            name = re.match(r"[a-z][a-z0-9_]*", line)
            assert name
            suffixes = {"histogram": ("_bucket", "_count", "_sum")}.get(families[last], ("",))
            assert name[0] in [last + suffix for suffix in suffixes]
    for name, kind in families.items():
        assert name.startswith("vgpu_libvirt_")
        assert name.endswith("_total") is (kind == "counter")
        for unit in ("milliseconds", "minutes", "kilobytes"):
            assert unit not in name


def test_any_name_fits_in_a_label(host: Host) -> None:
    host.gpu(lists='ID : vGPU Name\n7 : NVIDIA "odd" \\ name\n')
    found = read(call(host, "metrics").stdout)
    assert ("0000:3d:00.0", 'NVIDIA "odd" \\ name', "7") in found["startable_vgpus"]


def test_a_host_with_nothing(host: Host) -> None:
    found = read(call(host, "metrics").stdout)
    assert "devices" not in found
    assert found["sync_runs_total"] == {(): 0}
    assert "sync_last_run_timestamp_seconds" not in found


def test_json_has_the_same_numbers(busy: Host) -> None:
    shown = json.loads(call(busy, "metrics", "--json").stdout)
    found: dict[str, Samples] = {}
    for family in shown:
        assert family["type"] in ("gauge", "counter", "histogram")
        for each in family["samples"]:
            labels = tuple(value for _, value in sorted(each["labels"].items()))
            name = each["name"].removeprefix("vgpu_libvirt_")
            found.setdefault(name, {})[labels] = each["value"]
    assert found == read(call(busy, "metrics").stdout)


@pytest.mark.promise(9)
def test_it_writes_nothing_but_what_it_is_told_to(busy: Host, tmp_path: Path) -> None:
    before = busy.tree()
    call(busy, "metrics")
    call(busy, "metrics", "--json")
    assert busy.tree() == before
    call(busy, "metrics", "--write", str(busy.root / "vgpu.prom"))
    assert busy.tree().keys() - before.keys() == {str(busy.root / "vgpu.prom")}


def test_a_file_is_replaced_whole_and_for_all_to_read(
    busy: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "textfile/vgpu.prom"
    file.parent.mkdir()
    file.write_text("old\n")
    seen = []
    rename = os.rename

    def watched(new: str, path: str) -> None:
        seen.append((Path(path).read_text(), read(Path(new).read_text()).keys()))
        assert not new.endswith(".prom")
        rename(new, path)

    monkeypatch.setattr(os, "rename", watched)
    assert call(busy, "metrics", "--write", str(file)).stdout == ""
    ((before, names),) = seen
    assert (before, names) == ("old\n", read(file.read_text()).keys())
    assert file.stat().st_mode & 0o777 == 0o644
    assert os.listdir(file.parent) == ["vgpu.prom"]


def fails(host: Host, *arguments: str) -> str:
    result = CliRunner().invoke(main, arguments, env=host.environment, prog_name="virt-vgpu")
    assert result.exit_code == 1
    assert result.output.count("\n") == 1
    return result.output


def test_a_place_that_is_not_there_is_said(host: Host, tmp_path: Path) -> None:
    said = fails(host, "metrics", "--write", str(tmp_path / "none/vgpu.prom"))
    assert f"written to {tmp_path}/none/vgpu.prom: no such file or directory" in said


def test_without_the_library_one_sentence_says_so_and_json_works(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    assert "install python3-prometheus-client" in fails(host, "metrics")
    json.loads(call(host, "metrics", "--json").stdout)


def test_no_other_verb_loads_the_library(host: Host) -> None:
    program = (
        "import sys\nfrom vgpu_libvirt.cli import main, metrics, show, keep\n"
        "print([name for name in sys.modules if 'prometheus' in name])\n"
    )
    # Not -S: the libraries of the command line are in site-packages.
    import subprocess

    from tests.unit.host import REPOSITORY

    done = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


def test_counts_that_cannot_be_read_cost_the_counts(busy: Host) -> None:
    busy.write(Path(busy.paths.runtime) / "counts/totals", "{")
    result = call(busy, "metrics")
    found = read(result.stdout)
    assert "devices" in found
    assert "sync_runs_total" not in found
    assert found["problems"][()] == 2
    assert result.stderr.startswith("Note: the counts in ")


def test_both_ways_at_once_is_wrong_usage(host: Host) -> None:
    result = CliRunner().invoke(main, ["metrics", "--json", "--write", "x"], env=host.environment)
    assert result.exit_code == 2
