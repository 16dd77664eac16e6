# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Collect evidence on a node and fetch it. See the module of the same name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ansible.errors import AnsibleConnectionFailure, AnsibleError
from ansible.plugins.action import ActionBase


class ActionModule(ActionBase):
    """Never fails a play: evidence is collected when something else has failed already."""

    TRANSFERS_FILES = True
    _supports_check_mode = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        super().run(tmp, task_vars)
        task_vars = task_vars or {}
        host = task_vars["inventory_hostname"]
        try:
            return self._collect(host, task_vars)
        except AnsibleConnectionFailure as exc:
            reason = " ".join(str(exc.message).split())
        except (AnsibleError, OSError) as exc:
            reason = " ".join(str(exc).split())
        return {
            "changed": False,
            "archive": None,
            "evidence": {"error": reason},
            "warnings": [f"{host}: no evidence: {reason}"],
        }

    def _collect(self, host: str, task_vars: dict[str, Any]) -> dict[str, Any]:
        result = self._execute_module("gb10.fleet.evidence_collect", dict(self._task.args), task_vars=task_vars)
        if result.get("failed"):
            raise AnsibleError(str(result.get("msg") or "the module failed"))
        stage = Path(str(self._task.args["stage_dir"])).expanduser()
        stage.mkdir(mode=0o700, parents=True, exist_ok=True)
        target = stage / f"{host}.tar.gz"
        try:
            self._connection.fetch_file(str(result["path"]), str(target))
        finally:
            self._remove_tmp_path(str(result["folder"]), force=True)
        target.chmod(0o600)
        return {"changed": False, "archive": str(target), "evidence": result["evidence"]}
