# SPDX-License-Identifier: LGPL-2.1-or-later
"""What packages run once they are unpacked: no hook finds half a package, or a second hook."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.packaging.conftest import ENVIRONMENT, install, run
from tests.unit.host import REPOSITORY, domain_xml

if TYPE_CHECKING:
    from tests.unit.host import Host

VF = "0000:3d:00.4"


def lib(root: Path) -> Path:
    return root / "usr/lib/vgpu-libvirt"


def hook(root: Path, kind: str = "qemu") -> Path:
    return root / f"etc/libvirt/hooks/{kind}.d/50-vgpu-libvirt"


def module(root: Path) -> Path:
    """A module of the package as it is unpacked, not as it is live."""
    return root / "usr/lib/python3/dist-packages/vgpu_libvirt/hook.py"


def activate(root: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return run("sh", lib(root) / "activate", *options, root)


def entry(root: Path, name: str = "vgpu-libvirt-hook") -> list[str | Path]:
    """The command that runs an installed launcher, whose absolute paths lie below ROOT."""
    text = (root / "usr/bin" / name).read_text()
    launcher = root / "launcher"
    launcher.write_text(text.replace('"/usr/lib', f'"{root}/usr/lib'))
    return [*text.splitlines()[0].removeprefix("#!").split(), launcher]


def call(root: Path, host: Host, operation: str) -> tuple[int, str]:
    """Run the installed entry point as a hook does, for a domain with a hostdev."""
    xml = domain_xml(hostdevs={"ua-x": VF})
    environment = {**ENVIRONMENT, **host.environment}
    done = run(*entry(root), "web1", operation, "begin", "-", input=xml, env=environment)
    return done.returncode, done.stdout


def executables(root: Path) -> list[str]:
    """What libvirt would run, in its order."""
    hooks = root / "etc/libvirt/hooks"
    candidates = [hooks / "qemu", hooks / "daemon", *hooks.glob("*.d/*"), *hooks.glob("*.d/.*")]
    return sorted(str(p.relative_to(hooks)) for p in candidates if os.access(p, os.X_OK))


OURS = ["daemon.d/50-vgpu-libvirt", "qemu.d/50-vgpu-libvirt"]


def test_libvirt_finds_each_hook_once(root: Path) -> None:
    assert executables(root) == OURS
    for kind in ("qemu", "daemon"):
        assert hook(root, kind).read_bytes() == (REPOSITORY / "hooks" / kind).read_bytes()
        assert hook(root, kind).stat().st_mode & 0o7777 == 0o755
    install(root)
    assert executables(root) == OURS


def test_the_hook_runs_compiled_code_and_never_compiles(root: Path, host: Host) -> None:
    live = lib(root) / "live/vgpu_libvirt"
    sources = {path.stem for path in live.rglob("*.py")}
    compiled = {path.name.partition(".")[0] for path in live.rglob("*.pyc")}
    assert sources == compiled
    shutil.rmtree(live / "__pycache__")
    assert call(root, host, "prepare") == (0, "")
    assert not (live / "__pycache__").exists()


def test_a_module_that_is_unpacked_but_not_yet_live_is_not_run(root: Path, host: Host) -> None:
    module(root).write_text("raise SystemExit('half a package')\n")
    assert call(root, host, "prepare") == (0, "")


def test_what_cannot_be_compiled_is_not_made_live(root: Path, host: Host) -> None:
    before = os.readlink(lib(root) / "live")
    module(root).write_text("def broken(:\n")
    assert activate(root).returncode != 0
    assert os.readlink(lib(root) / "live") == before
    assert call(root, host, "prepare") == (0, "")
    install(root)
    assert len(list(lib(root).glob("code.*"))) == 2, "the one that failed is cleaned up"


def test_a_hook_that_runs_keeps_its_version_while_another_is_made_live(root: Path) -> None:
    slow = "import time\ntime.sleep(3)\n"
    for path, text in ((module(root), slow), (module(root).with_name("later.py"), "X = 1\n")):
        path.write_text(text)
    with module(root).open("a") as file:
        file.write("def run():\n    from vgpu_libvirt.later import X\n    print('version', X)\n")
    assert activate(root).returncode == 0
    with subprocess.Popen(entry(root), stdout=subprocess.PIPE, text=True) as running:
        time.sleep(1)
        module(root).with_name("later.py").write_text("X = 2\n")
        assert activate(root).returncode == 0
        assert running.communicate()[0] == "version 1\n"
    assert run(*entry(root)).stdout == "version 2\n"


def test_hooks_that_run_all_the_time_never_notice_an_upgrade(root: Path, host: Host) -> None:
    ended: list[tuple[int, str]] = []
    over = threading.Event()

    def start_and_stop() -> None:
        while not over.is_set() or len(ended) < 10:
            ended.append(call(root, host, "release"))

    thread = threading.Thread(target=start_and_stop)
    thread.start()
    for _ in range(4):
        install(root)
    over.set()
    thread.join(60)
    assert set(ended) == {(0, "")}


def test_what_exec_started_finds_the_shim_however_often_it_is_upgraded(root: Path) -> None:
    command = [*entry(root, "virt-vgpu"), "exec", "printenv", "PYTHONPATH"]
    found = run(*command)
    assert found.returncode == 0, found.stdout
    for _ in range(3):
        assert activate(root).returncode == 0
        assert (Path(found.stdout.strip()) / "sitecustomize.py").exists()


def test_a_hook_that_was_changed_here_stays_as_it_is(root: Path) -> None:
    hook(root).write_text("#!/bin/sh\nexit 0\n")
    said = install(root)
    assert hook(root).read_text() == "#!/bin/sh\nexit 0\n"
    assert f"{hook(root)} was changed or removed here, and stays so" in said
    assert "/usr/lib/vgpu-libvirt/live/hooks/qemu\n" in said
    hook(root).unlink()
    install(root)
    assert executables(root) == OURS[:1]


def test_a_new_hook_replaces_the_old_one_that_nobody_changed(root: Path) -> None:
    with (root / "usr/share/vgpu-libvirt/hooks/qemu").open("a") as file:
        file.write("# newer\n")
    assert activate(root).stdout == ""
    assert hook(root).read_text().endswith("# newer\n")
    assert executables(root) == OURS


def test_there_is_never_a_second_file_that_libvirt_would_run(root: Path, tmp_path: Path) -> None:
    """Looked at before each move, when what is moved is complete."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/mv").write_text(
        f"#!/bin/sh\nls -A {root}/etc/libvirt/hooks/*.d | grep -v : >>{tmp_path}/seen\n"
        'exec /bin/mv "$@"\n'
    )
    (tmp_path / "bin/mv").chmod(0o755)
    environment = {**ENVIRONMENT, "PATH": f"{tmp_path}/bin:{ENVIRONMENT['PATH']}"}
    assert run("sh", lib(root) / "activate", root, env=environment).returncode == 0
    assert set((tmp_path / "seen").read_text().split()) == {"50-vgpu-libvirt"}


