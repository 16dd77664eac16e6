#!/usr/bin/python
# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: checkpoint
short_description: Make checkpoints complete and verified on a node, or remove them
version_added: "0.1.0"
description:
  - Moves only what is missing - from the hub, from another rank over the fabric, or from a folder of the node - and hashes every
    file. It ends with every file of the commit verified, or fails with a sentence.
  - From the hub, C(hf) of O(client_dir) downloads; its exit code is never believed. Where there is no working one, resumable
    HTTP streams download.
  - Between ranks, files travel in parallel streams over plain HTTP on the fabric address, kept from others by a one-time token.
    A rank passes each file on as soon as it has verified it.
  - Holds the lock that keeps staging and serving on a node apart.
author:
  - The gb10.fleet maintainers (@gb10-fleet)
extends_documentation_fragment:
  - gb10.fleet.attributes
  - gb10.fleet.attributes.full
  - gb10.fleet.checkpoint
options:
  state:
    description: V(complete) fetches what is missing; V(absent) removes files, manifest and cache of verifications.
    type: str
    choices: [complete, absent]
    default: complete
  source:
    description: V(hub), or a folder of this node with the files of the checkpoint (the only one of O(checkpoints)).
    type: str
    default: hub
  refresh:
    description: Without a revision, ask the hub for the head of C(main) although this node has a commit.
    type: bool
    default: false
  client:
    description: What downloads from the hub - V(hf) of O(client_dir), V(direct) streams, or V(auto) for the first that works.
    type: str
    choices: [auto, hf, direct]
    default: auto
  client_dir:
    description: Virtual environment with C(huggingface_hub). A client on C(PATH) is never used - it may be a stub.
    type: path
  streams:
    description: Files that are fetched or hashed at the same time.
    type: int
    default: 4
  memory_gib:
    description: Memory cap of the hub's client, its page cache included; 0 for none. Needs root and systemd.
    type: float
    default: 8
  retries:
    description: Tries without progress before a file or the hub is given up.
    type: int
    default: 6
  retry_wait_s:
    description: Seconds before the first retry; doubled each time. The hub's own C(Retry-After) is honoured when it is longer.
    type: float
    default: 2
  retry_longest_s:
    description: Longest wait between two tries, in seconds.
    type: float
    default: 300
  stall_s:
    description: Seconds without a byte after which the hub's client is ended and tried again without xet.
    type: float
    default: 300
  verify_mib_per_s:
    description: Limit for hashing files on the disk, in MiB/s; 0 for none.
    type: float
    default: 0
  lock:
    description: What to do while this node serves or another fetch runs.
    type: str
    choices: [fail, queue]
    default: fail
  lock_wait_s:
    description: Seconds to wait with O(lock=queue).
    type: float
    default: 3600
  while_serving:
    description: Fetch although this node serves. It can starve the engine's memory.
    type: bool
    default: false
  lock_file:
    description: The lock that staging and serving share.
    type: path
    default: /run/gb10-fleet/serving.lock
  progress_file:
    description: Where to write the progress, for M(gb10.fleet.follow).
    type: path
  peer:
    description: The rank to copy from - C(name), C(address), C(port), and C(me), the name of this rank.
    type: dict
    suboptions:
      name: {description: Name of the rank., type: str, required: true}
      address: {description: Its fabric address., type: str, required: true}
      port: {description: Its port., type: int, required: true}
      me: {description: Name of this rank., type: str, required: true}
  serve:
    description: Where other ranks copy from this one - C(address), C(port), and the names of the C(clients) to wait for.
    type: dict
    suboptions:
      address: {description: Fabric address of this node., type: str, required: true}
      port: {description: Port to listen on., type: int, required: true}
      clients: {description: Names of the ranks., type: list, elements: str, required: true}
  peer_token:
    description: One-time token between the ranks.
    type: str
  patience_s:
    description: Seconds of silence after which another rank is given up; twice that before it is first heard.
    type: float
    default: 60
