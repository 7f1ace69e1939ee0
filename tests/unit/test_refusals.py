# SPDX-License-Identifier: LGPL-2.1-or-later
"""Every reason to refuse a start, each with its own sentence, by real hook processes.

The stub, the entry point and the package run as libvirt runs them, on a host in a directory.
A refusal writes nothing.
"""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.unit.host import (
    REPOSITORY,
    WEB1,
    WEB2,
    Result,
    domain_xml,
    entry_point,
    hostdev_xml,
    web1,
    web2,
)
from vgpu_libvirt.address import PciAddress
from vgpu_libvirt.claims import cordons
from vgpu_libvirt.claims.cordons import Cordon

if TYPE_CHECKING:
    from pathlib import Path

    from tests.unit.gpus import Gpus
    from tests.unit.host import Host

FIRST, SECOND = "0000:3d:00.4", "0000:3d:00.5"
ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="the stub leaves at once for other users")


class Refused:
    """A start that has to be refused."""

    def __init__(self, host: Host, directory: Path) -> None:
        self.host = host
        self.entry = entry_point(directory)

    def hook(self, operation: str, xml: str) -> Result:
        done = subprocess.run(
            [REPOSITORY / "hooks/qemu", "web1", operation, "begin", "-"],
            input=xml,
            env={**self.host.environment, "VGPU_LIBVIRT_HOOK": str(self.entry)},
            capture_output=True,
            text=True,
            timeout=60,
        )
        return Result(done.returncode, done.stdout, done.stderr)

    def says(self, sentence: str, xml: str, operation: str = "prepare") -> None:
        before = self.tree()
        result = self.hook(operation, xml)
        assert result == (1, "", f"vgpu-libvirt: {sentence}\n")
        assert self.tree() == before

    def tree(self) -> dict[str, str]:
        """All files but the locks, which stay where they were once taken, and what wakes a sync."""
        aside = (str(self.host.state / "lock"), self.host.paths.runtime)
        return {k: v for k, v in self.host.tree().items() if not k.startswith(aside)}


@pytest.fixture
def refused(host: Host, gpus_or_vfs: Gpus, tmp_path: Path) -> Refused:
    assert gpus_or_vfs.places[0] == FIRST
    return Refused(host, tmp_path)


pytestmark = ROOT


def test_a_domain_that_can_be_served_is(refused: Refused) -> None:
    assert refused.hook("prepare", web1(FIRST)) == (0, "", "")
    assert refused.host.type_of(FIRST) == "1152"


# --- the hostdev ---


def test_managed(refused: Refused) -> None:
    refused.says(
        "the hostdev 'ua-vgpu0' of domain 'web1' has managed='yes', with which libvirt would "
        "unbind the driver that makes the vGPU; set managed='no'",
        web1(FIRST, managed="yes"),
    )


def test_no_hostdev_with_the_alias(refused: Refused) -> None:
    refused.says(
        "domain 'web1' asks for a vGPU at 'ua-vgpu0', but has no hostdev with that alias (its "
        "hostdevs' aliases: ua-other); run 'virt-vgpu sync', which "
        "adds one, or says why there is no device for it",
        domain_xml(requests={"ua-vgpu0": "L40S-8Q"}, hostdevs={"ua-other": "0000:00:1f.3"}),
    )


def test_no_hostdev_at_all(refused: Refused) -> None:
    result = refused.hook("prepare", domain_xml(requests={"ua-vgpu0": "L40S-8Q"}))
    assert result.status == 1
    assert "(its hostdevs' aliases: none)" in result.stderr


@pytest.mark.parametrize("address", ["0000:00:00.0", "ffff:ff:1f.7"])
def test_a_placeholder(refused: Refused, address: str) -> None:
    refused.says(
        f"the hostdev 'ua-vgpu0' of domain 'web1' has the placeholder {address} as its source's "
        "address; give it the address of a VF, as 'virt-vgpu list' shows them",
        web1(address),
    )


def test_no_source_address(refused: Refused) -> None:
    bare = "<hostdev mode='subsystem' type='pci'><alias name='ua-vgpu0'/></hostdev>"
    refused.says(
        "the hostdev 'ua-vgpu0' of domain 'web1' has no source address; give it the address of a "
        "VF, as 'virt-vgpu list' shows them",
        domain_xml(requests={"ua-vgpu0": "L40S-8Q"}, hostdevs=bare),
    )


def test_a_vanished_vf(refused: Refused) -> None:
    refused.says(
        "the hostdev 'ua-vgpu0' of domain 'web1' points at 0001:c8:01.4, which is not on this "
        "host; point it at a VF, as 'virt-vgpu list' shows them",
        web1("0001:c8:01.4"),
    )


