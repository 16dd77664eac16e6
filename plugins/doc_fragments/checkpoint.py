# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Options that the checkpoint modules share."""

from __future__ import annotations


class ModuleDocFragment:
    """Documentation fragment ``checkpoint``."""

    DOCUMENTATION = r"""
options:
  checkpoints:
    description: The checkpoints of a recipe, each as the recipe describes it (its C(checkpoint), then its C(drafter)).
    type: list
    elements: dict
    required: true
    suboptions:
      repo:
        description: Repository on the hub, C(owner/name).
        type: str
        required: true
      revision:
        description:
          - Full commit of 40 hexadecimal digits.
          - Without it, the commit that this node already has; without one, the head of C(main).
        type: str
      layout:
        description:
          - V(flat) puts the files below O(models_dir)/O(checkpoints[].directory).
          - V(hub) puts them below O(models_dir)/hub as the cache of the hub's client does (blobs, and snapshots that link to them).
        type: str
        choices: [flat, hub]
        default: flat
      directory:
        description: Folder below O(models_dir) for the layout V(flat); by default the name of the repository.
        type: str
      include:
        description: Patterns of files to take; all for an empty list.
        type: list
        elements: str
        default: []
      exclude:
        description: Patterns of files to leave out.
        type: list
        elements: str
        default: []
      licence:
        description: Name of the licence, for the message about it.
        type: str
      non_commercial:
        description: Whether the licence forbids commercial use. Such a checkpoint needs O(accept_non_commercial).
        type: bool
        default: false
  models_dir:
    description: Folder of all checkpoints on the node.
    type: path
    required: true
  state_dir:
    description: Folder for manifests and for the cache of verifications.
    type: path
    default: /var/lib/gb10-fleet/checkpoints
  verify:
    description:
      - V(cached) hashes every file once, and again when its size, times or inode changed.
      - V(full) hashes every file now. V(size) trusts sizes and headers.
    type: str
    choices: [cached, full, size]
    default: cached
  endpoint:
    description: Address of the hub, or of a mirror of it; the public hub by default.
    type: str
  token_file:
    description: File on the node with a token for the hub. Only its owner may read it (mode 0600).
    type: path
  accept_non_commercial:
    description: Accept licences that forbid commercial use.
    type: bool
    default: false
"""
