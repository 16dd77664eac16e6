# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Filters around readiness: which requests warm an engine up, and an answer in words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ansible_collections.gb10.fleet.plugins.module_utils._rank_report import smoke_text
from ansible_collections.gb10.fleet.plugins.module_utils._warmup import warmup_plan


class FilterModule:
    """Filters of gb10.fleet around readiness."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"warmup_plan": warmup_plan, "smoke_text": smoke_text}
