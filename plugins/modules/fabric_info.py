#!/usr/bin/python
# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

DOCUMENTATION = r"""
module: fabric_info
short_description: Read the CX7 fabric of a node
version_added: "0.1.0"
description:
  - Reads what a node knows about its fabric - netdevs, RDMA devices, PCI functions, the QSFP port that each belongs to
    and the twin rail of that port, link states, MTUs, the whole GID table, error counters, and which interface and
    source address routes to each peer.
  - Nothing is matched by name where sysfs says it - RDMA devices may be called C(rocep1s0f0) or C(mlx5_0).
  - Needs no privilege. With root, or where C(sudo) needs no password, it also tells whether an address is written down
    for the next boot or is only live.
author:
  - The gb10.fleet maintainers (@gb10-fleet)
extends_documentation_fragment:
  - gb10.fleet.attributes
  - gb10.fleet.attributes.read_only
options:
  peers:
    description: Fabric addresses of the other ranks. The route to each is read.
    type: list
    elements: str
    default: []
  listen_s:
    description:
      - Leave a TCP listener behind on a random high port for so many seconds, for M(gb10.fleet.fabric_probe) on the peers. It tells
        each caller the address that it sees, and ends by itself. V(0) for none.
    type: int
    default: 0
  root:
    description: Root of the C(/sys), C(/proc) and C(/etc) trees to read. For tests and for captured trees.
    type: path
    default: /
"""

EXAMPLES = r"""
- name: Read the fabric of this node
  gb10.fleet.fabric_info:
    peers: [198.51.100.12]
  register: fabric_report

- name: Show the rails and their twins
  ansible.builtin.debug:
    msg: "{{ fabric_report.fabric.interfaces | dict2items | map(attribute='key') }}"
"""

RETURN = r"""
port:
  description: Port of the listener that was left behind.
  returned: O(listen_s) is not V(0)
  type: int
  sample: 41233
fabric:
  description: The fabric of this node.
  returned: success
  type: dict
  contains:
    hostname:
      description: Host name of the node.
      type: str
    interfaces:
      description:
        - Netdevs that have an address or an RDMA device, by name - C(mac), C(mtu), C(state), C(carrier), C(speed_mbit),
          C(pci) address, QSFP C(port) number, C(twin) netdev of the same port, C(rdma) device names, IPv4 C(addresses)
          with C(prefix), C(dynamic) and C(persistent) (C(defined) true, false or null for unknown, and C(where)).
      type: dict
    rdma:
      description:
        - RDMA devices by name - C(netdevs), C(state), C(physical_state), C(rate_gbit), C(active_mtu), C(gids) (filled
          entries only, an index that is missing is all-zero), C(gid_entries) (size of the table) and C(counters).
      type: dict
    pci:
      description: PCI addresses of Mellanox network functions. Empty on a GB10 whose QSFP ports are unplugged.
      type: list
      elements: str
    routes:
      description: By peer - C(dev), C(source), C(gateway), and C(error) where there is no route.
      type: dict
    source_routes:
      description: Where two interfaces share a prefix, the interface that the kernel takes per source address.
      type: list
      elements: dict
    device_nodes:
      description: Names in C(/dev/infiniband).
      type: list
      elements: str
    ufw:
      description: State, default and rules of ufw. Null when ufw is absent, inactive or unreadable.
      type: dict
  sample:
    hostname: spark-01
    interfaces:
      enp1s0f0np0:
        mac: "02:00:00:00:00:98"
        mtu: 9000
        state: UP
        carrier: true
        speed_mbit: 200000
        pci: "0000:01:00.0"
        port: 0
        twin: enP2p1s0f0np0
        rdma: [rocep1s0f0]
        addresses:
          - {address: 198.51.100.11, prefix: 25, dynamic: false, persistent: {defined: true, where: etc/netplan/60-fabric.yaml}}
    pci: ["0000:01:00.0", "0002:01:00.0"]
    routes:
      198.51.100.12: {dev: enp1s0f0np0, source: 198.51.100.11, gateway: null, error: null}
    source_routes: []
    device_nodes: [rdma_cm, uverbs0, uverbs1]
    ufw: null
"""

import json
import re
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.gb10.fleet.plugins.module_utils import _fabric
from ansible_collections.gb10.fleet.plugins.module_utils._command import run
from ansible_collections.gb10.fleet.plugins.module_utils._listener import leave_behind
from ansible_collections.gb10.fleet.plugins.module_utils._sysfs import Privilege, Tree

