# SPDX-License-Identifier: LGPL-2.1-or-later
"""A host on which nothing bites: installed, with a GPU, a domain that runs and one that doesn't."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.unit.host import LIBVIRTD, REPOSITORY, WEB1, WEB2, Host, entry_point, web1, web2
from vgpu_libvirt.claims import store
from vgpu_libvirt.config import HOOK_NAME
from vgpu_libvirt.doctor import findings, registry, sight

if TYPE_CHECKING:
    from vgpu_libvirt.doctor.findings import Finding

GPU = "0000:3d:00.0"
RUNNING_PID = 4001


class Sound(Host):
    """What tests break."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.vfs = self.gpu(GPU)
        self.nvidia(GPU, self.vfs)
        self.entry = entry_point(root)
        self.write(root / "virt-vgpu", "#!/bin/sh\n").chmod(0o755)
        for kind in ("qemu", "daemon"):
            self.script(f"{kind}.d/{HOOK_NAME}", (REPOSITORY / "hooks" / kind).read_text())
        # Its start is in the future, so that all that was made here was there before it.
        self.set_boot(time.time() + 1000)
        self.write(self.proc / "self/mountinfo", "25 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw\n")
        self.write(Path(self.paths.dev) / "vfio/vfio", "")
        self.audit_log = root / "audit.log"
        first, second = self.vfs[:2]
        self.define("web1", web1(first))
        self.define("web2", web2(second))
        assert self.hook("prepare", web1(first)).status == 0
        self.run_domain("web1", WEB1, RUNNING_PID, web1(first), opens=(self.nodes(first)[0],))
        assert self.hook("started", web1(first)) == (0, "", "")
        shutil.rmtree(self.paths.runtime)  # as after a sync

    def nvidia(self, address: str, vfs: list[str]) -> None:
        """Make a GPU and its VFs what the vendor's driver has."""
        gpu = self.pci(address)
        self.write(gpu / "vendor", "0x10de\n")
        self.write(gpu / "class", "0x030200\n")
        self.write(gpu / "sriov_totalvfs", "32\n")
        for name in (address, *vfs):
            self.bind(name, "nvidia")

    def bind(self, address: str, driver: str) -> None:
        (self.pci(address) / "driver").unlink(missing_ok=True)
        (self.pci(address) / "driver").symlink_to(f"../../drivers/{driver}")

    def set_boot(self, when: float) -> None:
        """When the host booted, in seconds since the epoch; libvirtd started 42 s later."""
        self.write(self.proc / "stat", f"cpu 0 0 0 0\nbtime {int(when)}\n")

    @property
    def hooks(self) -> Path:
        return Path(self.paths.libvirt_etc) / "hooks"

    def script(self, name: str, text: str) -> Path:
        path = self.write(self.hooks / name, text)
        path.chmod(0o755)
        return path

    def our_hook(self, kind: str = "qemu") -> Path:
        return self.hooks / f"{kind}.d" / HOOK_NAME

    def definition(self, name: str) -> Path:
        return Path(self.paths.libvirt_etc) / "qemu" / f"{name}.xml"

    def define(self, name: str, document: str) -> Path:
        return self.write(self.definition(name), f"<!-- do not edit -->\n{document}")

    def autostart(self, name: str) -> None:
        link = self.definition(name).parent / "autostart" / f"{name}.xml"
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(self.definition(name))

    def stop_web1(self) -> None:
        """web1 is shut off and has given back its vGPU."""
        self.end_domain("web1", RUNNING_PID)
        assert self.hook("release", web1(self.vfs[0])).stderr == ""
        assert self.claim(self.vfs[0]) is None
        shutil.rmtree(self.paths.runtime)

    def change_claim(self, **changes: Any) -> None:
        """Change web1's claim."""
        claim = self.claim(self.vfs[0])
        assert claim is not None
        store.replace(self.paths.state, claim._replace(**changes))

    def places(self) -> sight.Places:
        return sight.Places(str(self.entry), str(self.audit_log))

    def look(self) -> sight.Sight:
        return sight.look(self.config, self.places())

    def findings(self) -> tuple[Finding, ...]:
        return findings.diagnose(registry.CHECKS, self.look())

    def found(self) -> set[str]:
        """The checks that find anything, and that say so as sentences."""
        told = self.findings()
        for finding in told:
            for text in (finding.object, finding.problem, finding.remedy):
                assert text, finding
                assert "\n" not in text, finding
                assert not text.endswith("."), finding
        assert json.dumps([finding._asdict() for finding in told])
        return {finding.check for finding in told}


__all__ = ["GPU", "LIBVIRTD", "WEB1", "WEB2", "Sound"]
