# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a cluster does with its fabric: which rails each pair of ranks shares, what to prove, and each rank's NCCL environment.

Pure functions over what ``fabric_info`` read on every node and what ``fabric_probe`` proved between them. The plan starts
from the route to the peer, adds the second rail, and is judged as a whole: a dead first rail is an error, a dead second
rail is dropped with a warning.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ansible_collections.gb10.fleet.plugins.module_utils import _fabric
from ansible_collections.gb10.fleet.plugins.module_utils._findings import ERROR, NOTE, WARNING, Finding

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
    """``rails``: {node: [Rail]}; ``gid_indexes``: {node: {hca: index}}; ``oob``: {node: interface that holds its "
    "address}."""

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

    def between(self, node: str, peer: str) -> list[Rail]:
        return [rail for rail in self.rails.get(node, []) if rail.peer == peer]


# --- the plan -------------------------------------------------------------------------------------------------------


def plan(ranks: Sequence[Rank], transport: str = ROCE) -> Plan:
    """Plan the rails of one cluster from the reports of its nodes, and say what is wrong before anything is "
    "probed."""
    result = Plan(transport, {rank.name: rank for rank in ranks})
    for rank in ranks:
        if rank.info is None:
            result.add(
                ERROR,
                "no-report",
                rank.name,
                f"{rank.name} gave no report of its fabric: it is unreachable over SSH, or an earlier step failed "
                "there. Put it right and run again.",
            )
    known = [rank for rank in ranks if rank.info is not None]
    for rank in known:
        _own_address(result, rank, len(ranks))
    if len(ranks) == 1:
        result.shape = "single"
        return result
    if transport == ROCE:
        for rank in known:
            _devices(result, rank)
    for rank in known:
        rails: list[Rail] = []
        for peer in ranks:
            if peer.name != rank.name:
                rails += _rails(result, rank, peer, len(ranks))
        result.rails[rank.name] = rails
    result.shape = _shape(result)
    for rank in known:
        _shared_prefix(result, rank)
        _persistent(result, rank)
        _firewall(result, rank)
    if transport == ROCE:
        for rank in known:
            _gids(result, rank)
        _mtus(result)
    return result


def _own_address(result: Plan, rank: Rank, size: int) -> None:
    holder = rank.holder(rank.address)
    if holder is None and size == 1:
        return  # nobody has to reach it
    if holder is None:
        held = ", ".join(rank.shown(name) for name in rank.interfaces) or "no interface with an address"
        result.add(
            ERROR,
            "net-host-ip-collision",
            rank.name,
            f"{rank.name}: its fabric address {rank.address} is on none of its interfaces; found {held}. Set "
            "fabric_address (or ansible_host) of this host to an address of its own.",
        )
        return
    result.oob[rank.name] = rank.interface if rank.interface in rank.interfaces else holder  # type: ignore[assignment]


def _devices(result: Plan, rank: Rank) -> None:
    """Is there RDMA hardware at all, and may a container reach it?"""
    info = rank.info or {}
    if not rank.rdma:
        if not info.get("pci"):
            result.add(
                ERROR,
                "net-unplugged-none",
                rank.name,
                f"{rank.name}: no CX7 functions on PCI and no RDMA device: the QSFP cable is unplugged or the port "
                "was hot-unplugged to save power; the driver is not missing. Plug the cable in at both ends, then "
                "look for enp1s0f0np0 in `ip link`.",
            )
        else:
            result.add(
                ERROR,
                "net-no-rdma",
                rank.name,
                f"{rank.name}: {len(info['pci'])} CX7 functions on PCI ({', '.join(info['pci'])}), but no RDMA "
                "device: mlx5_ib is not loaded. Run `modprobe mlx5_ib` and look at `dmesg | grep mlx5`.",
            )
        return
    if not any(name.startswith("uverbs") for name in info.get("device_nodes") or []):
        result.add(
            ERROR,
            "net-tcp-fallback",
            rank.name,
            f"{rank.name}: RDMA devices exist, but /dev/infiniband has no uverbs node, so NCCL would fall back to "
            "TCP (about ten times slower). Run `modprobe ib_uverbs`.",
        )


def _candidates(rank: Rank) -> list[str]:
    return [name for name, interface in rank.interfaces.items() if interface.get("rdma")]


