# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the role watchdog writes, and what status.yml shows of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from ansible_collections.gb10.fleet.plugins.module_utils import _watchdog

ROLES = Path(__file__).resolve().parents[2] / "roles"


def role_arguments() -> set[str]:
    """What the roles of this collection take from an inventory."""
    names: set[str] = set()
    for path in ROLES.glob("*/defaults/main.yml"):
        names |= set(yaml.safe_load(path.read_text(encoding="utf-8")) or {})
    return names


def watchdog_inventory(members: Sequence[Mapping[str, Any]], host: str, folder: str) -> dict[str, Any]:
    """The inventory of one cluster for its watchdog."""
    return _watchdog.inventory(members, role_arguments(), host, folder)


class FilterModule:
    """Filters of gb10.fleet for the role watchdog."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {
            "watchdog_inventory": watchdog_inventory,
            "watchdog_config": _watchdog.config,
            "watchdog_recipe": _watchdog.written_recipe,
            "watchdog_status": _watchdog.status,
        }
