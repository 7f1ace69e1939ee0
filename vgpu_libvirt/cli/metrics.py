# SPDX-License-Identifier: LGPL-2.1-or-later
"""The verb `metrics`: this host in numbers, as Prometheus' node_exporter takes them."""

from __future__ import annotations

import contextlib
import os
import tempfile
from typing import TYPE_CHECKING

import click

from .. import config, fs, metrics, report, totals
from ..errors import CountsError, VgpuError
from ..survey import look
from . import output
from .show import json_option

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ..metrics import Family


@click.command("metrics", short_help="Show capacity, claims, refusals and times as metrics.")
@json_option
@click.option(
    "--write",
    "file",
    type=click.Path(dir_okay=False),
    help="Put them at FILE, whole or not at all, for node_exporter's textfile collector.",
    metavar="FILE",
)
def metrics_(as_json: bool, file: str | None) -> None:
    """Show this host in numbers, in the text format of Prometheus.

    Capacity, devices by state, claims by phase; and since boot: refusals by reason, what syncs did,
    and how long hooks took.
    """
    if as_json and file:
        raise click.UsageError("--write writes the text format; leave --json out")
    settings = config.load()
    seen = look(settings)
    found = report.build(seen)
    counted = None
    try:
        counted = totals.read(settings.paths)
    except CountsError as error:
        found = found._replace(problems=(*found.problems, str(error)))
        click.echo(f"Note: {error}.", err=True)
    families = metrics.build(found, report.capacities(seen), counted)
    if as_json:
        output.show_json(metrics.to_json(families))
    elif file:
        _write(file, _text(families))
    else:
        click.echo(_text(families), nl=False)


def _text(families: Iterable[Family]) -> str:
    """FAMILIES in the text format. Raises VgpuError where the library for it is missing."""
    try:
        # Only here: whoever doesn't measure needn't have it.
        from prometheus_client import CollectorRegistry, generate_latest
        from prometheus_client.core import Metric
        from prometheus_client.registry import Collector
    except ImportError as error:
        raise VgpuError(
            "'metrics' needs Python's prometheus_client, which is missing; install "
            "python3-prometheus-client (Fedora: python3-prometheus_client, pip: "
            "prometheus-client), or use --json"
        ) from error
    made = []
    for family in families:
        metric = Metric(family.name, family.help, family.kind)
        for sample in family.samples:
            metric.add_sample(metrics.sample_name(family, sample), sample.labels, sample.value)
        made.append(metric)

    class _Collector(Collector):
        def collect(self) -> Iterable[Metric]:
            return made

    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector())
    return str(generate_latest(registry).decode())


def _write(file: str, text: str) -> None:
    """Put TEXT at FILE by rename, so that nobody reads half of it. Raises VgpuError."""
    directory = os.path.dirname(os.path.abspath(file))
    try:
        # Not "*.prom", of which node_exporter reads each.
        fd, new = tempfile.mkstemp(
            prefix=f".{os.path.basename(file)}.", suffix=".new", dir=directory
        )
        try:
            with open(fd, "w", encoding="utf-8") as stream:
                stream.write(text)
                os.fchmod(stream.fileno(), 0o644)
            os.rename(new, file)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(new)
            raise
    except OSError as error:
        raise VgpuError(f"the metrics can't be written to {file}: {fs.reason(error)}") from error
