#!/usr/bin/python
# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

DOCUMENTATION = r"""
module: fabric_bandwidth
short_description: Measure the rails between two ranks for a few seconds
version_added: "0.1.0"
description:
  - O(state=serve) starts one server per rail and returns; each ends by itself. O(state=measure) runs one client per rail, all
    at the same time, and gives a verdict - full (both rails), one-rail, degraded (8 to 25 Gb/s of 200), slow, or TCP.
  - Uses C(ib_write_bw) of perftest where it is installed, C(iperf3) otherwise. Buffers are 64 KiB - a 16 GB buffer has frozen a
    node.
author:
  - The gb10.fleet maintainers (@gb10-fleet)
extends_documentation_fragment:
  - gb10.fleet.attributes
attributes:
  check_mode:
    support: none
    details: It measures, or does nothing.
  diff_mode:
    support: N/A
    details: This module never changes anything.
  idempotent:
    support: full
options:
  state:
    description: Which side this node is.
    type: str
    choices: [serve, measure]
    required: true
  node:
    description: How messages name this node.
    type: str
    required: true
  rails:
    description: Rails of this node as the fact C(fabric_rails) lists them. Each is measured against the peer's of the same number.
    type: list
    elements: dict
    required: true
  port:
    description: Port of rail 1; the next rails follow.
    type: int
    default: 18515
  seconds:
    description: How long to measure.
    type: int
    default: 3
"""

EXAMPLES = r"""
- name: Serve on the worker
  gb10.fleet.fabric_bandwidth:
    state: serve
    node: "{{ inventory_hostname }}"
    rails: "{{ fabric_rails }}"
  when: topology_rank == 1

- name: Measure from the head
  gb10.fleet.fabric_bandwidth:
    state: measure
    node: "{{ inventory_hostname }}"
    rails: "{{ fabric_rails }}"
  register: bandwidth
  when: topology_rank == 0
"""

RETURN = r"""
results:
  description: One entry per rail - C(peer), C(rail), C(tool), C(gbit), C(verdict) and C(error).
  returned: O(state=measure)
  type: list
  elements: dict
verdicts:
  description: The verdict by peer.
  returned: O(state=measure)
  type: dict
  sample: {spark-02: full}
"""

import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.gb10.fleet.plugins.module_utils import _bandwidth
from ansible_collections.gb10.fleet.plugins.module_utils._command import environment, find, run


def tool_of(rail: dict[str, Any]) -> str | None:
    """perftest where the rail has an RDMA device and it is installed; iperf3 otherwise."""
    if rail.get("hca") and find(_bandwidth.PERFTEST):
        return _bandwidth.PERFTEST
    return _bandwidth.IPERF if find(_bandwidth.IPERF) else None


def serve(rails: list[dict[str, Any]], port: int, seconds: int) -> list[str]:
    """Start a server per rail, in sessions of their own; ``timeout`` ends them."""
    started = []
    for rail in rails:
        tool = tool_of(rail)
        if tool is None:
            continue
        subprocess.Popen(  # pylint: disable=ansible-bad-function
            _bandwidth.server_argv(tool, rail, port + rail["number"] - 1, seconds),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment(),
            start_new_session=True,
        )
        started.append(tool)
    return started


def measure_rail(rail: dict[str, Any], port: int, seconds: int) -> dict[str, Any]:
    """One client; the server may need a moment, so a refusal is tried again for five seconds."""
    tool = tool_of(rail)
    result: dict[str, Any] = {"peer": rail["peer"], "rail": rail["number"], "tool": tool, "gbit": None, "error": None}
    if tool is None:
        return {**result, "error": "neither ib_write_bw (perftest) nor iperf3 is installed"}
    deadline = time.monotonic() + 5
    while True:
        answer = run(_bandwidth.client_argv(tool, rail, port + rail["number"] - 1, seconds), seconds + 20)
        gbit = _bandwidth.parse(tool, answer.out)
        if gbit is not None or time.monotonic() > deadline:
            break
        time.sleep(0.5)
    words = (answer.err or answer.out).strip().splitlines()
    return {
        **result,
        "gbit": gbit,
        "error": None if gbit is not None else (words[-1] if words else "it printed no figure"),
    }


def measure(node: str, rails: list[dict[str, Any]], port: int, seconds: int) -> dict[str, Any]:
    """Rails to one peer at the same time, peers one after the other."""
    results: list[dict[str, Any]] = []
    verdicts, sentences = {}, []
    for peer in dict.fromkeys(rail["peer"] for rail in rails):
        mine = [rail for rail in rails if rail["peer"] == peer]
        with ThreadPoolExecutor(max_workers=len(mine)) as pool:
            found = list(pool.map(lambda rail: measure_rail(rail, port, seconds), mine))
        for result in found:
            result["verdict"] = _bandwidth.verdict(result["gbit"])
        verdicts[peer] = _bandwidth.overall(found)
        sentence = _bandwidth.advice(node, peer, found)
        if sentence:
            sentences.append(sentence)
        results += found
    return {"results": results, "verdicts": verdicts, "sentences": sentences}


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["serve", "measure"], "required": True},
            "node": {"type": "str", "required": True},
            "rails": {"type": "list", "elements": "dict", "required": True},
            "port": {"type": "int", "default": 18515},
            "seconds": {"type": "int", "default": 3},
        },
        supports_check_mode=False,
    )
    params = module.params
    if params["state"] == "serve":
        module.exit_json(changed=False, started=serve(params["rails"], params["port"], params["seconds"]))
    found = measure(params["node"], params["rails"], params["port"], params["seconds"])
    for sentence in found.pop("sentences"):
        module.warn(sentence)
    module.exit_json(changed=False, **found)


if __name__ == "__main__":
    main()
