# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The one decision per cluster: leave it alone, launch it, or say why neither is right. Pure functions."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ansible_collections.gb10.fleet.plugins.module_utils._staging_lock import under_way

SERVING = "serving"
LAUNCH = "launch"
REFUSE = "refuse"
BUSY = "busy"


@dataclass(frozen=True)
class Decision:
    """``verdict``: serving, launch, refuse, busy (another launch); ``reasons``: short clauses that begin with the node's name."""

    verdict: str
    reasons: tuple[str, ...] = ()


def rank_reason(node: str, rank: Mapping[str, Any]) -> str | None:
    """Why this rank has to be started anew, or None when it is as it should be (``rank``: what rank_info reports)."""
    if not rank.get("exists"):
        return f"{node}: no rank container"
    if not rank.get("running"):
        code = rank.get("exit_code")
        return f"{node}: the rank container is {rank.get('status')}" + (
            f" (exit code {code})" if code is not None else ""
        )
    if not rank.get("spec_matches"):
        other = rank.get("recipe")
        return f"{node}: the rank runs with other settings" + (f" (recipe {other})" if other else "")
    if rank.get("restart_count"):
        return f"{node}: the rank was restarted by itself {rank['restart_count']} times"
    if rank.get("engine_alive") is False:
        return f"{node}: the container runs, its engine process does not"
    return None


def decide(
    nodes: Sequence[str],
    ranks: Sequence[Mapping[str, Any] | None],
    restart: bool = False,
    dead: Collection[int] = (),
    controller: str = "",
) -> Decision:
    """Decide for one cluster.

    :param nodes: names by rank. :param ranks: what rank_info said of each, None where the node gave no answer.
    :param restart: launch whatever the state is.
    :param dead: process ids of launches from ``controller`` (this machine's name) that are known to have ended.
    """
    silent = [node for node, rank in zip(nodes, ranks, strict=True) if rank is None]
    if silent:
        return Decision(REFUSE, tuple(f"{node}: gives no answer" for node in silent))
    reported = [rank for rank in ranks if rank is not None]
    launches = {
        str(launch.get("holder")): f"{node}: {under_way(launch)}"
        for node, rank in zip(nodes, reported, strict=True)
        if (launch := rank.get("launch")) and not (launch.get("controller") == controller and launch.get("pid") in dead)
    }
    if launches:
        return Decision(BUSY, tuple(launches.values()))
    if restart:
        return Decision(LAUNCH, ("a restart is asked for",))
    reasons = tuple(r for node, rank in zip(nodes, reported, strict=True) if (r := rank_reason(node, rank)))
    if reasons:
        return Decision(LAUNCH, reasons)
    probe = reported[0].get("probe") or {}
    if probe.get("ok"):
        return Decision(SERVING)
    error = str(probe.get("error") or "no answer")
    if probe.get("timed_out"):
        # Busy or hung cannot be told apart from here, and a restart throws away every running request.
        return Decision(
            REFUSE,
            (f"{nodes[0]}: every rank runs as asked, but a completion did not come in time ({error})",),
        )
    return Decision(LAUNCH, (f"{nodes[0]}: the endpoint does not answer ({error})",))
