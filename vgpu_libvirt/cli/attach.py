# SPDX-License-Identifier: LGPL-2.1-or-later
"""The verbs that edit the definition of an inactive domain: `attach` and `detach`.

They touch no device, and take no lock but the definition's; the hooks do the rest when the domain
starts.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import click

from .. import config, edits, libvirt_api, placement
from ..address import PciAddress
from ..devices import numa, vendor_vfio
from ..domain import edit
from ..domain.model import ALIAS_PREFIX, Request
from ..domain.read import CHOICES, parse_domain
from ..errors import AddressError, DeviceError, DomainXmlError, LibvirtError, RequestError
from ..lifecycle import learn
from ..placement import Company, Placed
from ..revert import Revert
from ..survey import look
from ..together import Wish, place
from ..unfinished import Edit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ..capacity import Host
    from ..config import Config
    from ..domain.model import Domain
    from ..libvirt_api import Definition

_ALIAS = re.compile(rf"{ALIAS_PREFIX}[A-Za-z0-9_-]+", re.ASCII)  # libvirt takes no others


def _gpu(_context: click.Context, _option: click.Parameter, value: str | None) -> PciAddress | None:
    try:
        return None if value is None else PciAddress.parse(value)
    except AddressError as error:
        raise click.BadParameter(str(error)) from error


def _alias(_context: click.Context, _option: click.Parameter, value: str | None) -> str | None:
    if value is not None and not _ALIAS.fullmatch(value):
        raise click.BadParameter(
            f"'{value}' is no alias that libvirt keeps; begin it with '{ALIAS_PREFIX}' and use "
            "letters, digits, '-' and '_'"
        )
    return value


dry_run_option = click.option(
    "--dry-run", is_flag=True, help="Print what would be written, and write nothing."
)


@click.command(short_help="Give a domain's definition a vGPU.")
@click.argument("domain")
@click.option("--profile", required=True, help="Full name, short name or id of the vGPU's profile.")
@click.option("--gpu", metavar="ADDRESS", callback=_gpu, help="Take a device of this GPU only.")
@click.option("--alias", callback=_alias, help="The hostdev's alias.  [default: ua-vgpu0, ...]")
@click.option("--placement", type=click.Choice(CHOICES["placement"]), help="Instead of [policy]'s.")
@click.option("--numa", type=click.Choice(CHOICES["numa"]), help="The domain's NUMA nodes.")
@click.option("--apart", is_flag=True, help="Not on the GPU of the domain's other vGPUs.")
@click.option("--together", is_flag=True, help="On the GPU of the domain's other vGPUs.")
@dry_run_option
def attach(
    domain: str, profile: str, alias: str | None, dry_run: bool, **wishes: PciAddress | str | bool
) -> None:
    """Ask for a vGPU in the definition of DOMAIN, and point a hostdev at a device for it.

    DOMAIN is a name or UUID; it must not run.
    """
    settings = config.load()
    with (
        libvirt_api.connect(settings.uri) as connection,
        edits.opened(settings, connection, domain, dry_run) as definition,
    ):
        _check_editable(definition)
        parsed = parse_domain(definition.document)
        if parsed.request_error:
            raise RequestError(
                f"the vGPU request in the metadata of {definition.label} can't be understood: "
                f"{parsed.request_error}; mend it with 'virsh edit'"
            )
        before = edit.metadata(definition.document)
        name = _new_alias(definition, alias, edit.requested_aliases(before))
        host = _host(settings, parsed, libvirt_api.definitions(connection))
        found = placement.resolve(profile, host)
        request = _request(name, found.name, wishes)
        company = _company(settings, parsed, request, host)
        wish = Wish(request, found)
        ((device, why),) = place([wish], settings.policy.placement, host, company)
        after = edit.with_request(before, request)
        hostdev = edit.hostdev(name, device.address)
        if dry_run:
            _print_dry_run(definition, after, "added to", hostdev)
            return
        _write(definition, before, after, lambda: libvirt_api.attach(definition, hostdev))
    learn.from_inventory(settings, host.inventory)  # who may not write there needn't
    click.echo(
        f"'{name}' of {definition.label} is at {device.name} of GPU {device.gpu}, and gets "
        f"{found.name} when the domain starts. Why there: {why}."
    )


@click.command(short_help="Take a vGPU out of a domain's definition.")
@click.argument("domain")
@click.option("--alias", callback=_alias, help="Which vGPU, where the domain has several.")
@dry_run_option
def detach(domain: str, alias: str | None, dry_run: bool) -> None:
    """Remove a vGPU's request and its hostdev from the definition of DOMAIN.

    DOMAIN is a name or UUID; it must not run.
    """
    settings = config.load()
    with (
        libvirt_api.connect(settings.uri) as connection,
        edits.opened(settings, connection, domain, dry_run) as definition,
    ):
        _check_editable(definition)
        before = edit.metadata(definition.document)
        asked = edit.requested_aliases(before)
        name = alias or _only(definition, asked)
        hostdev = edit.find_hostdev(definition.document, name)
        if name not in asked:
            _check_lonely_hostdev(settings, definition, name, asked)
        after = edit.without_request(before, name) if before and name in asked else before
        if dry_run:
            _print_dry_run(definition, after, "removed from", hostdev)
            return
        removal = [Edit(definition.uuid, name, hostdev, None)] if hostdev else []
        with edits.saved(settings.paths.state, definition, removal):
            _write(
                definition,
                before,
                after,
                lambda: libvirt_api.detach(definition, hostdev) if hostdev else None,
            )
    click.echo(f"{definition.label} has no vGPU '{name}' any more.")


def _check_editable(definition: Definition) -> None:
    if not definition.is_persistent:
        raise LibvirtError(
            f"{definition.label} is transient and has no definition to edit; ask for the vGPU in "
            "the XML that it is created from"
        )
    if definition.is_active:
        raise LibvirtError(
            f"{definition.label} runs, and vGPUs of a running domain can't be changed; shut it "
            "down first"
        )


def _new_alias(definition: Definition, wanted: str | None, asked: tuple[str, ...]) -> str:
    taken = edit.device_aliases(definition.document).union(asked)
    if wanted is None:
        numbers = range(len(taken) + 1)
        return next(name for n in numbers if (name := f"{ALIAS_PREFIX}vgpu{n}") not in taken)
    if wanted in taken:
        what = "asks for a vGPU at" if wanted in asked else "has a device with the alias"
        raise RequestError(
            f"{definition.label} {what} '{wanted}' already; choose another alias, or run "
            f"'virt-vgpu detach' with that one first"
        )
    return wanted


def _host(settings: Config, domain: Domain, others: Iterable[Definition]) -> Host:
    """The host as DOMAIN may choose on it: its own devices are out, those of others come last."""
    pointed: set[str] = set()
    for other in others:
        try:
            parsed = parse_domain(other.document)
        except DomainXmlError:
            continue  # what it points at only costs a preference
        if parsed.uuid != domain.uuid:
            pointed |= _devices(parsed)
    host = look(settings).host
    return host._replace(pointed=frozenset(pointed), busy=host.busy | _devices(domain))


def _request(alias: str, profile: str, wishes: dict[str, PciAddress | str | bool]) -> Request:
    """The request for what the options say; a flag's word is "gpu"."""
    said = {name: "gpu" if value is True else value for name, value in wishes.items() if value}
    return Request(alias, profile, **said)  # type: ignore[arg-type]


