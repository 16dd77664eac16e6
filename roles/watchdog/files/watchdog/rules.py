# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What is wrong with a cluster: one table of rules over what the eyes of its nodes say. Pure functions.

A look: ``{now, nodes: {name: {rank, age_s, eye}}}``; ``eye`` is the last line of the node's eye (None: never one), ``age_s`` how
old it is. ``marks`` is what the rules remember from look to look; it is plain data and may be thrown away at any moment.
"""

from __future__ import annotations

import calendar
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SETTINGS: dict[str, float] = {
    "interval_s": 5,
    # Tokens stand still while requests run for this long: a hang; longer while the engine is young and still compiles.
    "frozen_s": 300,
    "frozen_young_s": 600,
    "young_s": 600,
    # A GPU that draws more than this computes: a long prefill. One that hangs draws 16 - 27 W at 95 % (case wd-util-vs-power).
    "busy_power_w": 30,
    # A node that is silent for this long is said to need a hand.
    "return_s": 600,
    # A launch after which it served for this long is done with: the next outage is a new one and waits for nothing.
    "settled_s": 600,
}
Look = Mapping[str, Any]
Marks = dict[str, Any]
Said = dict[str, str]


@dataclass(frozen=True)
class Rule:
    """``times`` looks in a row; ``find`` gives {node: what was found}."""

    id: str
    times: int
    find: Callable[[Look, Marks, Mapping[str, float]], Said]


@dataclass(frozen=True)
class Finding:
    rule: str
    node: str
    said: str


def moment(text: str | None) -> float:
    """Docker's RFC 3339 in seconds since 1970; 0 for no time."""
    try:
        return float(calendar.timegm(time.strptime((text or "")[:19], "%Y-%m-%dT%H:%M:%S")))
    except ValueError:
        return 0.0


def fresh(node: Mapping[str, Any], settings: Mapping[str, float]) -> bool:
    return node["eye"] is not None and node["age_s"] <= 2 * settings["interval_s"]


def eyes(look: Look, settings: Mapping[str, float]) -> dict[str, dict[str, Any]]:
    """The nodes that speak, lowest rank first."""
    spoken = {name: node for name, node in look["nodes"].items() if fresh(node, settings)}
    return {name: spoken[name]["eye"] for name in sorted(spoken, key=lambda n: spoken[n]["rank"])}


def head_of(look: Look) -> str:
    return min(look["nodes"], key=lambda name: look["nodes"][name]["rank"])


def head_eye(look: Look, settings: Mapping[str, float]) -> dict[str, Any]:
    return eyes(look, settings).get(head_of(look)) or {}


def rank_gone(look: Look, marks: Marks, settings: Mapping[str, float]) -> Said:
    out = {}
    for name, eye in eyes(look, settings).items():
        rank = eye["container"]
        if eye["docker"]:
            continue
        if rank is None:
            out[name] = "there is no rank container"
        elif not rank["running"]:
            code = "out of memory, " if rank["oom_killed"] else ""
            out[name] = f"the rank ended ({code}exit code {rank['exit_code']})"
    return out


def rank_replaced(look: Look, marks: Marks, settings: Mapping[str, float]) -> Said:
    known = marks.setdefault("containers", {})
    out = {}
    for name, eye in eyes(look, settings).items():
        rank = eye["container"]
        if rank and rank["running"]:
            mine = [rank["id"], rank["started_at"]]
            if known.setdefault(name, mine) != mine:
                out[name] = "the rank was replaced or restarted by itself; it cannot rejoin the others"
    return out


def rank_frozen(look: Look, marks: Marks, settings: Mapping[str, float]) -> Said:
    return {n: "processes of the rank are stopped (SIGSTOP)" for n, e in eyes(look, settings).items() if e["stopped"]}


def fatal_line(look: Look, marks: Marks, settings: Mapping[str, float]) -> Said:
    return {n: f"the engine says: {e['fatal'][0]}" for n, e in eyes(look, settings).items() if e["fatal"]}


def health(look: Look, marks: Marks, settings: Mapping[str, float]) -> Said:
    """503 or refused only: an engine that is busy may be late, and /health stays 200 with a dead worker."""
    found = (head_eye(look, settings).get("http") or {}).get("health")
    if found == 503 or found == "refused":
        return {head_of(look): f"/health: {found}"}
    return {}


def unreachable(look: Look, marks: Marks, settings: Mapping[str, float]) -> Said:
    """Silent nodes. A worker that only its management link lost still serves: one token says so."""
    silent = {n: node for n, node in look["nodes"].items() if not fresh(node, settings)}
    since = marks.setdefault("silent", {})
    for name in list(since):
        if name not in silent:
            del since[name]
    for name in silent:
        since.setdefault(name, look["now"])
    canary = head_eye(look, settings).get("canary") or {}
    if silent and head_of(look) not in silent and canary.get("ok") and canary["at"] >= min(since.values()):
        return {}
    return dict.fromkeys(silent, "gives no answer")


def docker_silent(look: Look, marks: Marks, settings: Mapping[str, float]) -> Said:
    return {n: f"Docker does not answer ({e['docker']})" for n, e in eyes(look, settings).items() if e["docker"]}


