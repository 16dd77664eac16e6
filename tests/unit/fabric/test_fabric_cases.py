"""Network cases by id: the recorded form of the input through the module's own reading, to the sentence and the environment."""

from __future__ import annotations

import re
from typing import Any

import pytest

from ansible_collections.gb10.fleet.plugins.module_utils._fabric_proof import (
    environment,
    hca_value,
    judge,
    mixed_indexes,
    targets,
)


def proofs(plan: Any, **bad: Any) -> dict[str, Any]:
    """All probes fine, but those named ``node_rail``: {ping, small, tcp}."""
    fine = {"ping": {"ok": True}, "small": {"ok": True}, "tcp": {"ok": True, "port": 40000}}
    return {
        node: {
            "results": [
                {
                    "peer": rail.peer,
                    "rail": rail.number,
                    **fine,
                    **bad.get(f"{node.replace('-', '_')}_{rail.number}", {}),
                }
                for rail in rails
            ]
        }
        for node, rails in plan.rails.items()
    }


def test_a_healthy_pair_has_two_rails_and_nothing_to_say(nodes: Any, kit: Any) -> None:
    plan = judge(p := nodes.plan(kit.spark(1), kit.spark(2), addresses=kit.PAIR), proofs(p))
    assert plan.findings == []
    assert [(rail.interface, rail.hca, rail.peer_address) for rail in plan.rails["spark-01"]] == [
        ("enp1s0f0np0", "rocep1s0f0", "192.0.2.2"),
        ("enP2p1s0f0np0", "roceP2p1s0f0", "198.51.100.2"),
    ]


def test_net_gid_differs(nodes: Any, kit: Any) -> None:
    """Index 4 on the head, 3 on the worker (MiaAI-Lab/…#26): each rank is given its own."""
    text = kit.case("net-gid-differs")
    head = kit.gid_rows(kit.section(text, "# spark-01", "# spark-02"))
    worker = kit.gid_rows(kit.section(text, "# spark-02"))
    only = {"rail2": {"up": False, "addresses": [], "gids": []}}
    plan = nodes.plan(
        kit.spark(1, rail1={"gids": head}, **only), kit.spark(2, rail1={"gids": worker}, **only), addresses=kit.PAIR
    )
    assert environment(plan, "spark-01")["NCCL_IB_GID_INDEX"] == "4"
    assert environment(plan, "spark-02")["NCCL_IB_GID_INDEX"] == "3"


def test_net_gid_empty_errno61(nodes: Any, kit: Any) -> None:
    """Entry 3 is filled on one node and all-zero on the other: said before launch, with the whole table."""
    text = kit.case("net-gid-empty-errno61")
    gids = dict(re.findall(r"gids/3  \((spark-0\d)\): (\S+)", text))
    assert gids["spark-02"] == "0000:0000:0000:0000:0000:0000:0000:0000"
    empty = [gid for gid in kit.usual_gids("192.0.2.2") if gid["index"] < 2]
    plan = nodes.plan(kit.spark(1), kit.spark(2, rail1={"gids": empty}), addresses=kit.PAIR)
    assert kit.texts(plan.findings, "error") == [
        "spark-02: rail 1 (enp1s0f0np0): rocep1s0f0 has no RoCE v2 GID for 192.0.2.2; its rank would die after "
        "about 60 s with ibv_modify_qp errno 61. Filled entries: rocep1s0f0: 0 fe80::ff:fe00:1 v1, 1 "
        "fe80::ff:fe00:1 v2. Run `ip link set enp1s0f0np0 down` and `up`, then look again."
    ]


