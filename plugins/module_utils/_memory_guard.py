# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The memory guard as systemd and its receipt see it: unit text, configuration, what a receipt means. Pure functions."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ansible_collections.gb10.fleet.plugins.module_utils._checkpoint import Layout
from ansible_collections.gb10.fleet.plugins.module_utils._meminfo import gib

UNIT = "gb10-memory-guard@"
PROGRAM = "memory_guard.py"
INSTANCE = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
EXIT_DEADLINE, EXIT_HARD_FLOOR = 3, 4

_UNIT_TEXT = """\
# Written by gb10.fleet.memory_guard; changes are lost.
[Unit]
Description=Memory guard of cluster %i while its model loads
# It lives with one load: the launch starts it before the rank and stops it when the head is ready.
StartLimitIntervalSec=60
StartLimitBurst=10

[Service]
Type=notify
NotifyAccess=main
ExecStart={python} -I -S {program} --config {config_dir}/memory-guard-%i.json
TimeoutStartSec=20
TimeoutStopSec=20
# One drop_caches has blocked for 4.2 s, a compaction for 1.4 s; they run beside the loop that feeds this.
WatchdogSec=10
# A core dump would need the memory that is short.
WatchdogSignal=SIGKILL
# Killed or crashed: on again in a second, and its receipt says so. Deadline ({deadline}) and hard floor ({hard_floor}): it is over.
Restart=on-failure
RestartSec=1
RestartPreventExitStatus={deadline} {hard_floor}
OOMScoreAdjust=-900
LimitMEMLOCK=64M
LimitNOFILE=8192
Nice=-10
# drop_caches and compact_memory want root, nothing else. No mount namespace (PrivateTmp would hide checkpoints under /var/tmp).
NoNewPrivileges=yes
CapabilityBoundingSet=CAP_DAC_READ_SEARCH CAP_DAC_OVERRIDE CAP_FOWNER CAP_IPC_LOCK CAP_LEASE
RestrictAddressFamilies=AF_UNIX
"""


class GuardError(ValueError):
    """Settings that cannot be used; the message is a sentence for the user."""


def unit_name(cluster: str) -> str:
    """Instance of the unit template. Raises GuardError for a name that systemd would escape."""
    if not INSTANCE.match(cluster):
        raise GuardError(f"cluster is {cluster!r}, wanted letters, digits, dots, dashes and underscores.")
    return f"{UNIT}{cluster}.service"


def unit_text(python: str, program: str, config_dir: str) -> str:
    """The unit template."""
    return _UNIT_TEXT.format(
        python=python, program=program, config_dir=config_dir, deadline=EXIT_DEADLINE, hard_floor=EXIT_HARD_FLOOR
    )


def config(params: Mapping[str, Any], receipt: str, marker: str) -> dict[str, Any]:
    """The guard program's configuration from the module's options, without the name of the run."""
    return {
        "floor_mib": round(params["floor_gib"] * 1024),
        "order9_mib": params["order9_mib"],
        "files": list(params["checkpoint_globs"]),
        "receipt": receipt,
        "ready_marker": marker,
        "deadline_s": float(params["deadline_s"]),
        "trail": params["trail"],
        "hard_floor_mib": round(params["hard_floor_gib"] * 1024),
        "hard_floor_s": float(params["hard_floor_s"]),
        "container": params["container"] or "",
        "docker_socket": params["docker_socket"],
        **(params["settings"] or {}),
    }


def config_text(settings: Mapping[str, Any], run: str) -> str:
    return json.dumps({**settings, "run": run}, indent=1, sort_keys=True) + "\n"


def split_config(text: str) -> tuple[dict[str, Any], str]:
    """(settings, run) of a configuration file; ({}, "") when it is none."""
    try:
        settings = json.loads(text)
        run = str(settings.pop("run", ""))
    except (ValueError, AttributeError, TypeError):
        return {}, ""
    return settings, run


def parse_show(text: str) -> dict[str, str]:
    """`systemctl show --property …` as a mapping."""
    return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)


def is_active(show: Mapping[str, str]) -> bool:
    """Running, or about to run again (``activating``: auto-restart)."""
    return show.get("ActiveState") in ("active", "activating", "reloading")


