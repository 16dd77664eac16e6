#!/usr/bin/python
# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: serving_lock
short_description: Keep fetches and other launches off a node that is about to serve
version_added: "0.1.0"
description:
  - Two launches at once stop each other's ranks, and a fetch beside a model load starves the GPU's memory. A fetch of
    M(gb10.fleet.checkpoint) or M(gb10.fleet.image) holds the lock while it runs. A launch takes it with this module before it
    stops or starts a rank, and fails with the name of the fetch or launch that it met.
  - The launch's record counts for O(expires_s) seconds, so that a launch that dies does not lock its node for ever. From then on,
    and also without a record, a running rank container keeps fetches off.
author:
  - The gb10.fleet maintainers (@gb10-fleet)
extends_documentation_fragment:
  - gb10.fleet.attributes
attributes:
  check_mode:
    support: full
  diff_mode:
    support: none
    details: The lock is a state of the moment.
  idempotent:
    support: full
options:
  state:
    description: V(taken) and V(released) for a launch and a stop; V(shown) only reports the holder.
    type: str
    choices: [taken, released, shown]
    default: taken
  holder:
    description: Who takes it, for messages.
    type: str
    default: a launch
  expires_s:
    description: Seconds that a launch may take until its container runs.
    type: float
    default: 3600
  controller:
    description: Machine that launches; another launch is let go only when it came from here and is O(dead) or has this O(pid).
    type: str
    default: ""
  pid:
    description: Process that launches.
    type: int
    default: 0
  dead:
    description: Processes of O(controller) that are known to have ended.
    type: list
    elements: int
    default: []
  wait_s:
    description: Seconds to wait for a fetch to end.
    type: float
    default: 0
  lock_file:
    description: The lock.
    type: path
    default: /run/gb10-fleet/serving.lock
"""

EXAMPLES = r"""
- name: Keep fetches off this node
  gb10.fleet.serving_lock:
    state: taken
    holder: launch of alpha (glm-5.3-flash-nvfp4)
  become: true
"""

RETURN = r"""
holder:
  description: Who had it before - C(kind) (V(staging) or V(serving)), C(holder), C(since) (seconds since 1970) - or null.
  returned: success
  type: dict
  sample: {kind: serving, holder: container vllm_glm53 of cluster alpha, since: 1790000000}
"""

import time
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.gb10.fleet.plugins.module_utils._checkpoint_job import running_rank
from ansible_collections.gb10.fleet.plugins.module_utils._staging_lock import STAGING, Held, StagingLock


def take(lock: StagingLock, params: dict[str, Any]) -> None:
    """Raises Held when a fetch or another launch still runs after ``wait_s`` seconds."""
    deadline = time.monotonic() + params["wait_s"]
    while True:
        try:
            return lock.take(params["holder"], params["expires_s"], params["controller"], params["pid"], params["dead"])
        except Held:
            if time.monotonic() >= deadline:
                raise
            time.sleep(1)


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["taken", "released", "shown"], "default": "taken"},
            "holder": {"type": "str", "default": "a launch"},
            "expires_s": {"type": "float", "default": 3600},
            "controller": {"type": "str", "default": ""},
            "pid": {"type": "int", "default": 0},
            "dead": {"type": "list", "elements": "int", "default": []},
            "wait_s": {"type": "float", "default": 0},
            "lock_file": {"type": "path", "default": "/run/gb10-fleet/serving.lock"},
        },
        supports_check_mode=True,
    )
    params = module.params
    lock = StagingLock(params["lock_file"], running_rank)
    try:
        before = lock.holder()
        if params["state"] == "taken" and before and before.get("kind") == STAGING and module.check_mode:
            raise Held(before)
        if params["state"] == "taken" and not module.check_mode:
            take(lock, params)
        if params["state"] == "released" and not module.check_mode:
            lock.release()
    except Held as held:
        module.fail_json(msg=str(held), holder=held.record)
    except OSError as exc:
        module.fail_json(msg=f"{params['lock_file']} cannot be used ({exc.strerror}). Run with become.")
    # The lock is no state that a run leaves behind: a second serve.yml that launches nothing must report no change.
    module.exit_json(changed=False, holder=before)


if __name__ == "__main__":
    main()
