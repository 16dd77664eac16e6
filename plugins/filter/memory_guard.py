# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the role memory_guard takes from a recipe."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ansible_collections.gb10.fleet.plugins.module_utils._memory_guard import checkpoint_folders, memory_share


class FilterModule:
    """Filters of gb10.fleet for the role memory_guard."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"memory_guard_files": checkpoint_folders, "memory_guard_share": memory_share}
