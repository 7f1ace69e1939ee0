# SPDX-License-Identifier: LGPL-2.1-or-later
"""A large host in a directory: GPUs, domains that run, domains that don't; nothing of it is real.

The attributes are plain files, and so are the processes; libvirt is `bench/libvirt_double.py`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

from tests.unit.host import BOOT, DATA, LIBVIRTD, Host, hostdev_xml
from vgpu_libvirt.claims import store
from vgpu_libvirt.claims.model import Claim, Namespaces, Phase, Process, Qemu
from vgpu_libvirt.devices.model import Profile
from vgpu_libvirt.lifecycle import learn
from vgpu_libvirt.survey import look

if TYPE_CHECKING:
    from pathlib import Path

VFS = 48  # of each GPU
PROFILE = Profile(1147, "NVIDIA L40S-1Q")  # 48 of them fit on an L40S
ALIAS = "ua-vgpu0"
_LISTS = (DATA / "creatable/l40s.txt").read_text()
_BESIDE = "ID    : vGPU Name\n" + "".join(
    line for line in _LISTS.splitlines(keepends=True) if line.rstrip().endswith(("-1Q", "-1B"))
)  # what fits beside vGPUs of 1 GB
_NOTHING = "ID    : vGPU Name\n"
_FILES = 40  # that each QEMU has open
_FLAGS = 300  # of QEMU's capabilities, each an element of a status file
_FIRST_PID = 10_000


class Size(NamedTuple):
    """How large a host is."""

    gpus: int
    running: int
    inactive: int

    def __str__(self) -> str:
        return f"{self.gpus} GPUs, {self.running + self.inactive} domains"


class Guest(NamedTuple):
    """A domain, and the VF that its hostdev names."""

    number: int
    vf: str

    @property
    def name(self) -> str:
        return f"guest{self.number:05}"

    @property
    def uuid(self) -> str:
        # Spread, so that the order of UUIDs isn't that of the devices.
        return f"{self.number * 0x9E3779B1 % 2**32:08x}-0000-4000-8000-{self.number:012x}"

    @property
    def pid(self) -> int:
        return _FIRST_PID + self.number

    def document(self, vf: str | None = None, live: bool = False) -> str:
        """The domain's XML, as long as libvirt's; its hostdev names VF, or its own."""
        identity = f" id='{self.number}'" if live else ""
        return _DOMAIN.format(
            identity=identity,
            name=self.name,
            uuid=self.uuid,
            hostdev=hostdev_xml(ALIAS, vf or self.vf),
        )

    @property
    def monitor(self) -> str:
        return f"/var/lib/libvirt/qemu/domain-{self.number}-{self.name}/monitor.sock"


class LargeHost:
    """A host of a SIZE below ROOT, at rest: everything is claimed, running and pointed right."""

    def __init__(self, root: Path, size: Size) -> None:
        self.size = size
        self.host = Host(root)
        self.environment = self.host.environment
        vfs = [self.host.gpu(f"0000:{16 + 3 * n:02x}:00.0", VFS) for n in range(size.gpus)]
        by_turns = [vf for row in zip(*vfs, strict=True) for vf in row]
        self.running = [Guest(n, by_turns[n]) for n in range(size.running)]
        last = size.running + size.inactive
        self.inactive = [Guest(n, by_turns[n]) for n in range(size.running, last)]
        self.free = by_turns[last:]
        for row in vfs:
            for vf in row:
                self.host.set_list(vf, _BESIDE)
        sockets = [self._run(guest) for guest in self.running]
        self.host.write(self.host.proc / "net/unix", _UNIX + "".join(sockets))
        self.definitions = self.host.root / "libvirt-etc/qemu"
        for guest in (*self.running, *self.inactive):
            self.host.write(self.definitions / f"{guest.name}.xml", guest.document())
        # A host at rest has learned what its lists show.
        learn.from_inventory(self.host.config, look(self.host.config).host.inventory)

    def point_at_taken(self, number: int) -> None:
        """Point NUMBER of the inactive definitions at devices that running domains have."""
        for guest, other in zip(self.inactive[:number], self.running, strict=False):
            self.host.write(self.definitions / f"{guest.name}.xml", guest.document(other.vf))

    def point_right(self) -> None:
        """Have every inactive definition point at its own device again."""
        for guest in self.inactive:
            self.host.write(self.definitions / f"{guest.name}.xml", guest.document())

    def newcomers(self) -> list[Guest]:
        """Domains that aren't defined, each at a VF that nobody has."""
        return [Guest(n, vf) for n, vf in enumerate(self.free, len(self.running + self.inactive))]

    def _run(self, guest: Guest) -> str:
        """Have GUEST run; return its rows of <proc>/net/unix."""
        host = self.host
        host.set_list(guest.vf, _NOTHING)
        host.set_type(guest.vf, PROFILE.id)
        host.process(guest.pid, command=f"qemu-system-x86_64 -uuid {guest.uuid}")
        files = host.proc / str(guest.pid) / "fd"
        group, _ = host.nodes(guest.vf)
        link = f"socket:[{100_000 + guest.number}]"
        others = ("anon_inode:[eventfd]" for _ in range(_FILES - 4))
        for number, target in enumerate(("/dev/vfio/vfio", group, link, *others), 1):
            os.symlink(target, files / str(number))
        host.write(
            host.status_file(guest.name),
            _STATUS.format(pid=guest.pid, monitor=guest.monitor, domain=guest.document(live=True)),
        )
        host.write(host.status_file(guest.name).with_suffix(".pid"), f"{guest.pid}\n")
        store.create(host.paths.state, _claim(guest))
        row = "0000000000000000: 00000002 00000000 {flags} 0001 {state} {inode} {path}\n"
        inode = 100_000 + guest.number
        return row.format(
            flags="00010000", state="01", inode=inode, path=guest.monitor
        ) + row.format(
            flags="00000000", state="03", inode=900_000 + guest.number, path=guest.monitor
        )


