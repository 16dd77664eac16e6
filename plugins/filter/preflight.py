# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Filter of the preflight role."""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Mapping
from typing import Any


def preflight_folders(recipe: Mapping[str, Any], models_dir: str) -> list[dict[str, Any]]:
    """What a recipe writes to a node, and where: its checkpoint and its drafter. Nothing without a recipe."""
    return [
        {"what": what, "path": posixpath.join(models_dir, item["directory"]), "size_gib": item.get("size_gib") or 0}
        for what in ("checkpoint", "drafter")
        if (item := recipe.get(what)) and item.get("directory")
    ]


class FilterModule:
    """Filters of gb10.fleet for the preflight role."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"preflight_folders": preflight_folders}
