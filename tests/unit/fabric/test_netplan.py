"""The netplan file, what is not live of it, and the program that rolls back."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from ansible_collections.gb10.fleet.plugins.module_utils import _fabric, _netplan

ADDRESSES = {"enp1s0f0np0": "192.0.2.1/24", "enP2p1s0f0np0": "198.51.100.1/24"}
PROGRAM = Path(__file__).resolve().parents[3] / "roles/fabric/files/netplan_rollback.py"


def test_net_ip_not_persistent_is_cured_by_the_file(kit: Any) -> None:
    """The case's own netplan has both rails; ours has them too, with MTU 9000 and without link-local addresses."""
    case = yaml.safe_load(
        next(line for line in kit.case("net-ip-not-persistent").splitlines() if line.startswith("network:"))
    )
    assert set(case["network"]["ethernets"]) == {"enp1s0f1np1", "enP2p1s0f1np1"}
    text = _netplan.render(ADDRESSES, 9000)
    ethernets = yaml.safe_load(text)["network"]["ethernets"]
    assert ethernets["enp1s0f0np0"] == {
        "addresses": ["192.0.2.1/24"],
        "mtu": 9000,
        "dhcp4": False,
        "dhcp6": False,
        "link-local": [],
        "optional": True,
    }
    files = {"etc/netplan/60-gb10-fabric.yaml": text}
    assert _fabric.persistence(files, "enP2p1s0f0np0", None, "198.51.100.1")["defined"] is True


@pytest.mark.parametrize(
    ("addresses", "mtu", "words"),
    [
        ({}, 9000, "fabric_addresses is empty"),
        (
            {"enp1s0f0np0": "192.0.2.1"},
            9000,
            "enp1s0f0np0 is given '192.0.2.1', wanted an IPv4 address with its prefix",
        ),
        ({"enp1s0f0np0": "fe80::1/64"}, 9000, "wanted an IPv4 address with its prefix"),
        (
            {"enp1s0f0np0": "192.0.2.1/24", "enP2p1s0f0np0": "192.0.2.2/24"},
            9000,
            "addresses in one subnet (192.0.2.0/24)",
        ),
        ({"a b": "192.0.2.1/24"}, 9000, "'a b' is no interface name"),
        (ADDRESSES, 65000, "fabric_mtu is 65000, wanted 1280 to 9216"),
    ],
)
def test_what_is_refused(addresses: dict[str, str], mtu: int, words: str) -> None:
    with pytest.raises(_netplan.NetplanError) as error:
        _netplan.render(addresses, mtu)
    assert words in str(error.value)


def test_what_is_not_live_yet() -> None:
    live = {
        "enp1s0f0np0": {"mtu": 1500, "addresses": [{"address": "192.0.2.1", "prefix": 24}]},
        "enP2p1s0f0np0": {"mtu": 9000, "addresses": []},
    }
    assert _netplan.missing(ADDRESSES, 9000, live) == [
        "enP2p1s0f0np0 has no address, wanted 198.51.100.1/24",
        "enp1s0f0np0 has MTU 1500, wanted 9000",
    ]
    assert _netplan.missing({"eth9": "192.0.2.1/24"}, 9000, live) == ["eth9 does not exist"]


@pytest.mark.parametrize("content", ["network: {version: 2}\n", None])
def test_the_rollback_program(tmp_path: Path, content: str | None) -> None:
    """It puts the former file back (or none), applies it, leaves a receipt and does it only once."""
    spec = importlib.util.spec_from_file_location("netplan_rollback", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    netplan = tmp_path / "netplan"
    netplan.write_text(f"#!/bin/sh\necho $1 >> {tmp_path}/calls\n")
    netplan.chmod(0o755)
    path, state, receipt = tmp_path / "60.yaml", tmp_path / "rollback.json", tmp_path / "rolled-back.json"
    path.write_text("new")
    state.write_text(json.dumps({"path": str(path), "content": content, "receipt": str(receipt)}))
    assert program.roll_back(state, str(netplan)) == 0
    assert (path.read_text() if path.exists() else None) == content
    assert json.loads(receipt.read_text())["rc"] == 0
    assert program.roll_back(state, str(netplan)) == 0
    assert (tmp_path / "calls").read_text() == "apply\n"
