# SPDX-License-Identifier: LGPL-2.1-or-later
"""What a monitoring system wants to know of this host: a pure view of a report and the counts."""

from __future__ import annotations

from collections import Counter

from . import totals as counted
from .claims.model import Phase
from .records import TYPE_CHECKING, NamedTuple
from .report import State

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

    from .report import Capacity, Report
    from .totals import Totals

PREFIX = "vgpu_libvirt_"


class Sample(NamedTuple):
    """One number; `suffix` is that of its name, as `_bucket`."""

    labels: dict[str, str]
    value: float
    suffix: str = ""


class Family(NamedTuple):
    """The numbers of one name and kind: gauge, counter or histogram.

    The name of a counter is without its `_total`.
    """

    name: str
    kind: str
    help: str
    samples: tuple[Sample, ...]


def build(
    report: Report, capacities: Iterable[Capacity], totals: Totals | None
) -> tuple[Family, ...]:
    """All families. TOTALS: None where the counts can't be read, and so aren't there."""
    return (*_state(report, capacities), *(_counted(totals) if totals else ()))


def to_json(families: Iterable[Family]) -> list[dict[str, Any]]:
    """The families as `metrics --json` prints them."""
    return [
        {
            "name": family.name,
            "type": family.kind,
            "help": family.help,
            "samples": [
                {"name": sample_name(family, each), "labels": each.labels, "value": each.value}
                for each in family.samples
            ],
        }
        for family in families
    ]


def sample_name(family: Family, sample: Sample) -> str:
    """The whole name of SAMPLE."""
    return family.name + ("_total" if family.kind == "counter" else sample.suffix)


def _state(report: Report, capacities: Iterable[Capacity]) -> list[Family]:
    startable = [
        Sample(
            {
                "gpu": str(one.gpu.address),
                "profile": one.profile.name,
                "profile_id": str(one.profile.id),
            },
            one.startable,
        )
        for one in capacities
    ]
    devices = []
    for row in report.gpus:
        states = Counter(device.state for device in row.devices)
        gpu = str(row.gpu.address)
        devices += [Sample({"gpu": gpu, "state": state}, states[state]) for state in State]
    phases = Counter(claim.phase for claim, _ in report.claims)
    claims = [Sample({"phase": phase}, phases[phase]) for phase in Phase]
    cordoned = [
        Sample({"gpu": str(row.gpu.address)}, float(row.cordon is not None)) for row in report.gpus
    ]
    return [
        _family(
            "startable_vgpus",
            "gauge",
            "How many vGPUs of a profile could be started on a GPU now, if nothing else was.",
            startable,
        ),
        _family("devices", "gauge", "Devices of a GPU, by state.", devices),
        _family("gpu_cordoned", "gauge", "Whether nothing new is put on a GPU.", cordoned),
        _family("claims", "gauge", "Claims of domains on devices, by phase.", claims),
        _family(
            "problems",
            "gauge",
            "Problems that 'virt-vgpu status' tells now.",
            [Sample({}, len(report.problems))],
        ),
    ]


def _counted(totals: Totals) -> list[Family]:
    sums = totals.sums
    refusals = [
        Sample(dict(zip(("operation", "reason"), key.split()[1:], strict=True)), value)
        for key, value in sorted(sums.items())
        if key.startswith("refused ")
    ]
    outcomes = [
        Sample({"outcome": name}, sums.get(name, 0)) for name in ("released", "kept", "repointed")
    ]
    families = [
        _family("refusals", "counter", "Starts and plugs that were refused, since boot.", refusals),
        _family(
            "hook_duration_seconds",
            "histogram",
            "How long libvirt's hooks of domains with a vGPU took, without the start of Python.",
            _durations(sums),
        ),
        _family(
            "sync_runs",
            "counter",
            "Syncs that ended, since boot.",
            [Sample({}, sums.get("syncs", 0))],
        ),
        _family(
            "sync_outcomes",
            "counter",
            "Devices that syncs gave back or kept, and hostdevs that they pointed elsewhere.",
            outcomes,
        ),
        _family(
            "sync_problems",
            "counter",
            "Problems that syncs told, since boot.",
            [Sample({}, sums.get("problems", 0))],
        ),
    ]
    if totals.last is None:
        return families
    last = [
        ("sync_last_run_timestamp_seconds", "When the last sync ended.", totals.last.ended),
        ("sync_last_duration_seconds", "How long the last sync took.", totals.last.seconds),
        ("sync_last_kept", "Devices that the last sync kept claimed.", totals.last.kept),
        ("sync_last_problems", "Problems that the last sync told.", totals.last.problems),
    ]
    return families + [_family(name, "gauge", said, [Sample({}, n)]) for name, said, n in last]


def _durations(sums: dict[str, float]) -> list[Sample]:
    """The histogram of each operation, cumulated."""
    found = []
    for operation in sorted(key.split()[1] for key in sums if key.startswith("seconds ")):
        labels = {"operation": operation}
        number = 0.0
        for bound in (*map(str, counted.BUCKETS), "+Inf"):
            number += sums.get(f"hooks {operation} {bound}", 0)
            found.append(Sample({**labels, "le": bound}, number, "_bucket"))
        found.append(Sample(labels, number, "_count"))
        found.append(Sample(labels, sums[f"seconds {operation}"], "_sum"))
    return found


def _family(name: str, kind: str, said: str, samples: Iterable[Sample]) -> Family:
    return Family(PREFIX + name, kind, said, tuple(samples))
