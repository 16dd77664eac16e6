"""Each fault of the network, injected on real links, and the sentence that check_network.yml has to print."""

from __future__ import annotations

from typing import Any

import pytest

from ansible_collections.gb10.fleet.molecule.fabric import faults

CHECK = "playbooks/check_network.yml"
IB = "/sys/class/infiniband"
RAIL1, RAIL2 = "enp1s0f0np0", "enP2p1s0f0np0"


@pytest.fixture(scope="module")
def cluster() -> Any:
    return faults.Cluster()


def zero(device: str) -> str:
    """Every RoCE v2 IPv4 entry of a device becomes all-zero, its type unreadable."""
    port = f"{IB}/{device}/ports/1"
    return (
        f'for g in {port}/gids/*; do case "$(cat $g)" in 0000:0000:0000:0000:0000:ffff:*) '
        f"echo 0000:0000:0000:0000:0000:0000:0000:0000 > $g; rm -f {port}/gid_attrs/types/$(basename $g);; esac; done"
    )


def test_a_healthy_pair(cluster: Any) -> None:
    """Both rails of both nodes, GID index 3 on one node and 4 on the other, exit code 0, at most 100 columns."""
    said = cluster.play(CHECK)
    assert said.rc == 0
    rows = [
        line.split()
        for line in said.raw.splitlines()
        if line.startswith((cluster.head.name, cluster.worker.name)) and "roce" in line
    ]
    assert [(row[0], row[1], row[2], row[5], row[6]) for row in rows] == [
        (cluster.head.name, "1", RAIL1, "rocep1s0f0", "3"),
        (cluster.head.name, "2", RAIL2, "roceP2p1s0f0", "3"),
        (cluster.worker.name, "1", RAIL1, "rocep1s0f0", "4"),
        (cluster.worker.name, "2", RAIL2, "roceP2p1s0f0", "4"),
    ]
    assert all(row[8] == "yes," for row in rows)
    ours = said.raw.partition("cluster alpha:")[2].partition("\nok:")[0]
    assert max(len(line) for line in ours.splitlines()) <= 100


