#!/usr/bin/python
# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: window_learn
short_description: Keep the largest window that an engine says will fit
version_added: "0.1.0"
description:
  - An engine whose prompt-plus-reply window does not fit into the memory of its nodes names one that does. This keeps it on the
    controller, under a key of cluster, image and recipe, and M(gb10.fleet.topology) takes it from then on as the option C(context).
  - Fails with what M(gb10.fleet.engine_ready) said when that was something else, or when the window was taken already.
  - This is an action plugin. It needs the facts of M(gb10.fleet.topology), C(readiness_result) of all ranks, and contacts no host.
author:
  - The gb10.fleet maintainers (@gb10-fleet)
extends_documentation_fragment:
  - gb10.fleet.attributes
  - gb10.fleet.attributes.read_only
options:
  learned_dir:
    description: Folder on the controller.
    type: str
    required: true
"""

EXAMPLES = r"""
- name: Take the window that fits
  gb10.fleet.window_learn:
    learned_dir: ~/.local/state/gb10-fleet/learned
"""

RETURN = r"""
window:
  description: The window in tokens.
  returned: success
  type: int
  sample: 524288
"""
