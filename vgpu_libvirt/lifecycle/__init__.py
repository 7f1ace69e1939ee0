# SPDX-License-Identifier: LGPL-2.1-or-later
"""The life of an assignment: the only place where claims and devices change together.

One function for each of libvirt's hook operations: `prepare` and `start` in prepare.py; `started`,
`stopped` and `reconnect` in running.py; `release` in release.py.
"""
