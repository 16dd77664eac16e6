# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the watchdog does about what the rules found: one state, one function that advances it. Pure; the state is plain JSON.

The state is written before an action starts, so the program may be killed at any moment: it reads the state, looks, and goes on.

| state | |
|---|---|
| starting | nothing seen yet |
| serving, degraded | all ranks serve; something is suspected |
| waiting | a node is silent, so a launch makes no sense |
| recovering, backoff | a launch of ours runs; the next one has its time |
| gave_up | three launches failed within an hour, or no launch can help; a person (or a reboot of a node) has to act |
| launching | somebody else launches |
| stopped, paused | a person wants it so: stop.yml, pause.yml |
| left_alone | it does not serve and did not serve before, or a person's launch failed: a person has to launch it |
| foreign | it serves with other settings than ours: watched, not recovered |
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from . import rules

BACKOFF_S = (0, 60, 300, 900)
HOUR_S = 3600
MOST_FAILURES = 3
# Launches in a row that each find this much less free memory than the one before.
LEAK_LAUNCHES = 3
LEAK_GIB = 1.0

LAUNCH, CANCEL, STOP = "launch", "cancel", "stop"


@dataclass
class State:
    """Everything that has to survive the watchdog's own end."""

    name: str = "starting"
    since: float = 0.0
    why: str = ""
    # The cluster served under our eyes, so it is ours to bring back.
    armed: bool = False
    # {started, ended, failed, settled} of the launches within the last hour, what ran before each, and the memory that it found.
    tries: list[dict[str, Any]] = field(default_factory=list)
    next_try: float = 0.0
    # A launch of ours was ended because a person stopped the cluster: what it started has to go.
    clean_up: bool = False
    incident: dict[str, Any] | None = None
    last_incident: dict[str, Any] | None = None
    boots: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, found: Mapping[str, Any]) -> State:
        """From JSON of this or another version: unknown keys are dropped, absent ones have their default."""
        return cls(**{name: found[name] for name in cls.__dataclass_fields__ if name in found})

    def data(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Step:
    """What to do now: ``action`` (launch, cancel, stop or None) and whom to tell."""

    action: str | None = None
    events: list[str] = field(default_factory=list)


def turn(state: State, name: str, why: str, now: float) -> bool:
    """Whether the state is another one now."""
    changed = state.name != name
    if changed:
        state.name, state.since = name, now
    state.why = why
    return changed


def mark(state: State, what: str, now: float) -> None:
    """A line of the incident's timeline, each kind once per launch."""
    if state.incident is None:
        return
    since_launch: set[str] = set()
    for line in state.incident["timeline"]:
        since_launch = {line["what"]} if line["what"] == "launch" else since_launch | {line["what"]}
    if what not in since_launch or what == "launch":
        state.incident["timeline"].append({"at": now, "what": what})


def open_incident(state: State, cause: rules.Finding, now: float) -> None:
    if state.incident is None:
        state.incident = {
            "id": str(int(now)),
            "rule": cause.rule,
            "node": cause.node,
            "said": cause.said,
            "timeline": [{"at": now, "what": "detected"}],
            "tries": [],
            "kernel": {},
            "evidence": None,
            "outcome": None,
            "downtime_s": None,
        }


def close_incident(state: State, outcome: str, now: float) -> None:
    if state.incident is not None:
        state.incident["outcome"] = outcome
        state.incident["downtime_s"] = round(now - state.incident["timeline"][0]["at"], 1)
        state.last_incident, state.incident = state.incident, None


def recent(state: State, now: float) -> list[dict[str, Any]]:
    return [one for one in state.tries if one["started"] > now - HOUR_S]


def backoff_s(state: State) -> int:
    """The wait by the launches since the last one that served long enough: a new outage is no sequel of those before."""
    count = len(list(itertools.takewhile(lambda one: not one.get("settled"), reversed(state.tries))))
    return BACKOFF_S[min(count, len(BACKOFF_S) - 1)]


def leak(tries: Sequence[Mapping[str, Any]]) -> str | None:
    """The node whose memory came back smaller after each of the last launches, with the figures."""
    found = [one["free_gib"] for one in tries if one.get("free_gib")][-LEAK_LAUNCHES:]
    if len(found) < LEAK_LAUNCHES:
        return None
    for node in found[-1]:
        row = [one.get(node) for one in found]
        if all(a is not None and b is not None and a - b >= LEAK_GIB for a, b in itertools.pairwise(row)):
            figures = " → ".join(f"{gib:.1f}" for gib in row if gib is not None)
            return f"{node}: each launch finds less free memory ({figures} GiB). Reboot it"
    return None


def give_up(state: State, why: str, now: float) -> Step:
    close_incident(state, "gave up", now)
    return Step(events=["gave_up"] if turn(state, "gave_up", why, now) else [])


def ended(state: State, run: Mapping[str, Any], now: float) -> Step:
    """A launch of ours ended: ``{rc, said, log}``."""
    one = state.tries[-1]
    one.update(ended=now, failed=run["rc"] != 0)
    if state.incident is not None:
        said = {"started": one["started"], "ended": now, "rc": run["rc"], "said": run["said"], "log": run["log"]}
        state.incident["tries"].append(said)
    if run["rc"] == 0:
        mark(state, "ready", now)
        close_incident(state, "recovered", now)
        turn(state, "serving", "", now)
        return Step(events=["recovered"])
    failed = [t for t in recent(state, now) if t.get("failed")]
    if len(failed) >= MOST_FAILURES:
        return give_up(state, f"{len(failed)} launches failed within an hour; the last one: {run['said']}", now)
    state.next_try = now + backoff_s(state)
    turn(state, "backoff", f"the launch failed: {run['said']}", now)
    return Step()


def rule_out(state: State, kernel: Mapping[str, Sequence[Mapping[str, Any]]], now: float) -> Step:
    """Between detection and launch: what the kernels say. Keeps the launch unless it cannot help."""
    if state.incident is not None:
        state.incident["kernel"] = {node: [line["line"] for line in lines] for node, lines in kernel.items() if lines}
    needs = rules.pointless(kernel)
    if needs:
        state.tries.pop()
        return give_up(state, f"no launch can help: {needs}", now)
    return Step(action=LAUNCH, events=["recovering"])


def running(look: rules.Look) -> dict[str, str]:
    """The running rank container of each node: its id."""
    ranks = {name: (node["eye"] or {}).get("container") or {} for name, node in look["nodes"].items()}
    return {name: str(rank["id"]) for name, rank in ranks.items() if rank.get("running")}


def milestones(state: State, look: rules.Look, now: float) -> None:
    """Follow a launch of ours by what the eyes see: containers of before are gone, new ones run. Two looks may enclose both."""
    if not state.tries:
        return
    one, ranks = state.tries[-1], running(look)
    if any(one.get("before", {}).get(name) == rank for name, rank in ranks.items()):
        return
    mark(state, "stopped", now)
    if not ranks:
        free = one.setdefault("free_gib", {})
        for name, node in look["nodes"].items():
            if node["eye"] and node["eye"]["available_gib"]:
                free[name] = max(free.get(name, 0), node["eye"]["available_gib"])
    head = rules.head_of(look)
    if all(name in ranks for name in look["nodes"] if name != head):
        mark(state, "workers up", now)
    if head in ranks:
        mark(state, "head up", now)


def rebooted(state: State, look: rules.Look) -> bool:
    """Whether a node was booted since the last look; its past does not count then."""
    changed = False
    for name, node in look["nodes"].items():
        boot = (node["eye"] or {}).get("boot")
        if boot and state.boots.get(name) != boot:
            changed = changed or name in state.boots
            state.boots[name] = boot
    return changed


def advance(
    state: State,
    look: rules.Look,
    marks: rules.Marks,
    specs: Mapping[str, str],
    settings: Mapping[str, float] = rules.SETTINGS,
) -> Step:
    """One look further.

    :param look: as for the rules, with ``run`` (None, "running", "stopping", or {rc, said, log} once when a launch of ours
        ended) and ``launch`` (the record of somebody else's launch, or None).
    :param specs: the rank spec of each node as we would start it. ``state`` and ``marks`` are changed in place.
    """
    now = look["now"]
    state.tries = recent(state, now)
    if rebooted(state, look) and state.name == "gave_up":
        turn(state, "starting", "a node was rebooted", now)
        state.tries, state.next_try = [], 0.0
    hold = rules.held(look, settings)
    if hold and hold[0] == "stopped":
        return stopped(state, look, hold[1], now)
    if look["run"] in ("running", "stopping"):
        milestones(state, look, now)
        return Step()
    if look["run"] is not None:
        marks.clear()
        return ended(state, look["run"], now)
    if hold:
        marks.clear()
        turn(state, "paused", f"paused by {hold[1].get('by', 'a person')} since {hold[1].get('since', '?')}", now)
        return Step()
    if look["launch"]:
        marks.clear()
        state.armed = False
        close_incident(state, "a person launched", now)
        turn(state, "launching", f"{look['launch'].get('holder', 'somebody')} is under way", now)
        return Step()
    return judged(state, look, marks, specs, settings)


def stopped(state: State, look: rules.Look, hold: Mapping[str, Any], now: float) -> Step:
    """A person's stop.yml counts at once, also against a launch of ours."""
    close_incident(state, "a person stopped it", now)
    turn(state, "stopped", f"stopped by {hold.get('by', 'a person')} since {hold.get('since', '?')}", now)
    state.armed = False
    if look["run"] == "running":
        state.clean_up = True
        return Step(action=CANCEL)
    runs = any((node["eye"] or {}).get("container", None) for node in look["nodes"].values())
    state.clean_up = state.clean_up and runs
    return Step(action=STOP if state.clean_up and look["run"] is None else None)


def wait_for(state: State, silent: Mapping[str, str], now: float, settings: Mapping[str, float]) -> Step:
    """No launch while a node is silent; said at once, and once more when it does not come back (case wd-no-autopower)."""
    changed = turn(state, "waiting", "", now)
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(state.since))
    state.why = "; ".join(f"waiting for {node} since {since}: {said}" for node, said in silent.items())
    late = now - state.since >= settings["return_s"]
    if late:
        state.why += ". A GB10 that is off does not come back by itself: cut its AC power and give it back"
    if state.incident is not None and late and not state.incident.get("late"):
        state.incident["late"] = changed = True
    return Step(events=["degraded"] if changed else [])


