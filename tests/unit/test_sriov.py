# SPDX-License-Identifier: LGPL-2.1-or-later
"""VFs that are made at boot: only for who is listed, only where nobody is, believed when seen.

The vendor's programs are scripts here; `restore` in them brings the VFs of the host's GPU.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from tests.unit.host import WEB1, domain_xml
from vgpu_libvirt import sriov
from vgpu_libvirt.address import PciAddress
from vgpu_libvirt.claims import locks
from vgpu_libvirt.cli.main import main
from vgpu_libvirt.devices import vendor_programs
from vgpu_libvirt.devices.vendor_programs import parse_mixed_mode
from vgpu_libvirt.sriov import Act, Seen, whether_to_make, whether_to_mix

if TYPE_CHECKING:
    from tests.unit.host import Host

GPU, OTHER = "0000:3d:00.0", "0000:5e:00.0"
PF = PciAddress.parse(GPU)
LOCKED = "echo 'Cannot obtain unbindLock for 0000:3d:00.0' >&2; exit 1"

SMI = """
case $* in
  "vgpu -shm 1 -i $GPU") echo {after} >"$ROOT/mode" ;;
  "-q -i $GPU")
    echo '    Heterogenous Multi-vGPU               : Supported'
    echo "    vGPU Heterogeneous Mode               : $(cat "$ROOT/mode")" ;;
esac
"""


class Vendor:
    """A host whose GPUs have no VFs yet, and the vendor's programs."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.calls = host.root / "calls"
        self.vfs = {gpu: self.unmade(gpu) for gpu in (GPU, OTHER)}
        self.sriov_manage('restore "$2"')
        self.nvidia_smi(SMI.format(after="Enabled"))
        (host.root / "mode").write_text("Disabled\n")
        self.list(GPU)

    def unmade(self, gpu: str) -> list[str]:
        """A GPU on the vendor's driver, without its VFs; `restore` in a script brings these."""
        host = self.host
        vfs = host.gpu(gpu)
        device, later = host.pci(gpu), host.root / "later" / gpu
        later.mkdir(parents=True)
        for vf in vfs:
            shutil.move(host.pci(vf), later / vf)
        for link in list(device.glob("virtfn*")):
            shutil.move(link, later / link.name)
        host.write(device / "sriov_totalvfs", "16\n")
        host.write(device / "sriov_numvfs", "0\n")
        (device / "driver").symlink_to("../../../bus/pci/drivers/nvidia")
        (device / "iommu_group").symlink_to(f"../../kernel/iommu_groups/{gpu[5:7]}")
        return vfs

    def list(self, *gpus: str, more: str = "") -> None:
        self.host.write_config()
        with (self.host.root / "config.toml").open("a") as file:
            file.write(f"[sriov]\ngpus = {json.dumps(gpus)}\n{more}\n")

    def sriov_manage(self, text: str) -> None:
        self._program(self.host.paths.sriov_manage, text)

    def nvidia_smi(self, text: str) -> None:
        self._program(self.host.paths.nvidia_smi, text)

    def _program(self, path: str, text: str) -> None:
        script = f"""#!/bin/sh
ROOT='{self.host.root}' GPU={GPU} DEVICES='{self.host.sysfs}/bus/pci/devices'
echo "${{0##*/}} $*" >>"$ROOT/calls"
restore() {{
  for each in "$ROOT/later/$1"/0000:*; do mv "$each" "$DEVICES/"; done
  for each in "$ROOT/later/$1"/virtfn*; do mv "$each" "$DEVICES/$1/"; done
  echo 4 >"$DEVICES/$1/sriov_numvfs"
}}
{text}
"""
        self.host.write(self.host.root / os.path.basename(path), script).chmod(0o755)

    def run(self, *options: str) -> tuple[int, str, str]:
        """What the verb answers: exit status, what it says, and its error."""
        done = CliRunner().invoke(
            main, ["sriov", *options], env=self.host.environment, prog_name="virt-vgpu"
        )
        assert done.exit_code in (0, 1), done.output
        said, _, error = done.output.partition("virt-vgpu: error: ")
        return done.exit_code, said, error

    def refusal(self, *options: str) -> str:
        status, _, said = self.run(*options)
        assert status == 1
        assert said.count("\n") == 1
        return said.strip()

    @property
    def called(self) -> list[str]:
        return self.calls.read_text().splitlines() if self.calls.exists() else []


