# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the pages of a qualification show: rows in words, and charts as coordinates. Pure functions; the template only draws."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ansible_collections.gb10.fleet.plugins.module_utils._qualify import (
    CHECKS,
    FAIL,
    NOT_APPLICABLE,
    PASS,
    number,
    of_stage,
    percentile,
)

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 720, 52, 96, 22, 26
# As many lines as a person tells apart by colour.
SLOTS = 6


def ticks(low: float, high: float, most: int = 4) -> list[float]:
    """Round values from below ``low`` to above ``high``."""
    span = (high - low) or abs(high) or 1.0
    raw = span / most
    size = 10 ** math.floor(math.log10(raw))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= raw * 0.999)
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return [round(step * n, 10) for n in range(first, max(last, first + 1) + 1)]


def plain(value: float) -> str:
    """A tick's label."""
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:g}"


def line_chart(
    lines: Sequence[Mapping[str, Any]],
    title: str,
    unit: str,
    x_unit: str,
    bands: Sequence[Mapping[str, Any]] = (),
    height: int = 190,
    from_zero: bool = False,
    dots: bool = False,
) -> dict[str, Any] | None:
    """A chart of lines ``{name, slot, points: [[x, y], …]}`` over the same axes; None without a point.

    :param bands: stretches of the x axis ``{name, from, to}`` that are marked.
    """
    drawn = [line for line in lines if line["points"]]
    if not drawn:
        return None
    xs = [x for line in drawn for x, dummy in line["points"]] + [b[k] for b in bands for k in ("from", "to")]
    ys = [y for line in drawn for dummy, y in line["points"]]
    y_ticks = ticks(0.0 if from_zero else min(ys), max(ys))
    x_low, x_high = (0.0, max(xs)) if from_zero else (min(xs), max(xs))
    x_ticks = sorted({x for line in drawn for x, dummy in line["points"]}) if dots else [
        x for x in ticks(x_low, x_high, 6) if x_low <= x <= x_high
    ]  # fmt: skip
    wide, high = WIDTH - LEFT - RIGHT, height - TOP - BOTTOM

    def at_x(x: float) -> float:
        return round(LEFT + (x - x_low) / ((x_high - x_low) or 1.0) * wide, 1)

    def at_y(y: float) -> float:
        return round(TOP + (y_ticks[-1] - y) / (y_ticks[-1] - y_ticks[0]) * high, 1)

    out_lines = []
    for line in drawn:
        spots = [(at_x(x), at_y(y)) for x, y in line["points"]]
        out_lines.append({
            "name": line["name"], "slot": line["slot"], "path": " ".join(f"{x:g},{y:g}" for x, y in spots),
            "dots": [{"x": x, "y": y, "text": f"{line['name']}: {number(value[1], unit)} at {plain(round(value[0], 1))} {x_unit}"}
                     for (x, y), value in zip(spots, line["points"], strict=True)] if dots or len(spots) == 1 else [],
            "end_x": spots[-1][0], "end_y": spots[-1][1], "end": number(line["points"][-1][1], unit),
        })  # fmt: skip
    spread_labels(out_lines)
    return {
        "title": title,
        "unit": unit,
        "x_unit": x_unit,
        "width": WIDTH,
        "height": height,
        "left": LEFT,
        "right": WIDTH - RIGHT,
        "top": TOP,
        "bottom": height - BOTTOM,
        "x_ticks": [{"x": at_x(x), "label": plain(round(x, 6))} for x in x_ticks],
        "y_ticks": [{"y": at_y(y), "label": plain(y)} for y in y_ticks],
        "lines": out_lines,
        "bands": [
            {
                "x": at_x(b["from"]),
                "width": round(max(at_x(b["to"]) - at_x(b["from"]), 0.5), 1),
                "name": b["name"],
                "shown": at_x(b["to"]) - at_x(b["from"]) >= 7 * len(b["name"]),
            }
            for b in bands
        ],
    }


def spread_labels(lines: Sequence[dict[str, Any]], least: float = 13.0) -> None:
    """Labels at the ends of lines do not lie over each other."""
    below = -math.inf
    for line in sorted(lines, key=lambda one: one["end_y"]):
        line["label_y"] = max(line["end_y"], below + least)
        below = line["label_y"]


