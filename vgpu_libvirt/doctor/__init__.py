# SPDX-License-Identifier: LGPL-2.1-or-later
"""What on this host will bite: looked at once (`see_*`, sight), then judged by pure checks."""
