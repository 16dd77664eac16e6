# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Judge the ranks of a cluster together: who is in trouble, which trouble came first, and what a person reads. Pure functions.

A *report* is what one rank's watcher last saw (what rank_info returns, and a few times of the controller's clock):
``host, rank, at, failing_since, failure, still_since, group_since, offset_s, ...rank``. Times ``at`` and ``*_since`` are seconds of
the controller's clock; times inside a rank are the node's (RFC 3339) and are moved by ``offset_s``.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from ansible_collections.gb10.fleet.plugins.module_utils import _failures
from ansible_collections.gb10.fleet.plugins.module_utils._engine_log import ORDER, STAGES, telling
from ansible_collections.gb10.fleet.plugins.module_utils._rank_findings import (
    argument_difference,
    command_words,
    comparable,
    entrypoint_ignores_headless,
)

# Budgets in seconds. The recipe's `readiness` overrides them.
BUDGETS: dict[str, float] = {
    "start_s": 300,
    "rendezvous_s": 180,
    "load_s": 3600,
    "compile_s": 3600,
    "first_token_s": 300,
    # How long log, CPU and GPU may all be still inside a stage.
    "still_s": 300,
    # How long a node may give no answer.
    "unreachable_s": 30,
}
# Stage -> the budget that it counts against.
BUDGET_OF: dict[str, str] = {
    **dict.fromkeys(("container", "config", "engine"), "start_s"),
    "rendezvous": "rendezvous_s",
    **dict.fromkeys(("joined", "load"), "load_s"),
    **dict.fromkeys(("loaded", "compile", "kv_cache", "capture", "warm", "server"), "compile_s"),
    **dict.fromkeys(("ready", "stopped"), "first_token_s"),
}
# Clocks of nodes and controller that differ by less are taken for equal: the measurement is no better than that.
CLOCK_TOLERANCE_S = 2.0
# An engine that has just begun to serve may answer the first requests with an error.
REFUSAL_S = 20.0
# A cause on one rank and an unknown error on another within this time are one event.
SAME_EVENT_S = 2.0
# What has lasted so long was never otherwise in this run.
SINCE_EVER_S = 1e6
_ADDRESS = re.compile(r"^\[?(?:::ffff:)?([\w.:]+?)\]?$")


@dataclass(frozen=True)
class Trouble:
    """What is wrong with one rank. ``when``: seconds of the controller's clock; ``strength`` 0 explains, 3 is a mere symptom."""

    host: str
    id: str
    when: float
    strength: int
    line: str = ""
    groups: Mapping[str, Any] = field(default_factory=dict)
    stage: str = "container"


def moment(text: str | None) -> float | None:
    """Seconds since 1970 of an RFC 3339 time, None for anything else (an engine's own time has no year)."""
    if not text or len(text) < 20 or text.startswith("0001-"):
        return None
    whole, dummy, rest = text.rstrip("Z").partition(".")
    try:
        base = datetime.fromisoformat(whole).replace(tzinfo=timezone.utc).timestamp()
    except ValueError:
        return None
    digits = "".join(c for c in rest if c.isdigit())
    return base + (float(f"0.{digits}") if digits else 0.0)


def _when(report: Mapping[str, Any], text: str | None) -> float:
    seconds = moment(text)
    offset = report.get("offset_s") or 0.0
    if seconds is None:
        return float(report["at"])
    return seconds + (offset if abs(offset) > CLOCK_TOLERANCE_S else 0.0)


def stage_of(report: Mapping[str, Any]) -> str:
    """The stage of a rank; a container without a line is at ``container``."""
    return str(report.get("stage") or "container")


def doing(report: Mapping[str, Any]) -> str:
    """What the rank does, in words: ``loading weights 37 %``."""
    percent = report.get("stage_percent")
    return STAGES[stage_of(report)] + (f" {percent} %" if percent is not None else "")


def duration(seconds: float) -> str:
    """``00:42``, ``12:05``, ``1:02:03``."""
    whole = int(seconds)
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60:02d}:{rest % 60:02d}"


# --- one rank -----------------------------------------------------------------------------------------------------------
def trouble(report: Mapping[str, Any], settings: Mapping[str, Any], now: float) -> Trouble | None:
    """What is wrong with one rank, or None.

    :param settings: ``budgets`` (seconds), ``container``, ``master`` (host:port that workers shall look for the head at),
        ``waiting`` (whether the cluster is still starting: budgets count), ``rendezvous_since`` (see :func:`rendezvous_since`).
    """
    return (
        _connection(report, settings, now)
        or _container(report, settings)
        or _log(report, now)
        or _stopped(report, now)
        or (_budget(report, settings, now) if settings.get("waiting", True) else None)
    )


