# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""From the layers of a recipe (its file, the inventory, the command line) to one recipe, and where each value came from.

An *option* is a short name for what a user of a recipe may set (``options: {context: 524288}``); the recipe's ``option_rules`` say
which values it takes, what each one sets, and what follows from it. No engine is known here: a recipe brings its own options.
Pure functions.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ansible_collections.gb10.fleet.plugins.module_utils._lanes import settle as settle_lanes
from ansible_collections.gb10.fleet.plugins.module_utils._recipe import RecipeError, merge, nearest, normalise
from ansible_collections.gb10.fleet.plugins.module_utils._recipe_checks import check, warnings

DEFAULT = "default"


@dataclass(frozen=True)
class Resolved:
    """A recipe that can be used. ``origins``: dotted path of a value -> layer; what is not in it is the schema's default."""

    recipe: dict[str, Any]
    origins: dict[str, str]
    warnings: list[str]


def word(value: Any) -> str:
    """A value as it is written in a recipe: ``true``, ``16``, ``fp8``."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def leaves(value: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Every value that is no mapping (or an empty one), by its dotted path."""
    for name, item in value.items():
        where = f"{path}.{name}" if path else str(name)
        if isinstance(item, Mapping) and item:
            yield from leaves(item, where)
        else:
            yield where, item


def _at(path: str, value: Any) -> dict[str, Any]:
    for name in reversed(path.split(".")):
        value = {name: value}
    return dict(value)


def _cases(rule: Mapping[str, Any]) -> Mapping[str, Any]:
    return {word(name): case or {} for name, case in (rule.get("cases") or {}).items()}


def check_option(name: str, value: Any, rule: Mapping[str, Any]) -> None:
    """Raise RecipeError unless the rule takes the value; the sentence names what it takes and what it is for."""
    cases, listed = _cases(rule), [word(v) for v in rule.get("one_of") or []]
    if word(value) in cases or word(value) in listed:
        return
    means = f" ({rule['means']})" if rule.get("means") else ""
    least, most = rule.get("minimum"), rule.get("maximum")
    if least is None and most is None:
        if listed or not rule.get("to"):
            raise RecipeError(f"options.{name} is {word(value)}, wanted one of {', '.join([*cases, *listed])}{means}.")
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise RecipeError(f"options.{name} is {value!r}, wanted a number{means}.")
    if least is not None and value < least:
        raise RecipeError(f"options.{name} is {value}, wanted {least} or more{means}.")
    if most is not None and value > most:
        raise RecipeError(f"options.{name} is {value}, wanted {most} or less{means}.")


def _bounded(options: dict[str, Any], rules: Mapping[str, Any], asked: set[str]) -> None:
    """One option's value bounds another: what the user asked for is refused, what only the recipe says is lowered."""
    for name, value in list(options.items()):
        case = _cases(rules[name]).get(word(value), {})
        for other, most in (case.get("at_most") or {}).items():
            if options.get(other) is None or options[other] <= most:
                continue
            if other in asked:
                means = f": {case['means']}" if case.get("means") else ""
                raise RecipeError(
                    f"options.{other} is {options[other]}, but {name} {word(value)} allows {most} at most{means}."
                )
            options[other] = most


def apply_options(recipe: Mapping[str, Any], asked: set[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """The recipe with what its options set, and which option set which path.

    :param asked: options that the user gave, as against those that the recipe's file gives.
    """
    rules, options = recipe.get("option_rules") or {}, dict(recipe.get("options") or {})
    for name, value in options.items():
        if name not in rules:
            raise RecipeError(f"options.{name} is not an option of this recipe: {nearest(str(name), rules)}")
        check_option(name, value, rules[name])
    _bounded(options, rules, asked)
    out, by = {**copy.deepcopy(dict(recipe)), "options": options}, {}
    for name, value in options.items():
        rule = rules[name]
        case = _cases(rule).get(word(value))
        changes = [case["set"]] if case and case.get("set") else []
        if not changes:
            changes = [_at(path, _written(path, value)) for path in rule.get("to") or []]
        for change in changes:
            out = merge(out, change)
            by.update({path: f"option {name}" for path, value in leaves(change)})
    return out, by


def _written(path: str, value: Any) -> Any:
    """Environment is text: true and false are 1 and 0 there."""
    if not path.startswith("env."):
        return value
    return str(int(value)) if isinstance(value, bool) else word(value)


def resolve(name: str, layers: Sequence[tuple[str, Mapping[str, Any] | None]]) -> Resolved:
    """One recipe from its layers, lowest first: ``("recipe", …), ("inventory", …), ("command line", …)``. Raises RecipeError.

    Options are applied to the recipe's own file; what a higher layer says of the same key in so many words wins over them.
    """
    (first, base), *over = [(layer, data) for layer, data in layers if data]
    origins = {path: first for path, value in leaves(base)}
    asked: dict[str, str] = {}
    for layer, data in over:
        given = data.get("options") or {}
        base = merge(base, {"options": given})
        asked.update(dict.fromkeys(given, layer))
    raw, by = apply_options(base, set(asked))
    origins.update(by)
    origins.update({f"options.{option}": layer for option, layer in asked.items()})
    for layer, data in over:
        rest = {key: value for key, value in data.items() if key != "options"}
        raw = merge(raw, rest)
        origins.update({path: layer for path, value in leaves(rest)})
    recipe = normalise(name, raw)
    settle_lanes(recipe)
    check(recipe)
    return Resolved(recipe, origins, warnings(recipe))


def explain(recipe: Mapping[str, Any], origins: Mapping[str, str]) -> list[dict[str, Any]]:
    """Rows ``setting, value, from, means`` of every value that is set: the options first, then the rest by name."""
    rules = recipe["option_rules"]
    rows = []
    for name, rule in rules.items():
        value = recipe["options"].get(name)
        means = _cases(rule).get(word(value), {}).get("means") or rule.get("means") or ""
        rows.append(
            {
                "setting": f"options.{name}",
                "value": value,
                "from": origins.get(f"options.{name}", DEFAULT),
                "means": means,
            }
        )
    for path, value in leaves({k: v for k, v in recipe.items() if k not in ("options", "option_rules", "name")}):
        if value not in (None, "", [], {}):
            rows.append({"setting": path, "value": value, "from": origins.get(path, DEFAULT), "means": ""})
    return rows
