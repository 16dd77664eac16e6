"""Each way to fail, on two nodes over SSH: who is named, for what, and how long after the cause the play ends."""

from __future__ import annotations

import json
import tarfile
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from ansible_collections.gb10.fleet.molecule.fabric import faults

LAUNCH = "molecule/readiness/launch.yml"
RANK = "gb10-fake"
# Budgets that a test can wait for; what the nodes do is the same.
BUDGETS = {"rendezvous_s": 20, "first_token_s": 20, "still_s": 12}


@pytest.fixture(scope="module")
def cluster() -> Any:
    return faults.Cluster()


def launch(cluster: Any, fault: str, **variables: Any) -> faults.Said:
    env = {"FAKE_ENGINE_FAULT": fault, "FAKE_ENGINE_START_S": "4", **variables.pop("env", {})}
    given = {"launch_anew": True, "readiness_budgets": BUDGETS, "recipe_overrides": {"env": env}, **variables}
    return cluster.play(LAUNCH, **given)


def since(node: Any, words: str) -> float:
    """Seconds since a line of the rank's log."""
    lines = node.run(f"docker logs --timestamps {RANK} 2>&1").splitlines()
    stamp = next(line.split(" ", 1)[0] for line in lines if words in line)
    return time.time() - datetime.fromisoformat(stamp[:26] + "+00:00").timestamp()


def since_end(node: Any) -> float:
    """Seconds since the rank ended."""
    stamp = node.run(f"docker inspect --format '{{{{.State.FinishedAt}}}}' {RANK}").strip()
    return time.time() - datetime.fromisoformat(stamp[:26] + "+00:00").replace(tzinfo=timezone.utc).timestamp()


