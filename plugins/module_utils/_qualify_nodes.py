# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What happened on one node while its engine was measured: the sampler's lines and two looks at the rank. Pure functions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ansible_collections.gb10.fleet.plugins.module_utils._qualify import median

KIB_PER_GIB = 1 << 20
# A GPU that is busier than this carries load: idle readings say nothing about heat.
LOADED_PERCENT = 50.0
# Points of a curve that a page can show.
POINTS = 240
# Clocks of two nodes further apart than this are set right.
CLOCK_S = 2.0


def parse(lines: str) -> dict[str, Any]:
    """``{start, samples, end}`` of the sampler's file; what is cut off is left out."""
    out: dict[str, Any] = {"start": None, "samples": [], "end": None}
    for line in lines.splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        kind = row.get("k")
        if kind == "s":
            out["samples"].append(row)
        elif kind in ("start", "end"):
            out[kind] = row
    return out


def thin(points: Sequence[Sequence[float]], most: int = POINTS) -> list[list[float]]:
    """At most ``most`` points of ``[time, value]``; of every stretch the lowest and the highest stay."""
    if len(points) <= most:
        return [list(point) for point in points]
    width = len(points) / (most // 2)
    out: list[list[float]] = []
    for number in range(most // 2):
        stretch = points[int(number * width) : int((number + 1) * width)]
        both = (min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1]))
        out += [list(p) for p in sorted(both, key=lambda p: p[0])]
    return out


def series(samples: Sequence[Mapping[str, Any]], name: str, shift_s: float, scale: float = 1.0) -> list[list[float]]:
    """``[[epoch, value], …]`` of one reading."""
    return thin([[round(s["at"] - shift_s, 1), round(s[name] * scale, 2)] for s in samples if s.get(name) is not None])


def node(
    rank: int,
    lines: str,
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    guard: Mapping[str, Any] | None = None,
    head_time: float | None = None,
) -> dict[str, Any]:
    """One node of a result.

    :param lines: the sampler's file; empty where none ran.
    :param before: ``rank_info`` before the run, ``after``: after it; empty mappings where the node did not answer.
    :param guard: ``memory_guard_info`` after it.
    :param head_time: the head's clock at the time of ``before``.
    """
    said = parse(lines)
    samples, end = said["samples"], said["end"]
    shift = before.get("node_time", 0.0) - head_time if head_time is not None and before.get("node_time") else 0.0
    shift = shift if abs(shift) > CLOCK_S else 0.0
    began = said["start"]["at"] if said["start"] else before.get("node_time", 0.0)
    loaded = [s for s in samples if (s.get("util") or 0.0) >= LOADED_PERCENT] or [s for s in samples if "power" in s]

    def lowest(name: str) -> float | None:
        return min((round(s[name] / KIB_PER_GIB, 2) for s in samples if s.get(name) is not None), default=None)

    def highest(name: str, of: Sequence[Mapping[str, Any]] | None = None) -> float | None:
        return max((s[name] for s in (samples if of is None else of) if s.get(name) is not None), default=None)

    faults = None
    if end:
        sources = end["faults"]
        faults = {
            "engine": sum(s["count"] for s in sources if s["engine"]),
            "other": sum(s["count"] for s in sources if not s["engine"]),
            "kernel": end["kernel_faults"],
            "sources": sources[:8],
        }
    restarted = bool(before and after) and (
        before.get("container_id") != after.get("container_id") or before.get("started_at") != after.get("started_at")
    )
    missing = None
    if not after:
        missing = "the node did not answer at the end"
    elif not lines.strip():
        missing = "the sampler left no file"
    elif not end:
        missing = "the sampler was ended before its end"
    return {
        "rank": rank,
        "missing": missing,
        "faults": faults,
        "memory_free_min_gib": lowest("free"),
        "memory_available_min_gib": lowest("avail"),
        "power_w": median(s.get("power") for s in loaded),
        "gpu_celsius": highest("temp", loaded),
        "gpu_clock_mhz": median(s.get("clock") for s in loaded),
        "gpu_percent": median(s.get("util") for s in samples),
        "soc_celsius": highest("soc"),
        "driver": (end or {}).get("driver"),
        "kernel": (end or {}).get("kernel"),
        "gpu_error": (end or {}).get("gpu_error") or None,
        "rdma_errors": end["rdma"] if end else None,
        "threads": end["threads"] if end else [],
        "sampler": end["cost"] if end else None,
        "restarts": bool(restarted),
        "engine_alive": after.get("engine_alive") if after else None,
        "processes_stopped": bool(after.get("processes_stopped")),
        "status": after.get("status"),
        "kv_available_gib": (before.get("facts") or {}).get("kv_available_gib"),
        "kernel_lines": [line for line in after.get("kernel_lines") or [] if _epoch(line) >= began],
        "guard": {"active": guard.get("active") == "active", "summary": guard.get("summary")} if guard else None,
        "series": {
            "memory_available_gib": series(samples, "avail", shift, 1 / KIB_PER_GIB),
            "memory_free_gib": series(samples, "free", shift, 1 / KIB_PER_GIB),
            "soc_celsius": series(samples, "soc", shift),
            "gpu_celsius": series(samples, "temp", shift),
            "power_w": series(samples, "power", shift),
        },
    }


def _epoch(line: Mapping[str, Any]) -> float:
    """When a kernel line was written (``journalctl --output short-unix``); one without a time counts."""
    try:
        return float(line["time"])
    except (KeyError, TypeError, ValueError):
        return float("inf")