def rendezvous_since(reports: Sequence[Mapping[str, Any]]) -> float | None:
    """Since when all ranks that have to be are in the rendezvous; None while one is still on its way there or none waits.

    The ranks wait for each other: the wait of a worker says nothing as long as the head still starts.
    """
    if any(ORDER[stage_of(r)] < ORDER["rendezvous"] for r in reports if r.get("running")):
        return None
    return max(
        (float(r["group_since"]) for r in reports if stage_of(r) == "rendezvous" and "group_since" in r), default=None
    )


def group_since(report: Mapping[str, Any], now: float) -> float:
    """Since when a rank is in the group of stages that its budget covers, by its log (controller's clock), else ``now``."""
    group = BUDGET_OF[stage_of(report)]
    times = [
        _when(report, text)
        for stage, text in (report.get("stages") or {}).items()
        if BUDGET_OF[stage] == group and moment(text) is not None
    ]
    return min([*times, now])


def _connection(report: Mapping[str, Any], settings: Mapping[str, Any], now: float) -> Trouble | None:
    since = report.get("failing_since")
    limit = settings["budgets"]["unreachable_s"]
    if since is None or now - since < limit:
        return None
    lasts = f"for {int(now - since)} s: " if now - since < SINCE_EVER_S else ""
    groups = {"detail": lasts + str(report.get("failure") or "no word")}
    return Trouble(report["host"], "rank-unreachable", since, 0, "", groups)


def _container(report: Mapping[str, Any], settings: Mapping[str, Any]) -> Trouble | None:
    host, at = report["host"], float(report["at"])
    if report.get("failing_since") is not None:
        return None
    if not report.get("exists"):
        return Trouble(host, "rank-missing", at, 0, "", {"container": settings.get("container", "")})
    replaced = report.get("first_id") and report["first_id"] != report["container_id"]
    started_anew = report.get("first_started_at") and report["first_started_at"] != report["started_at"]
    if replaced or started_anew or report.get("restart_count"):
        return Trouble(host, "rank-restarted", _when(report, report.get("started_at")), 0)
    if report.get("running"):
        return None
    if report.get("status") == "paused":
        return Trouble(host, "rank-stopped", at, 0)
    return _ended(report)


def _ended(report: Mapping[str, Any]) -> Trouble:
    """Why a rank that ended did so: its own words, then the kernel's, then Docker's, then its exit code."""
    host = report["host"]
    known = _log(report, float(report["at"]))
    hard = [line for line in report.get("kernel_lines") or [] if line["severity"] == "hard"]
    if known and known.strength == 0:
        return known
    if hard:
        line = hard[0]
        return Trouble(host, line["id"], _when(report, report.get("finished_at")), 0, line["line"], line["groups"])
    if report.get("error") and (said := _failures.match(report["error"], _failures.CONTAINER)):
        return Trouble(host, said.id, float(report["at"]), 0, report["error"], said.groups)
    code = report.get("exit_code")
    when = _when(report, report.get("finished_at"))
    if report.get("oom_killed"):
        return Trouble(host, "rank-oom-killed", when, 0, "", {"exit_code": code})
    if code == 137 and not known:
        return Trouble(host, "rank-killed", when, 0)
    if known:
        return known
    error = report.get("first_error")
    line = error["line"] if error else str(report.get("error") or "")
    # Without a word and with exit code 0 a worker usually follows a head that left.
    strength = 2 if error or code else 3
    return Trouble(
        host, "rank-ended", _when(report, error["time"]) if error else when, strength, line, {"exit_code": code}
    )


def _log(report: Mapping[str, Any], now: float) -> Trouble | None:
    host = report["host"]
    fatal = report.get("fatal")
    if fatal:
        first = report.get("first_error") or fatal
        strength = {"cause": 0, "peer": 1}.get(fatal["kind"], 2)
        line = fatal["line"]
        if fatal["kind"] == _failures.WRAPPER and first.get("line"):
            line = first["line"]
        return Trouble(host, fatal["id"], _when(report, first.get("time")), strength, line, fatal["groups"])
    for name, wait in (report.get("waits") or {}).items():
        known = _failures.entry(name)
        since = _when(report, wait["time"])
        if stage_of(report) in (known["stage"], "engine") and now - since >= known["patience_s"]:
            return Trouble(host, name, since, 2, wait["line"], wait["groups"])
    return None


def _stopped(report: Mapping[str, Any], now: float) -> Trouble | None:
    since = report.get("stopped_since")
    if since is not None and now - since >= 2:
        return Trouble(report["host"], "rank-stopped", since, 0)
    return None