def test_a_whole_gpu(refused: Refused) -> None:
    refused.says(
        "the hostdev 'ua-vgpu0' of domain 'web1' points at 0000:3d:00.0, which is a whole GPU, not "
        "one of its VFs; point it at a VF, as 'virt-vgpu list' shows them",
        web1("0000:3d:00.0"),
    )


def test_a_vf_without_the_vendors_driver(refused: Refused) -> None:
    subprocess.run(["rm", "-r", refused.host.pci(FIRST) / "nvidia"], check=True)
    assert (
        "which is a VF without an 'nvidia' directory" in refused.hook("prepare", web1(FIRST)).stderr
    )


def test_another_kind_of_device(refused: Refused) -> None:
    refused.host.pci("0000:00:1f.3").mkdir()
    assert (
        "0000:00:1f.3, which is no VF of a vGPU-capable GPU;"
        in refused.hook("prepare", web1("0000:00:1f.3")).stderr
    )


def test_another_type_of_hostdev(refused: Refused) -> None:
    usb = (
        "<hostdev mode='subsystem' type='usb'><source><address bus='1' device='2'/></source>"
        "<alias name='ua-vgpu0'/></hostdev>"
    )
    refused.says(
        "the hostdev 'ua-vgpu0' of domain 'web1' is of type 'usb'; it must be of type 'pci' "
        "or 'mdev'",
        domain_xml(requests={"ua-vgpu0": "L40S-8Q"}, hostdevs=usb),
    )


def test_an_excluded_gpu(refused: Refused) -> None:
    refused.host.set_policy(exclude=(PciAddress.parse("0000:3d:00.0"),))
    assert (
        "0000:3d:00.0 is excluded by [policy] in the configuration"
        in refused.hook("prepare", web1(FIRST)).stderr
    )


@pytest.mark.parametrize("target", ["0000:3d:00.0", FIRST])
def test_a_cordon(refused: Refused, target: str) -> None:
    state = refused.host.paths.state
    cordon = Cordon(PciAddress.parse(target), "root", 1789992000.0, "driver upgrade")
    cordons.write(state, cordon)
    of = " of GPU 0000:3d:00.0" if target != FIRST else ""
    refused.says(
        f"the hostdev 'ua-vgpu0' of domain 'web1' points at {FIRST}{of}, which is cordoned (by "
        "root, 2026-09-21: driver upgrade); point it at another VF, or run 'virt-vgpu uncordon "
        f"{target}'",
        web1(FIRST),
    )
    bystander = domain_xml(hostdevs={"ua-x": FIRST})
    assert refused.hook("prepare", bystander) == (0, "", ""), "it asked for nothing of ours"
    cordons.remove(state, cordon.target)
    assert refused.hook("prepare", web1(FIRST)) == (0, "", "")


# --- the request ---


def test_two_requests_on_one_vf(refused: Refused) -> None:
    refused.says(
        f"domain 'web1' asks for two vGPUs on one device, {FIRST}: 'ua-vgpu0' and 'ua-vgpu1'; "
        "point one hostdev at another",
        domain_xml(
            requests={"ua-vgpu0": "L40S-8Q", "ua-vgpu1": "L40S-8Q"},
            hostdevs={"ua-vgpu0": FIRST, "ua-vgpu1": FIRST},
        ),
    )


def test_two_requests_with_one_alias(refused: Refused) -> None:
    twice = '<vgpu:device alias="ua-vgpu0" profile="L40S-8Q"/>' * 2
    refused.says(
        "domain 'web1' asks for 'ua-vgpu0' twice; give each vGPU an alias of its own",
        domain_xml(requests=twice, hostdevs={"ua-vgpu0": FIRST}),
    )


