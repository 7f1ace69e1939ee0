# SPDX-License-Identifier: LGPL-2.1-or-later
"""The verb `sriov`: the VFs of the GPUs that the configuration lists, as at boot."""

from __future__ import annotations

import click

from .. import config, sriov, trigger
from ..errors import SriovError, VgpuError
from . import rights
from .options import dry_run_option


@click.command("sriov", short_help="Make the VFs of the GPUs that the configuration lists.")
@dry_run_option
def sriov_(dry_run: bool) -> None:
    """Make the VFs of each GPU in [sriov] of the configuration, by the vendor's sriov-manage.

    A GPU that has VFs is left as it is, and one that somebody uses, or might, is never touched.
    What fails for one GPU doesn't stop the others. systemd runs this at boot, before libvirt.
    """
    settings = config.load()
    if not settings.sriov.gpus:
        click.echo("[sriov] in the configuration lists no GPU, so nothing is done.")
        return
    if not dry_run:
        rights.check_root(settings.paths, "make VFs")
    failures = []
    for gpu in settings.sriov.gpus:
        try:
            for sentence in sriov.serve(settings, gpu, dry_run):
                click.echo(f"{sentence}.")
        except VgpuError as error:
            failures.append(str(error))
    if not dry_run:
        trigger.touch(settings.paths)  # definitions can point there now
    if failures:
        raise SriovError("; ".join(failures))