# fault: node that must be named, verdict, words of cause or remedy, line from which the time counts (None: the rank's end),
# seconds from the cause to the end of the play.
FAULTS: dict[str, tuple[str, str, str, str | None, float]] = {
    "rank1:die@loading": ("worker", "rank-killed", "exit code 137, SIGKILL", None, 10),
    "rank1:exit@loading": ("worker", "rank-ended", "exit code 0", None, 10),
    "load_error": (
        "head",
        "ckpt-missing-file",
        "/var/tmp/models/tiny-llama/model.safetensors is not there",
        "FileNotFoundError",
        10,
    ),
    "bad_block_size": ("head", "engine-block-size", "is none that the backend takes", "No common block size", 10),
    "rank0:port_in_use": (
        "head",
        "launch-port-in-use",
        "port 8000 of this node is held by another process",
        "Errno 98",
        10,
    ),
    "rank1:free_memory": (
        "worker",
        "launch-util-too-high",
        "lower gpu-memory-utilization to 0.81",
        "desired GPU memory",
        10,
    ),
    "rank1:oom": ("worker", "engine-cuda-oom", "was refused memory", "CUDA out of memory", 10),
    "kv_too_small": ("head", "launch-kv-too-small", "set max-model-len to", "estimated maximum model length", 10),
    "rank1:nccl=errno61": ("worker", "net-gid-empty-errno61", "is all zero", "errno 61", 15),
    "rank1:nccl=memlock": ("worker", "pre-kernel-kho", "memlock", "Cannot allocate memory", 15),
    "rank0:shm": ("head", "launch-shm-small", "160 MiB in /dev/shm, 64 MiB are free", "Insufficient space", 10),
    # Silent ones: the rank is frozen, hangs, or waits for one that does not come.
    "rank1:freeze@loading": ("worker", "rank-stopped", "are stopped", "Starting to load model", 20),
    "rank1:stuck@loading": (
        "worker",
        "stage-still",
        "no sign of life while loading weights",
        "Starting to load model",
        40,
    ),
    "rank1:stuck@rendezvous": ("worker", "stage-rendezvous", "still waits for the others", "Launching vLLM", 45),
    # /health and /v1/models say 200: never "ready".
    "rank0:hang": ("head", "endpoint-silent", "a completion did not come", "Application startup complete", 60),
    "rank0:dead": ("head", "rank-peer-lost", "ended", "Application startup complete", 30),
    "rank0:error500": ("head", "endpoint-error", "each completion ended with", "Application startup complete", 60),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault(cluster: Any, fault: str) -> None:
    who, verdict, words, line, limit = FAULTS[fault]
    node = getattr(cluster, who)
    said = launch(cluster, fault)
    took = since_end(node) if line is None else since(node, line)
    assert said.rc == 2
    assert f"alpha: {node.name} (rank {0 if who == 'head' else 1})" in said.text
    assert f"[{verdict}]" in said.text
    assert words in said.text
    assert "ready: fake answers" not in said.text
    print(f"{fault}: {took:.1f} s from the cause to the end of the play")
    assert took <= limit


def test_a_file_that_is_missing_on_both_ranks(cluster: Any) -> None:
    """Both die of it in the same second; whichever was first is named, and the other one is said to have it, too."""
    said = launch(cluster, "load_error")
    assert said.rc == 2
    assert "[ckpt-missing-file]" in said.text
    for number, node in enumerate((cluster.head, cluster.worker)):
        assert f"{node.name} (rank {number})" in said.text


def test_launch_headless(cluster: Any) -> None:
    """Case launch-headless: the worker is named; the head would wait for ever without a line."""
    said = launch(cluster, "", launch_worker_without=["--headless"])
    took = since(cluster.worker, "collective_rpc should not be called")
    assert said.rc == 2
    assert f"alpha: {cluster.worker.name} (rank 1)" in said.text
    assert "[launch-headless]" in said.text
    print(f"launch-headless: {took:.1f} s")
    assert took <= 15


def test_launch_wrong_master(cluster: Any, tmp_path: Path) -> None:
    """The inventory names an address for the head at which nothing is; by itself the worker would try for 30 minutes."""
    wrong = {"all": {"hosts": {cluster.head.name: {"fabric_address": "198.51.100.250"}}}}
    (tmp_path / "hosts.json").write_text(json.dumps(wrong))
    budgets = {**BUDGETS, "rendezvous_s": 180}
    begun = time.time()
    said = launch(cluster, "", options=("-i", str(tmp_path / "hosts.json")), readiness_budgets=budgets)
    assert said.rc == 2
    assert f"alpha: {cluster.worker.name} (rank 1)" in said.text
    assert "nothing answers at 198.51.100.250:29521" in said.text
    assert "[launch-wrong-master]" in said.text
    print(f"launch-wrong-master: {time.time() - begun:.1f} s from the start of the play")
    assert since(cluster.worker, "Launching vLLM") <= 60


def test_a_good_start_says_each_stage_once(cluster: Any) -> None:
    said = launch(cluster, "", env={"FAKE_ENGINE_START_S": "12"})
    assert said.rc == 0
    lines = [line for line in said.raw.splitlines() if line.startswith("alpha  ")]
    assert len(lines) == len(set(lines))
    assert max(len(line) for line in lines) <= 100
    assert sum("ready: fake answers, 2 of 2 ranks alive, first token after" in line for line in lines) == 1
    assert any(line.startswith('alpha  smoke: "') for line in lines)
    assert any(
        line.startswith("alpha  smoke: 16 tokens, first token after") and line.endswith("tokens/s") for line in lines
    )
    assert len([line for line in lines if cluster.worker.name in line]) >= 4


def test_json_lines(cluster: Any) -> None:
    said = launch(cluster, "", readiness_output="json")
    lines = [json.loads(line) for line in said.raw.splitlines() if line.startswith('{"cluster"')]
    assert lines[-1]["ready"] is True
    assert [rank["rank"] for rank in lines[0]["ranks"]] == [0, 1]


def test_diagnose_and_verify(cluster: Any) -> None:
    """On a cluster that serves, then with its worker killed (the head is idle and says 200)."""
    assert launch(cluster, "").rc == 0
    assert "serving: " in cluster.play("playbooks/diagnose.yml").text
    assert cluster.play("playbooks/verify.yml").rc == 0
    cluster.worker.run(f"docker kill {RANK}")
    assert "200" in cluster.head.run("curl -s -o /dev/null -w '%{http_code}' http://127.0.0.1:8000/health")
    said = cluster.play("playbooks/verify.yml")
    assert said.rc == 2
    assert f"alpha does not serve: {cluster.worker.name} (rank 1): the rank was killed" in said.text
    assert "[rank-killed]" in cluster.play("playbooks/diagnose.yml").text


def test_evidence_holds_no_secret(cluster: Any, tmp_path: Path) -> None:
    """Planted in the environment of the ranks; looked for in every byte of the bundle."""
    secret = "planted-" + "secret-4711"
    launch(cluster, "rank1:oom", env={"VLLM_API_KEY": secret})
    said = cluster.play(
        "playbooks/evidence.yml", evidence_dir=str(tmp_path), recipe_overrides={"env": {"VLLM_API_KEY": secret}}
    )
    assert said.rc == 0
    (bundle,) = tmp_path.glob("alpha-*.tar.gz")
    with tarfile.open(bundle) as archive:
        names = archive.getnames()
        for item in archive:
            content = archive.extractfile(item)
            assert content and secret.encode() not in content.read(), item.name
    for host in (cluster.head.name, cluster.worker.name):
        for name in ("engine.log", "inspect.json", "kernel.log", "network/gids.txt", "gpu.txt", "proc/buddyinfo"):
            assert any(entry.endswith(f"{host}/{name}") for entry in names), (host, name)