@pytest.mark.parametrize(
    ("device", "complaint"),
    [
        (
            '<vgpu:device alias="ua-vgpu0" profile="L40S-8Q" mdev="yes"/>',
            "unknown attribute 'mdev'; known: alias, profile, gpu, placement, numa, apart, "
            "together, params",
        ),
        ('<vgpu:device alias="ua-vgpu0"/>', "a <device> without the attribute 'profile'"),
        ('<vgpu:device profile="L40S-8Q"/>', "a <device> without the attribute 'alias'"),
        (
            '<vgpu:device alias="vgpu0" profile="L40S-8Q"/>',
            "alias 'vgpu0' must begin with 'ua-', since libvirt drops others; call it 'ua-vgpu0' "
            "here and in the hostdev",
        ),
        (
            '<vgpu:device alias="ua-vgpu0" profile="L40S-8Q" placement="best"/>',
            "placement='best' of 'ua-vgpu0' is not known; known: spread, pack",
        ),
        (
            '<vgpu:device alias="ua-vgpu0" profile="L40S-8Q" gpu="first"/>',
            "gpu of 'ua-vgpu0': 'first' is not a PCI address; write it as 0000:3d:00.4, domain "
            "included",
        ),
        ('<vgpu:gpu profile="L40S-8Q"/>', "unknown element <gpu>"),
    ],
)
def test_metadata_that_cannot_be_understood(refused: Refused, device: str, complaint: str) -> None:
    refused.says(
        "the vGPU request in the metadata of domain 'web1' can't be understood: " + complaint,
        domain_xml(requests=device, hostdevs={"ua-vgpu0": FIRST}),
    )


def request(**attributes: str) -> str:
    text = " ".join(f'{key}="{value}"' for key, value in attributes.items())
    return domain_xml(
        requests=f'<vgpu:device alias="ua-vgpu0" profile="L40S-8Q" {text}/>',
        hostdevs={"ua-vgpu0": FIRST},
    )


def test_a_pin_to_a_gpu_that_is_not_there(refused: Refused) -> None:
    refused.says(
        "domain 'web1' wants 'ua-vgpu0' on GPU 0000:99:00.0, which is not on this host or has no "
        "VFs; name one that 'virt-vgpu list' shows, or enable its VFs",
        request(gpu="0000:99:00.0"),
    )


def test_a_pin_to_another_gpu(refused: Refused) -> None:
    refused.host.gpu("0000:5e:00.0")
    refused.says(
        f"domain 'web1' wants 'ua-vgpu0' on GPU 0000:5e:00.0, but its hostdev points at {FIRST} of "
        "GPU 0000:3d:00.0; point it at a VF of the former",
        request(gpu="0000:5E:00.0"),
    )


def test_numa_require_without_anything_to_require(refused: Refused) -> None:
    refused.says(
        "domain 'web1' has numa='require' at 'ua-vgpu0', but neither <numatune> nor pinned vcpus "
        "to require anything of; add one, or remove numa",
        request(numa="require"),
    )


def test_numa_require_on_another_node(refused: Refused) -> None:
    refused.host.write(refused.host.pci("0000:3d:00.0") / "numa_node", "0\n")
    for node, cpus in ((0, "0-15,32-47"), (1, "16-31,48-63")):
        refused.host.write(
            refused.host.sysfs / f"devices/system/node/node{node}/cpulist", cpus + "\n"
        )
    tuned = "<numatune><memory mode='strict' nodeset='1'/></numatune>"
    pinned = "<vcpu cpuset='20-23,^21'>2</vcpu>"
    for wish in (tuned, pinned):
        refused.says(
            "domain 'web1' has numa='require' at 'ua-vgpu0' and lives on NUMA node 1, but "
            f"{FIRST} is on node 0; point its hostdev at a VF of another GPU",
            request(numa="require").replace("<devices>", wish + "<devices>", 1),
        )


def test_params_are_for_mediated_devices(refused: Refused) -> None:
    assert (
        "has params, which only mediated devices take"
        in refused.hook("prepare", request(params="frame_rate_limiter=0")).stderr
    )


@pytest.mark.parametrize(
    ("wish", "second", "complaint"),
    [
        ("apart", SECOND, "apart from its other vGPUs, but another of them is on GPU 0000:3d:00.0"),
        ("together", "0000:5e:00.4", "together with its other vGPUs, but they are on 2 GPUs"),
    ],
)
def test_company(refused: Refused, wish: str, second: str, complaint: str) -> None:
    refused.host.gpu("0000:5e:00.0")
    xml = domain_xml(
        requests=f'<vgpu:device alias="ua-vgpu0" profile="L40S-8Q" {wish}="gpu"/>'
        '<vgpu:device alias="ua-vgpu1" profile="L40S-8Q"/>',
        hostdevs={"ua-vgpu0": FIRST, "ua-vgpu1": second},
    )
    assert complaint in refused.hook("prepare", xml).stderr


# --- the profile ---


def test_an_unknown_profile(refused: Refused) -> None:
    for vf in ("0000:3d:00.4", "0000:3d:00.5", "0000:3d:00.6", "0000:3d:00.7"):
        refused.host.set_list(vf, "1152 : NVIDIA L40S-8Q\n1156 : NVIDIA L40S-48Q\n")
    refused.says(
        f"profile 'A40-8Q' is unknown on this host; {FIRST}: it could be given NVIDIA L40S-8Q "
        "(1152), NVIDIA L40S-48Q (1156)",
        web1(FIRST, "A40-8Q"),
    )


