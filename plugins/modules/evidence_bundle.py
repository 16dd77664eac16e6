#!/usr/bin/python
# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: evidence_bundle
short_description: Make one bundle of the evidence of all ranks of a cluster
version_added: "0.1.0"
description:
  - Puts what M(gb10.fleet.evidence_collect) fetched from every rank into one archive on the controller, with a page on top
    that says what failed, how each rank is, and what could not be read. Keeps the newest bundles of each cluster and
    removes older ones.
  - Runs once per cluster, on the first rank that is still in the play, and contacts no host. It never fails, since
    something else has.
  - This is an action plugin. It needs the facts of M(gb10.fleet.topology).
author:
  - The gb10.fleet maintainers (@gb10-fleet)
extends_documentation_fragment:
  - gb10.fleet.attributes
  - gb10.fleet.attributes.read_only
attributes:
  idempotent:
    support: none
    details: Every run makes another bundle.
options:
  stage_dir:
    description: Folder on the controller that the archives of the nodes were fetched into. It is removed.
    type: str
    required: true
  dest_dir:
    description: Folder on the controller for bundles.
    type: str
    required: true
  report:
    description: Name of the variable in which every host registered its M(gb10.fleet.evidence_collect).
    type: str
    required: true
  diagnosis:
    description: RV(gb10.fleet.engine_ready#module:diagnosis), if there is one.
    type: dict
  keep:
    description: How many bundles of each cluster stay.
    type: int
    default: 10
"""

EXAMPLES = r"""
- name: Make one bundle per cluster
  gb10.fleet.evidence_bundle:
    stage_dir: /tmp/evidence-alpha
    dest_dir: ~/.local/state/gb10-fleet/evidence
    report: evidence_collected
"""

RETURN = r"""
path:
  description: The bundle.
  returned: success
  type: str
  sample: /home/me/.local/state/gb10-fleet/evidence/alpha-20261129T161508Z.tar.gz
summary:
  description: The page on top of it.
  returned: success
  type: str
removed:
  description: Older bundles that were removed.
  returned: success
  type: list
  elements: str
"""
