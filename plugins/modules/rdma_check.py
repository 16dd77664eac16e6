#!/usr/bin/python
# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

DOCUMENTATION = r"""
module: rdma_check
short_description: Check that a running rank really uses RDMA
version_added: "0.1.0"
description:
  - Looks at the rank's container (C(/dev/infiniband), C(IPC_LOCK), the limit of locked memory inside it), at NCCL's lines in its
    log (C(NET/IB) on the planned devices, no C(NET/Socket)), and at the RDMA queue pairs that its processes hold.
  - Fails when the container cannot use RDMA or the rank talks over sockets. NCCL falls back without an error of its own.
  - NCCL prints its transport with C(NCCL_DEBUG=INFO) only. With C(WARN) the queue pairs are the proof; with neither, the result
    RV(proven) is false and nothing fails.
author:
  - The gb10.fleet maintainers (@gb10-fleet)
extends_documentation_fragment:
  - gb10.fleet.attributes
  - gb10.fleet.attributes.read_only
options:
  container:
    description: Name or id of the rank's container.
    type: str
    required: true
  node:
    description: How messages name this node.
    type: str
    required: true
  devices:
    description: RDMA devices that were planned for this rank.
    type: list
    elements: str
    required: true
  accept:
    description: Codes of findings whose errors are to be warnings.
    type: list
    elements: str
    default: []
  log_lines:
    description: How many of the last lines of the log are read.
    type: int
    default: 20000
"""

EXAMPLES = r"""
- name: Check that the rank uses both rails
  gb10.fleet.rdma_check:
    container: vllm_glm53
    node: "{{ inventory_hostname }}"
    devices: [rocep1s0f0, roceP2p1s0f0]
"""

RETURN = r"""
proven:
  description: Whether RDMA is used, by NCCL's own words or by queue pairs.
  returned: success
  type: bool
used:
  description: Devices that are used.
  returned: success
  type: list
  elements: str
  sample: [rocep1s0f0, roceP2p1s0f0]
findings:
  description: C(severity), C(code), C(node) and C(text) of each finding.
  returned: always
  type: list
  elements: dict
"""

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.gb10.fleet.plugins.module_utils import _findings, _nccl
from ansible_collections.gb10.fleet.plugins.module_utils._command import run
from ansible_collections.gb10.fleet.plugins.module_utils._docker_api import Docker, DockerError, messages


def processes(engine: Docker, container: str) -> list[int]:
    """Process ids of a container as this node counts them."""
    try:
        top = engine.get(f"/containers/{container}/top", {"ps_args": "-eo pid"})
    except DockerError:
        return []
    return [int(row[0]) for row in top.get("Processes") or [] if row and row[0].isdigit()]


def log_of(engine: Docker, container: str, lines: int, tty: bool) -> str:
    pieces = engine.stream(f"/containers/{container}/logs", {"stdout": "1", "stderr": "1", "tail": str(lines)})
    return b"".join(messages(pieces, tty)).decode("utf-8", "replace")


def limits_of(pid: int) -> str | None:
    """Limits of a process; None when it is gone or belongs to somebody else."""
    try:
        return Path(f"/proc/{pid}/limits").read_text() if pid else None
    except OSError:
        return None


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "container": {"type": "str", "required": True},
            "node": {"type": "str", "required": True},
            "devices": {"type": "list", "elements": "str", "required": True},
            "accept": {"type": "list", "elements": "str", "default": []},
            "log_lines": {"type": "int", "default": 20000},
        },
        supports_check_mode=True,
    )
    params = module.params
    node, container = params["node"], params["container"]
    engine = Docker()
    try:
        inspect = engine.get(f"/containers/{container}/json")
        said = _nccl.transport(
            log_of(engine, container, params["log_lines"], bool((inspect.get("Config") or {}).get("Tty")))
        )
    except DockerError as error:
        module.fail_json(msg=f"{node}: the rank {container} cannot be looked at: {error}", findings=[])
    pid = int((inspect.get("State") or {}).get("Pid") or 0)
    connected = _nccl.queue_pairs(run(["rdma", "-j", "resource", "show", "qp"], 5).out, processes(engine, container))
    rank = f"rank container {container}"
    findings = _nccl.container_trouble(node, rank, inspect, limits_of(pid))
    findings += _nccl.use_trouble(node, rank, params["devices"], said, connected)
    findings = _findings.accept(findings, params["accept"])
    for finding in _findings.of(findings, _findings.WARNING):
        module.warn(f"{finding.text} [{finding.code}]")
    shown = [finding.as_dict() for finding in findings]
    if _findings.of(findings, _findings.ERROR):
        module.fail_json(msg=_findings.report(f"{node}: RDMA", findings), findings=shown)
    used = said["devices"] or connected
    module.exit_json(changed=False, proven=bool(used), used=used, findings=shown)


if __name__ == "__main__":
    main()
