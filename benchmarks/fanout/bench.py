#!/usr/bin/env python3
# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Copy a checkpoint between two nodes: ours beside plain ``rsync -e ssh``, in the same run, over the same fabric address.

    python benchmarks/fanout/bench.py [--size-mib 2048] [--rounds 3]

The nodes are two light containers of the sandbox. CPU is that of both nodes together, as the host's kernel charges it. Both copy
from memory to memory, since a shared disk here is slower than a GB10's own (``--disk`` copies between disks); ours has hashed every
byte when it ends, rsync has not. What a verification leaves in the page cache is measured on the disk. Ends with 1 when ours is
less than twice as fast, takes more than half the CPU, or leaves more than 1 % of what it verified in the page cache.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PREFIX = "gb10-bench-fanout"
NODES = (f"{PREFIX}-bench-1", f"{PREFIX}-bench-2")
FOLDER, DISK = "/var/tmp/bench", "/var/tmp/bench-disk"  # inside the nodes
SANDBOX = {
    "sandbox_prefix": PREFIX,
    "sandbox_node_format": "bench-%d",
    "sandbox_first_octet": 111,
    "sandbox_light": True,
}
ADDRESS = ("198.51.100.111", "198.51.100.112")


def docker(*words: str, check: bool = True, timeout: float = 900) -> str:
    done = subprocess.run(["docker", *words], capture_output=True, text=True, timeout=timeout, check=False)
    if check and done.returncode:
        raise SystemExit(f"docker {' '.join(words)} failed: {done.stderr.strip()}")
    return done.stdout


def sandbox(*words: str) -> None:
    extra = ["-e", json.dumps({**SANDBOX, "sandbox_wheels": []})]
    argv = [str(Path(sys.executable).with_name("ansible-playbook")), "playbooks/sandbox.yml", *extra, *words]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=1800, check=False)
    if done.returncode:
        raise SystemExit(f"The sandbox did not come up:\n{done.stdout[-3000:]}")


@contextlib.contextmanager
def nodes(disk: bool) -> Iterator[None]:
    """Two nodes with our code on them, and a key from the first to the second."""
    try:
        sandbox()
        with tempfile.TemporaryDirectory() as folder:
            base = Path(folder) / "bench"
            package = base / "ansible_collections/gb10/fleet/plugins"
            package.mkdir(parents=True)
            subprocess.run(["cp", "-r", str(ROOT / "plugins/module_utils"), str(package)], check=True)
            subprocess.run(["cp", str(Path(__file__).with_name("node.py")), str(base)], check=True)
            for node in NODES:
                docker("exec", node, "mkdir", "-p", FOLDER, DISK)
                if not disk:
                    docker("exec", node, "mount", "-t", "tmpfs", "-o", "size=6g", "tmpfs", FOLDER)
                # `docker cp` would write below a mount of the node.
                packed = subprocess.run(["tar", "-C", str(base), "-c", "."], capture_output=True, check=True).stdout
                unpack = ["docker", "exec", "-i", node, "tar", "-C", FOLDER, "-x"]
                subprocess.run(unpack, input=packed, check=True, timeout=60)
        docker("exec", NODES[0], "ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", f"{FOLDER}/key")
        public = docker("exec", NODES[0], "cat", f"{FOLDER}/key.pub").strip()
        docker(
            "exec",
            NODES[1],
            "sh",
            "-c",
            f"cat /root/.ssh/authorized_keys > {FOLDER}/keys; echo '{public}' >> {FOLDER}/keys",
        )
        docker(
            "exec",
            NODES[1],
            "sh",
            "-c",
            f"mount --bind {FOLDER}/keys /root/.ssh/authorized_keys || cp {FOLDER}/keys /root/.ssh/authorized_keys",
        )
        yield
    finally:
        sandbox("--tags", "down")


def cpu_s() -> float:
    """CPU seconds of both nodes since they started, from the accounts of the kernel (cgroup v1, or v2 by either driver)."""
    total = 0.0
    for node in NODES:
        name = docker("inspect", "--format", "{{.Id}}", node).strip()
        old = Path(f"/sys/fs/cgroup/cpuacct/docker/{name}/cpuacct.usage")
        new = [
            Path(f"/sys/fs/cgroup/{place}/cpu.stat")
            for place in (f"docker/{name}", f"system.slice/docker-{name}.scope")
        ]
        if old.exists():
            total += int(old.read_text()) / 1e9
        else:
            total += int(next(path for path in new if path.exists()).read_text().split()[1]) / 1e6
    return total