def test_gid_all_zero_on_the_second_hca_drops_that_rail(nodes: Any, kit: Any) -> None:
    plan = nodes.plan(kit.spark(1), kit.spark(2, rail2={"gids": []}), addresses=kit.PAIR)
    assert kit.texts(plan.findings, "error") == []
    (text,) = kit.texts(plan.findings, "warning", "net-gid-empty-errno61")
    assert text.startswith("spark-02: rail 2 (enP2p1s0f0np0): roceP2p1s0f0 has no RoCE v2 GID for 198.51.100.2;")
    assert text.endswith("Only rail 1 is used: about 12.8 instead of 20.9 GB/s.")
    assert environment(plan, "spark-02")["NCCL_IB_HCA"] == "rocep1s0f0"


def test_net_gid_drift(nodes: Any, kit: Any) -> None:
    """Index 3 became 4 after a link flap: looked up at launch, a stale declared index is refused, nothing empty is rendered."""
    assert '"NCCL_IB_GID_INDEX="' in kit.case("net-gid-drift")
    before = nodes.plan(kit.spark(1), kit.spark(2), addresses=kit.PAIR)
    assert environment(before, "spark-01")["NCCL_IB_GID_INDEX"] == "3"
    drifted = kit.spark(1, index=4)
    after = nodes.plan(drifted, kit.spark(2), addresses=kit.PAIR, spark_01={"gid_index": 3})
    (text,) = kit.texts(after.findings, "error")
    assert "spark-01: rail 1 (enp1s0f0np0): fabric_gid_index is 3, but that entry of rocep1s0f0 is" in text
    assert "the RoCE v2 entry of 192.0.2.1 is 4. Remove fabric_gid_index: it is looked up at each launch." in text
    assert all(environment(before, node)[key] != "" for node in before.ranks for key in environment(before, node))


def test_indexes_that_differ_between_the_hcas_of_one_node_leave_the_key_out(nodes: Any, kit: Any) -> None:
    plan = nodes.plan(kit.spark(1, rail2={"gids": kit.usual_gids("198.51.100.1", 5)}), kit.spark(2), addresses=kit.PAIR)
    mixed_indexes(plan)
    assert "NCCL_IB_GID_INDEX" not in environment(plan, "spark-01")
    assert environment(plan, "spark-01")["NCCL_IB_ROCE_VERSION_NUM"] == "2"
    assert kit.texts(plan.findings, "note", "net-gid-differs")[0].startswith(
        "spark-01: the RoCE v2 GID index is 3 on rocep1s0f0, 5 on roceP2p1s0f0; NCCL_IB_GID_INDEX holds only one"
    )


def test_net_one_rail(nodes: Any, kit: Any) -> None:
    """ibdev2netdev shows both halves up, the second has no IPv4: 12.8 instead of 20.9 GB/s (MiaAI-Lab/…#172)."""
    up = {
        f"{words[4]}": words[5]
        for line in kit.case("net-one-rail").splitlines()
        if len(words := line.split()) == 6 and "==>" in line
    }
    assert up["enP2p1s0f0np0"] == "(Up)"
    plan = nodes.plan(
        kit.spark(1), kit.spark(2, rail2={"addresses": [], "gids": kit.usual_gids(None)}), addresses=kit.PAIR
    )
    assert kit.texts(plan.findings, "warning", "net-one-rail") == [
        "spark-02: the second rail enP2p1s0f0np0 has no IPv4 address. One rail carries everything: about 12.8 "
        "instead of 20.9 GB/s; give it one in a subnet of its own."
    ]
    assert environment(plan, "spark-01")["NCCL_IB_HCA"] == environment(plan, "spark-02")["NCCL_IB_HCA"] == "rocep1s0f0"
    assert "12.8 GB/s one HCA" in kit.case("net-one-rail")