def strip_chart(rows: Sequence[Mapping[str, Any]], title: str, unit: str) -> dict[str, Any] | None:
    """Every value as a dot, one row per kind ``{name, slot, values}``, on a logarithmic axis of time."""
    drawn = [row for row in rows if any(value > 0 for value in row["values"])]
    if not drawn:
        return None
    values = [value for row in drawn for value in row["values"] if value > 0]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    high = max(high, low + 1)
    height, left = TOP + BOTTOM + 34 * len(drawn), 74
    out: list[dict[str, Any]] = []

    def at_x(value: float) -> float:
        return round(left + (math.log10(value) - low) / (high - low) * (WIDTH - left - RIGHT), 1)

    for place, row in enumerate(drawn):
        known = [value for value in row["values"] if value > 0]
        middle, p95 = percentile(known, 0.5) or 0.0, percentile(known, 0.95) or 0.0
        words = number(middle, "s") if len(known) == 1 else f"p50 {number(middle, 's')}, p95 {number(p95, 's')}"
        out.append({"name": row["name"], "slot": row["slot"], "y": TOP + 17 + 34 * place, "words": words, "middle": at_x(middle),
                    "words_x": min(max(at_x(v) for v in known) + 10, WIDTH - 150),
                    "dots": [{"x": at_x(v), "text": f"{row['name']}: {number(v, 's')}"} for v in known]})  # fmt: skip
    return {
        "title": title,
        "unit": unit,
        "width": WIDTH,
        "height": height,
        "left": left,
        "right": WIDTH - RIGHT,
        "top": TOP,
        "bottom": height - BOTTOM,
        "rows": out,
        "x_ticks": [{"x": at_x(10.0**n), "label": plain(10.0**n)} for n in range(low, high + 1)],
    }


