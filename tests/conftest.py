# SPDX-License-Identifier: LGPL-2.1-or-later
"""What all tests share: a host in a directory, and the rule that CI skips nothing."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

    from tests.unit.host import Host


@pytest.fixture
def host(tmp_path: Path) -> Host:
    """An empty host below a directory, with a libvirtd that runs."""
    from tests.unit.host import Host

    return Host(tmp_path)


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
