# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Lanes: several ways into one engine, each with a model name, a priority and a share of its slots. Pure functions.

The engine's priority orders its *waiting* queue only: an urgent request that finds all slots taken waits for one to end. So the
other lanes together get fewer slots than there are, and the gateway holds the rest back.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ansible_collections.gb10.fleet.plugins.module_utils._recipe import RecipeError

# Where an engine is told how many requests it runs at the same time, and how it orders those that wait.
_SLOTS = {"vllm": "max-num-seqs", "tensorfold": "parallel"}
_POLICY = "scheduling-policy"
# vLLM takes numbers, the lowest first; TensorFold knows one word, for what gives way.
_TENSORFOLD_PRIORITIES = (None, "background")
# Without lanes and without a word on slots the gateway still needs an end.
_MANY = 256


def slots(recipe: Mapping[str, Any]) -> int | None:
    """How many requests the engine runs at the same time, None where the recipe does not say."""
    found = recipe["args"].get(_SLOTS.get(recipe["engine"], ""))
    return found if isinstance(found, int) and not isinstance(found, bool) else None


def _check_priorities(recipe: Mapping[str, Any]) -> None:
    engine, lanes = recipe["engine"], recipe["lanes"]
    for name, lane in lanes.items():
        if not re.match(r"^[A-Za-z][\w-]*$", str(name)):
            raise RecipeError(f"lanes.{name} is not a name of letters, digits and dashes.")
        value = lane["priority"]
        if engine == "vllm" and not isinstance(value, int):
            raise RecipeError(
                f"lanes.{name}.priority is {value!r}, wanted a whole number: vLLM serves the lowest first."
            )
        if engine == "tensorfold" and value not in _TENSORFOLD_PRIORITIES:
            raise RecipeError(f"lanes.{name}.priority is {value!r}, wanted background, or nothing for the urgent lane.")
        for key in ("model", "priority", "reasoning_effort"):
            if key in lane["forced"]:
                raise RecipeError(
                    f"lanes.{name}.forced.{key} has a place of its own: set lanes.{name}.{key}, or remove it."
                )
    values = [lane["priority"] for lane in lanes.values()]
    if len(lanes) > 1 and len(set(values)) == 1:
        raise RecipeError(
            f"lanes {', '.join(lanes)} all have the priority {values[0]}: no request would go first. Give one a lower number."
            if engine == "vllm"
            else f"lanes {', '.join(lanes)} all have the priority {values[0]}: leave it out for one, background for the others."
        )


def urgent(lanes: Mapping[str, Mapping[str, Any]]) -> str:
    """The lane that goes first: the lowest number, or the one without a word."""
    return min(lanes, key=lambda name: (isinstance(lanes[name]["priority"], str), lanes[name]["priority"] or 0))


def settle(recipe: dict[str, Any]) -> None:
    """Fill in what the lanes of a normalised recipe leave open, and what they ask of the engine. Raises RecipeError for lanes that
    cannot work."""
    lanes, engine = recipe["lanes"], recipe["engine"]
    if not lanes:
        return
    if engine not in _SLOTS:
        raise RecipeError(f"lanes do not go with the engine {engine}: it takes no priority.")
    _check_priorities(recipe)
    flag, total = f"args.{_SLOTS[engine]}", slots(recipe)
    if total is None:
        raise RecipeError(f"{flag} is missing: lanes share the engine's slots, so their number has to be said.")
    if total == 1 and len(lanes) > 1:
        raise RecipeError(
            f"{flag} is 1: lanes can only take turns, since the engine runs one request at a time. Set 2 or more, or remove lanes."
        )
    first = urgent(lanes)
    others = [name for name in lanes if name != first]
    for name, lane in lanes.items():
        if not lane["aliases"]:
            lane["aliases"] = [recipe["served_name"] + ("" if name == first else f"-{name}")]
        if lane["max_concurrent"] is None:
            lane["max_concurrent"] = total if name == first else max(1, (total - 1) // len(others))
    taken = sum(lanes[name]["max_concurrent"] for name in others)
    if others and taken >= total:
        raise RecipeError(
            f"lanes {', '.join(others)} take {taken} of the engine's {total} slots ({flag}): lane {first} would wait until one of "
            f"their requests ends. Let their max_concurrent add up to {total - 1} or less."
        )
    names = [alias for lane in lanes.values() for alias in lane["aliases"]]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise RecipeError(
            f"lanes share the alias {twice[0]}: the model name is what chooses a lane, give each its own."
        )
    if engine == "vllm":
        policy = recipe["args"].setdefault(_POLICY, "priority")
        if policy != "priority":
            raise RecipeError(f"args.{_POLICY} is {policy}, under which vLLM silently ignores priorities: remove it.")


def gateway_lanes(recipe: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The lanes as the gateway's configuration has them. A recipe without lanes has one, which forces nothing."""
    if not recipe["lanes"]:
        return {"all": {"aliases": [recipe["served_name"]], "max_concurrent": slots(recipe) or _MANY}}
    out = {}
    for name, lane in recipe["lanes"].items():
        own = {key: lane[key] for key in ("priority", "reasoning_effort") if lane[key] is not None}
        kept = {key: lane[key] for key in ("aliases", "defaults", "max_concurrent", "max_queued", "max_wait_s")}
        out[name] = {**kept, "forced": {**lane["forced"], **own}}
    return out


def gateway_config(recipe: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration file of the gateway before the engine of a recipe. ``options``: what the role adds; null is left out."""
    length = recipe["args"].get("max-model-len")
    return {
        "upstream": f"http://127.0.0.1:{recipe['port']}",
        "model": recipe["served_name"],
        "max_model_len": length if isinstance(length, int) else None,
        "lanes": gateway_lanes(recipe),
        **{key: value for key, value in options.items() if value is not None},
    }


def key_records(keys: Sequence[Mapping[str, Any]], lanes: Sequence[str]) -> list[dict[str, Any]]:
    """The keys as the gateway's file has them: never the key itself, its sha256. Raises ValueError."""
    out = []
    for number, key in enumerate(keys):
        name = key.get("name")
        if not isinstance(name, str) or not name or not name.isprintable() or " " in name or "=" in name:
            raise ValueError(
                f"gateway_keys[{number}].name is {name!r}, wanted a name without spaces: the access log shows it."
            )
        unknown = sorted(set(key) - {"name", "key", "sha256", "lanes", "max_concurrent"})
        if unknown:
            raise ValueError(
                f"gateway_keys, {name}: {unknown[0]} is not known; name, key or sha256, lanes, max_concurrent are."
            )
        if bool(key.get("key")) == bool(key.get("sha256")):
            raise ValueError(f"gateway_keys, {name}: give key (from a vault) or sha256, one of them.")
        if key.get("key") and len(str(key["key"])) < 16:
            raise ValueError(f"gateway_keys, {name}: the key has {len(str(key['key']))} characters, wanted 16 or more.")
        for lane in key.get("lanes") or []:
            if lane not in lanes:
                raise ValueError(f"gateway_keys, {name}: there is no lane {lane}; this recipe has {', '.join(lanes)}.")
        digest = str(key.get("sha256") or hashlib.sha256(str(key.get("key")).encode()).hexdigest()).lower()
        if len(digest) != 64 or set(digest) - set("0123456789abcdef"):
            raise ValueError(f"gateway_keys, {name}: sha256 is no sha256 of 64 hexadecimal digits.")
        more = {field: key[field] for field in ("lanes", "max_concurrent") if key.get(field) is not None}
        out.append({"name": name, "sha256": digest, **more})
    return out