def bands(measured: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Stages as stretches of time since the run began; the steps of concurrency are one."""
    began = measured["began"]
    out: list[dict[str, Any]] = []
    for stage in measured.get("stages") or []:
        name = stage["name"].split(" ")[0]
        if out and out[-1]["name"] == name:
            out[-1]["to"] = stage["ended"] - began
        else:
            out.append({"name": name, "from": stage["began"] - began, "to": stage["ended"] - began})
    return out


def charts(result: Mapping[str, Any]) -> dict[str, Any]:
    """TTFT, concurrency, and the nodes over time."""
    measured, nodes = result["measured"], result.get("nodes") or {}
    slots = {name: place % SLOTS for place, name in enumerate(nodes)}
    began = measured.get("began") or 0.0
    marks = bands(measured)
    minutes = bool(marks) and marks[-1]["to"] > 600
    scale, x_unit = (60.0, "min") if minutes else (1.0, "s")
    shown = [{**mark, "from": mark["from"] / scale, "to": mark["to"] / scale} for mark in marks]
    over_time = []
    for key, title, unit in (
        ("memory_available_gib", "Memory available", "GiB"),
        ("gpu_celsius", "GPU temperature", "°C"),
        ("soc_celsius", "SoC temperature, hottest zone", "°C"),
        ("power_w", "GPU power", "W"),
    ):
        lines = [
            {"name": name, "slot": slots[name],
             "points": [[(at - began) / scale, value] for at, value in (node.get("series") or {}).get(key) or []]}
            for name, node in nodes.items()
        ]  # fmt: skip
        # Two points are no curve: a short run asks the GPU that often only.
        chart = line_chart([one for one in lines if len(one["points"]) > 2], title, unit, x_unit, shown)
        over_time += [chart] if chart else []
    steps = [step for step in measured.get("concurrency") or [] if not step["errors"]]
    return {
        "ttft": strip_chart(
            [
                {
                    "name": stage,
                    "slot": place,
                    "values": [r["ttft_s"] for r in of_stage(measured, stage) if r.get("ttft_s")],
                }
                for place, stage in enumerate(("short", "cold", "cached"))
            ],
            "Time to first token, every request (logarithmic)",
            "s",
        ),
        "concurrency": line_chart(
            [{"name": "all streams", "slot": 0, "points": [[step["streams"], step["tokens_per_s"]] for step in steps]}],
            "Tokens per second of all streams together",
            "tokens/s",
            "streams",
            from_zero=True,
            dots=True,
        )
        if len(steps) > 1
        else None,
        "over_time": over_time,
        "legend": [{"name": name, "slot": slot} for name, slot in slots.items()] if over_time else [],
    }


def moment(epoch: float | None) -> str:
    """A time as a person reads it, UTC."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(epoch)) if epoch else "-"


def shown(line: Mapping[str, Any]) -> dict[str, Any]:
    """A line of the verdict in words."""
    unit = line["unit"]
    return {**line, "measured": number(line["measured"], unit), "expected": number(line["expected"], unit),
            "mark": {PASS: "✓", FAIL: "✗"}.get(line["status"], "–")}  # fmt: skip


def page(result: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that report.html shows."""
    lines = [shown(line) for line in result["lines"]]
    nodes = []
    for name, node in (result.get("nodes") or {}).items():
        faults = node.get("faults") or {}
        sampler = node.get("sampler") or {}
        busiest = (node.get("threads") or [{}])[0]
        nodes.append([
            name, str(node["rank"]), number(faults.get("engine")), number(faults.get("other")),
            number(node.get("memory_free_min_gib"), "GiB"), number(node.get("memory_available_min_gib"), "GiB"),
            number(node.get("power_w"), "W"), number(node.get("gpu_celsius"), "°C"), number(node.get("soc_celsius"), "°C"),
            number(node.get("gpu_clock_mhz"), "MHz"),
            f"{busiest['name']} {number(busiest['cpu_percent'])} %" if busiest else "-",
            f"{sampler['percent_of_a_core']:.2f} %" if sampler else "-",
        ])  # fmt: skip
    checks = [line for line in lines if line["key"] in CHECKS]
    figures = [line for line in lines if line["key"] not in CHECKS]
    counts = {status: sum(line["status"] == status for line in lines) for status in (PASS, FAIL, NOT_APPLICABLE)}
    measured = result["measured"]
    counted = []
    before, after = (
        (measured.get("metrics") or {}).get("before") or {},
        (measured.get("metrics") or {}).get("after") or {},
    )
    for name in before:
        if before[name] is not None and after.get(name) is not None:
            counted.append(
                [name.replace("_", " "), number(before[name]), number(after[name]), number(after[name] - before[name])]
            )
    return {
        "verdict": result["verdict"],
        "counts": counts,
        "title": f"{result['recipe']} on {result['cluster']}",
        "size": result["plan"]["size"],
        "began": moment(measured.get("began")),
        "seconds": number(round(measured["ended"] - measured["began"]), "s") if measured.get("ended") else "-",
        "figures": figures,
        "checks": checks,
        "failed": [line for line in lines if line["status"] == FAIL],
        "findings": result["findings"],
        "nodes": nodes,
        "node_columns": [
            "Node",
            "Rank",
            "Major faults, engine",
            "others",
            "Lowest MemFree",
            "Lowest MemAvailable",
            "GPU power",
            "GPU",
            "SoC",
            "SM clock",
            "Busiest engine thread",
            "Sampler, of a core",
        ],
        "counters": counted,
        "charts": charts(result),
        "provenance": provenance_rows(result.get("provenance") or {}),
    }


def provenance_rows(given: Mapping[str, Any]) -> list[list[str]]:
    """Where the result comes from, one pair per row."""
    rows = []
    for name, value in given.items():
        if isinstance(value, Mapping):
            unlike = {str(v) for v in value.values()}
            value = next(iter(unlike)) if len(unlike) == 1 else ", ".join(f"{k}: {v}" for k, v in value.items())
        rows.append([name.replace("_", " "), "-" if value in (None, "") else str(value)])
    return rows


def text_rows(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The verdict for a terminal."""
    return [
        {"": line["mark"], "figure": line["label"], "measured": line["measured"], "expected": line["expected"]}
        for line in map(shown, result["lines"])
    ]


def compared(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows of a comparison in words."""
    return [
        {"figure": row["label"], "before": number(row["before"], row["unit"]), "after": number(row["after"], row["unit"]),
         "change": "-" if row["percent"] is None else f"{row['percent']:+.1f} %",
         "verdict": "within noise" if row["verdict"] == "same" else row["verdict"]}
        for row in rows
    ]  # fmt: skip
