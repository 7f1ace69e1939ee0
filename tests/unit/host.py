# SPDX-License-Identifier: LGPL-2.1-or-later
"""A whole host in a directory: sysfs, proc, libvirt's files, our state.

The attributes are plain files, so the driver of this host takes every write; what the driver
refuses is tried elsewhere.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from vgpu_libvirt import hook
from vgpu_libvirt.address import PciAddress
from vgpu_libvirt.claims import store
from vgpu_libvirt.claims.model import Claim, Process
from vgpu_libvirt.config import Config, Paths, Policy
from vgpu_libvirt.domain.read import parse_domain
from vgpu_libvirt.lifecycle.context import Context

REPOSITORY = Path(__file__).parents[2]
DATA = Path(__file__).parent / "data"
L40S = (DATA / "creatable/l40s.txt").read_text()

LIBVIRTD = 811
BOOT = "11111111-2222-3333-4444-555555555555"
WEB1 = "aaaaaaaa-0000-0000-0000-000000000001"
WEB2 = "aaaaaaaa-0000-0000-0000-000000000002"


class Result(NamedTuple):
    """What a hook answered."""

    status: int
    stdout: str
    stderr: str


class Host:
    """Builds the host, and runs hooks on it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.paths = Paths(*(str(root / name.replace("_", "-")) for name in Paths._fields))
        self.sysfs = Path(self.paths.sysfs)
        self.proc = Path(self.paths.proc)
        self.state = Path(self.paths.state)
        (self.sysfs / "bus/pci/devices").mkdir(parents=True)
        self.write(self.proc / "sys/kernel/random/boot_id", BOOT + "\n")
        self.write(self.proc / "net/unix", "Num RefCount Protocol Flags Type St Inode Path\n")
        self.write(Path(self.paths.journal), "")  # there, and listening no more: lines are lost
        self.process(1, "systemd", start=1)
        self.process(LIBVIRTD, "libvirtd", start=4242)
        self.policy = Policy(lock_timeout=5.0, release_timeout=0.3)
        self.write_config()

    # --- the machine ---

    def write(self, path: Path, text: str) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def pci(self, address: str) -> Path:
        return self.sysfs / "bus/pci/devices" / address

    def gpu(
        self, address: str = "0000:3d:00.0", vfs: int = 4, lists: str = L40S, node: int = -1
    ) -> list[str]:
        """Add a GPU with VFs from function 4 on, as an L40S has them; return their addresses."""
        pf = PciAddress.parse(address)
        self.write(self.pci(address) / "numa_node", f"{node}\n")
        names = []
        for number in range(vfs):
            slot, function = divmod(4 + number, 8)
            vf = str(pf._replace(slot=slot, function=function))
            self.write(self.pci(vf) / "nvidia/creatable_vgpu_types", lists)
            self.write(self.pci(vf) / "nvidia/current_vgpu_type", "0\n")
            group = 1000 * pf.bus + number
            (self.pci(vf) / "physfn").symlink_to(f"../{address}")
            (self.pci(vf) / "iommu_group").symlink_to(f"../../kernel/iommu_groups/{group}")
            (self.pci(vf) / f"vfio-dev/vfio{group + 7}").mkdir(parents=True)
            (self.pci(address) / f"virtfn{number}").symlink_to(f"../{vf}")
            names.append(vf)
        return names

    def place(self, device: str) -> Path:
        """The sysfs directory of a VF, or of a mediated device."""
        return self.pci(device) if ":" in device else self.sysfs / "bus/mdev/devices" / device

    def nodes(self, device: str) -> tuple[str, str]:
        """The device files of a device: of its group, and its own."""
        group = os.path.basename(os.readlink(self.place(device) / "iommu_group"))
        (own,) = os.listdir(self.place(device) / "vfio-dev")
        return f"/dev/vfio/{group}", f"/dev/vfio/devices/{own}"

    def type_of(self, device: str) -> str:
        """What the driver shows as the type of a device; "0" of one that has none."""
        if ":" in device:
            return (self.pci(device) / "nvidia/current_vgpu_type").read_text().strip()
        link = self.place(device) / "mdev_type"
        return os.path.basename(os.readlink(link)) if link.is_symlink() else "0"

    def typed(self) -> list[str]:
        """The devices that have a type."""
        mdevs = self.sysfs / "bus/mdev/devices"
        names = [path.parents[1].name for path in self.pci("").glob("*/nvidia/current_vgpu_type")]
        names += os.listdir(mdevs) if mdevs.exists() else []
        return sorted(name for name in names if self.type_of(name) != "0")

    def set_type(self, vf: str, profile_id: int) -> None:
        self.write(self.pci(vf) / "nvidia/current_vgpu_type", f"{profile_id}\n")

    def set_list(self, vf: str, text: str) -> None:
        self.write(self.pci(vf) / "nvidia/creatable_vgpu_types", text)

    # --- processes ---

    def process(
        self,
        pid: int,
        name: str = "qemu-system-x86",
        start: int = 90210,
        command: str = "",
        parent: int = 1,
        state: str = "S",
        opens: tuple[str, ...] = (),
    ) -> None:
        directory = self.proc / str(pid)
        fields = [state, str(parent), *["0"] * 17, str(start), "0", "0"]
        self.write(directory / "stat", f"{pid} ({name}) {' '.join(fields)}\n")
        self.write(directory / "cmdline", (command or name).replace(" ", "\0") + "\0")
        (directory / "task" / str(pid)).mkdir(parents=True, exist_ok=True)
        (directory / "fd").mkdir(exist_ok=True)
        for number, target in enumerate(("/dev/null", *opens)):
            (directory / "fd" / str(number)).symlink_to(target)

    def end(self, pid: int) -> None:
        subprocess.run(["rm", "-rf", str(self.proc / str(pid))], check=True)

    # --- libvirt ---

    def run_domain(
        self, name: str, uuid: str, pid: int, xml: str, opens: tuple[str, ...] = (), number: int = 7
    ) -> Path:
        """A domain that runs: its QEMU, and libvirt's status file."""
        self.process(pid, command=f"qemu-system-x86_64 -uuid {uuid}", opens=opens)
        monitor = f"/var/lib/libvirt/qemu/domain-{number}-{name[:20]}/monitor.sock"
        return self.write(
            self.status_file(name),
            f"<!-- do not edit -->\n<domstatus state='running' reason='booted' pid='{pid}'>\n"
            f"<monitor path='{monitor}' type='unix'/>\n{xml}</domstatus>\n",
        )

    def status_file(self, name: str) -> Path:
        return Path(self.paths.libvirt_run) / "qemu" / f"{name}.xml"

    def end_domain(self, name: str, pid: int) -> None:
        self.end(pid)
        self.status_file(name).unlink()

    # --- us ---

    @property
    def config(self) -> Config:
        return Config(self.paths, self.policy)

    def context(self, uuid: str | None = None) -> Context:
        return Context(self.config, Process(LIBVIRTD, 4242), uuid)

    def write_config(self) -> Path:
        """The configuration file that roots everything here, for processes that we start."""
        lines = ["[paths]", *(f'{key} = "{value}"' for key, value in self.paths._asdict().items())]
        lines += ["[policy]", f'foreign = "{self.policy.foreign}"']
        lines += [f"exclude = {[str(address) for address in self.policy.exclude]}"]
        for key in ("lock_timeout", "release_timeout", "reserve_timeout"):
            lines.append(f"{key} = {getattr(self.policy, key)}")
        return self.write(self.root / "config.toml", "\n".join(lines) + "\n")

    def set_policy(self, **changes: object) -> None:
        self.policy = self.policy._replace(**changes)  # type: ignore[arg-type]
        self.write_config()

    @property
    def environment(self) -> dict[str, str]:
        return {
            "PATH": os.environ["PATH"],
            "LC_ALL": "C",
            "VGPU_LIBVIRT_CONFIG": str(self.root / "config.toml"),
        }

    def hook(self, operation: str, xml: str, parent: int = LIBVIRTD) -> Result:
        """Run a hook operation in this process."""
        name = parse_domain(xml).name
        return self._run([name, operation, "begin", "-"], xml.encode(), parent)

    def daemon_hook(self, parent: int = LIBVIRTD) -> Result:
        """Run the hook of a starting daemon in this process."""
        return self._run(["--daemon"], b"", parent)

    def _run(self, arguments: list[str], document: bytes, parent: int) -> Result:
        stdout, stderr = io.BytesIO(), io.StringIO()
        streams = hook.Streams(io.BytesIO(document), stdout, stderr)
        environment = {**self.environment, "VGPU_LIBVIRT_PARENT": str(parent)}
        status = hook.main(arguments, streams, environment)
        return Result(status, stdout.getvalue().decode(), stderr.getvalue())

    def claim(self, device: str) -> Claim | None:
        return store.read(self.paths.state, device)

    def tree(self) -> dict[str, str]:
        """Every file below the root with its content, to show that nothing was written."""
        return {
            str(path): os.readlink(path) if path.is_symlink() else path.read_text()
            for path in self.root.rglob("*")
            if path.is_symlink() or path.is_file()
        }