COUNTERS = {
    "counters": ("port_rcv_errors", "port_xmit_discards", "symbol_error", "link_downed", "link_error_recovery"),
    "hw_counters": (
        "out_of_sequence",
        "packet_seq_err",
        "local_ack_timeout_err",
        "rnr_nak_retry_err",
        "roce_adp_retrans",
    ),
}


class FabricReader:
    """Reads one node. ``read()`` returns the module's ``fabric`` value."""

    def __init__(self, tree: Tree, peers: list[str], privilege: Privilege | None = None) -> None:
        self.tree = tree
        self.peers = peers
        self.privilege = privilege or Privilege()

    def read(self) -> dict[str, Any]:
        interfaces = _fabric.parse_ip_addr(run(["ip", "-j", "addr", "show"]).out)
        rdma = self.rdma()
        self.join(interfaces, rdma)
        kept = {
            name: interface
            for name, interface in interfaces.items()
            if not interface["loopback"] and (interface["addresses"] or interface["rdma"])
        }
        return {
            "hostname": self.tree.text("proc/sys/kernel/hostname") or "",
            "interfaces": kept,
            "rdma": rdma,
            "pci": self.pci(),
            "routes": {peer: self.route(peer) for peer in self.peers},
            "source_routes": self.source_routes(kept),
            "device_nodes": self.tree.names("dev/infiniband"),
            "ufw": self.ufw(),
        }

    # --- RDMA ---

    def rdma(self) -> dict[str, dict[str, Any]]:
        links: list[dict[str, Any]] | None = None
        devices = {}
        for name in self.tree.names("sys/class/infiniband"):
            base = f"sys/class/infiniband/{name}"
            port = f"{base}/ports/1"
            netdevs = self.tree.names(base, "device/net")
            gids, entries = self.gids(port)
            if not netdevs:  # soft RoCE, and drivers that do not link their netdev
                if links is None:
                    links = _fabric.parse_rdma_link(run(["rdma", "link", "show"]).out)
                netdevs = [str(link["netdev"]) for link in links if link["device"] == name and link["netdev"]]
            devices[name] = {
                "netdevs": netdevs,
                "pci": self.tree.link_name(base, "device"),
                "state": _fabric.port_state(self.tree.text(port, "state")),
                "physical_state": _fabric.port_state(self.tree.text(port, "phys_state")),
                "rate_gbit": _fabric.rate_gbit(self.tree.text(port, "rate")),
                "gids": gids,
                "gid_entries": entries,
                "counters": self.counters(port),
            }
        return devices

    def gids(self, port: str) -> tuple[list[dict[str, Any]], int]:
        """Filled entries and the size of the table. Types of empty entries are not asked for: they answer EINVAL."""
        indexes = sorted(int(name) for name in self.tree.names(port, "gids") if name.isdigit())
        found = []
        for index in indexes:
            gid = self.tree.text(port, "gids", str(index))
            if _fabric.is_zero_gid(gid):
                continue
            found.append(
                {
                    "index": index,
                    "gid": gid,
                    "type": self.tree.text(port, "gid_attrs/types", str(index)),
                    "netdev": self.tree.text(port, "gid_attrs/ndevs", str(index)),
                }
            )
        return found, len(indexes)

    def counters(self, port: str) -> dict[str, int]:
        values = {}
        for folder, names in COUNTERS.items():
            for name in names:
                value = self.tree.number(port, folder, name)
                if value:
                    values[name] = value
        return values

    # --- netdevs ---

    def join(self, interfaces: dict[str, dict[str, Any]], rdma: dict[str, dict[str, Any]]) -> None:
        """Add to each netdev its PCI function, port, twin, RDMA devices and whether its addresses are written down."""
        places: dict[str, _fabric.Place | None] = {}
        for name, interface in interfaces.items():
            pci = self.tree.link_name("sys/class/net", name, "device")
            place = _fabric.pci_place(pci)
            interface["pci"] = pci if place else None
            speed = self.tree.number("sys/class/net", name, "speed")
            interface["speed_mbit"] = speed if speed and speed > 0 else None
            interface["rdma"] = self.rdma_of(name, rdma)
            if interface["rdma"]:
                places[name] = place or _fabric.name_place(name)
            interface["port"] = self.port_of(name, places.get(name))
        for name, twin in _fabric.twins(places).items():
            interfaces[name]["twin"] = twin
        files: dict[str, str | None] | None = None
        for name, interface in interfaces.items():
            interface.setdefault("twin", None)
            for device in interface["rdma"]:
                rdma[device]["active_mtu"] = _fabric.roce_mtu(interface["mtu"])
            if not interface["rdma"]:
                continue
            for item in interface["addresses"]:
                files = self.definitions() if files is None else files
                item["persistent"] = _fabric.persistence(files, name, interface["mac"], item["address"])

    def rdma_of(self, name: str, rdma: dict[str, dict[str, Any]]) -> list[str]:
        """Devices of a netdev: its own, those whose GIDs name it (VLAN, bond), or those of the netdevs under it."""
        own = [device for device, facts in rdma.items() if name in facts["netdevs"]]
        if own:
            return own
        named = [device for device, facts in rdma.items() if any(gid["netdev"] == name for gid in facts["gids"])]
        lower = [entry[6:] for entry in self.tree.names("sys/class/net", name) if entry.startswith("lower_")]
        return named or [device for under in lower for device, facts in rdma.items() if under in facts["netdevs"]]

    def port_of(self, name: str, place: _fabric.Place | None) -> int | None:
        match = re.fullmatch(r"p(\d+)", self.tree.text("sys/class/net", name, "phys_port_name") or "")
        if match:
            return int(match.group(1))
        return place.function if place else None

    def definitions(self) -> dict[str, str | None]:
        """Network definitions that outlast a reboot. A folder that we may not list counts as one unread file."""
        found: dict[str, str | None] = {}
        for pattern in _fabric.PERSISTENT_GLOBS:
            folder = pattern.rpartition("/")[0]
            paths = sorted(self.tree.root.glob(pattern))
            for path in paths:
                if path.is_file():
                    found[str(path.relative_to(self.tree.root))] = self.privilege.text(path)
            if not paths and self.tree.exists(folder) and not _readable(self.tree, folder):
                found[folder] = None
        return found

    def pci(self) -> list[str]:
        found = []
        for address in self.tree.names("sys/bus/pci/devices"):
            base = f"sys/bus/pci/devices/{address}"
            kind = self.tree.text(base, "class") or ""
            if self.tree.text(base, "vendor") == _fabric.MELLANOX and kind.startswith("0x02"):
                found.append(address)
        return found

    # --- routes, firewall ---

    def route(self, peer: str, source: str | None = None) -> dict[str, Any]:
        answer = run(["ip", "-j", "route", "get", peer, *(["from", source] if source else [])])
        return _fabric.parse_route(answer.out, answer.err)

    def source_routes(self, interfaces: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
        """Only where two RDMA netdevs, or one and another, share a prefix: what the kernel takes per source address."""
        shared = {name for pair in _fabric.overlapping(interfaces) for name in pair}
        if not any(interfaces[name]["rdma"] for name in shared):
            return []
        return [
            {
                "peer": peer,
                "interface": name,
                "source": item["address"],
                "dev": self.route(peer, item["address"])["dev"],
            }
            for peer in self.peers
            for name in sorted(shared)
            for item in interfaces[name]["addresses"]
        ]

    def ufw(self) -> dict[str, Any] | None:
        """ufw takes 0.2 s to answer: it is asked only where its own switch is on."""
        if not re.search(r"^ENABLED=yes", self.tree.text("etc/ufw/ufw.conf") or "", re.MULTILINE):
            return None
        answer = self.privilege.run(["ufw", "status", "verbose"])
        return _fabric.parse_ufw(answer.out) if answer.ok else None


def _readable(tree: Tree, folder: str) -> bool:
    try:
        next(tree.path(folder).iterdir(), None)
    except OSError:
        return False
    return True


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "peers": {"type": "list", "elements": "str", "default": []},
            "listen_s": {"type": "int", "default": 0},
            "root": {"type": "path", "default": "/"},
        },
        supports_check_mode=True,
    )
    reader = FabricReader(Tree(module.params["root"]), module.params["peers"])
    result: dict[str, Any] = {"changed": False}
    try:
        result["fabric"] = json.loads(json.dumps(reader.read()))
        if module.params["listen_s"]:
            result["port"] = leave_behind(module.params["listen_s"])
    except (OSError, ValueError) as error:
        module.fail_json(msg=f"The fabric of this node cannot be read: {error}")
    module.exit_json(**result)


if __name__ == "__main__":
    main()
