# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The evidence bundle: what differs from the spec, the page on top, which bundles stay. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ansible_collections.gb10.fleet.plugins.module_utils import _redact
from ansible_collections.gb10.fleet.plugins.module_utils._text import table

_NAME = re.compile(r"^(?P<cluster>.+)-(?P<time>\d{8}T\d{6}Z)\.tar\.gz$")


def bundle_name(cluster: str, stamp: str) -> str:
    """File name of a bundle; ``stamp`` is UTC, ``20261129T161508Z``."""
    return f"{re.sub(r'[^A-Za-z0-9_.-]', '_', cluster)}-{stamp}.tar.gz"


def surplus(names: Iterable[str], keep: int) -> list[str]:
    """The bundles that have to go so that the newest ``keep`` of each cluster stay. Other files are none of ours."""
    by_cluster: dict[str, list[str]] = {}
    for name in names:
        if found := _NAME.match(name):
            by_cluster.setdefault(found["cluster"], []).append(name)
    return sorted(name for bundles in by_cluster.values() for name in sorted(bundles, reverse=True)[keep:])


# --- spec against container -----------------------------------------------------------------------------------------------
def _pairs(env: Iterable[str]) -> dict[str, str]:
    return dict(pair.split("=", 1) for pair in env if "=" in pair)


def spec_difference(spec: Mapping[str, Any], inspect: Mapping[str, Any]) -> list[str]:
    """How a container differs from the rank spec that was asked for, one line each; empty when it is as asked.

    Environment that only the image or the fabric role sets is no difference.
    """
    config, host = inspect.get("Config") or {}, inspect.get("HostConfig") or {}
    out = []
    argv = _redact.words([*(config.get("Entrypoint") or []), *(config.get("Cmd") or [])])
    wanted = _redact.words([*spec["entrypoint"], *(str(word) for word in spec["argv"])])
    if argv != wanted:
        lost = [word for word in wanted if word not in argv]
        more = [word for word in argv if word not in wanted]
        out.append(f"arguments: missing {' '.join(lost) or 'none'}; unexpected {' '.join(more) or 'none'}")
    env = _pairs(config.get("Env") or [])
    for name, value in spec["env"].items():
        if env.get(name) != str(value):
            secret = _redact.is_secret(name)
            there = "another value" if secret and name in env else env.get(name, "not set")
            out.append(f"env {name}: {_redact.GONE if secret else value} wanted, {there} found")
    mounts = {m.get("Destination"): m.get("Source") for m in inspect.get("Mounts") or []}
    out += [
        f"mount {m['target']}: {m['source']} wanted, {mounts.get(m['target'], 'none')} found"
        for m in spec["mounts"]
        if mounts.get(m["target"]) != m["source"]
    ]
    for name, wish, found in (
        ("image", spec["image"], config.get("Image")),
        ("network", spec["network_mode"], host.get("NetworkMode")),
        ("ipc", spec["ipc_mode"] or "private", host.get("IpcMode") or "private"),
        ("init", spec["init"], bool(host.get("Init"))),
        ("restart policy", spec["restart_policy"], (host.get("RestartPolicy") or {}).get("Name") or "no"),
    ):
        if wish != found:
            out.append(f"{name}: {wish} wanted, {found} found")
    return out


# --- the page on top --------------------------------------------------------------------------------------------------------
def _first_error(rank: Mapping[str, Any]) -> str:
    error = rank.get("first_error") or {}
    return f"{error.get('time') or ''} {error['line']}".strip()[:200] if error.get("line") else "none"


def summary(cluster: str, when: str, diagnosis: Mapping[str, Any] | None, nodes: Sequence[Mapping[str, Any]]) -> str:
    """One page (Markdown): the verdict, a row per rank, what is worth a look, what could not be read.

    :param nodes: per rank ``{node, rank, state, kernel, differences, missing, files}`` or ``{node, rank, error}``.
    """
    lines = [f"# {cluster}, {when}", ""]
    if diagnosis and diagnosis.get("cause"):
        lines += [
            f"**{diagnosis['node']} (rank {diagnosis['rank']}), {diagnosis.get('doing', '')}: {diagnosis['cause']}.**",
            f"To do: {diagnosis['fix']}. [{diagnosis['id']}]",
            "",
        ]
        if diagnosis.get("line"):
            lines += [f"First error, {diagnosis.get('time', '')} UTC: `{diagnosis['line'][:300]}`", ""]
    else:
        lines += ["No failure was reported; the bundle was asked for.", ""]
    lines += ["```", table([_row(n) for n in nodes]), "```", ""]
    for node in nodes:
        lines += _section(node)
    lines += [
        "Each folder holds one node: engine.log, inspect.json, spec.json, kernel.log, proc, processes, network, gpu, units, files.",
        "Secrets were taken out (`<removed>`). Times are UTC.",
        "",
    ]
    return "\n".join(lines)


def _row(node: Mapping[str, Any]) -> dict[str, Any]:
    state = node.get("state") or {}
    free = (state.get("memory") or {}).get("free_kib")
    return {
        "node": node["node"],
        "rank": node["rank"],
        "container": "not reached" if node.get("error") else state.get("status"),
        "exit": state.get("exit_code"),
        "restarts": state.get("restart_count"),
        "stage": state.get("stage"),
        "free_GiB": round(free / 1048576, 1) if free else None,
        "since": (state.get("started_at") or "")[:19],
    }


def _section(node: Mapping[str, Any]) -> list[str]:
    lines = [f"## {node['node']} (rank {node['rank']})", ""]
    if node.get("error"):
        return [*lines, f"Nothing could be collected: {node['error']}", ""]
    state = node.get("state") or {}
    lines.append(f"- First error: `{_first_error(state)}`")
    lines += [
        f"- Kernel: {line['id']} ({line['count']} times): `{line['line'][:200]}`" for line in node.get("kernel") or []
    ]
    lines += [f"- Differs from the spec: {text}" for text in node.get("differences") or []]
    lines += [f"- Could not be read: {text}" for text in node.get("missing") or []]
    if state.get("last_lines"):
        lines += ["", "```", *(line[:160] for line in state["last_lines"][-12:]), "```"]
    return [*lines, ""]
