# SPDX-License-Identifier: LGPL-2.1-or-later
"""Puts hooks and launchers where libvirt finds them, for a package that pip installed.

Distributions' packages bring their own, by packaging/install. What we write here says so in its
text; a file that doesn't is somebody else's, and never touched.
"""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import sys
import sysconfig
from enum import Enum, auto

from . import fs
from .claims import processes
from .config import BIN, HOOK_NAME, TMPFILES, UNITS
from .errors import InstallError
from .records import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .config import Paths

MARK = "# Installed by 'virt-vgpu install-hooks'; 'virt-vgpu uninstall-hooks' removes it."
_TMPFILES = f"{TMPFILES}/vgpu-libvirt.conf"
_SHEBANG_LIMIT = 127  # bytes that every kernel reads
_DAEMONS = ("libvirtd", "virtqemud")


class File(NamedTuple):
    """A file to install. It is written to `aside` first, on the same filesystem."""

    path: str
    text: str
    mode: int
    aside: str


class Found(Enum):
    """What is at a file's path."""

    NOTHING = auto()
    SAME = auto()
    OURS = auto()  # of another version, or another place
    FOREIGN = auto()


class Program(NamedTuple):
    """What the launchers run: this very interpreter and package, unless a test says otherwise."""

    interpreter: str = sys.executable
    packages: str = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    scripts: str = sysconfig.get_path("scripts")  # where pip put virt-vgpu


def plan(paths: Paths, root: str, program: Program, with_units: bool) -> tuple[File, ...]:
    """The files to install below ROOT ("" for the host itself); what libvirt runs comes last.

    Raises InstallError where PROGRAM can't be run from a launcher, or has no files to install.
    """
    _check_shebang(program.interpreter)
    files = [_launcher(root, program, "vgpu-libvirt-hook", "-BIS")]
    if program.scripts != BIN:
        files.append(_launcher(root, program, "virt-vgpu", "-BI"))
    if with_units:
        directory = _source(program, "packaging/systemd")
        files += [
            _file(f"{root}{UNITS}/{name}", _read(f"{directory}/{name}"), 0o644)
            for name in sorted(os.listdir(directory))
        ]
        text = _read(_source(program, "packaging/tmpfiles/vgpu-libvirt.conf"))
        files.append(_file(f"{root}{_TMPFILES}", text, 0o644))
    for kind in ("daemon", "qemu"):
        # libvirt runs every executable file in that directory, a half-written one too
        hooks = f"{root}{paths.libvirt_etc}/hooks"
        aside = f"{hooks}/.vgpu-libvirt.new"
        text = _read(_source(program, f"hooks/{kind}"))
        files.append(File(f"{hooks}/{kind}.d/{HOOK_NAME}", _marked(text), 0o755, aside))
    return tuple(files)


def find(file: File) -> Found:
    """What is at the path of FILE. Raises InstallError where that can't be read."""
    text = _text_at(file.path)
    if text is None:
        return Found.NOTHING
    if text == file.text and stat.S_IMODE(os.stat(file.path).st_mode) == file.mode:
        return Found.SAME
    return Found.OURS if _is_ours(text) else Found.FOREIGN


def check_foreign(files: Iterable[File]) -> None:
    """Raise InstallError if something of somebody else's is in the way."""
    for file in files:
        if find(file) is Found.FOREIGN:
            raise InstallError(
                f"{file.path} is not from 'virt-vgpu install-hooks', but perhaps from a "
                "distribution's package of vgpu-libvirt; remove that first"
            )


def unsafe_part(program: Program) -> str | None:
    """The first file or directory of PROGRAM that others than root could change, if any.

    libvirt runs it as root, so whoever can write there would be root.
    """
    trusted = (0, os.geteuid())
    for start in (os.path.realpath(program.interpreter), f"{program.packages}/vgpu_libvirt"):
        path = start
        while True:
            status = os.stat(path)
            sticky = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
            if status.st_uid not in trusted or (status.st_mode & stat.S_IWOTH and not sticky):
                return path
            if path == "/":
                break
            path = os.path.dirname(path)
    return None


def write(file: File) -> None:
    """Put FILE in its place, whole and durably. Raises InstallError."""
    try:
        for directory in (os.path.dirname(file.path), os.path.dirname(file.aside)):
            fs.make_directory(directory)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(file.aside)  # left by somebody who was killed
        fs.write_new(file.aside, file.text)
        os.chmod(file.aside, file.mode)
        os.rename(file.aside, file.path)
        fs.sync_directory(os.path.dirname(file.path))
    except OSError as error:
        raise InstallError(f"{file.path} can't be written: {fs.reason(error)}") from error


