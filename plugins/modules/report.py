#!/usr/bin/python
# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: report
short_description: Print text for a person
version_added: "0.1.0"
description:
  - Prints O(text) on the controller's terminal as it is, without the indentation and quoting of M(ansible.builtin.debug), so that
    a command can be pasted and a table stays a table.
  - This is an action plugin, nothing is run on a node. Use it with C(run_once).
author:
  - The gb10.fleet maintainers (@gb10-fleet)
extends_documentation_fragment:
  - gb10.fleet.attributes
  - gb10.fleet.attributes.read_only
options:
  text:
    description: What to print. Empty text prints nothing.
    type: str
    required: true
seealso:
  - plugin: gb10.fleet.table
    plugin_type: filter
"""

EXAMPLES = r"""
- name: Show where each rank runs
  gb10.fleet.report:
    text: "{{ [{'node': 'spark-01', 'rank': 0}, {'node': 'spark-02', 'rank': 1}] | gb10.fleet.table }}"
  run_once: true
"""

RETURN = r"""
text:
  description: What was printed.
  returned: always
  type: str
"""