def test_net_same_subnet(nodes: Any, kit: Any) -> None:
    """Two netdevs in one prefix: the source of a connection is another one's address; `ip route get` per source is shown."""
    assert "source 192.0.2.188   (enp1s0f1np1, not the configured" in kit.case("net-same-subnet")
    routes = {
        "192.0.2.2": "enp1s0f0np0",
        "192.0.2.2 from 192.0.2.1": "enp1s0f0np0",
        "192.0.2.2 from 192.0.2.101": "enp1s0f0np0",
    }
    one = kit.spark(1, rail2={"addresses": ["192.0.2.101/24"], "gids": None}, routes=routes)
    two = kit.spark(2, rail2={"addresses": ["192.0.2.102/24"], "gids": None}, routes={"192.0.2.1": "enp1s0f0np0"})
    plan = nodes.plan(one, two, addresses=kit.PAIR)
    text = next(t for t in kit.texts(plan.findings, "warning", "net-same-subnet") if t.startswith("spark-01"))
    assert "enp1s0f0np0 (192.0.2.1/24)" in text
    assert "enP2p1s0f0np0 (192.0.2.101/24)" in text
    assert "`ip route get 192.0.2.2 from 192.0.2.101` answers dev enp1s0f0np0" in text
    assert text.endswith("Give each rail a subnet of its own.")
    assert len(plan.rails["spark-01"]) == 2


def test_net_mtu(nodes: Any, kit: Any) -> None:
    plan = nodes.plan(kit.spark(1), kit.spark(2, rail1={"mtu": 1500}), addresses=kit.PAIR)
    assert kit.texts(plan.findings, "error") == [
        "spark-02: enp1s0f0np0 has MTU 1500 (RoCE active MTU 1024), its peer spark-01 has 9000 (4096): transfers "
        "end in IBV_WC_RETRY_EXC_ERR or hang. Run `ip link set enp1s0f0np0 mtu 9000` on spark-02, and write it into "
        "its network definition."
    ]


def test_net_mtu_of_a_switch_between(nodes: Any, kit: Any) -> None:
    """Both ends say 9000, small pings answer, full ones do not: never accept only "link up"."""
    p = nodes.plan(kit.spark(1), kit.spark(2), addresses=kit.PAIR)
    assert targets(p, "spark-01", {"spark-02": 40000})[0]["payload"] == 8972
    bad = {"ping": {"ok": False, "mtu": None}}
    plan = judge(p, proofs(p, spark_01_1=bad, spark_02_1=bad))
    assert kit.texts(plan.findings, "error", "net-mtu") == [
        "spark-01: rail 1 (enp1s0f0np0): packets of 9000 bytes do not get through to spark-02 (192.0.2.2), small "
        "ones do. Set MTU 9000 on both ends and on the switch between them."
    ]


def test_net_ifname_baked(nodes: Any, kit: Any) -> None:
    """All four interface names are set together, on each node by its own interface."""
    baked = re.search(r'"Env": \[(.*)\]', kit.case("net-ifname-baked"))
    assert baked is not None
    names = {item.strip('"').partition("=")[0] for item in re.findall(r'"[A-Z_]+=', baked.group(1))}
    plan = nodes.plan(kit.spark(1), kit.spark(2), addresses=kit.PAIR)
    env = environment(plan, "spark-01")
    assert names < env.keys()
    assert {env[name] for name in (*names, "MN_IF_NAME")} == {"enp1s0f0np0"}


def test_net_iface_role_eth0(nodes: Any, kit: Any) -> None:
    """No default route at all: the interface comes from the route to the peer (sparkrun#275)."""
    text = kit.case("net-iface-role-eth0")
    assert "default" not in text
    table = {m[1]: m[2] for m in re.finditer(r"^(\S+/\d+) dev (\S+)", text, re.MULTILINE)}
    assert table["198.51.100.0/28"] == "enp1s0f0np0"
    one = kit.Machine(
        "spark-01",
        [
            kit.Netdev("enP7s7", ["192.0.2.126/24"], mtu=1500),
            kit.Netdev("enp1s0f0np0", ["198.51.100.3/28"], rdma="rocep1s0f0"),
            kit.Netdev("enP2p1s0f0np0", ["203.0.113.3/28"], rdma="roceP2p1s0f0"),
        ],
        {"198.51.100.4": table["198.51.100.0/28"]},
    )
    two = kit.Machine(
        "spark-02", [kit.Netdev("enp1s0f0np0", ["198.51.100.4/28"], rdma="rocep1s0f0")], {"198.51.100.3": "enp1s0f0np0"}
    )
    plan = nodes.plan(one, two, addresses=("198.51.100.3", "198.51.100.4"))
    assert environment(plan, "spark-01")["GLOO_SOCKET_IFNAME"] == "enp1s0f0np0"
    assert kit.texts(plan.findings, "error") == []


