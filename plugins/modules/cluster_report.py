#!/usr/bin/python
# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: cluster_report
short_description: Say how each cluster is, and why
version_added: "0.1.0"
description:
  - Judges what M(gb10.fleet.rank_info) saw of every rank of a cluster with the failure catalogue and prints a table, the
    verdict with cause and remedy, and findings that are worth a look (settings of the containers, KV cache, block size,
    kernel lines).
  - Runs once per cluster, on its first rank in the play. Contacts no host and changes nothing.
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
  require_serving:
    description: Fail unless every rank is alive and a completion came.
    type: bool
    default: false
  quiet:
    description: Print nothing.
    type: bool
    default: false
"""

EXAMPLES = r"""
- name: Look at every rank
  gb10.fleet.rank_info:
    container: "{{ topology_spec.name }}"
    expected_spec: "{{ topology_spec_hash }}"
    log: true
    kernel: true
    probe: "{{ topology_probe if topology_rank == 0 else omit }}"
  register: diagnose_rank
  ignore_unreachable: true

- name: Say how each cluster is
  gb10.fleet.cluster_report:
    report: diagnose_rank
"""

RETURN = r"""
serving:
  description: Whether every rank is alive and a completion came.
  returned: success
  type: bool
diagnosis:
  description: The verdict as in RV(gb10.fleet.engine_ready#module:diagnosis), or null.
  returned: success
  type: dict
findings:
  description: What is worth a look - severity, code, node, text.
  returned: success
  type: list
  elements: dict
text:
  description: What was printed.
  returned: success
  type: str
"""
