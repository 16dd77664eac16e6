"""A cold launch by serve.yml beside the same `docker run` commands typed by hand, in one run.

Image and checkpoint are on the nodes and the engine's arguments have passed once, as after prepare.yml. Both ways start from
stopped ranks and end with one streamed completion; serve.yml also proves fabric and nodes, guards memory and warms the engine up.
Needs the sandbox (`make demo`) with sandbox-tiny. Writes benchmarks/results/serve_cold.json.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import time
import urllib.error
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/utils"))

from fleet import ENDPOINT, HEAD, SANDBOX, WORKER, rendered, run_playbook, sandbox_nodes, stream_completion  # noqa: E402

# Measured on a machine like this one: by hand, and with the best-known launcher CLI.
RECORDED = {"by hand": 37, "CLI": 81}


def play(name: str) -> str:
    done = run_playbook(name, SANDBOX)
    if done.returncode:
        raise SystemExit(done.stdout)
    return done.stdout


def by_hand(argv: dict[str, list[str]]) -> float:
    nodes = sandbox_nodes()
    begun = time.monotonic()
    for name in (WORKER, HEAD):
        nodes[name].run(*argv[name])
    while time.monotonic() - begun < 600:
        try:
            if stream_completion(ENDPOINT, "tiny"):
                return time.monotonic() - begun
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise SystemExit("no answer within 600 s of two docker runs")


def by_playbook() -> float:
    begun = time.monotonic()
    play("serve")
    return time.monotonic() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=2)
    options = parser.parse_args()
    play("prepare")
    argv = {name: shlex.split(command) for name, command in rendered(play("render")).items()}
    results: dict[str, list[float]] = {"by hand": [], "serve.yml": []}
    for _ in range(options.runs):
        for name, seconds in (("by hand", lambda: by_hand(argv)), ("serve.yml", by_playbook)):
            play("stop")
            results[name].append(seconds())
    for name, seconds in results.items():
        print(f"{name:10} {min(seconds):6.1f} min {statistics.median(seconds):6.1f} median, {options.runs} runs")
    more = statistics.median(results["serve.yml"]) - statistics.median(results["by hand"])
    print(f"serve.yml takes {more:+.1f} s (recorded: by hand {RECORDED['by hand']} s, CLI {RECORDED['CLI']} s)")
    out = ROOT / "benchmarks/results/serve_cold.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
