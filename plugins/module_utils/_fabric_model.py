# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a cluster knows of its fabric: ranks with their reports, rails between them, and the plan that grows findings.

A QSFP port of a GB10 is two PCIe functions, hence two rails; rail 1 is the one that the route to the peer takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ansible_collections.gb10.fleet.plugins.module_utils import _fabric
from ansible_collections.gb10.fleet.plugins.module_utils._findings import ERROR, WARNING, Finding

ROCE = "roce"
SOCKET = "socket"
JUMBO = 9000
# nccl-tests busbw of one HCA and of both: "12.8 GB/s one HCA" against "20.9 GB/s peak" (MiaAI-Lab/…#172).
ONE_RAIL_GB_S, TWO_RAIL_GB_S = 12.8, 20.9


@dataclass(frozen=True)
class Rank:
    """One node as the inventory and its own report describe it. ``info`` is None when there is no report."""

    name: str
    address: str
    info: Mapping[str, Any] | None
    management: str | None = None
    interface: str | None = None
    hcas: tuple[str, ...] = ()
    gid_index: int | None = None

    @property
    def interfaces(self) -> Mapping[str, Mapping[str, Any]]:
        return (self.info or {}).get("interfaces") or {}

    @property
    def rdma(self) -> Mapping[str, Mapping[str, Any]]:
        return (self.info or {}).get("rdma") or {}

    def holder(self, address: str) -> str | None:
        """The netdev that holds an address."""
        for name, interface in self.interfaces.items():
            if any(item["address"] == address for item in interface.get("addresses") or []):
                return name
        return None

    def addresses(self, interface: str) -> list[Mapping[str, Any]]:
        return list((self.interfaces.get(interface) or {}).get("addresses") or [])

    def shown(self, interface: str) -> str:
        held = ", ".join(f"{item['address']}/{item['prefix']}" for item in self.addresses(interface))
        return f"{interface} ({held or 'no IPv4 address'})"


@dataclass(frozen=True)
class Rail:
    """One way from a node to a peer. ``number`` 1 is the rail that the route takes; a dead one is an error."""

    node: str
    peer: str
    number: int
    interface: str
    hca: str | None
    source: str
    network: str
    mtu: int | None
    peer_interface: str
    peer_address: str
    peer_mtu: int | None

    @property
    def payload(self) -> int:
        """ICMP payload of a packet that fills the smaller of both MTUs."""
        return min(self.mtu or 1500, self.peer_mtu or self.mtu or 1500) - _fabric.ICMP_HEADERS

    @property
    def words(self) -> str:
        return f"rail {self.number} ({self.interface})"


@dataclass
class Plan:
    """``rails``: {node: [Rail]}; ``gid_indexes``: {node: {hca: index}}; ``oob``: {node: netdev that holds its address}."""

    transport: str
    ranks: dict[str, Rank]
    rails: dict[str, list[Rail]] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    gid_indexes: dict[str, dict[str, int]] = field(default_factory=dict)
    oob: dict[str, str] = field(default_factory=dict)
    shape: str = "pair"

    def add(self, severity: str, code: str, node: str, text: str) -> None:
        finding = Finding(severity, code, node, text)
        if finding not in self.findings:
            self.findings.append(finding)

    def error(self, code: str, node: str, text: str) -> None:
        self.add(ERROR, code, node, text)

    def warning(self, code: str, node: str, text: str) -> None:
        self.add(WARNING, code, node, text)


def hca_of(rank: Rank, interface: str, address: str) -> str | None:
    """The RDMA device of an address: the one whose GID table holds it, else the first of its netdev."""
    devices = list((rank.interfaces.get(interface) or {}).get("rdma") or [])
    for device in devices:
        if _fabric.gid_indexes(rank.rdma[device].get("gids") or [], address):
            return device
    return devices[0] if devices else None
