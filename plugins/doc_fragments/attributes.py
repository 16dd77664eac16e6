# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Attributes that the modules of this collection share, in the manner of community.docker."""

from __future__ import annotations


class ModuleDocFragment:
    """Documentation fragments: ``attributes`` (descriptions), ``attributes.full``, ``attributes.read_only`` (changes nothing)."""

    DOCUMENTATION = r"""
options: {}
attributes:
  check_mode:
    description: Can run in C(check_mode) and return changed status prediction without modifying the target.
  diff_mode:
    description: Will return details on what has changed (or possibly needs changing in C(check_mode)), when in diff mode.
  idempotent:
    description:
      - When run twice in a row outside check mode, with the same arguments, the second invocation indicates no change.
      - This assumes that the system controlled or queried by the module has not changed in a relevant way.
  action_group:
    description: Use C(group/gb10.fleet.all) in C(module_defaults) to set defaults for this module.
    support: full
    membership:
      - gb10.fleet.all
"""

    FULL = r"""
options: {}
attributes:
  check_mode:
    support: full
  diff_mode:
    support: full
  idempotent:
    support: full
"""

    READ_ONLY = r"""
options: {}
attributes:
  check_mode:
    support: full
    details: This module only reads; it does the same in check mode.
  diff_mode:
    support: N/A
    details: This module never changes anything.
  idempotent:
    support: full
"""
