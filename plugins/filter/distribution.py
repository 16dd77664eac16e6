# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Who moves what to whom, from what the ranks of a cluster reported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ansible_collections.gb10.fleet.plugins.module_utils._distribution import (
    checkpoint_plan,
    image_plan,
    pinned,
    recipe_checkpoints,
)


class FilterModule:
    """Filters of gb10.fleet for the roles image and checkpoint."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {
            "recipe_checkpoints": recipe_checkpoints,
            "checkpoint_plan": checkpoint_plan,
            "checkpoint_pinned": pinned,
            "image_plan": image_plan,
        }
