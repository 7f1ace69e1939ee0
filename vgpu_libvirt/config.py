# SPDX-License-Identifier: LGPL-2.1-or-later
"""Every path and policy. Nothing else in the package names a directory of the host."""

from __future__ import annotations

import os

from . import fs
from .address import PciAddress
from .errors import AddressError, ConfigError
from .records import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

VARIABLE = "VGPU_LIBVIRT_CONFIG"
DEFAULT_FILE = "/etc/vgpu-libvirt/config.toml"
HOOK_NAME = "50-vgpu-libvirt"  # of our files in libvirt's directories of hooks
AUDIT_LOG = "/var/log/audit/audit.log"  # where auditd runs
# Where `virt-vgpu install-hooks` puts what isn't libvirt's.
BIN = "/usr/bin"  # AppArmor lets hooks execute nothing in /usr/local
UNITS = "/etc/systemd/system"
TMPFILES = "/etc/tmpfiles.d"
_QUOTES = str.maketrans("", "", "\"'")


class Paths(NamedTuple):
    """Directories, without a trailing slash; sockets, and the vendor's programs."""

    sysfs: str = "/sys"
    proc: str = "/proc"
    dev: str = "/dev"
    state: str = "/var/lib/vgpu-libvirt"
    runtime: str = "/run/vgpu-libvirt"
    libvirt_run: str = "/run/libvirt"
    libvirt_etc: str = "/etc/libvirt"
    systemd: str = "/run/systemd/system"  # is there where systemd is the host's init
    journal: str = "/run/systemd/journal/socket"  # where decisions are told
    syslog: str = "/dev/log"  # and where there is no journal
    sriov_manage: str = "/usr/lib/nvidia/sriov-manage"
    nvidia_smi: str = "/usr/bin/nvidia-smi"


class Policy(NamedTuple):
    """What to do where there is a choice; times are in seconds."""

    placement: str = "spread"
    foreign: str = "keep"
    exclude: tuple[PciAddress, ...] = ()
    lock_timeout: float = 20.0
    release_timeout: float = 5.0
    reserve_timeout: float = 60.0


class Sriov(NamedTuple):
    """The GPUs whose VFs are made at boot; only those listed, since it takes their driver away."""

    gpus: tuple[PciAddress, ...] = ()
    mixed_size: tuple[PciAddress, ...] = ()  # of these, which run vGPUs of several sizes at a time


class Config(NamedTuple):
    """The whole configuration."""

    paths: Paths = Paths()
    policy: Policy = Policy()
    uri: str = "qemu:///system"
    sriov: Sriov = Sriov()


def load(environment: Mapping[str, str] = os.environ) -> Config:
    """Read the file that $VGPU_LIBVIRT_CONFIG names, or the default one; none means defaults.

    Raises ConfigError for a file that can't be read, parsed, or has a key or value we don't know.
    """
    path = environment.get(VARIABLE) or DEFAULT_FILE
    try:
        text = fs.read_text(path)
    except FileNotFoundError:
        return Config()
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {fs.reason(error)}") from error
    return parse(text, path)


def parse(text: str, path: str) -> Config:
    """Make a Config of the TOML in TEXT. Raises ConfigError, naming PATH, line and key."""
    if not any(line.split("#")[0].strip() for line in text.splitlines()):
        return Config()  # comments alone, as packages bring it

    import tomllib  # 10 ms that a host without a configuration of its own doesn't pay

    try:
        tables = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # the latter for brackets without end
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    values: dict[str, dict[str, Any]] = {}
    for table, content in tables.items():
        where = f"{path}, line {_line_of(text, table, None)}"
        if table not in _KEYS:
            raise ConfigError(f"{where}: unknown table [{table}]; known: {_listed(_KEYS)}")
        if not isinstance(content, dict):
            raise ConfigError(f"{where}: {table} must be a table, [{table}]")
        values[table] = {
            key: _value(text, path, table, key, value) for key, value in content.items()
        }
    sriov = Sriov(**values.get("sriov", {}))
    if unlisted := sorted(set(sriov.mixed_size).difference(sriov.gpus)):
        line = _line_of(text, "sriov", "mixed_size")
        raise ConfigError(
            f"{path}, line {line}: mixed_size in [sriov]: {unlisted[0]} is not among its gpus"
        )
    return Config(
        Paths(**values.get("paths", {})),
        Policy(**values.get("policy", {})),
        **values.get("libvirt", {}),
        sriov=sriov,
    )


def _value(text: str, path: str, table: str, key: str, value: object) -> object:
    where = f"{path}, line {_line_of(text, table, key)}"
    if key not in _KEYS[table]:
        raise ConfigError(
            f"{where}: unknown key '{key}' in [{table}]; known: {_listed(_KEYS[table])}"
        )
    try:
        return _KEYS[table][key](value)
    except (ValueError, AddressError) as error:
        raise ConfigError(f"{where}: {key} in [{table}]: {error}") from error


def _line_of(text: str, table: str, key: str | None) -> int:
    """The line on which TABLE, or KEY in it, stands; 1 where a spelling hides it from us."""
    inside = found = False
    for number, line in enumerate(text.splitlines(), 1):
        bare = "".join(line.split("#")[0].split()).translate(_QUOTES)
        if bare.startswith("["):
            header = bare.strip("[]")
            inside = header == table
            found = f"{header}.".startswith(f"{table}.{key}." if key else f"{table}.")
        elif inside:
            found = bare.startswith((f"{key}=", f"{key}."))
        else:
            name = f"{table}.{key}" if key else table
            found = bare.startswith((f"{table}=", f"{name}=", f"{name}."))
        if found:
            return number
    return 1


def _listed(names: Mapping[str, object]) -> str:
    return ", ".join(sorted(names))


def _directory(value: object) -> str:
    if not isinstance(value, str) or not value.startswith("/") or "\0" in value:
        raise ValueError(f"must be an absolute path, not {value!r}")
    return value.rstrip("/") or "/"


def _text(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"must be a text, not {value!r}")
    return value


def _seconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 86400:
        raise ValueError(f"must be a number of seconds above 0, not {value!r}")
    return float(value)


def _one_of(*allowed: str) -> Callable[[object], str]:
    def check(value: object) -> str:
        if value not in allowed:
            raise ValueError(f"must be one of {', '.join(allowed)}, not {value!r}")
        return str(value)

    return check


def _addresses(value: object) -> tuple[PciAddress, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ValueError(f"must be a list of PCI addresses, not {value!r}")
    return tuple(PciAddress.parse(item) for item in value)


_KEYS: dict[str, dict[str, Callable[[object], object]]] = {
    "paths": dict.fromkeys(Paths._fields, _directory),
    "libvirt": {"uri": _text},
    "policy": {
        "placement": _one_of("spread", "pack"),
        "foreign": _one_of("keep", "reset"),
        "exclude": _addresses,
        "lock_timeout": _seconds,
        "release_timeout": _seconds,
        "reserve_timeout": _seconds,
    },
    "sriov": {"gpus": _addresses, "mixed_size": _addresses},
}