def tokens_frozen(look: Look, marks: Marks, settings: Mapping[str, float]) -> Said:
    """Requests run and the engine makes no step. A busy GPU, a compiler or the engine's own word starts the clock anew."""
    eye = head_eye(look, settings)
    engine = eye.get("http") or {}
    steps, now = engine.get("iterations"), look["now"]
    mark = marks.get("tokens")
    power = (eye.get("gpu") or {}).get("power_w")
    busy = (power is not None and power >= settings["busy_power_w"]) or any(
        e["compiling"] or e["working"] for e in eyes(look, settings).values()
    )
    if steps is None or not engine.get("running") or busy or mark is None or mark["steps"] != steps:
        marks["tokens"] = {"steps": steps, "since": now}
        return {}
    started = moment((eye["container"] or {}).get("started_at"))
    young = mark["since"] - started < settings["young_s"]
    limit = settings["frozen_young_s" if young else "frozen_s"]
    frozen = now - mark["since"]
    if frozen <= limit:
        return {}
    draws = f" at {power:g} W" if power is not None else ""
    return {head_of(look): f"no token for {frozen:.0f} s while {engine['running']:g} requests run{draws}"}


def canary(look: Look, marks: Marks, settings: Mapping[str, float]) -> Said:
    said = head_eye(look, settings).get("canary")
    if not said or said["ok"] or not ((head_eye(look, settings).get("container") or {}).get("running")):
        return {}
    return {head_of(look): f"a completion of one token failed ({said['error']})"}


# The first one that fires names the cause.
RULES = (
    Rule("rank-frozen", 2, rank_frozen),
    Rule("rank-gone", 1, rank_gone),
    Rule("rank-replaced", 1, rank_replaced),
    Rule("fatal-line", 1, fatal_line),
    Rule("node-unreachable", 3, unreachable),
    Rule("docker-silent", 3, docker_silent),
    Rule("health", 3, health),
    Rule("tokens-frozen", 1, tokens_frozen),
    Rule("canary", 2, canary),
)


def judge(look: Look, marks: Marks, settings: Mapping[str, float] = SETTINGS) -> tuple[list[Finding], list[Finding]]:
    """``(what fired, what is only suspected yet)``. A canary counts once, however often it is looked at."""
    counts = marks.setdefault("counts", {})
    fired, suspected = [], []
    asked = (head_eye(look, settings).get("canary") or {}).get("at")
    for rule in RULES:
        found = rule.find(look, marks, settings)
        for name in [key for key in counts if key.startswith(f"{rule.id} ")]:
            if name.split(" ", 1)[1] not in found:
                del counts[name]
        for node, said in found.items():
            name = f"{rule.id} {node}"
            if rule.id != "canary" or marks.get("asked") != asked:
                counts[name] = counts.get(name, 0) + 1
            if counts.get(name, 0) >= rule.times:
                fired.append(Finding(rule.id, node, said))
            elif counts.get(name):
                suspected.append(Finding(rule.id, node, said))
    marks["asked"] = asked
    return fired, suspected


def healthy(look: Look, specs: Mapping[str, str], settings: Mapping[str, float] = SETTINGS) -> bool:
    """Every rank runs as it was declared and the head's engine answers."""
    seen = eyes(look, settings)
    return (
        len(seen) == len(look["nodes"])
        and all(e["container"] and e["container"]["running"] and not e["stopped"] for e in seen.values())
        and not foreign(look, specs, settings)
        and (head_eye(look, settings).get("http") or {}).get("health") == 200
    )


def foreign(look: Look, specs: Mapping[str, str], settings: Mapping[str, float] = SETTINGS) -> list[str]:
    """Nodes whose rank runs with other settings than the watchdog would start it with."""
    return [
        name
        for name, eye in eyes(look, settings).items()
        if eye["container"] and eye["container"]["running"] and eye["container"]["spec"] != specs.get(name)
    ]


def held(look: Look, settings: Mapping[str, float] = SETTINGS) -> tuple[str, dict[str, Any]] | None:
    """``(stopped | paused, who and since when)`` where a person wants the cluster left alone; stopped outranks paused."""
    for kind in ("stopped", "paused"):
        for eye in eyes(look, settings).values():
            if kind in eye["holds"]:
                return kind, eye["holds"][kind]
    return None


# Kernel evidence that a restart of the engine cannot heal, and what does. An Xid counts by its number.
POINTLESS = {
    "net-cx7-aer": "a reboot: a ConnectX-7 function fell off the bus",
    "kernel-soft-lockup": "an AC power cycle: a processor hangs in the kernel",
    "kernel-xid": "a reboot: the GPU fell off the bus or its firmware died",
}
FATAL_XIDS = {"48", "74", "79", "95", "119", "120", "154"}


def pointless(kernel: Mapping[str, Sequence[Mapping[str, Any]]]) -> str | None:
    """``kernel``: {node: lines of the catalogue since the rank started}. What a node needs before a restart makes sense."""
    for node, lines in kernel.items():
        for line in lines:
            needs = POINTLESS.get(line["id"])
            if needs and (line["id"] != "kernel-xid" or (line.get("groups") or {}).get("xid") in FATAL_XIDS):
                return f"{node} needs {needs}"
    return None
