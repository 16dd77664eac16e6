# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The fabric of a node: what its tools and sysfs say, as values. Pure functions; reading is in ``_sysfs.py``.

A QSFP port of a GB10 is two PCIe x4 functions, hence two netdevs and two RDMA devices: its *rails*.
What a cluster does with them is planned in ``_fabric_plan.py``.
"""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ROCE_V2 = "RoCE v2"
MELLANOX = "0x15b3"
# Address, UDP and RDMA headers that RoCE puts around a message (the kernel's iboe_get_mtu()).
ROCE_HEADERS = 40 + 8 + 12 + 4 + 28 + 4
RDMA_MTUS = (4096, 2048, 1024, 512, 256)
ICMP_HEADERS = 28


# --- GIDs -----------------------------------------------------------------------------------------------------------


def is_zero_gid(gid: str | None) -> bool:
    """An empty entry: rank start dies on it with ``ibv_modify_qp`` errno 61."""
    return not (gid or "").replace(":", "").strip("0")


def gid_ipv4(gid: str | None) -> str | None:
    """``0000:…:ffff:c000:0201`` → ``192.0.2.1``; None for an IPv6 or an empty GID."""
    try:
        mapped = ipaddress.IPv6Address(gid or "").ipv4_mapped
    except ValueError:
        return None
    return str(mapped) if mapped else None


def gid_indexes(gids: Iterable[Mapping[str, Any]], address: str) -> list[int]:
    """Indexes whose GID is ``::ffff:<address>`` of type RoCE v2. Usually 3, but 4, 5 and 6 were seen."""
    return [int(gid["index"]) for gid in gids if gid.get("type") == ROCE_V2 and gid_ipv4(gid.get("gid")) == address]


def gid_table(device: str, gids: Sequence[Mapping[str, Any]]) -> str:
    """One line for an error message: every filled entry of one device."""
    if not gids:
        return f"{device}: every entry is all-zero"
    entries = []
    for gid in gids:
        kind = "v2" if gid.get("type") == ROCE_V2 else "v1"
        shown = gid_ipv4(gid.get("gid")) or str(ipaddress.IPv6Address(str(gid["gid"])))
        entries.append(f"{gid['index']} {shown} {kind}")
    return f"{device}: {', '.join(entries)}"


def roce_mtu(netdev_mtu: int | None) -> int | None:
    """RoCE's active MTU that a netdev MTU allows: 9000 → 4096, 1500 → 1024."""
    if netdev_mtu is None:
        return None
    return next((mtu for mtu in RDMA_MTUS if mtu <= netdev_mtu - ROCE_HEADERS), None)


# --- names and places -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """Where a function sits. Two functions that differ in ``domain`` only are the two rails of one QSFP port."""

    domain: int
    bus: int
    device: int
    function: int


def pci_place(address: str | None) -> Place | None:
    """``0002:01:00.0`` → Place."""
    match = re.fullmatch(r"([0-9a-fA-F]{4,}):([0-9a-fA-F]{2}):([0-9a-fA-F]{2})\.([0-7])", address or "")
    return Place(*(int(part, 16) for part in match.groups())) if match else None


def name_place(name: str) -> Place | None:
    """systemd's predictable name of a PCI netdev, ``enP2p1s0f0np0`` → Place; the last resort where sysfs shows no PCI
    function (a virtual function, a container)."""
    match = re.fullmatch(r"en(?:P(\d+))?p(\d+)s(\d+)(?:f(\d+))?(?:np?\d+|d\d+)?", name)
    return Place(*(int(part or 0) for part in match.groups())) if match else None


def twins(places: Mapping[str, Place | None]) -> dict[str, str]:
    """{netdev: the netdev of the same QSFP port's other PCIe half}."""
    result: dict[str, str] = {}
    for name, place in places.items():
        for other, elsewhere in places.items():
            if place is None or elsewhere is None or name == other or place.domain == elsewhere.domain:
                continue
            if (place.bus, place.device, place.function) == (elsewhere.bus, elsewhere.device, elsewhere.function):
                result[name] = other
    return result


# --- what tools print -----------------------------------------------------------------------------------------------


