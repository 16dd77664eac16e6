# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Validate the inventory and the recipe on the controller, without touching a host. See the module of the same name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase

from ansible_collections.gb10.fleet.plugins.module_utils import _learned
from ansible_collections.gb10.fleet.plugins.module_utils._plain import plain
from ansible_collections.gb10.fleet.plugins.module_utils._rank_spec import (
    RankSpecError,
    check_group,
    labelled,
    rank_spec,
    spec_hash,
)
from ansible_collections.gb10.fleet.plugins.module_utils._recipe import (
    RecipeError,
    merge,
    nearest,
    normalise,
    through_registry,
)
from ansible_collections.gb10.fleet.plugins.module_utils._topology import (
    Member,
    TopologyError,
    check_cluster,
    check_member,
    declared_fabric,
)
from ansible_collections.gb10.fleet.plugins.plugin_utils._facts import host_facts

COLLECTION_RECIPES = Path(__file__).resolve().parents[2] / "recipes"
# Variables that decide how ranks start must be the same on every rank of a cluster.
SHARED_VARIABLES = (
    "recipe",
    "recipe_overrides",
    "recipe_site_overrides",
    "models_dir",
    "image_registry",
    "kv_cache_memory",
)


def find_recipe(name: str, directories: list[str]) -> Path:
    """The file of a recipe: a path to a YAML file as it is, a name in the user's directories first, then the collection's."""
    if name.endswith((".yml", ".yaml")):
        path = Path(name).expanduser()
        if path.is_file():
            return path
        raise RecipeError(f"{name} is not a file.")
    folders = [Path(d).expanduser() for d in directories] + [COLLECTION_RECIPES]
    for folder in folders:
        path = folder / f"{name}.yml"
        if path.is_file():
            return path
    known = sorted({p.stem for folder in folders if folder.is_dir() for p in folder.glob("*.yml")})
    looked = ", ".join(str(f) for f in folders)
    raise RecipeError(f"there is no such recipe: {nearest(name, known)} (looked in {looked})")


def load_recipe(name: str, directories: list[str], *overrides: Mapping[str, Any] | None) -> dict[str, Any]:
    """Read, override and validate a recipe. Raises RecipeError."""
    path = find_recipe(name, directories)
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as exc:
        raise RecipeError(f"{path} is not YAML: {' '.join(str(exc).split())}") from exc
    for layer in overrides:
        if layer is not None and not isinstance(layer, Mapping):
            raise RecipeError(f"recipe_overrides is {layer!r}, wanted a mapping.")
        data = merge(data, layer)
    return normalise(path.stem, data)


