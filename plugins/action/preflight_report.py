# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Collect the findings of all nodes of a cluster and report them together. See the module of the same name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

from ansible_collections.gb10.fleet.plugins.module_utils import _findings
from ansible_collections.gb10.fleet.plugins.module_utils._findings import Finding
from ansible_collections.gb10.fleet.plugins.module_utils._plain import plain
from ansible_collections.gb10.fleet.plugins.module_utils._preflight import Node, Wanted, judge, rows
from ansible_collections.gb10.fleet.plugins.module_utils._text import table
from ansible_collections.gb10.fleet.plugins.plugin_utils._cluster_vars import (
    members,
    registered,
    reporter,
    subject,
)
from ansible_collections.gb10.fleet.plugins.plugin_utils._facts import host_facts

display = Display()


class ActionModule(ActionBase):
    """Every rank comes to the same judgement from the same reports; one of them says it."""

    TRANSFERS_FILES = False
    _requires_connection = False
    _supports_check_mode = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        super().run(tmp, task_vars)
        task_vars = task_vars or {}
        args = self.validate_argument_spec(
            argument_spec={
                "report_from": {"type": "str", "required": True},
                "fabric_from": {"type": "str"},
                "gpus": {"type": "bool", "default": True},
                "gb10": {"type": "bool", "default": True},
                "utilization": {"type": "float"},
                "safe_utilization": {"type": "float"},
                "free_gib": {"type": "float"},
                "disk_margin_gib": {"type": "float", "default": 5.0},
                "clock_s": {"type": "float", "default": 30.0},
                "image": {"type": "str"},
                "env": {"type": "dict", "default": {}},
                "rdma": {"type": "bool", "default": False},
                "become": {"type": "list", "elements": "str", "default": []},
                "accept": {"type": "list", "elements": "str", "default": []},
                "show": {"type": "bool", "default": False},
            }
        )[1]
        host, cluster = task_vars["inventory_hostname"], subject(task_vars)
        names = members(task_vars)
        nodes = [self._node(task_vars, name, args) for name in names]
        wanted = Wanted(
            cluster=task_vars.get("topology_cluster"),
            gpus=args["gpus"],
            gb10=args["gb10"],
            image=args["image"],
            utilization=args["utilization"],
            safe_utilization=args["safe_utilization"],
            free_gib=args["free_gib"],
            rdma=args["rdma"],
            ranks=len(names),
            env={str(key): str(value) for key, value in plain(args["env"]).items()},
            disk_margin_gib=args["disk_margin_gib"],
            clock_s=args["clock_s"],
            become=tuple(args["become"]),
        )
        deferred = [Finding(**finding) for finding in plain(task_vars.get("fabric_deferred") or [])]
        findings = deferred + _findings.accept(judge(nodes, wanted), args["accept"])
        speaks = host == reporter(task_vars)
        if speaks and args["show"]:
            body = table(rows(nodes), title=f"{cluster}: nodes (memory in GiB, disk free in GiB)")
            display.display("\n".join([body, *_findings.lines(findings)]))
        if _findings.of(findings, _findings.ERROR):
            if not speaks:
                raise AnsibleActionFail(f"{cluster}: preflight has errors, reported by {reporter(task_vars)}")
            headline = _findings.headline(cluster, findings)
            raise AnsibleActionFail(headline if args["show"] else _findings.report(cluster, findings))
        facts = {"preflight_findings": [finding.as_dict() for finding in findings]}
        answer = {"changed": False, **host_facts(self, facts)}
        warnings = _findings.of(findings, _findings.WARNING)
        if speaks and warnings and not args["show"]:
            answer["warnings"] = [f"{finding.text} [{finding.code}]" for finding in warnings]
        return answer

    @staticmethod
    def _node(task_vars: Mapping[str, Any], name: str, args: Mapping[str, Any]) -> Node:
        variables = task_vars["hostvars"][name]
        recipe = task_vars.get("topology_recipe") or {}
        purposes = {int(recipe.get("port") or 0): "the API", int(recipe.get("master_port") or 0): "the master port"}
        fabric = registered(task_vars, name, args["fabric_from"], "fabric")
        return Node(
            name=name,
            info=registered(task_vars, name, args["report_from"], "node"),
            ports=purposes,
            address=str(variables.get("ansible_host") or ""),
            fabric_env=plain(variables.get("fabric_env") or {}),
            interfaces=tuple(fabric["interfaces"]) if fabric else None,
        )