def parse_rdma_link(text: str) -> list[dict[str, Any]]:
    """``rdma link show``, by field: a line may say ``state DOWN physical_state LINK_UP``. No line: no RDMA device."""
    links = []
    for line in text.splitlines():
        words = line.split()
        if len(words) < 2 or words[0] != "link" or "/" not in words[1]:
            continue
        fields = dict(zip(words[2::2], words[3::2]))  # noqa: B905 - strict= needs nothing here, a trailing word is fine
        device, _slash, port = words[1].rpartition("/")
        links.append(
            {
                "device": device,
                "port": int(port) if port.isdigit() else 1,
                "state": fields.get("state"),
                "physical_state": fields.get("physical_state"),
                "netdev": fields.get("netdev"),
            }
        )
    return links


def port_state(text: str | None) -> str | None:
    """sysfs ``state``/``phys_state`` in the words of ``rdma link``: ``4: ACTIVE`` → ``ACTIVE``, ``5: LinkUp`` → ``LINK_UP``."""
    word = (text or "").partition(":")[2].strip() or (text or "").strip()
    if not word:
        return None
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", word).upper()


def rate_gbit(text: str | None) -> float | None:
    """sysfs ``rate``: ``200 Gb/sec (4X HDR)`` → 200.0"""
    match = re.match(r"([\d.]+)\s*Gb/s", text or "")
    return float(match.group(1)) if match else None


def _json_list(text: str) -> list[dict[str, Any]]:
    try:
        value = json.loads(text or "[]")
    except ValueError:
        return []
    return [item for item in value if isinstance(item, dict) and item] if isinstance(value, list) else []


def parse_ip_addr(text: str) -> dict[str, dict[str, Any]]:
    """``ip -j addr show`` → {netdev: mac, mtu, state, flags, addresses [{address, prefix, dynamic, scope}]}."""
    result: dict[str, dict[str, Any]] = {}
    for link in _json_list(text):
        addresses = [
            {
                "address": item["local"],
                "prefix": int(item["prefixlen"]),
                "dynamic": bool(item.get("dynamic")),
                "scope": item.get("scope"),
            }
            for item in link.get("addr_info") or []
            if item.get("family") == "inet" and item.get("local")
        ]
        result[str(link["ifname"])] = {
            "mac": link.get("address"),
            "mtu": link.get("mtu"),
            "state": link.get("operstate"),
            "carrier": "LOWER_UP" in (link.get("flags") or []),
            "loopback": "LOOPBACK" in (link.get("flags") or []),
            "altnames": list(link.get("altnames") or []),
            "addresses": addresses,
        }
    return result


def parse_route(text: str, error: str = "") -> dict[str, Any]:
    """``ip -j route get PEER`` → {dev, source, gateway, error}. Nothing here needs a default route."""
    for route in _json_list(text):
        return {
            "dev": route.get("dev"),
            "source": route.get("prefsrc") or route.get("from"),
            "gateway": route.get("gateway") or (route.get("via") or {}).get("host"),
            "error": None,
        }
    found = error.strip().splitlines()
    return {"dev": None, "source": None, "gateway": None, "error": found[-1] if found else "no route"}


def parse_ping(text: str, rc: int | None = None) -> dict[str, Any]:
    """iputils' ping: packets sent and received, and the MTU of an interface on the way that was too small."""
    summary = re.search(r"(\d+) packets transmitted, (\d+) (?:packets )?received", text)
    # "ping: local error: message too long, mtu=1500" | "From … Frag needed and DF set (mtu = 1500)"
    small = re.search(r"(?:message too long|Frag needed)[^\n]*?mtu\s*[=:]\s*(\d+)", text, re.IGNORECASE)
    rtt = re.search(r"= [\d.]+/([\d.]+)/", text)
    sent, received = (int(summary.group(1)), int(summary.group(2))) if summary else (0, 0)
    return {
        "ok": received > 0 and rc in (0, None),
        "sent": sent,
        "received": received,
        "mtu": int(small.group(1)) if small else None,
        "rtt_ms": float(rtt.group(1)) if rtt else None,
    }