FAULTS = {
    # id: (node, command, undo, exit code, sentence)
    "net-gid-empty-errno61": (
        "worker",
        zero("rocep1s0f0"),
        "gb10-sandbox-reset",
        2,
        "error: {worker}: rail 1 (enp1s0f0np0): rocep1s0f0 has no RoCE v2 GID for {worker.rail1}; its rank would "
        "die after about 60 s with ibv_modify_qp errno 61. Filled entries: rocep1s0f0: 0 fe80::",
    ),
    "net-gid-empty-second-hca": (
        "worker",
        zero("roceP2p1s0f0"),
        "gb10-sandbox-reset",
        0,
        "warning: {worker}: rail 2 (enP2p1s0f0np0): roceP2p1s0f0 has no RoCE v2 GID for {worker.rail2};",
    ),
    "net-mtu": (
        "worker",
        f"ip link set {RAIL1} mtu 1500",
        f"ip link set {RAIL1} mtu 9000",
        2,
        "error: {worker}: enp1s0f0np0 has MTU 1500 (RoCE active MTU 1024), its peer {head} has 9000 (4096): "
        "transfers end in IBV_WC_RETRY_EXC_ERR or hang. Run `ip link set enp1s0f0np0 mtu 9000` on {worker}",
    ),
    "net-one-rail": (
        "worker",
        f"ip addr flush dev {RAIL2}",
        f"ip addr add {{worker.rail2}}/25 dev {RAIL2}",
        0,
        "warning: {worker}: the second rail enP2p1s0f0np0 has no IPv4 address. One rail carries everything: about "
        "12.8 instead of 20.9 GB/s; give it one in a subnet of its own.",
    ),
    "net-firewall": (
        "worker",
        f"iptables -A INPUT -i {RAIL1} -p tcp --dport 1024:65535 --syn -j DROP",
        f"iptables -D INPUT -i {RAIL1} -p tcp --dport 1024:65535 --syn -j DROP",
        2,
        "while ping works. A firewall on {worker} drops high ports, and engines open random ones: allow all traffic "
        "from {head.rail1}",
    ),
    "net-unplugged-none": (
        "worker",
        f"rm -r {IB}/* /sys/bus/pci/devices/000[02]:01:*",
        "gb10-sandbox-reset",
        2,
        "error: {worker}: no CX7 functions on PCI and no RDMA device: the QSFP cable is unplugged or the port was "
        "hot-unplugged to save power; the driver is not missing.",
    ),
    "net-unreachable": (
        "worker",
        f"iptables -A INPUT -i {RAIL1} -j DROP; iptables -A OUTPUT -o {RAIL1} -j DROP",
        f"iptables -D INPUT -i {RAIL1} -j DROP; iptables -D OUTPUT -o {RAIL1} -j DROP",
        2,
        "error: {head} and {worker} do not reach each other on rail 1 (enp1s0f0np0) at {worker.rail1} (ping and "
        "TCP), though {worker} answers on its management address {worker.management}. Check the cable, the "
        "addresses of both ends and the switch.",
    ),
    "net-link-down": (
        "worker",
        f'echo "1: DOWN" > {IB}/rocep1s0f0/ports/1/state',
        "gb10-sandbox-reset",
        2,
        "error: {worker}: rail 1 (enp1s0f0np0): rocep1s0f0 is DOWN (physical state LINK_UP), wanted ACTIVE.",
    ),
    "net-second-rail-dead": (
        "worker",
        f"iptables -A INPUT -i {RAIL2} -j DROP",
        f"iptables -D INPUT -i {RAIL2} -j DROP",
        0,
        "Only rail 1 is used: about 12.8 instead of 20.9 GB/s.",
    ),
    "net-tcp-fallback-device": (
        "worker",
        "rm /dev/infiniband/uverbs*",
        "gb10-sandbox-reset",
        2,
        "error: {worker}: RDMA devices exist, but /dev/infiniband has no uverbs node, so NCCL would fall back to TCP",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault(cluster: Any, name: str) -> None:
    where, command, undo, rc, sentence = FAULTS[name]
    with getattr(cluster, where).fault(cluster.fill(command) if "{worker" in command else command, cluster.fill(undo)):
        said = cluster.play(CHECK)
    assert cluster.fill(sentence) in said.text, said.raw
    assert said.rc == rc
    assert "Traceback" not in said.raw
    if rc == 0:
        assert "failed=0" in said.text


def renumber(address: str) -> str:
    """Give rail 2 another address, and its GID table the entries that the kernel would make of it."""
    a, b, c, d = (int(part) for part in address.split("."))
    gid = f"0000:0000:0000:0000:0000:ffff:{a:02x}{b:02x}:{c:02x}{d:02x}"
    return (
        f"ip addr flush dev {RAIL2}; ip addr add {address}/25 dev {RAIL2}; for g in "
        f"{IB}/roceP2p1s0f0/ports/1/gids/*; do "
        f'case "$(cat $g)" in 0000:0000:0000:0000:0000:ffff:*) echo {gid} > $g;; esac; done'
    )


def test_net_same_subnet(cluster: Any) -> None:
    """Both rails of both nodes in one subnet: which interface the kernel takes for each source is printed, rail 2 is not used."""
    one, two = (f"198.51.100.{number}" for number in (120, 121))
    head, worker = cluster.head, cluster.worker
    with head.fault(renumber(one), renumber(head.rail2)), worker.fault(renumber(two), renumber(worker.rail2)):
        said = cluster.play(CHECK)
    assert (
        f"{RAIL2} ({one}/25) and {RAIL1} ({head.rail1}/25) are in one subnet, so the kernel may send from the wrong "
        "one" in said.text
    )
    assert f"`ip route get {worker.rail1} from {one}` answers dev {RAIL1}" in said.text
    assert "Give each rail a subnet of its own. [net-same-subnet]" in said.text
    assert "do not reach each other on rail 2" in said.text
    assert said.rc == 0


def test_wrong_interface_given(cluster: Any) -> None:
    said = cluster.play(CHECK, fabric_interface="eth0")
    assert said.rc == 2
    assert (
        f"error: {cluster.head.name}: fabric_interface is eth0, which does not exist here or has no address; found"
        in said.text
    )
    assert "Correct fabric_interface, or remove it: it is found from the route to the peer." in said.text


def test_declared_values_are_checked_and_win(cluster: Any) -> None:
    """A GID index that is right on the head is wrong on the worker: never one constant for all."""
    said = cluster.play(CHECK, fabric_gid_index=3)
    assert said.rc == 2
    assert (
        f"{cluster.worker.name}: rail 1 ({RAIL1}): fabric_gid_index is 3, but that entry of rocep1s0f0 is" in said.text
    )
    assert f"the RoCE v2 entry of {cluster.worker.rail1} is 4." in said.text
    assert f"error: {cluster.head.name}" not in said.text
    said = cluster.play(CHECK, fabric_hca="rocep1s0f0")
    assert said.rc == 0
    assert "roceP2p1s0f0" not in said.text


def test_an_accepted_finding_is_a_warning(cluster: Any) -> None:
    with cluster.worker.fault(f"ip link set {RAIL1} mtu 1500", f"ip link set {RAIL1} mtu 9000"):
        said = cluster.play(CHECK, fabric_accept=["net-mtu"])
    assert said.rc == 0
    assert f"warning: {cluster.worker.name}: {RAIL1} has MTU 1500" in said.text


def test_socket_mode_wants_no_rdma(cluster: Any) -> None:
    with cluster.worker.fault(f"rm -r {IB}/*"):
        said = cluster.play(CHECK, recipe_overrides={"fabric": {"transport": "socket"}})
    assert said.rc == 0
    assert "fabric over socket" in said.text


def test_a_node_that_is_down_is_named(cluster: Any) -> None:
    """SSH refused on the worker: the head still reports for both."""
    rule = "INPUT -i enP7s7 -p tcp --dport 22 --syn -j REJECT --reject-with tcp-reset"
    with cluster.worker.fault(f"iptables -A {rule}", f"iptables -D {rule}"):
        said = cluster.play(
            CHECK, env={"ANSIBLE_SSH_ARGS": "-o ControlMaster=no -o ControlPath=none", "ANSIBLE_SSH_RETRIES": "0"}
        )
    assert said.rc != 0
    assert f"{cluster.worker.name} gave no report of its fabric: it is unreachable over SSH" in said.text
