# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which rails each pair of ranks shares. Pure functions over what ``fabric_info`` read on every node.

The plan starts from the route to the peer and adds the second rail. A first rail that cannot carry RDMA is an error, a second
rail that cannot is dropped with a warning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ansible_collections.gb10.fleet.plugins.module_utils import _fabric, _fabric_checks
from ansible_collections.gb10.fleet.plugins.module_utils._fabric_model import (
    ONE_RAIL_GB_S,
    ROCE,
    SOCKET,
    TWO_RAIL_GB_S,
    Plan,
    Rail,
    Rank,
    hca_of,
)


def plan(ranks: Sequence[Rank], transport: str = ROCE) -> Plan:
    """Plan the rails of one cluster from the reports of its nodes, and say what is wrong before anything is probed."""
    result = Plan(transport, {rank.name: rank for rank in ranks})
    for rank in ranks:
        if rank.info is None:
            result.error(
                "no-report",
                rank.name,
                f"{rank.name} gave no report of its fabric: it is unreachable over SSH, or an earlier step failed "
                "there. Put it right and run again.",
            )
    known = [rank for rank in ranks if rank.info is not None]
    for rank in known:
        _fabric_checks.own_address(result, rank, len(ranks))
    if len(ranks) == 1:
        result.shape = "single"
        return result
    if transport == ROCE:
        for rank in known:
            _fabric_checks.devices(result, rank)
    for rank in known:
        rails: list[Rail] = []
        for peer in ranks:
            if peer.name != rank.name:
                rails += _rails(result, rank, peer, len(ranks))
        result.rails[rank.name] = rails
    result.shape = _shape(result)
    for rank in known:
        _fabric_checks.shared_prefix(result, rank)
        _fabric_checks.persistent(result, rank)
        _fabric_checks.firewall(result, rank)
    if transport == ROCE:
        for rank in known:
            _fabric_checks.gids(result, rank)
        _fabric_checks.mtus(result)
    return result


def _candidates(rank: Rank) -> list[str]:
    return [name for name, interface in rank.interfaces.items() if interface.get("rdma")]


def _first(result: Plan, rank: Rank, peer: Rank) -> str | None:
    """The interface that reaches a peer's fabric address: the declared one, else what the route says."""
    if rank.interface is not None:
        if rank.interface not in rank.interfaces:
            rdma = ", ".join(rank.shown(name) for name in _candidates(rank)) or "no interface with an RDMA device"
            result.error(
                "wrong-interface",
                rank.name,
                f"{rank.name}: fabric_interface is {rank.interface}, which does not exist here or has no address; "
                f"found {rdma}. Correct fabric_interface, or remove it: it is found from the route to the peer.",
            )
            return None
        holder = rank.holder(rank.address)
        if holder is not None and holder != rank.interface:
            result.error(
                "wrong-interface",
                rank.name,
                f"{rank.name}: fabric_interface is {rank.shown(rank.interface)}, but the fabric address "
                f"{rank.address} is on {holder}. Set fabric_interface to {holder}, or fabric_address to an address "
                f"of {rank.interface}.",
            )
            return None
        return rank.interface
    route = ((rank.info or {}).get("routes") or {}).get(peer.address) or {}
    if not route.get("dev"):
        result.error(
            "no-route",
            rank.name,
            f"{rank.name}: no route to the fabric address {peer.address} of {peer.name} "
            f"({route.get('error') or 'no route'}). Give both nodes addresses in one subnet; {rank.name} has "
            f"{', '.join(rank.shown(name) for name in rank.interfaces) or 'no address'}.",
        )
        return None
    if route.get("gateway"):
        result.warning(
            "routed",
            rank.name,
            f"{rank.name}: {peer.name} ({peer.address}) is reached through the gateway {route['gateway']} on "
            f"{route['dev']}, not over a direct link. RoCE wants both ends in one subnet.",
        )
    return str(route["dev"])


def _links(rank: Rank, peer: Rank) -> list[tuple[str, Mapping[str, Any], str, Mapping[str, Any]]]:
    """Pairs of RDMA netdevs whose addresses share a subnet: same QSFP port and half first."""
    found = []
    for name in _candidates(rank):
        for item in rank.addresses(name):
            network = _fabric.network_of(item["address"], item["prefix"])
            for other in _candidates(peer):
                for there in peer.addresses(other):
                    if there["address"] != item["address"] and _fabric.inside(there["address"], network):
                        found.append((name, item, other, there))
    return sorted(found, key=lambda link: (link[0], link[0] != link[2], link[2]))


def _rail(
    result: Plan, rank: Rank, peer: Rank, number: int, name: str, item: Mapping[str, Any], other: str, there: str
) -> Rail:
    return Rail(
        node=rank.name,
        peer=peer.name,
        number=number,
        interface=name,
        hca=hca_of(rank, name, item["address"]) if result.transport == ROCE else None,
        source=item["address"],
        network=_fabric.network_of(item["address"], item["prefix"]),
        mtu=rank.interfaces[name].get("mtu"),
        peer_interface=other,
        peer_address=there,
        peer_mtu=(peer.interfaces.get(other) or {}).get("mtu"),
    )


