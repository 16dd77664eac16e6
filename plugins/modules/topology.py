#!/usr/bin/python
# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: topology
short_description: Validate inventory and recipe, and set what every rank needs to know
version_added: "0.1.0"
description:
  - Reads the inventory variables of all hosts and the recipe of this host's cluster on the controller. B(No host is contacted and
    no fact is needed), so that bad input ends before anything was touched.
  - Checks that every host is in one cluster, that ranks run from 0 without holes, that the cluster has as many hosts as its recipe
    wants, that all addresses differ, that every rank has the same recipe, and that the recipe has no unknown key.
  - A cluster with a mistake fails on its own hosts only; other clusters go on.
  - This is an action plugin.
author:
  - The gb10.fleet maintainers (@gb10-fleet)
extends_documentation_fragment:
  - gb10.fleet.attributes
  - gb10.fleet.attributes.read_only
options:
  whole_clusters:
    description:
      - Fail when C(--limit) leaves a rank of this host's cluster out of the run. The ranks of a cluster start only together.
    type: bool
    default: true
notes:
  - "Inventory variables read: C(cluster), C(rank), C(ansible_host), C(fabric_address), C(fabric_interface), C(fabric_hca),
    C(fabric_gid_index), C(fabric_cidr), C(recipe), C(recipe_dirs), C(recipe_overrides), C(recipe_site_overrides), C(models_dir),
    C(image_registry),
    C(kv_cache_memory) (bytes, or V(learned): what this cluster's own last start proposed)."
  - "A recipe is looked up as a path when its name ends with C(.yml), then in C(recipe_dirs), in the folder C(recipes) beside the
    inventory, and in the collection."
"""

EXAMPLES = r"""
- name: Validate inventory and recipe
  gb10.fleet.topology:

- name: Look at part of a cluster
  gb10.fleet.topology:
    whole_clusters: false
"""

RETURN = r"""
ansible_facts:
  description: What the other roles of the collection work from.
  returned: success
  type: dict
  contains:
    topology_cluster:
      description: Name of the cluster.
      type: str
      returned: success
      sample: alpha
    topology_rank:
      description: Rank of this host; 0 is the head.
      type: int
      returned: success
      sample: 1
    topology_size:
      description: Number of ranks.
      type: int
      returned: success
      sample: 2
    topology_head:
      description: Inventory name of the head.
      type: str
      returned: success
      sample: spark-01
    topology_members:
      description: Inventory names, by rank.
      type: list
      elements: str
      returned: success
      sample: [spark-01, spark-02]
    topology_addresses:
      description: Fabric address of every member.
      type: dict
      returned: success
      sample: {spark-01: 198.51.100.11, spark-02: 198.51.100.12}
    topology_recipe:
      description: The recipe with overrides merged and every default filled in.
      type: dict
      returned: success
    topology_origins:
      description: Where each value of the recipe that is not a default came from, by its dotted path.
      type: dict
      returned: success
      sample: {args.max-model-len: recipe, options.context: command line}
    topology_spec:
      description: Rank spec of this host from what is declared (what the fabric role finds on the node is not in it yet).
      type: dict
      returned: success
    topology_spec_hash:
      description: sha256 of the declared rank spec. The label C(gb10.fleet.spec) of a running rank is compared with it.
      type: str
      returned: success
    topology_probe:
      description: URL (as the head's own node reaches it) and served model name, for the probe of M(gb10.fleet.rank_info).
      type: dict
      returned: success
      sample: {url: "http://127.0.0.1:8000", model: glm-5.3-flash}
    topology_endpoint:
      description: Where the head answers.
      type: str
      returned: success
      sample: http://192.0.2.11:8000
"""
