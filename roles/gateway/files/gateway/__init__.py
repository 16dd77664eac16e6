# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One address before one engine: model aliases, lanes, keys. Everything else passes through untouched.

Python >= 3.10, aiohttp and prometheus_client. ``python -m gateway --config /etc/gb10-fleet/gateway.json``
"""
