# SPDX-License-Identifier: LGPL-2.1-or-later
"""Words for the lab's tests: real virsh, real sysfs, the store as files."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# igb puts the VFs of 0000:01:00.0 here; each PF's are on its own bus
VF1, VF2, VF3 = "0000:01:10.0", "0000:01:10.2", "0000:01:10.4"
OTHER_GPU_VF = "0000:02:10.0"
PROFILE = "NVIDIA FAKE24-4Q"
PROFILE_ID = "914"

HOOKS = Path("/etc/libvirt/hooks/qemu.d")
OUR_HOOK = HOOKS / "50-vgpu-libvirt"
SYSTEMD = Path("/run/systemd/system")  # hooks start workers where it isn't there
TRIGGER = Path("/run/vgpu-libvirt/wanted/sync")
CLAIMS = Path("/var/lib/vgpu-libvirt/claims")
PARAMETERS = Path("/sys/module/fakevgpu/parameters")

# What the driver answers; the numbers are EBUSY, ENODEV, EINVAL and ENOSPC.
DRIVERS = {
    "vendor": {
        "mixed": 0, "header": 1, "errno_in_use": 1, "errno_unknown": 5, "errno_mismatch": 5,
        "errno_full": 5, "errno_clear_unset": 1, "errno_set_twice": 1,
    },
    "rfc": {
        "mixed": 2, "header": 2, "errno_in_use": 16, "errno_unknown": 19, "errno_mismatch": 22,
        "errno_full": 28, "errno_clear_unset": 0, "errno_set_twice": 0,
    },
}  # fmt: skip


class Answer(NamedTuple):
    """What a command did."""

    status: int
    output: str


def run(*command: str, stdin: str = "") -> Answer:
    """Run COMMAND; stdout and stderr together."""
    done = subprocess.run(
        command, input=stdin, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    return Answer(done.returncode, done.stdout)


def virsh(*arguments: str) -> str:
    """Run virsh, which must succeed; return its output."""
    answer = run("virsh", "--quiet", *arguments)
    assert answer.status == 0, f"virsh {' '.join(arguments)}: {answer.output}"
    return answer.output


def refused(*arguments: str) -> str:
    """Run virsh, which must fail; return what it says."""
    answer = run("virsh", "--quiet", *arguments)
    assert answer.status != 0, f"virsh {' '.join(arguments)} succeeded: {answer.output}"
    return answer.output


def uuid_of(name: str) -> str:
    """The UUID that the domain NAME has in every test."""
    return str(uuid.uuid5(uuid.NAMESPACE_DNS, name))


_MIGRATABLE = """
  <qemu:override>
    <qemu:device alias='ua-vgpu0'>
      <qemu:frontend>
        <qemu:property name='enable-migration' type='string' value='on'/>
      </qemu:frontend>
    </qemu:device>
  </qemu:override>"""


def domain_xml(
    name: str,
    vf: str | None = None,
    profile: str | None = PROFILE,
    managed: str = "no",
    devices: str = "",
    migratable: bool = False,
) -> str:
    """A tiny domain; with VF a hostdev, with PROFILE too the request for a vGPU there.

    MIGRATABLE: QEMU migrates or saves the VF too, although the kernel can't track dirty pages.
    """
    request = hostdev = ""
    namespace = override = ""
    if migratable:
        namespace = " xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'"
        override = _MIGRATABLE
    if vf:
        domain, bus, slot, function = re.split("[:.]", vf)
        hostdev = f"""
    <hostdev mode='subsystem' type='pci' managed='{managed}'>
      <source>
        <address domain='0x{domain}' bus='0x{bus}' slot='0x{slot}' function='0x{function}'/>
      </source>
      <alias name='ua-vgpu0'/>
      <rom bar='off'/>
    </hostdev>"""
        if profile:
            request = f"""
    <vgpu:devices xmlns:vgpu='urn:vgpu-libvirt:domain:1'>
      <vgpu:device alias='ua-vgpu0' profile='{profile}'/>
    </vgpu:devices>"""
    return f"""<domain type='qemu'{namespace}>
  <name>{name}</name>
  <uuid>{uuid_of(name)}</uuid>
  <metadata>{request}</metadata>
  <memory unit='MiB'>64</memory>
  <vcpu>1</vcpu>
  <os><type arch='x86_64' machine='q35'>hvm</type></os>
  <devices>
    <emulator>/usr/bin/qemu-system-x86_64</emulator>
    <controller type='usb' model='none'/>
    <memballoon model='none'/>{hostdev}{devices}
  </devices>{override}
