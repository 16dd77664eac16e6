# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Filters that make text for a person."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ansible_collections.gb10.fleet.plugins.module_utils import _text
from ansible_collections.gb10.fleet.plugins.module_utils._rank_spec import docker_run_text

# What the fabric role finds on the node at launch when the inventory does not say it.
DISCOVERED = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "MN_IF_NAME")
DISCOVERED_ROCE = ("NCCL_IB_HCA", "NCCL_IB_GID_INDEX", "NCCL_IB_ADDR_RANGE")


def render_ranks(hosts: Iterable[Mapping[str, Any]]) -> str:
    """The exact ``docker run`` of every rank, workers first as they are started, each under a comment that names the node."""
    blocks = []
    for host in sorted(hosts, key=lambda h: (h["topology_cluster"], -h["topology_rank"])):
        spec, size = host["topology_spec"], host["topology_size"]
        role = "head" if host["topology_rank"] == 0 else "worker"
        lines = [
            f"# {host['inventory_hostname']}: cluster {host['topology_cluster']}, rank {host['topology_rank']} of {size} ({role})"
        ]
        names = DISCOVERED + (DISCOVERED_ROCE if host["topology_recipe"]["fabric"]["transport"] == "roce" else ())
        missing = [name for name in names if name not in spec["env"]] if size > 1 else []
        if missing:
            lines.append(f"# serve.yml adds what it finds on the node at launch: {', '.join(missing)}")
        blocks.append("\n".join([*lines, docker_run_text(spec)]))
    return "\n\n".join(blocks)


class FilterModule:
    """Filters of gb10.fleet that make text."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"table": _text.table, "render_ranks": render_ranks}