def test_a_profile_in_another_case_is_unknown(refused: Refused) -> None:
    assert "profile 'l40s-8q' is unknown" in refused.hook("prepare", web1(FIRST, "l40s-8q")).stderr


def test_an_ambiguous_profile(refused: Refused) -> None:
    refused.host.set_list(FIRST, "11 : GRID X-8Q\n12 : NVIDIA X-8Q\n")
    refused.says(
        f"profile 'X-8Q' is ambiguous on {FIRST}: it could be GRID X-8Q (11), NVIDIA X-8Q (12); "
        "ask for one by its full name or id",
        web1(FIRST, "X-8Q"),
    )


def test_a_profile_that_does_not_fit_now(refused: Refused) -> None:
    assert refused.hook("prepare", web2(SECOND, "L40S-24Q")).status == 0
    refused.host.set_list(FIRST, "1155 : NVIDIA L40S-24Q\n")
    refused.says(
        f"{FIRST} can't be given NVIDIA L40S-8Q now, since its GPU 0000:3d:00.0 runs web2: NVIDIA "
        "L40S-24Q; it could be given NVIDIA L40S-24Q (1155) now",
        web1(FIRST),
    )


def test_a_profile_that_no_list_shows_beside_what_runs(refused: Refused) -> None:
    assert refused.hook("prepare", web2(SECOND, "L40S-24Q")).status == 0
    for vf in (FIRST, SECOND, "0000:3d:00.6", "0000:3d:00.7"):
        refused.host.set_list(vf, "1155 : NVIDIA L40S-24Q\n")
    refused.says(
        f"{FIRST} can't be given NVIDIA L40S-8Q now, since its GPU 0000:3d:00.0 runs web2: NVIDIA "
        "L40S-24Q; it could be given NVIDIA L40S-24Q (1155) now",
        web1(FIRST),
    )
    (refused.host.state / "catalogue.json").unlink()
    refused.says(
        "profile 'NVIDIA L40S-8Q' is unknown, or doesn't fit now beside what the GPU 0000:3d:00.0 "
        f"of {FIRST} runs web2: NVIDIA L40S-24Q; it could be given NVIDIA L40S-24Q (1155) now",
        web1(FIRST),
    )


def test_a_profile_on_a_full_gpu(refused: Refused) -> None:
    assert refused.hook("prepare", web2(SECOND, "L40S-48Q")).status == 0
    refused.host.set_list(FIRST, "ID    : vGPU Name\n")
    result = refused.hook("prepare", web1(FIRST))
    assert f"{FIRST} can't be given NVIDIA L40S-8Q now" in result.stderr
    assert "runs web2: NVIDIA L40S-48Q; it can be given nothing now" in result.stderr


def test_a_list_that_cannot_be_understood(refused: Refused) -> None:
    refused.host.set_list(FIRST, "what\n")
    path = refused.host.pci(FIRST) / "nvidia/creatable_vgpu_types"
    refused.says(
        f"{FIRST} can't be used: {path} can't be understood: line 'what' is no row of profile id "
        "and name",
        web1(FIRST),
    )


# --- the owner ---


@pytest.mark.promise(1)
def test_a_vf_of_a_live_domain_without_a_claim(refused: Refused, gpus: Gpus) -> None:
    device = gpus.device()
    theirs = domain_xml("web2", WEB2, hostdevs={"ua-x": device})
    refused.host.run_domain("web2", WEB2, 4002, theirs)
    remedy = {
        "vendor-vfio": "point the hostdev 'ua-vgpu0' of domain 'web1' at another VF",
        "mdev": "the hostdev 'ua-vgpu0' of domain 'web1' has it for its own; stop that one",
    }
    refused.says(
        f"{device} is in use by the running domain 'web2' ({WEB2}); {remedy[gpus.backend]}",
        web1(device),
    )


@pytest.mark.promise(1)
@pytest.mark.parametrize("which", [0, 1])
def test_an_open_vf_by_group_and_by_cdev(refused: Refused, gpus: Gpus, which: int) -> None:
    device = gpus.device()
    gpus.set_type(device, 1152)
    refused.host.process(5000, "vfio-user", opens=(refused.host.nodes(device)[which],))
    refused.says(f"{device} is held open by process 5000 (vfio-user)", web1(device))


