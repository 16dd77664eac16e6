"""A small SVG line plot: MemFree over time, one line per guard, the floor dashed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

COLOURS = ("#b03a2e", "#b9770e", "#1f618d", "#1e8449", "#6c3483")
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 860, 380, 62, 16, 60, 46


def _step(span: float, ticks: int = 6) -> float:
    """A round distance between ticks."""
    rough = span / ticks
    magnitude = 10 ** len(str(int(rough))) / 10 if rough >= 1 else 0.1
    return next((m * magnitude for m in (1, 2, 5, 10) if m * magnitude >= rough), rough)


def lines(traces: Mapping[str, Sequence[tuple[float, int, int]]], floor_mib: int, title: str) -> str:
    """``traces``: per guard, rows of (seconds, MemFree KiB, …). Returns the SVG text."""
    end_s = max((row[0] for rows in traces.values() for row in rows), default=1.0)
    top_gib = max((row[1] for rows in traces.values() for row in rows), default=1) / 1048576 * 1.05

    def x(seconds: float) -> float:
        return LEFT + seconds / end_s * (WIDTH - LEFT - RIGHT)

    def y(gib: float) -> float:
        return HEIGHT - BOTTOM - gib / top_gib * (HEIGHT - TOP - BOTTOM)

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        f'<text x="{LEFT}" y="20" font-size="15">{escape(title)}</text>',
    ]
    tick = 0.0
    while tick <= top_gib:
        out.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}" stroke="#ddd"/>'
            f'<text x="{LEFT - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:g} GiB</text>'
        )
        tick += _step(top_gib)
    tick = 0.0
    while tick <= end_s:
        out.append(f'<text x="{x(tick):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{tick:g} s</text>')
        tick += _step(end_s)
    floor = y(floor_mib / 1024)
    out.append(
        f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{floor:.1f}" y2="{floor:.1f}" stroke="#333" stroke-dasharray="6 4"/>'
    )
    out.append(f'<text x="{WIDTH - RIGHT}" y="{floor - 5:.1f}" text-anchor="end">floor {floor_mib} MiB</text>')
    legend_x = float(LEFT)
    for (name, rows), colour in zip(traces.items(), COLOURS, strict=False):
        points = " ".join(f"{x(row[0]):.1f},{y(row[1] / 1048576):.1f}" for row in rows)
        out.append(f'<polyline fill="none" stroke="{colour}" stroke-width="1.6" points="{points}"/>')
        out.append(f'<rect x="{legend_x:.0f}" y="32" width="14" height="4" fill="{colour}"/>')
        out.append(f'<text x="{legend_x + 18:.0f}" y="38">{escape(name)}</text>')
        legend_x += 34 + 6.2 * len(name)
    return "\n".join([*out, "</svg>", ""])
