"""What figures mean: the public cases of qualification, from their own figures, and what the nodes add."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from ansible_collections.gb10.fleet.plugins.filter import qualify as filters
from ansible_collections.gb10.fleet.plugins.module_utils import _qualify, _qualify_client, _qualify_nodes

from .conftest import ROOT, line

CASES = ROOT / "tests/fixtures/cases"
GLM = {
    "max-model-len": 262144, "max-num-seqs": 6, "block-size": 2304, "enable-auto-tool-choice": True,
    "speculative-config": {"method": "mtp", "num_speculative_tokens": 4},
}  # fmt: skip


def plan(size: str = "full", args: dict[str, Any] | None = None, **over: Any) -> dict[str, Any]:
    return {**_qualify.plan({"args": {**GLM, **(args or {})}, "expect": {"checks": ["not_empty"]}}, size), **over}


def measured(
    tokens: int, cached: int | None, hits: float | None, repeats: int = 3, cold_s: float = 9.0, cached_s: float = 9.0
) -> dict[str, Any]:
    """What a client saw of one prompt and its repeats."""
    base = {
        "at": 0.0,
        "status": 200,
        "error": None,
        "completion_tokens": 16,
        "total_s": 10.0,
        "tokens_per_s": None,
        "prompt_tokens": tokens,
    }
    rows = [{**base, "stage": "cold", "cached_tokens": 0 if cached is not None else None, "ttft_s": cold_s}]
    rows += [{**base, "stage": "cached", "cached_tokens": cached, "ttft_s": cached_s} for n in range(repeats)]
    counters = {"queries": float(tokens * repeats), "hits": hits} if hits is not None else {}
    return {
        "began": 0.0, "ended": 60.0, "requests": rows,
        "stages": [{"name": "cached", "began": 9.0, "ended": 40.0, "counters": counters}],
        "concurrency": [], "limit": None, "soak": None, "checks": {}, "ended_early": None,
        "metrics": {"error": "HTTP 404", "before": None, "after": None, "reset": None},
    }  # fmt: skip


def judged(
    what: dict[str, Any], the_plan: dict[str, Any] | None = None, nodes: dict[str, Any] | None = None, **expect: Any
) -> dict[str, Any]:
    return _qualify.judge({"cluster": "alpha", "recipe": "glm", "plan": the_plan or plan(), "expect": expect, "measured": what,
                           "nodes": nodes or {}, "provenance": {}})  # fmt: skip


def looked(**over: Any) -> dict[str, Any]:
    """One node on which nothing happened."""
    end = {"k": "end", "at": 60.0, "seconds": 60.0, "faults": [], "kernel_faults": 0, "rdma": {}, "threads": [], "gpu_error": "",
           "cost": {"percent_of_a_core": 0.1}, **over.pop("end", {})}  # fmt: skip
    lines = "\n".join(json.dumps(row) for row in ({"k": "start", "at": 0.0}, *over.pop("samples", []), end))
    before = {"container_id": "a", "started_at": "t", "node_time": 0.0, "facts": over.pop("facts", {})}
    return _qualify_nodes.node(over.pop("rank", 0), lines, before, {**before, "engine_alive": True, **over})


# --- prefix cache ----------------------------------------------------------------------------------------------------
def test_qual_prefix_zero() -> None:
    """Public figures: blocks of 3,584 tokens; 2,015 tokens give 0 hits, 8,015 give 7,168, 32,015 give 28,672 of 28,672."""
    text = (CASES / "qual-prefix-zero.txt").read_text(encoding="utf-8")
    block = int(re.search(r"block size to (\d+)", text)[1])  # type: ignore[index]
    assert [_qualify.expected_cached(tokens, block, False) for tokens in (2015, 8015, 32015)] == [0, 7168, 28672]
    the_plan = plan(args={"block-size": block, "speculative-config": None})
    short = judged(measured(2015, 0, 0.0), the_plan)
    assert line(short, "prefix_hit_ratio")["status"] == "not applicable"
    assert line(short, "prefix_hit_ratio")["why"] == "0 hits: prompt 2,015 tokens is below one block of 3,584."
    broken = judged(measured(8015 + 3584, 0, 0.0), the_plan)
    assert line(broken, "prefix_hit_ratio")["why"] == "cache broken: 3 blocks repeated 3 times, 0 hits."
    assert broken["verdict"] == "fail"
    assert line(judged(measured(8015, 7168, 7168.0 * 3), the_plan), "prefix_cached_tokens")["status"] == "pass"


def test_the_issues_own_sentence() -> None:
    result = judged(measured(1900, 0, 0.0), plan(args={"speculative-config": None}))
    assert line(result, "prefix_cached_tokens")["why"] == "0 hits: prompt 1,900 tokens is below one block of 2,304."


def test_a_drafter_drops_the_last_block() -> None:
    """Seed: 258,048 = 112 × 2,304 of a 262,144-token request; ngram keeps the last one."""
    assert _qualify.expected_cached(261632, 2304, True) == 258048
    assert plan()["drops_last_block"] and plan()["prompt_tokens"] == 261632
    assert not plan(args={"speculative-config": '{"method": "ngram"}'})["drops_last_block"]
    one_block = judged(measured(3000, 0, 0.0))
    assert (
        "holds no more than 1 whole block (a drafter drops the last one)"
        in line(one_block, "prefix_cached_tokens")["why"]
    )


def test_the_counter_stays_zero_while_caching_works() -> None:
    """vllm#45238: judged by counter, cached_tokens and TTFT together."""
    result = judged(measured(261632, 258048, 0.0, cold_s=191.7, cached_s=2.98))
    assert line(result, "prefix_hit_ratio")["status"] == "pass"
    assert "the counter is what is broken" in result["findings"][0]["text"]
    silent = judged(measured(261632, None, None, cold_s=191.7, cached_s=2.98))
    assert "repeats start 64 times faster" in line(silent, "prefix_hit_ratio")["why"]
    assert line(silent, "prefix_hit_ratio")["status"] == "not applicable"