@pytest.mark.promise(5)
def test_an_unreadable_claim_protects_its_device_and_no_other(refused: Refused, gpus: Gpus) -> None:
    device = gpus.device()
    path = refused.host.write(refused.host.state / "claims" / f"{device}.json", "")
    refused.says(
        f"the claim file {path} is not valid JSON (Expecting value: line 1 column 1 (char 0)); "
        f"{device} stays as it is until that is mended",
        web1(device),
    )
    assert refused.host.hook("prepare", web2(gpus.device("web2"))).status == 0


def test_a_broken_configuration(refused: Refused) -> None:
    path = refused.host.write(refused.host.root / "config.toml", '[policy]\nforeign = "maybe"\n')
    refused.says(
        f"{path}, line 2: foreign in [policy]: must be one of keep, reset, not 'maybe'",
        web1(FIRST),
    )


@pytest.mark.promise(3)
def test_a_store_that_is_no_directory(refused: Refused, gpus: Gpus) -> None:
    refused.host.write(refused.host.state, "")
    result = refused.hook("prepare", web1(gpus.device()))
    assert result.status == 1
    assert result.stderr.startswith("vgpu-libvirt: the claims in ")
    assert result.stderr.count("\n") == 1
    assert gpus.type_of(gpus.device()) == 0


# --- the same device, without asking ---


@pytest.mark.promise(1, 2)
def test_without_asking_on_a_claimed_device(refused: Refused, gpus: Gpus) -> None:
    device = gpus.device("web2")
    assert refused.host.hook("prepare", web2(device)).status == 0
    refused.says(
        f"a hostdev of domain 'web1' points at {device}, a vGPU that belongs to domain 'web2' "
        f"({WEB2}); point it at another device",
        domain_xml(hostdevs={"ua-x": device}),
    )


@pytest.mark.promise(1)
def test_without_asking_managed(refused: Refused) -> None:
    refused.says(
        f"a hostdev of domain 'web1' points at {FIRST}, a VF for vGPUs, with managed='yes', with "
        "which libvirt would unbind the driver that makes the vGPU; set managed='no', and to get a "
        "vGPU there, ask for a profile with 'virt-vgpu attach'",
        domain_xml(hostdevs={"ua-x": FIRST}, managed="yes"),
    )


@pytest.mark.promise(6)
def test_without_asking_on_an_untyped_vf_at_start_only(refused: Refused) -> None:
    xml = domain_xml(hostdevs={"ua-x": FIRST})
    assert refused.hook("prepare", xml) == (0, "", "")
    refused.says(
        f"a hostdev of domain 'web1' points at {FIRST}, a VF without a vGPU type, which QEMU can't "
        "open; to get a vGPU there, ask for a profile with 'virt-vgpu attach'",
        xml,
        operation="start",
    )
    refused.host.set_type(FIRST, 1152)
    assert refused.hook("start", xml) == (0, "", "")


@pytest.mark.promise(1)
def test_without_asking_on_a_live_domains_device(refused: Refused, gpus: Gpus) -> None:
    device = gpus.device("web2")
    gpus.set_type(device, 1152)
    refused.host.run_domain("web2", WEB2, 4002, web2(device))
    refused.says(
        f"a hostdev of domain 'web1' points at {device}, a vGPU in use by the running domain "
        f"'web2' ({WEB2}); point it at another device",
        domain_xml(hostdevs={"ua-x": device}),
    )


@pytest.mark.promise(1)
def test_without_asking_on_a_gpu_that_has_vgpus(refused: Refused, gpus: Gpus) -> None:
    assert refused.host.hook("prepare", web2(gpus.device("web2"))).status == 0
    refused.says(
        "a hostdev of domain 'web1' points at 0000:3d:00.0, which has the vGPU of domain "
        f"'web2' ({WEB2}) on it; point it at another device",
        domain_xml(hostdevs={"ua-x": "0000:3d:00.0"}),
    )


def test_one_hostdev_asks_and_the_other_would_do_damage(refused: Refused) -> None:
    xml = domain_xml(
        requests={"ua-vgpu0": "L40S-8Q"},
        hostdevs=hostdev_xml("ua-vgpu0", FIRST) + hostdev_xml("ua-x", SECOND, managed="yes"),
    )
    result = refused.hook("prepare", xml)
    assert result.status == 1
    assert f"points at {SECOND}, a VF for vGPUs, with managed='yes'" in result.stderr
    assert refused.host.claim(FIRST) is None


@pytest.mark.promise(6)
def test_a_domain_with_a_device_of_its_own_is_not_refused_for_it(refused: Refused) -> None:
    assert refused.hook("prepare", web1(FIRST, uuid=WEB1)).status == 0
    assert refused.hook("start", domain_xml(hostdevs={"ua-vgpu0": FIRST})) == (0, "", "")