def test_removing_takes_the_hooks_and_leaves_what_others_have(root: Path) -> None:
    other = root / "etc/libvirt/hooks/qemu.d/10-other"
    other.write_text("#!/bin/sh\n")
    claim = root / f"var/lib/vgpu-libvirt/claims/{VF}.json"
    claim.parent.mkdir(parents=True)
    claim.write_text("{}")
    done = activate(root, "--remove")
    assert done.returncode == 0
    assert f"the claims in {claim.parent} stay" in done.stdout
    assert "nothing gives these back now when the domains end" in done.stdout
    assert other.exists()
    assert not hook(root).exists()
    assert not hook(root, "daemon").parent.exists()
    assert claim.exists()
    assert (lib(root) / "live/vgpu_libvirt/hook.py").exists(), "a hook may still run"


def test_a_removal_that_is_called_off_brings_the_hooks_back(root: Path) -> None:
    activate(root, "--remove")
    assert activate(root).stdout == ""
    assert executables(root) == OURS


def test_removing_without_claims_says_nothing(root: Path) -> None:
    assert activate(root, "--remove").stdout == ""
    assert executables(root) == []
    assert activate(root, "--remove").returncode == 0


def test_removing_keeps_a_changed_hook_where_libvirt_runs_nothing(root: Path) -> None:
    hook(root).write_text("#!/bin/sh\n# mine\n")
    assert "it is kept as" in activate(root, "--remove").stdout
    assert executables(root) == []
    saved = root / "etc/libvirt/hooks/vgpu-libvirt-qemu.saved"
    assert saved.read_text() == "#!/bin/sh\n# mine\n"


def test_a_root_shell_with_a_private_umask_installs_what_others_can_run(tmp_path: Path) -> None:
    done = run("sh", REPOSITORY / "packaging/install", tmp_path / "root", umask=0o077)
    assert done.returncode == 0, done.stdout
    done = run("sh", lib(tmp_path / "root") / "activate", tmp_path / "root", umask=0o077)
    assert done.returncode == 0, done.stdout
    for path in (tmp_path / "root").rglob("*"):
        assert path.is_symlink() or path.stat().st_mode & 0o044 == 0o044, path


def test_another_default_python_gets_its_compiled_code(root: Path) -> None:
    script = root / "rtupdate"
    text = (REPOSITORY / "packaging/debian/rtupdate").read_text()
    script.write_text(text.replace("/usr/lib/vgpu", f"{root}/usr/lib/vgpu"))
    compiled = lib(root) / "live/vgpu_libvirt/__pycache__"
    for event, is_due in (("pre-rtupdate", False), ("rtupdate", True)):
        shutil.rmtree(compiled)
        assert run("sh", script, event, "python3.9", "python3.99").returncode == 0
        assert compiled.exists() == is_due
        compiled.mkdir(exist_ok=True)
    shutil.rmtree(lib(root))
    assert run("sh", script, "rtupdate", "python3.9", "python3.99").returncode == 0


@pytest.mark.parametrize("kind", ["qemu", "daemon"])
def test_the_hook_files_parse(kind: str) -> None:
    assert run("sh", "-n", REPOSITORY / "hooks" / kind).returncode == 0