def test_net_host_ip_collision(nodes: Any, kit: Any) -> None:
    """One file for both nodes gave the worker the head's address: it is on none of its interfaces."""
    shared = kit.case("net-host-ip-collision").splitlines()[1].split("=")[1].split()[0]
    assert shared == "192.0.2.110"
    plan = nodes.plan(kit.spark(1), kit.spark(2), addresses=("192.0.2.1", shared))
    (text,) = kit.texts(plan.findings, "error", "net-host-ip-collision")
    assert text.startswith(
        "spark-02: its fabric address 192.0.2.110 is on none of its interfaces; found enP7s7 (203.0.113.1/24)"
    )


def test_net_ip_not_persistent_is_a_warning(nodes: Any, kit: Any) -> None:
    plan = nodes.plan(kit.spark(1, files={"etc/hosts": "x"}), kit.spark(2), addresses=kit.PAIR)
    (text,) = kit.texts(plan.findings, None, "net-ip-not-persistent")
    assert text.startswith("spark-01: 192.0.2.1/24 on enp1s0f0np0 and 198.51.100.1/24 on enP2p1s0f0np0 are only live")


def test_net_firewall(nodes: Any, kit: Any) -> None:
    """The master port is open, ephemeral ones are dropped: named before the engine hangs in its first step."""
    p = nodes.plan(kit.spark(1), kit.spark(2), addresses=kit.PAIR)
    dropped = {"tcp": {"ok": False, "port": 41233, "error": "no answer within 3 s"}}
    plan = judge(p, proofs(p, spark_01_1=dropped))
    assert kit.texts(plan.findings, "error", "net-firewall") == [
        "spark-01 cannot open TCP port 41233 of spark-02 (192.0.2.2, rail 1 (enp1s0f0np0)): no answer within 3 s, "
        "while ping works. A firewall on spark-02 drops high ports, and engines open random ones: allow all traffic "
        "from 192.0.2.1, e.g. `ufw allow in on enp1s0f0np0 from 192.0.2.0/24`."
    ]


def test_net_hca_comma_list_of_a_healthy_pair(nodes: Any, kit: Any) -> None:
    """A declared comma list is two devices, each checked (MiaAI-Lab/…#72 took it for one and died)."""
    hcas = ("rocep1s0f0", "roceP2p1s0f0")
    plan = nodes.plan(kit.spark(1), kit.spark(2), addresses=kit.PAIR, spark_01={"hcas": hcas}, spark_02={"hcas": hcas})
    assert plan.findings == []
    assert environment(plan, "spark-01")["NCCL_IB_HCA"] == "rocep1s0f0,roceP2p1s0f0"


def test_a_declared_hca_that_does_not_exist(nodes: Any, kit: Any) -> None:
    plan = nodes.plan(kit.spark(1), kit.spark(2), addresses=kit.PAIR, spark_01={"hcas": ("mlx5_0", "rocep1s0f0")})
    assert kit.texts(plan.findings, "error") == [
        "spark-01: fabric_hca names mlx5_0, which does not exist here; found roceP2p1s0f0, rocep1s0f0. Correct "
        "fabric_hca, or remove it."
    ]


