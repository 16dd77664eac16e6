# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What ``fabric_probe`` has to prove, what it proved, and the environment that follows for each rank. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ansible_collections.gb10.fleet.plugins.module_utils import _fabric
from ansible_collections.gb10.fleet.plugins.module_utils._fabric_model import (
    JUMBO,
    ONE_RAIL_GB_S,
    SOCKET,
    TWO_RAIL_GB_S,
    Plan,
    Rail,
)
from ansible_collections.gb10.fleet.plugins.module_utils._findings import NOTE


def targets(result: Plan, node: str, listeners: Mapping[str, int | None]) -> list[dict[str, Any]]:
    """What ``fabric_probe`` has to prove from one node. ``listeners``: {peer: TCP port its listener was given}."""
    wanted = []
    for rail in result.rails.get(node, []):
        wanted.append(
            {
                "peer": rail.peer,
                "rail": rail.number,
                "interface": rail.interface,
                "source": rail.source,
                "address": rail.peer_address,
                "payload": rail.payload,
                "port": listeners.get(rail.peer) or 0,
            }
        )
    return wanted


@dataclass(frozen=True)
class Outcome:
    """One direction of one rail, as ``fabric_probe`` saw it."""

    rail: Rail
    ping: Mapping[str, Any]
    small: Mapping[str, Any]
    tcp: Mapping[str, Any]

    @property
    def kind(self) -> str | None:
        """None when the direction is proven, else what is wrong with it."""
        pings = self.ping.get("ok") or self.small.get("ok")
        if self.tcp.get("ok"):
            if self.ping.get("ok") or self.ping.get("missing"):
                return None
            return "net-mtu" if self.small.get("ok") else "ping-filtered"
        if not pings and not self.small.get("missing"):
            return "net-unreachable"
        if self.tcp.get("error") == "no listener":
            return "no-listener"
        return "net-firewall"


def judge(result: Plan, probes: Mapping[str, Mapping[str, Any] | None]) -> Plan:
    """Add what the probes found. A rail that fails in either direction is dead for both of its ends."""
    outcomes: dict[tuple[str, str, int], Outcome] = {}
    for node, rails in result.rails.items():
        answers = {(a["peer"], a["rail"]): a for a in (probes.get(node) or {}).get("results") or []}
        for rail in rails:
            answer = answers.get((rail.peer, rail.number))
            if answer is None:
                result.error(
                    "no-report",
                    node,
                    f"{node} did not probe {rail.words} to {rail.peer}: the probe failed there, or the node became "
                    "unreachable.",
                )
                continue
            outcomes[(node, rail.peer, rail.number)] = Outcome(rail, answer["ping"], answer["small"], answer["tcp"])
    dead: set[tuple[str, str, str]] = set()
    for (node, peer, _number), outcome in outcomes.items():
        kind = outcome.kind
        if kind is None:
            continue
        back = next(
            (o for o in outcomes.values() if o.rail.node == peer and o.rail.source == outcome.rail.peer_address), None
        )
        both = back is not None and back.kind == kind
        if both and (node, peer) > (peer, node) and kind != "net-firewall":
            continue  # said once, from the other end
        _say(result, outcome, kind, both)
        if kind != "ping-filtered":
            dead.add((node, outcome.rail.interface, peer))
            dead.add((peer, outcome.rail.peer_interface, node))
    for node, rails in result.rails.items():
        result.rails[node] = [
            rail for rail in rails if rail.number == 1 or (node, rail.interface, rail.peer) not in dead
        ]
    return result


def _say(result: Plan, outcome: Outcome, kind: str, both: bool) -> None:
    rail, ranks = outcome.rail, result.ranks
    node, peer = rail.node, rail.peer
    way = f"{node} and {peer} do not reach each other" if both else f"{node} does not reach {peer}"
    management = ranks[peer].management
    if kind == "net-unreachable":
        alive = ""
        if ranks[peer].info is not None and management and management != rail.peer_address:
            alive = f", though {peer} answers on its management address {management}"
        carrier = ranks[node].interfaces[rail.interface].get("carrier")
        advice = (
            "Check the cable, the addresses of both ends and the switch"
            if carrier
            else f"{rail.interface} has no link: check the cable"
        )
        text = f"{way} on {rail.words} at {rail.peer_address} (ping and TCP){alive}. {advice}."
    elif kind == "net-mtu":
        limit = outcome.ping.get("mtu")
        text = (
            f"{node}: {rail.words}: packets of {rail.payload + _fabric.ICMP_HEADERS} bytes do not get through to "
            f"{peer} ({rail.peer_address}), small ones do"
            + (f"; an interface on the way has MTU {limit}" if limit else "")
            + f". Set MTU {JUMBO} on both ends and on the switch between them."
        )
    elif kind == "net-firewall":
        text = (
            f"{node} cannot open TCP port {outcome.tcp.get('port')} of {peer} ({rail.peer_address}, {rail.words}): "
            f"{outcome.tcp.get('error')}, while ping works. A firewall on {peer} drops high ports, and engines open "
            f"random ones: allow all traffic from {rail.source}, e.g. `ufw allow in on {rail.peer_interface} from "
            f"{rail.network}`."
        )
    elif kind == "no-listener":
        text = f"{node} could not try TCP to {peer} on {rail.words}: the listener of {peer} did not start."
    else:
        result.warning(
            kind,
            node,
            f"{node}: {peer} ({rail.peer_address}) does not answer ping on {rail.words} while TCP works, so MTU "
            f"{rail.mtu} is not proven. Allow ICMP echo between the ranks.",
        )
        return
    if rail.number == 1:
        result.error(kind, node, text)
    else:
        result.warning(
            kind, node, f"{text} Only rail 1 is used: about {ONE_RAIL_GB_S} instead of {TWO_RAIL_GB_S} GB/s."
        )


