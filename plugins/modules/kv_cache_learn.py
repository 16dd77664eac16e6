#!/usr/bin/python
# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: kv_cache_learn
short_description: Keep the engine's own proposal for its KV cache
version_added: "0.1.0"
description:
  - After its first start an engine says what C(--kv-cache-memory) would fit. This keeps the least of all ranks on the
    controller, under a key of cluster, image and recipe, and shows it. The next start uses it only when the inventory says
    C(kv_cache_memory=learned).
  - A pinned KV cache leaves nothing in reserve for activations; prove it with a long prompt before relying on it.
  - This is an action plugin. It needs the facts of M(gb10.fleet.topology) and contacts no host.
author:
  - The gb10.fleet maintainers (@gb10-fleet)
extends_documentation_fragment:
  - gb10.fleet.attributes
  - gb10.fleet.attributes.read_only
options:
  proposal:
    description: RV(gb10.fleet.engine_ready#module:kv_cache).
    type: dict
    required: true
  learned_dir:
    description: Folder on the controller.
    type: str
    required: true
"""

EXAMPLES = r"""
- name: Keep the engine's proposal for its KV cache
  gb10.fleet.kv_cache_learn:
    proposal: "{{ readiness_result.kv_cache }}"
    learned_dir: ~/.local/state/gb10-fleet/learned
"""

RETURN = r"""
kv_cache_memory:
  description: The figure in bytes.
  returned: success
  type: int
  sample: 5948473344
new:
  description: Whether it differs from what was kept before.
  returned: success
  type: bool
"""
