#!/usr/bin/python
# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: engine_mods
short_description: Make the patched files that are laid over an engine's image
version_added: "0.1.0"
description:
  - Takes a file out of the image, replaces what a recipe's C(mods) say, and writes the result beside the image for a read-only
    mount.
  - Each anchor has to match exactly once, and the file has to be the one that the mod was made for; otherwise both checksums are
    told and nothing is written.
author:
  - The gb10.fleet maintainers (@gb10-fleet)
extends_documentation_fragment:
  - gb10.fleet.attributes
  - gb10.fleet.attributes.full
options:
  state:
    description:
      - V(present) writes the files.
      - V(effective) looks into the log of O(container) for the lines with which mods say that they are in effect.
    type: str
    choices: [present, effective]
    default: present
  image:
    description: Image whose files are patched.
    type: str
  mods:
    description: The recipe's C(mods), each with C(file), the path to write to.
    type: list
    elements: dict
    required: true
  container:
    description: Rank container for O(state=effective).
    type: str
"""

EXAMPLES = r"""
- name: Write the patched file
  gb10.fleet.engine_mods:
    image: ghcr.io/example/vllm:1
    mods:
      - name: longer-wait
        target: /usr/lib/python3/dist-packages/example.py
        original_sha256: 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08
        replace:
          - {anchor: "timeout = 5", with: "timeout = 50"}
        file: /var/lib/gb10-fleet/mods/longer-wait-0123456789ab/example.py

- name: See that it is in effect
  gb10.fleet.engine_mods:
    state: effective
    container: vllm_glm53
    mods:
      - {name: longer-wait, log: ["waiting 50 s"]}
"""

RETURN = r"""
files:
  description: Per mod, the checksum of the original, of the patched file, and its path.
  returned: O(state=present)
  type: list
  elements: dict
  sample:
    - {name: longer-wait, original_sha256: 9f86d081, sha256: 60303ae2, file: /var/lib/gb10-fleet/mods/longer-wait-0123/example.py}
"""

import os
import tempfile
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.gb10.fleet.plugins.module_utils._command import run
from ansible_collections.gb10.fleet.plugins.module_utils._mods import ModError, patched, sha256, silent


def original(module: AnsibleModule, image: str, path: str) -> str:
    """The text of a file of the image."""
    words = ["docker", "run", "--rm", "--pull", "never", "--network", "none", "--entrypoint", "cat", image, path]
    said = run(words, 120)
    if not said.ok:
        why = (said.err.strip() or "no answer").splitlines()[-1]
        module.fail_json(msg=f"{path} cannot be read from {image}: {why}. Correct mods in the recipe.")
    return said.out


def write(path: Path, text: str) -> None:
    """Replace the file whole, readable for any user of the container."""
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    Path(temporary).chmod(0o644)
    Path(temporary).replace(path)


def present(module: AnsibleModule) -> dict[str, Any]:
    files, diffs, changed = [], [], False
    for mod in module.params["mods"]:
        before = original(module, module.params["image"], mod["target"])
        after, path = patched(before, mod, module.params["image"]), Path(mod["file"])
        there = path.read_text(encoding="utf-8") if path.is_file() else None
        if not mod.get("original_sha256"):
            module.warn(
                f"mods {mod['name']}: write original_sha256: {sha256(before)} into the recipe, so that a new image is noticed."
            )
        if there != after:
            changed = True
            diffs.append(
                {"before": before, "after": after, "before_header": mod["target"], "after_header": mod["file"]}
            )
            if not module.check_mode:
                write(path, after)
        files.append(
            {"name": mod["name"], "original_sha256": sha256(before), "sha256": sha256(after), "file": mod["file"]}
        )
    return {"changed": changed, "files": files, "diff": diffs}


def effective(module: AnsibleModule) -> dict[str, Any]:
    said = run(["docker", "logs", module.params["container"]], 120)
    if not said.ok:
        module.fail_json(msg=f"The log of {module.params['container']} cannot be read: {said.err.strip()[-300:]}")
    if missing := silent(said.out + said.err, module.params["mods"]):
        module.fail_json(msg=" ".join(missing) + " Look at the first lines of its log, and at the mod.")
    return {"changed": False}


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["present", "effective"], "default": "present"},
            "image": {"type": "str"},
            "mods": {"type": "list", "elements": "dict", "required": True},
            "container": {"type": "str"},
        },
        required_if=[("state", "present", ["image"]), ("state", "effective", ["container"])],
        supports_check_mode=True,
    )
    try:
        module.exit_json(**(present(module) if module.params["state"] == "present" else effective(module)))
    except ModError as exc:
        module.fail_json(msg=str(exc))
    except OSError as exc:
        module.fail_json(msg=f"{exc.filename} cannot be written ({exc.strerror}). Run with become.")


if __name__ == "__main__":
    main()
