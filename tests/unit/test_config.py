# SPDX-License-Identifier: LGPL-2.1-or-later
"""The configuration file: defaults, every key, and errors that name file, line and key."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.support import directory_for_all, nobody
from vgpu_libvirt.address import PciAddress
from vgpu_libvirt.config import Config, Paths, Policy, Sriov, load
from vgpu_libvirt.errors import ConfigError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "config.toml"


def read(file: Path, text: str | None = None) -> Config:
    if text is not None:
        file.write_text(text)
    return load({"VGPU_LIBVIRT_CONFIG": str(file)})


def refusal(file: Path, text: str | None = None) -> str:
    """The error for TEXT, without the file's name in front."""
    with pytest.raises(ConfigError) as caught:
        read(file, text)
    sentence = str(caught.value)
    assert sentence.startswith(str(file))
    assert "\n" not in sentence
    return sentence.removeprefix(str(file))


def test_a_missing_file_means_defaults(file: Path) -> None:
    assert read(file) == Config(Paths(), Policy(), "qemu:///system")
    assert read(file.parent / "no/such/directory/config.toml") == Config()


def test_the_defaults() -> None:
    assert Paths() == (
        "/sys",
        "/proc",
        "/dev",
        "/var/lib/vgpu-libvirt",
        "/run/vgpu-libvirt",
        "/run/libvirt",
        "/etc/libvirt",
        "/run/systemd/system",
        "/run/systemd/journal/socket",
        "/dev/log",
        "/usr/lib/nvidia/sriov-manage",
        "/usr/bin/nvidia-smi",
    )
    assert Policy() == ("spread", "keep", (), 20.0, 5.0, 60.0)
    assert Sriov() == ((), ())


def test_an_empty_variable_means_the_default_file() -> None:
    if Path("/etc/vgpu-libvirt/config.toml").exists():
        pytest.skip("this host has a configuration of its own")
    assert load({"VGPU_LIBVIRT_CONFIG": ""}) == load({}) == Config()


@pytest.mark.parametrize("text", ["", "\n", "# nothing\n", "[paths]\n[policy]\n[libvirt]\n"])
def test_a_file_that_says_nothing_means_defaults(file: Path, text: str) -> None:
    assert read(file, text) == Config()


def test_every_key(file: Path) -> None:
    config = read(
        file,
        """
        [paths]
        sysfs = "/r/sys"
        proc = "/r/proc/"
        dev = "/r/dev"
        state = "/r/state"
        runtime = "/r/run"
        libvirt_run = "/r/libvirt"
        libvirt_etc = "/r/etc//"
        systemd = "/r/systemd"
        journal = "/r/journal"
        syslog = "/r/log"
        sriov_manage = "/r/sriov-manage"
        nvidia_smi = "/r/smi"
        [sriov]
        mixed_size = ["0000:3d:00.0"]
        gpus = ["10001:80:05.0", "0000:3D:00.0"]
        [libvirt]
        uri = "test:///default"
        [policy]
        placement = "pack"
        foreign = "reset"
        exclude = ["0000:3D:00.0", "10001:80:05.0"]
        lock_timeout = 1
        release_timeout = 0.5
        reserve_timeout = 86399.9
        """,
    )
    assert config.paths == Paths(
        "/r/sys",
        "/r/proc",
        "/r/dev",
        "/r/state",
        "/r/run",
        "/r/libvirt",
        "/r/etc",
        "/r/systemd",
        "/r/journal",
        "/r/log",
        "/r/sriov-manage",
        "/r/smi",
    )
    assert config.uri == "test:///default"
    exclude = (PciAddress(0, 0x3D, 0, 0), PciAddress(0x10001, 0x80, 5, 0))
    assert config.policy == Policy("pack", "reset", exclude, 1.0, 0.5, 86399.9)
    assert isinstance(config.policy.lock_timeout, float)
    assert config.sriov == Sriov((exclude[1], exclude[0]), (exclude[0],))


def test_one_key_leaves_the_others_at_their_defaults(file: Path) -> None:
    assert read(file, '[paths]\nstate = "/s"\n') == Config(Paths(state="/s"))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[polices]\n", ", line 1: unknown table [polices]; known: libvirt, paths, policy, sriov"),
        ("\n\n[[policy]]\n", ", line 3: policy must be a table, [policy]"),
        ("x = 1\n", ", line 1: unknown table [x]; known: libvirt, paths, policy, sriov"),
        ("\npolicy = 1\n", ", line 2: policy must be a table, [policy]"),
        (
            '[libvirt]\n# url\nurl = "x"\n',
            ", line 3: unknown key 'url' in [libvirt]; known: uri",
        ),
        (
            '[sriov]\ngpus = "all"\n',
            ", line 2: gpus in [sriov]: must be a list of PCI addresses, not 'all'",
        ),
        (
            '[sriov]\ngpus = ["0000:3d:00.0"]\nmixed_size = ["0000:5e:00.0"]\n',
            ", line 3: mixed_size in [sriov]: 0000:5e:00.0 is not among its gpus",
        ),
        (
            "[paths]\n[policy]\n\n[policy.more]\na = 1\n",
            ", line 4: unknown key 'more' in [policy]; known: exclude, foreign, lock_timeout, "
            "placement, release_timeout, reserve_timeout",
        ),
    ],
)
def test_unknown_names(file: Path, text: str, sentence: str) -> None:
    assert refusal(file, text) == sentence