</domain>"""


def define(name: str, vf: str | None = None, **more: Any) -> str:
    """Define a domain and return its name."""
    path = Path("/tmp") / f"{name}.xml"
    path.write_text(domain_xml(name, vf, **more))
    virsh("define", str(path))
    return name


def define_request(name: str, **more: Any) -> str:
    """Define a domain with the request in its metadata, and no hostdev; return its name."""
    document = domain_xml(name, VF1, **more)
    begin, end = document.index("<hostdev"), document.index("</hostdev>") + len("</hostdev>")
    path = Path("/tmp") / f"{name}.xml"
    path.write_text(document[:begin] + document[end:])
    virsh("define", str(path))
    return name


def start(name: str, vf: str | None = None, **more: Any) -> str:
    """Define and start a domain; return its name."""
    define(name, vf, **more)
    virsh("start", name)
    return name


def is_running(name: str) -> bool:
    return virsh("domstate", name).strip() == "running"


def qemu_pid(name: str) -> int:
    return int(Path(f"/run/libvirt/qemu/{name}.pid").read_text())


def holds(name: str, vf: str) -> bool:
    """Whether the QEMU of a domain has the VF open."""
    group = os.path.basename(os.readlink(f"/sys/bus/pci/devices/{vf}/iommu_group"))
    files = Path(f"/proc/{qemu_pid(name)}/fd")
    return f"/dev/vfio/{group}" in {os.readlink(link) for link in files.iterdir()}


def type_of(vf: str) -> str:
    return Path(f"/sys/bus/pci/devices/{vf}/nvidia/current_vgpu_type").read_text().strip()


def set_type(vf: str, profile_id: str) -> None:
    Path(f"/sys/bus/pci/devices/{vf}/nvidia/current_vgpu_type").write_text(profile_id)


def has_driver(vf: str) -> bool:
    """False where the IOMMU is off, with which no VF has one."""
    return Path(f"/sys/bus/pci/devices/{vf}/driver").exists()


def driver_of(vf: str) -> str:
    return os.path.basename(os.readlink(f"/sys/bus/pci/devices/{vf}/driver"))


def claim(vf: str) -> dict[str, Any] | None:
    path = CLAIMS / f"{vf}.json"
    return json.loads(path.read_text()) if path.exists() else None


def writes_to(vf: str) -> list[str]:
    """The values that anybody wrote to a VF's type since the module was loaded."""
    log = run("dmesg").output
    return re.findall(rf"nvidia {re.escape(vf)}: current_vgpu_type <- (\d+): ", log)


def set_driver(**parameters: int) -> None:
    """Set parameters of the driver."""
    for name, value in parameters.items():
        (PARAMETERS / name).write_text(str(value))


def until(condition: Callable[[], bool], seconds: float = 90) -> bool:
    """Wait until CONDITION holds; whether it came to."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def hook(name: str, script: str) -> Path:
    """Put another hook script beside ours; libvirt runs them in the order of their names."""
    # Written elsewhere first: libvirt runs whatever it finds there, half a script too.
    aside = Path("/tmp") / name
    aside.write_text(script)
    aside.chmod(0o755)
    return Path(shutil.move(aside, HOOKS / name))


def let_go(name: str) -> None:
    """Let go what the domain was asked to, as an operating system does: by Q35's registers.

    See QEMU's docs/specs/acpi_pci_hotplug.rst. A reset does it too, but now and then QEMU 10.0
    aborts on an assertion of its own, since what it resets goes meanwhile.
    """

    def monitor(command: str) -> str:
        return virsh("qemu-monitor-command", name, "--hmp", command)

    for bus in range(8):
        monitor(f"o /4 0xcd0 {bus}")
        asked = int(monitor("i /4 0xcc4").partition("=")[2], 16)  # one bit a slot
        if asked:
            monitor(f"o /4 0xcc8 {asked}")


def restart_libvirtd() -> None:
    """Stop libvirtd, wait for its end, start it again."""
    stopped = run("libvirtd-stop")
    assert stopped.status == 0, stopped.output
    started = run("libvirtd-start")
    assert started.status == 0, started.output


def slow(operation: str, before_ours: bool = False) -> None:
    """A hook script beside ours that says that it is at OPERATION of web1, and stays there."""
    hook(
        "40-slow" if before_ours else "60-slow",
        f"#!/bin/sh\ncat >/dev/null\n[ \"$1 $2\" != 'web1 {operation}' ] && exit\n"
        "touch /tmp/there\nexec sleep 300\n",
    )
    Path("/tmp/there").unlink(missing_ok=True)


def is_there() -> bool:
    return Path("/tmp/there").exists()


def libvirtd_pid() -> int:
    return int(Path("/run/libvirtd.pid").read_text())


def kill_libvirtd() -> None:
    pid = libvirtd_pid()
    os.kill(pid, signal.SIGKILL)
    assert until(lambda: not Path(f"/proc/{pid}").exists())


def start_libvirtd() -> None:
    for script in ("40-slow", "60-slow"):
        (HOOKS / script).unlink(missing_ok=True)
    run("pkill", "-KILL", "-x", "sleep")
    started = run("libvirtd-start")
    assert started.status == 0, started.output


def sync() -> dict[str, Any]:
    done = run("virt-vgpu", "sync", "--json")
    assert done.status == 0, done.output
    return dict(json.loads(done.output))


def sync_after_lapse() -> None:
    """A sync for which every reservation has lapsed."""
    soon = Path("/run/soon.toml")
    soon.write_text("[policy]\nreserve_timeout = 0.1\n")
    time.sleep(0.2)
    done = run("env", f"VGPU_LIBVIRT_CONFIG={soon}", "virt-vgpu", "sync")
    assert done.status == 0, done.output


def let_converge(name: str) -> None:
    """Let a domain that can migrate stop for as long as it takes to send all of its memory."""
    virsh("qemu-monitor-command", name, "--hmp", "migrate_set_parameter downtime-limit 60000")


def in_background(*command: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


@contextlib.contextmanager
def nothing_pretended() -> Iterator[None]:
    """Where the lab only pretends that there is systemd (see conftest), doctor would ask it."""
    if Path("/run/systemd/private").exists():
        yield
        return
    SYSTEMD.rmdir()
    try:
        yield
    finally:
        SYSTEMD.mkdir()


def doctor(*command: str) -> dict[str, str]:
    """Check -> what it says is wrong. COMMAND: what runs it."""
    with nothing_pretended():
        answer = run(*command, "virt-vgpu", "doctor", "--json")
    print(answer.output)
    told = json.loads(answer.output)
    assert answer.status == int(any(each["level"] == "problem" for each in told)), answer
    return {each["check"]: each["problem"] for each in told}


def assert_free(vf: str) -> None:
    """VF has no type and no claim."""
    assert (type_of(vf), claim(vf)) == ("0", None)
