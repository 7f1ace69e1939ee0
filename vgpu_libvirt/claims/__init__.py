# SPDX-License-Identifier: LGPL-2.1-or-later
"""Who owns which device, and whether that owner is alive."""
