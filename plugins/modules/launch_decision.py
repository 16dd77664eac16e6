#!/usr/bin/python
# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: launch_decision
short_description: Decide per cluster whether it has to be launched
version_added: "0.1.0"
description:
  - Looks at what M(gb10.fleet.rank_info) reported of every rank of this host's cluster and decides once for the cluster. If every
    rank runs with the settings that are asked for and the head answered a real completion, nothing is to be done.
  - A completion that did not come in time is not a reason to launch, since a busy engine would lose every running request. The
    action then fails and says so.
  - While another launch of the cluster is under way (its record in the serving lock of a node) it fails, whatever O(restart) says.
    A launch from this controller whose process has ended does not count.
  - This is an action plugin. It needs the facts of M(gb10.fleet.topology).
author:
  - The gb10.fleet maintainers (@gb10-fleet)
extends_documentation_fragment:
  - gb10.fleet.attributes
  - gb10.fleet.attributes.read_only
options:
  report:
    description: Name of the variable in which every host registered its M(gb10.fleet.rank_info).
    type: str
    required: true
  restart:
    description: Launch whatever the state is.
    type: bool
    default: false
"""

EXAMPLES = r"""
- name: Look at every rank
  gb10.fleet.rank_info:
    container: "{{ topology_spec.name }}"
    expected_spec: "{{ topology_spec_hash }}"
  register: serve_rank

- name: Decide for each cluster
  gb10.fleet.launch_decision:
    report: serve_rank
"""

RETURN = r"""
ansible_facts:
  description: The decision, the same on every rank of the cluster.
  returned: success
  type: dict
  contains:
    launch_needed:
      description: Whether the cluster has to be launched.
      type: bool
      returned: success
    launch_reasons:
      description: Why, each beginning with the name of the node.
      type: list
      elements: str
      returned: success
      sample: ["spark-02: no rank container"]
    launch_holder:
      description: Who launches, for M(gb10.fleet.serving_lock) - C(controller), C(pid), and C(dead) (earlier launches that ended).
      type: dict
      returned: success
      sample: {controller: workstation, pid: 4711, dead: []}
"""
