# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One cluster at one moment: the table, the verdict, the findings. Pure functions, for diagnose.yml and verify.yml.

A *report* is what rank_info says of a rank, with ``host``, ``rank`` and ``at``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ansible_collections.gb10.fleet.plugins.module_utils import _findings, _rank_findings, _rank_state
from ansible_collections.gb10.fleet.plugins.module_utils._engine_log import ORDER, STAGES
from ansible_collections.gb10.fleet.plugins.module_utils._findings import Finding
from ansible_collections.gb10.fleet.plugins.module_utils._rank_state import Trouble
from ansible_collections.gb10.fleet.plugins.module_utils._text import table


@dataclass(frozen=True)
class Report:
    """``diagnosis`` is None when every rank is well; ``serving`` only when a completion came, too."""

    text: str
    serving: bool
    diagnosis: dict[str, Any] | None
    findings: tuple[Finding, ...]


def unreachable(host: str, rank: int, at: float, detail: str) -> dict[str, Any]:
    """The report of a node that gave no answer."""
    return {
        "host": host,
        "rank": rank,
        "at": at,
        "failing_since": at - _rank_state.SINCE_EVER_S,
        "failure": detail,
        "last_lines": [],
    }


def endpoint_trouble(head: Mapping[str, Any], model: str) -> Trouble | None:
    """Why no completion came, or None when one came or none was asked for."""
    said = head.get("probe")
    if not said or said["ok"]:
        return None
    host, at = head["host"], float(head["at"])
    if said["key_needed"]:
        return Trouble(host, "endpoint-key", at, 0)
    if said["model_listed"] is False:
        return Trouble(
            host, "endpoint-model", at, 0, "", {"listed": ", ".join(said["listed"]) or "no model", "model": model}
        )
    if ORDER[_rank_state.stage_of(head)] < ORDER["server"]:
        # It is still on its way; that is a stage, no trouble.
        return None
    return Trouble(host, "endpoint-silent", at, 3, "", {"error": said["error"]})


def judge(
    cluster: str,
    reports: Sequence[Mapping[str, Any]],
    settings: Mapping[str, Any],
    addresses: Mapping[str, str],
    now: float,
) -> dict[str, Any] | None:
    """The diagnosis of a cluster at this moment, or None.

    :param reports: by rank. :param settings: as :func:`_rank_state.trouble` wants it, with ``model``.
    """
    found = [t for r in reports if (t := _rank_state.trouble(r, settings, now))]
    if not found and (other := _rank_state.mismatch(reports)):
        found = [other]
    if not found and reports and (silent := endpoint_trouble(reports[0], settings["model"])):
        found = [silent]
    if not found:
        return None
    first = _rank_state.first_cause(found, addresses)
    return _rank_state.diagnosis(cluster, {r["host"]: r for r in reports}, first, found, None)


def _row(report: Mapping[str, Any], serving: bool) -> dict[str, Any]:
    gpu = report.get("gpu") or {}
    silent = report.get("failing_since") is not None
    # A worker's log has no line for it.
    stage = STAGES["ready"] if serving else _rank_state.doing(report) if report.get("stage") else None
    return {
        "node": report["host"],
        "rank": report["rank"],
        "container": "no answer" if silent else report.get("status"),
        "stage": None if silent else stage,
        "spec": None if report.get("spec_matches") is None else "as asked" if report["spec_matches"] else "differs",
        "free_GiB": _rank_state.free_gib(report),
        "GPU_W": gpu.get("power_w"),
        "since": (report.get("started_at") or "")[:16].replace("T", " ") or None,
    }


def words(answer: Mapping[str, Any], width: int = 80) -> str:
    """What was answered, in quotes, on one line of at most ``width`` columns."""
    said = " ".join(str(answer.get("text") or "").split())
    return f'"{said}"' if len(said) <= width - 2 else f'"{said[: width - 5]}..."'


def figures(answer: Mapping[str, Any]) -> str:
    """``16 tokens, first token after 0.21 s, 14.2 tokens/s``"""
    parts = [f"{answer.get('completion_tokens') or 0} tokens"]
    if answer.get("ttft_s") is not None:
        parts.append(f"first token after {answer['ttft_s']:.2f} s")
    if answer.get("tokens_per_s"):
        parts.append(f"{answer['tokens_per_s']:.1f} tokens/s")
    return ", ".join(parts)


def smoke_text(answer: Mapping[str, Any], cluster: str) -> str:
    """The smoke request for a person: what it said, and its figures."""
    return f"{cluster}  smoke: {words(answer)}\n{cluster}  smoke: {figures(answer)}"


def gpu_line(head: Mapping[str, Any]) -> str | None:
    """What the head's GPU did while the completion came, if that is known."""
    gpu = head.get("gpu") or {}
    if gpu.get("utilization_percent") is None:
        return None
    watts = f", {gpu['power_w']:.0f} W" if gpu.get("power_w") is not None else ""
    return f"GPU {gpu['utilization_percent']:.0f} %{watts} while it answered"


def report(
    cluster: str,
    endpoint: str,
    reports: Sequence[Mapping[str, Any]],
    settings: Mapping[str, Any],
    addresses: Mapping[str, str],
    now: float,
    transport: str = "roce",
) -> Report:
    """Everything that is to be said about one cluster at this moment."""
    found = judge(cluster, reports, settings, addresses, now)
    budgets = settings["budgets"]
    ready_s = budgets["load_s"] if len(reports) > 1 else 0
    findings = [f for r in reports for f in _rank_findings.of_rank(r, len(reports), transport, ready_s)]
    findings = _rank_findings.merged(findings) + _rank_findings.of_cluster([r for r in reports if r.get("exists")])
    if found:
        # What the verdict says is not said again.
        findings = [f for f in findings if f.code != found["id"]]
    head = reports[0] if reports else {}
    probe = head.get("probe") or {}
    serving = found is None and bool(probe.get("ok")) and all(r.get("engine_alive") for r in reports)
    lines = [table([_row(r, serving) for r in reports], title=f"{cluster}: {settings['model']} at {endpoint}/v1")]
    if found:
        lines.append(_rank_state.message(found))
    elif serving:
        busy = gpu_line(head)
        lines += [f"serving: {words(probe, 40)}, {figures(probe)}", *([busy] if busy else [])]
    else:
        lines.append("no trouble seen; not serving yet" if reports else "no rank in this run")
    lines += _findings.lines(findings)
    return Report("\n".join(lines), serving, found, tuple(findings))