class ActionModule(ActionBase):
    """Runs once per host; every host checks its own cluster, so a bad cluster ends for its own hosts only."""

    TRANSFERS_FILES = False
    _requires_connection = False
    _supports_check_mode = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        super().run(tmp, task_vars)
        task_vars = task_vars or {}
        args = self.validate_argument_spec(argument_spec={"whole_clusters": {"type": "bool", "default": True}})[1]
        host = task_vars["inventory_hostname"]
        try:
            facts = self._facts(host, task_vars, args["whole_clusters"])
        except (RecipeError, RankSpecError, TopologyError) as exc:
            raise AnsibleActionFail(str(exc)) from exc
        return {"changed": False, **host_facts(self, plain(facts))}

    def _member(self, host: str, hostvars: Mapping[str, Any]) -> Member:
        variables = hostvars[host]
        address = variables.get("fabric_address") or variables.get("ansible_host") or host
        return Member(
            host, variables.get("cluster"), variables.get("rank"), str(address), tuple(variables["group_names"])
        )

    def _facts(self, host: str, task_vars: Mapping[str, Any], whole: bool) -> dict[str, Any]:
        hostvars = task_vars["hostvars"]
        fleet = [
            self._member(h, hostvars)
            for h in task_vars["groups"]["all"]
            if h == host or hostvars[h].get("cluster") is not None
        ]
        mine = next(m for m in fleet if m.name == host)
        if mine.cluster is None:
            raise TopologyError(
                f"{host}: cluster is not set. Set cluster (a name) and rank (0 for the head) in the inventory."
            )
        check_member(mine)
        cluster = mine.cluster
        members = [m for m in fleet if m.cluster == cluster]
        recipe = self._recipe(cluster, [m.name for m in members], hostvars)
        members = check_cluster(cluster, members, recipe["nodes"], fleet)
        absent = [m.name for m in members if m.name not in task_vars["ansible_play_hosts_all"]]
        if whole and absent:
            raise TopologyError(
                f"cluster {cluster}: {', '.join(absent)} is left out of this run. The ranks of a cluster start only together: "
                f"use --limit cluster_{cluster}."
            )
        specs = [self._spec(m, members, recipe, hostvars) for m in members]
        check_group(specs)
        head = members[0]
        spec = specs[mine.rank]
        return {
            "topology_cluster": cluster,
            "topology_rank": mine.rank,
            "topology_size": len(members),
            "topology_head": head.name,
            "topology_members": [m.name for m in members],
            "topology_addresses": {m.name: m.address for m in members},
            "topology_recipe": recipe,
            "topology_spec": labelled(spec, spec_hash(spec)),
            "topology_spec_hash": spec_hash(spec),
            "topology_probe": {
                "url": f"http://{self._probe_address(recipe['api_host'])}:{recipe['port']}",
                "model": recipe["served_name"],
            },
            "topology_endpoint": f"http://{hostvars[head.name].get('ansible_host') or head.name}:{recipe['port']}",
        }

    @staticmethod
    def _probe_address(api_host: str) -> str:
        """Where the head's own node reaches the engine; it works for an engine that is bound to loopback, too."""
        return "127.0.0.1" if api_host in ("0.0.0.0", "localhost", "") else api_host  # noqa: S104

    def _recipe(self, cluster: str, members: list[str], hostvars: Mapping[str, Any]) -> dict[str, Any]:
        first = hostvars[members[0]]
        for name in SHARED_VARIABLES:
            for other in members[1:]:
                if hostvars[other].get(name) != first.get(name):
                    raise TopologyError(
                        f"cluster {cluster}: {name} is {first.get(name)!r} on {members[0]} and {hostvars[other].get(name)!r} on "
                        f"{other}. Every rank of a cluster needs the same {name}."
                    )
        name = first.get("recipe")
        if not isinstance(name, str) or not name:
            raise TopologyError(
                f"cluster {cluster}: recipe is {name!r}, wanted the name of a recipe, such as glm-5.3-flash-nvfp4."
            )
        directories = [str(d) for d in first.get("recipe_dirs") or []]
        if first.get("inventory_dir"):
            directories.append(str(Path(str(first["inventory_dir"])) / "recipes"))
        try:
            recipe = load_recipe(name, directories, first.get("recipe_site_overrides"), first.get("recipe_overrides"))
        except RecipeError as exc:
            raise RecipeError(f"cluster {cluster}, recipe {name}: {exc}") from exc
        recipe["image"]["reference"] = through_registry(recipe["image"]["reference"], first.get("image_registry"))
        wanted = first.get("kv_cache_memory")
        if wanted == "learned":
            directory = str(first.get("readiness_learned_dir") or "~/.local/state/gb10-fleet/learned")
            wanted = _learned.kv_cache_memory(directory, cluster, recipe)
        if wanted is not None:
            recipe["args"] = {**recipe["args"], _learned.FLAG: wanted}
        return recipe

    def _spec(
        self, member: Member, members: list[Member], recipe: Mapping[str, Any], hostvars: Mapping[str, Any]
    ) -> dict[str, Any]:
        topology = {
            "cluster": member.cluster,
            "rank": member.rank,
            "size": len(members),
            "address": member.address,
            "head_address": members[0].address,
            "models_dir": str(hostvars[member.name].get("models_dir") or "/var/tmp/models"),  # noqa: S108 - the seed's place
        }
        return rank_spec(recipe, topology, declared_fabric(hostvars[member.name], recipe["fabric"]["transport"]))