def domain_xml(
    name: str = "web1",
    uuid: str = WEB1,
    requests: dict[str, str] | str | None = None,
    hostdevs: dict[str, str] | str | None = None,
    number: int | None = 7,
    managed: str = "no",
    extra: str = "",
) -> str:
    """A domain. REQUESTS: alias -> profile, HOSTDEVS: alias -> device; or the XML of either."""
    if not isinstance(requests, str):
        requests = "".join(
            f'<vgpu:device alias="{alias}" profile="{profile}"/>'
            for alias, profile in (requests or {}).items()
        )
    metadata = (
        f'<vgpu:devices xmlns:vgpu="urn:vgpu-libvirt:domain:1">{requests}</vgpu:devices>'
        if requests
        else ""
    )
    if not isinstance(hostdevs, str):
        hostdevs = "".join(
            hostdev_xml(alias, address, managed) for alias, address in (hostdevs or {}).items()
        )
    identity = f" id='{number}'" if number else ""
    return (
        f"<domain type='kvm'{identity}>\n  <name>{name}</name>\n  <uuid>{uuid}</uuid>\n"
        f"  <metadata>{metadata}</metadata>\n  {extra}\n"
        f"  <devices>\n    <emulator>/usr/bin/qemu-system-x86_64</emulator>\n{hostdevs}"
        "  </devices>\n</domain>\n"
    )