def test_caching_switched_off() -> None:
    result = judged(measured(261632, 0, 0.0), plan(args={"no-enable-prefix-caching": True}))
    assert line(result, "prefix_hit_ratio")["why"].startswith("cache broken")
    assert line(result, "prefix_hit_ratio")["next"] == "The recipe's args switch prefix caching off."


def test_figures_of_the_whole_context_hold_for_it_alone() -> None:
    short = judged(measured(8064, 4608, 3 * 4608.0), plan("quick"), ttft_cold_s=191.7, context_tokens=262144)
    assert line(short, "ttft_cold_s")["status"] == "not applicable"
    assert "262,144 tokens, this prompt has 8,064" in line(short, "ttft_cold_s")["why"]
    slow = judged(measured(261632, 258048, 3 * 258048.0, cold_s=230.0), ttft_cold_s=191.7, context_tokens=262144)
    assert line(slow, "ttft_cold_s")["status"] == "fail"


# --- the other cases -------------------------------------------------------------------------------------------------
def test_qual_acceptance_tax() -> None:
    share = float(re.search(r"accepted/drafted = ([\d.]+)", (CASES / "qual-acceptance-tax.txt").read_text())[1])  # type: ignore[index]
    what = measured(261632, 258048, 3 * 258048.0)
    zero = dict.fromkeys(_qualify_client.COUNTERS, 0.0)
    what["metrics"] = {"error": None, "reset": None, "before": zero,
                       "after": {**zero, "draft_tokens": 1000.0, "accepted_tokens": share * 1000, "prompt_tokens": 4 * 261632.0,
                                 "hits": 3 * 258048.0}}  # fmt: skip
    result = judged(what, acceptance=0.508)
    assert line(result, "acceptance")["status"] == "fail"
    assert line(result, "acceptance")["why"].startswith("147 of 1,000 drafted tokens")
    assert line(result, "counters")["status"] == "pass"
    what["metrics"]["after"]["prompt_tokens"] += 5000
    assert "someone else used it" in line(judged(what), "counters")["why"]


@pytest.mark.parametrize(("method", "status"), [("mtp", "fail"), ("ngram", "not applicable")])
def test_nothing_was_drafted(method: str, status: str) -> None:
    """A drafter that is a model always proposes; n-grams only where the text repeats itself (seen with a real vLLM)."""
    what = measured(261632, 258048, 3 * 258048.0)
    zero = dict.fromkeys(_qualify_client.COUNTERS, 0.0)
    what["metrics"] = {"error": None, "reset": None, "before": zero, "after": zero}
    result = judged(what, plan(args={"speculative-config": {"method": method}}))
    assert line(result, "acceptance")["status"] == status