def test_net_unplugged_none(nodes: Any, kit: Any) -> None:
    """`rdma link`, `lspci` and sysfs are all empty (graham33/nixos-dgx-spark#165): the cable, not the driver."""
    assert kit.case("net-unplugged-none").count("$ ") == 4
    bare = kit.Machine("spark-02", [kit.Netdev("enP7s7", ["203.0.113.2/24"], mtu=1500)], {"192.0.2.1": "enP7s7"})
    plan = nodes.plan(kit.spark(1), bare, addresses=("192.0.2.1", "203.0.113.2"))
    (text,) = kit.texts(plan.findings, "error", "net-unplugged-none")
    assert text.startswith("spark-02: no CX7 functions on PCI and no RDMA device: the QSFP cable is unplugged")
    assert "the driver is not missing" in text


def test_functions_on_pci_without_rdma_devices_are_a_driver_matter(nodes: Any, kit: Any) -> None:
    bare = kit.Machine("spark-02", [kit.Netdev("enp1s0f0np0", ["192.0.2.2/24"])], {"192.0.2.1": "enp1s0f0np0"})
    plan = nodes.plan(kit.spark(1), bare, addresses=kit.PAIR)
    assert "mlx5_ib is not loaded" in kit.texts(plan.findings, "error", "net-no-rdma")[0]


def test_wrong_interface_given(nodes: Any, kit: Any) -> None:
    plan = nodes.plan(
        kit.spark(1), kit.spark(2), addresses=kit.PAIR, spark_01={"interface": "eth0"}, spark_02={"interface": "enP7s7"}
    )
    assert kit.texts(plan.findings, "error", "wrong-interface") == [
        "spark-01: fabric_interface is eth0, which does not exist here or has no address; found enp1s0f0np0 "
        "(192.0.2.1/24), enP2p1s0f0np0 (198.51.100.1/24). Correct fabric_interface, or remove it: it is found from "
        "the route to the peer.",
        "spark-02: fabric_interface is enP7s7 (203.0.113.1/24), but the fabric address 192.0.2.2 is on enp1s0f0np0. "
        "Set fabric_interface to enp1s0f0np0, or fabric_address to an address of enP7s7.",
    ]


def test_route_over_the_management_network_names_the_addresses_to_set(nodes: Any, kit: Any) -> None:
    one, two = kit.spark(1, routes={"203.0.113.2": "enP7s7"}), kit.spark(2, routes={"203.0.113.1": "enP7s7"})
    two.netdevs[0].addresses = ["203.0.113.2/24"]
    plan = nodes.plan(one, two, addresses=("203.0.113.1", "203.0.113.2"))
    assert kit.texts(plan.findings, "error", "route-not-rdma")[0] == (
        "spark-01: the route to spark-02 (203.0.113.2) leaves by enP7s7, which has no RDMA device. Set "
        "fabric_address to 198.51.100.1 on spark-01 and 198.51.100.2 on spark-02."
    )


def test_peer_unreachable_on_the_fabric_but_reachable_on_management(nodes: Any, kit: Any) -> None:
    p = nodes.plan(kit.spark(1), kit.spark(2), addresses=kit.PAIR)
    dead = {
        "ping": {"ok": False},
        "small": {"ok": False},
        "tcp": {"ok": False, "port": 41233, "error": "no route to host"},
    }
    plan = judge(p, proofs(p, spark_01_1=dead, spark_02_1=dead))
    assert kit.texts(plan.findings, "error") == [
        "spark-01 and spark-02 do not reach each other on rail 1 (enp1s0f0np0) at 192.0.2.2 (ping and TCP), though "
        "spark-02 answers on its management address 198.18.0.12. Check the cable, the addresses of both ends and "
        "the switch."
    ]


