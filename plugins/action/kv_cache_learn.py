# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Keep the engine's own proposal for its KV cache. See the module of the same name."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

from ansible_collections.gb10.fleet.plugins.module_utils import _learned

display = Display()


class ActionModule(ActionBase):
    """Writes on the controller only."""

    TRANSFERS_FILES = False
    _requires_connection = False
    _supports_check_mode = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        super().run(tmp, task_vars)
        task_vars = task_vars or {}
        dummy, args = self.validate_argument_spec(
            argument_spec={
                "proposal": {"type": "dict", "required": True},
                "learned_dir": {"type": "str", "required": True},
            }
        )
        cluster, recipe = task_vars["topology_cluster"], task_vars["topology_recipe"]
        size, ranks = int(args["proposal"]["bytes"]), args["proposal"]["ranks"]
        entry = {
            "kv_cache_memory": size,
            "ranks": ranks,
            "recipe": recipe.get("name"),
            "image": recipe["image"],
            "time": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        }
        changed = _learned.kv_cache_memory(args["learned_dir"], cluster, recipe) != size
        if changed and not self._task.check_mode:
            _learned.store(args["learned_dir"], cluster, recipe, entry)
        offers = ", ".join(f"{host} {int(offer) / 2**30:.2f}" for host, offer in ranks.items())
        display.display(
            f"{cluster}  the engine proposes {_learned.FLAG} {size} ({size / 2**30:.2f} GiB; {offers})\n"
            f"{cluster}  to use it from the next start on, set in the inventory: kv_cache_memory: learned"
        )
        return {"changed": False, "kv_cache_memory": size, "new": changed}
