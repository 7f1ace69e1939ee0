# SPDX-License-Identifier: LGPL-2.1-or-later
"""What this host has: GPUs, their devices, and what can be made of each."""