@pytest.fixture
def vendor(host: Host, monkeypatch: pytest.MonkeyPatch) -> Vendor:
    for name in ("_ATTEMPT_PAUSE", "_PAUSE"):
        monkeypatch.setattr(sriov, name, 0.01)
    for name in ("_SETTLES", "_VFS_COME"):
        monkeypatch.setattr(sriov, name, 0.05)
    return Vendor(host)


def test_a_listed_gpu_gets_its_vfs(vendor: Vendor) -> None:
    assert vendor.run() == (0, f"{GPU} has 4 VFs now.\n", "")
    assert vendor.called == [f"sriov-manage -e {GPU}"]
    assert (vendor.host.pci(GPU) / "virtfn3").exists()


def test_nothing_is_done_for_who_is_not_listed(vendor: Vendor) -> None:
    vendor.list()
    assert vendor.run() == (
        0,
        "[sriov] in the configuration lists no GPU, so nothing is done.\n",
        "",
    )
    assert vendor.called == []


def test_a_gpu_that_has_vfs_is_left_as_it_is(vendor: Vendor) -> None:
    vendor.run()
    assert vendor.run() == (0, f"{GPU} has 4 VFs already.\n", "")
    assert vendor.called == [f"sriov-manage -e {GPU}"]


def test_vfs_that_can_carry_no_vgpu_are_reported_and_left(vendor: Vendor) -> None:
    vendor.run()
    shutil.rmtree(vendor.host.pci(vendor.vfs[GPU][0]) / "nvidia")
    said = vendor.refusal()
    assert said.startswith(f"{GPU} has 4 VFs already, but only 3 that can be given vGPUs; ")
    assert len(vendor.called) == 1


def test_older_drivers_vfs_carry_mediated_devices(vendor: Vendor) -> None:
    for vf in vendor.vfs[GPU]:
        directory = vendor.host.root / "later" / GPU / vf
        shutil.rmtree(directory / "nvidia")
        (directory / "mdev_supported_types").mkdir()
    assert vendor.run() == (0, f"{GPU} has 4 VFs now.\n", "")


def test_vfs_that_are_just_being_made_are_not_made_again(vendor: Vendor) -> None:
    vendor.host.write(vendor.host.pci(GPU) / "sriov_numvfs", "4\n")
    assert f"{GPU} has 4 VFs already, but only 0" in vendor.refusal()
    assert vendor.called == []


# --- what the program does counts, not what it says ---


def test_an_exit_status_of_0_without_vfs_is_a_failure(vendor: Vendor) -> None:
    vendor.sriov_manage("echo Enabling VFs on $2")
    assert vendor.refusal() == (
        f"{GPU} has 0 VFs, of which 0 can be given vGPUs: {vendor.host.paths.sriov_manage} said "
        f"'Enabling VFs on {GPU}' and exited with 0"
    )
    assert len(vendor.called) == 1, "only what is known to pass is tried again"


def test_vfs_that_are_there_count_whatever_the_exit_status(vendor: Vendor) -> None:
    vendor.sriov_manage('restore "$2"; echo awk: error writing standard output >&2; exit 2')
    assert vendor.run()[:2] == (0, f"{GPU} has 4 VFs now.\n")


def test_vfs_that_come_after_the_program_ended_are_waited_for(
    vendor: Vendor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sriov, "_VFS_COME", 20.0)
    vendor.sriov_manage('{ sleep 0.3; restore "$2"; } >/dev/null 2>&1 &')
    assert vendor.run()[:2] == (0, f"{GPU} has 4 VFs now.\n")


def test_half_the_vfs_are_not_all(vendor: Vendor) -> None:
    vendor.sriov_manage('restore "$2"; rm "$DEVICES/$2/virtfn3"')
    assert f"{GPU} has 4 VFs, of which 3 can be given vGPUs" in vendor.refusal()


def test_a_gpu_that_lost_its_driver_is_reported_so(vendor: Vendor) -> None:
    vendor.sriov_manage('rm "$DEVICES/$2/driver"; exit 1')
    said = vendor.refusal()
    assert said.startswith(f"{GPU}, whose driver is gone now, has 0 VFs, of which 0 can ")
    assert "said nothing and exited with 1" in said


def test_who_has_the_gpu_open_for_a_moment_is_waited_for(vendor: Vendor) -> None:
    vendor.sriov_manage(f'[ "$(wc -l <"$ROOT/calls")" = 3 ] || {{ {LOCKED}; }}; restore "$2"')
    assert vendor.run()[:2] == (0, f"{GPU} has 4 VFs now.\n")
    assert len(vendor.called) == 3


