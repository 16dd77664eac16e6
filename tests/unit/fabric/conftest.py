"""Recorded forms of tools' output turned into what the modules read on a node: a sysfs tree, and answers of ``ip``.

The recordings lie in tests/fixtures; a file that is not a capture says so in its first line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ansible_collections.gb10.fleet.plugins.module_utils._command import Answer
from ansible_collections.gb10.fleet.plugins.module_utils._fabric_model import Rank
from ansible_collections.gb10.fleet.plugins.module_utils._fabric_plan import plan
from ansible_collections.gb10.fleet.plugins.module_utils._sysfs import Tree
from ansible_collections.gb10.fleet.plugins.modules import fabric_info

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
ZERO = "0000:0000:0000:0000:0000:0000:0000:0000"
PCI = {
    "enp1s0f0np0": "0000:01:00.0",
    "enp1s0f1np1": "0000:01:00.1",
    "enP2p1s0f0np0": "0002:01:00.0",
    "enP2p1s0f1np1": "0002:01:00.1",
}


def case(name: str) -> str:
    return (FIXTURES / "cases" / f"{name}.txt").read_text()


def capture(name: str) -> str:
    return (FIXTURES / "gb10" / f"ref-{name}-gb10.txt").read_text()


def gid_rows(text: str) -> list[dict[str, Any]]:
    """Rows of ``show_gids``: six fields without an IPv4 address, seven with one."""
    rows = []
    for line in text.splitlines():
        words = line.split()
        if len(words) in (6, 7) and words[1].isdigit() and ":" in words[3]:
            kind = {"v1": "IB/RoCE v1", "v2": "RoCE v2"}[words[-2]]
            rows.append(
                {"device": words[0], "index": int(words[2]), "gid": words[3], "type": kind, "netdev": words[-1]}
            )
    return rows


@dataclass
class Netdev:
    name: str
    addresses: Sequence[str] = ()
    mtu: int = 9000
    up: bool = True
    rdma: str | None = None
    state: str = "4: ACTIVE"
    gids: Sequence[Mapping[str, Any]] | None = None
    pci: str | None = None


@dataclass
class Machine:
    """One node to be: its netdevs, and what ``ip route get`` answers."""

    name: str
    netdevs: Sequence[Netdev]
    routes: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    pci: Iterable[str] | None = None


def mapped(address: str) -> str:
    octets = [int(part) for part in address.split(".")]
    return "0000:0000:0000:0000:0000:ffff:" + f"{octets[0]:02x}{octets[1]:02x}:{octets[2]:02x}{octets[3]:02x}"


def usual_gids(address: str | None, index: int = 3) -> list[dict[str, Any]]:
    link_local = "fe80:0000:0000:0000:0000:00ff:fe00:0001"
    table = [{"index": 0, "gid": link_local, "type": "IB/RoCE v1"}, {"index": 1, "gid": link_local, "type": "RoCE v2"}]
    if address:
        table += [
            {"index": index - 1, "gid": mapped(address), "type": "IB/RoCE v1"},
            {"index": index, "gid": mapped(address), "type": "RoCE v2"},
        ]
    return table


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def lay(machine: Machine, root: Path) -> None:
    """Lay a node's sysfs, device and configuration files under ``root``."""
    write(root / "proc/sys/kernel/hostname", machine.name)
    for path, content in machine.files.items():
        write(root / path, content)
    places = list(machine.pci) if machine.pci is not None else []
    for netdev in machine.netdevs:
        (root / "sys/class/net" / netdev.name).mkdir(parents=True, exist_ok=True)
        pci = netdev.pci or PCI.get(netdev.name)
        if pci:
            places.append(pci)
            function = root / "sys/devices" / pci
            function.mkdir(parents=True, exist_ok=True)
            (root / "sys/class/net" / netdev.name / "device").symlink_to(f"../../../devices/{pci}")
            write(root / "sys/class/net" / netdev.name / "speed", "200000" if netdev.up else "-1")
        if netdev.rdma is None:
            continue
        first = (netdev.addresses[0] if netdev.addresses else "").partition("/")[0] or None
        hca = root / "sys/class/infiniband" / netdev.rdma
        (hca / "device/net" / netdev.name).mkdir(parents=True, exist_ok=True)
        port = hca / "ports/1"
        write(port / "state", netdev.state)
        write(port / "phys_state", "5: LinkUp" if netdev.up else "3: Disabled")
        write(port / "rate", "200 Gb/sec (4X HDR)")
        table = {int(gid["index"]): gid for gid in (usual_gids(first) if netdev.gids is None else netdev.gids)}
        for index in range(16):
            gid = table.get(index, {"gid": ZERO})
            write(port / "gids" / str(index), gid["gid"])
            if "type" in gid:  # the type of an empty entry cannot be read: EINVAL on the real one
                write(port / "gid_attrs/types" / str(index), gid["type"])
                write(port / "gid_attrs/ndevs" / str(index), netdev.name)
        write(root / "dev/infiniband/uverbs0", "")
    for pci in places:
        write(root / "sys/bus/pci/devices" / pci / "vendor", "0x15b3")
        write(root / "sys/bus/pci/devices" / pci / "class", "0x020000")


