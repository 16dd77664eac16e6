# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The failure catalogue: recognise a line, and say cause and fix. Pure functions over failures/catalogue.yml.

Standard library only, and nothing of Ansible: nodes, controller and the watchdog share this file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ansible_collections.gb10.fleet.plugins.module_utils._failure_data import CATALOGUE

CAUSE, WRAPPER, PEER, WAIT, NOTE = "cause", "wrapper", "peer", "wait", "note"
ENGINE, KERNEL, CONTAINER, STATE = "engine", "kernel", "container", "state"
# How well a kind explains: a cause explains itself, a peer points at another rank, a wrapper only says that something failed.
WEIGHT = {CAUSE: 0, PEER: 1, WRAPPER: 2, WAIT: 3, NOTE: 4}
_PLACEHOLDER = re.compile(r"\{(\w+)\}")
_ENTRIES: dict[str, dict[str, Any]] = {entry["id"]: entry for entry in CATALOGUE}
_COMPILED: dict[str, list[tuple[dict[str, Any], re.Pattern[str]]]] = {}


class Match(NamedTuple):
    """A line that the catalogue knows. ``groups`` holds what the signature cut out of the line."""

    id: str
    kind: str
    severity: str
    groups: dict[str, str]


def _patterns(source: str) -> list[tuple[dict[str, Any], re.Pattern[str]]]:
    if source not in _COMPILED:
        _COMPILED[source] = [
            (entry, re.compile(pattern))
            for entry in CATALOGUE
            if entry["source"] == source
            for pattern in entry.get("signature", ())
        ]
    return _COMPILED[source]


def match(line: str, source: str = ENGINE) -> Match | None:
    """What the catalogue says of one line: of several entries the one that explains best, then the first in the file."""
    best: Match | None = None
    for entry, pattern in _patterns(source):
        if best is not None and WEIGHT[entry["kind"]] >= WEIGHT[best.kind]:
            continue
        if found := pattern.search(line):
            groups = {name: value for name, value in found.groupdict().items() if value is not None}
            best = Match(entry["id"], entry["kind"], entry["severity"], groups)
            if entry["kind"] == CAUSE:
                break
    return best


def entry(name: str) -> Mapping[str, Any]:
    """The catalogue entry of a verdict. Raises KeyError."""
    return _ENTRIES[name]


def at_any_level(name: str) -> bool:
    """Whether a line of this verdict counts although the engine logs it as information or warning."""
    return _ENTRIES[name]["kind"] in (NOTE, WAIT) or bool(_ENTRIES[name].get("any_level"))


def kind_of(name: str | None) -> str | None:
    """Kind of a verdict, None for a verdict that the catalogue does not know."""
    return _ENTRIES[name]["kind"] if name in _ENTRIES else None


def _max_utilization(groups: Mapping[str, Any]) -> dict[str, str]:
    """The largest gpu-memory-utilization (two digits) that what is free allows: floor(free / total)."""
    try:
        free, total = float(groups["free_gib"]), float(groups["total_gib"])
    except (KeyError, ValueError):
        return {}
    return {"max_utilization": f"{int(free / total * 100) / 100:.2f}"} if total > 0 else {}


COMPUTED: dict[str, Callable[[Mapping[str, Any]], dict[str, str]]] = {"max_utilization": _max_utilization}


def _fill(text: str, values: Mapping[str, Any]) -> str | None:
    missing = [name for name in _PLACEHOLDER.findall(text) if values.get(name) in (None, "")]
    return None if missing else _PLACEHOLDER.sub(lambda found: str(values[found.group(1)]), text)


def explain(name: str, groups: Mapping[str, Any] | None = None, line: str = "") -> dict[str, str]:
    """Cause and fix of a verdict as clauses without a full stop: ``{id, title, cause, fix}``.

    :param groups: values for the placeholders; a text with an unknown one falls back to words without numbers.
    """
    known = _ENTRIES.get(name)
    if known is None:
        return {"id": name, "title": line, "cause": line, "fix": "read the last lines of all ranks"}
    values: dict[str, Any] = {"line": line, **(groups or {})}
    if known.get("compute"):
        values.update(COMPUTED[known["compute"]](values))
    title = str(known["title"])
    cause = _fill(known["cause"], values) or title[:1].lower() + title[1:]
    fix = _fill(known["fix"], values) or _PLACEHOLDER.sub("a fitting value", known["fix"])
    return {"id": name, "title": title, "cause": cause, "fix": fix}


def kernel_lines(text: str) -> list[dict[str, Any]]:
    """The lines of a kernel log that the catalogue knows, the same one counted instead of repeated.

    :param text: as ``journalctl -k`` prints it; the first word of a line is taken for its time.
    """
    found: dict[str, dict[str, Any]] = {}
    for line in text.splitlines():
        known = match(line, KERNEL)
        if known is None:
            continue
        key = known.id if known.severity == "soft" else f"{known.id} {sorted(known.groups.items())}"
        known_line = {
            "id": known.id,
            "severity": known.severity,
            "groups": known.groups,
            "time": line.split(" ", 1)[0],
            "line": line,
            "count": 0,
        }
        found.setdefault(key, known_line)["count"] += 1
    return list(found.values())
