#!/usr/bin/python
# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

DOCUMENTATION = r"""
module: memory_guard_info
short_description: State and last receipt of the memory guards of a node
version_added: "0.1.0"
description:
  - Reads what systemd says of each guard and the receipt that it left or keeps up to date.
  - Needs no privilege.
author:
  - The gb10.fleet maintainers (@gb10-fleet)
extends_documentation_fragment:
  - gb10.fleet.attributes
  - gb10.fleet.attributes.read_only
options:
  clusters:
    description: Clusters to look for. Without it, every one that left a receipt or is configured.
    type: list
    elements: str
    default: []
  state_dir:
    description: Folder of the receipts.
    type: path
    default: /var/lib/gb10-fleet/memory_guard
  config_dir:
    description: Folder of the guards' configuration.
    type: path
    default: /etc/gb10-fleet
"""

EXAMPLES = r"""
- name: Look at the guard of this cluster
  gb10.fleet.memory_guard_info:
    clusters: [alpha]
  register: guards

- name: Show how its last load went
  ansible.builtin.debug:
    msg: "{{ guards.guards[0].summary }}"
"""

RETURN = r"""
guards:
  description: One entry per guard.
  returned: success
  type: list
  elements: dict
  contains:
    cluster:
      description: Its cluster.
      type: str
      sample: alpha
    active:
      description: What systemd says of its unit.
      type: str
      sample: inactive
    status:
      description: What it says of itself while it runs.
      type: str
      sample: free 61.2 GiB, lowest 14.1 GiB, floor 8.0 GiB
    stopped_by:
      description: What ended the last run - ready, failed, stopped, signal, deadline, hard_floor or crash. Null while it runs.
      type: str
      sample: ready
    started_at:
      description: When the last run began.
      type: str
      sample: "2026-11-29T16:03:53Z"
    summary:
      description: The receipt in one line.
      type: str
      sample: lowest free 8.7 GiB (floor 8.0 GiB), never under the floor, 61.2 GiB of checkpoint pages let go
    warnings:
      description: What a person should know of that run.
      type: list
      elements: str
      sample: []
    receipt:
      description: The receipt without its list of events.
      type: dict
      sample: {state: ended, seconds: 412.3}
"""

import json
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.gb10.fleet.plugins.module_utils import _memory_guard
from ansible_collections.gb10.fleet.plugins.module_utils._command import run

SHOW = "Id,ActiveState,SubState,MainPID,NRestarts,Result,StatusText"


def known(state_dir: Path, config_dir: Path) -> list[str]:
    """Clusters that left a receipt or are configured on this node."""
    configured = {path.stem.removeprefix("memory-guard-") for path in config_dir.glob("memory-guard-*.json")}
    return sorted(configured | {path.stem for path in state_dir.glob("*.json")})


def receipt(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def look(cluster: str, state_dir: Path) -> dict[str, Any]:
    answer = run(["systemctl", "show", _memory_guard.unit_name(cluster), "--property", SHOW], 10.0)
    found = receipt(state_dir / f"{cluster}.json")
    facts = _memory_guard.facts(cluster, _memory_guard.parse_show(answer.out), found)
    return {**facts, "receipt": {key: value for key, value in found.items() if key != "events"}}


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "clusters": {"type": "list", "elements": "str", "default": []},
            "state_dir": {"type": "path", "default": "/var/lib/gb10-fleet/memory_guard"},
            "config_dir": {"type": "path", "default": "/etc/gb10-fleet"},
        },
        supports_check_mode=True,
    )
    state_dir = Path(module.params["state_dir"])
    clusters = module.params["clusters"] or known(state_dir, Path(module.params["config_dir"]))
    try:
        guards = [look(cluster, state_dir) for cluster in clusters]
    except _memory_guard.GuardError as error:
        module.fail_json(msg=str(error))
    module.exit_json(changed=False, guards=guards)


if __name__ == "__main__":
    main()
