"""What tools print, by recorded output."""

from __future__ import annotations

from typing import Any

import pytest

from ansible_collections.gb10.fleet.plugins.module_utils import _fabric


def test_net_rdma_parse(kit: Any) -> None:
    """A public test suite's trap: LINK_UP also stands on DOWN lines."""
    links = _fabric.parse_rdma_link(kit.case("net-rdma-parse"))
    assert [(link["device"], link["state"], link["netdev"]) for link in links] == [
        ("rocep1s0f0", "DOWN", "enp1s0f0np0"),
        ("rocep1s0f1", "ACTIVE", "enp1s0f1np1"),
        ("roceP2p1s0f0", "DOWN", "enP2p1s0f0np0"),
        ("roceP2p1s0f1", "ACTIVE", "enP2p1s0f1np1"),
    ]
    assert links[2]["physical_state"] == "LINK_UP"
    assert _fabric.parse_rdma_link("") == []


def test_rdma_link_of_a_gb10(kit: Any) -> None:
    links = _fabric.parse_rdma_link(kit.capture("rdma-link"))
    assert [link["device"] for link in links if link["state"] == "ACTIVE"] == ["rocep1s0f0", "roceP2p1s0f0"]


@pytest.mark.parametrize(
    ("text", "state"),
    [("4: ACTIVE", "ACTIVE"), ("1: DOWN", "DOWN"), ("5: LinkUp", "LINK_UP"), ("3: Disabled", "DISABLED"), (None, None)],
)
def test_sysfs_states_in_the_words_of_rdma_link(text: str | None, state: str | None) -> None:
    assert _fabric.port_state(text) == state


def test_gids_of_a_gb10(kit: Any) -> None:
    rows = [row for row in kit.gid_rows(kit.capture("show_gids")) if row["device"] == "rocep1s0f0"]
    assert _fabric.gid_indexes(rows, "192.0.2.10") == [3]
    assert _fabric.gid_table("rocep1s0f0", rows) == (
        "rocep1s0f0: 0 fe80::ff:fe00:1 v1, 1 fe80::ff:fe00:1 v2, 2 192.0.2.10 v1, 3 192.0.2.10 v2"
    )


def test_net_mtu_active_mtu_of_both_ends(kit: Any) -> None:
    """MTU 9000 gave active_mtu 4096, MTU 1500 gave 1024 (tonyd2wild …Vision-Exp…#40)."""
    assert "mtu 9000   rocep1s0f0 active_mtu: 4096" in kit.case("net-mtu")
    assert "mtu 1500   rocep1s0f0 active_mtu: 1024" in kit.case("net-mtu")
    assert (_fabric.roce_mtu(9000), _fabric.roce_mtu(1500)) == (4096, 1024)


def test_net_mtu_ping_of_both_ends(kit: Any) -> None:
    text = kit.case("net-mtu")
    small_side = next(line for line in text.splitlines() if "local error" in line)
    large_side = next(line for line in text.splitlines() if "packets transmitted" in line)
    assert _fabric.parse_ping(small_side, 1) == {"ok": False, "sent": 0, "received": 0, "mtu": 1500, "rtt_ms": None}
    assert _fabric.parse_ping(large_side, 1)["ok"] is False
    good = "2 packets transmitted, 2 received, 0% packet loss, time 201ms\nrtt min/avg/max/mdev = 0.060/0.083/0.106/0.023 ms"
    assert _fabric.parse_ping(good, 0) == {"ok": True, "sent": 2, "received": 2, "mtu": None, "rtt_ms": 0.083}


