# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Filters of the role ``qualify``: what to measure, what it means, and what the pages show."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleFilterError

from ansible_collections.gb10.fleet.plugins.module_utils import _qualify, _qualify_page, _text
from ansible_collections.gb10.fleet.plugins.module_utils._plain import plain
from ansible_collections.gb10.fleet.plugins.module_utils._qualify_nodes import node

# What a host registers under these names is one node of the result.
REGISTERED = ("__qualify_before", "__qualify_after", "__qualify_samples", "__qualify_guard")


def qualify_plan(
    recipe: Mapping[str, Any],
    size: str = "quick",
    facts: Mapping[str, Any] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """What to send for a recipe."""
    try:
        return _qualify.plan(recipe, size, facts, overrides)
    except _qualify.PlanError as exc:
        raise AnsibleFilterError(str(exc)) from exc


def _registered(host: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """What a task registered, empty where it failed or the node was gone."""
    value = host.get(name)
    return value if isinstance(value, Mapping) and not value.get("failed") and not value.get("unreachable") else {}


def qualify_nodes(hostvars: Mapping[str, Any], members: list[str]) -> dict[str, Any]:
    """The nodes of a cluster out of what the role registered on each."""
    heads = _registered(hostvars[members[0]], "__qualify_before").get("rank") or {}
    out = {}
    for rank, name in enumerate(members):
        before, after, samples, guard = (_registered(hostvars[name], variable) for variable in REGISTERED)
        guards = guard.get("guards") or [None]
        text = base64.b64decode(samples["content"]).decode("utf-8", "replace") if samples.get("content") else ""
        out[name] = node(
            rank, text, before.get("rank") or {}, after.get("rank") or {}, guards[0], heads.get("node_time")
        )
    return plain(out)


def _collection_version() -> str:
    """Version of this collection, from a clone or an installed one."""
    root = Path(__file__).resolve().parents[2]
    for name, pattern in (("galaxy.yml", r"^version: *(\S+)"), ("MANIFEST.json", r'"version": *"([^"]+)"')):
        with contextlib.suppress(OSError):
            if found := re.search(pattern, (root / name).read_text(encoding="utf-8"), re.MULTILINE):
                return found[1]
    return "unknown"


def qualify_provenance(
    nodes: Mapping[str, Any], hostvars: Mapping[str, Any], members: list[str], measured: Mapping[str, Any]
) -> dict[str, Any]:
    """What was measured, so that it can be told from another one."""
    head = hostvars[members[0]]
    recipe = plain(head["topology_recipe"])
    checkpoint = recipe["checkpoint"]
    ranks = {name: _registered(hostvars[name], "__qualify_before").get("rank") or {} for name in members}
    about = {
        "collection": f"gb10.fleet {_collection_version()}",
        "recipe": recipe["name"],
        "recipe_sha256": hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest(),
        "spec": {name: rank.get("spec") for name, rank in ranks.items()},
        "spec_matches_recipe": {name: rank.get("spec_matches") for name, rank in ranks.items()},
        "image": {name: rank.get("image") for name, rank in ranks.items()},
        "image_id": {name: rank.get("image_id") for name, rank in ranks.items()},
        "checkpoint": f"{checkpoint['repo']}@{checkpoint['revision'] or 'unpinned'}",
        "engine": recipe["engine"],
        "engine_version": measured.get("engine_version"),
        "engine_started": {name: rank.get("started_at") for name, rank in ranks.items()},
        "driver": {name: node.get("driver") for name, node in nodes.items()},
        "kernel": {name: node.get("kernel") for name, node in nodes.items()},
        "nodes": ", ".join(members),
    }
    return plain(about)


def qualify_result(
    measured: Mapping[str, Any],
    plan: Mapping[str, Any],
    nodes: Mapping[str, Any] | None = None,
    expect: Mapping[str, Any] | None = None,
    **about: Any,
) -> dict[str, Any]:
    """The judged result; ``about`` is recipe, cluster and provenance."""
    result = {
        "schema": _qualify.SCHEMA,
        "cluster": about.get("cluster") or "-",
        "recipe": about.get("recipe") or "-",
        "provenance": about.get("provenance") or {},
        "plan": plan,
        "expect": expect or {},
        "measured": measured,
        "nodes": nodes or {},
    }
    return plain(_qualify.judge(plain(result)))


def checked(result: Any) -> Mapping[str, Any]:
    """A result of a schema that is known here."""
    if not isinstance(result, Mapping) or "measured" not in result:
        raise AnsibleFilterError("This is no result.json of playbooks/qualify.yml.")
    if result.get("schema") != _qualify.SCHEMA:
        raise AnsibleFilterError(
            f"The result has schema {result.get('schema')}, this collection reads {_qualify.SCHEMA}: use its own version."
        )
    return result


def qualify_text(result: Mapping[str, Any], page: str = "") -> str:
    """The verdict for a terminal: table, then each failure with what to look at next, then the findings."""
    lines = checked(result)["lines"]
    title = f"{result['recipe']} on {result['cluster']}, {result['plan']['size']}"
    out = [_text.table(_qualify_page.text_rows(result), title=title), ""]

    def paragraph(text: str, indent: str = "  ") -> None:
        out.extend(textwrap.wrap(text, 100, initial_indent=indent, subsequent_indent="    ", break_on_hyphens=False))

    for line in lines:
        if line["status"] == _qualify.FAIL:
            paragraph(f"✗ {line['label']}: {line['why']}")
            if line["next"]:
                paragraph(f"→ {line['next']}", "    ")
    for finding in result["findings"]:
        paragraph(f"· {finding['node'] + ': ' if finding['node'] else ''}{finding['text']}")
    said = "qualified" if result["verdict"] == _qualify.PASS else "NOT qualified"
    out += ["", f"{result['cluster']}: {said}{', ' + page if page else ''}"]
    return "\n".join(out)


def qualify_page(result: Mapping[str, Any]) -> dict[str, Any]:
    """What report.html shows."""
    return _qualify_page.page(checked(result))


def qualify_compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Two results side by side."""
    return _qualify_page.compared(_qualify.compare(checked(before), checked(after)))


class FilterModule:
    """Filters of gb10.fleet about qualification."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {
            "qualify_plan": qualify_plan,
            "qualify_nodes": qualify_nodes,
            "qualify_provenance": qualify_provenance,
            "qualify_result": qualify_result,
            "qualify_text": qualify_text,
            "qualify_page": qualify_page,
            "qualify_compare": qualify_compare,
        }
