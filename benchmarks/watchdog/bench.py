"""What the watchdog costs while nothing happens, and how soon it notices, beside what is known of others.

    python benchmarks/watchdog/bench.py [--seconds 60]      loopback only; Docker, engine and ansible-runner are stand-ins

Cost: CPU seconds and resident memory of the program and of the eyes of two nodes, as on a head that watches itself (the second eye
runs on another node there). What Docker and the engine spend on the questions is not counted. Ends with 1 when a limit is missed.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/utils"))

from watchdog_world import World  # noqa: E402

LIMITS = {"cpu_percent": 1.0, "rss_mib": 80.0, "notice_s": 15.0}
# Measured with vLLM 0.32, and public reports.
OTHERS = [
    ("engine alone (vLLM 0.32, two nodes)", "never; the next request fails"),
    ("engine alone, requests running (public case)", "about 360 s"),
    ("eugr/spark-vllm-docker#260, a watchdog by tokens", "1200 s, and restarts prefills"),
    ("Docker restart policy on-failure", "never: a headless worker exits with 0"),
]


def family(pid: int) -> list[int]:
    """The program and its eyes."""
    parents = {}
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            try:
                parents[int(path.name)] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    return [pid, *(child for child, parent in parents.items() if parent == pid)]


def cpu_s(pids: list[int]) -> float:
    """User and system time so far."""
    ticks = 0
    for pid in pids:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(words[11]) + int(words[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def rss_mib(pids: list[int]) -> float:
    """Resident memory, what is shared counted for each."""
    return sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 for pid in pids) / 1048576


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder), interval_s=5)
        try:
            world.start()
            world.until(lambda state: state["name"] == "serving", 60)
            pids = family(world.watchdog.pid if world.watchdog else 0)
            time.sleep(5)
            before, begun = cpu_s(pids), time.monotonic()
            time.sleep(args.seconds)
            cpu = 100 * (cpu_s(pids) - before) / (time.monotonic() - begun)
            memory = rss_mib(pids)
            noticed = []
            for dummy in range(3):
                world.ranks["rank1"].kill()
                killed = time.time()
                state = world.until(
                    lambda state, after=killed: (state["incident"] or {"id": "0"})["id"] >= str(int(after)), 60
                )
                noticed.append(state["incident"]["timeline"][0]["at"] - killed)
                (world.folder / "state.json").unlink()
                world.kill()
                for rank in world.ranks.values():
                    rank.kill()
                    rank.start()
                world.start()
                world.until(lambda state: state["name"] == "serving", 60)
        finally:
            world.close()
    figures = {"cpu_percent": cpu, "rss_mib": memory, "notice_s": max(noticed)}
    print(f"idle, program and two eyes ({len(pids)} processes), one look per 5 s over {args.seconds:.0f} s:")
    for name, value in figures.items():
        print(f"  {name:12} {value:8.2f}   limit {LIMITS[name]:g}")
    print("a dead worker while nobody asks is noticed after:")
    print(f"  {'gb10.fleet watchdog':50} {', '.join(f'{s:.1f}' for s in noticed)} s")
    for name, value in OTHERS:
        print(f"  {name:50} {value}")
    return int(any(value > LIMITS[name] for name, value in figures.items()))


if __name__ == "__main__":
    sys.exit(main())
