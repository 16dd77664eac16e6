"""The wait itself: every rank's watcher in a thread of its own, nodes as scripts, one board between them."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ansible.errors import AnsibleActionFail, AnsibleConnectionFailure

from ansible_collections.gb10.fleet.plugins.action import engine_ready
from ansible_collections.gb10.fleet.plugins.module_utils import _engine_log
from ansible_collections.gb10.fleet.plugins.modules import rank_info

LOGS = Path(__file__).parents[2] / "fixtures" / "engine_logs"
MEMBERS = ["spark-01", "spark-02"]
Node = Callable[[dict[str, Any], float], dict[str, Any]]
COMPLETION = {
    **dict.fromkeys(("error", "timed_out", "key_needed")),
    **{"ok": True, "status": 200, "model_listed": True, "listed": ["tiny"], "text": "Hello", "completion_tokens": 16},
    **{"ttft_s": 0.21, "tokens_per_s": 14.2, "total_s": 1.3},
}


def rank(stage: str | None = None, **over: Any) -> dict[str, Any]:
    out: dict[str, Any] = dict.fromkeys(rank_info.UNKNOWN)
    out.update(
        exists=True, running=True, status="running", container_id="c1", restart_count=0, started_at="2026-11-29T12:48:18.5Z",
        argv=["/m"], entrypoint=["vllm"], engine_alive=True, processes_stopped=False, stage=stage, labels={}, waits={}, notes={},
        facts={}, kernel_lines=[], last_lines=["last words"], memory={"free_kib": 22334668}, log_bytes=time.monotonic_ns(),
        activity={"cpu_s": time.monotonic(), "read_bytes": 0}, cursor={"c": 1}, node_time=time.time(),
    )  # fmt: skip
    out.update(over)
    return out


def of_log(name: str, **over: Any) -> dict[str, Any]:
    reader = _engine_log.LogReader()
    reader.feed((LOGS / name).read_bytes(), final=True)
    names = ("stage", "first_error", "fatal", "waits", "facts")
    return rank(**{n: reader.state[n] for n in names}, last_lines=reader.state["last"], **over)


class Cluster:
    """Two nodes as scripts: ``nodes[host](arguments of rank_info, seconds since the beginning)`` -> rank."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.nodes: dict[str, Node] = {}
        self.args: dict[str, Any] = {"container": "vllm_glm53", "url": "http://127.0.0.1:8000", "model": "tiny"}
        self.batch = list(MEMBERS)
        self.forks = 5
        self.said: list[str] = []
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.results: dict[str, Any] = {}

    def action(self, host: str, check: bool = False) -> engine_ready.ActionModule:
        task = SimpleNamespace(args=dict(self.args), _uuid="u1", check_mode=check, async_val=0, action="gb10.fleet.engine_ready",
                               diff=False, collections=None, environment=None, delegate_to=None)  # fmt: skip
        connection = SimpleNamespace(_shell=SimpleNamespace(tmpdir=None), become=None)
        action = engine_ready.ActionModule(task, connection, SimpleNamespace(), None, None, None)
        started = time.monotonic()

        def execute(_name: str, arguments: dict[str, Any], **_kwargs: Any) -> dict[str, Any]:
            self.calls.append((host, arguments))
            time.sleep(0.02)
            return {"changed": False, "rank": self.nodes[host](arguments, time.monotonic() - started)}

        action._execute_module = execute
        return action

    def variables(self, host: str) -> dict[str, Any]:
        return {
            "inventory_hostname": host,
            "topology_cluster": "alpha",
            "topology_members": MEMBERS,
            "topology_rank": MEMBERS.index(host),
            "topology_addresses": {"spark-01": "192.0.2.1", "spark-02": "192.0.2.2"},
            "ansible_play_batch": self.batch,
            "ansible_forks": self.forks,
        }

    def one(self, host: str) -> None:
        try:
            self.results[host] = self.action(host).run(task_vars=self.variables(host))
        except AnsibleActionFail as exc:
            self.results[host] = exc

    def wait(self) -> float:
        """Run both watchers to their end; seconds that it took."""
        begun = time.monotonic()
        threads = [threading.Thread(target=self.one, args=(host,), daemon=True) for host in MEMBERS]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert len(self.results) == 2, "a watcher did not end"
        return time.monotonic() - begun


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    made = Cluster(tmp_path)
    monkeypatch.setattr(engine_ready.C, "DEFAULT_LOCAL_TMP", str(tmp_path))
    monkeypatch.setattr(engine_ready.display, "display", lambda text, *a, **k: made.said.append(text))
    monkeypatch.setattr(engine_ready, "SETTLE_S", 0.1)
    monkeypatch.setattr(engine_ready, "SETTLE_LIMIT_S", 1.0)
    made.nodes = {
        "spark-01": lambda args, t: (
            rank("ready", probe=COMPLETION) if "probe" in args else rank("load" if t < 0.3 else "ready")
        ),
        "spark-02": lambda args, t: rank("load" if t < 0.3 else "kv_cache"),
    }
    return made


