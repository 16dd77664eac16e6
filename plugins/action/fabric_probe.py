# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Work out on the controller what a node has to prove, then run the module of the same name there."""

from __future__ import annotations

from typing import Any

from ansible.plugins.action import ActionBase

from ansible_collections.gb10.fleet.plugins.module_utils._fabric_model import ROCE
from ansible_collections.gb10.fleet.plugins.module_utils._fabric_plan import plan
from ansible_collections.gb10.fleet.plugins.module_utils._fabric_proof import targets
from ansible_collections.gb10.fleet.plugins.module_utils._plain import plain
from ansible_collections.gb10.fleet.plugins.plugin_utils._cluster_vars import members, ranks_of, registered


class ActionModule(ActionBase):
    """The targets of a node follow from the reports of all ranks of its cluster."""

    TRANSFERS_FILES = False
    _supports_check_mode = True
    _supports_async = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        super().run(tmp, task_vars)
        task_vars = task_vars or {}
        args = dict(self._task.args)
        if args.get("info_from"):
            planned = plan(ranks_of(task_vars, args["info_from"]), args.get("transport") or ROCE)
            listeners = {name: registered(task_vars, name, args["info_from"], "port") for name in members(task_vars)}
            args["targets"] = plain(targets(planned, task_vars["inventory_hostname"], listeners))
        return self._execute_module(module_args=args, task_vars=task_vars)