def test_net_firewall_rule_for_one_port_is_not_enough(kit: Any) -> None:
    ufw = _fabric.parse_ufw(kit.case("net-firewall"))
    assert (ufw["active"], ufw["incoming"]) == (True, "deny")
    assert not _fabric.ufw_admits(ufw, "192.0.2.2", "enp1s0f0np0")
    whole = {"to": "Anywhere on enp1s0f0np0", "action": "ALLOW", "source": "192.0.2.0/24"}
    assert _fabric.ufw_admits({**ufw, "rules": [*ufw["rules"], whole]}, "192.0.2.2", "enp1s0f0np0")
    assert not _fabric.ufw_admits({**ufw, "rules": [*ufw["rules"], whole]}, "198.51.100.2", "enp1s0f0np0")


def test_net_hca_comma_list(kit: Any) -> None:
    value = kit.case("net-hca-comma-list").splitlines()[1].partition("=")[2]
    assert _fabric.parse_hca_list(value) == ("", ["rocep1s0f0", "roceP2p1s0f0"])
    assert _fabric.parse_hca_list("=mlx5_1:1,mlx5_2") == ("=", ["mlx5_1", "mlx5_2"])
    assert _fabric.parse_hca_list("^=mlx5_3") == ("^=", ["mlx5_3"])
    assert _fabric.parse_hca_list(None) == ("", [])


def test_twins_are_the_same_function_in_another_domain(kit: Any) -> None:
    places = {
        f"f{place[-1]}d{place[3]}": _fabric.pci_place(place)
        for place in ("0000:01:00.0", "0000:01:00.1", "0002:01:00.0", "0002:01:00.1")
    }
    assert _fabric.twins(places) == {"f0d0": "f0d2", "f0d2": "f0d0", "f1d0": "f1d2", "f1d2": "f1d0"}
    listed = [line.split()[0] for line in kit.capture("lspci-cx7").splitlines()]
    assert len([_fabric.pci_place(address) for address in listed if _fabric.pci_place(address)]) == 4


def test_predictable_names_are_the_last_resort() -> None:
    assert _fabric.name_place("enP2p1s0f0np0") == _fabric.Place(2, 1, 0, 0)
    assert _fabric.name_place("enp1s0f1np1") == _fabric.Place(0, 1, 0, 1)
    assert _fabric.name_place("wlP9s9") is None
    assert _fabric.name_place("eth0") is None


@pytest.mark.parametrize(
    ("networks", "expected"),
    [
        (["192.0.2.0/24"], "192.0.2.0/24"),
        (["198.51.100.0/25", "198.51.100.128/25"], "198.51.100.0/24"),
        (["10.0.1.0/24", "10.0.2.0/24"], "10.0.0.0/22"),
        (["192.0.2.0/24", "10.0.0.0/24"], None),
        ([], None),
    ],
)
def test_address_range_over_all_rails(networks: list[str], expected: str | None) -> None:
    assert _fabric.common_range(networks) == expected


def test_net_ip_not_persistent(kit: Any) -> None:
    """`ip addr add` is gone after a reboot; the netplan of the same case keeps it."""
    text = kit.case("net-ip-not-persistent")
    netplan = next(line for line in text.splitlines() if line.startswith("network:"))
    held = {"etc/netplan/40-cx7.yaml": netplan}
    where = {"defined": True, "where": "etc/netplan/40-cx7.yaml"}
    assert _fabric.persistence(held, "enp1s0f1np1", None, "192.0.2.10") == where
    assert _fabric.persistence(held, "enp1s0f1np1", None, "192.0.2.1") == {"defined": False, "where": None}
    assert _fabric.persistence(held, "enp1s0f0np0", None, "192.0.2.10") == {"defined": False, "where": None}
    assert _fabric.persistence({}, "enp1s0f1np1", None, "192.0.2.10")["defined"] is False
    assert _fabric.persistence({"etc/netplan/40-cx7.yaml": None}, "enp1s0f1np1", None, "192.0.2.10")["defined"] is None
    keyfile = {
        "etc/NetworkManager/system-connections/cx7": "[connection]\ninterface-name=enp1s0f1np1\n[ipv4]\nmethod=auto"
    }
    assert _fabric.persistence(keyfile, "enp1s0f1np1", None, "192.0.2.10")["defined"] is True