def _company(settings: Config, domain: Domain, request: Request, host: Host) -> Company:
    """What of DOMAIN bears on the place of REQUEST: where it lives, and its other vGPUs."""
    nodes: frozenset[int] = frozenset()
    try:
        nodes = numa.nodes_of(settings.paths.sysfs, domain.nodes, domain.cpus)
    except DeviceError:
        if request.numa == "require":
            raise
    devices = {device.address: device for device in host.inventory.devices}
    others = []
    for other in domain.requests:
        hostdev = domain.hostdev(other.alias)
        if hostdev and hostdev.address in devices:
            try:
                profile = placement.resolve(other.profile, host)
            except RequestError:
                profile = None  # it won't start, whatever we do
            others.append(Placed(other, devices[hostdev.address], profile))
    return Company(nodes, tuple(others))


def _devices(domain: Domain) -> set[str]:
    return {str(hostdev.address) for hostdev in domain.hostdevs if hostdev.address}


def _only(definition: Definition, asked: tuple[str, ...]) -> str:
    if len(asked) == 1:
        return asked[0]
    if asked:
        raise RequestError(
            f"{definition.label} asks for several vGPUs: {', '.join(asked)}; say which with --alias"
        )
    raise RequestError(
        f"{definition.label} asks for no vGPU; a hostdev that is there nevertheless can be named "
        "with --alias"
    )


def _check_lonely_hostdev(
    settings: Config, definition: Definition, alias: str, asked: tuple[str, ...]
) -> None:
    """Check that the hostdev ALIAS, which no request goes with, is a vGPU's and not a NIC's."""
    hostdev = parse_domain(definition.document).hostdev(alias)
    if hostdev is None:
        raise RequestError(
            f"{definition.label} has no vGPU '{alias}'; it asks for {', '.join(asked) or 'none'}"
        )
    sysfs = settings.paths.sysfs
    address = hostdev.address
    if address and vendor_vfio.exists(sysfs, address) and vendor_vfio.is_vgpu_vf(sysfs, address):
        return
    raise RequestError(
        f"the hostdev '{alias}' of {definition.label} points at no VF for vGPUs, and no request "
        "goes with it; if it shall go, use 'virsh detach-device --config'"
    )


def _print_dry_run(
    definition: Definition, metadata: str | None, verb: str, hostdev: str | None
) -> None:
    lines = [f"The definition of {definition.label} would have in its <metadata>:", ""]
    lines += [metadata or "(no request for a vGPU)", ""]
    if hostdev:
        lines += [f"This would be {verb} its <devices>:", "", hostdev, ""]
    click.echo("\n".join([*lines, "Nothing was written."]))


def _write(
    definition: Definition, before: str | None, after: str | None, change: Callable[[], None]
) -> None:
    """Write the metadata, then make the CHANGE of the hostdev: both or neither."""
    left: list[str] = []

    def put_back() -> None:
        try:
            libvirt_api.set_metadata(definition, before)
        except LibvirtError as error:
            left.append(f"and what was written can't be undone: {error}")

    try:
        with Revert() as undo:
            if after != before:
                libvirt_api.set_metadata(definition, after)
                undo.add(put_back)
            change()
    except LibvirtError as error:
        raise LibvirtError("; ".join([str(error), *left])) from error
