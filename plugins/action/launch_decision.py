# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Decide per cluster whether it has to be launched. See the module of the same name."""

from __future__ import annotations

import os
import socket
from typing import Any

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

from ansible_collections.gb10.fleet.plugins.module_utils._launch import BUSY, LAUNCH, REFUSE, decide
from ansible_collections.gb10.fleet.plugins.module_utils._staging_lock import LAUNCH_ADVICE
from ansible_collections.gb10.fleet.plugins.plugin_utils._facts import host_facts

display = Display()


def ended(pid: int) -> bool:
    """Whether no process of this machine has this id."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


class ActionModule(ActionBase):
    """Every rank of a cluster comes to the same decision from the same reports; the head prints it."""

    TRANSFERS_FILES = False
    _requires_connection = False
    _supports_check_mode = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        super().run(tmp, task_vars)
        task_vars = task_vars or {}
        args = self.validate_argument_spec(
            argument_spec={"report": {"type": "str", "required": True}, "restart": {"type": "bool", "default": False}}
        )[1]
        hostvars, members = task_vars["hostvars"], task_vars["topology_members"]
        # A node that became unreachable is out of the play: what it registered, if anything, says nothing.
        answers = [
            (hostvars[m].get(args["report"]) or {}).get("rank") if m in task_vars["ansible_play_hosts"] else None
            for m in members
        ]
        controller = socket.gethostname()
        launches = [answer["launch"] for answer in answers if answer and answer.get("launch")]
        dead = sorted(
            {launch["pid"] for launch in launches if launch["controller"] == controller and ended(launch["pid"])}
        )
        decision = decide(members, answers, args["restart"], dead, controller)
        cluster, because = task_vars["topology_cluster"], "; ".join(decision.reasons)
        if decision.verdict == BUSY:
            raise AnsibleActionFail(f"cluster {cluster}: {because}. Nothing was changed. {LAUNCH_ADVICE}")
        if decision.verdict == REFUSE:
            raise AnsibleActionFail(
                f"cluster {cluster}: {because}. Nothing was changed. Put the node right, or launch anew with -e serve_restart=true."
            )
        launch = decision.verdict == LAUNCH
        if task_vars["inventory_hostname"] == members[0]:
            display.display(self._line(cluster, task_vars, answers[0] or {}, because))
        facts = {
            "launch_needed": launch,
            "launch_reasons": list(decision.reasons),
            # Tasks run in children of the process that the user started.
            "launch_holder": {"controller": controller, "pid": os.getppid(), "dead": dead},
        }
        return {"changed": False, **host_facts(self, facts)}

    @staticmethod
    def _line(cluster: str, task_vars: dict[str, Any], head: dict[str, Any], because: str) -> str:
        if because:
            return f"{cluster}: to be launched, because {because}"
        probe = head.get("probe") or {}
        return (
            f"{cluster}: serves {task_vars['topology_recipe']['served_name']} on {task_vars['topology_endpoint']}/v1, "
            f"{task_vars['topology_size']} of {task_vars['topology_size']} ranks alive, "
            f"completion answered in {probe.get('ttft_s', 0):.2f} s to the first token"
        )
