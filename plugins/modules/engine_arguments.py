#!/usr/bin/python
# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: engine_arguments
short_description: Let an engine's own parser check its arguments
version_added: "0.1.0"
description:
  - Runs the argument parser of the engine in a throwaway container of its image, without GPU and without network. Nothing that runs
    is touched, so that a typo costs seconds and not the engine that serves.
  - An image whose parser cannot be loaded is reported and passed over, since it proves nothing about the arguments.
  - What passed is recorded on the node by image and arguments, and is not asked again.
author:
  - The gb10.fleet maintainers (@gb10-fleet)
extends_documentation_fragment:
  - gb10.fleet.attributes
  - gb10.fleet.attributes.read_only
options:
  image:
    description: Image of the engine; it has to be on the node.
    type: str
    required: true
  words:
    description: The engine's command from its program on, such as C(vllm serve …). Nothing is checked without one.
    type: list
    elements: str
    required: true
  timeout_s:
    description: Seconds that the engine's modules may take to load.
    type: int
    default: 300
  record:
    description: File of what passed. One that cannot be read or written only costs the next check its time.
    type: path
    default: /var/lib/gb10-fleet/engine/arguments.json
"""

EXAMPLES = r"""
- name: Check the arguments
  gb10.fleet.engine_arguments:
    image: ghcr.io/example/vllm:1
    words: [vllm, serve, /models/tiny, --max-model-len, "4096"]
"""

RETURN = r"""
checked:
  description: Whether the engine's parser looked at the arguments, now or in an earlier run.
  returned: success
  type: bool
  sample: true
seconds:
  description: How long it took.
  returned: success
  type: float
  sample: 6.4
"""

import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.gb10.fleet.plugins.module_utils._command import run
from ansible_collections.gb10.fleet.plugins.module_utils._engine_parser import BUILDERS, answer_of, program, refusal

KEPT = 50


def passed(record: Path) -> list[str]:
    """Digests of image and arguments that passed, the oldest first."""
    try:
        kept = json.loads(record.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    return [entry for entry in kept if isinstance(entry, str)] if isinstance(kept, list) else []


def remember(module: AnsibleModule, record: Path, digest: str) -> None:
    partial = Path(module.tmpdir, "arguments.json")
    try:
        record.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        partial.write_text(json.dumps([*passed(record), digest][-KEPT:]), encoding="utf-8")
    except OSError:
        return
    module.atomic_move(str(partial), str(record))


def check(module: AnsibleModule) -> bool:
    """Whether the arguments were looked at; refused ones end the module."""
    params: dict[str, Any] = module.params
    image, words, limit, record = params["image"], params["words"], params["timeout_s"], Path(params["record"])
    if not words or words[0] not in BUILDERS:
        return False
    identity = run(["docker", "image", "inspect", "--format", "{{.Id}}", image], 60)
    if identity.rc and module.check_mode:
        return False
    digest = hashlib.sha256(json.dumps([identity.out.strip(), words]).encode()).hexdigest()
    if identity.rc == 0 and digest in passed(record):
        return True
    name = f"gb10-arguments-{os.getpid()}"
    argv = [
        "docker",
        "run",
        "--rm",
        "--pull",
        "never",
        "--name",
        name,
        "--network",
        "none",
        "--entrypoint",
        "python3",
        image,
    ]
    said = run([*argv, "-c", program(words[0]), *words[1:]], limit)
    if said.timed_out:
        run(["docker", "rm", "--force", name], 60)
    answer = answer_of(said.out)
    if answer is None or answer["unchecked"]:
        why = answer["unchecked"] if answer else (said.err.strip() or "no answer").splitlines()[-1]
        module.warn(f"The arguments of {words[0]} were not checked: its parser cannot be loaded from {image} ({why}).")
        return False
    if answer["error"]:
        module.fail_json(
            msg=f"{words[0]} in {image} refuses the arguments: {refusal(answer['error'], answer['flags'])} "
            "Nothing that runs was touched. Correct args in the recipe or in recipe_overrides."
        )
    if not module.check_mode:
        remember(module, record, digest)
    return True


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "image": {"type": "str", "required": True},
            "words": {"type": "list", "elements": "str", "required": True},
            "timeout_s": {"type": "int", "default": 300},
            "record": {"type": "path", "default": "/var/lib/gb10-fleet/engine/arguments.json"},
        },
        supports_check_mode=True,
    )
    begun = time.monotonic()
    checked = check(module)
    module.exit_json(changed=False, checked=checked, seconds=round(time.monotonic() - begun, 1))


if __name__ == "__main__":
    main()
