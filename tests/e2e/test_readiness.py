"""The wait for readiness with real vLLM, TP 2: who is named, for what, and how many seconds after the cause the play ends.

The peer figures stand beside each limit (recorded with the same engine: the best-known CLI waited its whole 520 s on a missing file
that ended both ranks after 39 s, and 34 minutes on a worker without --headless).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = "molecule/readiness/launch.yml"
PREPARE = "molecule/readiness/prepare_nodes.yml"
RANK = "gb10-tiny"
MODEL = "/var/tmp/models/tiny-llama/model.safetensors"


def stop_ranks(cluster: Any) -> None:
    for node in (cluster.head, cluster.worker):
        node.run(
            "docker ps --all --quiet --filter label=gb10.fleet.cluster | xargs --no-run-if-empty docker rm --force"
        )


@pytest.fixture(scope="module")
def cluster() -> Any:
    """The sandbox's own nodes, unless the environment names others (see molecule/fabric/faults.py)."""
    os.environ.setdefault("GB10_FAULT_INVENTORY", str(ROOT / "inventories/sandbox"))
    os.environ.setdefault("GB10_FAULT_CONTAINERS", "gb10-sandbox-spark-01,gb10-sandbox-spark-02")
    from ansible_collections.gb10.fleet.molecule.fabric import faults

    found = faults.Cluster()
    stop_ranks(found)
    said = found.play(PREPARE, recipe="sandbox-tiny")
    assert said.rc == 0, said.raw
    return found


def begin(cluster: Any, options: tuple[str, ...] = (), **variables: Any) -> subprocess.Popen[str]:
    """Start a launch where nothing runs, so that a line that is waited for is of this one."""
    stop_ranks(cluster)
    given = json.dumps({"recipe": "sandbox-tiny", **variables})
    argv = [
        cluster.program("ansible-playbook"),
        LAUNCH,
        "-i",
        os.environ["GB10_FAULT_INVENTORY"],
        *options,
        "-e",
        given,
    ]
    env = {**os.environ, "ANSIBLE_NOCOLOR": "1"}
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, env=env)


def end(run: subprocess.Popen[str]) -> str:
    """What it said, on one line; the raw lines are shown when a test fails."""
    raw, _ = run.communicate(timeout=1500)
    print(raw)
    return " ".join(raw.split())


def log(node: Any) -> list[str]:
    return list(node.run(f"docker logs --timestamps {RANK} 2>&1", check=False).splitlines())


def wait_for(node: Any, words: str, limit_s: float = 900) -> None:
    deadline = time.monotonic() + limit_s
    while not any(words in line for line in log(node)):
        assert time.monotonic() < deadline, f"{node.name}: no line with {words!r}"
        time.sleep(0.5)


def since(node: Any, words: str) -> float:
    stamp = next(line.split(" ", 1)[0] for line in log(node) if words in line)
    return time.time() - datetime.fromisoformat(stamp[:26] + "+00:00").timestamp()


@pytest.fixture
def hidden_shard(cluster: Any) -> Iterator[None]:
    for node in (cluster.head, cluster.worker):
        # The name stays, as an index file would name a shard that is not there.
        node.run(f"mv {MODEL} {MODEL}.hidden && ln -s /nonexistent {MODEL}")
    yield
    for node in (cluster.head, cluster.worker):
        node.run(f"mv -f {MODEL}.hidden {MODEL}")


def test_a_good_start(cluster: Any) -> None:
    """At least five stages of both ranks, each said once, and the figures of the smoke request."""
    run = begin(cluster)
    raw, _ = run.communicate(timeout=1500)
    print(raw)
    assert run.returncode == 0
    lines = [line for line in raw.splitlines() if line.startswith("alpha  ")]
    assert len(lines) == len(set(lines))
    assert max(len(line) for line in lines) <= 100
    for node in (cluster.head, cluster.worker):
        words = {line.split(f"{node.name} ", 1)[1].split("  ")[0] for line in lines if f"{node.name} " in line}
        assert len(words) >= 3, "a fast start passes some stages between two looks"
        stages = [s for s in ("world_size=2 rank=", "in world size 2 is assigned", "Starting to load model", "Loading weights took",
                              "for KV cache") if any(s in line for line in log(node))]  # fmt: skip
        assert len(stages) == 5
    assert any("tokens/s" in line and "smoke" in line for line in lines)


def test_worker_killed_while_loading(cluster: Any) -> None:
    run = begin(cluster)
    wait_for(cluster.worker, "world_size=2 rank=1")
    wait_for(cluster.head, "Initializing a V1 LLM engine")
    cluster.worker.run(f"docker kill {RANK}")
    killed = time.monotonic()
    text = end(run)
    took = time.monotonic() - killed
    print(f"worker killed while loading: {took:.1f} s")
    assert f"alpha: {cluster.worker.name} (rank 1)" in text
    assert "[rank-killed]" in text
    assert took <= 10