def remove(path: str) -> None:
    """Remove the file at PATH, and a hook's directory if empty then. Raises InstallError."""
    try:
        os.unlink(path)
        if os.path.basename(path) == HOOK_NAME:
            with contextlib.suppress(OSError):
                os.rmdir(os.path.dirname(path))
    except OSError as error:
        raise InstallError(f"{path} can't be removed: {fs.reason(error)}") from error


def installed(paths: Paths, root: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What is there: the files that we installed, hooks first, and those of others by our names."""
    hooks = [f"{root}{paths.libvirt_etc}/hooks/{kind}.d/{HOOK_NAME}" for kind in ("qemu", "daemon")]
    units = []
    with contextlib.suppress(FileNotFoundError):
        names = sorted(os.listdir(f"{root}{UNITS}"))
        units = [f"{root}{UNITS}/{name}" for name in names if name.startswith("vgpu-libvirt-")]
    others = [f"{root}{_TMPFILES}", f"{root}{BIN}/vgpu-libvirt-hook", f"{root}{BIN}/virt-vgpu"]
    ours: list[str] = []
    foreign: list[str] = []
    for path in (*hooks, *units, *others):
        text = _text_at(path)
        if text is not None:
            (ours if _is_ours(text) else foreign).append(path)
    return tuple(ours), tuple(foreign)


def tell_libvirt(paths: Paths) -> tuple[str, ...]:
    """Make the daemons that run look for hooks; return what was told, or why that failed.

    One that has had no hook for QEMU looks for none until it gets a SIGHUP. We take its word, the
    pid file, for who it is: others by the same name may be of users or containers.
    """
    told = []
    for daemon in _DAEMONS:
        try:
            pid = int(fs.read_text(f"{os.path.dirname(paths.libvirt_run)}/{daemon}.pid"))
            if processes.read_stat(paths.proc, pid).name != daemon:
                continue
            os.kill(pid, signal.SIGHUP)
            told.append(f"{daemon} (pid {pid}) was asked to look for its hooks.")
        except processes.VANISHED:
            continue
        except (OSError, ValueError) as error:
            told.append(f"{daemon} couldn't be asked to look for its hooks, restart it: {error}")
    return tuple(told)


def _text_at(path: str) -> str | None:
    try:
        return _read(path)
    except FileNotFoundError:
        return None


def _is_ours(text: str) -> bool:
    return MARK in text.splitlines()


def _launcher(root: str, program: Program, name: str, options: str) -> File:
    text = _read(_source(program, f"packaging/{name}.in"))
    text = text.replace(f"/usr/bin/python3 {options}", f"{program.interpreter} {options}")
    text = text.replace("@PYTHONDIR@", program.packages)
    return _file(f"{root}{BIN}/{name}", text, 0o755)


def _file(path: str, text: str, mode: int) -> File:
    directory, name = os.path.split(path)
    return File(path, _marked(text), mode, f"{directory}/.{name}.new")


def _marked(text: str) -> str:
    """TEXT with the mark below the line of its license."""
    lines = text.splitlines(keepends=True)
    at = next(number for number, line in enumerate(lines, 1) if "SPDX-License-Identifier" in line)
    return "".join([*lines[:at], MARK, "\n", *lines[at:]])


def _source(program: Program, name: str) -> str:
    """Where the file or directory NAME is: in a wheel's package, or beside it in a checkout."""
    for place in (f"{program.packages}/vgpu_libvirt", program.packages):
        if os.path.exists(f"{place}/{name}"):
            return f"{place}/{name}"
    raise InstallError(
        f"the vgpu-libvirt in {program.packages} has no files to install, as pip's has; a "
        "distribution's package brings its hooks itself"
    )


def _read(path: str) -> str:
    try:
        return fs.read_text(path)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise InstallError(f"{path} can't be read: {fs.reason(error)}") from error


def _check_shebang(interpreter: str) -> None:
    line = f"#!{interpreter} -BIS"
    if len(os.fsencode(line)) > _SHEBANG_LIMIT or len(interpreter.split()) != 1:
        raise InstallError(
            f"the path of the Python interpreter, '{interpreter}', is too long or has a space in "
            "it; a launcher can't run that, so put the venv elsewhere"
        )
