"""Each fault of the fake engine has its verdict; a sound engine has none, and its own counters agree to the token."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from .conftest import line

Make = Callable[..., Any]


def statuses(result: dict[str, Any]) -> dict[str, str]:
    return {one["key"]: one["status"] for one in result["lines"]}


def failed(result: dict[str, Any]) -> set[str]:
    return {key for key, status in statuses(result).items() if status == "fail"}


def test_a_sound_engine(engine: Make) -> None:
    """Hits, queries and cached tokens are the engine's own, to the token."""
    one = engine()
    checks = ["needle", "korean", "tool_call", "json_schema", "not_empty", "same_answer"]
    result = one.result(expect={"checks": checks}, plan={"limit": True, "soak_s": 1, "rounds": 2})
    assert failed(result) == set()
    figures, measured = result["figures"], result["measured"]
    page = {
        name: one.ranks.metric(f"vllm:{name}_total")
        for name in ("prefix_cache_queries", "prefix_cache_hits", "prompt_tokens")
    }
    assert (
        measured["metrics"]["after"]["queries"]
        == page["prefix_cache_queries"]
        == sum(r["prompt_tokens"] for r in measured["requests"])
    )
    assert (
        measured["metrics"]["after"]["hits"]
        == page["prefix_cache_hits"]
        == sum(r["cached_tokens"] for r in measured["requests"])
    )
    tokens = figures["prompt_tokens"]
    assert 0 <= result["plan"]["prompt_tokens"] - tokens <= 10
    assert (figures["queries"], figures["hits"]) == (10 * tokens, 10 * ((tokens - 1) // 32 * 32))
    assert figures["decode_tokens_per_s"] > 50
    assert [(step["streams"], len(step["rounds"])) for step in measured["concurrency"]] == [(1, 2), (2, 2), (4, 2)]
    assert line(result, "concurrency")["why"] == "4 at once, and 4 of 1,536 tokens."
    assert statuses(result)["soak"] == "pass" and measured["soak"]["requests"] >= 2
    assert statuses(result)["needle"] == statuses(result)["tool_call"] == statuses(result)["json_schema"] == "pass"
    assert line(result, "korean")["status"] == "not applicable", "it does not speak Korean"


def test_replacement_characters(engine: Make) -> None:
    """Case ckpt-modelopt-corrupt: 200 OK, and U+FFFD in Korean text."""
    result = engine(FAKE_ENGINE_FAULT="fffd").result()
    assert "broken characters (U+FFFD)" in line(result, "korean")["why"]
    assert "vllm#54150" in line(result, "korean")["next"]
    assert "korean" in failed(result)


def test_malformed_tool_call(engine: Make) -> None:
    result = engine(FAKE_ENGINE_FAULT="bad_tool_call").result()
    assert failed(result) == {"tool_call"}
    assert "are no JSON" in line(result, "tool_call")["why"]


def test_empty_content(engine: Make) -> None:
    result = engine(FAKE_ENGINE_FAULT="empty").result()
    assert {"not_empty", "answers"} <= failed(result)
    assert "empty answers" in line(result, "not_empty")["why"]


def test_all_of_the_budget_spent_on_thinking(engine: Make) -> None:
    one = engine("--reasoning-parser", "glm45", FAKE_ENGINE_ANSWER=" ".join(f"w{n}" for n in range(40)))
    one.fault("empty")
    result = one.result()
    assert "went into thinking" in line(result, "not_empty")["why"]


def test_counters_reset(engine: Make) -> None:
    one = engine()
    result = one.result(hook=lambda said: one.fault("reset") if said.startswith("decode, 2") else None)
    assert failed(result) == {"restarts"}
    assert "began anew in stage decode" in line(result, "restarts")["why"]
    assert line(result, "counters")["status"] == "not applicable"


def test_restart(engine: Make) -> None:
    """The engine dies in the middle: the run ends at once and says where."""
    one = engine()
    result = one.result(hook=lambda said: one.fault("dead") if said.startswith("decode, 2") else None)
    assert "answers" in failed(result)
    why = line(result, "answers")["why"]
    assert why.startswith("The run ended in stage decode: ")
    assert line(result, "prefix_hit_ratio")["status"] == "pass", "what was measured before counts"
    assert line(result, "concurrency")["status"] == "not applicable"


def test_frozen_worker(engine: Make) -> None:
    """Requests hang and /health stays 200; which rank it is comes from the nodes (test_qualify_verdict)."""
    one = engine(nodes=2)
    worker = one.ranks.processes[0]

    def freeze(said: str) -> None:
        if said.startswith("decode, 1"):
            os.kill(worker.child.pid, signal.SIGSTOP)

    result = one.result(hook=freeze, plan={"request_timeout_s": 8.0})
    assert line(result, "answers")["why"].startswith("The run ended in stage decode: no answer within 8 s.")


def test_a_key_is_needed(engine: Make) -> None:
    one = engine(VLLM_API_KEY="k1")
    result = one.result()
    assert line(result, "answers")["why"] == "401: the endpoint wants an API key."
    assert "qualify_api_key_file" in line(result, "answers")["next"]
    assert one.run(key="k1")[0]["ended_early"] is None


def test_slow_first_token(engine: Make) -> None:
    one = engine(FAKE_ENGINE_FAULT="slow_first_token=0.5")
    expect = {"ttft_cached_p95_s": 0.1, "ttft_short_p50_s": 0.1, "context_tokens": 1536}
    result = one.result(expect=expect)
    assert failed(result) == {"ttft_cached_p95_s", "ttft_short_p50_s"}
    assert line(result, "ttft_cached_p95_s")["measured"] >= 0.5


def test_cache_broken(engine: Make) -> None:
    result = engine(FAKE_ENGINE_FAULT="no_prefix_hits").result()
    assert failed(result) == {"prefix_hit_ratio", "prefix_cached_tokens"}
    assert line(result, "prefix_cached_tokens")["why"].startswith("cache broken: 47 blocks repeated 10 times, 0 hits")


def test_prompt_below_one_block(engine: Make) -> None:
    one = engine(FAKE_ENGINE_BLOCK_SIZE="2304")
    result = one.result(args={"block-size": 2304}, plan={"prompt_tokens": 1500})
    assert failed(result) == set()
    assert line(result, "prefix_hit_ratio")["status"] == "not applicable"
    assert line(result, "prefix_hit_ratio")["why"].startswith("0 hits: prompt 1,49")
    assert line(result, "prefix_hit_ratio")["why"].endswith("tokens is below one block of 2,304.")


def test_acceptance(engine: Make) -> None:
    """Case qual-acceptance-tax: 0.147 where 0.508 is expected. The page has `_created` and per-position series."""
    draft = {"speculative-config": {"method": "ngram", "num_speculative_tokens": 4}}
    one = engine(
        "--speculative-config", '{"method":"ngram","num_speculative_tokens":4}', FAKE_ENGINE_ACCEPTANCE="0.147"
    )
    page = one.ranks.ask("/metrics")[1]
    assert "spec_decode_num_accepted_tokens_created" in page
    assert "spec_decode_num_accepted_tokens_per_pos_total" in page
    result = one.result(args=draft, expect={"acceptance": 0.508})
    assert result["figures"]["acceptance"] == pytest.approx(0.147, abs=1e-6)
    assert failed(result) == {"acceptance"}
    assert "qual-acceptance-tax" in line(result, "acceptance")["next"]


def test_interrupted_and_resumed(engine: Make) -> None:
    """What was whole is not measured again."""
    from ansible_collections.gb10.fleet.plugins.module_utils import _qualify, _qualify_client
    from ansible_collections.gb10.fleet.plugins.module_utils._openai_client import Endpoint

    from .conftest import SMALL, recipe

    one, kept, told = engine(), {}, []
    plan = _qualify.plan(recipe(), "quick", None, SMALL)

    def stop(said: str) -> None:
        if said.startswith("decode, 2"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _qualify_client.Run(Endpoint(one.url), "tiny", plan, tell=stop, keep=lambda m: kept.update(m)).run()
    state = {**kept, "stages": [s for s in kept["stages"] if s["name"] != "decode"]}
    measured = _qualify_client.Run(Endpoint(one.url), "tiny", plan, done=state, tell=told.append).run()
    assert not [said for said in told if said.startswith(("cold", "the same", "short"))]
    assert len([r for r in measured["requests"] if r["stage"] == "cached"]) == 10
    assert len([r for r in measured["requests"] if r["stage"] == "decode"]) == 3


def test_a_slower_engine_is_found(engine: Make) -> None:
    """Twice as slow is told apart on any machine; what a share of 20 % needs is in the table tests of compare."""
    from ansible_collections.gb10.fleet.plugins.module_utils import _qualify

    few = {"short": 3, "repeats": 3, "decode_runs": 5}
    first, slow = (engine(FAKE_ENGINE_ITL_S=pause).result(plan=few) for pause in ("0.05", "0.2"))
    rows = {row["label"]: row for row in _qualify.compare(first, slow)}
    assert rows["Decode speed, one stream"]["verdict"] == "worse"
