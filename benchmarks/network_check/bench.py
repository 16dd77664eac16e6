"""What a healthy two-node check costs, beside an equal number of plain `ssh … cat` rounds over the same nodes, in one run.

A round is one command on every node at the same time, over connections that stay open, as Ansible's tasks are. The machines are
shared and noisy: read the ratio and the minimum. Needs the sandbox (`make demo`, or playbooks/sandbox.yml); another inventory is
given with --inventory. Writes benchmarks/results/network_check.json.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/utils"))

from fleet import SANDBOX, playbook_environment, run_playbook  # noqa: E402

# What a careful script would read by hand, one file set per round.
FILES = "/sys/class/infiniband/*/ports/1/gids/3 /sys/class/net/enp1s0f0np0/mtu /proc/meminfo"
LIMIT_TASKS, LIMIT_S = 8, 5.0


def hosts_of(inventory: str) -> dict[str, dict[str, str]]:
    program = str(Path(sys.executable).with_name("ansible-inventory"))
    done = subprocess.run(
        [program, "-i", inventory, "--list"], cwd=ROOT, env=playbook_environment(), check=True, capture_output=True
    )
    found = json.loads(done.stdout)["_meta"]["hostvars"]
    return {name: variables for name, variables in found.items() if variables.get("cluster")}


def ssh(variables: dict[str, str]) -> list[str]:
    known = re.search(r"UserKnownHostsFile=\"?([^\s\"]+)", variables.get("ansible_ssh_common_args", ""))
    return [
        *("ssh", "-i", str(ROOT / ".sandbox/id_ed25519"), "-o", "IdentitiesOnly=yes"),
        *(
            "-o",
            f"UserKnownHostsFile={known.group(1) if known and '{' not in known.group(1) else ROOT / '.sandbox/known_hosts'}",
        ),
        *("-o", "ControlMaster=auto", "-o", f"ControlPath={ROOT / '.sandbox/bench-%C'}", "-o", "ControlPersist=60"),
        f"{variables.get('ansible_user', 'spark')}@{variables['ansible_host']}",
    ]


def rounds(hosts: dict[str, dict[str, str]], number: int) -> None:
    for _ in range(number):
        jobs = [
            subprocess.Popen([*ssh(v), f"cat {FILES}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            for v in hosts.values()
        ]
        for job in jobs:
            job.wait()


def tasks_on_nodes(output: str) -> int:
    """Tasks that ran for a node: what the recap counts, less the includes, which run on the controller only."""
    most = max(int(number) for number in re.findall(r"ok=(\d+)", output))
    return most - len(re.findall(r"^included: ", output, re.MULTILINE))


def measure(work: Callable[[], None], runs: int) -> list[float]:
    work()
    seconds = []
    for _ in range(runs):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--inventory", default=SANDBOX)
    options = parser.parse_args()
    hosts = hosts_of(options.inventory)
    outputs: dict[str, str] = {}

    def play(name: str) -> Callable[[], None]:
        def run() -> None:
            done = run_playbook(name, options.inventory)
            assert done.returncode == 0, done.stdout
            outputs[name] = done.stdout

        return run

    results: dict[str, list[float]] = {}
    tasks: dict[str, int] = {}
    for name in ("check_network", "preflight"):
        results[f"{name}.yml"] = measure(play(name), options.runs)
        tasks[name] = tasks_on_nodes(outputs[name])
        results[f"{tasks[name]} rounds of ssh … cat, for {name}"] = measure(
            lambda n=tasks[name]: rounds(hosts, n), options.runs
        )
    print(f"{'':45} {'min':>7} {'median':>7} {'max':>7}   seconds, {options.runs} runs, {len(hosts)} nodes")
    for title, seconds in results.items():
        print(f"{title:45} {min(seconds):7.2f} {statistics.median(seconds):7.2f} {max(seconds):7.2f}")
    for name, number in tasks.items():
        plain = statistics.median(results[f"{number} rounds of ssh … cat, for {name}"])
        ratio = statistics.median(results[f"{name}.yml"]) / plain
        least = min(results[f"{name}.yml"])
        print(
            f"{name}: {number} tasks per node, {ratio:.1f} × plain ssh rounds, best {least:.2f} s of {LIMIT_S:.0f} s allowed"
        )
    out = ROOT / "benchmarks/results/network_check.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"seconds": results, "tasks": tasks}, indent=1) + "\n")


if __name__ == "__main__":
    main()
