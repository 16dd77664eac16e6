# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Filters that make text for a person."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ansible_collections.gb10.fleet.plugins.module_utils import _recipe_layers, _text
from ansible_collections.gb10.fleet.plugins.module_utils._engine_log import STAGES
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


def explain_recipe(hosts: Iterable[Mapping[str, Any]], width: int = 100) -> str:
    """Per cluster, every value of its recipe and where it came from; the options first, with what follows from them."""
    blocks, seen = [], set()
    for host in sorted(hosts, key=lambda h: (h["topology_cluster"], h["topology_rank"])):
        if host["topology_cluster"] in seen:
            continue
        seen.add(host["topology_cluster"])
        recipe = host["topology_recipe"]
        rows = _recipe_layers.explain(recipe, host["topology_origins"])
        shown = [{"setting": row["setting"], "value": _shown(row["value"]), "from": row["from"]} for row in rows]
        title = f"{host['topology_cluster']}: {recipe['name']} (command line > inventory > option > recipe > default)"
        means = [
            textwrap.fill(
                f"{row['setting']} {_recipe_layers.word(row['value'])}: {row['means']}.", width, subsequent_indent="  "
            )
            for row in rows
            if row["means"] and row["value"] is not None
        ]
        blocks.append("\n".join([_text.table(shown, title=title), "", *means]).rstrip())
    return "\n\n".join(blocks)


def _shown(value: Any, width: int = 40) -> str | None:
    if value is None:
        return None
    text = json.dumps(value) if isinstance(value, (list, Mapping)) else _recipe_layers.word(value)
    return text if len(text) <= width else text[: width - 2] + " …"


def _status_row(host: Mapping[str, Any], answers: bool) -> dict[str, Any]:
    answer = host.get("status_rank") or {}
    rank = answer.get("rank") or {}
    row: dict[str, Any] = {"node": host["inventory_hostname"], "rank": host["topology_rank"]}
    if answer.get("unreachable") or answer.get("failed"):
        words = "unreachable" if answer.get("unreachable") else str(answer.get("msg") or "no answer")
        return {**row, "container": words, "stage": None, "model": None, "since": None, "guard": None}
    container = "none"
    if rank.get("exists"):
        code = rank.get("exit_code")
        container = "running" if rank.get("running") else f"{rank.get('status')} ({code})"
        if rank.get("running") and rank.get("engine_alive") is False:
            container = "running, engine dead"
        elif not rank.get("spec_matches"):
            container += ", other settings"
    # A worker has no line for "serving": it serves when the head answers.
    stage = "ready" if answers and rank.get("running") else rank.get("stage")
    guard = rank.get("guard") or {}
    probe = rank.get("probe") or {}
    model = host["topology_recipe"]["served_name"] if rank.get("exists") else None
    if model and host["topology_rank"] == 0 and rank.get("running"):
        model += " answers" if probe.get("ok") else f" does not answer ({probe.get('error') or 'no probe'})"
    return {
        **row,
        "container": container,
        "stage": STAGES.get(stage or "", stage),
        "model": model,
        "since": str(rank.get("started_at") or "")[:19].replace("T", " ") or None,
        "guard": guard.get("active"),
    }


def cluster_status(hosts: Iterable[Mapping[str, Any]]) -> str:
    """One table per cluster: node, rank, container, stage, model, since, guard (from the registered ``status_rank``)."""
    clusters: dict[str, list[Mapping[str, Any]]] = {}
    for host in sorted(hosts, key=lambda h: (h["topology_cluster"], h["topology_rank"])):
        clusters.setdefault(host["topology_cluster"], []).append(host)
    tables = []
    for name, members in clusters.items():
        title = f"{name}: {members[0]['topology_recipe']['name']} at {members[0]['topology_endpoint']}/v1"
        head = (members[0].get("status_rank") or {}).get("rank") or {}
        answers = members[0]["topology_rank"] == 0 and bool((head.get("probe") or {}).get("ok"))
        tables.append(_text.table([_status_row(m, answers) for m in members], title=title))
    return "\n\n".join(tables)


class FilterModule:
    """Filters of gb10.fleet that make text."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {
            "table": _text.table,
            "render_ranks": render_ranks,
            "cluster_status": cluster_status,
            "explain_recipe": explain_recipe,
        }
