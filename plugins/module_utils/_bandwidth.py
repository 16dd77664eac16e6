# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a bandwidth probe of a rail means. Pure functions.

Figures: one rail 92.6 Gb/s (ib_write_bw of a GB10) to 112 Gb/s, both 196 to 200; a CX7 that came up degraded is capped near
13 Gb/s in TCP and RDMA alike, with clean counters (dgx-spark-playbooks#108).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

FULL_GBIT = 85.0
DEGRADED_GBIT = (8.0, 25.0)
BOTH_GBIT = 170.0
PERFTEST, IPERF = "ib_write_bw", "iperf3"


def server_argv(tool: str, rail: Mapping[str, Any], port: int, seconds: int) -> list[str]:
    """The serving side, ended by ``timeout`` whatever happens. Buffers stay at 64 KiB: large ones have frozen a node."""
    bound = ["timeout", "--kill-after=1", str(4 * seconds + 30)]
    if tool == PERFTEST:
        return [*bound, *_perftest(rail, port, seconds)]
    return [*bound, IPERF, "--server", "--one-off", "--bind", str(rail["source"]), "--port", str(port)]


def client_argv(tool: str, rail: Mapping[str, Any], port: int, seconds: int) -> list[str]:
    """The measuring side."""
    if tool == PERFTEST:
        return [*_perftest(rail, port, seconds), str(rail["peer_address"])]
    return [
        *(IPERF, "--client", str(rail["peer_address"]), "--bind", str(rail["source"]), "--port", str(port)),
        *("--time", str(seconds), "--parallel", "4", "--json"),
    ]


def _perftest(rail: Mapping[str, Any], port: int, seconds: int) -> list[str]:
    argv = [PERFTEST, "--ib-dev", str(rail["hca"]), "--port", str(port), "--duration", str(seconds)]
    if rail.get("gid_index") is not None:
        argv += ["--gid-index", str(rail["gid_index"])]
    return [*argv, "--size", "65536", "--qp", "4", "--report_gbits", "--CPU-freq"]


def parse(tool: str, text: str) -> float | None:
    """Average Gb/s of a run, None when it printed none."""
    if tool == IPERF:
        try:
            return float(json.loads(text)["end"]["sum_received"]["bits_per_second"]) / 1e9
        except (ValueError, KeyError, TypeError):
            return None
    for line in reversed(text.splitlines()):
        words = line.split()
        if len(words) >= 5 and words[0].isdigit() and words[1].isdigit():
            return float(words[3])
    return None


def verdict(gbit: float | None) -> str:
    """One rail: full, degraded, slow, or failed."""
    if gbit is None:
        return "failed"
    if gbit >= FULL_GBIT:
        return "full"
    return "degraded" if DEGRADED_GBIT[0] <= gbit <= DEGRADED_GBIT[1] else "slow"


def overall(results: Sequence[Mapping[str, Any]]) -> str:
    """A link to one peer: full (both rails), one-rail, degraded, slow, failed; TCP when only sockets were measured."""
    if not results or all(result["gbit"] is None for result in results):
        return "failed"
    verdicts = [verdict(result["gbit"]) for result in results]
    if "degraded" in verdicts:
        return "degraded"
    if all(result["tool"] == IPERF for result in results):
        return "TCP"
    if sum(result["gbit"] or 0.0 for result in results) >= BOTH_GBIT:
        return "full"
    return "one-rail" if "full" in verdicts else "slow"


def advice(node: str, peer: str, results: Sequence[Mapping[str, Any]]) -> str | None:
    """A sentence where there is something to do."""
    figures = (
        ", ".join(f"rail {r['rail']} {r['gbit']:.1f} Gb/s" for r in results if r["gbit"] is not None) or "no figure"
    )
    what = overall(results)
    if what == "degraded":
        return (
            f"{node} → {peer}: {figures}, wanted about 100 per rail: a CX7 came up degraded (clean counters, 200 "
            "Gb/s link). A reboot does not cure it: power both nodes off, unplug them for a minute, and start "
            "again. The 27 W line of mlx5 means nothing."
        )
    if what == "one-rail" and len(results) > 1:
        bad = next(r for r in results if verdict(r["gbit"]) != "full")
        which = f"rail {bad['rail']} is {verdict(bad['gbit'])}"
        return f"{node} → {peer}: {figures}: {which}. Look at its MTU and GID, and at ethtool -S."
    if what in ("slow", "failed"):
        words = next((f": {r['error']}" for r in results if r.get("error")), "")
        return f"{node} → {peer}: {figures}, wanted about 100 per rail{words}. Look at MTU, cable and other traffic on the link."
    if what == "TCP":
        return f"{node} → {peer}: {figures} over TCP; RDMA was not measured. Install perftest on both nodes for a figure of RDMA."
    return None
