# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Topology: which hosts form which cluster, checked before any host is touched. Pure functions over inventory variables."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


class TopologyError(ValueError):
    """An inventory that cannot form a cluster; the message names hosts, what was found and what to do."""


@dataclass(frozen=True)
class Member:
    """One host as the inventory describes it. ``address`` is its fabric address, ``groups`` its inventory groups."""

    name: str
    cluster: Any
    rank: Any
    address: str
    groups: Sequence[str] = ()


def _names(members: Sequence[Member]) -> str:
    return ", ".join(m.name for m in members)


def check_member(member: Member) -> None:
    """Raise unless the host names exactly one cluster, one rank and an IPv4 address of its own."""
    if not isinstance(member.cluster, str) or not member.cluster or "," in member.cluster:
        raise TopologyError(
            f"{member.name}: cluster is {member.cluster!r}, wanted the name of one cluster. A host serves one cluster at a time."
        )
    others = sorted(g for g in member.groups if g.startswith("cluster_") and g != f"cluster_{member.cluster}")
    if others:
        raise TopologyError(
            f"{member.name} is in two clusters: its variable cluster says {member.cluster}, and it is also in the group "
            f"{', '.join(others)}. Remove it from one of them."
        )
    if isinstance(member.rank, bool) or not isinstance(member.rank, int) or member.rank < 0:
        raise TopologyError(
            f"{member.name}: rank is {member.rank!r}, wanted a whole number (0 is the head of cluster {member.cluster})."
        )
    try:
        address = ipaddress.IPv4Address(member.address)
    except ValueError:
        raise TopologyError(
            f"{member.name}: its fabric address is {member.address!r}, wanted a numeric IPv4 address. "
            "Set fabric_address (names do not reach every rank the same way)."
        ) from None
    if address.is_loopback and member.rank > 0:
        raise TopologyError(
            f"{member.name}: fabric_address {address} is a loopback address that no other rank can reach."
        )


def check_cluster(name: str, members: Sequence[Member], nodes: int | None, fleet: Sequence[Member]) -> list[Member]:
    """Return the members by rank, or raise. ``nodes`` is the recipe's node count, ``fleet`` all hosts of all clusters."""
    for member in members:
        check_member(member)
    ranks: dict[int, list[Member]] = {}
    for member in members:
        ranks.setdefault(member.rank, []).append(member)
    for rank, holders in sorted(ranks.items()):
        if len(holders) > 1:
            role = " (the head)" if rank == 0 else ""
            raise TopologyError(
                f"cluster {name}: rank {rank}{role} is given to {_names(holders)}. Give every host a rank of its own."
            )
    missing = [r for r in range(max(ranks) + 1) if r not in ranks]
    if missing:
        raise TopologyError(
            f"cluster {name}: rank {', '.join(map(str, missing))} is missing (found "
            + ", ".join(f"{ranks[r][0].name} = {r}" for r in sorted(ranks))
            + f"). Number the ranks 0 to {len(members) - 1} without holes."
        )
    if nodes is not None and nodes != len(members):
        raise TopologyError(
            f"cluster {name} has {len(members)} host{'s' if len(members) != 1 else ''} ({_names(members)}), "
            f"its recipe wants {nodes}. "
            f"Change the inventory, or pick a recipe for {len(members)}."
        )
    mine = {m.name for m in members}
    seen: dict[str, Member] = {}
    for member in sorted(fleet, key=lambda m: (m.name not in mine, m.name)):
        other = seen.setdefault(member.address, member)
        if other is not member and (other.name in mine or member.name in mine):
            raise TopologyError(
                f"{other.name} and {member.name} have the same address {member.address}. Every host needs an address of its own."
            )
    return sorted(members, key=lambda m: m.rank)


def declared_fabric(variables: Mapping[str, Any], transport: str) -> dict[str, Any]:
    """The part of the fabric environment that the inventory declares; the fabric role discovers the rest on the node."""
    env: dict[str, str] = {}
    interface = variables.get("fabric_interface")
    if interface:
        # Always together: one of them left at an image's default binds Gloo to an interface that does not exist here
        # (case net-ifname-baked).
        env.update(
            dict.fromkeys(
                ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "MN_IF_NAME"), str(interface)
            )
        )
    if transport == "roce":
        hca = variables.get("fabric_hca")
        if hca:
            env["NCCL_IB_HCA"] = ",".join(hca) if isinstance(hca, (list, tuple)) else str(hca)
        if variables.get("fabric_gid_index") not in (None, ""):
            env["NCCL_IB_GID_INDEX"] = str(variables["fabric_gid_index"])
        if variables.get("fabric_cidr"):
            env["NCCL_IB_ADDR_RANGE"] = str(variables["fabric_cidr"])
    return {"env": env}
