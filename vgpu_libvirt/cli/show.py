# SPDX-License-Identifier: LGPL-2.1-or-later
"""The verbs that only look: `list`, `profiles`, `status`. They write nothing and take no lock."""

from __future__ import annotations

from collections import Counter
from itertools import groupby
from typing import TYPE_CHECKING, Any

import click
from rich.text import Text

from .. import config, report
from ..claims import liveness
from ..devices import migration
from ..report import State
from ..survey import look
from . import output

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ..address import Location
    from ..claims.liveness import Verdict
    from ..claims.model import Claim
    from ..report import Capacity, DeviceRow, GpuRow, Report

_DEVICES = ("DEVICE", "PROFILE", "STATE", "DOMAIN", "ALIAS", "PHASE")
_STYLES = {
    State.UNREADABLE: "red",
    State.IN_USE: "green",
    State.CLAIMED: "yellow",
    State.FOREIGN: "magenta",
    State.FREE: "dim",
}
_VERDICT_STYLES = {
    liveness.State.ALIVE: "green",
    liveness.State.UNKNOWN: "yellow",
    liveness.State.DEAD: "red",
}
_WATCH = 2.0  # seconds
_NO_GPU = "This host has no GPU with VFs that can become vGPUs."

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")


@click.command("list", short_help="Show every GPU, its devices, and whose they are.")
@json_option
@click.option("--all", "show_all", is_flag=True, help="A row for each free device, too.")
@click.option(
    "--watch",
    type=click.FloatRange(0.1),
    is_flag=False,
    flag_value=_WATCH,
    metavar="[SECONDS]",
    help=f"Show it again every SECONDS ({_WATCH:g}), until Ctrl-C.",
)
def list_(as_json: bool, show_all: bool, watch: float | None) -> None:
    """Show every GPU and its devices: what is on each, and whose it is."""
    if watch and not as_json:
        output.watch(lambda: _list_lines(show_all), watch)
    elif watch:
        output.again(lambda: output.show_json(_list_json()), watch)
    elif as_json:
        output.show_json(_list_json())
    else:
        output.show(_list_lines(show_all))


def _list_json() -> dict[str, Any]:
    return report.status_json(report.build(look(config.load())))


def _list_lines(show_all: bool) -> list[Text]:
    found = report.build(look(config.load()))
    tables = [[_device_cells(run) for run in _runs(gpu, show_all)] for gpu in found.gpus]
    widths = output.widths(_DEVICES, (row for rows in tables for row in rows))
    lines: list[Text] = []
    for gpu, rows in zip(found.gpus, tables, strict=True):
        lines += [Text()] if lines else []
        lines += [_gpu_line(gpu), *_cordon_line(gpu)]
        lines += output.table(_DEVICES, rows, widths, indent=2)
    return [*(lines or [Text(_NO_GPU)]), *output.problems(found.problems)]


@click.command(short_help="Show what could be started now, and where.")
@json_option
def profiles(as_json: bool) -> None:
    """Show what could be started now, on which GPU, and how often."""
    seen = look(config.load())
    capacities = report.capacities(seen)
    if as_json:
        output.show_json(report.profiles_json(capacities))
        return
    found = report.build(seen)
    lines = _capacity_lines(found, capacities) if found.gpus else [Text(_NO_GPU)]
    output.show([*lines, *output.problems(found.problems)])


@click.command(short_help="Show the claims, who lives, and all problems.")
@json_option
def status(as_json: bool) -> None:
    """Show the claims, whether their owners live and why we think so, and all problems."""
    settings = config.load()
    found = report.build(look(settings))
    if as_json:
        output.show_json(report.status_json(found))
        return
    lines = [Text(_summary(found))]
    for claim, verdict in found.claims:
        lines += [Text(), _claim_line(claim)]
        lines += [] if claim.is_no_domains else [Text(f"  {claim.owner}, {claim.alias}")]
        line = Text("  ")
        line.append(verdict.state, style=_VERDICT_STYLES[verdict.state])
        lines.append(line.append(f": {verdict.why}"))
        if _can_not_migrate(settings.paths.sysfs, claim, verdict):
            lines.append(Text("  can't be migrated or saved: the driver has no migration for it"))
    output.show([*lines, *output.problems(found.problems)])


def _can_not_migrate(sysfs: str, claim: Claim, verdict: Verdict) -> bool:
    """Whether a living owner's device is known to tie it to this host."""
    is_alive = verdict.state is liveness.State.ALIVE
    return is_alive and migration.is_supported(sysfs, claim.device) is False


def _runs(gpu: GpuRow, show_all: bool) -> list[list[DeviceRow]]:
    """The devices of GPU, those next to each other that are free as one run unless SHOW_ALL."""
    runs: list[list[DeviceRow]] = []
    for is_plain, rows in groupby(gpu.devices, _is_plain):
        together = list(rows)
        runs += [together] if is_plain and not show_all else [[row] for row in together]
    return runs


