# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Filters over a rank spec."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ansible.errors import AnsibleFilterError

from ansible_collections.gb10.fleet.plugins.module_utils import _rank_spec
from ansible_collections.gb10.fleet.plugins.module_utils._plain import plain


def with_fabric(spec: Mapping[str, Any], fabric_env: Mapping[str, Any] | None) -> dict[str, Any]:
    """Lay the environment that the fabric role discovered under what the spec already declares."""
    out = plain(spec)
    found = {k: str(v) for k, v in (fabric_env or {}).items() if v not in (None, "")}
    out["env"] = {**found, **out["env"]}
    return out


def launch_specs(hosts: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The specs (by rank) with which a cluster is started; fails where ranks differ beyond the keys in which they may."""
    specs = [with_fabric(host["topology_spec"], host.get("fabric_env")) for host in hosts]
    try:
        _rank_spec.check_group(specs)
    except _rank_spec.RankSpecError as exc:
        raise AnsibleFilterError(str(exc)) from exc
    return specs


def mods_with_files(recipe: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The mods of a recipe, each with ``file``, where it lies on a node."""
    return [{**plain(mod), "file": _rank_spec.mod_file(mod)} for mod in recipe["mods"]]


class FilterModule:
    """Filters of gb10.fleet that turn a rank spec into what Docker takes."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {
            "rank_spec": _rank_spec.rank_spec,
            "launch_specs": launch_specs,
            "engine_words": _rank_spec.engine_words,
            "engine_mod_files": mods_with_files,
            "docker_run": _rank_spec.docker_run_text,
        }
