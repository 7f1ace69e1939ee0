# SPDX-License-Identifier: LGPL-2.1-or-later
"""What `list`, `profiles` and `status` print, word for word, and how the command fails."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from tests.unit.golden import check
from tests.unit.gpus import Mdevs
from tests.unit.host import BOOT, L40S, REPOSITORY, WEB1, WEB2, domain_xml, web1
from tests.unit.mdev_host import P40
from vgpu_libvirt import __version__, report
from vgpu_libvirt.claims import store
from vgpu_libvirt.claims.model import Claim, Namespaces, Phase, Process, Qemu
from vgpu_libvirt.cli.main import main
from vgpu_libvirt.devices.model import Profile

if TYPE_CHECKING:
    from click.testing import Result

    from tests.unit.host import Host

FULL = "ID    : vGPU Name\n"
EIGHT = "ID    : vGPU Name\n1152  : NVIDIA L40S-8Q\n1162  : NVIDIA L40S-8A\n"
L40S_8Q = Profile(1152, "NVIDIA L40S-8Q")
MONITOR = "/var/lib/libvirt/qemu/domain-7-web1/monitor.sock"


def call(host: Host, *arguments: str) -> Result:
    return CliRunner().invoke(main, arguments, env=host.environment, prog_name="virt-vgpu")


def claim(vf: str, name: str, uuid: str, phase: Phase, qemu: Qemu | None = None) -> Claim:
    return Claim(
        device=vf,
        backend="vendor-vfio",
        gpu="0000:3d:00.0",
        profile=L40S_8Q,
        claim_id=f"{name:0<32}",
        phase=phase,
        domain_uuid=uuid,
        domain_name=name,
        domain_id=7,
        alias="ua-vgpu0",
        boot_id=BOOT,
        created=1790000000.0,
        since_boot=512.25,
        daemon=Process(811, 4242),
        qemu=qemu,
        namespaces=Namespaces(None, None),
    )


@pytest.fixture
def busy(host: Host) -> Host:
    """Two GPUs with some of everything."""
    vfs = host.gpu(vfs=32, node=0)
    host.gpu("0000:5e:00.0", vfs=4, node=1)
    for number, vf in enumerate(vfs):
        typed = number in {0, 1, 5}
        host.set_type(vf, 1152 if typed else 0)
        host.set_list(vf, FULL if typed else EIGHT)
    store.create(
        host.paths.state, claim(vfs[0], "web1", WEB1, Phase.RUNNING, Qemu(4001, 90210, MONITOR))
    )
    store.create(host.paths.state, claim(vfs[1], "web2", WEB2, Phase.CONFIGURED))
    host.run_domain("web1", WEB1, 4001, web1(vfs[0]), opens=(host.nodes(vfs[0])[0],))
    host.write(host.state / f"claims/{vfs[9]}.json", "{}")
    return host


@pytest.fixture
def full(host: Host) -> Host:
    """One GPU that one vGPU fills."""
    vfs = host.gpu(lists=FULL)
    host.set_type(vfs[0], 1156)
    whole = claim(vfs[0], "web1", WEB1, Phase.RUNNING, Qemu(4001, 90210, MONITOR))
    store.create(host.paths.state, whole._replace(profile=Profile(1156, "NVIDIA L40S-48Q")))
    host.run_domain("web1", WEB1, 4001, web1(vfs[0]), opens=(host.nodes(vfs[0])[0],))
    return host


@pytest.fixture
def mixed(host: Host, monkeypatch: pytest.MonkeyPatch) -> Host:
    """A GPU with VFs, and two of mediated devices, of which one has no VFs."""
    gpus = Mdevs(host, monkeypatch)
    gpus.sysfs.parent("0000:08:00.0", P40)
    vf = host.gpu("0000:5e:00.0", lists=EIGHT)[0]
    host.set_type(vf, 1152)
    running, waiting = gpus.device(), gpus.device("web2")
    gpus.set_type(running, 1152)
    gpus.set_type("35ceae7f-eea5-4f28-b7f3-7b12a3e62d3c", 1152)
    qemu = Qemu(4001, 90210, MONITOR)
    for one in (
        claim(running, "web1", WEB1, Phase.RUNNING, qemu),
        claim(waiting, "web2", WEB2, Phase.CLAIMED),
    ):
        profile = Profile("nvidia-1152", "NVIDIA L40S-8Q")
        store.create(host.paths.state, one._replace(backend="mdev", profile=profile))
    both = {"ua-vgpu0": running, "ua-vgpu1": vf}
    xml = domain_xml(requests=dict.fromkeys(both, "L40S-8Q"), hostdevs=both)
    host.run_domain("web1", WEB1, 4001, xml, opens=(host.nodes(running)[0], host.nodes(vf)[0]))
    return host


@pytest.mark.parametrize("name", ["busy", "full", "host", "mixed"])
@pytest.mark.parametrize("arguments", ["list", "list --all", "profiles", "status"])
def test_text(request: pytest.FixtureRequest, name: str, arguments: str) -> None:
    host: Host = request.getfixturevalue(name)
    result = call(host, *arguments.split())
    assert result.exit_code == 0
    assert not any(line.endswith(" ") for line in result.output.splitlines())
    check(f"cli/{name}-{arguments.replace(' --', '-')}.txt", result.output, host.root)


@pytest.mark.parametrize("name", ["busy", "full", "host", "mixed"])
@pytest.mark.parametrize("verb", ["profiles", "status"])
def test_json(request: pytest.FixtureRequest, name: str, verb: str) -> None:
    host: Host = request.getfixturevalue(name)
    result = call(host, verb, "--json")
    assert result.exit_code == 0
    json.loads(result.output)
    check(f"cli/{name}-{verb}.json", result.output, host.root)


def test_list_json_is_status_json(busy: Host) -> None:
    assert call(busy, "list", "--json").output == call(busy, "status", "--json").output


def test_status_shows_each_claim_file_as_it_is(busy: Host) -> None:
    shown = json.loads(call(busy, "status", "--json").output)["claims"]
    files = [path.read_text() for path in sorted((busy.state / "claims").iterdir())]
    assert shown == [json.loads(text) for text in files if text != "{}"]


@pytest.mark.promise(9)
@pytest.mark.parametrize("verb", ["list", "profiles", "status"])
def test_reading_writes_nothing(busy: Host, verb: str) -> None:
    before = busy.tree()
    call(busy, verb)
    call(busy, verb, "--json")
    assert busy.tree() == before


def test_nothing_is_cut_off_where_no_terminal_is(busy: Host) -> None:
    name = "a-domain-with-a-long-name-" * 12
    vf = "0000:3d:00.6"
    busy.set_type(vf, 1152)
    store.create(busy.paths.state, claim(vf, name, WEB2, Phase.CONFIGURED))
    assert name in call(busy, "list").output


def test_names_are_no_markup(busy: Host) -> None:
    vf = "0000:3d:00.6"
    store.create(busy.paths.state, claim(vf, "[red]:smile:[/x]", WEB2, Phase.CLAIMED))
    for verb in ("list", "status"):
        assert "[red]:smile:[/x]" in call(busy, verb).output


def run(host: Host, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command as a process of its own."""
    code = "from vgpu_libvirt.cli.main import main; main(prog_name='virt-vgpu')"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=REPOSITORY,
        env={**host.environment, "LC_ALL": "C.UTF-8", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_colours_only_where_they_are_wanted(busy: Host) -> None:
    assert "\x1b[" not in run(busy, "list").stdout
    assert "\x1b[" in run(busy, "list", FORCE_COLOR="1", TERM="xterm").stdout
    assert "\x1b[3" not in run(busy, "list", FORCE_COLOR="1", NO_COLOR="1", TERM="xterm").stdout


def test_an_output_without_unicode(busy: Host) -> None:
    result = run(busy, "list", PYTHONIOENCODING="ascii")
    assert result.returncode == 0
    assert "0000:3d:01.6 ... 0000:3d:04.3" in result.stdout


def test_a_reader_that_goes_away(busy: Host) -> None:
    code = "from vgpu_libvirt.cli.main import main; main()"
    command = f'{sys.executable} -c "{code}" list --json --all | head -c 1'
    shell = subprocess.run(
        ["bash", "-c", command],
        cwd=REPOSITORY,
        env=busy.environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (shell.stdout, "Traceback" in shell.stderr) == ("{", False)


def test_a_broken_configuration_is_one_line(host: Host) -> None:
    host.write(host.root / "config.toml", "[policy]\nplacment = 'pack'\n")
    result = run(host, "list")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith(f"virt-vgpu: error: {host.root}/config.toml, line 2: ")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [["nothing"], ["list", "--nothing"], ["attach"], ["attach", "web1"], ["detach"]],
)
def test_wrong_usage(host: Host, arguments: list[str]) -> None:
    assert call(host, *arguments).exit_code == 2


def test_a_fault_of_ours_is_one_line(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    def fault(_survey: object) -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr(report, "build", fault)
    result = call(host, "list")
    assert result.exit_code == 1
    assert "virt-vgpu: error: internal error, please report it: RuntimeError at" in result.output
    assert result.output.count("\n") == 1


def test_an_interrupt(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_survey: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(report, "build", interrupt)
    assert call(host, "list").exit_code == 130


def test_version_and_help(host: Host) -> None:
    assert call(host, "--version").output == f"virt-vgpu, version {__version__}\n"
    text = call(host, "-h").output
    assert all(verb in text for verb in ("list", "profiles", "status", "attach", "detach"))
    assert "..." not in text.partition("Commands:")[2]


def test_looking_needs_no_libvirt(host: Host) -> None:
    code = (
        "import sys; sys.modules['libvirt'] = None; "
        "from vgpu_libvirt.cli.main import main; main(prog_name='virt-vgpu')"
    )
    command = [sys.executable, "-c", code]
    options = {"cwd": REPOSITORY, "env": host.environment, "capture_output": True, "text": True}
    assert subprocess.run([*command, "list"], check=False, **options).returncode == 0  # type: ignore[call-overload]
    attach = subprocess.run([*command, "attach", "a"], check=False, **options)  # type: ignore[call-overload]
    assert (attach.returncode, attach.stderr.count("\n")) == (1, 1)
    assert "'attach' needs a library that is missing: " in attach.stderr


def test_an_unknown_size_is_an_upper_bound(host: Host) -> None:
    host.gpu(lists="ID : vGPU Name\n7 : NVIDIA Odd\n" + L40S.partition("\n")[2])
    assert "NVIDIA Odd          7      unknown     at most 4" in call(host, "profiles").output


def test_a_claim_that_is_not_programmed_yet_shows_its_profile(host: Host) -> None:
    vf = host.gpu()[0]
    store.create(host.paths.state, claim(vf, "web1", WEB1, Phase.RESERVED))
    assert "(NVIDIA L40S-8Q)  claimed  web1" in call(host, "list").output


def test_status_says_of_a_running_domain_that_it_can_not_migrate(busy: Host) -> None:
    sentence = "can't be migrated or saved: the driver has no migration for it"
    for vf in ("0000:3d:00.4", "0000:3d:00.5"):  # web2 doesn't run
        (busy.sysfs / f"kernel/debug/vfio/{vf}").mkdir(parents=True)
    told = call(busy, "status").output
    assert told.count(sentence) == 1
    assert told.index("'web1'") < told.index(sentence) < told.index("'web2'")
    (busy.sysfs / "kernel/debug/vfio/0000:3d:00.4/migration").mkdir()
    assert sentence not in call(busy, "status").output
