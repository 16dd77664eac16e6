# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Keep the largest window that an engine says will fit. See the module of the same name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

from ansible_collections.gb10.fleet.plugins.module_utils import _learned

display = Display()
CAUSE = "tensorfold-window"
OPTION = "options.context"


class ActionModule(ActionBase):
    """Writes on the controller only; the head's fork does."""

    TRANSFERS_FILES = False
    _requires_connection = False
    _supports_check_mode = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        super().run(tmp, task_vars)
        self.vars = task_vars or {}
        dummy, args = self.validate_argument_spec(argument_spec={"learned_dir": {"type": "str", "required": True}})
        cluster, recipe = self.vars["topology_cluster"], self.vars["topology_recipe"]
        window = self._window()
        if window is None or self.vars["topology_origins"].get(OPTION) == _learned.ORIGIN:
            raise AnsibleActionFail(
                str(self._result(self.vars["inventory_hostname"]).get("msg") or "a rank did not become ready")
            )
        if self.vars["topology_rank"] == 0 and not self._task.check_mode:
            _learned.keep_window(args["learned_dir"], cluster, recipe, window)
            display.display(
                f"{cluster}  {recipe['options'].get('context')} tokens do not fit: starting once more with a window of {window}"
            )
        return {"changed": False, "window": window}

    def _result(self, host: str) -> Mapping[str, Any]:
        found = self.vars["hostvars"][host].get("readiness_result")
        return found if isinstance(found, Mapping) else {}

    def _window(self) -> int | None:
        for host in self.vars["topology_members"]:
            said = self._result(host).get("diagnosis") or {}
            number = re.search(r"window: ([\d,]+)", str(said.get("line") or "")) if said.get("id") == CAUSE else None
            if number:
                return int(number[1].replace(",", ""))
        return None