seealso:
  - module: gb10.fleet.checkpoint_verify
"""

EXAMPLES = r"""
- name: Have the checkpoint complete on this node
  gb10.fleet.checkpoint:
    models_dir: /var/tmp/models
    client_dir: /opt/gb10-fleet/hf
    checkpoints:
      - repo: RedHatAI/GLM-5.3-Flash-NVFP4
        directory: GLM-5.3-Flash-NVFP4-redhat

- name: Take it from a disk that was brought here
  gb10.fleet.checkpoint:
    models_dir: /var/tmp/models
    source: /media/usb/GLM-5.3-Flash-NVFP4
    checkpoints:
      - repo: RedHatAI/GLM-5.3-Flash-NVFP4
"""

RETURN = r"""
checkpoints:
  description: Each checkpoint, as M(gb10.fleet.checkpoint_verify) reports it.
  returned: success
  type: list
  elements: dict
moved_bytes:
  description: Bytes that were moved to this node (in check mode, that would be; null when unknown).
  returned: success
  type: int
  sample: 184973123584
hashed_bytes:
  description: Bytes on the disk that were hashed.
  returned: success
  type: int
  sample: 0
client:
  description: What moved them - C(hf) with its version, C(direct), C(peer), C(directory) or nothing.
  returned: success
  type: str
  sample: hf 1.16.4
gave_up:
  description: Ranks that copied from this one and fell silent.
  returned: success
  type: list
  elements: str
  sample: []
seconds:
  description: How long it took.
  returned: success
  type: float
  sample: 412.7