def test_qual_concurrency3() -> None:
    """Two of 199K tokens work, the third ends the engine."""
    what = measured(261632, 258048, 3 * 258048.0)
    good = {"tokens": 512, "seconds": 9.0, "tokens_per_s": 55.0, "errors": 0, "error": None}
    what["concurrency"] = [{**good, "streams": 1}, {**good, "streams": 2},
                           {**good, "streams": 3, "errors": 1, "error": "EngineCore encountered an issue"}]  # fmt: skip
    result = judged(what, plan(args={"max-num-seqs": 3}))
    assert line(result, "concurrency")["status"] == "fail"
    assert line(result, "concurrency")["measured"] == 2
    assert line(result, "concurrency")["why"].startswith("3 requests at once: 1 failed (EngineCore")
    what["concurrency"][2] = {**good, "streams": 3}
    what["limit"] = {**good, "streams": 3, "prompt_tokens": 261632, "errors": 3, "error": "the connection broke"}
    assert (
        "3 requests of 261,632 tokens at once"
        in line(judged(what, plan(args={"max-num-seqs": 3})), "concurrency")["why"]
    )
    assert plan(args={"max-num-seqs": 3})["concurrency"] == [1, 2, 3] and plan()["limit"]


def test_qual_rank_kv_gap() -> None:
    gib = re.findall(r"memory: ([\d.]+)", (CASES / "qual-rank-kv-gap.txt").read_text())
    nodes = {f"spark-{n}": looked(rank=n, facts={"kv_available_gib": value}) for n, value in enumerate(gib)}
    found = judged(measured(261632, 258048, 3 * 258048.0), nodes=nodes)["findings"]
    assert [f["node"] for f in found] == ["spark-1"]
    assert "5.54 GiB for the KV cache, the best rank 8.54 GiB" in found[0]["text"]


def test_launch_kv_pin() -> None:
    """A pinned cache that passes short prompts can die on its first one of 28K tokens."""
    args = {"kv-cache-memory": 12345678}
    short = judged(measured(8064, 4608, 3 * 4608.0), plan("quick", args))
    assert "kv-cache-memory is pinned and the longest prompt had 8,064" in short["findings"][0]["text"]
    assert judged(measured(65536, 62208, 3 * 62208.0), plan("standard", args))["findings"] == []


def test_qual_nccl_16g() -> None:
    """A 16 GB buffer has frozen a node: a qualification moves no data but its requests."""
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "roles/qualify").rglob("*.yml")]
    assert not any(word in text for text in sources for word in ("all_gather_perf", "nccl", "fabric_bandwidth"))


# --- nodes -----------------------------------------------------------------------------------------------------------
def test_faults_belong_to_their_node() -> None:
    storm = [
        {"name": "python3", "engine": False, "count": 5210},
        {"name": "VLLM::Worker_TP1", "engine": True, "count": 3},
    ]
    nodes = {"spark-01": looked(), "spark-02": looked(rank=1, end={"faults": storm, "kernel_faults": 5213})}
    result = judged(measured(261632, 258048, 3 * 258048.0), nodes=nodes)
    assert (line(result, "major_faults")["status"], line(result, "major_faults")["why"]) == ("fail", "spark-02: 3.")
    assert line(result, "other_major_faults")["why"] == "spark-02: 5,210."
    assert {f["node"] for f in result["findings"]} == {"spark-02"}
    assert "python3 5,210" in result["findings"][1]["text"]
    calm = judged(measured(261632, 258048, 3 * 258048.0), nodes={"spark-01": looked(), "spark-02": looked(rank=1)})
    assert (line(calm, "major_faults")["status"], line(calm, "major_faults")["measured"]) == ("pass", 0)


def ended(**over: Any) -> dict[str, Any]:
    what = measured(261632, 258048, 3 * 258048.0)
    return {
        **what,
        "ended_early": {
            "stage": "decode",
            "error": "no answer within 300 s",
            "status": None,
            "key_needed": False,
            **over,
        },
    }


