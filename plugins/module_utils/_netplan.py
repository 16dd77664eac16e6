# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The netplan definition of a node's rails. Pure functions."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from typing import Any

HEADER = "# Written by gb10.fleet (role fabric). The next run replaces it; fabric_state: absent takes it away.\n"


class NetplanError(ValueError):
    """Addresses that cannot be written down; the message is a sentence for the user."""


def _interface(value: Any) -> ipaddress.IPv4Interface | None:
    try:
        address = ipaddress.IPv4Interface(str(value))
    except ValueError:
        return None
    return address if "/" in str(value) and address.network.prefixlen <= 30 else None


def check(addresses: Mapping[str, Any], mtu: int) -> None:
    """Raise NetplanError unless every interface has one IPv4 address with a prefix, each in a subnet of its own."""
    if not addresses:
        raise NetplanError(
            "fabric_addresses is empty, wanted each rail's interface and its address, such as {enp1s0f0np0: 192.0.2.1/24}."
        )
    if not 1280 <= mtu <= 9216:
        raise NetplanError(f"fabric_mtu is {mtu}, wanted 1280 to 9216 (9000 for RoCE).")
    seen: dict[ipaddress.IPv4Network, str] = {}
    for interface, value in addresses.items():
        if not re.fullmatch(r"[A-Za-z0-9_.-]{1,15}", interface):
            raise NetplanError(f"{interface!r} is no interface name.")
        address = _interface(value)
        if address is None:
            raise NetplanError(
                f"{interface} is given {value!r}, wanted an IPv4 address with its prefix, such as 192.0.2.1/24."
            )
        other = next((name for network, name in seen.items() if network.overlaps(address.network)), None)
        if other:
            raise NetplanError(
                f"{other} and {interface} are given addresses in one subnet ({address.network}), wanted a subnet for "
                "each rail: the kernel would send from the wrong one."
            )
        seen[address.network] = interface


def render(addresses: Mapping[str, Any], mtu: int) -> str:
    """The file. No link-local addresses: NetworkManager's stable-privacy IPv6 ones move the GID index at every link flap."""
    check(addresses, mtu)
    lines = [HEADER + "network:", "  version: 2", "  ethernets:"]
    for interface, address in sorted(addresses.items()):
        lines += [
            f"    {interface}:",
            f"      addresses: [{address}]",
            f"      mtu: {mtu}",
            "      dhcp4: false",
            "      dhcp6: false",
            "      link-local: []",
            "      optional: true",
        ]
    return "\n".join(lines) + "\n"


def missing(addresses: Mapping[str, Any], mtu: int, interfaces: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What of a definition is not live yet, in words. ``interfaces`` as ``_fabric.parse_ip_addr`` gives them."""
    lacking = []
    for interface, value in sorted(addresses.items()):
        found = interfaces.get(interface)
        if found is None:
            lacking.append(f"{interface} does not exist")
            continue
        if not any(f"{item['address']}/{item['prefix']}" == str(value) for item in found["addresses"]):
            held = ", ".join(f"{item['address']}/{item['prefix']}" for item in found["addresses"]) or "no address"
            lacking.append(f"{interface} has {held}, wanted {value}")
        if found["mtu"] != mtu:
            lacking.append(f"{interface} has MTU {found['mtu']}, wanted {mtu}")
    return lacking
