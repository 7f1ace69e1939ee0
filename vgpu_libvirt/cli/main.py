# SPDX-License-Identifier: LGPL-2.1-or-later
"""The command itself: its verbs, and how it fails.

Exit status 0: done; 1: refused or failed, with one line on stderr; 2: wrong usage.
"""

from __future__ import annotations

import importlib
import os
import traceback
from typing import Any

import click

from .. import __version__
from ..errors import VgpuError

PROGRAM = "virt-vgpu"
_INTERRUPTED = 130

# Verb -> module and function. Each is imported when it is wanted: only some need libvirt.
_VERBS = {
    "list": "show:list_",
    "profiles": "show:profiles",
    "status": "show:status",
    "doctor": "doctor:doctor",
    "metrics": "metrics:metrics_",
    "attach": "attach:attach",
    "detach": "detach:detach",
    "start": "start:start",
    "fix-xml": "fix_xml:fix_xml",
    "sync": "keep:sync_",
    "release": "keep:release",
    "cordon": "cordon:cordon",
    "uncordon": "cordon:uncordon",
    "carve": "carve:carve",
    "uncarve": "carve:uncarve",
    "sriov": "sriov:sriov_",
    "exec": "exec:exec_",
    "install-hooks": "install:install_hooks",
    "uninstall-hooks": "install:uninstall_hooks",
}


class _Failure(click.ClickException):
    """Anything but wrong usage."""

    exit_code = 1

    def show(self, file: Any = None) -> None:
        line = " ".join(self.message.split())
        click.echo(f"{PROGRAM}: error: {line}", file=file, err=file is None)


class _Verbs(click.Group):
    """Imports a verb when it is called, and turns what goes wrong into one line."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(_VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in _VERBS:
            return None
        module, _, function = _VERBS[cmd_name].partition(":")
        try:
            command = getattr(importlib.import_module(f".{module}", __package__), function)
        except ImportError as error:
            raise _Failure(f"'{cmd_name}' needs a library that is missing: {error}") from error
        assert isinstance(command, click.Command)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except VgpuError as error:
            raise _Failure(str(error)) from error
        except KeyboardInterrupt:
            raise click.exceptions.Exit(_INTERRUPTED) from None
        except (click.ClickException, click.exceptions.Exit, click.Abort, OSError):
            raise  # click's own; and it ends quietly when the reader of our output has gone
        except Exception as error:
            raise _Failure(_internal(error)) from error


def _internal(error: Exception) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{os.path.basename(frame.filename)}:{frame.lineno}"
    return f"internal error, please report it: {type(error).__name__} at {where}: {error}"


@click.group(cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name=PROGRAM)
def main() -> None:
    """Give NVIDIA vGPUs to libvirt domains, and see who has which."""
