#!/usr/bin/env python3
"""What the drift timer costs a node: CPU time and memory of one run of gb10_tuning.py, and what that is at its interval.

    benchmarks/tuning_drift/bench.py [--runs 40] [--interval-s 55] [--nvidia-smi PATH] [--json FILE]

A folder stands for the node: 20 cpufreq policies of a GB10. Side by side: the program on the CPU side alone, the whole program
with an nvidia-smi, and a shell loop that does the CPU side with `cat` and `[`, as the seed's script does. CPU time is that of the
process and all its children (wait4), so nvidia-smi counts.

Without --nvidia-smi a stand-in of a few lines of shell answers. A real one (--nvidia-smi nvidia-smi) is called through a wrapper
that lets only its queries pass, and the lock is recorded as if it had been set: nothing is ever changed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FAST = (*range(5, 10), *range(15, 20))
LIMIT_CPU_PERCENT, LIMIT_RSS_MIB = 0.1, 20.0
FILES = (
    ROOT / "roles/thermal/files/gb10_tuning.py",
    *(ROOT / f"plugins/module_utils/_{name}.py" for name in ("cpufreq", "journal", "nvidia_smi")),
)
STAND_IN = """#!/bin/sh
case "$1" in
  --query-gpu=*) echo "a, b, c, d, e, f, g"; echo "3003 MHz, 2184 MHz, 96 %, 47.50 W, Enabled, 0x0, 70" ;;
  -lgc) echo "GPU clocks set to \\"(gpuClkMin ${2%,*}, gpuClkMax ${2#*,})\\" for GPU 0000000F:01:00.0" ;;
esac
"""
ONLY_QUERIES = """#!/bin/sh
case "$1" in --query-*) exec {tool} "$@" ;; *) echo "refused: this benchmark only asks"; exit 4 ;; esac
"""
SHELL_LOOP = """
for p in {root}/sys/devices/system/cpu/cpufreq/policy*; do
  [ "$(cat $p/scaling_governor)" = schedutil ] || echo schedutil > $p/scaling_governor
  hw=$(cat $p/cpuinfo_max_freq)
  if [ "$hw" -gt 3300000 ] && [ "$(cat $p/scaling_max_freq)" != 3300000 ]; then echo 3300000 > $p/scaling_max_freq; fi
done
"""


def make_node(root: Path) -> None:
    for cpu in range(20):
        policy = root / f"sys/devices/system/cpu/cpufreq/policy{cpu}"
        policy.mkdir(parents=True)
        low, high = ("1378000", "3900000") if cpu in FAST else ("338000", "2808000")
        for name, value in {
            "affected_cpus": str(cpu),
            "cpuinfo_min_freq": low,
            "cpuinfo_max_freq": high,
            "scaling_max_freq": high,
            "scaling_cur_freq": high,
            "scaling_governor": "performance",
            "scaling_available_governors": "conservative ondemand userspace powersave performance schedutil",
        }.items():
            (policy / name).write_text(value + "\n")


# The runs are started by a small process: a child's peak memory counts what it was forked from.
STARTER = """
import os, sys, time
for _ in range(int(sys.argv[1])):
    started = time.monotonic()
    child = os.posix_spawn(sys.argv[2], sys.argv[2:], {"PATH": os.environ["PATH"]})
    _, status, usage = os.wait4(child, 0)
    cpu, wall = usage.ru_utime + usage.ru_stime, time.monotonic() - started
    print(os.waitstatus_to_exitcode(status), cpu * 1000, wall * 1000, usage.ru_maxrss / 1024, file=sys.stderr)
