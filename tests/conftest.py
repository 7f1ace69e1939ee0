# SPDX-License-Identifier: LGPL-2.1-or-later
"""What all tests share: a host in a directory, that CI skips nothing, and which promise each holds.

A test (or a file, by `pytestmark`) says which promises of CONTRIBUTING.md it holds:
`@pytest.mark.promise(1, 4)`. With VGPU_LIBVIRT_COUNTS_DIR set, a run leaves there what passed, for
the table that tests/promises makes.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Generator

    from tests.unit.host import Host

COUNTS = "VGPU_LIBVIRT_COUNTS_DIR"  # where the counts of what was tried go, too
_PASSED: dict[int, Counter[str]] = {}


@pytest.fixture
def host(tmp_path: Path) -> Host:
    """An empty host below a directory, with a libvirtd that runs."""
    from tests.unit.host import Host

    return Host(tmp_path)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "promise(number, ...): holds these promises")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        numbers = {number for mark in item.iter_markers("promise") for number in mark.args}
        item.user_properties += [("promise", number) for number in sorted(numbers)]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """With VGPU_LIBVIRT_NO_SKIP, as in CI, a test that skips itself has failed."""
    report = yield
    if report.skipped and os.environ.get("VGPU_LIBVIRT_NO_SKIP"):
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} was skipped, which CI does not allow: {report.longrepr}"
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" and report.passed:
        for key, number in report.user_properties:
            if key == "promise":
                name = report.nodeid.partition("[")[0]
                _PASSED.setdefault(int(number), Counter())[name] += 1


def pytest_sessionfinish(session: pytest.Session) -> None:
    directory = os.environ.get(COUNTS)
    if directory and not hasattr(session.config, "workerinput"):
        Path(directory).mkdir(parents=True, exist_ok=True)
        text = json.dumps({f"P{number}": names for number, names in sorted(_PASSED.items())})
        (Path(directory) / f"promises-{os.getpid()}.json").write_text(text)
