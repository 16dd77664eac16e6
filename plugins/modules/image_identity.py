#!/usr/bin/python
# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: image_identity
short_description: Say whether an image is on a node, and what its content is
version_added: "0.1.0"
description:
  - The identity covers the layers and the configuration. It is equal on two nodes exactly when the same content would run there -
    the image id differs between storage drivers, a tag moves, and digests are lost when an image is copied by save and load.
  - An image that M(gb10.fleet.image) brought by another way than its registry is found by what that module noted.
author:
  - The gb10.fleet maintainers (@gb10-fleet)
extends_documentation_fragment:
  - gb10.fleet.attributes
  - gb10.fleet.attributes.read_only
options:
  name:
    description: Reference of the image, with its digest if it is pinned.
    type: str
    required: true
  state_dir:
    description: Folder for what is known of images.
    type: path
    default: /var/lib/gb10-fleet/images
  docker_socket:
    description: The socket of the Docker engine.
    type: path
    default: /var/run/docker.sock
  lock_file:
    description: The lock that staging and serving share; C(image.holder) reports who has it when the image is absent.
    type: path
    default: /run/gb10-fleet/serving.lock
seealso:
  - module: gb10.fleet.image
"""

EXAMPLES = r"""
- name: Look at the image
  gb10.fleet.image_identity:
    name: ghcr.io/tonyd2wild/vllm-glm53-flash:sm121-v8
  register: found
"""

RETURN = r"""
image:
  description:
    - C(present), and if so C(id), C(identity), C(platform), C(size_bytes), C(created), C(inputs) (hash of what it was built from)
      and C(entrypoint); else C(holder), who stages or serves on this node, or null.
  returned: success
  type: dict
  sample:
    name: ghcr.io/tonyd2wild/vllm-glm53-flash:sm121-v8
    present: true
    id: sha256:6f2c1e2f7f9d4c5b8a0e
    identity: 9d1c2b3a4f5e
    platform: linux/arm64
    size_bytes: 26843545600
    created: "2026-10-01T10:00:00Z"
    inputs: null
"""

from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.gb10.fleet.plugins.module_utils._checkpoint_job import running_rank
from ansible_collections.gb10.fleet.plugins.module_utils._image import Engine, EngineError, Receipts, describe
from ansible_collections.gb10.fleet.plugins.module_utils._staging_lock import StagingLock


def look(engine: Engine, receipts: Receipts, name: str) -> dict[str, Any]:
    """What the engine has under this name."""
    found = engine.image(name)
    if found is None and (known := receipts.id_of(name)):
        found = engine.image(known)
    return describe(name, found)


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "name": {"type": "str", "required": True},
            "state_dir": {"type": "path", "default": "/var/lib/gb10-fleet/images"},
            "docker_socket": {"type": "path", "default": "/var/run/docker.sock"},
            "lock_file": {"type": "path", "default": "/run/gb10-fleet/serving.lock"},
        },
        supports_check_mode=True,
    )
    params = module.params
    try:
        image = look(Engine(params["docker_socket"]), Receipts(Path(params["state_dir"])), params["name"])
    except EngineError as exc:
        module.fail_json(msg=str(exc))
    if not image["present"]:
        image["holder"] = StagingLock(params["lock_file"], running_rank).holder()
    module.exit_json(changed=False, image=image)


if __name__ == "__main__":
    main()
