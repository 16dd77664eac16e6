# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Recipes: the data that describes one served model. Pure functions: merge, validate, fill in defaults.

A recipe never names a host or an address. Reading the file is the caller's work (see the ``topology`` action).
"""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

REQUIRED: Any = object()
_REVISION = re.compile(r"^[0-9a-f]{40}$")
_DIGEST = re.compile(r"^sha256:[0-9a-f]{64}$")
_SIZE = re.compile(r"^[0-9]+[bkmg]?$")

# Flags that the rank spec writes itself, from the recipe key beside it. In `args` they would make ranks differ.
MANAGED_ARGS: dict[str, str] = {
    "model": "checkpoint",
    "served-model-name": "served_name",
    "host": "api_host",
    "port": "port",
    "tensor-parallel-size": "parallel.tensor",
    "pipeline-parallel-size": "parallel.pipeline",
    "distributed-executor-backend": "parallel.backend",
    "nnodes": "nodes",
    "node-rank": "the inventory variable rank",
    "master-addr": "the inventory variable fabric_address",
    "master-port": "master_port",
    "headless": "the inventory variable rank",
    # TensorFold's names for the same.
    "tp": "parallel.tensor",
    "rank": "the inventory variable rank",
    "master": "the inventory variable fabric_address",
    "name": "served_name",
}


class RecipeError(ValueError):
    """A recipe that cannot be used; the message is one sentence that names the key, what was found and what is wanted."""


@dataclass(frozen=True)
class Key:
    """One key of the schema: its type(s), its default (or REQUIRED), and a check of the value."""

    types: tuple[type, ...]
    default: Any = None
    choices: tuple[Any, ...] = ()
    pattern: re.Pattern[str] | None = None
    wanted: str = ""
    minimum: float | None = None
    maximum: float | None = None
    keys: Mapping[str, Key] | None = None
    items: Key | None = None
    values: Key | None = None
    nullable: bool = False


def _text(default: Any = REQUIRED, **kwargs: Any) -> Key:
    return Key((str,), default, **kwargs)


def _optional_text(**kwargs: Any) -> Key:
    return Key((str,), None, nullable=True, **kwargs)


def _int(default: Any = REQUIRED, **kwargs: Any) -> Key:
    return Key((int,), default, **kwargs)


def _number(default: Any = REQUIRED, **kwargs: Any) -> Key:
    return Key((int, float), default, **kwargs)


def _bool(default: bool) -> Key:
    return Key((bool,), default)


def _map(keys: Mapping[str, Key], default: Any = field, **kwargs: Any) -> Key:
    return Key((dict,), {} if default is field else default, keys=keys, **kwargs)


def _free_map() -> Key:
    return Key((dict,), {})


def _texts() -> Key:
    return Key((list,), [], items=_text())


_PORT = {"minimum": 1, "maximum": 65535}
_COMMIT = {"pattern": _REVISION, "wanted": "a full commit of 40 hexadecimal digits"}

_CHECKPOINT: dict[str, Key] = {
    "repo": _text(pattern=re.compile(r"^[\w.-]+/[\w.-]+$"), wanted="owner/name"),
    "revision": _optional_text(**_COMMIT),
    "layout": _text("flat", choices=("flat", "hub")),
    "directory": _optional_text(pattern=re.compile(r"^[\w.-][\w./-]*$"), wanted="a path below models_dir"),
    "size_gib": _number(0, minimum=0),
    "quantization": _optional_text(),
    "include": _texts(),
    "exclude": _texts(),
    "refused": Key(
        (list,),
        [],
        items=_map({"repo": _text(), "reason": _text(), "instead": _optional_text()}, REQUIRED),
    ),
}

# What is laid over an image: a file of it with replacements, or a folder whose program runs at the start of the container.
_MOD: dict[str, Key] = {
    "name": _text(pattern=re.compile(r"^[\w.-]+$"), wanted="a name of letters, digits, dots and dashes"),
    "target": _optional_text(pattern=re.compile(r"^/"), wanted="the path of a file in the image"),
    "original_sha256": _optional_text(pattern=re.compile(r"^[0-9a-f]{64}$"), wanted="64 hexadecimal digits"),
    "replace": Key((list,), [], items=_map({"anchor": _text(), "with": _text()}, REQUIRED)),
    "folder": _optional_text(),
    "run": _text("bash run.sh"),
    # How to get the folder, for whoever does not have it.
    "source": _text(""),
    "log": _texts(),
    # Hash of the folder's content, found when the recipe is read.
    "digest": _optional_text(),
}

# One way into the engine (see _lanes.py): what the gateway forces on a request, what it proposes, and how many may run.
_LANE: dict[str, Key] = {
    "priority": Key((int, str), None, nullable=True),
    "reasoning_effort": _optional_text(choices=("none", "minimal", "low", "medium", "high", "xhigh", "max")),
    "aliases": _texts(),
    "forced": _free_map(),
    "defaults": _free_map(),
    "max_concurrent": Key((int,), None, minimum=1, nullable=True),
    "max_queued": _int(64, minimum=0),
    "max_wait_s": _number(600, minimum=1),
}

# What a user may set by a short name (see _recipe_layers.py).
_OPTION_RULE: dict[str, Key] = {
    "means": _text(""),
    "to": _texts(),
    "one_of": Key((list,), []),
    "minimum": Key((int, float), None, nullable=True),
    "maximum": Key((int, float), None, nullable=True),
    "cases": Key(
        (dict,), {}, values=_map({"set": _free_map(), "at_most": _free_map(), "means": _text("")}, nullable=True)
    ),
}

SCHEMA: dict[str, Key] = {
    "description": _text(""),
    "extends": _optional_text(),
    "engine": _text("vllm", choices=("vllm", "tensorfold", "kit")),
    "nodes": _int(minimum=1),
    "container_name": _optional_text(pattern=re.compile(r"^[a-zA-Z0-9][\w.-]*$"), wanted="a Docker container name"),
    "served_name": _text(),
    "api_host": _text("0.0.0.0"),  # noqa: S104 - the engine listens on every address of its node unless told otherwise
    "port": _int(8000, **_PORT),
    "master_port": _int(29521, **_PORT),
    "image": _map(
        {
            "reference": _text(),
            "digest": _optional_text(pattern=_DIGEST, wanted="sha256: and 64 hexadecimal digits"),
            "platform": _optional_text(),
            "size_gib": _number(0, minimum=0),
            # To build instead of pull: a folder of the controller, or a repository at a commit (docs/distribution.md).
            "build": _map(
                {
                    "context": _optional_text(),
                    "repository": _optional_text(),
                    "commit": _optional_text(**_COMMIT),
                    "subdirectory": _optional_text(),
                    "dockerfile": _optional_text(),
                    "args": _free_map(),
                },
                None,
                nullable=True,
            ),
        },
        REQUIRED,
    ),
    "checkpoint": _map(_CHECKPOINT, REQUIRED),
    "drafter": _map(
        {**_CHECKPOINT, "licence": _optional_text(), "non_commercial": _bool(False)},
        None,
        nullable=True,
    ),
    "parallel": _map(
        {
            "tensor": _int(1, minimum=1),
            "pipeline": _int(1, minimum=1),
            "backend": _text("mp", choices=("mp", "ray")),
            # Flags of `ray start` on every rank.
            "ray_args": _free_map(),
        }
    ),
    "args": _free_map(),
    # Flags that only this image's fork of the engine knows.
    "fork_args": _texts(),
    "env": _free_map(),
    # Shell lines that run in the container before the engine; one that fails ends the rank.
    "start": _texts(),
    "mods": Key((list,), [], items=_map(_MOD, REQUIRED)),
    "options": _free_map(),
    "option_rules": Key((dict,), {}, values=_map(_OPTION_RULE, REQUIRED)),
    "container": _map(
        {
            "network": _text("host"),
            "ipc": _optional_text(),
            "shm_size": _text("32g", pattern=_SIZE, wanted="a size such as 32g"),
            "memory": _optional_text(pattern=_SIZE, wanted="a size such as 112g"),
            "memory_swap": _optional_text(pattern=_SIZE, wanted="a size such as 112g"),
            "ulimits": _free_map(),
            "cap_add": _texts(),
            "devices": _texts(),
            "gpus": _optional_text(choices=("all", None)),
            "init": _bool(True),
            "stop_timeout_s": _int(60, minimum=1),
            "cache_dir": _optional_text(),
            # Further writable folders: path in the container -> folder of the node.
            "mounts": _free_map(),
        }
    ),
    "lanes": Key((dict,), {}, values=_map(_LANE, REQUIRED)),
    # What the recipe asks of a node itself; playbooks/tune_kernel.yml applies it.
    "host": _map({"sysctls": _free_map(), "swap_gib": _number(0, minimum=0), "stopped_services": _texts()}),
    "fabric": _map({"transport": _text("roce", choices=("roce", "socket"))}),
    "guard": _map({"keep": _text("load", choices=("load", "always", "off")), "floor_gib": _number(8, minimum=0.25)}),
    "readiness": _free_map(),
    "warmup": _text("chat", choices=("none", "chat", "shapes")),
    "limits": _map(
        {
            "gpu_memory_utilization": _number(0.85, minimum=0.05, maximum=1.0),
            "context_tokens": Key((int,), None, minimum=1, nullable=True),
        }
    ),
    "expect": _free_map(),
}

# What a rank container of a GB10 needs unless the recipe says otherwise (seed "Running GLM-5.3-Flash on two DGX Sparks").
CONTAINER_DEFAULTS: dict[str, Any] = {
    "ipc": "host",
    "gpus": "all",
    "ulimits": {"memlock": -1},
    "cap_add": ["IPC_LOCK"],
    "devices": ["/dev/infiniband"],
}


def nearest(name: str, known: Any) -> str:
    """Return ``", did you mean X?"`` for the closest known name, or the list of known names."""
    close = difflib.get_close_matches(name, [str(k) for k in known], n=1, cutoff=0.5)
    return f"did you mean {close[0]}?" if close else "known here: " + ", ".join(sorted(str(k) for k in known))


def merge(base: Mapping[str, Any], over: Mapping[str, Any] | None) -> dict[str, Any]:
    """Lay ``over`` recursively over ``base``: mappings merge, anything else replaces, ``null`` removes the key."""
    out = copy.deepcopy(dict(base))
    for key, value in (over or {}).items():
        if value is None:
            out.pop(key, None)
        elif key == "set":
            # What an option's case lays over a recipe: its nulls are meant for that recipe.
            out[key] = copy.deepcopy(value)
        elif isinstance(value, Mapping) and isinstance(out.get(key), Mapping):
            out[key] = merge(out[key], value)
        else:
            out[key] = copy.deepcopy(value)
    return out


def _type_name(key: Key) -> str:
    names = {
        str: "text",
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        dict: "a mapping",
        list: "a list",
    }
    return "a number" if key.types == (int, float) else names[key.types[0]]


def _check(path: str, value: Any, key: Key) -> Any:
    """Return the value with defaults filled in, or raise RecipeError with the path of the key."""
    if value is None and key.nullable:
        return None
    fits: bool = isinstance(value, key.types) and (bool in key.types or not isinstance(value, bool))
    if not fits:
        raise RecipeError(f"{path} is {value!r}, wanted {_type_name(key)}.")
    if key.choices and value not in key.choices:
        raise RecipeError(
            f"{path} is {value!r}, wanted one of {', '.join(str(c) for c in key.choices if c is not None)}."
        )
    if key.pattern is not None and not key.pattern.match(value):
        raise RecipeError(f"{path} is {value!r}, wanted {key.wanted}.")
    if key.minimum is not None and value < key.minimum:
        raise RecipeError(f"{path} is {value}, wanted {key.minimum} or more.")
    if key.maximum is not None and value > key.maximum:
        raise RecipeError(f"{path} is {value}, wanted {key.maximum} or less.")
    if key.keys is not None:
        return _check_map(path, value, key.keys)
    if key.items is not None:
        return [_check(f"{path}[{i}]", item, key.items) for i, item in enumerate(value)]
    if key.values is not None:
        return {name: _check(f"{path}.{name}", item, key.values) for name, item in value.items()}
    return copy.deepcopy(value)


def _check_map(path: str, value: Mapping[str, Any], keys: Mapping[str, Key]) -> dict[str, Any]:
    for name in value:
        if name not in keys:
            where = f"{path}.{name}" if path else str(name)
            raise RecipeError(f"{where} is not a key of a recipe: {nearest(str(name), keys)}")
    out: dict[str, Any] = {}
    for name, key in keys.items():
        where = f"{path}.{name}" if path else name
        if name in value:
            out[name] = _check(where, value[name], key)
        elif key.default is REQUIRED:
            raise RecipeError(f"{where} is missing: every recipe needs it.")
        elif key.keys is not None and key.default is not None:
            out[name] = _check_map(where, key.default, key.keys)
        else:
            out[name] = copy.deepcopy(key.default)
    return out


def _check_args(recipe: dict[str, Any]) -> None:
    args = recipe["args"]
    for name, value in args.items():
        if not isinstance(name, str) or not re.match(r"^[A-Za-z][\w.-]*$", name):
            raise RecipeError(
                f"args.{name} is not a flag: write it without dashes in front, as in max-model-len: 4096."
            )
        if name.replace("_", "-") in MANAGED_ARGS:
            source = MANAGED_ARGS[name.replace("_", "-")]
            raise RecipeError(f"args.{name} is written by the rank spec: set {source} instead.")
        if isinstance(value, list) and any(isinstance(v, (dict, list)) for v in value):
            raise RecipeError(f"args.{name} is a list of more than plain values.")
    utilization = args.get("gpu-memory-utilization")
    if utilization is not None:
        if isinstance(utilization, bool) or not isinstance(utilization, (int, float)):
            raise RecipeError(f"args.gpu-memory-utilization is {utilization!r}, wanted a number between 0 and 1.")
        if not 0 < utilization <= 1:
            raise RecipeError(
                f"args.gpu-memory-utilization is {utilization}, wanted a share of memory between 0 and 1 "
                f"(this recipe's largest safe value is {recipe['limits']['gpu_memory_utilization']})."
            )


def _check_engine(recipe: dict[str, Any]) -> None:
    """What belongs to one engine only, and what an engine needs."""
    if recipe["engine"] == "kit" and recipe["args"]:
        raise RecipeError(
            f"args.{next(iter(recipe['args']))} has no place to go: the image of a kit builds the engine's command from env."
        )
    if recipe["parallel"]["backend"] == "ray" and recipe["engine"] != "vllm":
        raise RecipeError(f"parallel.backend is ray, which the engine {recipe['engine']} does not know: set mp.")
    for key in ("checkpoint", "drafter"):
        if recipe[key] and recipe[key]["layout"] == "hub" and not recipe[key]["revision"]:
            raise RecipeError(f"{key}.revision is missing: the layout hub has a folder for each commit.")
    for mod in recipe["mods"]:
        if bool(mod["folder"]) == bool(mod["target"] and mod["replace"]):
            raise RecipeError(
                f"mods {mod['name']} wants target and replace (a file of the image), or folder, one of them."
            )


def through_registry(reference: str, registry: str | None) -> str:
    """The same image at the site's own registry (``host:port`` or ``host/prefix``): the reference's registry host is replaced."""
    if not registry:
        return reference
    first, slash, rest = reference.partition("/")
    has_host = bool(slash) and ("." in first or ":" in first or first == "localhost")
    return f"{registry.rstrip('/')}/{rest if has_host else reference}"


def normalise(name: str, recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return the recipe with every key of the schema present. Raises RecipeError (one sentence) for what cannot be used."""
    if not isinstance(recipe, Mapping):
        raise RecipeError(f"the file holds {type(recipe).__name__}, wanted a mapping.")
    given_container = recipe.get("container")
    container = {**CONTAINER_DEFAULTS, **given_container} if isinstance(given_container, Mapping) else given_container
    out = _check_map("", {**recipe, "container": CONTAINER_DEFAULTS if container is None else container}, SCHEMA)
    out["name"] = name
    out["container_name"] = out["container_name"] or name
    for key in ("checkpoint", "drafter"):
        if out[key] is not None and out[key]["directory"] is None:
            out[key]["directory"] = out[key]["repo"].split("/", 1)[1]
    _check_args(out)
    build = out["image"]["build"]
    if build and bool(build["context"]) == bool(build["repository"]):
        raise RecipeError(
            "image.build wants context (a folder of the controller) or repository (with commit), one of them."
        )
    for key, value in out["env"].items():
        if isinstance(value, (Mapping, list, bool)) or value is None:
            raise RecipeError(f"env.{key} is {value!r}, wanted text or a number (quote true and false).")
        out["env"][key] = str(value)
    ranks = out["parallel"]["tensor"] * out["parallel"]["pipeline"]
    if ranks != out["nodes"]:
        raise RecipeError(
            f"parallel.tensor × parallel.pipeline = {ranks}, but nodes is {out['nodes']}: a GB10 has one GPU, make them equal."
        )
    _check_engine(out)
    repo = out["checkpoint"]["repo"]
    for refused in out["checkpoint"]["refused"]:
        if refused["repo"] == repo:
            instead = f" Use {refused['instead']}." if refused["instead"] else ""
            raise RecipeError(f"checkpoint.repo {repo} is refused: {refused['reason']}.{instead}")
    return out
