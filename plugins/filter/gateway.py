# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the role gateway writes on the head."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ansible.errors import AnsibleFilterError

from ansible_collections.gb10.fleet.plugins.module_utils._lanes import gateway_config, gateway_lanes, key_records


def gateway_keys(keys: Sequence[Mapping[str, Any]], recipe: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The records of the keys file, with hashes instead of keys."""
    try:
        return key_records(keys, list(gateway_lanes(recipe)))
    except ValueError as exc:
        raise AnsibleFilterError(str(exc)) from None


class FilterModule:
    """Filters of gb10.fleet for the role gateway."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"gateway_config": gateway_config, "gateway_keys": gateway_keys}
