# SPDX-License-Identifier: LGPL-2.1-or-later
"""The verb `fix-xml`."""

from __future__ import annotations

import difflib
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from .. import config, edits, libvirt_api, placement, starting
from ..devices import mdev, vendor_vfio
from ..domain import edit, fix
from ..domain.read import parse_domain
from ..errors import DeviceError, LibvirtError, RequestError, VgpuError
from ..lifecycle.context import Context
from ..revert import Revert
from ..survey import look
from ..unfinished import Edit
from . import complete

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..address import PciAddress
    from ..capacity import Host
    from ..config import Config
    from ..devices.model import Profile
    from ..domain.fix import Facts, Fix
    from ..domain.model import Domain
    from ..libvirt_api import Definition


@click.command("fix-xml", short_help="Make a domain's definition ask for its vGPUs as it must.")
@click.argument("domain", shell_complete=complete.domains)
@click.option(
    "--profile",
    shell_complete=complete.profiles,
    help="The profile of a vGPU that the definition names none for.",
)
@click.option("--dry-run", is_flag=True, help="Show what would be written, and write nothing.")
def fix_xml(domain: str, profile: str | None, dry_run: bool) -> None:
    """Correct the definition of DOMAIN, and show the difference.

    Corrected are misspelt requests, hostdevs of vGPU devices that have managed='yes', no alias or
    no request, and mediated devices on hosts that have none any more. DOMAIN is a name or UUID; it
    may run, and goes on as it is until its next start.
    """
    settings = config.load()
    with (
        libvirt_api.connect(settings.uri) as connection,
        edits.opened(settings, connection, domain, dry_run) as definition,
    ):
        if not definition.is_persistent:
            raise LibvirtError(
                f"{definition.label} is transient and has no definition to correct; mend the XML "
                "that it is created from"
            )
        fixed = _fix(settings, connection, definition, profile)
        _show(definition, fixed, dry_run)
        if not dry_run:
            for note in _write(settings, definition, fixed):
                click.echo(f"Note: {note}.", err=True)
    if fixed.remains:
        raise _not_clear(definition, fixed)


def _fix(config: Config, connection: Any, definition: Definition, profile: str | None) -> Fix:
    """What to change, each device that is needed for it chosen."""
    domain = parse_domain(definition.document)
    host = look(config).host
    wanted = placement.resolve(profile, host) if profile else None
    try:
        fixed = fix.fix(definition.document, _facts(config, domain, host), wanted)
    except RequestError as error:
        raise RequestError(f"{definition.label}: {error}") from error
    moving = {change.alias for change in fixed.changes if fix.is_placeless(change)}
    if moving and fixed.remains:
        raise _not_clear(definition, fixed)  # a device can be chosen only for what is clear
    if moving:
        for place in starting.choose(Context(config), connection, parse_domain(fixed.document)):
            if place.request.alias in moving:
                fixed = fix.pointed(fixed, place.request.alias, place.source)
    return fixed


def _facts(config: Config, domain: Domain, host: Host) -> Facts:
    devices = {device.address: device for device in host.inventory.devices}
    vfs: dict[PciAddress, tuple[Profile, ...]] = {}
    for hostdev in domain.hostdevs:
        address = hostdev.address
        if address and (address in devices or _is_unbound_vf(config, address)):
            device = devices.get(address)
            vfs[address] = (device.creatable if device else None) or ()
    has_mdev = any(gpu.backend == mdev.BACKEND for gpu in host.inventory.gpus)
    return fix.Facts(host.profiles, vfs, has_mdev)


def _is_unbound_vf(config: Config, address: PciAddress) -> bool:
    """Whether this is a vGPU VF whose driver was unbound, as managed='yes' does it."""
    sysfs = config.paths.sysfs
    try:
        gpu = vendor_vfio.gpu_of(sysfs, address)
    except DeviceError:
        return False
    return not {address, gpu}.intersection(config.policy.exclude) and vendor_vfio.is_gpu(sysfs, gpu)


def _not_clear(definition: Definition, fixed: Fix) -> RequestError:
    what = "; ".join(dict.fromkeys(fixed.remains))
    return RequestError(
        f"what is meant in the definition of {definition.label} isn't clear: {what}; see to it "
        f"with 'virsh edit {definition.name}'"
    )


def _show(definition: Definition, fixed: Fix, dry_run: bool) -> None:
    before = edit.text(edit.parse(definition.document))
    lines = list(
        difflib.unified_diff(
            before.splitlines(),
            fixed.document.splitlines(),
            f"{definition.name} as it is",
            f"{definition.name} corrected",
            lineterm="",
        )
    )
    if lines:
        lines += ["", *(f"  - {finding}" for finding in dict.fromkeys(fixed.findings))]
    elif not fixed.remains:
        click.echo(f"{definition.label} needs no correction.")
    if lines and dry_run:
        lines += ["", "Nothing was written."]
    elif lines and definition.is_active and fixed.findings:
        lines += ["", "It runs, and goes on as it is until its next start."]
    if lines:
        click.echo("\n".join(lines))


def _write(config: Config, definition: Definition, fixed: Fix) -> list[str]:
    """Write it all, or put back what was written; return what else became of hostdevs."""
    state, uuid = config.paths.state, definition.uuid
    before = edit.metadata(definition.document)
    left: list[str] = []
    notes: list[str] = []

    def put_back(act: Callable[[], object]) -> None:
        try:
            act()
        except VgpuError as error:
            left.append(f"and what was written can't be undone: {error}")

    changes = [Edit(uuid, *change) for change in fixed.changes]
    try:
        with edits.saved(state, definition, changes), Revert() as undo:
            if fixed.metadata != before:
                libvirt_api.set_metadata(definition, fixed.metadata)
                undo.add(partial(put_back, lambda: libvirt_api.set_metadata(definition, before)))
            for change in changes:
                note = edits.apply(state, definition, change, must_save=False)
                notes += [note] if note else []
                reverse = change._replace(before=change.after, after=change.before)
                back = partial(edits.apply, state, definition, reverse, must_save=False)
                undo.add(partial(put_back, back))
            for namespace in fixed.stale:  # last: until here it is all still there
                libvirt_api.remove_metadata(definition, namespace)
    except VgpuError as error:
        raise LibvirtError("; ".join([str(error), *left])) from error
    return notes
