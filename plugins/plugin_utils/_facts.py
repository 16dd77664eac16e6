# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Variables that an action plugin sets for its host, as ``set_fact`` does."""

from __future__ import annotations

from typing import Any

from ansible.plugins.action import ActionBase

try:
    from ansible.plugins.action import VariableLayer
except ImportError:  # ansible-core before 2.21 knows ansible_facts only
    VariableLayer = None


def host_facts(action: ActionBase, facts: dict[str, Any]) -> dict[str, Any]:
    """The result key ``ansible_facts``. With ansible-core 2.21 the facts become variables of the host as ``set_fact``'s do;
    the old way, facts injected as variables, is deprecated there and warns at every use."""
    if VariableLayer is not None:
        action.register_host_variables({}, VariableLayer.CACHEABLE_FACT)
        action.register_host_variables(facts, VariableLayer.EPHEMERAL_FACT)
    return {"ansible_facts": facts}