def test_a_dead_second_rail_is_dropped_on_both_ends(nodes: Any, kit: Any) -> None:
    p = nodes.plan(kit.spark(1), kit.spark(2), addresses=kit.PAIR)
    dead = {
        "ping": {"ok": False},
        "small": {"ok": False},
        "tcp": {"ok": False, "port": 41233, "error": "no answer within 3 s"},
    }
    plan = judge(p, proofs(p, spark_01_2=dead))
    assert kit.texts(plan.findings, "error") == []
    assert kit.texts(plan.findings, "warning", "net-unreachable")[0].startswith(
        "spark-01 does not reach spark-02 on rail 2 (enP2p1s0f0np0)"
    )
    assert [environment(plan, node)["NCCL_IB_HCA"] for node in ("spark-01", "spark-02")] == ["rocep1s0f0", "rocep1s0f0"]


def test_a_node_without_a_report_does_not_hide_the_others(nodes: Any, kit: Any) -> None:
    ranks = nodes.ranks(kit.spark(1, rail1={"mtu": 1500}), kit.spark(2), addresses=kit.PAIR)
    from ansible_collections.gb10.fleet.plugins.module_utils._fabric_model import Rank
    from ansible_collections.gb10.fleet.plugins.module_utils._fabric_plan import plan

    result = plan([ranks[0], Rank("spark-02", "192.0.2.2", None)])
    assert [f.code for f in result.findings if f.severity == "error"] == ["no-report"]
    assert "net-mtu" in [f.code for f in result.findings]


def test_names_come_from_sysfs_and_not_from_a_pattern(nodes: Any, kit: Any) -> None:
    """mlx5_* devices on netdevs with any name: the twin comes from the PCI functions, the exact match from NCCL's ``=``."""

    def odd(number: int) -> Any:
        one, two = f"192.0.2.{number}", f"198.51.100.{number}"
        return kit.Machine(
            f"spark-0{number}",
            [
                kit.Netdev("fab0", [f"{one}/24"], rdma="mlx5_1", pci="0000:01:00.0"),
                kit.Netdev("fab1", [f"{two}/24"], rdma="mlx5_10", pci="0002:01:00.0"),
            ],
            {f"192.0.2.{3 - number}": "fab0"},
            {"etc/netplan/1.yaml": f"fab0: [{one}/24] fab1: [{two}/24]"},
        )

    plan = nodes.plan(odd(1), odd(2), addresses=kit.PAIR)
    assert plan.findings == []
    assert plan.ranks["spark-01"].interfaces["fab0"]["twin"] == "fab1"
    assert environment(plan, "spark-01")["NCCL_IB_HCA"] == "=mlx5_1,mlx5_10"
    assert hca_value(["mlx5_1"], ["mlx5_1", "mlx5_10"]) == "=mlx5_1"
    assert hca_value(["rocep1s0f0"], ["rocep1s0f0", "roceP2p1s0f0"]) == "rocep1s0f0"


