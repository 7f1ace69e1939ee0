# SPDX-License-Identifier: LGPL-2.1-or-later
"""The verb `exec`: another program, with the shim in its libvirt."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
from itertools import dropwhile
from typing import TYPE_CHECKING

import click

from ..fs import reason

if TYPE_CHECKING:
    from collections.abc import Sequence

_NOT_FOUND = 127  # as env(1), and shells
_NOT_RUN = 126
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_PYTHON = re.compile(r"python[0-9.]*")
_DEAF = {"I": "PYTHONPATH", "E": "PYTHONPATH", "S": "sitecustomize"}  # what they pass over
_WITH_VALUE = "cmWX"  # options of Python's that end a word; -c and -m its options, too
_SHEBANG = 256  # bytes that Linux reads of one


@click.command(
    "exec",
    short_help="Run a Python program so that its domains get their vGPUs.",
    context_settings={"allow_interspersed_args": False},
)
@click.argument("command", nargs=-1, required=True, metavar="PROGRAM [ARGUMENT]...")
def exec_(command: tuple[str, ...]) -> None:
    """Run PROGRAM with the shim in its libvirt, also in the programs that it starts.

    Domains that it creates, defines or starts, and that ask for a vGPU in their metadata, get a
    device that is free. Its own sitecustomize is run, too. PROGRAM takes the place of this process.
    """
    program = shutil.which(command[0]) or command[0]
    if why := _deaf(program, command[1:]):
        click.echo(f"virt-vgpu: warning: {command[0]} runs without the shim: {why}", err=True)
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (_preload(), before)))
    # Python ignores these, which programs would inherit.
    for name in ("SIGPIPE", "SIGXFSZ"):
        signal.signal(getattr(signal, name), signal.SIG_DFL)
    try:
        os.execvp(command[0], command)  # noqa: S606
    except OSError as error:
        click.echo(f"virt-vgpu: error: {command[0]} can't be run: {reason(error)}", err=True)
        missing = isinstance(error, FileNotFoundError | NotADirectoryError)
        raise click.exceptions.Exit(_NOT_FOUND if missing else _NOT_RUN) from error


def _preload() -> str:
    """Where sitecustomize is, and will be: PROGRAM may live longer than this version does.

    We run from a copy of the package that goes with the upgrade after next (packaging/activate);
    the link beside it always names one that is there.
    """
    live = os.path.join(os.path.dirname(os.path.dirname(_PACKAGE)), "live")
    package = os.path.join(live, os.path.basename(_PACKAGE)) if os.path.islink(live) else _PACKAGE
    return os.path.join(package, "preload")


def _deaf(program: str, arguments: Sequence[str]) -> str | None:
    """Why the Python that PROGRAM is, or that its first line names, won't run the shim."""
    words = [program, *arguments]
    if not _is_python(program):
        words = _shebang(program)
        if words and os.path.basename(words[0]) == "env":
            words = list(dropwhile(lambda word: word[0] == "-" or "=" in word, words[1:]))
        if not words or not _is_python(words[0]):
            return None
    for option in _options(words[1:]):
        if option in _DEAF:
            return f"it runs Python with -{option}, which passes over {_DEAF[option]}"
    return None


def _is_python(program: str) -> bool:
    return bool(_PYTHON.fullmatch(os.path.basename(program)))


def _shebang(program: str) -> list[str]:
    try:
        with open(program, "rb") as file:
            line = file.readline(_SHEBANG).decode(errors="replace")
        return shlex.split(line[2:]) if line.startswith("#!") else []
    except (OSError, ValueError):
        return []  # whoever runs it will say so


def _options(words: Sequence[str]) -> str:
    """The letters of Python's own options at the begin of WORDS."""
    found = ""
    for word in words:
        if not word.startswith("-") or word.startswith("--") or word == "-":
            break
        letters = re.split(f"[{_WITH_VALUE}]", word[1:])[0]
        found += letters
        if letters != word[1:]:
            break
    return found
