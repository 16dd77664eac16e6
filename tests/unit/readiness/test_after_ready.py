"""What follows readiness: the warm-up's shapes, the smoke request, the learned KV cache, and a cluster at one moment."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ansible.errors import AnsibleActionFail
from ansible.module_utils.testing import patch_module_args

from ansible_collections.gb10.fleet.plugins.action import cluster_report, kv_cache_learn
from ansible_collections.gb10.fleet.plugins.module_utils import _learned, _rank_report, _rank_state
from ansible_collections.gb10.fleet.plugins.module_utils._warmup import warmup_plan
from ansible_collections.gb10.fleet.plugins.modules import chat_requests

# As the seed's recipe: glm-5.3-flash-nvfp4.
ARGS = {"max-model-len": 262144, "max-num-seqs": 6, "block-size": 2304, "max-num-batched-tokens": 8192}


# --- warm-up ----------------------------------------------------------------------------------------------------------------
def test_warmup_none_and_chat() -> None:
    assert warmup_plan({"warmup": "none", "args": ARGS}) == []
    assert [r["concurrency"] for r in warmup_plan({"args": ARGS})] == [1, 1]


def test_warmup_shapes() -> None:
    """Under and over one chunk of prefill, across two blocks, and 2, 4, 6 answers at once (max-num-seqs 6)."""
    plan = warmup_plan({"warmup": "shapes", "args": ARGS})
    assert [r["prompt_tokens"] for r in plan if r["concurrency"] == 1] == [16, 512, 8176, 10240, 4624]
    assert [r["concurrency"] for r in plan if r["concurrency"] > 1] == [2, 4, 6]


def test_warmup_never_asks_for_more_than_the_engine_takes() -> None:
    plan = warmup_plan({"args": {"max-model-len": 2048, "max_num_seqs": 4}}, "shapes")
    assert max(r["prompt_tokens"] for r in plan) == 2048 - 64 - 16
    assert all(r["prompt_tokens"] + r["max_tokens"] < 2048 for r in plan)


@pytest.fixture
def ask(engine: Any, capfd: pytest.CaptureFixture[str]) -> Any:
    def run(**args: Any) -> dict[str, Any]:
        with patch_module_args({"url": engine.url, "model": "tiny", **args}), pytest.raises(SystemExit):
            chat_requests.main()
        return dict(json.loads(capfd.readouterr().out))

    return run


def test_smoke_request(ask: Any, engine: Any) -> None:
    engine.delay_s = 0.02
    result = ask(requests=[{"prompt": "Say hello.", "max_tokens": 64}])
    assert engine.bodies[0]["messages"][0]["content"] == "Say hello."
    first, second = _rank_report.smoke_text({**result["answers"][0]}, "alpha").splitlines()
    assert first == 'alpha  smoke: "Hello there you"'
    assert second.startswith("alpha  smoke: 3 tokens, first token after 0.0")
    assert second.endswith("tokens/s")
    assert len(_rank_report.words({"text": "word " * 99})) == 80


def test_shapes_are_sent_at_once(ask: Any, engine: Any) -> None:
    engine.delay_s = 0.1
    result = ask(requests=[{"prompt_tokens": 64, "concurrency": 4}])
    assert len(result["answers"]) == 4
    assert result["seconds"] < 1.1, "one after the other they would take 1.2 s"
    prompts = [body["messages"][0]["content"] for body in engine.bodies]
    assert len({prompt.split()[0] for prompt in prompts}) == 4, "each begins differently, no prefix cache shortens it"


def test_a_prompt_that_is_too_long_is_halved(ask: Any, engine: Any) -> None:
    """Another tokenizer makes more of the same words."""
    original = chat_requests.Endpoint.chat

    def strict(self: Any, model: str, prompt: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
        if len(prompt.split()) > 300:
            return {"status": 400, "error": "This model's maximum context length is 2048 tokens.", "text": None}
        return original(self, model, prompt, *args, **kwargs)

    chat_requests.Endpoint.chat = strict  # type: ignore[method-assign]
    try:
        result = ask(requests=[{"prompt_tokens": 1000}])
    finally:
        chat_requests.Endpoint.chat = original  # type: ignore[method-assign]
    assert not result.get("failed")
    assert len(engine.bodies[0]["messages"][0]["content"].split()) in range(200, 300)


def test_a_failed_request_is_said(ask: Any, engine: Any) -> None:
    engine.status = 500
    result = ask(requests=[{"prompt": "x"}])
    assert result["failed"]
    assert result["msg"].endswith("failed: EngineCore encountered an issue..")


# --- kv_cache_memory: learn -----------------------------------------------------------------------------------------------
RECIPE = {"name": "glm", "image": {"reference": "r:1", "digest": None}, "args": ARGS, "env": {}, "nodes": 2}


def learn(tmp_path: Path, size: int, recipe: dict[str, Any] = RECIPE) -> dict[str, Any]:
    args = {
        "proposal": {"bytes": size, "ranks": {"spark-01": 9169698816, "spark-02": size}},
        "learned_dir": str(tmp_path),
    }
    task = SimpleNamespace(args=args, async_val=0, check_mode=False, action="x", diff=False)
    connection = SimpleNamespace(_shell=SimpleNamespace(tmpdir="/x"))
    action = kv_cache_learn.ActionModule(task, connection, None, None, None, None)
    return action.run(task_vars={"topology_cluster": "alpha", "topology_recipe": recipe})


def test_learned_figure_holds_for_this_cluster_image_and_recipe_only(tmp_path: Path) -> None:
    assert learn(tmp_path, 5948473344)["new"] is True
    assert _learned.kv_cache_memory(tmp_path, "alpha", RECIPE) == 5948473344
    assert _learned.kv_cache_memory(tmp_path, "beta", RECIPE) is None
    assert _learned.kv_cache_memory(tmp_path, "alpha", {**RECIPE, "image": {"reference": "r:2"}}) is None
    assert _learned.kv_cache_memory(tmp_path, "alpha", {**RECIPE, "args": {**ARGS, "max-num-seqs": 4}}) is None


def test_learned_figure_is_found_again_once_it_is_used(tmp_path: Path) -> None:
    """The setting itself is not part of the key: else the first use would lose it."""
    learn(tmp_path, 5948473344)
    pinned = {**RECIPE, "args": {**ARGS, "kv-cache-memory": 5948473344}}
    assert _learned.kv_cache_memory(tmp_path, "alpha", pinned) == 5948473344


def test_the_same_figure_is_not_new(tmp_path: Path) -> None:
    learn(tmp_path, 5948473344)
    assert learn(tmp_path, 5948473344)["new"] is False
    assert learn(tmp_path, 6000000000)["new"] is True


def test_a_damaged_file_is_no_figure(tmp_path: Path) -> None:
    _learned.path_of(tmp_path, "alpha").write_text("{")
    assert _learned.kv_cache_memory(tmp_path, "alpha", RECIPE) is None
    assert learn(tmp_path, 7)["new"] is True


# --- one moment -------------------------------------------------------------------------------------------------------------
def rank(host: str, **over: Any) -> dict[str, Any]:
    return {
        **{"host": host, "rank": int(host[-1]) - 1, "at": 100.0, "node_time": 100.0, "group_since": 100.0},
        **{"exists": True, "running": True, "status": "running", "restart_count": 0, "engine_alive": True},
        **{
            "stage": "kv_cache" if host[-1] == "2" else "ready",
            "argv": ["/m"],
            "entrypoint": ["vllm"],
            "spec_matches": True,
        },
        **{"facts": {}, "notes": {}, "waits": {}, "memory": {"free_kib": 22334668}, "last_lines": []},
        **{"started_at": "2026-11-29T12:48:18.5Z", **over},
    }


ANSWER = {"ok": True, "text": "Hello", "completion_tokens": 16, "ttft_s": 0.21, "tokens_per_s": 14.2, "error": None}
SETTINGS = {"budgets": dict(_rank_state.BUDGETS), "container": "x", "master": None, "model": "tiny", "waiting": False}


def moment(*ranks: dict[str, Any]) -> _rank_report.Report:
    return _rank_report.report("alpha", "http://h:8000", ranks, SETTINGS, {}, 100.0)


def test_a_cluster_that_serves() -> None:
    said = moment(rank("spark-01", probe=ANSWER, gpu={"utilization_percent": 96.0, "power_w": 42.0}), rank("spark-02"))
    assert said.serving
    assert said.diagnosis is None
    assert "GPU 96 %, 42 W while it answered" in said.text
    assert max(len(line) for line in said.text.splitlines()) <= 100


def test_ready_health_200_is_not_serving() -> None:
    """Everything runs, the completion does not come."""
    hung = {
        **ANSWER,
        "ok": False,
        "key_needed": False,
        "model_listed": True,
        "error": "POST /v1/chat/completions gave no answer within 10 s",
    }
    said = moment(rank("spark-01", probe=hung), rank("spark-02"))
    assert not said.serving
    assert said.diagnosis and said.diagnosis["id"] == "endpoint-silent"


def test_a_dead_worker_is_not_serving_whatever_the_head_says() -> None:
    said = moment(rank("spark-01", probe=ANSWER), rank("spark-02", running=False, status="exited", exit_code=137))
    assert not said.serving
    assert said.diagnosis and (said.diagnosis["node"], said.diagnosis["id"]) == ("spark-02", "rank-killed")
    assert "alpha: spark-02 (rank 1), at the KV cache: the rank was killed" in said.text


def test_a_rank_on_its_way_is_no_trouble() -> None:
    refused = {
        **ANSWER,
        "ok": False,
        "key_needed": False,
        "model_listed": None,
        "error": "nothing listens on 127.0.0.1:8000",
    }
    said = moment(rank("spark-01", stage="load", probe=refused), rank("spark-02", stage="load"))
    assert (said.serving, said.diagnosis) == (False, None)
    assert "no trouble seen; not serving yet" in said.text


def test_a_node_without_an_answer_is_a_row() -> None:
    silent = _rank_report.unreachable(
        "spark-02", 1, 100.0, "ssh: connect to host 198.18.0.12 port 22: No route to host"
    )
    said = moment(rank("spark-01", probe=ANSWER), silent)
    assert not said.serving
    assert "no answer" in said.text
    assert said.diagnosis and said.diagnosis["id"] == "rank-unreachable"


def action(ranks: dict[str, Any], host: str = "spark-01", **args: Any) -> dict[str, Any]:
    task = SimpleNamespace(args={"report": "r", **args}, async_val=0, check_mode=False, action="x", diff=False)
    connection = SimpleNamespace(_shell=SimpleNamespace(tmpdir="/x"))
    made = cluster_report.ActionModule(task, connection, None, None, None, None)
    members = ["spark-01", "spark-02"]
    facts = {
        "members": members,
        "recipe": {"readiness": {}, "master_port": 1, "fabric": {"transport": "roce"}},
        "head": "spark-01",
        "addresses": {"spark-01": "192.0.2.1", "spark-02": "192.0.2.2"},
        "spec": {"name": "x"},
        "size": 2,
        "probe": {"model": "tiny"},
        "cluster": "alpha",
        "endpoint": "http://h:8000",
    }
    variables = {f"topology_{name}": value for name, value in facts.items()}
    variables.update(inventory_hostname=host, ansible_play_hosts=members, ansible_play_hosts_all=members)
    return made.run(task_vars={**variables, "hostvars": {m: {"r": {"rank": ranks.get(m)}} for m in members}})


def test_verify_passes_and_fails() -> None:
    good = {"spark-01": rank("spark-01", probe=ANSWER), "spark-02": rank("spark-02")}
    assert action(good, require_serving=True)["serving"] is True
    assert action(good, host="spark-02", require_serving=True)["skipped"]
    bad = {**good, "spark-02": rank("spark-02", exists=False, running=False, status="absent")}
    with pytest.raises(
        AnsibleActionFail, match=r"alpha does not serve: spark-02 \(rank 1\): there is no container x on"
    ):
        action(bad, require_serving=True)
    assert action(bad)["diagnosis"]["id"] == "rank-missing"
