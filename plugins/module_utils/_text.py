# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Text for a terminal of 100 columns. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def cell(value: Any) -> str:
    """One table cell: nothing known is a dash, never an empty hole or the word None."""
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.1f}"
    if isinstance(value, (list, tuple)):
        return ", ".join(cell(v) for v in value) or "-"
    return str(value)


def table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str] | None = None, title: str = "") -> str:
    """Rows (mappings) as an aligned text table; numbers are aligned right.

    :param columns: keys in the order to show (default: those of the first row). An underscore in a key is shown as a space.
    :param title: a line above the table.
    """
    if not rows:
        return ""
    names = list(columns or rows[0])
    body = [[cell(row.get(name)) for name in names] for row in rows]
    head = [name.replace("_", " ") for name in names]
    widths = [max(len(line[i]) for line in [head, *body]) for i in range(len(names))]
    numeric = [all(isinstance(row.get(n), (int, float)) or row.get(n) is None for row in rows) for n in names]
    lines = [title] if title else []
    for line in [head, *body]:
        cells = [
            text.rjust(w) if right else text.ljust(w) for text, w, right in zip(line, widths, numeric, strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
