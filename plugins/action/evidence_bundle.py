# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Make one bundle of the evidence of all ranks of a cluster. See the module of the same name."""

from __future__ import annotations

import io
import os
import shutil
import tarfile
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

from ansible_collections.gb10.fleet.plugins.module_utils._evidence import bundle_name, summary, surplus

display = Display()


class ActionModule(ActionBase):
    """The first rank that is still in the play does the work for its cluster; it touches no host."""

    TRANSFERS_FILES = False
    _requires_connection = False
    _supports_check_mode = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        super().run(tmp, task_vars)
        task_vars = task_vars or {}
        dummy, args = self.validate_argument_spec(
            argument_spec={
                "stage_dir": {"type": "str", "required": True},
                "dest_dir": {"type": "str", "required": True},
                "report": {"type": "str", "required": True},
                "diagnosis": {"type": "dict"},
                "keep": {"type": "int", "default": 10},
            }
        )
        members = list(task_vars["topology_members"])
        present = [m for m in members if m in task_vars["ansible_play_hosts"]]
        if task_vars["inventory_hostname"] != present[0]:
            return {"changed": False, "skipped": True, "msg": f"{present[0]} packs for its cluster."}
        nodes = [self._node(m, members.index(m), task_vars, args["report"]) for m in members]
        now = datetime.now(timezone.utc)
        cluster = task_vars["topology_cluster"]
        page = summary(cluster, now.strftime("%Y-%m-%d %H:%M:%S UTC"), args["diagnosis"], nodes)
        dest = Path(args["dest_dir"]).expanduser()
        path = dest / bundle_name(cluster, now.strftime("%Y%m%dT%H%M%SZ"))
        try:
            self._write(path, page, Path(args["stage_dir"]).expanduser(), members)
            removed = self._prune(dest, args["keep"])
        except OSError as exc:
            # Evidence is packed when something else has failed: it must not hide that.
            text = f"cluster {cluster}: the evidence could not be packed into {dest}: {exc}"
            return {"changed": False, "path": None, "warnings": [text]}
        display.display(f"{cluster}: evidence in {path} ({path.stat().st_size / 1024:.0f} KiB)")
        return {"changed": False, "path": str(path), "summary": page, "removed": removed}

    @staticmethod
    def _node(member: str, rank: int, task_vars: dict[str, Any], report: str) -> dict[str, Any]:
        registered = task_vars["hostvars"][member].get(report) or {}
        evidence = registered.get("evidence") or {"error": "the node is out of this run (unreachable)"}
        return {"node": member, "rank": rank, **dict(evidence)}

    @staticmethod
    def _write(path: Path, page: str, stage: Path, members: list[str]) -> None:
        """All in one file: temporary file, fsync, rename; readable for its owner only."""
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.tmp")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        root = path.name.removesuffix(".tar.gz")
        with os.fdopen(descriptor, "wb") as file:
            with tarfile.open(fileobj=file, mode="w:gz", compresslevel=6) as bundle:
                data = page.encode()
                entry = tarfile.TarInfo(f"{root}/summary.md")
                entry.size, entry.mtime, entry.mode = len(data), int(datetime.now().timestamp()), 0o644
                bundle.addfile(entry, io.BytesIO(data))
                for member in members:
                    archive = stage / f"{member}.tar.gz"
                    if archive.exists():
                        with tarfile.open(archive) as node:
                            for item in node:
                                content = node.extractfile(item)
                                item.name = f"{root}/{member}/{item.name}"
                                bundle.addfile(item, content)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
        shutil.rmtree(stage, ignore_errors=True)

    @staticmethod
    def _prune(dest: Path, keep: int) -> list[str]:
        removed = surplus((p.name for p in dest.iterdir()), keep)
        for name in removed:
            (dest / name).unlink(missing_ok=True)
        return removed