def on(node: int, *words: str) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(
        docker("exec", NODES[node], "python3", f"{FOLDER}/node.py", *words).splitlines()[-1]
    )
    return answer


def background(node: int, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["docker", "exec", NODES[node], "python3", f"{FOLDER}/node.py", *words], stdout=subprocess.PIPE, text=True
    )


def clean(folder: str) -> None:
    docker("exec", NODES[1], "sh", "-c", f"rm -rf {FOLDER}/{folder}; sync")


def ours(size: int) -> tuple[float, float]:
    clean("ours")
    before = cpu_s()
    server = background(0, "serve", f"{FOLDER}/source", ADDRESS[0])
    done = on(1, "fetch", f"{FOLDER}/ours", ADDRESS[0])
    server.wait(60)
    assert done["moved"] == size, done
    return done["seconds"], cpu_s() - before


def rsync(_size: int) -> tuple[float, float]:
    clean("rsync")
    docker("exec", NODES[1], "mkdir", "-p", f"{FOLDER}/rsync")
    ssh = f"ssh -i {FOLDER}/key -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null"
    before, begun = cpu_s(), time.monotonic()
    docker(
        "exec",
        NODES[0],
        "rsync",
        "-a",
        "-e",
        ssh,
        f"{FOLDER}/source/models/model/",
        f"root@{ADDRESS[1]}:{FOLDER}/rsync/",
    )
    return time.monotonic() - begun, cpu_s() - before


def raw(size: int) -> float:
    sink = background(1, "sink", ADDRESS[1])
    seconds: float = on(0, "raw", ADDRESS[1], str(size))["seconds"]
    sink.wait(30)
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size-mib", type=int, default=2048)
    parser.add_argument("--shards", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--disk", action="store_true", help="copy between the nodes' disks, not their memory")
    given = parser.parse_args()
    with nodes(given.disk):
        size = on(0, "make", f"{FOLDER}/source", str(given.size_mib), str(given.shards))["bytes"]
        results: dict[str, list[tuple[float, float]]] = {"rsync -e ssh": [], "gb10.fleet": []}
        limits = []
        for _round in range(given.rounds):
            limits.append(size / raw(size) / 1e6)
            results["rsync -e ssh"].append(rsync(size))
            results["gb10.fleet"].append(ours(size))
        on(1, "make", DISK, str(min(512, given.size_mib)), "8")
        verified = on(1, "verify", DISK, "full")
        left = on(1, "resident", DISK)
        again = on(1, "verify", DISK, "cached")
    return report(size, results, statistics.median(limits), verified, left, again)


def report(size: int, results: Any, limit: float, verified: Any, left: Any, again: Any) -> int:
    print(f"fanout: {size / (1 << 30):.2f} GiB between two nodes, median of {len(results['gb10.fleet'])} rounds")
    print(f"{'':14}  {'MB/s':>6}  {'of raw link':>11}  {'cpu-s/GB, both ends':>19}")
    print(f"{'raw TCP':14}  {limit:6.0f}  {100:10.0f}%")
    rate, cost = {}, {}
    for name, rounds in results.items():
        rate[name] = statistics.median(size / seconds / 1e6 for seconds, _cpu in rounds)
        cost[name] = statistics.median(cpu / (size / 1e9) for _seconds, cpu in rounds)
        print(f"{name:14}  {rate[name]:6.0f}  {100 * rate[name] / limit:10.0f}%  {cost[name]:19.2f}")
    faster, cheaper = rate["gb10.fleet"] / rate["rsync -e ssh"], cost["gb10.fleet"] / cost["rsync -e ssh"]
    share = left["cached"] / left["bytes"]
    print(
        f"gb10.fleet is {faster:.1f} times as fast, at {cheaper:.2f} of the CPU (hashes included; rsync's copy is not verified)"
    )
    print(
        f"verify: {verified['hashed'] / verified['seconds'] / 1e6:.0f} MB/s, {100 * share:.2f} % of it left in the page cache; "
        f"again from the cache of verifications: {again['seconds'] * 1000:.0f} ms"
    )
    good = faster >= 2 and cheaper <= 0.5 and share <= 0.01
    print(
        json.dumps(
            {
                "benchmark": "fanout",
                "faster": round(faster, 2),
                "cpu": round(cheaper, 2),
                "cached": round(share, 4),
                "good": good,
            }
        )
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
