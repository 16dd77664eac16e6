#!/usr/bin/env python3
"""On a machine with a real NVIDIA GPU, read-only: do the modules read what nvidia-smi says, and does check mode change nothing?

    PYTHONPATH=<site-packages with ansible> benchmarks/tuning_drift/real_gpu.py [--json FILE]

Reads temperature, power, clocks and load with `thermal_info` and compares them with the text of `nvidia-smi -q` (another format
than the one that the module reads), taken before and after. Proposes a clock lock with `gpu_clock` in check mode. The modules get
nvidia-smi through a wrapper that records every call and lets only questions pass. Exit code 0 when all of it holds.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "collections"))
# Field of thermal_info's `gpu` -> section and name in `nvidia-smi -q`, and how far a reading may lie outside the two around it.
FIELDS = {
    "temperature_celsius": ("Temperature", "GPU Current Temp", 2.0),
    "power_w": ("GPU Power Readings", "Average Power Draw", 15.0),
    "sm_mhz": ("Clocks", "SM", 60.0),
    "gr_mhz": ("Clocks", "Graphics", 60.0),
    "sm_max_mhz": ("Max Clocks", "SM", 0.0),
    "gr_max_mhz": ("Max Clocks", "Graphics", 0.0),
    "utilization_percent": ("Utilization", "GPU", 10.0),
}


WRAPPER = """#!/bin/sh
echo "$@" >> {calls}
case "$1" in -q | --query-*) exec {tool} "$@" ;; *) echo "refused: only questions are asked here"; exit 4 ;; esac
"""


def nvidia_smi(*arguments: str) -> str:
    return subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=60, check=True).stdout


def field(text: str, section: str, name: str) -> float | None:
    """Number of ``name`` in a section of the first GPU of ``nvidia-smi -q``."""
    lines = iter(text.splitlines())
    for line in lines:
        if line.strip() == section and line.startswith("    ") and not line.startswith("     "):
            break
    for line in lines:
        if not line.startswith("        "):
            return None
        key, _, value = line.partition(":")
        if key.strip() == name:
            found = re.match(r"\s*(-?[\d.]+)", value)
            return float(found[1]) if found else None
    return None


def run_module(main: Callable[[], None], **args: Any) -> dict[str, Any]:
    from ansible.module_utils.testing import patch_module_args

    out = io.StringIO()
    with patch_module_args(args), contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        main()
    result: dict[str, Any] = json.loads(out.getvalue().strip().splitlines()[-1])
    return result


def compare(before: str, gpu: dict[str, Any], after: str) -> list[dict[str, Any]]:
    rows = []
    for key, (section, name, slack) in FIELDS.items():
        around = [n for n in (field(before, section, name), field(after, section, name)) if n is not None]
        mine = gpu[key]
        good = mine is None and not around
        if mine is not None and around:
            good = min(around) - slack <= mine <= max(around) + slack
        rows.append({"field": key, "module": mine, "nvidia_smi": around, "slack": slack, "good": good})
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    from ansible_collections.gb10.fleet.plugins.modules import gpu_clock, thermal_info

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        record, calls, tool = folder / "tuning.json", folder / "calls", folder / "nvidia-smi"
        tool.write_text(WRAPPER.format(calls=calls, tool=shutil.which("nvidia-smi")))
        tool.chmod(0o755)
        common = {"record": str(record), "nvidia_smi": str(tool)}
        check = {**common, "_ansible_check_mode": True, "_ansible_diff": True}
        before = nvidia_smi("-q")
        info = run_module(thermal_info.main, duration_s=3.0, **common)
        after = nvidia_smi("-q")
        rows = compare(before, info["gpu"], after)
        top = int(info["gpu"]["gr_max_mhz"])
        proposed = run_module(gpu_clock.main, max_mhz=top - 300, **check)
        refused = run_module(gpu_clock.main, max_mhz=top + 300, **check)
        asked = sorted(set(calls.read_text().split("\n")) - {""})
        recorded = record.exists()
    checks = {
        "every field agrees": all(row["good"] for row in rows),
        "check mode proposes": proposed.get("changed") is True,
        "only questions were asked": not recorded and all(re.match(r"-q -x|--query-", call) for call in asked),
        "a clock over the maximum is refused": "is above what this GPU can do" in refused.get("msg", ""),
    }
    for row in rows:
        around = " and ".join(f"{n:g}" for n in row["nvidia_smi"]) or "nothing"
        print(f"{'ok ' if row['good'] else 'BAD'} {row['field']:<22}{row['module']!s:>10}   nvidia-smi -q: {around}")
    for name, good in checks.items():
        print(f"{'ok ' if good else 'BAD'} {name}")
    print(f"    calls: {'; '.join(asked)}")
    print(f"    window {info['window']}")
    print(f"    proposed {proposed.get('diff')}, refused: {refused.get('msg')}")
    if args.json:
        document = {"rows": rows, "checks": checks, "window": info["window"], "gpu": info["gpu"], "proposed": proposed}
        args.json.write_text(json.dumps({**document, "refused": refused}, indent=1) + "\n")
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
