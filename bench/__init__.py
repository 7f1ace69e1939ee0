# SPDX-License-Identifier: LGPL-2.1-or-later
"""What a large host costs."""