def ip_addr(machine: Machine) -> str:
    links: list[dict[str, Any]] = [
        {"ifname": "lo", "flags": ["LOOPBACK", "UP", "LOWER_UP"], "mtu": 65536, "addr_info": []}
    ]
    for netdev in machine.netdevs:
        info = []
        for item in netdev.addresses:
            local, _slash, prefix = item.partition("/")
            info.append({"family": "inet", "local": local, "prefixlen": int(prefix), "scope": "global"})
        flags = ["BROADCAST", "MULTICAST", "UP"] + (["LOWER_UP"] if netdev.up else ["NO-CARRIER"])
        links.append(
            {
                "ifname": netdev.name,
                "flags": flags,
                "mtu": netdev.mtu,
                "operstate": "UP" if netdev.up else "DOWN",
                "addr_info": info,
            }
        )
    return json.dumps(links)


class Nodes:
    """Reads machines with the real module code, and plans their fabric."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tmp_path, self.monkeypatch, self.count = tmp_path, monkeypatch, 0

    def read(self, machine: Machine, peers: Sequence[str] = ()) -> dict[str, Any]:
        self.count += 1
        root = self.tmp_path / f"{self.count}-{machine.name}"
        lay(machine, root)

        def answer(argv: Sequence[str], _timeout_s: float = 10, _stdin: str | None = None) -> Answer:
            words = tuple(argv)
            if words[:4] == ("ip", "-j", "addr", "show"):
                return Answer(words, 0, ip_addr(machine))
            if words[:4] == ("ip", "-j", "route", "get"):
                key = " from ".join((words[4], *words[6:7]))
                dev = machine.routes.get(key) or machine.routes.get(words[4])
                if dev is None:
                    return Answer(words, 2, "", "RTNETLINK answers: Network is unreachable")
                return Answer(words, 0, json.dumps([{"dst": words[4], "dev": dev, "prefsrc": "x", "flags": []}]))
            return Answer(words, None, missing=True, err=f"{words[0]}: not found")

        self.monkeypatch.setattr(fabric_info, "run", answer)
        info = fabric_info.FabricReader(Tree(root), list(peers)).read()
        return dict(json.loads(json.dumps(info)))

    def ranks(self, *machines: Machine, addresses: Sequence[str], **declared: Mapping[str, Any]) -> list[Rank]:
        ranks = []
        for machine, address in zip(machines, addresses, strict=True):
            peers = [other for other in addresses if other != address]
            extra = declared.get(machine.name.replace("-", "_"), {})
            ranks.append(
                Rank(
                    machine.name, address, self.read(machine, peers), management=f"198.18.0.{len(ranks) + 11}", **extra
                )
            )
        return ranks

    def plan(
        self, *machines: Machine, addresses: Sequence[str], transport: str = "roce", **declared: Mapping[str, Any]
    ) -> Any:
        return plan(self.ranks(*machines, addresses=addresses, **declared), transport)


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Nodes:
    return Nodes(tmp_path, monkeypatch)


def spark(number: int, index: int = 3, **changes: Any) -> Machine:
    """A healthy node of a pair: both rails of QSFP port 0, one subnet each. ``changes``: rail1/rail2 fields, routes, files."""
    one, two = f"192.0.2.{number}", f"198.51.100.{number}"
    rail1: dict[str, Any] = {
        "addresses": [f"{one}/24"],
        "rdma": "rocep1s0f0",
        "gids": usual_gids(one, index),
        **changes.get("rail1", {}),
    }
    rail2: dict[str, Any] = {
        "addresses": [f"{two}/24"],
        "rdma": "roceP2p1s0f0",
        "gids": usual_gids(two, index),
        **changes.get("rail2", {}),
    }
    other = 3 - number
    return Machine(
        f"spark-0{number}",
        [
            Netdev("enP7s7", ["203.0.113.1/24"], mtu=1500),
            Netdev("enp1s0f0np0", **rail1),
            Netdev("enP2p1s0f0np0", **rail2),
        ],
        changes.get("routes", {f"192.0.2.{other}": "enp1s0f0np0", f"198.51.100.{other}": "enP2p1s0f0np0"}),
        changes.get("files", {"etc/netplan/60-fabric.yaml": f"enp1s0f0np0: [{one}/24]\nenP2p1s0f0np0: [{two}/24]"}),
    )


PAIR = ("192.0.2.1", "192.0.2.2")


def texts(findings: Iterable[Any], severity: str | None = None, code: str | None = None) -> list[str]:
    return [f.text for f in findings if severity in (None, f.severity) and code in (None, f.code)]


def section(text: str, start: str, end: str | None = None) -> str:
    """Lines of a recorded file after the one that matches ``start``, up to the one that matches ``end``."""
    lines = text.splitlines()
    first = next(i for i, line in enumerate(lines) if re.search(start, line)) + 1
    last = next((i for i in range(first, len(lines)) if end and re.search(end, lines[i])), len(lines))
    return "\n".join(lines[first:last])


@pytest.fixture
def kit() -> Any:
    """The helpers above by name: test modules cannot import a conftest."""

    class Kit:
        pass

    helpers: dict[str, Callable[..., Any] | type | Any] = {
        name: globals()[name]
        for name in (
            "case",
            "capture",
            "gid_rows",
            "Netdev",
            "Machine",
            "mapped",
            "usual_gids",
            "spark",
            "PAIR",
            "texts",
            "section",
        )
    }
    for name, value in helpers.items():
        setattr(Kit, name, staticmethod(value) if callable(value) and not isinstance(value, type) else value)
    return Kit