def judged(
    state: State, look: rules.Look, marks: rules.Marks, specs: Mapping[str, str], settings: Mapping[str, float]
) -> Step:
    now = look["now"]
    fired, suspected = rules.judge(look, marks, settings)
    other = rules.foreign(look, specs, settings)
    if not fired and rules.healthy(look, specs, settings):
        back = state.incident is not None or state.name == "gave_up"
        mark(state, "ready", now)
        close_incident(state, "recovered", now)
        if state.tries and now - state.tries[-1].get("ended", now) >= settings["settled_s"]:
            state.tries[-1]["settled"] = True
        state.armed = True
        why = f"{suspected[0].node}: {suspected[0].said}" if suspected else ""
        turn(state, "degraded" if suspected else "serving", why, now)
        return Step(events=["recovered"] if back else [])
    if other:
        why = f"{', '.join(other)}: the rank runs with other settings than the watchdog has; run playbooks/watchdog.yml"
        turn(state, "foreign", why, now)
        return Step()
    if not fired:
        silent_nodes = [name for name, node in look["nodes"].items() if not rules.fresh(node, settings)]
        if suspected and state.name == "serving":
            turn(state, "degraded", f"{suspected[0].node}: {suspected[0].said}", now)
        elif silent_nodes and state.armed and not suspected and state.name != "gave_up":
            turn(state, "degraded", f"{', '.join(silent_nodes)} gives no answer, and the cluster still serves", now)
        return Step()
    cause = fired[0]
    if not state.armed:
        turn(state, "left_alone", f"{cause.node}: {cause.said}; run playbooks/serve.yml", now)
        return Step()
    if state.name == "gave_up":
        return Step()
    open_incident(state, cause, now)
    silent = {name: "gives no answer" for name, node in look["nodes"].items() if not rules.fresh(node, settings)}
    silent |= rules.docker_silent(look, marks, settings)
    if silent:
        return wait_for(state, silent, now, settings)
    lost = leak(state.tries)
    if lost:
        return give_up(state, lost, now)
    if state.tries:
        state.next_try = max(state.next_try, state.tries[-1]["started"] + backoff_s(state))
    if now < state.next_try:
        turn(state, "backoff", f"{cause.node}: {cause.said}", now)
        return Step()
    state.tries.append({"started": now, "before": running(look)})
    mark(state, "launch", now)
    turn(state, "recovering", f"{cause.node}: {cause.said}", now)
    return Step(action=LAUNCH)
