"""How long a second serve.yml takes, beside a plain `ssh + docker inspect + curl` loop over the same nodes, in one run.

The machines are shared and noisy: read the ratio and the medians. Needs the sandbox with a cluster that serves
(`make demo`). Writes benchmarks/results/serve.json.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/utils"))

from fleet import ENDPOINT, SANDBOX, playbook_environment, run_playbook  # noqa: E402

NODES = {"spark-01": "198.18.0.11", "spark-02": "198.18.0.12"}
# Measured for the best-known launcher CLI on a machine like this one: it looks at the head only.
PEER_RERUN_S = 1.8
PEER_RENDER_S = 1.1


def ssh(address: str) -> list[str]:
    control = ROOT / ".sandbox/bench-%C"
    return [
        "ssh",
        *("-i", str(ROOT / ".sandbox/id_ed25519"), "-o", f"UserKnownHostsFile={ROOT / '.sandbox/known_hosts'}"),
        *("-o", "ControlMaster=auto", "-o", f"ControlPath={control}", "-o", "ControlPersist=60"),
        f"spark@{address}",
    ]


def plain_loop() -> None:
    """What a careful shell script does: each rank's state over SSH, then one completion."""
    for address in NODES.values():
        subprocess.run([*ssh(address), "docker inspect gb10-tiny"], check=True, capture_output=True)
    body = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8})
    url = f"{ENDPOINT}/v1/chat/completions"
    subprocess.run(
        ["curl", "-sf", url, "-H", "Content-Type: application/json", "-d", body], check=True, capture_output=True
    )


def rerun() -> None:
    done = run_playbook("serve", SANDBOX)
    assert done.returncode == 0, done.stdout
    assert "changed=1" not in done.stdout, done.stdout


def render() -> None:
    done = run_playbook("render", "inventories/spark")
    assert done.returncode == 0, done.stdout


def bare_task() -> None:
    """ansible itself: one task on the same nodes that does nothing."""
    program = shutil.which("ansible", path=playbook_environment()["PATH"]) or str(
        Path(sys.executable).with_name("ansible")
    )
    argv = [program, "all", "-i", SANDBOX, "-m", "ansible.builtin.ping"]
    subprocess.run(argv, cwd=ROOT, env=playbook_environment(), check=True, capture_output=True)


def measure(work: Callable[[], None], runs: int) -> list[float]:
    work()  # connections and caches warm, as for a user who runs it again
    seconds = []
    for _ in range(runs):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    subjects: dict[str, Callable[[], None]] = {
        "serve.yml, nothing to do": rerun,
        "ssh + docker inspect + curl": plain_loop,
        "ansible, one ping": bare_task,
        "render.yml": render,
    }
    results = {name: measure(work, options.runs) for name, work in subjects.items()}
    print(f"{'':30} {'min':>7} {'median':>7} {'max':>7}   seconds, {options.runs} runs")
    for name, seconds in results.items():
        print(f"{name:30} {min(seconds):7.2f} {statistics.median(seconds):7.2f} {max(seconds):7.2f}")
    rerun_s = statistics.median(results["serve.yml, nothing to do"])
    print(f"serve.yml / plain loop: {rerun_s / statistics.median(results['ssh + docker inspect + curl']):.2f}")
    print(f"serve.yml / recorded CLI re-run ({PEER_RERUN_S} s): {rerun_s / PEER_RERUN_S:.2f}")
    print(
        f"render.yml / recorded CLI dry run ({PEER_RENDER_S} s): {statistics.median(results['render.yml']) / PEER_RENDER_S:.2f}"
    )
    out = ROOT / "benchmarks/results/serve.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
