"""fabric_configure: the file in check mode, workers first, the blip of the management address, and the way back."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from ansible_collections.gb10.fleet.molecule.fabric import faults

CONFIGURE = "playbooks/configure_network.yml"
FILE = "/etc/netplan/60-gb10-fabric.yaml"
ADDRESSES = {
    "enp1s0f0np0": "{{ fabric_address }}/25",
    "enP2p1s0f0np0": "198.51.100.{{ (fabric_address.split('.')[3] | int) + 128 }}/25",
}
STAND_IN = Path(__file__).resolve().parents[1] / "netplan_stand_in.py"


@pytest.fixture(scope="module")
def cluster() -> Any:
    cluster = faults.Cluster()
    for node in (cluster.head, cluster.worker):
        node.run(
            f"mkdir -p /etc/netplan; cat > /usr/sbin/netplan <<'STAND_IN'\n{STAND_IN.read_text()}STAND_IN\nchmod 755 "
            "/usr/sbin/netplan"
        )
    yield cluster
    for node in (cluster.head, cluster.worker):
        node.run("rm -rf /etc/netplan /usr/sbin/netplan /var/lib/gb10-fleet/fabric /opt/gb10-fleet/netplan_rollback.py")


def exists(node: Any, path: str) -> bool:
    return "yes" in node.run(f"test -e {path} && echo yes || echo no")


def test_check_mode_shows_the_file_and_writes_nothing(cluster: Any) -> None:
    said = cluster.play(CONFIGURE, options=("--check", "--diff"), fabric_addresses=ADDRESSES)
    assert said.rc == 0, said.raw
    for line in (f"+      addresses: [{cluster.worker.rail1}/25]", "+      mtu: 9000", "+      link-local: []"):
        assert line in said.raw
    assert not exists(cluster.worker, FILE)
    assert not exists(cluster.worker, "/opt/gb10-fleet/netplan_rollback.py")


def test_a_definition_that_netplan_refuses_is_put_back(cluster: Any) -> None:
    said = cluster.play(CONFIGURE, fabric_addresses=ADDRESSES, fabric_mtu=1281)
    assert said.rc == 2
    assert f"{FILE} was put back as it was, since netplan refused the new one" in said.text
    assert not exists(cluster.worker, FILE)
    assert not exists(cluster.head, FILE)


def test_net_netplan_blip(cluster: Any) -> None:
    """The management address is gone for a second: the run waits, verifies and keeps the definition; workers come first."""
    said = cluster.play(CONFIGURE, fabric_addresses=ADDRESSES)
    assert said.rc == 0, said.raw
    written = [line for line in said.raw.splitlines() if line.startswith("changed: [")]
    turns = said.raw.split("Write the netplan file and apply it")
    assert f"changed: [{cluster.worker.name}]" in turns[1]
    assert f"changed: [{cluster.head.name}]" in turns[2]
    assert written
    for node in (cluster.head, cluster.worker):
        assert node.run(f"stat -c %a {FILE}").strip() == "600"
        assert not exists(node, "/var/lib/gb10-fleet/fabric/rollback.json")
        assert "gb10-fabric-rollback" not in node.run("systemctl list-timers --all --no-pager")
    assert "net-ip-not-persistent" not in said.text
    again = cluster.play(CONFIGURE, fabric_addresses=ADDRESSES)
    assert again.rc == 0
    assert again.text.count("changed=0") == 2


def test_a_node_that_is_cut_off_rolls_back_by_itself(cluster: Any) -> None:
    other = {**ADDRESSES, "enP2p1s0f0np0": "198.51.100.{{ (fabric_address.split('.')[3] | int) + 100 }}/25"}
    before = cluster.worker.run(f"cat {FILE}")
    cluster.worker.run("touch /run/netplan-cut")
    try:
        said = cluster.play(CONFIGURE, fabric_addresses=other, fabric_rollback_s=20, fabric_reconnect_s=8)
        assert said.rc != 0
        assert cluster.head.run(f"cat {FILE}").count(f"{cluster.head.rail2}/25") == 1, (
            "the head was changed although the worker failed"
        )
        cluster.worker.run("rm /run/netplan-cut")  # the former definition has a management link
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and cluster.worker.run(f"cat {FILE}") != before:
            time.sleep(1)
        assert cluster.worker.run(f"cat {FILE}") == before
        assert '"rc": 0' in cluster.worker.run("sleep 2; cat /var/lib/gb10-fleet/fabric/rolled-back.json")
    finally:
        cluster.worker.run("rm -f /run/netplan-cut; ip link set enP7s7 up")
    assert cluster.play("playbooks/check_network.yml").rc == 0


def test_absent_puts_back_what_was_there(cluster: Any) -> None:
    said = cluster.play(CONFIGURE, fabric_state="absent")
    assert said.rc == 0, said.raw
    for node in (cluster.head, cluster.worker):
        assert not exists(node, FILE)
        assert not exists(node, "/var/lib/gb10-fleet/fabric")
        assert f"{node.rail2}/25" in node.run("ip -4 addr show dev enP2p1s0f0np0")
    assert "changed=0" in cluster.play(CONFIGURE, fabric_state="absent").text