def test_socket_mode_only_when_asked_for(nodes: Any, kit: Any) -> None:
    """The 3-node recipe's sockets: no RDMA device is wanted, RDMA is switched off."""
    bare = [
        kit.Machine(
            f"spark-0{n}", [kit.Netdev("enP7s7", [f"203.0.113.{n}/24"], mtu=1500)], {f"203.0.113.{3 - n}": "enP7s7"}
        )
        for n in (1, 2)
    ]
    plan = nodes.plan(*bare, addresses=("203.0.113.1", "203.0.113.2"), transport="socket")
    assert plan.findings == []
    assert environment(plan, "spark-01") == {
        "VLLM_HOST_IP": "203.0.113.1",
        **dict.fromkeys(("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "MN_IF_NAME"), "enP7s7"),
        "NCCL_IB_DISABLE": "1",
    }


def mesh(kit: Any, number: int, peers: dict[int, str]) -> Any:
    """A node of a ring: a cable per neighbour (port 0 or 1, first half only), the ranks meet over the management network."""
    netdevs = [kit.Netdev("enP7s7", [f"203.0.113.{number}/24"], mtu=1500)]
    names = iter((("enp1s0f0np0", "rocep1s0f0"), ("enp1s0f1np1", "rocep1s0f1")))
    for network in peers.values():
        name, rdma = next(names)
        netdevs.append(kit.Netdev(name, [f"198.51.100.{int(network) + number}/28"], rdma=rdma))
    routes = {f"203.0.113.{other}": "enP7s7" for other in range(1, 5) if other != number}
    return kit.Machine(f"spark-0{number}", netdevs, routes)


def test_mesh_of_three(nodes: Any, kit: Any) -> None:
    links = {(1, 2): "16", (2, 3): "32", (1, 3): "48"}
    machines = [mesh(kit, n, {i: net for i, (pair, net) in enumerate(links.items()) if n in pair}) for n in (1, 2, 3)]
    plan = nodes.plan(*machines, addresses=("203.0.113.1", "203.0.113.2", "203.0.113.3"))
    assert kit.texts(plan.findings, "error") == []
    env = environment(plan, "spark-01")
    assert plan.shape == "mesh"
    assert (env["NCCL_NET_PLUGIN"], env["NCCL_IB_SUBNET_AWARE_ROUTING"], env["NCCL_SOCKET_IFNAME"]) == (
        "none",
        "1",
        "enP7s7",
    )
    assert env["NCCL_IB_HCA"] == "rocep1s0f0,rocep1s0f1"
    assert "NCCL_ALGO" not in env
    assert env["NCCL_IB_ADDR_RANGE"] == environment(plan, "spark-03")["NCCL_IB_ADDR_RANGE"] == "198.51.100.0/26"


def test_ring_of_four(nodes: Any, kit: Any) -> None:
    links = {(1, 2): "16", (2, 3): "32", (3, 4): "48", (1, 4): "64"}
    machines = [
        mesh(kit, n, {i: net for i, (pair, net) in enumerate(links.items()) if n in pair}) for n in (1, 2, 3, 4)
    ]
    plan = nodes.plan(*machines, addresses=tuple(f"203.0.113.{n}" for n in (1, 2, 3, 4)))
    assert kit.texts(plan.findings, "error") == []
    assert plan.shape == "ring"
    assert environment(plan, "spark-02")["NCCL_ALGO"] == "Ring"
    assert [rail.peer for rail in plan.rails["spark-01"]] == ["spark-02", "spark-04"]


def test_three_nodes_at_a_switch_are_no_mesh(nodes: Any, kit: Any) -> None:
    machines = []
    for n in (1, 2, 3):
        machine = kit.spark(1)
        machine.name = f"spark-0{n}"
        machine.netdevs[1] = kit.Netdev("enp1s0f0np0", [f"192.0.2.{n}/24"], rdma="rocep1s0f0")
        machine.netdevs[2] = kit.Netdev("enP2p1s0f0np0", [f"198.51.100.{n}/24"], rdma="roceP2p1s0f0")
        machine.routes = {f"192.0.2.{m}": "enp1s0f0np0" for m in (1, 2, 3)}
        machines.append(machine)
    plan = nodes.plan(*machines, addresses=("192.0.2.1", "192.0.2.2", "192.0.2.3"))
    assert plan.shape == "switch"
    assert len(plan.rails["spark-02"]) == 4
    assert "NCCL_NET_PLUGIN" not in environment(plan, "spark-02")


@pytest.mark.parametrize("state", ["1: DOWN", "2: INIT"])
def test_a_first_rail_that_is_down_for_rdma(nodes: Any, kit: Any, state: str) -> None:
    plan = nodes.plan(kit.spark(1, rail1={"state": state}), kit.spark(2), addresses=kit.PAIR)
    (text,) = kit.texts(plan.findings, "error", "net-link-down")
    assert text.startswith(
        f"spark-01: rail 1 (enp1s0f0np0): rocep1s0f0 is {state[3:]} (physical state LINK_UP), wanted ACTIVE."
    )
