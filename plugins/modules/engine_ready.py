#!/usr/bin/python
# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: engine_ready
short_description: Wait until all ranks of a cluster serve, and say why if they do not
version_added: "0.1.0"
description:
  - Watches every rank of a cluster at the same time and prints one line per change while it waits.
  - Ready means that every rank runs with unchanged container and restart count, that the served model is listed, and that
    one streamed completion really came. C(/health) is not asked, since it stays 200 with a dead worker.
  - Ends as soon as any rank gives reason to - it ended, was restarted or frozen, its node gives no answer, its log holds a
    line that the failure catalogue knows, or it stands still. The error names node, rank, cause and what to do; it is the
    first error by time over all ranks, since the loudest one often names the wrong node.
  - Budgets count per stage. A long stage with progress is no failure before its budget; one where log, CPU and GPU are
    still is.
  - This is an action plugin that calls M(gb10.fleet.rank_info) on every node. It needs the facts of M(gb10.fleet.topology),
    the linear strategy, and as many forks as hosts in the play.
author:
  - The gb10.fleet maintainers (@gb10-fleet)
extends_documentation_fragment:
  - gb10.fleet.attributes
  - gb10.fleet.attributes.read_only
attributes:
  check_mode:
    support: full
    details: Does not wait in check mode.
options:
  container:
    description: Name of the rank container.
    type: str
    required: true
  container_id:
    description: Id of the container that was started; another one in its place is a failure. Taken from the first look when unset.
    type: str
  url:
    description: Base URL of the engine as the head's own node reaches it.
    type: str
    required: true
  model:
    description: Name under which the model must be listed and answer.
    type: str
    required: true
  api_key_file:
    description: File on the head whose first line is the API key.
    type: str
  master:
    description: C(address:port) at which workers must look for the head. A worker that looks elsewhere fails at once.
    type: str
  budgets:
    description:
      - Seconds per stage, merged over the defaults. C(start_s) (300) until a rank waits for the others, C(rendezvous_s)
        (180) until all ranks joined, C(load_s) (3600) for the weights, C(compile_s) (3600) from the weights to the server,
        C(first_token_s) (300) from the server to the first completion, C(still_s) (300) without any sign of life,
        C(unreachable_s) (30) without an answer of a node.
    type: dict
    default: {}
  prompt:
    description: What to ask.
    type: str
    default: "Say: ready"
  max_tokens:
    description: Length of the answer.
    type: int
    default: 16
  gpu:
    description: Look at the GPU as well, while the completion comes and when a rank is still.
    type: bool
    default: false
  transport:
    description: Whether ranks should talk RDMA; a fall-back to sockets is a finding then.
    type: str
    choices: [roce, socket]
    default: roce
  log_lines:
    description: How many last lines of each rank to keep for the diagnosis.
    type: int
    default: 20
  output:
    description: How progress is printed; V(json) is one object per line.
    type: str
    choices: [plain, json, quiet]
    default: plain
  docker_socket:
    description: Socket of the Docker engine on the nodes.
    type: str
    default: /var/run/docker.sock
"""

EXAMPLES = r"""
- name: Wait until every rank is ready
  gb10.fleet.engine_ready:
    container: "{{ topology_spec.name }}"
    url: "{{ topology_probe.url }}"
    model: "{{ topology_probe.model }}"
    master: "{{ topology_addresses[topology_head] }}:{{ topology_recipe.master_port }}"
    budgets: "{{ topology_recipe.readiness }}"
  register: ready
"""

RETURN = r"""
seconds:
  description: How long the wait took.
  returned: success
  type: float
  sample: 37.2
probe:
  description: The completion - text, completion_tokens, ttft_s, tokens_per_s and more, as in M(gb10.fleet.rank_info).
  returned: success
  type: dict
gpu:
  description: The head's GPU while the completion came.
  returned: success, with O(gpu)
  type: dict
rank:
  description: What was last seen of this host's own rank, as in M(gb10.fleet.rank_info).
  returned: success
  type: dict
findings:
  description: What is worth a look although it serves - severity, code, node, text.
  returned: success, on the head
  type: list
  elements: dict
kv_cache:
  description: The engine's own proposal for C(--kv-cache-memory) - C(bytes), the least over all ranks, and C(ranks) - or null.
  returned: success, on the head
  type: dict
diagnosis:
  description: The verdict. All of it on the rank where it began; cluster, node, rank and id on the others.
  returned: failure
  type: dict
  contains:
    cluster: {description: Name of the cluster., type: str, returned: failure, sample: alpha}
    node: {description: Where it began., type: str, returned: failure, sample: spark-02}
    rank: {description: Rank of that node., type: int, returned: failure, sample: 1}
    id: {description: Name in the failure catalogue., type: str, returned: failure, sample: ckpt-missing-file}
    title: {description: The verdict in a few words., type: str, returned: failure}
    cause: {description: "What happened, with numbers.", type: str, returned: failure}
    fix: {description: What to do., type: str, returned: failure}
    stage: {description: Stage in which it happened., type: str, returned: failure, sample: load}
    line: {description: First error by time., type: str, returned: failure}
    time: {description: When (UTC)., type: str, returned: failure, sample: "12:48:35"}
    elapsed_s: {description: Seconds from the beginning of the wait to the verdict., type: float, returned: failure}
    others: {description: What is wrong with other ranks., type: list, elements: dict, returned: failure}
"""
