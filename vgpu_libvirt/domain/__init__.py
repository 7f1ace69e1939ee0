# SPDX-License-Identifier: LGPL-2.1-or-later
"""libvirt's domain XML: what a domain asks for, and its hostdevs."""