def parse_ufw(text: str) -> dict[str, Any]:
    """``ufw status verbose`` → {active, incoming, rules [{to, action, source}]}."""
    active = bool(re.search(r"^Status:\s*active\s*$", text, re.MULTILINE))
    default = re.search(r"^Default:\s*(\w+) \(incoming\)", text, re.MULTILINE)
    rules = []
    for line in text.splitlines():
        match = re.match(r"(\S.*?)\s{2,}(ALLOW|DENY|REJECT|LIMIT)(?: IN)?\s{2,}(\S.*?)\s*$", line)
        if match:
            rules.append({"to": match.group(1), "action": match.group(2), "source": match.group(3)})
    return {"active": active, "incoming": default.group(1) if default else None, "rules": rules}


def ufw_admits(ufw: Mapping[str, Any] | None, peer: str, interface: str | None = None) -> bool:
    """Would ufw let a peer reach *any* port? A rule for one port is not enough: engines open random ones."""
    if not ufw or not ufw.get("active") or ufw.get("incoming") == "allow":
        return True
    for rule in ufw.get("rules") or []:
        whole = rule["to"] == "Anywhere" or (interface is not None and rule["to"] == f"Anywhere on {interface}")
        if rule["action"] != "ALLOW" or not whole:
            continue
        source = str(rule["source"]).partition(" on ")[0]
        if source == "Anywhere" or _inside(peer, source):
            return True
    return False


def parse_hca_list(text: str | None) -> tuple[str, list[str]]:
    """NCCL_IB_HCA's grammar: ``[^][=]dev[:port],dev…`` → (prefix ``""|"="|"^"|"^="``, device names)."""
    match = re.match(r"\s*(\^?=?)(.*)", text or "")
    mode, rest = match.groups() if match else ("", "")
    return mode, [item.strip().split(":")[0] for item in rest.split(",") if item.strip()]


# --- definitions that outlast a reboot ------------------------------------------------------------------------------

PERSISTENT_GLOBS = (
    "etc/netplan/*.yaml",
    "etc/NetworkManager/system-connections/*",
    "etc/systemd/network/*.network",
    "etc/network/interfaces",
    "etc/network/interfaces.d/*",
)


def persistence(files: Mapping[str, str | None], interface: str, mac: str | None, address: str) -> dict[str, Any]:
    """Is ``address`` on ``interface`` written down anywhere, or only live?

    ``files``: {path: content, None when it could not be read}. ``defined`` is None when an unreadable file may hold it.
    """
    name = re.compile(rf"(?<![\w.-]){re.escape(interface)}(?![\w-])")
    literal = re.compile(rf"(?<![\d.]){re.escape(address)}(?![\d.])")
    for path, content in files.items():
        if content is None:
            continue
        named = name.search(content) or (mac and mac.lower() in content.lower())
        if named and (
            literal.search(content)
            or re.search(r"dhcp4:\s*(?:true|yes)|method=auto|inet dhcp|DHCP=(?:yes|ipv4)", content)
        ):
            return {"defined": True, "where": path}
    unread = [path for path, content in files.items() if content is None]
    return {"defined": None if unread else False, "where": None}


# --- addresses ------------------------------------------------------------------------------------------------------


def _inside(address: str, network: str) -> bool:
    try:
        return ipaddress.ip_address(address) in ipaddress.ip_network(network, strict=False)
    except ValueError:
        return False


def network_of(address: str, prefix: int) -> str:
    return str(ipaddress.ip_network(f"{address}/{prefix}", strict=False))


def inside(address: str, network: str) -> bool:
    return _inside(address, network)


def overlapping(interfaces: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Pairs of netdevs with addresses in one prefix: the kernel picks one of them for both."""
    held = [
        (name, ipaddress.ip_network(f"{item['address']}/{item['prefix']}", strict=False))
        for name, interface in interfaces.items()
        for item in interface.get("addresses") or []
        if int(item["prefix"]) < 32
    ]
    pairs = {
        (one, two) if one < two else (two, one)
        for index, (one, first) in enumerate(held)
        for two, second in held[index + 1 :]
        if one != two and first.overlaps(second)
    }
    return sorted(pairs)


def common_range(networks: Iterable[str]) -> str | None:
    """The smallest prefix over all rails' subnets for NCCL_IB_ADDR_RANGE; None when it would be wider than /8."""
    nets = [ipaddress.IPv4Network(network) for network in networks]
    if not nets:
        return None
    whole = nets[0]
    while not all(net.subnet_of(whole) for net in nets):
        if whole.prefixlen <= 8:
            return None
        whole = whole.supernet()
    return str(whole)
