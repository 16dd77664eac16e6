# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What is wrong with the fabric before anything is probed: devices, addresses, subnets, firewalls, GIDs, MTUs."""

from __future__ import annotations

from ansible_collections.gb10.fleet.plugins.module_utils import _fabric
from ansible_collections.gb10.fleet.plugins.module_utils._fabric_model import (
    JUMBO,
    ONE_RAIL_GB_S,
    TWO_RAIL_GB_S,
    Plan,
    Rail,
    Rank,
)
from ansible_collections.gb10.fleet.plugins.module_utils._findings import ERROR, WARNING


def own_address(result: Plan, rank: Rank, size: int) -> None:
    holder = rank.holder(rank.address)
    if holder is None and size == 1:
        return  # nobody has to reach it
    if holder is None:
        held = ", ".join(rank.shown(name) for name in rank.interfaces) or "no interface with an address"
        result.error(
            "net-host-ip-collision",
            rank.name,
            f"{rank.name}: its fabric address {rank.address} is on none of its interfaces; found {held}. Set "
            "fabric_address (or ansible_host) of this host to an address of its own.",
        )
        return
    result.oob[rank.name] = rank.interface if rank.interface in rank.interfaces else holder  # type: ignore[assignment]


def devices(result: Plan, rank: Rank) -> None:
    """Is there RDMA hardware at all, and may a container reach it?"""
    info = rank.info or {}
    if not rank.rdma:
        if not info.get("pci"):
            result.error(
                "net-unplugged-none",
                rank.name,
                f"{rank.name}: no CX7 functions on PCI and no RDMA device: the QSFP cable is unplugged or the port "
                "was hot-unplugged to save power; the driver is not missing. Plug the cable in at both ends, then "
                "look for enp1s0f0np0 in `ip link`.",
            )
        else:
            result.error(
                "net-no-rdma",
                rank.name,
                f"{rank.name}: {len(info['pci'])} CX7 functions on PCI ({', '.join(info['pci'])}), but no RDMA "
                "device: mlx5_ib is not loaded. Run `modprobe mlx5_ib` and look at `dmesg | grep mlx5`.",
            )
        return
    if not any(name.startswith("uverbs") for name in info.get("device_nodes") or []):
        result.error(
            "net-tcp-fallback",
            rank.name,
            f"{rank.name}: RDMA devices exist, but /dev/infiniband has no uverbs node, so NCCL would fall back to "
            "TCP (about ten times slower). Run `modprobe ib_uverbs`.",
        )


def _used(result: Plan, rank: Rank) -> list[str]:
    return list(dict.fromkeys(rail.interface for rail in result.rails.get(rank.name, [])))


def shared_prefix(result: Plan, rank: Rank) -> None:
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
        result.warning(
            "net-same-subnet",
            rank.name,
            f"{rank.name}: {rank.shown(one)} and {rank.shown(two)} are in one subnet, so the kernel may send from "
            f"the wrong one and an all-reduce hangs{seen}. Give each rail a subnet of its own.",
        )


def persistent(result: Plan, rank: Rank) -> None:
    live = [
        f"{item['address']}/{item['prefix']} on {name}"
        for name in _used(result, rank)
        for item in rank.addresses(name)
        if (item.get("persistent") or {}).get("defined") is False
    ]
    if live:
        result.warning(
            "net-ip-not-persistent",
            rank.name,
            f"{rank.name}: {' and '.join(live)} {'is' if len(live) == 1 else 'are'} only live: no netplan, NetworkManager or "
            "networkd file defines it, so it is gone after a reboot. Write it down, or set fabric_configure: true.",
        )


def firewall(result: Plan, rank: Rank) -> None:
    for rail in result.rails.get(rank.name, []):
        if not _fabric.ufw_admits((rank.info or {}).get("ufw"), rail.peer_address, rail.interface):
            result.warning(
                "net-firewall",
                rank.name,
                f"{rank.name}: ufw is active, denies incoming connections and has no rule that admits every port "
                f"from {rail.peer_address} ({rail.peer}). Engines open random ports: run `ufw allow in on "
                f"{rail.interface} from {rail.network}`.",
            )


def gids(result: Plan, rank: Rank) -> None:
    """Resolve each rail's GID index from this node's own table, and drop or refuse the rails that have none."""
    kept: list[Rail] = []
    for name in rank.hcas:
        if name not in rank.rdma:
            result.error(
                "wrong-hca",
                rank.name,
                f"{rank.name}: fabric_hca names {name}, which does not exist here; found "
                f"{', '.join(rank.rdma) or 'no RDMA device'}. Correct fabric_hca, or remove it.",
            )
    for rail in result.rails.get(rank.name, []):
        if rank.hcas and rail.hca not in rank.hcas:
            if rail.number == 1:
                result.error(
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
            result.error(code, rank.name, text)
        else:
            result.warning(
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


def mtus(result: Plan) -> None:
    """Compare both ends of each rail. A difference stops rail 1 and drops another; 1500 on both ends is only slow."""
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
                result.warning(
                    "net-mtu",
                    node,
                    f"{node}: {rail.interface} has MTU {mine} (RoCE active MTU {_fabric.roce_mtu(mine)}); {JUMBO} on "
                    f"both ends is faster. Run `ip link set {rail.interface} mtu {JUMBO}` on both.",
                )
            kept.append(rail)
        result.rails[node] = kept