def hca_value(chosen: Sequence[str], present: Iterable[str]) -> str:
    """NCCL_IB_HCA: names match by prefix unless the value starts with ``=``; that is used only where it is needed."""
    ambiguous = any(other != name and other.startswith(name) for name in chosen for other in present)
    return ("=" if ambiguous else "") + ",".join(chosen)


def environment(result: Plan, node: str, cidr: str | None = None) -> dict[str, str]:
    """The NCCL, Gloo and vLLM environment of one rank. A key that is to be automatic is absent, never empty:
    an empty NCCL_IB_GID_INDEX means index 0, the link-local GID (case net-gid-drift).

    :param cidr: a declared NCCL_IB_ADDR_RANGE; else the smallest prefix over all rails of the cluster.
    """
    rank = result.ranks[node]
    env = {"VLLM_HOST_IP": rank.address}
    oob = result.oob.get(node)
    if oob:
        # Always together: one left at an image's default binds Gloo to an interface that does not exist here
        # (case net-ifname-baked), or to loopback (case net-gloo-loopback).
        env.update(dict.fromkeys(("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "MN_IF_NAME"), oob))
    if result.transport == SOCKET:
        env["NCCL_IB_DISABLE"] = "1"
        return env
    rails = result.rails.get(node, [])
    hcas = list(rank.hcas) or list(dict.fromkeys(rail.hca for rail in rails if rail.hca))
    if hcas:
        env["NCCL_IB_HCA"] = hca_value(hcas, rank.rdma)
        env["NCCL_IB_DISABLE"] = "0"
        env["NCCL_IB_ROCE_VERSION_NUM"] = "2"
        env["NCCL_IB_ADDR_FAMILY"] = "AF_INET"
        indexes = {result.gid_indexes.get(node, {}).get(hca) for hca in hcas}
        if len(indexes) == 1 and None not in indexes:
            env["NCCL_IB_GID_INDEX"] = str(next(iter(indexes)))
        whole = cidr or _fabric.common_range(
            sorted({rail.network for rails in result.rails.values() for rail in rails})
        )
        if whole:
            env["NCCL_IB_ADDR_RANGE"] = whole
    if result.shape in ("mesh", "ring"):
        env["NCCL_NET_PLUGIN"] = "none"
        env["NCCL_IB_SUBNET_AWARE_ROUTING"] = "1"
        if result.shape == "ring" and len(result.ranks) >= 4:
            env["NCCL_ALGO"] = "Ring"
    return env


def mixed_indexes(result: Plan) -> None:
    """One variable holds one index: where a node's HCAs differ, say that NCCL is left to choose per device."""
    for node, indexes in result.gid_indexes.items():
        if len(set(indexes.values())) > 1:
            shown = ", ".join(f"{index} on {hca}" for hca, index in indexes.items())
            result.add(
                NOTE,
                "net-gid-differs",
                node,
                f"{node}: the RoCE v2 GID index is {shown}; NCCL_IB_GID_INDEX holds only one, so it is left out and "
                "NCCL picks each device's RoCE v2 entry by NCCL_IB_ADDR_RANGE.",
            )


def rows(
    result: Plan, probes: Mapping[str, Mapping[str, Any] | None], before: Mapping[str, Sequence[Rail]]
) -> list[dict[str, Any]]:
    """One row per node and rail for a table. ``before``: the rails as planned, with those dropped since."""
    table = []
    for node, rails in before.items():
        alive = {(rail.peer, rail.number) for rail in result.rails.get(node, [])}
        answers = {(a["peer"], a["rail"]): a for a in (probes.get(node) or {}).get("results") or []}
        for rail in rails:
            answer = answers.get((rail.peer, rail.number)) or {}
            hca = str(rail.hca) if rail.hca else None
            table.append(
                {
                    "node": node,
                    "rail": rail.number,
                    "interface": rail.interface,
                    "address": rail.source,
                    "MTU": rail.mtu,
                    "RDMA": hca,
                    "GID": result.gid_indexes.get(node, {}).get(hca or ""),
                    "to": rail.peer,
                    "proven": _proven(answer) if (rail.peer, rail.number) in alive else "dropped",
                }
            )
    return table


def _proven(answer: Mapping[str, Any]) -> str:
    if not answer:
        return "no"
    ping, tcp = answer["ping"], answer["tcp"]
    if ping.get("ok") and tcp.get("ok"):
        rtt = ping.get("rtt_ms")
        return f"yes, {rtt:.2f} ms" if rtt is not None else "yes"
    return "TCP only" if tcp.get("ok") else "ping only" if answer["small"].get("ok") else "no"


def rail_facts(result: Plan, node: str) -> list[dict[str, Any]]:
    """Proven rails of a node, each with the GID index of its device."""
    indexes = result.gid_indexes.get(node, {})
    return [{**asdict(rail), "gid_index": indexes.get(rail.hca or "")} for rail in result.rails.get(node, [])]