def _is_plain(row: DeviceRow) -> bool:
    return row.state is State.FREE and row.cordon is None


def _device_cells(run: list[DeviceRow]) -> list[Text]:
    first, last = run[0], run[-1]
    style = _STYLES[first.state]
    if len(run) > 1:
        name, state = f"{first.device.name} … {last.device.name}", f"{len(run)} {first.state}"
    else:
        name, state = first.device.name, str(first.state)
    if first.cordon:
        state += ", cordoned"
    claim = first.claim
    profile = first.profile.name if first.profile else ""
    if claim and first.device.type_id == 0:
        profile = f"({claim.profile.name})"  # it isn't on the device yet
    user = first.user.name if first.user else ""  # of what is no domain's
    owner = [claim.domain_name or user, claim.alias, claim.phase] if claim else ["", "", ""]
    return [
        Text(name),
        Text(profile),
        Text(state, style=style),
        *map(Text, owner),
    ]


def _gpu_line(row: GpuRow) -> Text:
    """The heading of a GPU: `GPU 0000:3d:00.0  NUMA node 0  2 used, 30 free of 32 VFs  ...`."""
    parts = [_counts(row.devices)]
    if row.gpu.numa_node is not None:
        parts.insert(0, f"NUMA node {row.gpu.numa_node}")
    runs = Counter(device.profile.name for device in row.devices if device.profile)
    if runs:
        parts.append("runs " + ", ".join(f"{runs[name]} x {name}" for name in sorted(runs)))
    free = [device.device for device in row.devices if device.state is State.FREE]
    if free and not any(device.creatable for device in free) and row.cordon is None:
        parts.append("nothing more fits")
    return Text("  ").join([Text(f"GPU {row.gpu.address}", style="bold"), *map(Text, parts)])


def _cordon_line(row: GpuRow) -> list[Text]:
    if row.cordon is None:
        return []
    left = f"still there: {', '.join(row.left)}" if row.left else "nobody is there any more"
    return [Text(f"  cordoned {row.cordon.label}; {left}", style="yellow")]


def _counts(rows: Sequence[DeviceRow]) -> str:
    states = Counter(row.state for row in rows)
    used = states[State.IN_USE] + states[State.CLAIMED]
    numbers = [f"{used} used", f"{states[State.FREE]} free"]
    numbers += [f"{states[s]} {s}" for s in (State.FOREIGN, State.UNREADABLE) if states[s]]
    # Mediated devices, and where more of them could be made.
    what = "VF" if not any(row.device.is_mdev for row in rows) else "place"
    return f"{', '.join(numbers)} of {number(len(rows), what)}"


def number(count: int, what: str) -> str:
    """COUNT things, as a sentence says it."""
    return f"{count} {what}{'' if count == 1 else 's'}"


def _summary(found: Report) -> str:
    if not found.gpus:
        return _NO_GPU
    rows = [row for gpu in found.gpus for row in gpu.devices]
    claims = number(len(found.claims), "claim")
    return f"{number(len(found.gpus), 'GPU')}: {_counts(rows)}; {claims}"


def _claim_line(claim: Claim) -> Text:
    line = Text(claim.device, style="bold")
    return line.append(f"  {claim.profile.name}  {claim.phase}", style="not bold")


def _capacity_lines(found: Report, capacities: Iterable[Capacity]) -> list[Text]:
    header = ("PROFILE", "ID", "FRAMEBUFFER", *(str(row.gpu.address) for row in found.gpus))
    rows = []
    useful: set[Location] = set()
    for profile, group in groupby(capacities, lambda one: one.profile):
        there = {one.gpu.address: one for one in group}
        useful.update(gpu for gpu, one in there.items() if one.startable)
        size = profile.framebuffer_mib
        cells = [profile.name, str(profile.id), "unknown" if size is None else f"{size} MiB"]
        cells += [_startable(there.get(row.gpu.address)) for row in found.gpus]
        rows.append(list(map(Text, cells)))
    lines = [
        Text(
            f"Nothing can be started on GPU {row.gpu.address} now: {_counts(row.devices)}"
            f"{f'; cordoned {row.cordon.label}' if row.cordon else ''}."
        )
        for row in found.gpus
        if row.gpu.address not in useful
    ]
    if useful:
        lines.insert(0, Text("Each number stands alone: what one profile takes, the others lose."))
    if not rows:
        return lines
    widths = output.widths(header, rows)
    return [*output.table(header, rows, widths, right=range(1, len(header))), Text(), *lines]


def _startable(one: Capacity | None) -> str:
    if one is None:
        return "-"
    return f"{one.bound} {one.startable}" if one.bound and one.startable else str(one.startable)
