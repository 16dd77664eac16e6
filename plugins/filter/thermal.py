# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Filters that show what the role ``thermal`` sampled."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ansible_collections.gb10.fleet.plugins.module_utils import _text, _thermal

_SAMPLED = (
    "window",
    "policies",
    "gpu",
    "zones",
    "lock",
    "decode_tokens_per_s",
    "requests_running",
    "processes",
    "findings",
)


def _samples(host: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """The samples of a host: before, and after when something was changed."""
    pairs = [(when, host.get(f"thermal_{when}")) for when in ("before", "after")]
    return [(when, sample) for when, sample in pairs if isinstance(sample, Mapping) and "window" in sample]


def thermal_table(hosts: Iterable[Mapping[str, Any]]) -> str:
    """Two lines per node, before and after; one line ("now") for a node on which nothing was changed."""
    rows = []
    for host in hosts:
        samples = _samples(host)
        for when, sample in samples:
            shown = dict(sample)
            if host.get("topology_rank", 0) != 0:
                shown["decode_tokens_per_s"] = None  # the head's endpoint counts for the whole cluster
            rows.append(_thermal.row(host["inventory_hostname"], when if len(samples) > 1 else "now", shown))
    return _text.table(rows)


def thermal_samples(hosts: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Everything that was sampled, for a file: [{node, cluster, before, after}]; ``after`` is null when nothing was changed."""
    out = []
    for host in hosts:
        samples = {when: {key: sample.get(key) for key in _SAMPLED} for when, sample in _samples(host)}
        out.append(
            {
                "node": host["inventory_hostname"],
                "cluster": host.get("topology_cluster"),
                "before": samples.get("before"),
                "after": samples.get("after"),
            }
        )
    return out


def thermal_findings(hosts: Iterable[Mapping[str, Any]], width: int = 100) -> str:
    """Per node: one line of readings, then each finding with its evidence and lever."""
    blocks = []
    for host in hosts:
        for dummy, sample in _samples(host)[:1]:
            blocks.append("\n".join(_findings(host["inventory_hostname"], sample, width)))
    return "\n\n".join(blocks)


def _findings(node: str, sample: Mapping[str, Any], width: int) -> list[str]:
    window = sample["window"]
    cell = _text.cell
    load = "engine serves" if sample.get("requests_running") else "no request runs"
    lines = [
        f"{node}: SoC {cell(window['soc_celsius'])} °C, GPU {cell(window['gpu_celsius'])} °C, {cell(window['power_w'])} W, "
        f"SM {cell(window['sm_mhz'])} MHz, {cell(window['utilization_percent'])} % busy; {load}; over {cell(window['seconds'])} s"
    ]
    if not sample["findings"]:
        return [*lines, "  nothing found"]
    for finding in sample["findings"]:
        lines.append(f"  {finding['finding']}")
        for name in ("evidence", "lever"):
            lines += textwrap.wrap(
                finding[name],
                width,
                initial_indent=f"    {name + ':':<10}",
                subsequent_indent=" " * 14,
                break_on_hyphens=False,
            )
    return lines


class FilterModule:
    """Filters of gb10.fleet about heat."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {
            "thermal_table": thermal_table,
            "thermal_samples": thermal_samples,
            "thermal_findings": thermal_findings,
        }
