# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Validate the inventory and the recipe on the controller, without touching a host. See the module of the same name."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from ansible.errors import AnsibleActionFail
from ansible.module_utils.parsing.convert_bool import boolean
from ansible.plugins.action import ActionBase
from ansible.utils.vars import load_extra_vars

from ansible_collections.gb10.fleet.plugins.lookup.build_inputs import folder_hash
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
    through_registry,
)
from ansible_collections.gb10.fleet.plugins.module_utils._recipe_layers import Resolved, resolve
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
    "gateway_enabled",
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


def read_recipe(name: str, directories: list[str], above: tuple[Path, ...] = ()) -> tuple[Path, dict[str, Any]]:
    """The file of a recipe and what it says, laid over the recipe that it extends. Raises RecipeError."""
    path = find_recipe(name, directories)
    if path in above:
        raise RecipeError(f"{path} extends itself.")
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as exc:
        raise RecipeError(f"{path} is not YAML: {' '.join(str(exc).split())}") from exc
    if isinstance(data, Mapping) and data.get("extends"):
        data = merge(read_recipe(str(data["extends"]), directories, (*above, path))[1], data)
    return path, data


def _mod_digests(recipe: dict[str, Any], beside: list[Path]) -> None:
    """Find the folders of mods, and hash them: a changed file is a changed rank."""
    for mod in recipe["mods"]:
        if mod["folder"]:
            found = next((path for base in beside if (path := base / Path(mod["folder"]).expanduser()).is_dir()), None)
            if found is None:
                looked = ", ".join(str(base) for base in beside)
                hint = f" Get it: {mod['source']}" if mod["source"] else ""
                raise RecipeError(f"mods {mod['name']}: there is no folder {mod['folder']} (looked in {looked}).{hint}")
            mod["folder"] = str(found.resolve())
            mod["digest"] = hashlib.sha256(json.dumps(folder_hash(found)).encode()).hexdigest()


def resolve_recipe(
    name: str, directories: list[str], *layers: tuple[str, Mapping[str, Any] | None], beside: tuple[Path, ...] = ()
) -> Resolved:
    """Read a recipe, lay the layers over it and validate it. ``beside``: where relative folders of mods may begin as well."""
    path, data = read_recipe(name, directories)
    for layer, content in layers:
        if content is not None and not isinstance(content, Mapping):
            raise RecipeError(f"recipe_overrides ({layer}) is {content!r}, wanted a mapping.")
    resolved = resolve(path.stem, [("recipe", data), *layers])
    _mod_digests(resolved.recipe, [path.parent, *beside])
    return resolved


def load_recipe(name: str, directories: list[str], *overrides: Mapping[str, Any] | None) -> dict[str, Any]:
    """Read, override and validate a recipe. Raises RecipeError."""
    return resolve_recipe(name, directories, *[("override", over) for over in overrides]).recipe


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
            facts, warnings = self._facts(host, task_vars, args["whole_clusters"])
        except (RecipeError, RankSpecError, TopologyError) as exc:
            raise AnsibleActionFail(str(exc)) from exc
        # Once per cluster: the head's.
        told = {"warnings": warnings} if warnings and facts["topology_rank"] == 0 else {}
        return {"changed": False, **told, **host_facts(self, plain(facts))}

    def _member(self, host: str, hostvars: Mapping[str, Any]) -> Member:
        variables = hostvars[host]
        address = variables.get("fabric_address") or variables.get("ansible_host") or host
        return Member(
            host, variables.get("cluster"), variables.get("rank"), str(address), tuple(variables["group_names"])
        )

    def _facts(self, host: str, task_vars: Mapping[str, Any], whole: bool) -> tuple[dict[str, Any], list[str]]:
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
        resolved = self._recipe(cluster, [m.name for m in members], hostvars)
        recipe = resolved.recipe
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
        facts = {
            "topology_cluster": cluster,
            "topology_rank": mine.rank,
            "topology_size": len(members),
            "topology_head": head.name,
            "topology_members": [m.name for m in members],
            "topology_addresses": {m.name: m.address for m in members},
            "topology_recipe": recipe,
            "topology_origins": resolved.origins,
            "topology_spec": labelled(spec, spec_hash(spec)),
            "topology_spec_hash": spec_hash(spec),
            "topology_probe": {
                "url": f"http://{self._probe_address(recipe['api_host'])}:{recipe['port']}",
                "model": recipe["served_name"],
            },
            "topology_endpoint": self._endpoint(head.name, recipe, hostvars[head.name]),
        }
        return facts, resolved.warnings

    @staticmethod
    def _probe_address(api_host: str) -> str:
        """Where the head's own node reaches the engine; it works for an engine that is bound to loopback, too."""
        return "127.0.0.1" if api_host in ("0.0.0.0", "localhost", "") else api_host  # noqa: S104

    @staticmethod
    def _endpoint(head: str, recipe: Mapping[str, Any], variables: Mapping[str, Any]) -> str:
        """Where clients ask: the head's engine, or the gateway before it."""
        gateway = boolean(variables.get("gateway_enabled") or False, strict=False)
        port = variables.get("gateway_port") or 8080 if gateway else recipe["port"]
        scheme = "https" if gateway and variables.get("gateway_tls_certificate") else "http"
        return f"{scheme}://{variables.get('ansible_host') or head}:{port}"

    def _recipe(self, cluster: str, members: list[str], hostvars: Mapping[str, Any]) -> Resolved:
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
        beside = [Path(str(first["inventory_dir"]))] if first.get("inventory_dir") else []
        directories += [str(folder / "recipes") for folder in beside]
        command_line = load_extra_vars(self._loader)

        def origin(variable: str) -> str:
            return "command line" if variable in command_line else "inventory"

        layers = [(origin(key), first.get(key)) for key in ("recipe_site_overrides", "recipe_overrides")]
        learned = str(first.get("readiness_learned_dir") or "~/.local/state/gb10-fleet/learned")

        def read() -> Resolved:
            found = resolve_recipe(name, directories, *layers, beside=tuple(beside))
            if first.get("image_registry"):
                image = found.recipe["image"]
                image["reference"] = through_registry(image["reference"], first["image_registry"])
                said = f"{found.origins['image.reference']}, {origin('image_registry')} (image_registry)"
                found.origins["image.reference"] = said
            return found

        try:
            resolved = read()
            fits = _learned.window(learned, cluster, resolved.recipe)
            if fits and not 0 < (resolved.recipe["options"].get("context") or fits + 1) <= fits:
                layers.append((_learned.ORIGIN, {"options": {"context": fits}}))
                resolved = read()
        except RecipeError as exc:
            raise RecipeError(f"cluster {cluster}, recipe {name}: {exc}") from exc
        recipe, origins = resolved.recipe, resolved.origins
        if boolean(first.get("gateway_enabled") or False, strict=False):
            # Only the gateway of its own node reaches the engine: its API key guards a part of its paths only.
            recipe["api_host"] = "127.0.0.1"
            origins["api_host"] = f"{origin('gateway_enabled')} (gateway_enabled)"
        wanted, said = first.get("kv_cache_memory"), f"{origin('kv_cache_memory')} (kv_cache_memory)"
        if wanted == "learned":
            wanted, said = _learned.kv_cache_memory(learned, cluster, recipe), _learned.ORIGIN
        if wanted is not None:
            recipe["args"] = {**recipe["args"], _learned.FLAG: wanted}
            origins[f"args.{_learned.FLAG}"] = said
        return resolved

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