def test_but_not_for_ever(vendor: Vendor) -> None:
    vendor.sriov_manage(LOCKED)
    said = vendor.refusal()
    assert said.startswith(f"no VFs of {GPU} could be made, since something has it open: ")
    assert "'Cannot obtain unbindLock for 0000:3d:00.0' and exited with 1; stop what " in said
    assert len(vendor.called) == 5


def test_each_attempt_looks_anew(vendor: Vendor) -> None:
    """A guest that takes the whole GPU between two attempts is not robbed of it."""
    host = vendor.host
    vendor.sriov_manage(f'ln -s /dev/vfio/3d "{host.proc}/811/fd/9"; {LOCKED}')
    assert vendor.refusal() == f"no VFs of {GPU} are made: {GPU} is open in process 811"
    assert len(vendor.called) == 1


def test_a_program_that_hangs_is_ended_with_all_it_started(
    vendor: Vendor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vendor_programs, "_LONGEST", 0.3)
    vendor.sriov_manage('sh -c "sleep 60" & echo $! >"$ROOT/child"; wait')
    begun = time.monotonic()
    assert f"-e {GPU}' did not end within 0 s and was stopped" in vendor.refusal()
    assert time.monotonic() - begun < 30
    child = int((vendor.host.root / "child").read_text())
    with pytest.raises(ProcessLookupError):
        for _ in range(500):
            os.kill(child, 0)
            time.sleep(0.01)


@pytest.mark.parametrize(
    ("break_it", "sentence"),
    [
        (lambda path: path.unlink(), " is not there; install the vendor's vGPU host driver, or "),
        (lambda path: path.write_bytes(b"\x00\x01"), " can't be run: exec format error"),
    ],
)
def test_a_program_that_cannot_be_run(vendor: Vendor, break_it: object, sentence: str) -> None:
    program = vendor.host.root / "sriov-manage"
    break_it(program)  # type: ignore[operator]
    assert vendor.refusal().startswith(f"{program}{sentence}")


def test_one_gpu_that_fails_does_not_stop_the_others(vendor: Vendor) -> None:
    vendor.sriov_manage(f'[ "$2" = {OTHER} ] || exit 1; restore "$2"')
    vendor.list(GPU, "0000:99:00.0", OTHER)
    status, said, failed = vendor.run()
    assert (status, said) == (1, f"{OTHER} has 4 VFs now.\n")
    assert f"{GPU} has 0 VFs" in failed
    assert "; 0000:99:00.0 is not on this host; correct [sriov]" in failed
    assert failed.count("\n") == 1


# --- whom it must never be run for ---


def taken_by_a_domain(host: Host) -> None:
    xml = domain_xml("web1", WEB1, hostdevs={"ua-gpu": GPU})
    host.run_domain("web1", WEB1, 4001, xml)


@pytest.mark.promise(1, 4)
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (taken_by_a_domain, f"no VFs of {GPU} are made: {GPU} is in use by domain 'web1'"),
        (
            lambda host: host.process(77, opens=("/dev/vfio/3d",)),
            f"no VFs of {GPU} are made: {GPU} is open in process 77",
        ),
        (
            lambda host: host.end(1),
            f"no VFs of {GPU} are made, since it can't be told who uses it: ",
        ),
        (
            lambda host: host.write(host.status_file("web9"), "<dom"),
            f"no VFs of {GPU} are made, since it can't be told who uses it: the status file ",
        ),
        (
            lambda host: (
                (host.pci(GPU) / "iommu_group").unlink()
                or host.write(host.pci(GPU) / "iommu_group", "")
            ),
            f"no VFs of {GPU} are made, since it can't be told who uses it: the IOMMU group of ",
        ),
        (
            lambda host: (host.pci(GPU) / "driver").unlink(),
            f"{GPU} has no driver, so no VFs are made; it needs the vendor's driver",
        ),
        (
            lambda host: (
                (host.pci(GPU) / "driver").unlink()
                or (host.pci(GPU) / "driver").symlink_to("../drivers/vfio-pci")
            ),
            f"{GPU} is bound to vfio-pci, so no VFs are made; ",
        ),
        (
            lambda host: (host.pci(GPU) / "sriov_totalvfs").unlink(),
            f"{GPU} has no SR-IOV; is it switched off in the firmware?",
        ),
        (
            lambda host: (host.pci(GPU) / "physfn").symlink_to("../0000:3c:00.0"),
            f"{GPU} is a VF; name its GPU in [sriov] instead",
        ),
        (lambda host: shutil.rmtree(host.pci(GPU)), f"{GPU} is not on this host; "),
    ],
)
def test_a_gpu_that_is_or_may_be_somebodys_is_refused(
    vendor: Vendor, change: object, sentence: str
) -> None:
    change(vendor.host)  # type: ignore[operator]
    vendor.list(GPU, OTHER)
    status, _, said = vendor.run()
    assert status == 1
    assert said.startswith(sentence)
    assert f"sriov-manage -e {GPU}" not in vendor.called


