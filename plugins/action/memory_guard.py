# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Hand the guard program, a file of the role memory_guard, to the module of the same name. See the module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ansible.plugins.action import ActionBase

PROGRAM = Path(__file__).parents[2] / "roles/memory_guard/files/memory_guard.py"


class ActionModule(ActionBase):
    _supports_check_mode = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        super().run(tmp, task_vars)
        args = dict(self._task.args)
        if args.get("state", "started") in ("present", "started"):
            args.setdefault("program", PROGRAM.read_text(encoding="utf-8"))
        return dict(self._execute_module(module_name="gb10.fleet.memory_guard", module_args=args, task_vars=task_vars))
