# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What an action plugin of the fabric and preflight roles knows of the other ranks: their reports and declared values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ansible_collections.gb10.fleet.plugins.module_utils._fabric import parse_hca_list
from ansible_collections.gb10.fleet.plugins.module_utils._fabric_model import Rank


def members(task_vars: Mapping[str, Any]) -> list[str]:
    """The ranks of this host's cluster by rank; the host alone where no topology was set."""
    return [str(name) for name in task_vars.get("topology_members") or [task_vars["inventory_hostname"]]]


def subject(task_vars: Mapping[str, Any]) -> str:
    """How a report names what it is about."""
    cluster = task_vars.get("topology_cluster")
    return f"cluster {cluster}" if cluster else str(task_vars["inventory_hostname"])


def registered(task_vars: Mapping[str, Any], host: str, variable: str | None, key: str) -> Any:
    """What a host registered, or None: it failed, or it left the play."""
    if variable is None or host not in task_vars["ansible_play_hosts"]:
        return None
    value = task_vars["hostvars"][host].get(variable)
    return value.get(key) if isinstance(value, Mapping) and not value.get("failed") else None


def reporter(task_vars: Mapping[str, Any]) -> str:
    """The rank that reports for its cluster: the head, or the first that is still in the play."""
    alive = [name for name in members(task_vars) if name in task_vars["ansible_play_hosts"]]
    return alive[0] if alive else str(task_vars["inventory_hostname"])


def rank_of(task_vars: Mapping[str, Any], host: str, info_from: str | None) -> Rank:
    """One rank with what its inventory declares and what it reported."""
    variables = task_vars["hostvars"][host]
    addresses = task_vars.get("topology_addresses") or {}
    address = addresses.get(host) or variables.get("fabric_address") or variables.get("ansible_host") or host
    hca = variables.get("fabric_hca")
    names = [str(name) for name in hca] if isinstance(hca, (list, tuple)) else parse_hca_list(str(hca or ""))[1]
    index = variables.get("fabric_gid_index")
    interface = variables.get("fabric_interface")
    return Rank(
        name=host,
        address=str(address),
        info=registered(task_vars, host, info_from, "fabric"),
        management=str(variables.get("ansible_host") or host),
        interface=str(interface) if interface else None,
        hcas=tuple(names),
        gid_index=int(index) if index not in (None, "", "auto") else None,
    )


def ranks_of(task_vars: Mapping[str, Any], info_from: str | None) -> list[Rank]:
    return [rank_of(task_vars, host, info_from) for host in members(task_vars)]