def test_ready(cluster: Cluster) -> None:
    cluster.wait()
    for result in cluster.results.values():
        assert not result.get("failed")
        assert result["probe"]["ttft_s"] == 0.21
    assert cluster.said[-1].endswith("ready: tiny answers, 2 of 2 ranks alive, first token after 0.21 s, 14.2 tokens/s")
    assert len(cluster.said) == len(set(cluster.said)), "nothing is said twice"


def test_ready_needs_every_rank_alive_after_the_completion(cluster: Cluster) -> None:
    """The head answers; the worker's container runs, and no engine process is in it."""
    cluster.nodes["spark-02"] = lambda args, t: rank("kv_cache", engine_alive=t > 1)
    assert cluster.wait() > 1
    assert not cluster.results["spark-01"].get("failed")


@pytest.mark.parametrize("ends", ["an end", "an answer"])
def test_what_one_rank_finds_ends_the_waits_of_the_others(cluster: Cluster, ends: str) -> None:
    """A look may wait on its node for seconds: neither a failure nor the last proof of life waits for that."""
    released = threading.Event()

    def worker(args: dict[str, Any], t: float) -> dict[str, Any]:
        if "wait_for" in args:
            released.wait(15)
        return rank("kv_cache")

    cluster.nodes["spark-02"] = worker
    if ends == "an end":
        cluster.nodes["spark-01"] = lambda args, t: rank("load", running=t < 0.3, status="exited", exit_code=1)
    took = cluster.wait()
    released.set()
    assert took < 10
    assert bool(cluster.results["spark-01"].get("failed")) is (ends == "an end")


def test_the_log_is_never_asked_for_twice(cluster: Cluster) -> None:
    cluster.wait()
    looks = [arguments for host, arguments in cluster.calls if host == "spark-02"]
    assert "cursor" not in looks[0]
    assert all(arguments["cursor"] == {"c": 1} for arguments in looks[1:])


def test_a_worker_that_dies_ends_all_and_is_named(cluster: Cluster) -> None:
    """The head shouts; the worker was killed without a word."""
    dead = {"running": False, "status": "exited", "exit_code": 137, "finished_at": "2026-11-29T12:18:10Z"}
    cluster.nodes = {
        "spark-01": lambda args, t: rank("load") if t < 0.5 else of_log("worker_killed_in_flight_head.log"),
        "spark-02": lambda args, t: rank("load", **(dead if t > 0.5 else {})),
    }
    took = cluster.wait()
    assert took < 5
    worker, head = cluster.results["spark-02"], cluster.results["spark-01"]
    assert worker["failed"] and head["failed"]
    assert worker["diagnosis"]["id"] == "rank-killed"
    assert worker["msg"].startswith("alpha: spark-02 (rank 1), loading weights, after 00:0")
    assert head["diagnosis"] == {"cluster": "alpha", "node": "spark-02", "rank": 1, "id": "rank-killed"}
    assert head["msg"].startswith(
        "cluster alpha did not become ready, because of spark-02 (rank 1): the rank was killed"
    )


def test_the_cause_of_a_summary_is_waited_for(cluster: Cluster) -> None:
    """First the log says only "EngineCore failed to start."; the exception comes with the next look."""
    lines = (LOGS / "worker_without_headless_worker.log").read_text().splitlines()
    cut = next(i for i, line in enumerate(lines) if "EngineCore failed to start" in line) + 1
    (cluster.folder / "cut.log").write_text("\n".join(lines[:cut]) + "\n")
    cluster.nodes = {
        "spark-01": lambda args, t: rank("loaded"),
        "spark-02": lambda args, t: of_log(
            str(cluster.folder / "cut.log") if t < 0.05 else "worker_without_headless_worker.log"
        ),
    }
    cluster.wait()
    assert cluster.results["spark-02"]["diagnosis"]["id"] == "launch-headless"


def test_a_node_that_is_gone_is_told_by_the_head(cluster: Cluster) -> None:
    def unreachable(args: dict[str, Any], t: float) -> dict[str, Any]:
        if t > 0.2:
            raise AnsibleConnectionFailure("ssh: connect to host 198.18.0.12 port 22: No route to host")
        return rank("load")

    cluster.args["budgets"] = {"unreachable_s": 1}
    cluster.nodes = {"spark-01": lambda args, t: rank("load"), "spark-02": unreachable}
    assert cluster.wait() < 8
    head = cluster.results["spark-01"]
    assert head["diagnosis"]["id"] == "rank-unreachable"
    assert "No route to host" in head["msg"]
    assert cluster.results["spark-02"]["failed"]


