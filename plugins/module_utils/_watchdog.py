# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the role watchdog writes: an inventory of one cluster and the program's configuration. Pure functions."""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from ansible_collections.gb10.fleet.plugins.module_utils import _redact, _staging_lock, _text
from ansible_collections.gb10.fleet.plugins.module_utils._failure_data import CATALOGUE

# Of a host, besides what the collection's roles take.
HOST_VARIABLES = (
    *("cluster", "rank", "ansible_host", "ansible_port", "ansible_user", "ansible_python_interpreter"),
    *("fabric_address", "fabric_interface", "fabric_hca", "fabric_gid_index", "models_dir"),
)
# The recipe that is written down holds what these said.
RESOLVED = ("recipe", "recipe_dirs", "recipe_overrides", "recipe_site_overrides", "image_registry", "kv_cache_memory")
SECRET_ENDS = ("_token", "_key", "_keys", "_password", "_secret", "_webhook")


def host_variables(variables: Mapping[str, Any], role_arguments: Collection[str]) -> dict[str, Any]:
    """What a launch reads of one host: no secret, nothing of the watchdog itself, nothing that the recipe holds already."""
    wanted = (set(HOST_VARIABLES) | set(role_arguments)) - set(RESOLVED)
    return {
        name: variables[name]
        for name in sorted(wanted & set(variables))
        if not name.startswith(("watchdog_", "topology_"))
        and not _redact.is_secret(name)
        and not name.endswith(SECRET_ENDS)
    }


def inventory(
    members: Sequence[Mapping[str, Any]], role_arguments: Collection[str], watchdog_host: str, folder: str
) -> dict[str, Any]:
    """The inventory of one cluster as its watchdog reads it.

    :param members: the variables of the hosts, head first. :param watchdog_host: the one that needs no SSH.
    :param folder: the watchdog's own folder, with key, known_hosts and recipes.
    """
    cluster = str(members[0]["cluster"])
    hosts: dict[str, Any] = {}
    for member in members:
        mine = host_variables(member, role_arguments)
        mine.setdefault("ansible_host", member["inventory_hostname"])
        if member["inventory_hostname"] == watchdog_host:
            # The service is root already.
            mine.update(
                ansible_connection="ansible.builtin.local",
                ansible_user="root",
                ansible_python_interpreter="/usr/bin/python3",
            )
        hosts[member["inventory_hostname"]] = mine
    names = list(hosts)
    recipe = members[0]["topology_recipe"]["name"]
    return {
        "all": {
            "vars": {
                "recipe": recipe,
                "recipe_dirs": [f"{folder}/recipes"],
                "evidence_dir": f"{folder}/evidence",
                "readiness_learned_dir": f"{folder}/learned",
                "ansible_ssh_private_key_file": f"{folder}/id_ed25519",
                "ansible_ssh_common_args": (
                    f"-o UserKnownHostsFile={folder}/known_hosts -o GlobalKnownHostsFile=/dev/null "
                    "-o StrictHostKeyChecking=yes -o IdentitiesOnly=yes"
                ),
            },
            "children": {
                "heads": {"hosts": {names[0]: None}},
                "workers": {"hosts": dict.fromkeys(names[1:])},
                f"cluster_{cluster}": {"hosts": hosts},
            },
        }
    }


def written_recipe(recipe: Mapping[str, Any], folder: str) -> dict[str, Any]:
    """The recipe as it is resolved here, for a host that has neither its layers nor its folders of mods.

    Options have been applied; applied again they would win over what was said in so many words.
    """
    mods = [{**mod, "folder": mod["folder"] and f"{folder}/mods/{mod['name']}"} for mod in recipe["mods"]]
    written = {**recipe, "options": {}, "option_rules": {}, "mods": mods}
    return {name: value for name, value in written.items() if name not in ("name", "extends")}


def fatal_patterns() -> list[str]:
    """Lines after which an engine that served does not go on, of the failure catalogue, without group names."""
    return [
        re.sub(r"\(\?P<\w+>", "(?:", pattern)
        for entry in CATALOGUE
        if entry["source"] == "engine" and entry["kind"] == "wrapper" and entry["severity"] == "hard"
        for pattern in entry["signature"]
    ]


def config(members: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> dict[str, Any]:
    """The program's configuration. ``options``: paths and settings of the role."""
    head = members[0]
    recipe, folder = head["topology_recipe"], options["folder"]
    nodes = {
        member["inventory_hostname"]: {
            "rank": member["topology_rank"],
            "container": member["topology_spec"]["name"],
            "spec": member["topology_spec_hash"],
            "local": member["inventory_hostname"] == options["host"],
            "address": str(member.get("ansible_host") or member["inventory_hostname"]),
            "port": int(member.get("ansible_port") or 22),
            "user": str(member.get("ansible_user") or "root"),
        }
        for member in members
    }
    return {
        "cluster": head["topology_cluster"],
        "nodes": nodes,
        "fatal": fatal_patterns(),
        "settings": dict(options["settings"]),
        "canary_s": options["canary_s"],
        "launch_limit_s": options["launch_limit_s"],
        "state_dir": options["state_dir"],
        "evidence_dir": f"{folder}/evidence",
        "private_dir": f"{folder}/runner",
        "key": f"{folder}/id_ed25519",
        "known_hosts": f"{folder}/known_hosts",
        "runner": f"{options['program_dir']}/venv/bin/ansible-runner",
        "python": f"{options['program_dir']}/venv/bin/python",
        "playbooks": f"{options['program_dir']}/collections/ansible_collections/gb10/fleet/playbooks",
        "hooks_dir": options["hooks_dir"],
        "webhook": options["webhook"],
        "webhook_format": options["webhook_format"],
        "eye": {
            "address": "127.0.0.1" if recipe["api_host"] in ("0.0.0.0", "localhost", "") else recipe["api_host"],  # noqa: S104
            "port": recipe["port"],
            "model": recipe["served_name"],
            "api_key_file": options["api_key_file"],
            "canary_timeout_s": options["canary_timeout_s"],
            "gpu_s": 15,
            "docker_socket": "/var/run/docker.sock",
            "lock": _staging_lock.PATH,
            "holds": options["holds_dir"],
        },
    }


def status(states: Iterable[Mapping[str, Any]]) -> str:
    """The table of status.yml; ``states``: what the state files hold."""
    rows = []
    for found in states:
        state = found["state"]
        last = state.get("incident") or state.get("last_incident") or {}
        rows.append(
            {
                "cluster": found["cluster"],
                "watchdog": state["name"],
                "since": _when(state["since"]),
                "why": state["why"] or None,
                "next try": _when(state["next_try"]) if state["name"] == "backoff" else None,
                "last incident": f"{last['node']}: {last['said']} ({last['outcome'] or 'open'})" if last else None,
                "downtime": f"{last['downtime_s']:g} s" if last.get("downtime_s") is not None else None,
            }
        )
    return _text.table(rows, title="watchdog") if rows else ""


def _when(seconds: float) -> str | None:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds)) if seconds else None