def _rails(result: Plan, rank: Rank, peer: Rank, size: int) -> list[Rail]:
    first = _first(result, rank, peer)
    if first is None or first not in rank.interfaces:
        return []
    there = peer.holder(peer.address) or first
    item = next((i for i in rank.addresses(first) if i["address"] == rank.address), None) or next(
        iter(rank.addresses(first)), None
    )
    if item is None:
        result.error(
            "no-address",
            rank.name,
            f"{rank.name}: {first} leads to {peer.name} but has no IPv4 address. Give it one in the subnet of "
            f"{peer.address}.",
        )
        return []
    links = _links(rank, peer) if result.transport == ROCE else []
    if result.transport == ROCE and not rank.interfaces[first].get("rdma"):
        return _not_rdma(result, rank, peer, size, first, links)
    rails = [_rail(result, rank, peer, 1, first, item, there, peer.address)]
    if result.transport == SOCKET:
        return rails
    taken, taken_there = {first}, {there}
    for name, mine, other, theirs in links:
        if name not in taken and other not in taken_there:
            taken.add(name)
            taken_there.add(other)
            rails.append(_rail(result, rank, peer, len(rails) + 1, name, mine, other, theirs["address"]))
    _second(result, rank, peer, first, rails)
    return rails


def _not_rdma(
    result: Plan,
    rank: Rank,
    peer: Rank,
    size: int,
    first: str,
    links: Sequence[tuple[str, Mapping[str, Any], str, Mapping[str, Any]]],
) -> list[Rail]:
    """The route leaves by an interface without RDMA: right in a mesh of three or more (each pair has its own cable and
    the ranks meet over the management network), an error between two nodes."""
    if size > 2 and links:
        rails: list[Rail] = []
        taken: set[str] = set()
        for name, mine, other, theirs in links:
            if name not in taken:
                taken.add(name)
                rails.append(_rail(result, rank, peer, len(rails) + 1, name, mine, other, theirs["address"]))
        return rails
    if not rank.rdma or (
        size > 2 and any(_links(rank, other) for other in result.ranks.values() if other.name != rank.name)
    ):
        return []  # no device was said already; in a ring, not every pair has a cable
    if links:
        advice = f"Set fabric_address to {links[0][1]['address']} on {rank.name} and {links[0][3]['address']} on {peer.name}."
    else:
        seen = ", ".join(rank.shown(name) for name in _candidates(rank)) or "none has an address"
        advice = f"RDMA interfaces here: {seen}. Give both ends an address in one subnet and set fabric_address to it."
    result.error(
        "route-not-rdma",
        rank.name,
        f"{rank.name}: the route to {peer.name} ({peer.address}) leaves by {first}, which has no RDMA device. {advice}",
    )
    return []


def _second(result: Plan, rank: Rank, peer: Rank, first: str, rails: Sequence[Rail]) -> None:
    """Say why the other half of the port carries nothing."""
    twin = rank.interfaces[first].get("twin")
    if twin is None or any(rail.interface == twin for rail in rails):
        return
    cost = f"One rail carries everything: about {ONE_RAIL_GB_S} instead of {TWO_RAIL_GB_S} GB/s"
    if not rank.interfaces[twin].get("carrier"):
        result.warning(
            "net-one-rail",
            rank.name,
            f"{rank.name}: the second rail {twin} has no link though its twin {first} has. {cost}; run `ip link set "
            f"{twin} up`.",
        )
    elif not rank.addresses(twin):
        result.warning(
            "net-one-rail",
            rank.name,
            f"{rank.name}: the second rail {twin} has no IPv4 address. {cost}; give it one in a subnet of its own.",
        )
    elif peer.info is not None:
        theirs = (peer.interfaces.get(peer.holder(peer.address) or "") or {}).get("twin")
        if theirs and peer.addresses(theirs):
            result.warning(
                "net-one-rail",
                rank.name,
                f"{rank.name}: the second rail {rank.shown(twin)} and {peer.name}'s {peer.shown(theirs)} share no "
                f"subnet. {cost}; put both ends into one subnet.",
            )


def _shape(result: Plan) -> str:
    """pair, switch (all peers through the same netdev), mesh (a cable per peer) or ring (not every pair has one)."""
    if len(result.ranks) < 3:
        return "pair"
    meshed = gaps = False
    for name in result.ranks:
        firsts = {rail.interface for rail in result.rails.get(name, []) if rail.number == 1}
        meshed = meshed or len(firsts) > 1
        reached = {rail.peer for rail in result.rails.get(name, [])}
        gaps = gaps or len(reached) < len(result.ranks) - 1
    if gaps and result.transport == ROCE and all(result.rails.get(name) for name in result.ranks):
        return "ring"
    return "mesh" if meshed else "switch"
