# SPDX-License-Identifier: LGPL-2.1-or-later
"""Options that several verbs have, and how they read addresses."""

from __future__ import annotations

import click

from ..address import PciAddress
from ..errors import AddressError

dry_run_option = click.option("--dry-run", is_flag=True, help="Only say what would be done.")


def address(
    _context: click.Context, _parameter: click.Parameter, value: str | None
) -> PciAddress | None:
    """The callback of an option or argument that is one PCI address; None: it wasn't given."""
    return None if value is None else _parsed(value)


def addresses(
    _context: click.Context, _parameter: click.Parameter, values: tuple[str, ...]
) -> list[PciAddress]:
    """The callback of an argument that is several."""
    return [_parsed(value) for value in values]


def _parsed(value: str) -> PciAddress:
    try:
        return PciAddress.parse(value)
    except AddressError as error:
        raise click.BadParameter(str(error)) from error