def test_a_driver_that_comes_late_is_waited_for(
    vendor: Vendor, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = vendor.host.pci(GPU) / "driver"
    target = os.readlink(driver)
    driver.unlink()
    looks: list[Seen] = []

    def late(condition: object, seconds: float) -> None:
        if seconds == 20.0 and not looks:
            looks.append(sriov.look(vendor.host.paths, PF))
            assert not condition()  # type: ignore[operator]
            driver.symlink_to(target)
            assert condition()  # type: ignore[operator]

    monkeypatch.setattr(sriov, "_SETTLES", 20.0)
    monkeypatch.setattr(sriov, "_until", late)
    assert vendor.run()[0] == 0
    assert [seen.driver for seen in looks] == [None]


def test_who_else_is_making_them_is_waited_for(
    vendor: Vendor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an administrator's own unit for sriov-manage, that runs beside ours."""
    monkeypatch.setattr(sriov, "_SETTLES", 20.0)
    number = vendor.host.pci(GPU) / "sriov_numvfs"
    vendor.host.write(number, "4\n")
    script = f"sleep 0.3; {vendor.host.paths.sriov_manage} -e {GPU}"
    with subprocess.Popen(["sh", "-c", script]):
        assert vendor.run() == (0, f"{GPU} has 4 VFs already.\n", "")
    assert len(vendor.called) == 1, "theirs"


def test_what_the_policy_excludes_is_not_touched(vendor: Vendor) -> None:
    vendor.host.set_policy(exclude=(PF,))
    vendor.list(GPU)
    assert vendor.refusal().startswith(f"{GPU} is in [sriov], but [policy] excludes it; ")
    assert vendor.called == []


def test_two_runs_never_work_on_one_gpu(vendor: Vendor) -> None:
    vendor.host.set_policy(lock_timeout=0.1)
    vendor.list(GPU)
    with locks.devices(vendor.host.paths.state, [GPU], time.monotonic() + 1):
        assert "is held by somebody else" in vendor.refusal()
    assert vendor.called == []


@pytest.mark.promise(9)
def test_a_dry_run_tells_and_writes_nothing(vendor: Vendor) -> None:
    vendor.list(GPU, OTHER, more=f'mixed_size = ["{GPU}"]')
    before = vendor.host.tree()
    assert vendor.run("--dry-run") == (
        0,
        f"the VFs of {GPU} would be made.\n{GPU} would then be told to mix sizes.\n"
        f"the VFs of {OTHER} would be made.\n",
        "",
    )
    assert vendor.host.tree() == before
    taken_by_a_domain(vendor.host)
    assert "in use by domain 'web1'" in vendor.refusal("--dry-run")


def test_only_root_may(vendor: Vendor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vgpu_libvirt.cli.rights.is_root", lambda _paths: False)
    assert vendor.refusal().startswith("only root may make VFs: ")
    assert vendor.called == []


# --- mixed sizes ---


@pytest.fixture
def mixing(vendor: Vendor) -> Vendor:
    vendor.list(GPU, more=f'mixed_size = ["{GPU}"]')
    return vendor


def test_sizes_are_mixed_after_the_vfs_were_made_and_read_back(mixing: Vendor) -> None:
    assert mixing.run() == (0, f"{GPU} has 4 VFs now.\n{GPU} mixes sizes now.\n", "")
    query = f"nvidia-smi -q -i {GPU}"
    assert mixing.called == [
        f"sriov-manage -e {GPU}", query, f"nvidia-smi vgpu -shm 1 -i {GPU}", query,
    ]  # fmt: skip
    assert mixing.run()[1] == f"{GPU} has 4 VFs already.\n{GPU} mixes sizes already.\n"
    assert mixing.called[4:] == [query]


def test_a_mode_that_did_not_take_is_a_failure(mixing: Vendor) -> None:
    mixing.nvidia_smi(SMI.format(after="Disabled") + "echo no such thing; exit 0")
    assert mixing.refusal() == (
        f"{GPU} has 4 VFs now; {GPU} was told to mix sizes, but its mode is 'Disabled': "
        f"{mixing.host.paths.nvidia_smi} said 'no such thing' and exited with 0"
    )


def test_a_gpu_without_the_mode(mixing: Vendor) -> None:
    (mixing.host.root / "mode").write_text("N/A\n")
    assert f"; {GPU} can't mix sizes: its mode is 'N/A', as in MIG " in mixing.refusal()
    mixing.nvidia_smi("echo '    Heterogenous Multi-vGPU : Enabled'; exit 6")
    said = mixing.refusal()
    assert f"; no 'vGPU Heterogeneous Mode' is shown for {GPU}: " in said
    assert said.endswith("exited with 6")


@pytest.mark.promise(1, 4)
def test_no_mode_is_set_once_somebody_is_there(mixing: Vendor) -> None:
    mixing.list(GPU)
    mixing.run()
    mixing.list(GPU, more=f'mixed_size = ["{GPU}"]')
    vf = mixing.vfs[GPU][1]
    host = mixing.host
    told = f"nvidia-smi vgpu -shm 1 -i {GPU}"
    host.set_type(vf, 1152)
    assert f"{GPU} is not told to mix sizes: {vf} has type 1152" in mixing.refusal()
    host.set_type(vf, 0)
    host.process(77, opens=(host.nodes(vf)[1],))
    assert f"{GPU} is not told to mix sizes: {vf} is open in process 77" in mixing.refusal()
    host.end(77)
    host.write(host.pci(vf) / "nvidia/current_vgpu_type", "?\n")
    assert "since it can't be told who uses it" in mixing.refusal()
    assert told not in mixing.called
    host.set_type(vf, 0)
    assert mixing.run()[0] == 0
    assert told in mixing.called


def test_nobody_sets_a_first_type_while_the_mode_is_set(mixing: Vendor) -> None:
    mixing.run()
    (mixing.host.root / "mode").write_text("Disabled\n")
    mixing.host.set_policy(lock_timeout=0.1)
    mixing.list(GPU, more=f'mixed_size = ["{GPU}"]')
    with locks.devices(mixing.host.paths.state, [mixing.vfs[GPU][2]], time.monotonic() + 1):
        assert "is held by somebody else" in mixing.refusal()


@pytest.mark.parametrize(
    ("text", "mode"),
    [
        ("  vGPU Heterogeneous Mode               : Enabled\n", "Enabled"),
        ("x\n\tvGPU Heterogeneous Mode : N/A \r\ny\n", "N/A"),
        ("  Heterogenous Multi-vGPU : Supported\n", None),
        ("  vGPU Heterogeneous Mode : Enabled\n  vGPU Heterogeneous Mode : Disabled\n", None),
        ("", None),
    ],
)
def test_the_mode_is_read_of_one_gpu_alone(text: str, mode: str | None) -> None:
    assert parse_mixed_mode(text) == mode


# --- the decisions alone ---

BARE = Seen(PF, True, False, "nvidia", 16, 0, 0, 0)
WHOLE = BARE._replace(number=4, links=4, ready=4)


def test_what_is_decided() -> None:
    assert whether_to_make(BARE).act is Act.DO
    assert whether_to_make(WHOLE).act is Act.LEAVE
    assert whether_to_mix(WHOLE, "Disabled").act is Act.DO
    assert whether_to_mix(WHOLE, "Enabled").act is Act.LEAVE
    assert whether_to_mix(BARE, "Disabled").act is Act.REFUSE
    for somebody in (BARE._replace(taken=("x",)), BARE._replace(doubts=("x",))):
        assert whether_to_make(somebody).act is Act.REFUSE
    for somebody in (WHOLE._replace(taken=("x",)), WHOLE._replace(doubts=("x",))):
        assert whether_to_mix(somebody, "Disabled").act is Act.REFUSE
        assert whether_to_make(somebody).act is Act.LEAVE


def test_a_gpu_is_whole_only_when_the_kernel_has_counted_all_its_vfs() -> None:
    assert WHOLE.is_whole
    for part in (
        WHOLE._replace(number=0),
        WHOLE._replace(links=3, ready=3),
        WHOLE._replace(ready=3),
        WHOLE._replace(driver=None),
        BARE,
    ):
        assert not part.is_whole


def test_the_programs_words_are_one_short_sentence() -> None:
    ran = vendor_programs.Ran("/x", 3, "one\n\n  " + "y" * 500 + " \n\n")
    assert str(ran) == f"/x said '{'y' * 200}' and exited with 3"
