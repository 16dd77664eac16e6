"""NCCL's lines and a container's permissions, from the recorded cases."""

from __future__ import annotations

import json
from typing import Any

from ansible_collections.gb10.fleet.plugins.module_utils import _nccl

PLANNED = ["rocep1s0f0", "roceP2p1s0f0"]
GOOD = {"HostConfig": {"Devices": [{"PathOnHost": "/dev/infiniband"}], "CapAdd": ["IPC_LOCK"]}}
UNLIMITED = (
    "Limit                     Soft Limit           Hard Limit           Units\n"
    "Max locked memory         unlimited            unlimited            bytes\n"
)


def test_net_tcp_fallback(kit: Any) -> None:
    """The three shapes of the case: sockets, no device found, and good."""
    text = kit.case("net-tcp-fallback")
    bad = _nccl.transport(kit.section(text, "# bad", "# other bad"))
    none = _nccl.transport(kit.section(text, "# other bad", "# good"))
    good = _nccl.transport(kit.section(text, "# good"))
    assert (len(bad["sockets"]), len(none["sockets"]), good["sockets"]) == (2, 1, [])
    assert good["devices"] == PLANNED
    assert _nccl.use_trouble("spark-01", "rank container vllm", PLANNED, good, []) == []
    (finding,) = _nccl.use_trouble("spark-01", "rank container vllm", PLANNED, bad, [])
    assert finding.severity == "error"
    assert finding.text == (
        "spark-01: rank container vllm talks over TCP sockets although RDMA is wanted (about ten times slower): "
        "`NCCL INFO NET/Socket : Using [0]enP7s7:192.0.2.11<0>`. Wanted NET/IB on rocep1s0f0, roceP2p1s0f0: look at "
        "the container's /dev/infiniband, NCCL_IB_HCA and the GID index."
    )


def test_net_tcp_fallback_of_the_container() -> None:
    bare = {"HostConfig": {"Devices": [], "CapAdd": None}}
    found = _nccl.container_trouble("spark-02", "rank container vllm", bare, UNLIMITED)
    assert [f.text for f in found] == [
        "spark-02: rank container vllm has no /dev/infiniband, so NCCL falls back to TCP (about ten times slower). "
        "Give the recipe container.devices: [/dev/infiniband].",
        "spark-02: rank container vllm lacks IPC_LOCK, so it cannot pin memory for RDMA. Give the recipe "
        "container.cap_add: [IPC_LOCK].",
    ]
    assert _nccl.container_trouble("spark-02", "r", GOOD, UNLIMITED) == []
    assert _nccl.container_trouble("spark-02", "r", {"HostConfig": {"Privileged": True}}, UNLIMITED) == []


def test_net_one_rail_in_the_log(kit: Any) -> None:
    text = kit.case("net-one-rail")
    one = _nccl.transport(kit.section(text, "# bad: only", "# measured"))
    (finding,) = _nccl.use_trouble("spark-01", "rank container vllm", ["rocep1s0f1", "roceP2p1s0f1"], one, [])
    assert (finding.severity, finding.code) == ("warning", "net-one-rail")
    assert "uses rocep1s0f1, not roceP2p1s0f1: 1 of 2 rails, about 12.8 instead of 20.9 GB/s" in finding.text
    good = _nccl.transport(kit.section(text, "# good NCCL", "# bad: only"))
    assert good["devices"] == PLANNED


def test_merged_devices_are_both_read() -> None:
    line = "NCCL INFO NET/IB : Using [0]rocep1s0f0+roceP2p1s0f0:1/RoCE [RO]; OOB enp1s0f0np0:192.0.2.1<0>"
    assert _nccl.transport(line)["devices"] == PLANNED


def test_pre_memlock(kit: Any) -> None:
    """`ulimit -l` says 8192 inside the container: a real limit, told apart from the Kexec HandOver kernel's."""
    kib = int(kit.case("pre-memlock").splitlines()[2])
    limits = UNLIMITED.replace("unlimited", str(kib * 1024), 1)
    (finding,) = _nccl.container_trouble("spark-01", "rank container vllm", GOOD, limits)
    assert (finding.severity, finding.code) == ("error", "pre-memlock")
    assert "may lock only 8192 KiB (ulimit -l)" in finding.text
    assert _nccl.locked_memory(UNLIMITED) is None


def test_queue_pairs_prove_rdma_where_the_log_is_silent() -> None:
    rows = [
        {
            "ifname": "rocep1s0f0",
            "port": 1,
            "lqpn": 7,
            "type": "RC",
            "state": "RTS",
            "pid": 4211,
            "comm": "VLLM::Worker_TP",
        },
        {
            "ifname": "roceP2p1s0f0",
            "port": 1,
            "lqpn": 8,
            "type": "RC",
            "state": "RTS",
            "pid": 4211,
            "comm": "VLLM::Worker_TP",
        },
        {"ifname": "rocep1s0f1", "port": 1, "lqpn": 1, "type": "GSI", "state": "RTS", "pid": 0, "comm": "[mlx5_ib]"},
    ]
    assert _nccl.queue_pairs(json.dumps(rows), [4211]) == ["roceP2p1s0f0", "rocep1s0f0"]
    assert _nccl.queue_pairs(json.dumps(rows), [99]) == []
    assert _nccl.queue_pairs("", [4211]) == []
    silent = _nccl.transport("INFO 11-29 15:00:00 [api_server.py:1] Application startup complete.")
    assert _nccl.use_trouble("spark-01", "r", PLANNED, silent, ["roceP2p1s0f0", "rocep1s0f0"]) == []
    (finding,) = _nccl.use_trouble("spark-01", "r", PLANNED, silent, [])
    assert (finding.severity, finding.code) == ("note", "rdma-unproven")