@pytest.mark.parametrize(
    ("node", "words"),
    [
        (
            lambda: looked(rank=1, processes_stopped=True, engine_alive=False),
            "spark-02: a process of the rank is stopped",
        ),
        (lambda: looked(rank=1, engine_alive=False), "spark-02: no engine process is alive"),
        (lambda: looked(rank=1, started_at="later"), "spark-02: the rank was started anew"),
    ],
)
def test_who_ended_the_run(node: Callable[[], dict[str, Any]], words: str) -> None:
    """A worker frozen, gone, or restarted in the middle is named."""
    result = judged(ended(), nodes={"spark-01": looked(), "spark-02": node()})
    assert line(result, "answers")["why"] == f"The run ended in stage decode: no answer within 300 s. {words}."


def test_a_restart_between_two_answers() -> None:
    result = judged(measured(261632, 258048, 3 * 258048.0), nodes={"spark-01": looked(container_id="b")})
    assert line(result, "restarts")["status"] == "fail"


def test_power_and_heat_under_load() -> None:
    """Seed: 78 W and 86 °C without the clock cap, 47-50 W and 69-71 °C with it. Idle readings say nothing."""
    idle = {
        "k": "s",
        "at": 1.0,
        "util": 0,
        "power": 12.0,
        "temp": 45.0,
        "clock": 208,
        "avail": 20 << 20,
        "free": 9 << 20,
        "soc": 60.5,
    }
    busy = {**idle, "util": 96, "power": 78.0, "temp": 86.0, "clock": 2418}
    hot = looked(samples=[idle, busy, {**busy, "at": 5.0}])
    assert (hot["power_w"], hot["gpu_celsius"], hot["memory_available_min_gib"], hot["soc_celsius"]) == (
        78.0,
        86.0,
        20.0,
        60.5,
    )
    result = judged(measured(261632, 258048, 3 * 258048.0), nodes={"spark-01": hot}, power_w=50, gpu_celsius=71)
    assert [line(result, key)["status"] for key in ("power_w", "gpu_celsius")] == ["fail", "fail"]
    assert "tune_thermal.yml" in line(result, "power_w")["next"]


def test_errors_of_fabric_and_kernel() -> None:
    xid = {"id": "gpu-xid", "severity": "hard", "time": "30.5", "line": "NVRM: Xid 79", "count": 1}
    old = {**xid, "time": "-50.0"}
    soft = {**xid, "id": "nvrm-benign", "severity": "soft", "line": "NVRM: NoLog"}
    node = looked(kernel_lines=[xid, old, soft], end={"rdma": {"rocep1s0f0/link_downed": 2}})
    result = judged(measured(261632, 258048, 3 * 258048.0), nodes={"spark-01": node})
    assert line(result, "rdma_errors")["why"] == "spark-01: rocep1s0f0/link_downed +2."
    assert line(result, "kernel")["why"] == "spark-01: gpu-xid, NVRM: Xid 79"
    assert len(node["kernel_lines"]) == 2, "what was there before the run is not of this run"
    assert [f["text"] for f in result["findings"]] == ["kernel: nvrm-benign (1 times): NVRM: NoLog"]


def test_a_guard_that_is_on_and_a_sampler_that_is_gone() -> None:
    node = {**looked(), "guard": {"active": True, "summary": ""}}
    gone = _qualify_nodes.node(1, "", {}, {})
    texts = [
        f["text"] for f in judged(measured(261632, 258048, 3 * 258048.0), nodes={"a": node, "b": gone})["findings"]
    ]
    assert any("guard was on" in text for text in texts)
    assert any("the node did not answer at the end" in text for text in texts)


def test_clocks_of_two_nodes() -> None:
    """A node whose clock is an hour ahead is drawn at the right place."""
    lines = json.dumps({"k": "s", "at": 3605.0, "avail": 1 << 20})
    node = _qualify_nodes.node(1, lines, {"node_time": 3600.0}, {}, head_time=0.0)
    assert node["series"]["memory_available_gib"] == [[5.0, 1.0]]


def test_curves_are_thinned_to_their_extremes() -> None:
    points = [[float(n), 5.0] for n in range(7200)]
    points[4321][1] = 99.0
    assert len(_qualify_nodes.thin(points)) <= 240
    assert max(value for _, value in _qualify_nodes.thin(points)) == 99.0


