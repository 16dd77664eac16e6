#!/usr/bin/python
# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: fabric_plan
short_description: Judge the fabric of a cluster and derive each rank's NCCL environment
version_added: "0.1.0"
description:
  - Takes what M(gb10.fleet.fabric_info) and M(gb10.fleet.fabric_probe) registered on every rank of a cluster, collects
    all findings of all nodes and reports them together. Errors fail the ranks of this cluster; warnings and other clusters go on.
  - Sets the facts C(fabric_env) (per-node environment - HCA list, GID index, interface names, address range), C(fabric_rails)
    and C(fabric_shape) (single, pair, switch, mesh or ring).
  - A value that is to be automatic is absent from C(fabric_env), never empty.
  - This is an action plugin. It runs on the controller, opens no connection, and needs the linear strategy.
author:
  - The gb10.fleet maintainers (@gb10-fleet)
extends_documentation_fragment:
  - gb10.fleet.attributes
  - gb10.fleet.attributes.read_only
options:
  info_from:
    description: Name of the variable that M(gb10.fleet.fabric_info) was registered in.
    type: str
    required: true
  probe_from:
    description: Name of the variable that M(gb10.fleet.fabric_probe) was registered in.
    type: str
    required: true
  transport:
    description: V(roce) wants RDMA on the first rail; V(socket) wants only addresses.
    type: str
    choices: [roce, socket]
    default: roce
  cidr:
    description: Declared address range of the fabric. Without it, the smallest prefix over all rails is taken.
    type: str
  accept:
    description: Codes of findings (in brackets behind each sentence) whose errors are to be warnings.
    type: list
    elements: str
    default: []
  show:
    description: Print a table of all rails of the cluster, whatever the judgement.
    type: bool
    default: false
  defer_errors:
    description: Do not fail, leave the findings in the fact C(fabric_deferred) for M(gb10.fleet.preflight_report).
    type: bool
    default: false
"""

EXAMPLES = r"""
- name: Judge the fabric of each cluster
  gb10.fleet.fabric_plan:
    info_from: fabric_report
    probe_from: fabric_proof
    show: true
"""

RETURN = r"""
ansible_facts:
  description: Facts of this rank.
  returned: success
  type: dict
  contains:
    fabric_env:
      description: Environment of this rank's container.
      type: dict
    fabric_rails:
      description: Proven rails of this node.
      type: list
      elements: dict
    fabric_shape:
      description: Shape of the fabric.
      type: str
    fabric_findings:
      description: Findings of the whole cluster - C(severity) (error, warning, note), C(code), C(node), C(text).
      type: list
      elements: dict
  sample:
    fabric_env:
      VLLM_HOST_IP: 198.51.100.11
      NCCL_SOCKET_IFNAME: enp1s0f0np0
      GLOO_SOCKET_IFNAME: enp1s0f0np0
      TP_SOCKET_IFNAME: enp1s0f0np0
      MN_IF_NAME: enp1s0f0np0
      NCCL_IB_HCA: rocep1s0f0,roceP2p1s0f0
      NCCL_IB_GID_INDEX: "3"
      NCCL_IB_ADDR_RANGE: 198.51.100.0/24
    fabric_shape: pair
"""
