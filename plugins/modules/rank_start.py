#!/usr/bin/python
# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: rank_start
short_description: Start the container of a rank, with the words that render.yml prints
version_added: "0.1.0"
description:
  - Runs the C(docker run) of a rank spec on the node, word for word what C(playbooks/render.yml) prints.
  - A container that runs with the same spec (label C(gb10.fleet.spec)) and the same image is left alone, since another one would
    load the model again. One that ended or differs is removed first.
  - What the rank reads has to be there; Docker would put an empty folder in its place. Folders that it writes to are made.
author:
  - The gb10.fleet maintainers (@gb10-fleet)
extends_documentation_fragment:
  - gb10.fleet.attributes
  - gb10.fleet.attributes.full
options:
  spec:
    description: The rank spec, as M(gb10.fleet.topology) rendered it.
    type: dict
    required: true
  timeout_s:
    description: Seconds that each call of the C(docker) command may take.
    type: int
    default: 180
  docker_socket:
    description: Socket of the Docker engine.
    type: path
    default: /var/run/docker.sock
"""

EXAMPLES = r"""
- name: Start the rank of this node
  gb10.fleet.rank_start:
    spec: "{{ topology_spec }}"
"""

RETURN = r"""
container_id:
  description: The container that runs; none in check mode when it is to be started.
  returned: always
  type: str
  sample: 3f1c2a9b7d10e0c15f5f86e2f1f5ad1bbdc4c9ea6bd5b4e6f0c7a4b3c2d1e0f9
argv:
  description: The words of C(docker run).
  returned: always
  type: list
  elements: str
"""

import os
from collections.abc import Mapping
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.gb10.fleet.plugins.module_utils import _rank_spec
from ansible_collections.gb10.fleet.plugins.module_utils._docker_api import Docker, DockerError
from ansible_collections.gb10.fleet.plugins.module_utils._docker_command import docker


def as_wanted(found: Mapping[str, Any], image_id: str, spec: Mapping[str, Any]) -> bool:
    """Whether the container (of ``docker inspect``) runs as the spec says, from that image."""
    label = _rank_spec.LABEL_SPEC
    return (
        found["State"].get("Status") == "running"
        and found["Image"] == image_id
        and (found["Config"].get("Labels") or {}).get(label) == spec["labels"][label]
    )


def missing_sources(spec: Mapping[str, Any]) -> list[str]:
    """Paths of this node that the rank reads and that do not exist. One that this user may not see counts as there."""
    missing = []
    for mount in spec["mounts"]:
        try:
            os.stat(mount["source"])  # noqa: PTH116
        except FileNotFoundError:
            missing += [mount["source"]] if mount["read_only"] else []
        except OSError:
            continue
    return missing


class RankStart:
    """Compares, removes what differs, runs."""

    def __init__(self, module: AnsibleModule) -> None:
        self.module = module
        self.spec: dict[str, Any] = module.params["spec"]
        self.engine = Docker(module.params["docker_socket"])

    def apply(self) -> dict[str, Any]:
        spec, argv = self.spec, _rank_spec.docker_run_argv(self.spec)
        image = self.engine.find(f"/images/{spec['image']}/json")
        if image is None and not self.module.check_mode:
            self.module.fail_json(
                msg=f"The image {spec['image']} is not on this node. Run: ansible-playbook gb10.fleet.prepare"
            )
        found = self.engine.find(f"/containers/{spec['name']}/json")
        if found and image and as_wanted(found, image["Id"], spec):
            return {"changed": False, "container_id": found["Id"], "argv": argv}
        result: dict[str, Any] = {"changed": True, "container_id": None, "argv": argv}
        before = f"{spec['name']}: {found['State'].get('Status')}, of {found['Config'].get('Image')}\n" if found else ""
        result["diff"] = {"before": before, "after": _rank_spec.docker_run_text(spec) + "\n"}
        if self.module.check_mode:
            return result
        if missing := missing_sources(spec):
            self.module.fail_json(
                msg=f"{', '.join(missing)} is not on this node, and {spec['name']} reads it. "
                "Run: ansible-playbook gb10.fleet.prepare"
            )
        limit = self.module.params["timeout_s"]
        if found:
            docker(["docker", "rm", "--force", found["Id"]], limit, spec["name"])
        return {**result, "container_id": docker(argv, limit, spec["name"])}


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "spec": {"type": "dict", "required": True},
            "timeout_s": {"type": "int", "default": 180},
            "docker_socket": {"type": "path", "default": "/var/run/docker.sock"},
        },
        supports_check_mode=True,
    )
    try:
        module.exit_json(**RankStart(module).apply())
    except DockerError as exc:
        module.fail_json(msg=str(exc))


if __name__ == "__main__":
    main()