def _budget(report: Mapping[str, Any], settings: Mapping[str, Any], now: float) -> Trouble | None:
    host, stage = report["host"], stage_of(report)
    budgets = settings["budgets"]
    wanted, found = settings.get("master"), (report.get("facts") or {}).get("master")
    if wanted and found and stage == "rendezvous" and report["rank"] > 0 and found != wanted:
        return Trouble(host, "launch-other-master", float(report["at"]), 0, "", {"found": found, "wanted": wanted})
    refusing = report.get("refusing_since")
    if refusing is not None and now - refusing >= REFUSAL_S:
        error = (report.get("probe") or {}).get("error")
        return Trouble(host, "endpoint-error", refusing, 2, "", {"seconds": int(now - refusing), "error": error})
    # A worker has nothing to say once its KV cache is made: the rest is the head's to do.
    if report["rank"] > 0 and ORDER[stage] >= ORDER["kv_cache"]:
        return None
    words = {"doing": STAGES[stage]}
    name = BUDGET_OF[stage]
    since = settings.get("rendezvous_since") if stage == "rendezvous" else float(report["group_since"])
    if since is not None and now - since > budgets[name]:
        values = {**words, "seconds": int(budgets[name]), "budget": name}
        verdict = {"rendezvous_s": "stage-rendezvous", "first_token_s": "endpoint-silent"}.get(name, "stage-budget")
        error = (report.get("probe") or {}).get("error") or f"none within {int(budgets[name])} s"
        return Trouble(host, verdict, float(report["group_since"]), 3, "", {**values, "error": error}, stage)
    still = report.get("still_since")
    if still is not None and stage not in ("rendezvous", "ready") and now - still > budgets["still_s"]:
        return Trouble(host, "stage-still", still, 3, "", {**words, "seconds": int(now - still)}, stage)
    return None


# --- all ranks together ---------------------------------------------------------------------------------------------------
def mismatch(reports: Sequence[Mapping[str, Any]]) -> Trouble | None:
    """Ranks that cannot work together, seen from their settings alone before anything hangs (``reports`` by rank)."""
    head = reports[0]
    for report in reports:
        if words := entrypoint_ignores_headless(report):
            return Trouble(
                report["host"], "launch-apiserver-entrypoint", float(report["at"]), 0, "", {"entrypoint": words}
            )
        known = comparable(report) and comparable(head)
        difference = argument_difference(command_words(report), command_words(head)) if known else None
        if difference:
            groups = {"other": head["host"], "difference": difference}
            return Trouble(report["host"], "launch-args-mismatch", float(report["at"]), 0, "", groups)
    return None


def first_cause(troubles: Sequence[Trouble], addresses: Mapping[str, str] | None = None) -> Trouble:
    """The trouble that the others follow from: a rank that others point at, then the first by time that explains itself.

    :param addresses: inventory name -> fabric address, to find the node behind "Connection closed by peer [198.51.100.12]".
    """
    by_host = {t.host: t for t in troubles}
    telling = [t for t in troubles if t.strength == 0]
    unknown = [t for t in troubles if t.strength == 2]
    if telling:
        first = min(telling, key=lambda t: t.when)
        # The same mistake on several ranks at once: their clocks do not say who was first, the lowest rank speaks for all.
        first = next(t for t in telling if t.id == first.id and t.when - first.when <= SAME_EVENT_S)
        earlier = [t for t in unknown if t.when < first.when - SAME_EVENT_S]
        return min(earlier, key=lambda t: t.when) if earlier else first
    for one in sorted((t for t in troubles if t.strength == 1), key=lambda t: t.when):
        host = peer_host(one, addresses or {})
        gone = [by_host[host]] if host in by_host else [t for t in troubles if t.when <= one.when + SAME_EVENT_S]
        if ended := [t for t in gone if t.host != one.host and t.strength != 1]:
            return min(ended, key=lambda t: t.when)
    if unknown:
        return min(unknown, key=lambda t: t.when)
    # Nothing but symptoms: the rank that came least far keeps the others waiting.
    return min(troubles, key=lambda t: (t.strength, ORDER[t.stage], t.when))


def peer_host(one: Trouble, addresses: Mapping[str, str]) -> str | None:
    """The inventory name of the rank that a peer error points at."""
    peer = one.groups.get("peer") or one.groups.get("peer2")
    found = _ADDRESS.match(str(peer)) if peer else None
    return next((name for name, address in addresses.items() if found and address == found.group(1)), None)


