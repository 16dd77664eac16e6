# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: follow
short_description: Wait for an asynchronous task and print how far it is
version_added: "0.1.0"
description:
  - Prints a line per node with bytes, rate and the time that is left, and returns the result of the task as its own.
  - The job lives on the node. When the controller goes away it goes on, and the next run finds what it did.
author:
  - The gb10.fleet maintainers (@gb10-fleet)
extends_documentation_fragment:
  - gb10.fleet.attributes
  - gb10.fleet.attributes.read_only
options:
  job:
    description: What the asynchronous task registered. A result without a job id is returned as it is.
    type: dict
    required: true
  progress_file:
    description: The file on the node where the job writes its progress.
    type: path
    required: true
  every_s:
    description: Seconds between two lines.
    type: float
    default: 10
"""

EXAMPLES = r"""
- name: Fetch the checkpoint
  gb10.fleet.checkpoint:
    models_dir: /var/tmp/models
    checkpoints: [{repo: RedHatAI/GLM-5.3-Flash-NVFP4}]
    progress_file: /run/gb10-fleet/checkpoint.progress
  async: 86400
  poll: 0
  register: job

- name: Wait for it
  gb10.fleet.follow:
    job: "{{ job }}"
    progress_file: /run/gb10-fleet/checkpoint.progress
"""

RETURN = r"""
msg:
  description: The result of the job - everything that its module returns.
  returned: failure
  type: str
"""
