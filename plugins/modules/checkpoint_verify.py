#!/usr/bin/python
# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: checkpoint_verify
short_description: Say which files of a checkpoint are there, verified and fit for a launch
version_added: "0.1.0"
description:
  - Compares the files with the manifest of their commit that this node keeps - every file there, of exactly its size, hashed once
    and not touched since. Reads no content, so 200 files take milliseconds.
  - A file that was never hashed counts as not verified; M(gb10.fleet.checkpoint) hashes it.
  - With O(recipe), judges C(config.json) and the headers of a complete checkpoint against it, without reading tensor data.
author:
  - The gb10.fleet maintainers (@gb10-fleet)
extends_documentation_fragment:
  - gb10.fleet.attributes
  - gb10.fleet.attributes.read_only
  - gb10.fleet.checkpoint
options:
  resolve:
    description: Ask the hub for the manifest of a commit that this node does not know yet. Nothing is kept or downloaded.
    type: bool
    default: false
  recipe:
    description: The recipe that is to be served from the first checkpoint; findings of severity C(error) then fail the module.
    type: dict
  lock_file:
    description: The lock that staging and serving share; RV(holder) reports who has it.
    type: path
    default: /run/gb10-fleet/serving.lock
seealso:
  - module: gb10.fleet.checkpoint
"""

EXAMPLES = r"""
- name: Look at the checkpoint of this node
  gb10.fleet.checkpoint_verify:
    models_dir: /var/tmp/models
    checkpoints:
      - repo: RedHatAI/GLM-5.3-Flash-NVFP4
        directory: GLM-5.3-Flash-NVFP4-redhat
  register: found
"""

RETURN = r"""
complete:
  description: Whether every checkpoint is there and verified.
  returned: success
  type: bool
  sample: true
missing_bytes:
  description: Bytes that have to be moved to this node. Null when no manifest is known.
  returned: success
  type: int
  sample: 0
unverified_bytes:
  description: Bytes that are here and have to be hashed.
  returned: success
  type: int
  sample: 0
checkpoints:
  description:
    - Each checkpoint - C(repo), C(revision), C(path) that an engine loads, C(files), C(size_bytes), C(complete), C(missing) files,
      C(missing_bytes), C(unverified_bytes).
  returned: success
  type: list
  elements: dict
  sample:
    - repo: RedHatAI/GLM-5.3-Flash-NVFP4
      revision: 3f1c2a9b7d103f1c2a9b7d103f1c2a9b7d10aaaa
      path: /var/tmp/models/GLM-5.3-Flash-NVFP4-redhat
      files: 128
      size_bytes: 184973123584
      complete: true
      missing: []
      missing_bytes: 0
      unverified_bytes: 0
findings:
  description: What the lint says - C(severity), C(code), C(text).
  returned: success
  type: list
  elements: dict
  sample: []
free_bytes:
  description: Free bytes of the file system of O(models_dir).
  returned: success
  type: int
  sample: 1099511627776
holder:
  description: Who stages or serves on this node now, or null.
  returned: success
  type: dict
  sample: null
"""

from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.gb10.fleet.plugins.module_utils._checkpoint import CheckpointError
from ansible_collections.gb10.fleet.plugins.module_utils._checkpoint_files import free_bytes
from ansible_collections.gb10.fleet.plugins.module_utils._checkpoint_job import (
    COMMON_SPEC,
    Item,
    items_of,
    look,
    running_rank,
    take_manifest,
)
from ansible_collections.gb10.fleet.plugins.module_utils._checkpoint_lint import lint
from ansible_collections.gb10.fleet.plugins.module_utils._staging_lock import StagingLock


def memory_total() -> int | None:
    """MemTotal of this node in bytes."""
    try:
        first = Path("/proc/meminfo").read_text().split("\n", 1)[0].split()
        return int(first[1]) * 1024
    except (OSError, ValueError, IndexError):
        return None


class Verify:
    """Looks at every checkpoint; asks the hub only with ``resolve``."""

    def __init__(self, module: AnsibleModule) -> None:
        self.module, self.params = module, module.params

    def run(self) -> dict[str, Any]:
        items = items_of(self.params)
        for item in items:
            look(item, self.params["verify"])
            if item.manifest is None and self.params["resolve"]:
                self.ask(item)
        sizes = [item.missing_bytes for item in items]
        complete = all(item.manifest is not None and item.found.complete for item in items)
        findings = self.findings(items[0]) if self.params["recipe"] and complete else []
        return {
            "changed": False,
            "complete": complete,
            "missing_bytes": None if None in sizes else sum(size or 0 for size in sizes),
            "unverified_bytes": sum(item.unverified_bytes for item in items),
            "checkpoints": [item.report() for item in items],
            "findings": findings,
            "free_bytes": free_bytes(Path(self.params["models_dir"]))[0],
            # Only who has something to move meets the lock: a look while serving costs the engine no question.
            "holder": None if complete else StagingLock(self.params["lock_file"], running_rank).holder(),
        }

    def ask(self, item: Item) -> None:
        from ansible_collections.gb10.fleet.plugins.module_utils._hf_hub import Hub, patiently

        hub = Hub(self.params["endpoint"], self.params["token_file"])
        commit = item.revision or patiently(lambda: hub.resolve(item.repo), 4, 1, 60)
        take_manifest(item, patiently(lambda: hub.manifest(item.repo, commit), 4, 1, 60), self.params["verify"])

    def findings(self, item: Item) -> list[dict[str, str]]:
        if item.manifest is None:
            raise AssertionError(item)
        summary = item.checkpoint.summary()
        if not summary:
            item.checkpoint.header_faults(item.manifest, item.manifest.files)
            summary = item.checkpoint.summary()
        return lint(item.checkpoint.config(item.manifest), summary, self.params["recipe"], memory_total())


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            **COMMON_SPEC,
            "resolve": {"type": "bool", "default": False},
            "recipe": {"type": "dict"},
            "lock_file": {"type": "path", "default": "/run/gb10-fleet/serving.lock"},
        },
        supports_check_mode=True,
    )
    try:
        result = Verify(module).run()
    except CheckpointError as exc:
        module.fail_json(msg=str(exc))
    except OSError as exc:
        module.fail_json(
            msg=f"{exc.filename or module.params['models_dir']} cannot be read ({exc.strerror}). Run with become."
        )
    errors = [f["text"] for f in result["findings"] if f["severity"] == "error"]
    if errors:
        module.fail_json(msg=" ".join(errors), **result)
    for finding in result["findings"]:
        module.warn(finding["text"])
    module.exit_json(**result)


if __name__ == "__main__":
    main()