def test_a_completion_that_never_comes(cluster: Cluster) -> None:
    silent = {
        **COMPLETION,
        "ok": False,
        "timed_out": True,
        "error": "POST /v1/chat/completions gave no answer within 10 s",
    }
    cluster.args["budgets"] = {"first_token_s": 1}
    cluster.nodes["spark-01"] = lambda args, t: rank("ready", probe=silent if "probe" in args else None)
    cluster.nodes["spark-02"] = lambda args, t: rank("kv_cache")
    cluster.wait()
    said = cluster.results["spark-01"]["diagnosis"]
    assert (said["id"], said["node"]) == ("endpoint-silent", "spark-01")
    assert "gave no answer within 10 s" in said["cause"]


def test_a_key_that_is_missing_is_said_at_once(cluster: Cluster) -> None:
    closed = {
        **COMPLETION,
        "ok": False,
        "status": 401,
        "model_listed": None,
        "key_needed": True,
        "error": "a key is needed",
    }
    cluster.nodes["spark-01"] = lambda args, t: rank("ready", probe=closed if "probe" in args else None)
    assert cluster.wait() < 4
    assert cluster.results["spark-01"]["diagnosis"]["id"] == "endpoint-key"


def test_another_model_on_the_port(cluster: Cluster) -> None:
    other = {**COMPLETION, "ok": False, "model_listed": False, "listed": ["llama"], "error": "x"}
    cluster.nodes["spark-01"] = lambda args, t: rank("ready", probe=other if "probe" in args else None)
    cluster.wait()
    assert cluster.results["spark-01"]["diagnosis"]["cause"] == "the endpoint lists llama, not tiny"


def test_another_container_than_the_one_started(cluster: Cluster) -> None:
    cluster.args["container_id"] = "c0"
    cluster.wait()
    assert cluster.results["spark-01"]["diagnosis"]["id"] == "rank-restarted"


def test_still_and_busy_ranks(cluster: Cluster) -> None:
    """Log and CPU still for longer than still_s: stuck. CPU time that goes on: not."""
    cluster.args["budgets"] = {"still_s": 1}
    cluster.nodes = {
        "spark-01": lambda args, t: rank("load"),
        "spark-02": lambda args, t: rank("load", log_bytes=7, activity={"cpu_s": 3.0, "read_bytes": 5}),
    }
    cluster.wait()
    assert cluster.results["spark-02"]["diagnosis"]["id"] == "stage-still"


def test_reading_is_a_sign_of_life(cluster: Cluster) -> None:
    """Case launch-ray-silent: quiet, but it reads its shards."""
    cluster.args["budgets"] = {"still_s": 0.6}

    def reader(args: dict[str, Any], t: float) -> dict[str, Any]:
        seen = {"cpu_s": 3.0, "read_bytes": int(t * 1e9)}
        return rank("load" if t < 1.5 else "kv_cache", log_bytes=7, activity=seen)

    serving = cluster.nodes["spark-01"]
    cluster.nodes = {"spark-01": lambda args, t: serving(args, 0.0 if t < 1.5 else t), "spark-02": reader}
    cluster.wait()
    assert not cluster.results["spark-02"].get("failed")


def test_json_output(cluster: Cluster) -> None:
    cluster.args["output"] = "json"
    cluster.wait()
    lines = [json.loads(line) for line in cluster.said]
    assert lines[0]["ranks"][0] == {
        "node": "spark-01",
        "rank": 0,
        "stage": "load",
        "percent": None,
        "left_s": None,
        "free_gib": 21.3,
    }
    assert lines[-1]["ready"] is True


def test_quiet_output(cluster: Cluster) -> None:
    cluster.args["output"] = "quiet"
    cluster.wait()
    assert cluster.said == []


def test_too_few_forks(cluster: Cluster) -> None:
    cluster.forks = 1
    cluster.one("spark-01")
    assert str(cluster.results["spark-01"]).startswith(
        "2 ranks are watched at the same time and Ansible has 1 forks. Run with --forks 2 or set forks in ansible.cfg."
    )


def test_a_rank_outside_the_play(cluster: Cluster) -> None:
    cluster.batch = ["spark-01"]
    cluster.one("spark-01")
    assert "spark-02 is not in this play" in str(cluster.results["spark-01"])


def test_a_misspelt_budget(cluster: Cluster) -> None:
    cluster.args["budgets"] = {"laod_s": 5}
    cluster.one("spark-01")
    assert str(cluster.results["spark-01"]).startswith("budgets: there is no laod_s; known are start_s, rendezvous_s")


def test_check_mode_waits_for_nothing(cluster: Cluster) -> None:
    result = cluster.action("spark-01", check=True).run(task_vars=cluster.variables("spark-01"))
    assert result["skipped"]
    assert cluster.calls == []


def test_first_verdict_stays(tmp_path: Path) -> None:
    board = engine_ready.Board(tmp_path / "b")
    board.put_first("verdict", {"id": "a"})
    board.put_first("verdict", {"id": "b"})
    assert board.get("verdict") == {"id": "a"}
    assert board.get("none") is None
