# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a GB10 shows in /sys, as a table: path below /sys to file content or link target. Pure, so that a test can read it.

Values are those of public captures (two core types, acpitz zones, ConnectX-7 functions with two rails, GID tables of which
one holds the RoCE v2 IPv4 entry at index 3 and the other at 4). Kernel validation is not imitated: a fake file takes any value.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from typing import Any

FAST_CPUS = (*range(5, 10), *range(15, 20))
CPUS = range(20)
GOVERNORS = "conservative ondemand userspace powersave performance schedutil "
THERMAL_MILLI_CELSIUS = (46800, 45300, 47100, 46200, 44900, 45800, 46500)
GID_SLOTS = 16
ZERO_GID = "0000:0000:0000:0000:0000:0000:0000:0000"
COUNTERS = (
    "port_rcv_errors",
    "port_xmit_discards",
    "symbol_error",
    "link_error_recovery",
    "link_downed",
    "port_rcv_data",
    "port_xmit_data",
)
HW_COUNTERS = (
    "out_of_sequence",
    "packet_seq_err",
    "local_ack_timeout_err",
    "rnr_nak_retry_err",
    "roce_adp_retrans",
    "rx_icrc_encapsulated",
)


@dataclass(frozen=True)
class Link:
    """A symbolic link; `target` is relative to the link's own folder, as sysfs has it."""

    target: str


Entry = str | Link
Tree = dict[str, Entry]


@dataclass(frozen=True)
class Rail:
    """One PCIe function of the ConnectX-7: a netdev and an RDMA device."""

    interface: str
    hca: str
    pci: str
    address: str | None = None
    gid_index: int = 3
    port: int = 0

    @property
    def active(self) -> bool:
        return self.address is not None


@dataclass(frozen=True)
class Node:
    """One stand-in node, as the role describes it in node.json."""

    name: str
    management_interface: str
    management_address: str
    rails: tuple[Rail, ...] = field(default=())
    light: bool = False

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Node:
        return cls(
            name=data["name"],
            management_interface=data["management"]["interface"],
            management_address=data["management"]["address"],
            rails=tuple(Rail(**rail) for rail in data.get("rails", [])),
            light=bool(data.get("light", False)),
        )


def mapped_gid(address: str) -> str:
    """GID of an IPv4 address as sysfs prints it: 198.51.100.11 -> 0000:...:ffff:c633:640b."""
    packed = ipaddress.IPv4Address(address).packed
    return f"0000:0000:0000:0000:0000:ffff:{packed[:2].hex()}:{packed[2:].hex()}"


def gid_table(rail: Rail, seed: int) -> list[tuple[str, str | None]]:
    """(GID, type) per index. With `gid_index` 4 a second, stable-privacy IPv6 entry stands before the IPv4 one of RoCE v2."""
    local = f"fe80:0000:0000:0000:0000:00ff:fe00:{seed:04x}"
    table: list[tuple[str, str | None]] = [(local, "IB/RoCE v1"), (local, "RoCE v2")]
    if rail.address is not None:
        own = mapped_gid(rail.address)
        table.append((own, "IB/RoCE v1"))
        for spare in range(len(table), rail.gid_index):
            table.append((f"fe80:0000:0000:0000:a1b2:{spare:04x}:fe00:{seed:04x}", "RoCE v2"))
        table.append((own, "RoCE v2"))
    table += [(ZERO_GID, None)] * (GID_SLOTS - len(table))
    return table


def cpu_tree() -> Tree:
    """cpufreq, one policy per CPU: Cortex-A725 on 0-4 and 10-14 (cpu0 is a slow one), Cortex-X925 on 5-9 and 15-19."""
    tree: Tree = {}
    for cpu in CPUS:
        fast = cpu in FAST_CPUS
        low, high = ("1378000", "3900000") if fast else ("338000", "2808000")
        policy = f"devices/system/cpu/cpufreq/policy{cpu}"
        values = {
            "affected_cpus": str(cpu),
            "related_cpus": str(cpu),
            "cpuinfo_min_freq": low,
            "cpuinfo_max_freq": high,
            "cpuinfo_transition_latency": "4294967295",
            "scaling_min_freq": low,
            "scaling_max_freq": high,
            "scaling_cur_freq": high,
            "scaling_driver": "cppc_cpufreq",
            "scaling_governor": "performance",
            "scaling_available_governors": GOVERNORS,
            "scaling_setspeed": "<unsupported>",
            "auto_select": "1",
        }
        tree |= {f"{policy}/{name}": f"{value}\n" for name, value in values.items()}
        own = f"devices/system/cpu/cpu{cpu}"
        tree[f"{own}/cpufreq"] = Link(f"../cpufreq/policy{cpu}")
        tree[f"{own}/cpu_capacity"] = "1024\n" if fast else "718\n"
        tree[f"{own}/regs/identification/midr_el1"] = f"0x00000000410f{'d85' if fast else 'd87'}1\n"
    return tree


def thermal_tree() -> Tree:
    """Seven zones which all call themselves acpitz."""
    tree: Tree = {}
    for zone, value in enumerate(THERMAL_MILLI_CELSIUS):
        base = f"devices/virtual/thermal/thermal_zone{zone}"
        tree[f"{base}/type"] = "acpitz\n"
        tree[f"{base}/temp"] = f"{value}\n"
        tree[f"{base}/mode"] = "enabled\n"
        tree[f"{base}/policy"] = "step_wise\n"
        tree[f"class/thermal/thermal_zone{zone}"] = Link(f"../../{base}")
    return tree