@pytest.mark.parametrize(
    ("table", "key", "value", "reason"),
    [
        ("paths", "state", '"relative"', "must be an absolute path, not 'relative'"),
        ("paths", "state", '""', "must be an absolute path, not ''"),
        ("paths", "state", "1", "must be an absolute path, not 1"),
        ("paths", "sysfs", '["/sys"]', "must be an absolute path, not ['/sys']"),
        ("paths", "state", r'"/a\u0000b"', "must be an absolute path, not '/a\\x00b'"),
        ("libvirt", "uri", '""', "must be a text, not ''"),
        ("libvirt", "uri", "true", "must be a text, not True"),
        ("policy", "placement", '"Spread"', "must be one of spread, pack, not 'Spread'"),
        ("policy", "placement", "[]", "must be one of spread, pack, not []"),
        ("policy", "foreign", "true", "must be one of keep, reset, not True"),
        ("policy", "lock_timeout", '"20"', "must be a number of seconds above 0, not '20'"),
        ("policy", "lock_timeout", "0", "must be a number of seconds above 0, not 0"),
        ("policy", "lock_timeout", "-1", "must be a number of seconds above 0, not -1"),
        ("policy", "release_timeout", "inf", "must be a number of seconds above 0, not inf"),
        ("policy", "release_timeout", "nan", "must be a number of seconds above 0, not nan"),
        ("policy", "reserve_timeout", "true", "must be a number of seconds above 0, not True"),
        ("policy", "reserve_timeout", "86400", "must be a number of seconds above 0, not 86400"),
        ("policy", "exclude", '"0000:3d:00.0"', "must be a list of PCI addresses, not"),
        ("policy", "exclude", "[0]", "must be a list of PCI addresses, not [0]"),
        ("policy", "exclude", '["3d:00.0"]', "'3d:00.0' is not a PCI address; write it as"),
    ],
)
def test_wrong_values_name_line_and_key(
    file: Path, table: str, key: str, value: str, reason: str
) -> None:
    where = f", line 4: {key} in [{table}]: {reason}"
    assert refusal(file, f"\n[{table}]\n\n{key} = {value}\n").startswith(where)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('[paths]\nstate="/s"\n[policy]\nplacement="no"', 4),
        ('[paths]\nstate="/s"\n\n[ policy ] # here\nplacement  =  "no"', 5),
        ('["policy"]\n\'placement\' = "no"', 2),
        ('policy.foreign="keep"\n\npolicy.placement="no"', 3),
        ('\n\n\npolicy = {placement = "no"}', 4),
        ('[policy]\n# placement = "pack"\nforeign = "keep"\n\tplacement\t=\t"no"', 4),
        ('[policy]\nforeign="keep"\n[policy.placement]\nx=1', 3),
        ("[policy]\nplacement.x = 1", 2),
        ('[policy]\n[paths]\nstate="/s"\n[libvirt]\n[[policy.placement]]', 5),
        ('[policy]\r\n\r\nplacement="no"\r\n', 3),
    ],
)
def test_the_line_is_found_in_every_spelling(file: Path, text: str, line: int) -> None:
    assert refusal(file, text).startswith(f", line {line}: placement in [policy]: must be one of")


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("[paths\n", "(at line 1, column 7)"),
        ('[paths]\nstate = "/s\n', "(at line 2, column 12)"),
        ('[paths]\nstate = "/s"\nstate = "/t"\n', "(at line 3, column 13)"),
        ("[policy]\n[policy]\n", "(at line 2, column 8)"),
        ("<domain/>", "(at line 1, column 1)"),
        ("\ufeff[paths]\n", "(at line 1, column 1)"),
    ],
)
def test_broken_toml_names_its_place(file: Path, text: str, place: str) -> None:
    sentence = refusal(file, text)
    assert sentence.startswith(" is not valid TOML: ")
    assert place in sentence


@pytest.mark.parametrize(
    "text", ["x = " + "[" * 100_000, "[policy]\nlock_timeout = " + "9" * 5000], ids=["deep", "long"]
)
def test_toml_beyond_the_parsers_limits_is_an_error_like_any(file: Path, text: str) -> None:
    assert refusal(file, text).startswith(" is not valid TOML: ")


def test_what_is_no_text(file: Path) -> None:
    file.write_bytes(b"\x7fELF\xff\xfe\0\0")
    assert refusal(file) == " can't be read: not a text in UTF-8"


def test_a_huge_file(file: Path) -> None:
    with file.open("w") as opened:
        opened.truncate(5 * 1024 * 1024)
    assert refusal(file) == " can't be read: file too large"


def test_a_directory(file: Path) -> None:
    file.mkdir()
    assert refusal(file) == " can't be read: is a directory"


def test_a_file_where_the_directory_should_be(file: Path) -> None:
    file.write_text("")
    with pytest.raises(ConfigError, match=r"can't be read: not a directory$"):
        read(file / "config.toml")


def test_a_link_to_nothing_is_not_a_missing_file(file: Path) -> None:
    """Its owner excluded a GPU, on a disk that isn't mounted; the defaults would use it."""
    file.symlink_to("/nonexistent/config.toml")
    assert refusal(file) == " can't be read: a link to nothing"


def test_a_link_in_a_circle(file: Path) -> None:
    file.symlink_to(file)
    assert refusal(file) == " can't be read: too many levels of symbolic links"


def test_dev_null_means_defaults(file: Path) -> None:
    file.symlink_to("/dev/null")
    assert read(file) == Config()


def test_an_unreadable_file() -> None:
    with directory_for_all() as directory:
        file = directory / "config.toml"
        file.write_text("")
        file.chmod(0)
        with nobody():
            assert refusal(file) == " can't be read: permission denied"
