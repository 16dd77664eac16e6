# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Judge the fabric of a cluster as a whole and set each rank's environment. See the module of the same name."""

from __future__ import annotations

from typing import Any

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

from ansible_collections.gb10.fleet.plugins.module_utils import _findings
from ansible_collections.gb10.fleet.plugins.module_utils._fabric_model import ROCE, SOCKET
from ansible_collections.gb10.fleet.plugins.module_utils._fabric_plan import plan
from ansible_collections.gb10.fleet.plugins.module_utils._fabric_proof import (
    environment,
    judge,
    mixed_indexes,
    rail_facts,
    rows,
)
from ansible_collections.gb10.fleet.plugins.module_utils._plain import plain
from ansible_collections.gb10.fleet.plugins.module_utils._text import table
from ansible_collections.gb10.fleet.plugins.plugin_utils._cluster_vars import (
    members,
    ranks_of,
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
                "info_from": {"type": "str", "required": True},
                "probe_from": {"type": "str", "required": True},
                "transport": {"type": "str", "choices": [ROCE, SOCKET], "default": ROCE},
                "cidr": {"type": "str"},
                "accept": {"type": "list", "elements": "str", "default": []},
                "show": {"type": "bool", "default": False},
                "defer_errors": {"type": "bool", "default": False},
            }
        )[1]
        host, cluster = task_vars["inventory_hostname"], subject(task_vars)
        result = plan(ranks_of(task_vars, args["info_from"]), args["transport"])
        before = {node: list(rails) for node, rails in result.rails.items()}
        probes = {
            name: {"results": registered(task_vars, name, args["probe_from"], "results")} for name in members(task_vars)
        }
        judge(result, probes)
        mixed_indexes(result)
        findings = _findings.accept(result.findings, args["accept"])
        speaks = host == reporter(task_vars)
        if speaks and args["show"]:
            shown = [] if args["defer_errors"] else _findings.lines(findings)
            title = f"{cluster}: fabric over {args['transport']}, {result.shape}"
            display.display("\n".join([table(rows(result, probes, before), title=title) or title, *shown]))
        if _findings.of(findings, _findings.ERROR) and not args["defer_errors"]:
            if not speaks:
                raise AnsibleActionFail(f"{cluster}: the fabric has errors, reported by {reporter(task_vars)}")
            headline = _findings.headline(f"{cluster}: fabric", findings)
            raise AnsibleActionFail(headline if args["show"] else _findings.report(f"{cluster}: fabric", findings))
        found = [finding.as_dict() for finding in findings]
        facts = {
            "fabric_env": environment(result, host, args["cidr"]),
            "fabric_rails": rail_facts(result, host),
            "fabric_shape": result.shape,
            "fabric_findings": found,
            "fabric_deferred": found if args["defer_errors"] else [],
        }
        answer = {"changed": False, **host_facts(self, plain(facts))}
        warnings = _findings.of(findings, _findings.WARNING)
        if speaks and warnings and not args["show"] and not args["defer_errors"]:
            answer["warnings"] = [f"{finding.text} [{finding.code}]" for finding in warnings]
        return answer