def _claim(guest: Guest) -> Claim:
    pf = guest.vf[: len("0000:00:")] + "00.0"
    return Claim(
        device=guest.vf,
        backend="vendor-vfio",
        gpu=pf,
        profile=PROFILE,
        claim_id=f"{guest.number:032x}",
        phase=Phase.RUNNING,
        domain_uuid=guest.uuid,
        domain_name=guest.name,
        domain_id=guest.number,
        alias=ALIAS,
        boot_id=BOOT,
        created=1790000000.0,
        since_boot=512.5,
        daemon=Process(LIBVIRTD, 4242),
        qemu=Qemu(guest.pid, 90210, guest.monitor),
        namespaces=Namespaces(None, None),
    )


_UNIX = "Num       RefCount Protocol Flags    Type St Inode Path\n"

_PORTS = "".join(
    f"""    <controller type='pci' index='{n}' model='pcie-root-port'>
      <model name='pcie-root-port'/>
      <target chassis='{n}' port='0x{n + 15:x}'/>
      <alias name='pci.{n}'/>
      <address type='pci' domain='0x0000' bus='0x00' slot='0x02' function='0x{n % 8}'/>
    </controller>
"""
    for n in range(1, 15)
)
_DISKS = "".join(
    f"""    <disk type='file' device='disk'>
      <driver name='qemu' type='qcow2' discard='unmap'/>
      <source file='/var/lib/libvirt/images/disk{n}.qcow2' index='{n}'/>
      <backingStore/>
      <target dev='vd{letter}' bus='virtio'/>
      <alias name='virtio-disk{n}'/>
      <address type='pci' domain='0x0000' bus='0x0{n}' slot='0x00' function='0x0'/>
    </disk>
"""
    for n, letter in enumerate("abc", 1)
)
_DOMAIN = (
    """<domain type='kvm'{identity}>
  <name>{name}</name>
  <uuid>{uuid}</uuid>
  <metadata>
    <libosinfo:libosinfo xmlns:libosinfo="http://libosinfo.org/xmlns/libvirt/domain/1.0">
      <libosinfo:os id="http://debian.org/debian/13"/>
    </libosinfo:libosinfo>
    <vgpu:devices xmlns:vgpu="urn:vgpu-libvirt:domain:1">
      <vgpu:device alias="ua-vgpu0" profile="NVIDIA L40S-1Q"/>
    </vgpu:devices>
  </metadata>
  <memory unit='KiB'>16777216</memory>
  <currentMemory unit='KiB'>16777216</currentMemory>
  <vcpu placement='static'>8</vcpu>
  <resource>
    <partition>/machine</partition>
  </resource>
  <os>
    <type arch='x86_64' machine='pc-q35-9.2'>hvm</type>
    <boot dev='hd'/>
  </os>
  <features>
    <acpi/>
    <apic/>
    <vmport state='off'/>
  </features>
  <cpu mode='host-passthrough' check='none' migratable='on'/>
  <clock offset='utc'>
    <timer name='rtc' tickpolicy='catchup'/>
    <timer name='pit' tickpolicy='delay'/>
    <timer name='hpet' present='no'/>
  </clock>
  <on_poweroff>destroy</on_poweroff>
  <on_reboot>restart</on_reboot>
  <on_crash>destroy</on_crash>
  <devices>
    <emulator>/usr/bin/qemu-system-x86_64</emulator>
"""
    + _DISKS
    + """    <controller type='usb' index='0' model='qemu-xhci' ports='15'>
      <alias name='usb'/>
      <address type='pci' domain='0x0000' bus='0x02' slot='0x00' function='0x0'/>
    </controller>
"""
    + _PORTS
    + """    <interface type='network'>
      <mac address='52:54:00:00:00:01'/>
      <source network='default' portid='5f8a1c3e-0000-4000-8000-000000000000' bridge='virbr0'/>
      <target dev='vnet0'/>
      <model type='virtio'/>
      <alias name='net0'/>
      <address type='pci' domain='0x0000' bus='0x01' slot='0x00' function='0x0'/>
    </interface>
    <serial type='pty'>
      <source path='/dev/pts/1'/>
      <target type='isa-serial' port='0'>
        <model name='isa-serial'/>
      </target>
      <alias name='serial0'/>
    </serial>
    <channel type='unix'>
      <source mode='bind' path='/run/libvirt/qemu/channel/1/org.qemu.guest_agent.0'/>
      <target type='virtio' name='org.qemu.guest_agent.0' state='connected'/>
      <alias name='channel0'/>
      <address type='virtio-serial' controller='0' bus='0' port='1'/>
    </channel>
    <input type='tablet' bus='usb'>
      <alias name='input0'/>
      <address type='usb' bus='0' port='1'/>
    </input>
    <graphics type='vnc' port='5900' autoport='yes' listen='127.0.0.1'>
      <listen type='address' address='127.0.0.1'/>
    </graphics>
    <video>
      <model type='virtio' heads='1' primary='yes'/>
      <alias name='video0'/>
      <address type='pci' domain='0x0000' bus='0x00' slot='0x01' function='0x0'/>
    </video>
{hostdev}    <memballoon model='virtio'>
      <alias name='balloon0'/>
      <address type='pci' domain='0x0000' bus='0x04' slot='0x00' function='0x0'/>
    </memballoon>
    <rng model='virtio'>
      <backend model='random'>/dev/urandom</backend>
      <alias name='rng0'/>
      <address type='pci' domain='0x0000' bus='0x06' slot='0x00' function='0x0'/>
    </rng>
  </devices>
</domain>
"""
)
_STATUS = (
    """<!--
WARNING: THIS IS AN AUTO-GENERATED FILE. CHANGES TO IT ARE LIKELY TO BE
OVERWRITTEN AND LOST.
-->

<domstatus state='running' reason='booted' pid='{pid}'>
  <taint flag='high-privileges'/>
  <monitor path='{monitor}' type='unix'/>
  <vcpus>
"""
    + "".join(f"    <vcpu id='{n}' pid='{n + 2}'/>\n" for n in range(8))
    + "  </vcpus>\n  <qemuCaps>\n"
    + "".join(f"    <flag name='capability-{n}'/>\n" for n in range(_FLAGS))
    + """  </qemuCaps>
  <job type='none' async='none'/>
  <devices>
    <device alias='ua-vgpu0'/>
  </devices>
  <libDir path='/var/lib/libvirt/qemu/domain-1'/>
{domain}</domstatus>
"""
)
