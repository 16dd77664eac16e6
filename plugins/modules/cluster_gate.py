#!/usr/bin/python
# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: cluster_gate
short_description: End a whole cluster where one of its ranks failed
version_added: "0.1.0"
description:
  - Fails on every host of a cluster as soon as one of its members has set the fact C(launch_failure) (a sentence) or became
    unreachable. Other clusters pass. A playbook puts it between the steps of a launch, since one rank alone never becomes ready.
  - This is an action plugin. It needs the facts of M(gb10.fleet.topology) and the linear strategy.
author:
  - The gb10.fleet maintainers (@gb10-fleet)
extends_documentation_fragment:
  - gb10.fleet.attributes
  - gb10.fleet.attributes.read_only
options: {}
"""

EXAMPLES = r"""
- name: Check the fabric
  block:
    - name: Prove both rails
      ansible.builtin.include_role:
        name: gb10.fleet.fabric
  rescue:
    - name: Leave the verdict to the gate
      ansible.builtin.set_fact:
        launch_failure: "{{ ansible_failed_result.msg }}"

- name: End the clusters that have a failed rank
  gb10.fleet.cluster_gate:
"""

RETURN = r""" # """