def summary(receipt: Mapping[str, Any]) -> str:
    """One clause per fact, as for a table or a log: how low free memory went, and what was done about it."""
    if not receipt:
        return "no receipt"
    totals = receipt.get("totals", {})
    let_go = sum(totals.get(name, {}).get("gained_kib", 0) for name in ("evict", "trail"))
    floor_kib = receipt.get("settings", {}).get("floor_mib", 0) * 1024
    parts = [f"lowest free {gib(receipt.get('min_free_kib') or 0)} (floor {gib(floor_kib)})"]
    below = receipt.get("below_floor_s", 0)
    parts.append(f"{below:.1f} s under the floor" if below else "never under the floor")
    parts.append(f"{gib(let_go)} of checkpoint pages let go")
    for name in ("drop_caches", "compact_memory"):
        if name in totals:
            parts.append(f"{name} {totals[name]['count']} times")
    if receipt.get("ineffective_actions"):
        parts.append(f"{receipt['ineffective_actions']} actions freed little")
    parts.append(f"{receipt.get('cpu_s', 0):.1f} s of CPU in {receipt.get('seconds', 0):.0f} s")
    return ", ".join(parts)


def warnings(receipt: Mapping[str, Any], show: Mapping[str, str]) -> list[str]:
    """What a person should know of this run, as sentences. Nothing of it made the load fail."""
    said = []
    cuts: Sequence[Mapping[str, Any]] = receipt.get("interruptions", ())
    if cuts:
        unseen = sum(cut["unseen_s"] for cut in cuts)
        times = "once" if len(cuts) == 1 else f"{len(cuts)} times"
        said.append(
            f"The memory guard was killed {times} during the load and started again by systemd; "
            f"nobody watched memory for up to {unseen:.0f} s."
        )
    if receipt.get("state") == "running" and not is_active(show):
        result = show.get("Result", "unknown")
        said.append(
            f"The memory guard ended after {receipt.get('seconds', 0):.0f} s without a word (systemd says: {result}) and did not "
            f"come back; the rest of the load was not guarded. See: journalctl -u {show.get('Id', UNIT)}"
        )
    stopped_by = receipt.get("stopped_by")
    if stopped_by == "deadline":
        limit = receipt.get("settings", {}).get("deadline_s", 0)
        shown = f"{limit / 60:.0f} min" if limit >= 120 else f"{limit:.0f} s"
        said.append(f"The memory guard reached its deadline of {shown} before the load ended, and stopped.")
    elif stopped_by == "hard_floor":
        hard = receipt.get("hard_floor", {})
        limit = receipt.get("settings", {}).get("hard_floor_mib", 0) * 1024
        stopped = f"{hard.get('container') or '(none named)'} ({hard.get('result')})"
        said.append(
            f"Available memory stayed under the hard floor of {gib(limit)}: the memory guard stopped the container {stopped} "
            "before the host could wedge. Lower the share of memory that the recipe takes."
        )
    elif stopped_by == "crash":
        said.append(f"The memory guard crashed ({receipt.get('error')}). Please report it with the receipt.")
    if receipt.get("below_floor_s"):
        low, below = gib(receipt.get("min_free_kib") or 0), receipt["below_floor_s"]
        said.append(f"Free memory was under the floor for {below:.1f} s (lowest {low}).")
    return said


def facts(cluster: str, show: Mapping[str, str], receipt: Mapping[str, Any]) -> dict[str, Any]:
    """State of one guard: what status pages show."""
    return {
        "cluster": cluster,
        "unit": unit_name(cluster),
        "active": show.get("ActiveState", "unknown"),
        "status": show.get("StatusText", ""),
        "result": show.get("Result", ""),
        "pid": int(show.get("MainPID") or 0),
        "restarts": int(show.get("NRestarts") or 0),
        "stopped_by": receipt.get("stopped_by"),
        "started_at": receipt.get("started_at"),
        "min_free_gib": round((receipt.get("min_free_kib") or 0) / (1 << 20), 2) if receipt else None,
        "below_floor_s": receipt.get("below_floor_s"),
        "summary": summary(receipt),
        "warnings": warnings(receipt, show),
    }


def checkpoint_folders(recipe: Mapping[str, Any] | None, models_dir: str) -> list[str]:
    """Folders of the files that the ranks of a recipe load: the model's, then the drafter's."""
    items = [recipe.get("checkpoint"), recipe.get("drafter")] if recipe else []
    folders = []
    for item in filter(None, items):
        directory = item.get("directory") or item["repo"].rsplit("/", 1)[-1]
        folders.append(Layout(item.get("layout", "flat"), models_dir, item["repo"], directory).root)
    return folders


def memory_share(recipe: Mapping[str, Any] | None) -> float:
    """Share of all memory that a rank takes at once, where the recipe says one (as preflight's check of what is available)."""
    return float(((recipe or {}).get("args") or {}).get("gpu-memory-utilization") or 0.0)
