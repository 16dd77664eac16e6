"""Verdicts of the bandwidth probe, by recorded figures."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from ansible_collections.gb10.fleet.plugins.module_utils import _bandwidth


def results(*gbit: float | None, tool: str = "ib_write_bw") -> list[dict[str, Any]]:
    return [{"peer": "spark-02", "rail": number, "tool": tool, "gbit": value} for number, value in enumerate(gbit, 1)]


def test_ib_write_bw_of_a_gb10(kit: Any) -> None:
    assert _bandwidth.parse("ib_write_bw", kit.capture("ib_write_bw")) == 92.57
    assert _bandwidth.verdict(92.57) == "full"


def test_net_cx7_13gbps(kit: Any) -> None:
    """200 Gb/s link, clean counters, 13.23 Gb/s by RDMA and 12.86 by TCP: degraded, and the 27 W line is no sign of it."""
    text = kit.case("net-cx7-13gbps")
    rdma = float(re.findall(r"BW average ([\d.]+) Gb/sec", text)[0])
    tcp = float(re.findall(r"iperf3: ([\d.]+) Gbits", text)[0])
    healthy = [float(value) for value in re.findall(r"([\d.]+) / ([\d.]+) per logical", text)[0]]
    assert _bandwidth.overall(results(rdma)) == "degraded"
    assert _bandwidth.overall(results(tcp, tool="iperf3")) == "degraded"
    assert _bandwidth.overall(results(*healthy)) == "full"
    sentence = _bandwidth.advice("spark-01", "spark-02", results(rdma))
    assert sentence is not None
    assert sentence.startswith(
        "spark-01 → spark-02: rail 1 13.2 Gb/s, wanted about 100 per rail: a CX7 came up degraded"
    )
    assert "power both nodes off" in sentence


@pytest.mark.parametrize(
    ("gbit", "tool", "expected"),
    [
        ((98.0, 98.5), "ib_write_bw", "full"),
        ((108.9,), "ib_write_bw", "one-rail"),
        ((97.0, None), "ib_write_bw", "one-rail"),
        ((97.0, 40.0), "ib_write_bw", "one-rail"),
        ((40.0, 41.0), "ib_write_bw", "slow"),
        ((45.0,), "iperf3", "TCP"),
        ((None, None), "ib_write_bw", "failed"),
        ((), "ib_write_bw", "failed"),
    ],
)
def test_verdicts(gbit: tuple[float | None, ...], tool: str, expected: str) -> None:
    assert _bandwidth.overall(results(*gbit, tool=tool)) == expected


def test_iperf3() -> None:
    text = json.dumps({"end": {"sum_received": {"bits_per_second": 12.86e9}}})
    assert _bandwidth.parse("iperf3", text) == pytest.approx(12.86)
    assert _bandwidth.parse("iperf3", "iperf3: error - unable to connect to server") is None


def test_qual_nccl_16g_buffers_are_bounded() -> None:
    """16 GB of buffer froze a node (dgx-spark-playbooks#102): 64 KiB here, and no server outlives its time."""
    rail = {
        "number": 1,
        "hca": "rocep1s0f0",
        "gid_index": 3,
        "source": "192.0.2.1",
        "peer_address": "192.0.2.2",
        "peer": "spark-02",
    }
    server = _bandwidth.server_argv("ib_write_bw", rail, 18515, 3)
    assert server[:3] == ["timeout", "--kill-after=1", "42"]
    assert server[server.index("--size") + 1] == "65536"
    assert server[server.index("--gid-index") + 1] == "3"
    assert _bandwidth.client_argv("iperf3", rail, 18515, 3)[:5] == [
        "iperf3",
        "--client",
        "192.0.2.2",
        "--bind",
        "192.0.2.1",
    ]
