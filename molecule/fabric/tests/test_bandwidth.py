"""fabric_probe with a stand-in ib_write_bw that prints a GB10's recorded run, its figure replaced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ansible_collections.gb10.fleet.molecule.fabric import faults

RECORDED = (Path(__file__).resolve().parents[3] / "tests/fixtures/gb10/ref-ib_write_bw-gb10.txt").read_text()
PROGRAM = "/usr/local/bin/ib_write_bw"


@pytest.fixture(scope="module")
def cluster() -> Any:
    """The client prints the record with /run/bandwidth-<device> as its average; the server waits for nothing."""
    assert "92.57" in RECORDED
    cluster = faults.Cluster()
    script = (
        '#!/bin/sh\ncase "$*" in *--gid-index*) ;; *) exit 3;; esac\n[ "${*##* }" = --CPU-freq ] && exec sleep 20\n'
        'dev=$(echo "$*" | sed "s/.*--ib-dev \\([^ ]*\\).*/\\1/")\nsed "s/92.57/$(cat /run/bandwidth-$dev)/" /run/recorded\n'
    )
    for node in (cluster.head, cluster.worker):
        node.run(
            f"cat > {PROGRAM} <<'SCRIPT'\n{script}SCRIPT\nchmod 755 {PROGRAM}; cat > /run/recorded "
            f"<<'RECORD'\n{RECORDED}\nRECORD"
        )
    yield cluster
    for node in (cluster.head, cluster.worker):
        node.run(f"rm -f {PROGRAM} /run/recorded /run/bandwidth-*")


@pytest.mark.parametrize(
    ("rail1", "rail2", "sentence"),
    [
        ("97.28", "98.10", "spark-verdict full"),
        (
            "13.23",
            "13.20",
            "a CX7 came up degraded (clean counters, 200 Gb/s link). A reboot does not cure it: power both nodes off",
        ),
        ("97.28", "41.00", "rail 2 is slow. Look at its MTU and GID"),
    ],
)
def test_net_cx7_13gbps(cluster: Any, rail1: str, rail2: str, sentence: str) -> None:
    cluster.head.run(f"echo {rail1} > /run/bandwidth-rocep1s0f0; echo {rail2} > /run/bandwidth-roceP2p1s0f0")
    said = cluster.play("playbooks/check_network.yml", fabric_probe=True, fabric_probe_s=1)
    assert said.rc == 0, said.raw
    assert f"{cluster.worker.name} 1 ib_write_bw {float(rail1):.1f}" in said.text
    if sentence == "spark-verdict full":
        assert said.text.count(" full ") >= 2
        assert "came up degraded" not in said.text
    else:
        assert sentence in said.text


def test_without_a_program_it_says_what_to_install(cluster: Any) -> None:
    with cluster.head.fault(f"mv {PROGRAM} {PROGRAM}.away", f"mv {PROGRAM}.away {PROGRAM}"):
        said = cluster.play("playbooks/check_network.yml", fabric_probe=True, fabric_probe_s=1)
    assert said.rc == 0
    assert "neither ib_write_bw (perftest) nor iperf3 is installed" in said.text