def test_launch_headless(cluster: Any) -> None:
    text = end(begin(cluster, launch_worker_without=["--headless"]))
    took = since(cluster.worker, "collective_rpc should not be called on follower node")
    print(f"worker without --headless: {took:.1f} s (the head by itself: 34 min)")
    assert f"alpha: {cluster.worker.name} (rank 1)" in text
    assert "[launch-headless]" in text
    assert took <= 15


def test_launch_wrong_master(cluster: Any) -> None:
    """Only the worker looks elsewhere: the head is silent, and the arguments of the two say why."""
    began = time.monotonic()
    text = end(begin(cluster, launch_worker_with=["--master-addr", "198.51.100.250"]))
    took = time.monotonic() - began
    print(f"wrong master address: {took:.1f} s from the start of the play (by itself: 30 min)")
    assert f"alpha: {cluster.worker.name} (rank 1)" in text
    assert "[launch-other-master]" in text or "[launch-args-mismatch]" in text
    assert "198.51.100.250" in text
    assert took <= 60


def test_an_address_of_the_inventory_that_is_not_the_heads(cluster: Any, tmp_path: Path) -> None:
    wrong = {"all": {"hosts": {cluster.head.name: {"fabric_address": "198.51.100.250"}}}}
    (tmp_path / "hosts.json").write_text(json.dumps(wrong))
    text = end(begin(cluster, ("-i", str(tmp_path / "hosts.json"))))
    took = since(cluster.head, "Cannot assign requested address")
    print(f"an address that is not the head's: {took:.1f} s")
    assert f"alpha: {cluster.head.name} (rank 0)" in text
    assert "[net-host-ip-foreign]" in text
    assert took <= 10


def test_launch_port_in_use(cluster: Any) -> None:
    cluster.head.run("setsid -f python3 -m http.server 8000 >/dev/null 2>&1; sleep 1")
    try:
        text = end(begin(cluster))
        took = since(cluster.head, "Address already in use")
    finally:
        cluster.head.run("pkill -f 'http.server 800[0]'", check=False)
    print(f"port in use: {took:.1f} s")
    assert f"alpha: {cluster.head.name} (rank 0)" in text
    assert "[launch-port-in-use]" in text
    assert took <= 10


def test_bad_block_size(cluster: Any) -> None:
    text = end(begin(cluster, recipe_overrides={"args": {"block-size": 16}}))
    took = since(cluster.head, "No common block size")
    print(f"bad block size: {took:.1f} s")
    assert "[engine-block-size]" in text
    assert took <= 10


def test_a_missing_shard_on_both_ranks(cluster: Any, hidden_shard: None) -> None:
    text = end(begin(cluster))
    took = min(since(node, "FileNotFoundError") for node in (cluster.head, cluster.worker))
    print(f"missing shard: {took:.1f} s after the line (peer: the whole 520 s that it was given)")
    assert "[ckpt-missing-file]" in text
    assert f"{MODEL} is not there" in text
    assert took <= 5


def test_no_weights_at_all_on_one_rank(cluster: Any) -> None:
    cluster.worker.run(f"mv {MODEL} {MODEL}.hidden")
    try:
        text = end(begin(cluster))
        took = since(cluster.worker, "Cannot find any model weights")
    finally:
        cluster.worker.run(f"mv {MODEL}.hidden {MODEL}")
    print(f"no weights: {took:.1f} s")
    assert f"alpha: {cluster.worker.name} (rank 1)" in text
    assert "[ckpt-no-weights]" in text
    assert took <= 5


def test_health_200_with_a_dead_worker_is_not_serving(cluster: Any) -> None:
    run = begin(cluster)
    assert "ready: tiny answers" in end(run)
    assert cluster.play("playbooks/verify.yml", recipe="sandbox-tiny").rc == 0
    cluster.worker.run(f"docker kill {RANK}")
    assert cluster.head.run("curl -s -o /dev/null -w '%{http_code}' http://127.0.0.1:8000/health") == "200"
    said = cluster.play("playbooks/verify.yml", recipe="sandbox-tiny")
    assert said.rc == 2
    assert f"alpha does not serve: {cluster.worker.name} (rank 1): the rank was killed" in said.text


def test_interrupted_wait_is_put_right_by_the_next_launch(cluster: Any) -> None:
    run = begin(cluster)
    wait_for(cluster.head, "Initializing a V1 LLM engine")
    run.send_signal(signal.SIGINT)
    run.communicate(timeout=60)
    run = begin(cluster)
    assert "ready: tiny answers" in end(run)