def _first(result: Plan, rank: Rank, peer: Rank) -> str | None:
    """The interface that reaches a peer's fabric address: the declared one, else what the route says."""
    if rank.interface is not None:
        if rank.interface not in rank.interfaces:
            rdma = ", ".join(rank.shown(name) for name in _candidates(rank)) or "no interface with an RDMA device"
            result.add(
                ERROR,
                "wrong-interface",
                rank.name,
                f"{rank.name}: fabric_interface is {rank.interface}, which does not exist here or has no address; "
                f"found {rdma}. Correct fabric_interface, or remove it: it is found from the route to the peer.",
            )
            return None
        holder = rank.holder(rank.address)
        if holder is not None and holder != rank.interface:
            result.add(
                ERROR,
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
        result.add(
            ERROR,
            "no-route",
            rank.name,
            f"{rank.name}: no route to the fabric address {peer.address} of {peer.name} "
            f"({route.get('error') or 'no route'}). Give both nodes addresses in one subnet; {rank.name} has "
            f"{', '.join(rank.shown(name) for name in rank.interfaces) or 'no address'}.",
        )
        return None
    if route.get("gateway"):
        result.add(
            WARNING,
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
        result.add(
            ERROR,
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
    result.add(
        ERROR,
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
        result.add(
            WARNING,
            "net-one-rail",
            rank.name,
            f"{rank.name}: the second rail {twin} has no link though its twin {first} has. {cost}; run `ip link set "
            f"{twin} up`.",
        )
    elif not rank.addresses(twin):
        result.add(
            WARNING,
            "net-one-rail",
            rank.name,
            f"{rank.name}: the second rail {twin} has no IPv4 address. {cost}; give it one in a subnet of its own.",
        )
    elif peer.info is not None:
        theirs = (peer.interfaces.get(peer.holder(peer.address) or "") or {}).get("twin")
        if theirs and peer.addresses(theirs):
            result.add(
                WARNING,
                "net-one-rail",
                rank.name,
                f"{rank.name}: the second rail {rank.shown(twin)} and {peer.name}'s {peer.shown(theirs)} share no "
                f"subnet. {cost}; put both ends into one subnet.",
            )


def _shape(result: Plan) -> str:
    """pair, switch (all peers through the same netdev), mesh (a cable per peer) or ring (not every pair has a "
    "cable)."""
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


# --- checks of one node ---------------------------------------------------------------------------------------------


def _used(result: Plan, rank: Rank) -> list[str]:
    return list(dict.fromkeys(rail.interface for rail in result.rails.get(rank.name, [])))


def _shared_prefix(result: Plan, rank: Rank) -> None:
    used = _used(result, rank)
    for one, two in _fabric.overlapping(rank.interfaces):
        if one not in used and two not in used:
            continue
        routes = [
            f"`ip route get {route['peer']} from {route['source']}` answers dev {route['dev']}"
            for route in (rank.info or {}).get("source_routes") or []
            if route["interface"] in (one, two)
        ]
        seen = ("; " + ", ".join(routes)) if routes else ""
        result.add(
            WARNING,
            "net-same-subnet",
            rank.name,
            f"{rank.name}: {rank.shown(one)} and {rank.shown(two)} are in one subnet, so the kernel may send from "
            f"the wrong one and an all-reduce hangs{seen}. Give each rail a subnet of its own.",
        )


def _persistent(result: Plan, rank: Rank) -> None:
    for name in _used(result, rank):
        for item in rank.addresses(name):
            known = item.get("persistent") or {}
            if known.get("defined") is False:
                result.add(
                    WARNING,
                    "net-ip-not-persistent",
                    rank.name,
                    f"{rank.name}: {item['address']}/{item['prefix']} on {name} is only live, no netplan, "
                    "NetworkManager or networkd file defines it: it is gone after a reboot. Write it down, or set "
                    "fabric_configure: true.",
                )


def _firewall(result: Plan, rank: Rank) -> None:
    for rail in result.rails.get(rank.name, []):
        if not _fabric.ufw_admits((rank.info or {}).get("ufw"), rail.peer_address, rail.interface):
            result.add(
                WARNING,
                "net-firewall",
                rank.name,
                f"{rank.name}: ufw is active, denies incoming connections and has no rule that admits every port "
                f"from {rail.peer_address} ({rail.peer}). Engines open random ports: run `ufw allow in on "
                f"{rail.interface} from {rail.network}`.",
            )


def hca_of(rank: Rank, interface: str, address: str) -> str | None:
    """The RDMA device of an address: the one whose GID table holds it, else the first of its netdev."""
    devices = list((rank.interfaces.get(interface) or {}).get("rdma") or [])
    for device in devices:
        if _fabric.gid_indexes(rank.rdma[device].get("gids") or [], address):
            return device
    return devices[0] if devices else None


def _gids(result: Plan, rank: Rank) -> None:
    """Resolve each rail's GID index from this node's own table, and drop or refuse the rails that have none."""
    kept: list[Rail] = []
    for name in rank.hcas:
        if name not in rank.rdma:
            result.add(
                ERROR,
                "wrong-hca",
                rank.name,
                f"{rank.name}: fabric_hca names {name}, which does not exist here; found "
                f"{', '.join(rank.rdma) or 'no RDMA device'}. Correct fabric_hca, or remove it.",
            )
    for rail in result.rails.get(rank.name, []):
        if rank.hcas and rail.hca not in rank.hcas:
            if rail.number == 1:
                result.add(
                    ERROR,
                    "wrong-hca",
                    rank.name,
                    f"{rank.name}: fabric_hca is {', '.join(rank.hcas)}, but the route to {rail.peer} uses "
                    f"{rail.hca} ({rail.interface}). Correct fabric_hca, or remove it.",
                )
            continue
        trouble = _link_trouble(rank, rail) or _gid_trouble(result, rank, rail)
        if trouble is None:
            kept.append(rail)
            continue
        code, text = trouble
        if rail.number == 1:
            result.add(ERROR, code, rank.name, text)
        else:
            result.add(
                WARNING,
                code,
                rank.name,
                f"{text} Only rail 1 is used: about {ONE_RAIL_GB_S} instead of {TWO_RAIL_GB_S} GB/s.",
            )
    result.rails[rank.name] = kept


def _link_trouble(rank: Rank, rail: Rail) -> tuple[str, str] | None:
    if rail.hca is None:
        return "net-no-rdma", f"{rank.name}: {rail.words} has no RDMA device."
    device = rank.rdma[rail.hca]
    if device.get("state") not in (None, "ACTIVE"):
        return "net-link-down", (
            f"{rank.name}: {rail.words}: {rail.hca} is {device['state']} (physical state "
            f"{device.get('physical_state')}), wanted ACTIVE. Check the cable and run `ip link set {rail.interface} "
            "up`."
        )
    return None


def _gid_trouble(result: Plan, rank: Rank, rail: Rail) -> tuple[str, str] | None:
    hca = str(rail.hca)
    gids = rank.rdma[hca].get("gids") or []
    right = _fabric.gid_indexes(gids, rail.source)
    table = _fabric.gid_table(hca, gids)
    if not right:
        return "net-gid-empty-errno61", (
            f"{rank.name}: {rail.words}: {hca} has no RoCE v2 GID for {rail.source}; its rank would die after about "
            f"60 s with ibv_modify_qp errno 61. Filled entries: {table}. Run `ip link set {rail.interface} down` and "
            "`up`, then look again."
        )
    index = right[0]
    if rank.gid_index is not None:
        if rank.gid_index not in right:
            entry = next((gid for gid in gids if gid["index"] == rank.gid_index), None)
            is_now = "all-zero" if entry is None else f"{entry['gid']} ({entry['type']})"
            return "net-gid-empty-errno61", (
                f"{rank.name}: {rail.words}: fabric_gid_index is {rank.gid_index}, but that entry of {hca} is "
                f"{is_now}; the RoCE v2 entry of {rail.source} is {index}. Remove fabric_gid_index: it is looked up "
                f"at each launch. Filled entries: {table}."
            )
        index = rank.gid_index
    result.gid_indexes.setdefault(rank.name, {})[hca] = index
    return None


def _mtus(result: Plan) -> None:
    """Compare both ends of each rail. A difference stops the first rail and drops another; 1500 on both is only "
    "slow."""
    for node, rails in result.rails.items():
        kept = []
        for rail in rails:
            mine, theirs = rail.mtu, rail.peer_mtu
            if mine and theirs and mine != theirs:
                low, high = (node, rail.peer) if mine < theirs else (rail.peer, node)
                name = rail.interface if low == node else rail.peer_interface
                text = (
                    f"{low}: {name} has MTU {min(mine, theirs)} (RoCE active MTU "
                    f"{_fabric.roce_mtu(min(mine, theirs))}), its peer {high} has {max(mine, theirs)} "
                    f"({_fabric.roce_mtu(max(mine, theirs))}): transfers end in IBV_WC_RETRY_EXC_ERR or hang. Run "
                    f"`ip link set {name} mtu {max(mine, theirs)}` on {low}, and write it into its network "
                    "definition."
                )
                result.add(ERROR if rail.number == 1 else WARNING, "net-mtu", low, text)
                if rail.number > 1:
                    continue
            elif mine and mine < JUMBO:
                result.add(
                    WARNING,
                    "net-mtu",
                    node,
                    f"{node}: {rail.interface} has MTU {mine} (RoCE active MTU {_fabric.roce_mtu(mine)}); {JUMBO} on "
                    f"both ends is faster. Run `ip link set {rail.interface} mtu {JUMBO}` on both.",
                )
            kept.append(rail)
        result.rails[node] = kept


# --- proof ----------------------------------------------------------------------------------------------------------


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
                result.add(
                    ERROR,
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
        result.add(
            WARNING,
            kind,
            node,
            f"{node}: {peer} ({rail.peer_address}) does not answer ping on {rail.words} while TCP works, so MTU "
            f"{rail.mtu} is not proven. Allow ICMP echo between the ranks.",
        )
        return
    if rail.number == 1:
        result.add(ERROR, kind, node, text)
    else:
        result.add(
            WARNING, kind, node, f"{text} Only rail 1 is used: about {ONE_RAIL_GB_S} instead of {TWO_RAIL_GB_S} GB/s."
        )


# --- the environment ------------------------------------------------------------------------------------------------


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


def rail_facts(rails: Sequence[Rail]) -> list[dict[str, Any]]:
    return [asdict(rail) for rail in rails]
