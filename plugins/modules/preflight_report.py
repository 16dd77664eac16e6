#!/usr/bin/python
# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: preflight_report
short_description: Report the findings of all nodes of a cluster together
version_added: "0.1.0"
description:
  - Judges what M(gb10.fleet.node_info) registered on every rank of a cluster against what a launch wants, compares the ranks,
    adds the fabric's deferred findings, and reports everything in one message. Errors fail the ranks of this cluster; warnings and
    other clusters go on.
  - Sets the fact C(preflight_findings).
  - This is an action plugin. It runs on the controller, opens no connection, and needs the linear strategy.
author:
  - The gb10.fleet maintainers (@gb10-fleet)
extends_documentation_fragment:
  - gb10.fleet.attributes
  - gb10.fleet.attributes.read_only
options:
  report_from:
    description: Name of the variable that M(gb10.fleet.node_info) was registered in.
    type: str
    required: true
  fabric_from:
    description: Name of the variable that M(gb10.fleet.fabric_info) was registered in, to know the interfaces of a node.
    type: str
  gpus:
    description: Whether the ranks use GPUs.
    type: bool
    default: true
  gb10:
    description: Whether to warn about a GPU that is not a GB10.
    type: bool
    default: true
  utilization:
    description: The engine's gpu-memory-utilization, a fraction of the total memory.
    type: float
  safe_utilization:
    description: The largest utilization that is known to survive.
    type: float
  free_gib:
    description: Memory that must be available, where no utilization is set.
    type: float
  disk_margin_gib:
    description: Space to be left on a file system beside what is written.
    type: float
    default: 5.0
  clock_s:
    description: Allowed difference to the controller's clock.
    type: float
    default: 30.0
  image:
    description: Reference of the image, to compare it between the ranks.
    type: str
  env:
    description: Environment that the recipe sets on every rank alike.
    type: dict
    default: {}
  rdma:
    description: Whether the ranks use RDMA.
    type: bool
    default: false
  become:
    description: Roles of the coming run that need root.
    type: list
    elements: str
    default: []
  accept:
    description: Codes of findings (in brackets behind each sentence) whose errors are to be warnings.
    type: list
    elements: str
    default: []
  show:
    description: Print a table of all nodes of the cluster, whatever the judgement.
    type: bool
    default: false
"""

EXAMPLES = r"""
- name: Read every node
  gb10.fleet.node_info:
  register: node_report

- name: Report all findings together
  gb10.fleet.preflight_report:
    report_from: node_report
    utilization: 0.85
    show: true
"""

RETURN = r"""
ansible_facts:
  description: Facts of this rank.
  returned: success
  type: dict
  contains:
    preflight_findings:
      description: Findings of the whole cluster - C(severity) (error, warning, note), C(code), C(node), C(text).
      type: list
      elements: dict
"""