def hostdev_xml(alias: str, device: str, managed: str = "no") -> str:
    """A hostdev that names a VF by its address, or a mediated device by its UUID."""
    if ":" not in device:
        return (
            f"    <hostdev mode='subsystem' type='mdev' managed='{managed}' model='vfio-pci'>\n"
            f"      <source><address uuid='{device}'/></source>\n"
            f"      <alias name='{alias}'/>\n"
            "      <address type='pci' domain='0x0000' bus='0x05' slot='0x00' function='0x0'/>\n"
            "    </hostdev>\n"
        )
    pci = PciAddress.parse(device)
    return (
        f"    <hostdev mode='subsystem' type='pci' managed='{managed}'>\n"
        f"      <source><address domain='{pci.domain:#06x}' bus='{pci.bus:#04x}' "
        f"slot='{pci.slot:#04x}' function='{pci.function:#x}'/></source>\n"
        f"      <alias name='{alias}'/>\n"
        "      <address type='pci' domain='0x0000' bus='0x05' slot='0x00' function='0x0'/>\n"
        "    </hostdev>\n"
    )


def web1(device: str, profile: str = "NVIDIA L40S-8Q", **more: object) -> str:
    """A domain with one vGPU, at DEVICE."""
    return domain_xml(requests={"ua-vgpu0": profile}, hostdevs={"ua-vgpu0": device}, **more)  # type: ignore[arg-type]


def web2(device: str, profile: str = "NVIDIA L40S-8Q", **more: object) -> str:
    """Another domain with one vGPU, at DEVICE."""
    return web1(device, profile, name="web2", uuid=WEB2, number=8, **more)


def entry_point(directory: Path, python: str = sys.executable) -> Path:
    """An entry point for the stub that runs this checkout, with the interpreter's own options."""
    path = directory / "vgpu-libvirt-hook"
    text = (REPOSITORY / "packaging/vgpu-libvirt-hook.in").read_text()
    text = text.replace("/usr/bin/python3", python).replace("@PYTHONDIR@", str(REPOSITORY))
    path.write_text(text)
    path.chmod(0o755)
    return path