# --- plan and expectations -------------------------------------------------------------------------------------------
def test_plans() -> None:
    quick = plan("quick")
    assert quick["prompt_tokens"] == 8192 and quick["concurrency"] == [1, 2, 4, 6] and quick["block_size"] == 2304
    raised = _qualify.plan({"args": GLM}, "quick", {"block_size": "4608", "max_model_len": "131072"})
    assert raised["prompt_tokens"] == 16128 and raised["max_model_len"] == 131072, "a quick prompt holds three blocks"
    small = _qualify.plan({"args": {"max-model-len": 2048, "max-num-seqs": 4}}, "full")
    assert small["prompt_tokens"] == 1536 and small["decode_tokens"] == 512 and "tool_call" not in small["checks"]
    assert _qualify.steps(1) == [1] and _qualify.steps(6) == [1, 2, 4, 6] and _qualify.steps(8) == [1, 2, 4, 8]


@pytest.mark.parametrize(
    ("expect", "words"),
    [
        ({"decode_token_per_s": 1}, "did you mean decode_tokens_per_s?"),
        ({"checks": ["neddle"]}, "did you mean needle?"),
        ({"tolerance": {"acceptence": 0.1}}, "did you mean acceptance?"),
    ],
)
def test_a_typo_in_expect(expect: dict[str, Any], words: str) -> None:
    with pytest.raises(_qualify.PlanError, match=re.escape(words)):
        _qualify.plan({"args": GLM, "expect": expect})


def test_every_recipe_expects_what_is_measured() -> None:
    import yaml

    for path in (ROOT / "recipes").glob("*.yml"):
        recipe = yaml.safe_load(path.read_text(encoding="utf-8"))
        filters.qualify_plan({"args": recipe.get("args", {}), "expect": recipe.get("expect", {})})


# --- metrics ---------------------------------------------------------------------------------------------------------
def test_counters_of_a_real_page() -> None:
    """vLLM 0.32: `_created` and per-position series beside the counters (recorded with ngram speculation)."""
    page = (ROOT / "tests/fixtures/metrics/vllm-spec-ngram.prom").read_text(encoding="utf-8")
    found = _qualify_client.counters(page)
    assert (found["drafts"], found["draft_tokens"], found["accepted_tokens"]) == (65, 129, 129)
    assert (found["queries"], found["hits"], found["prompt_tokens"], found["generation_tokens"]) == (42, 0, 42, 202)
    plain = (ROOT / "tests/fixtures/metrics/vllm-single.prom").read_text(encoding="utf-8")
    assert _qualify_client.counters(plain)["draft_tokens"] is None


# --- two results -----------------------------------------------------------------------------------------------------
def noisy(scale: float, seed: int, count: int = 8, spread: float = 0.03) -> dict[str, Any]:
    import random

    chance = random.Random(seed)
    what = measured(261632, 258048, 3 * 258048.0)
    what["requests"] += [
        {**what["requests"][0], "stage": "decode", "tokens_per_s": 55.6 * scale * chance.gauss(1, spread)}
        for n in range(count)
    ]
    return judged(what)


def test_no_difference_within_noise() -> None:
    for seed in range(40):
        rows = _qualify.compare(noisy(1.0, seed), noisy(1.0, seed + 1000))
        assert next(r for r in rows if r["label"] == "Decode speed, one stream")["verdict"] == "same", seed


def test_twenty_percent_slower_is_found() -> None:
    for seed in range(40):
        rows = _qualify.compare(noisy(1.0, seed), noisy(0.8, seed + 1000))
        assert next(r for r in rows if r["label"] == "Decode speed, one stream")["verdict"] == "worse", seed


def test_a_round_that_something_disturbed_is_no_slower_engine() -> None:
    """Seen in the sandbox: 127.2 and then 40.0 tokens a second of four streams, while a linter ran for a second."""
    results = []
    for rounds in ([127.2, 124.9, 126.1], [40.0, 126.8, 125.3]):
        result = noisy(1.0, 1)
        result["measured"]["concurrency"] = [
            {"streams": 4, "tokens_per_s": sorted(rounds)[1], "rounds": rounds, "errors": 0, "error": None}
        ]
        results.append(result)
    row = next(r for r in _qualify.compare(*results) if r["label"] == "Decode speed, 4 streams")
    assert (row["before"], row["after"], row["verdict"]) == (126.1, 125.3, "same")


def test_judging_again_changes_nothing() -> None:
    first = judged(measured(261632, 258048, 3 * 258048.0))
    assert _qualify.judge(copy.deepcopy(first)) == first