"""


def measure(argv: list[str], runs: int) -> dict[str, float]:
    """Median and lowest CPU time and median wall time in ms, largest memory in MiB, over ``runs`` runs after two uncounted ones."""
    starter = [sys.executable, "-E", "-s", "-S", "-c", STARTER, str(runs + 2), *argv]
    done = subprocess.run(
        starter, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, timeout=600, check=True
    )
    lines = [line.split() for line in done.stderr.splitlines()]
    rows = [[float(cell) for cell in line] for line in lines if len(line) == 4 and line[0].lstrip("-").isdigit()]
    if len(rows) != runs + 2 or any(row[0] != 0 for row in rows):
        raise SystemExit(f"{' '.join(argv)} fails: {done.stderr.strip().splitlines()[0]}")
    cpu, wall, memory = ([row[i] for row in rows[2:]] for i in (1, 2, 3))
    lowest = min(cpu)  # of a run that no neighbour disturbed
    return {
        "cpu_ms": statistics.median(cpu),
        "lowest_ms": lowest,
        "wall_ms": statistics.median(wall),
        "rss_mib": max(memory),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--interval-s", type=float, default=55.0)
    parser.add_argument("--nvidia-smi", default="", help="a real nvidia-smi; only queries are run")
    parser.add_argument("--python", default="/usr/bin/python3", help="the node's Python")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gb10-tuning-") as name:
        folder = Path(name)
        rows = measure_all(folder, args)
    for row in rows.values():
        row["cpu_percent"] = row["lowest_ms"] / 10 / args.interval_s
    show(rows, args.interval_s)
    if args.json:
        args.json.write_text(
            json.dumps({"interval_s": args.interval_s, "runs": args.runs, "rows": rows}, indent=1) + "\n"
        )
    # nvidia-smi's own time and memory (of which a run's peak is the larger one) belong to the driver.
    own = rows["gb10_tuning.py, CPU and GPU"]["cpu_percent"] - rows["nvidia-smi, one query"]["cpu_percent"]
    memory = rows["gb10_tuning.py, CPU only"]["rss_mib"]
    print(f"the program without nvidia-smi: {own:.3f} % of one core (from the lowest), {memory:.1f} MiB")
    print(f"its limits: {LIMIT_CPU_PERCENT} %, {LIMIT_RSS_MIB:g} MiB")
    return 0 if own < LIMIT_CPU_PERCENT and memory < LIMIT_RSS_MIB else 1


def measure_all(folder: Path, args: argparse.Namespace) -> dict[str, dict[str, float]]:
    root, opt = folder / "node", folder / "opt"
    make_node(root)
    opt.mkdir()
    for source in FILES:
        (opt / source.name).write_bytes(source.read_bytes())
    stand_in = folder / "nvidia-smi"
    stand_in.write_text(ONLY_QUERIES.format(tool=args.nvidia_smi) if args.nvidia_smi else STAND_IN)
    stand_in.chmod(0o755)
    common = {"root": str(root), "state_dir": str(folder / "state"), "run_dir": str(folder / "run")}
    cpu = {"governor": "schedutil", "cap_mhz": 3300}
    # A lock that no GPU is above, recorded as set and never set again.
    gpu: dict[str, Any] = {"command": str(stand_in), "min_mhz": 0, "max_mhz": 99999, "reassert_s": 10**9}
    (folder / "cpu.json").write_text(json.dumps({**common, "cpu": cpu}))
    (folder / "both.json").write_text(json.dumps({**common, "cpu": cpu, "gpu": gpu}))
    (folder / "run").mkdir()
    record = {"min_mhz": 0, "max_mhz": 99999, "driver": None, "at": 0}
    (folder / "run/tuning.json").write_text(json.dumps({"applied": True, "gpu": record}))
    # As gb10-tuning.service does it.
    code = f"import sys; sys.path[0] = {str(opt)!r}; import gb10_tuning; sys.exit(gb10_tuning.main(sys.argv))"
    program = [args.python, "-E", "-s", "-S", "-c", code, "apply"]
    shell = folder / "loop.sh"
    shell.write_text(SHELL_LOOP.format(root=root))
    query = [
        "--query-gpu=clocks.max.gr,clocks.sm,utilization.gpu,power.draw,persistence_mode,temperature.gpu",
        "--format=csv",
    ]
    return {
        "python, nothing imported": measure([args.python, "-E", "-s", "-S", "-c", "pass"], args.runs),
        "nvidia-smi, one query": measure([str(stand_in), *query], args.runs),
        "gb10_tuning.py, CPU only": measure([*program, str(folder / "cpu.json")], args.runs),
        "gb10_tuning.py, CPU and GPU": measure([*program, str(folder / "both.json")], args.runs),
        "shell loop with cat, CPU only": measure(["/bin/sh", str(shell)], args.runs),
    }


def show(rows: dict[str, dict[str, float]], interval_s: float) -> None:
    print(
        f"{'one run':<30}{'CPU ms median':>15}{'lowest':>8}{'wall ms':>9}{'MiB':>7}  % of one core, every {interval_s:g} s"
    )
    for name, row in rows.items():
        print(
            f"{name:<30}{row['cpu_ms']:>15.1f}{row['lowest_ms']:>8.1f}{row['wall_ms']:>9.1f}{row['rss_mib']:>7.1f}"
            f"{row['cpu_percent']:>8.3f}"
        )


if __name__ == "__main__":
    sys.exit(main())
