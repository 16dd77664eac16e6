# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""End a whole cluster where one of its ranks failed. See the module of the same name."""

from __future__ import annotations

from typing import Any

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase


class ActionModule(ActionBase):
    """Passes when no rank of this host's cluster has failed or become unreachable; other clusters are not looked at."""

    TRANSFERS_FILES = False
    _requires_connection = False
    _supports_check_mode = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        super().run(tmp, task_vars)
        task_vars = task_vars or {}
        self.validate_argument_spec(argument_spec={})
        causes = []
        for member in task_vars["topology_members"]:
            failure = task_vars["hostvars"][member].get("launch_failure")
            if failure:
                causes.append(f"{member}: {failure}")
            elif member not in task_vars["ansible_play_hosts"]:
                causes.append(f"{member}: became unreachable")
        if causes:
            # A rank that fails because of another one repeats its words: say each sentence once.
            unique = list(dict.fromkeys(causes))
            raise AnsibleActionFail(f"cluster {task_vars['topology_cluster']} is not launched. " + " | ".join(unique))
        return {"changed": False}
