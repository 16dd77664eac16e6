# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Print text for a person: tables and commands, as they are. See the module of the same name."""

from __future__ import annotations

from typing import Any

from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

display = Display()


class ActionModule(ActionBase):
    """``debug`` wraps, quotes and indents what it prints; a command to paste and a table must come out untouched."""

    TRANSFERS_FILES = False
    _requires_connection = False
    _supports_check_mode = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        super().run(tmp, task_vars)
        args = self.validate_argument_spec(argument_spec={"text": {"type": "str", "required": True}})[1]
        if args["text"]:
            display.display(str(args["text"]).rstrip("\n"))
        return {"changed": False, "text": args["text"]}
