# SPDX-License-Identifier: LGPL-2.1-or-later
"""NVIDIA vGPUs for plain libvirt: claims, guards, and the hook that uses them."""

__version__ = "0.1.0"
