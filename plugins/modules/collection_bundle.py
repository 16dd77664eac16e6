#!/usr/bin/python
# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: collection_bundle
short_description: Pack collections of the controller into one archive
version_added: "0.1.0"
description:
  - Writes what playbooks need of the named collections into one archive on the controller, from wherever Ansible found them. A host
    that runs playbooks itself unpacks it and needs no Galaxy.
  - The same files make the same archive, byte for byte.
  - This is an action plugin. It contacts no host.
author:
  - The gb10.fleet maintainers (@gb10-fleet)
extends_documentation_fragment:
  - gb10.fleet.attributes
attributes:
  check_mode:
    support: full
  diff_mode:
    support: none
    details: The archive is binary.
  idempotent:
    support: full
options:
  collections:
    description: Names of collections.
    type: list
    elements: str
    required: true
  dest:
    description: The archive (C(.tar.gz)) on the controller.
    type: str
    required: true
"""

EXAMPLES = r"""
- name: Pack what serve.yml needs
  gb10.fleet.collection_bundle:
    collections: [gb10.fleet, community.docker]
    dest: ~/.local/state/gb10-fleet/collections.tar.gz
"""

RETURN = r"""
path:
  description: The archive.
  returned: success
  type: str
  sample: /home/ann/.local/state/gb10-fleet/collections.tar.gz
checksum:
  description: Its sha256.
  returned: success
  type: str
  sample: 8c1f0a2b
"""
