# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Say how each cluster is, and why. See the module of the same name."""

from __future__ import annotations

import time
from typing import Any

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

from ansible_collections.gb10.fleet.plugins.module_utils._rank_report import report, unreachable
from ansible_collections.gb10.fleet.plugins.module_utils._rank_state import BUDGETS

display = Display()


class ActionModule(ActionBase):
    """The first rank that is in the play speaks for its cluster; no host is contacted."""

    TRANSFERS_FILES = False
    _requires_connection = False
    _supports_check_mode = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        super().run(tmp, task_vars)
        task_vars = task_vars or {}
        dummy, args = self.validate_argument_spec(
            argument_spec={
                "report": {"type": "str", "required": True},
                "require_serving": {"type": "bool", "default": False},
                "quiet": {"type": "bool", "default": False},
            }
        )
        members = [m for m in task_vars["topology_members"] if m in task_vars["ansible_play_hosts_all"]]
        present = [m for m in members if m in task_vars["ansible_play_hosts"]]
        if not present or task_vars["inventory_hostname"] != present[0]:
            return {
                "changed": False,
                "skipped": True,
                "msg": f"{present[0] if present else 'no rank'} speaks for its cluster.",
            }
        recipe = task_vars["topology_recipe"]
        head = task_vars["topology_addresses"][task_vars["topology_head"]]
        settings = {
            "budgets": {**BUDGETS, **{k: float(v) for k, v in (recipe.get("readiness") or {}).items() if k in BUDGETS}},
            "container": task_vars["topology_spec"]["name"],
            "master": f"{head}:{recipe['master_port']}" if task_vars["topology_size"] > 1 else None,
            "model": task_vars["topology_probe"]["model"],
            "waiting": False,
        }
        now = time.time()
        reports = [self._report(m, task_vars, args["report"], now) for m in members]
        said = report(
            task_vars["topology_cluster"],
            task_vars["topology_endpoint"],
            reports,
            settings,
            dict(task_vars["topology_addresses"]),
            now,
            recipe["fabric"]["transport"],
        )
        if not args["quiet"]:
            display.display(said.text)
        if args["require_serving"] and not said.serving:
            cause = said.diagnosis["cause"] if said.diagnosis else "no completion came"
            node = f"{said.diagnosis['node']} (rank {said.diagnosis['rank']}): " if said.diagnosis else ""
            raise AnsibleActionFail(f"cluster {task_vars['topology_cluster']} does not serve: {node}{cause}.")
        findings = [f.as_dict() for f in said.findings]
        return {
            "changed": False,
            "serving": said.serving,
            "diagnosis": said.diagnosis,
            "findings": findings,
            "text": said.text,
        }

    @staticmethod
    def _report(member: str, task_vars: dict[str, Any], name: str, now: float) -> dict[str, Any]:
        rank = task_vars["topology_members"].index(member)
        registered = task_vars["hostvars"][member].get(name) or {}
        if not registered.get("rank"):
            detail = " ".join(str(registered.get("msg") or "it is out of this run").split())
            return unreachable(member, rank, now, detail)
        said = dict(registered["rank"])
        return {
            **said,
            "host": member,
            "rank": rank,
            "at": now,
            "offset_s": now - said["node_time"],
            "group_since": now,
        }
