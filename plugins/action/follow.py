# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Wait for an asynchronous job and print how far it is. See the module of the same name."""

from __future__ import annotations

import json
import time
from typing import Any

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

from ansible_collections.gb10.fleet.plugins.module_utils._checkpoint import progress_line

display = Display()
# Answers to miss in a row before a node counts as gone: a reboot of a switch must not end a download of hours.
_MISSES = 20


class ActionModule(ActionBase):
    """Reads the job's files over the open connection; a look costs no module start on the node."""

    TRANSFERS_FILES = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        super().run(tmp, task_vars)
        task_vars = task_vars or {}
        dummy, args = self.validate_argument_spec(
            argument_spec={
                "job": {"type": "dict", "required": True},
                "progress_file": {"type": "path", "required": True},
                "every_s": {"type": "float", "default": 10},
            }
        )
        job = args["job"]
        jid = job.get("ansible_job_id")
        if not jid:
            return {**job, "changed": bool(job.get("changed"))}
        folder = self._remote_expand_user(self.get_shell_option("async_dir", default="~/.ansible_async"))
        place = self._connection._shell.join_path(folder, jid)
        host = str(task_vars["inventory_hostname"])
        self._watch(host, place, args["progress_file"], args["every_s"])
        result = self._status(folder, jid, "status", task_vars)
        self._status(folder, jid, "cleanup", task_vars)
        for name in ("started", "finished", "ansible_job_id", "results_file", "_ansible_parsed", "stdout", "stderr"):
            result.pop(name, None)
        if result.get("failed") and ("module_stdout" in result or "async_wrapper" in str(result.get("msg"))):
            # The wrapper's own words for a module that was killed are a traceback.
            for name in ("cmd", "data", "stderr_lines", "stdout_lines", "exception"):
                result.pop(name, None)
            result["msg"] = "The job was ended from outside. Run this again: what has arrived is kept."
        return result

    def _status(self, folder: str, jid: str, mode: str, task_vars: dict[str, Any]) -> dict[str, Any]:
        arguments = {"jid": jid, "mode": mode, "_async_dir": folder}
        return dict(self._execute_module("ansible.legacy.async_status", module_args=arguments, task_vars=task_vars))

    def _watch(self, host: str, place: str, progress_file: str, every_s: float) -> None:
        """Until the job has written its result."""
        begun, shown_at, shown, misses, gone = time.monotonic(), time.monotonic(), "", 0, 0
        while True:
            result, progress = self._read(place), {}
            if result is None:
                misses += 1
                if misses > _MISSES:
                    raise AnsibleActionFail(
                        f"{host} gives no answer any more; the job there goes on. Run this again later."
                    )
                time.sleep(3)
                continue
            misses = 0
            if "started" not in result or result.get("finished"):
                return
            progress = self._read(progress_file) or {}
            if progress.get("pid"):
                gone = 0 if self._alive(progress["pid"]) else gone + 1
                if gone > 2:
                    raise AnsibleActionFail(
                        f"{host}: the job was ended from outside. Run this again: what has arrived is kept."
                    )
            line = progress_line(progress) if progress else ""
            if line and line != shown and time.monotonic() - shown_at >= every_s:
                display.display(f"{host}: {line}")
                shown, shown_at = line, time.monotonic()
            time.sleep(0.3 if time.monotonic() - begun < 10 else 2)

    def _read(self, path: str) -> dict[str, Any] | None:
        done = self._low_level_execute_command(self._connection._shell.join(["cat", path]))
        if done["rc"]:
            return None
        try:
            value = json.loads(done["stdout"] or "{}")
        except ValueError:
            return {"started": 1}  # half written
        return value if isinstance(value, dict) else {"started": 1}

    def _alive(self, pid: int) -> bool:
        return bool(
            self._low_level_execute_command(self._connection._shell.join(["test", "-d", f"/proc/{int(pid)}"]))["rc"]
            == 0
        )