"""

import os
import time
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.gb10.fleet.plugins.module_utils._checkpoint import CheckpointError, gib
from ansible_collections.gb10.fleet.plugins.module_utils._checkpoint_job import (
    COMMON_SPEC,
    Item,
    Job,
    describe,
    exists,
    items_of,
    look,
    remove,
    running_rank,
)
from ansible_collections.gb10.fleet.plugins.module_utils._staging_lock import Held, StagingLock

ARGUMENT_SPEC: dict[str, Any] = {
    **COMMON_SPEC,
    "state": {"type": "str", "choices": ["complete", "absent"], "default": "complete"},
    "source": {"type": "str", "default": "hub"},
    "refresh": {"type": "bool", "default": False},
    "client": {"type": "str", "choices": ["auto", "hf", "direct"], "default": "auto"},
    "client_dir": {"type": "path"},
    "streams": {"type": "int", "default": 4},
    "memory_gib": {"type": "float", "default": 8},
    "retries": {"type": "int", "default": 6},
    "retry_wait_s": {"type": "float", "default": 2},
    "retry_longest_s": {"type": "float", "default": 300},
    "stall_s": {"type": "float", "default": 300},
    "verify_mib_per_s": {"type": "float", "default": 0},
    "lock": {"type": "str", "choices": ["fail", "queue"], "default": "fail"},
    "lock_wait_s": {"type": "float", "default": 3600},
    "while_serving": {"type": "bool", "default": False},
    "lock_file": {"type": "path", "default": "/run/gb10-fleet/serving.lock"},
    "progress_file": {"type": "path"},
    "peer": {
        "type": "dict",
        "options": {
            "name": {"type": "str", "required": True},
            "address": {"type": "str", "required": True},
            "port": {"type": "int", "required": True},
            "me": {"type": "str", "required": True},
        },
    },
    "serve": {
        "type": "dict",
        "options": {
            "address": {"type": "str", "required": True},
            "port": {"type": "int", "required": True},
            "clients": {"type": "list", "elements": "str", "required": True},
        },
    },
    "peer_token": {"type": "str", "no_log": True},
    "patience_s": {"type": "float", "default": 60},
}


class Manager:
    """Looks, then moves under the lock. In check mode it only says what would be moved."""

    def __init__(self, module: AnsibleModule) -> None:
        self.module, self.params = module, module.params
        self.lock = StagingLock(self.params["lock_file"], running_rank)

    def run(self) -> dict[str, Any]:
        begun = time.monotonic()
        items = items_of(self.params)
        result = self.absent(items) if self.params["state"] == "absent" else self.complete(items)
        return {**result, "seconds": round(time.monotonic() - begun, 2)}

    def absent(self, items: list[Item]) -> dict[str, Any]:
        there = [item for item in items if exists(item)]
        before = "".join(f"{item.checkpoint.layout.root}\n" for item in there)
        if there and not self.module.check_mode:
            with self.lock.staging(f"removal of {there[0].repo}", self.wait_s(), self.params["while_serving"]):
                for item in there:
                    remove(item)
        return {"changed": bool(there), "diff": {"before": before, "after": ""}, "moved_bytes": 0, "checkpoints": []}

    def wait_s(self) -> float:
        return float(self.params["lock_wait_s"]) if self.params["lock"] == "queue" else 0

    def complete(self, items: list[Item]) -> dict[str, Any]:
        from ansible_collections.gb10.fleet.plugins.module_utils._fetch import Progress

        for item in items:
            look(item, self.params["verify"])
        before = [f"{item.repo} {path}\n" for item in items for path in item.found.verified]
        if self.module.check_mode:
            return self.predict(items, before)
        file = self.params["progress_file"]
        job = Job(self.params, items, Progress(Path(file) if file else None, "checkpoint"))
        given_up: list[str] = []
        os.umask(0o022)  # an engine reads as any user
        with job.peers():
            if self.nothing_to_do(items):
                job.offer_all()
            else:
                what = f"fetch of {', '.join(item.repo for item in items)}, pid {os.getpid()}"
                with self.lock.staging(what, self.wait_s(), self.params["while_serving"], job.progress.note):
                    job.run()
            given_up = job.serve_out()
        return {
            "changed": job.progress.moved > 0 or job.removed > 0,
            "checkpoints": [item.report() for item in items],
            "moved_bytes": job.progress.moved,
            "hashed_bytes": job.progress.hashed,
            "client": job.client,
            "gave_up": given_up,
            "diff": self.diff(items, before),
        }

    def nothing_to_do(self, items: list[Item]) -> bool:
        return not self.params["refresh"] and all(item.manifest is not None and item.found.complete for item in items)

    def predict(self, items: list[Item], before: list[str]) -> dict[str, Any]:
        sizes = [item.missing_bytes for item in items]
        unknown = None in sizes
        size = None if unknown else sum(s or 0 for s in sizes)
        return {
            "changed": unknown or bool(size),
            "msg": "The size is known when the hub has been asked."
            if size is None
            else f"{gib(size)} would be moved. {describe(items)}.",
            "checkpoints": [item.report() for item in items],
            "moved_bytes": size,
            "hashed_bytes": 0,
            "client": "",
            "gave_up": [],
            "diff": {
                "before": "".join(before),
                "after": "".join(f"{i.repo} {p}\n" for i in items for p in (i.manifest.files if i.manifest else ())),
            },
        }

    @staticmethod
    def diff(items: list[Item], before: list[str]) -> dict[str, str]:
        after = [f"{item.repo} {path}\n" for item in items if item.manifest for path in item.manifest.files]
        return {"before": "".join(sorted(before)), "after": "".join(sorted(after))}


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENT_SPEC, supports_check_mode=True)
    try:
        result = Manager(module).run()
    except (CheckpointError, Held) as exc:
        module.fail_json(msg=str(exc))
    except OSError as exc:
        if exc.errno == 28:
            module.fail_json(
                msg=f"The disk under {module.params['models_dir']} is full. Free space, then run this again."
            )
        place = exc.filename or module.params["models_dir"]
        module.fail_json(
            msg=f"{place} cannot be used ({exc.strerror or exc}). Run with become, or choose another models_dir."
        )
    module.exit_json(**result)


if __name__ == "__main__":
    main()