def diagnosis(
    cluster: str,
    reports: Mapping[str, Mapping[str, Any]],
    first: Trouble,
    troubles: Sequence[Trouble],
    elapsed_s: float | None,
    known: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The verdict as data: cluster, node, rank, id, title, cause, fix, stage, line, time, last_lines, others, elapsed_s.

    :param known: values for placeholders that the line itself does not give (``port``).
    """
    report = reports[first.host]
    words = _failures.explain(first.id, {**(known or {}), **first.groups}, first.line)
    fatal = report.get("fatal") or {}
    others = [
        {"node": t.host, "rank": reports[t.host]["rank"], "id": t.id, "line": t.line, **_only(t)}
        for t in sorted(troubles, key=lambda t: t.when)
        if t.host != first.host
    ]
    stage = fatal.get("stage") or stage_of(report)
    return {
        "cluster": cluster,
        "node": first.host,
        "rank": report["rank"],
        **words,
        "stage": stage,
        "doing": STAGES[stage],
        "line": first.line,
        "time": datetime.fromtimestamp(first.when, tz=timezone.utc).strftime("%H:%M:%S"),
        "elapsed_s": None if elapsed_s is None else round(elapsed_s, 1),
        "last_lines": [line for line in report.get("last_lines") or [] if telling(line)],
        "others": others,
    }


def _only(one: Trouble) -> dict[str, str]:
    return {"cause": _failures.explain(one.id, one.groups, one.line)["cause"]}


def message(found: Mapping[str, Any], last_lines: int = 6, width: int = 100) -> str:
    """The verdict for a person: who, when, why, what to do; then the evidence in short. Wrapped at ``width``."""
    when = f", after {duration(found['elapsed_s'])}" if found["elapsed_s"] is not None else ""
    said = [
        f"{found['cluster']}: {found['node']} (rank {found['rank']}), {found['doing']}{when}: {found['cause']}.",
        f"To do: {found['fix']}. [{found['id']}]",
    ]
    if found["line"]:
        said.append(f"First error, {found['time']} UTC: {found['line'][:300]}")
    said += [f"Also {o['node']} (rank {o['rank']}): {o['cause']}." for o in found["others"]]
    lines = [line for text in said for line in _wrapped(text, width)]
    if found["last_lines"] and last_lines:
        lines.append(f"Last lines of {found['node']}:")
        lines += [f"  {line[: width - 2]}" for line in found["last_lines"][-last_lines:]]
    return "\n".join(lines)


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


# --- progress ---------------------------------------------------------------------------------------------------------------
def free_gib(report: Mapping[str, Any]) -> float | None:
    free = (report.get("memory") or {}).get("free_kib")
    return round(free / 1048576, 1) if free is not None else None


def completion(report: Mapping[str, Any]) -> str:
    """What came of the question to a head that serves, as long as no completion came: for the progress line."""
    error = (report.get("probe") or {}).get("error")
    return f", no completion yet: {error}" if error and not report.get("answer") else ""


def progress_key(reports: Sequence[Mapping[str, Any]]) -> tuple[Any, ...]:
    """What has to change before another line is worth printing: a stage, or ten percent."""
    return tuple(
        (r["host"], stage_of(r), None if r.get("stage_percent") is None else r["stage_percent"] // 10, completion(r))
        for r in reports
    )


def progress_line(cluster: str, elapsed_s: float, reports: Sequence[Mapping[str, Any]], width: int = 100) -> str:
    """One line (wrapped at ``width``): ``alpha  00:42  spark-01 loading weights 37 %  spark-02 ...  free 21.3/24.8 GiB``."""
    pieces = []
    for report in reports:
        text = f"{report['host']} {doing(report)}{completion(report)}"
        read = (report.get("activity") or {}).get("read_bytes")
        if stage_of(report) == "load" and report.get("stage_percent") is None and read:
            # Only rank 0 prints a bar; the others are seen by what they read.
            text += f" ({read / 2**30:.1f} GiB read)"
        pieces.append(text)
    free = [free_gib(r) for r in reports]
    if all(f is not None for f in free):
        pieces.append("free " + "/".join(f"{f:.1f}" for f in free) + " GiB")
    left = max((r.get("stage_left_s") or 0 for r in reports), default=0)
    if left >= 60:
        pieces.append(f"~{round(left / 60)} min left")
    elif left > 5:
        pieces.append(f"~{left} s left")
    start = f"{cluster}  {duration(elapsed_s)}"
    lines, indent = [start], " " * len(start)
    for piece in pieces:
        if len(lines[-1]) + 2 + len(piece) > width and lines[-1].strip() and lines[-1] != start:
            lines.append(indent)
        lines[-1] += "  " + piece
    return "\n".join(lines)


def progress_data(cluster: str, elapsed_s: float, reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The same as data, for the JSON form."""
    return {
        "cluster": cluster,
        "elapsed_s": round(elapsed_s, 1),
        "ranks": [
            {
                "node": r["host"],
                "rank": r["rank"],
                "stage": stage_of(r),
                "percent": r.get("stage_percent"),
                "left_s": r.get("stage_left_s"),
                "free_gib": free_gib(r),
            }
            for r in reports
        ],
    }