def dmi_tree() -> Tree:
    """Identity of an NVIDIA DGX Spark; OEM twins differ in these fields only."""
    values = {
        "sys_vendor": "NVIDIA",
        "product_name": "NVIDIA_DGX_Spark",
        "product_family": "DGX Spark",
        "product_version": "A.5",
        "board_vendor": "NVIDIA",
        "board_name": "P4242",
        "bios_vendor": "NVIDIA",
        "bios_version": "5.36_0ACUM018",
        "chassis_vendor": "NVIDIA",
    }
    tree: Tree = {f"devices/virtual/dmi/id/{name}": f"{value}\n" for name, value in values.items()}
    tree["class/dmi/id"] = Link("../../devices/virtual/dmi/id")
    return tree


def rail_tree(rail: Rail, number: int) -> Tree:
    """One ConnectX-7 function: PCI device, driver, netdev link, RDMA device with its GID table, verbs device."""
    domain_root = f"devices/pci{rail.pci[:4]}:00/{rail.pci[:4]}:00:00.0"
    pci = f"{domain_root}/{rail.pci}"
    hca = f"{pci}/infiniband/{rail.hca}"
    port = f"{hca}/ports/1"
    tree: Tree = {}
    for name, value in {
        "vendor": "0x15b3",
        "device": "0x1021",
        "subsystem_vendor": "0x15b3",
        "subsystem_device": "0x0091",
        "class": "0x020000",
        "revision": "0x00",
        "current_link_speed": "32.0 GT/s PCIe",
        "max_link_speed": "32.0 GT/s PCIe",
        "current_link_width": "4",
        "max_link_width": "16",
        "numa_node": "-1",
        "aer_dev_correctable": "RxErr 0\nTOTAL_ERR_COR 0",
        "aer_dev_fatal": "TOTAL_ERR_FATAL 0",
        "aer_dev_nonfatal": "TOTAL_ERR_NONFATAL 0",
        "uevent": f"DRIVER=mlx5_core\nPCI_CLASS=20000\nPCI_ID=15B3:1021\nPCI_SLOT_NAME={rail.pci}",
    }.items():
        tree[f"{pci}/{name}"] = f"{value}\n"
    tree[f"{pci}/driver"] = Link("../../../../bus/pci/drivers/mlx5_core")
    tree[f"{pci}/net/{rail.interface}"] = Link(f"../../../../virtual/net/{rail.interface}")
    tree[f"bus/pci/devices/{rail.pci}"] = Link(f"../../../{pci}")
    tree[f"bus/pci/drivers/mlx5_core/{rail.pci}"] = Link(f"../../../../{pci}")
    tree[f"devices/virtual/net/{rail.interface}/device"] = Link(f"../../../{pci.removeprefix('devices/')}")
    tree[f"devices/virtual/net/{rail.interface}/phys_port_name"] = f"p{rail.port}\n"
    tree[f"devices/virtual/net/{rail.interface}/dev_port"] = "0\n"
    tree[f"devices/virtual/net/{rail.interface}/speed"] = "200000\n" if rail.active else "-1\n"
    for name, value in {
        "node_type": "1: CA",
        "node_desc": rail.hca,
        "node_guid": f"0000:00ff:fe00:{number + 1:04x}",
        "sys_image_guid": "0000:00ff:fe00:0001",
        "fw_ver": "28.45.4028",
        "hca_type": "MT4129",
        "board_id": "NVD0000000087",
        "hw_rev": "0",
    }.items():
        tree[f"{hca}/{name}"] = f"{value}\n"
    tree[f"{hca}/device"] = Link("../..")
    tree[f"class/infiniband/{rail.hca}"] = Link(f"../../{hca}")
    tree[f"{pci}/infiniband_verbs/uverbs{number}/ibdev"] = f"{rail.hca}\n"
    tree[f"{pci}/infiniband_verbs/uverbs{number}/device"] = Link("../..")
    tree[f"class/infiniband_verbs/uverbs{number}"] = Link(f"../../{pci}/infiniband_verbs/uverbs{number}")
    for name, value in {
        "state": "4: ACTIVE" if rail.active else "1: DOWN",
        "phys_state": "5: LinkUp" if rail.active else "3: Disabled",
        "rate": "200 Gb/sec (4X HDR)" if rail.active else "40 Gb/sec (4X QDR)",
        "link_layer": "Ethernet",
        "lid": "0x0",
        "sm_lid": "0x0",
        "cap_mask": "0x04010000",
        "pkeys/0": "0xffff",
    }.items():
        tree[f"{port}/{name}"] = f"{value}\n"
    tree |= {f"{port}/counters/{name}": "0\n" for name in COUNTERS}
    tree |= {f"{port}/hw_counters/{name}": "0\n" for name in HW_COUNTERS}
    for index, (gid, kind) in enumerate(gid_table(rail, number + 1)):
        tree[f"{port}/gids/{index}"] = f"{gid}\n"
        if kind is not None:  # an empty slot's type cannot be read on the real one either (EINVAL there, ENOENT here)
            tree[f"{port}/gid_attrs/types/{index}"] = f"{kind}\n"
            tree[f"{port}/gid_attrs/ndevs/{index}"] = f"{rail.interface}\n"
    return tree


def node_tree(node: Node) -> Tree:
    """Everything that a node shows below /sys."""
    tree = cpu_tree() | thermal_tree() | dmi_tree()
    for number, rail in enumerate(node.rails):
        tree |= rail_tree(rail, number)
    if node.rails:
        tree["class/infiniband_verbs/abi_version"] = "6\n"
    return tree
