# SPDX-License-Identifier: LGPL-2.1-or-later
"""The vendor's own programs: sriov-manage, which makes VFs, and nvidia-smi, for mixed sizes.

The driver takes no number of VFs from sysfs. What its programs exit with proves nothing (a
sriov-manage that made no VF has been seen to exit with 0), so callers look at what came of it.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from typing import TYPE_CHECKING, NamedTuple

from .. import fs
from ..errors import SriovError

if TYPE_CHECKING:
    from ..address import PciAddress
    from ..config import Paths

ENABLED = "Enabled"

_LONGEST = 120.0  # seconds; making 32 VFs takes some ten
_LOCKED = "cannot obtain unbindlock"  # of sriov-manage, while any client of the GPU has it open
# Not the capability, which the vendor spells "Heterogenous Multi-vGPU".
_MODE = re.compile(r"^\s*vGPU Heterogeneous Mode\s*:\s*(\S+)\s*$", re.MULTILINE)


class Ran(NamedTuple):
    """What a program did."""

    program: str
    status: int
    output: str  # stdout and stderr

    @property
    def is_locked_out(self) -> bool:
        """Whether somebody had the GPU open, which may be over in a moment."""
        return _LOCKED in self.output.lower()

    def __str__(self) -> str:
        """As a part of a sentence: its last words, and how it ended."""
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        said = f"said '{lines[-1][:200]}'" if lines else "said nothing"
        return f"{self.program} {said} and exited with {self.status}"


def make_vfs(paths: Paths, gpu: PciAddress) -> Ran:
    """Run sriov-manage to make all VFs of GPU. Raises SriovError where it can't be run."""
    return _run(paths.sriov_manage, "-e", str(gpu))


def mix_sizes(paths: Paths, gpu: PciAddress) -> Ran:
    """Let GPU run vGPUs of several sizes at a time. Raises SriovError as `make_vfs` does."""
    return _run(paths.nvidia_smi, "vgpu", "-shm", "1", "-i", str(gpu))


def mixed_mode(paths: Paths, gpu: PciAddress) -> str:
    """Whether GPU mixes sizes, in the vendor's words: ENABLED, "Disabled", or "N/A" where it can't.

    Raises SriovError where that isn't shown.
    """
    ran = _run(paths.nvidia_smi, "-q", "-i", str(gpu))
    mode = parse_mixed_mode(ran.output)
    if mode is None:
        raise SriovError(f"no 'vGPU Heterogeneous Mode' is shown for {gpu}: {ran}")
    return mode


def parse_mixed_mode(text: str) -> str | None:
    """The mode in the output of `nvidia-smi -q` for one GPU; None: it isn't there, or twice."""
    found = _MODE.findall(text)
    return str(found[0]) if len(found) == 1 else None


def _run(program: str, *arguments: str) -> Ran:
    command = [program, *arguments]
    try:
        # A session of its own, so that all of a script can be ended.
        running = subprocess.Popen(  # noqa: S603
            command,
            env={**os.environ, "LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except FileNotFoundError as error:
        raise SriovError(
            f"{program} is not there; install the vendor's vGPU host driver, or say in [paths] of "
            "the configuration where it is"
        ) from error
    except OSError as error:
        raise SriovError(f"{program} can't be run: {fs.reason(error)}") from error
    try:
        output, _ = running.communicate(timeout=_LONGEST)
    except subprocess.TimeoutExpired as error:
        raise SriovError(
            f"'{' '.join(command)}' did not end within {_LONGEST:.0f} s and was stopped; look at "
            "'dmesg'"
        ) from error
    finally:
        if running.poll() is None:
            os.killpg(running.pid, signal.SIGKILL)
            running.wait()
    return Ran(program, running.returncode, output)
