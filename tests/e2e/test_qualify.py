"""Qualification of real vLLM: its figures are the engine's own counters to the token, and each verdict names its cause."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from fleet import HEAD, SANDBOX, run_playbook, sandbox_inventory

SERIES = {
    "queries": "vllm:prefix_cache_queries_total",
    "hits": "vllm:prefix_cache_hits_total",
    "prompt_tokens": "vllm:prompt_tokens_total",
    "cached_tokens": "vllm:prompt_tokens_cached_total",
    "generation_tokens": "vllm:generation_tokens_total",
    "draft_tokens": "vllm:spec_decode_num_draft_tokens_total",
    "accepted_tokens": "vllm:spec_decode_num_accepted_tokens_total",
}


@pytest.fixture
def page(nodes) -> Any:
    def page() -> str:
        return nodes[HEAD].run("curl", "-s", "http://127.0.0.1:8000/metrics")

    return page


def counters(text: str) -> dict[str, float | None]:
    """The engine's counters, read by nobody's code but ours here: series by exact name, their values added."""
    out: dict[str, float | None] = {}
    for name, series in SERIES.items():
        values = re.findall(rf"^{series}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
        out[name] = sum(map(float, values)) if values else None
    return out


def served(inventory: Path | str = SANDBOX, **overrides: Any) -> tuple[str, ...]:
    # What was evicted since the image came is read again by the warm-up, not as major faults of the measurement.
    words = ("-e", json.dumps({"recipe": "sandbox-tiny", "recipe_overrides": {"warmup": "shapes", **overrides}}))
    done = run_playbook("serve", inventory, *words)
    assert done.returncode == 0, done.stdout[-4000:]
    return words


def qualify(folder: Path, words: tuple[str, ...], inventory: Path | str = SANDBOX, **plan: Any) -> tuple[int, Any, str]:
    """Exit code, result.json, report.html."""
    given = json.dumps({"qualify_results_dir": str(folder), "qualify_plan": plan})
    done = run_playbook("qualify", inventory, *words, "-e", "qualify_size=quick", "-e", given)
    print(done.stdout[done.stdout.find("TASK [gb10.fleet.qualify : Show the verdict") :][:5000])
    (result,) = folder.glob("*/result.json")
    return done.returncode, json.loads(result.read_text()), result.with_name("report.html").read_text()


def lines(result: Any) -> dict[str, tuple[str, str]]:
    return {line["label"]: (line["status"], line["why"]) for line in result["lines"]}


def test_green_and_equal_to_the_engines_counters(page, tmp_path) -> None:
    words = served()
    before = counters(page())
    code, result, report = qualify(tmp_path, words)
    after = counters(page())
    assert (code, result["verdict"]) == (0, "pass")
    measured = result["measured"]["metrics"]
    for name in SERIES:
        assert measured["before"][name] == before[name] and measured["after"][name] == after[name], name
    assert all(node["faults"]["engine"] == 0 for node in result["nodes"].values())
    assert len(report.encode()) < 300_000 and "http://" not in report.replace("http://www.w3.org", "")


def test_two_runs_differ_by_noise_only(page, tmp_path) -> None:
    words = served()
    for name in ("first", "second"):
        assert qualify(tmp_path / name, words)[0] == 0
    results = [str(next((tmp_path / name).glob("*/result.json"))) for name in ("first", "second")]
    given = {"qualify_compare_before": results[0], "qualify_compare_after": results[1]}
    done = run_playbook("compare", SANDBOX, "-e", json.dumps(given))
    print(done.stdout)
    assert done.returncode == 0 and "within noise" in done.stdout
    assert not re.search(r"\b(better|worse)\b", done.stdout), "an unchanged engine is no better and no worse"


def test_prefix_caching_off_is_a_broken_cache(tmp_path) -> None:
    words = served(args={"no-enable-prefix-caching": True})
    code, result, report = qualify(tmp_path, words)
    status, why = lines(result)["Prefix-cache hit rate, repeated prompt"]
    assert (code, status) == (2, "fail") and why.startswith("cache broken: ") and "0 hits" in why
    assert "cache broken" in report


def test_a_prompt_under_a_block_is_said_to_be_one(tmp_path) -> None:
    words = served(args={"block-size": 256})
    code, result, _report = qualify(tmp_path, words, prompt_tokens=200)
    status, why = lines(result)["Prefix-cache hit rate, repeated prompt"]
    assert (code, status) == (0, "not applicable") and "is below one block of 256" in why


def test_acceptance_of_ngram_speculation(page, tmp_path) -> None:
    """On one node. The page of the engine has `_created` and per-position series beside the counters."""
    inventory = sandbox_inventory(tmp_path, 1)
    run_playbook("stop", SANDBOX)
    ngram = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    words = served(inventory, nodes=1, parallel={"tensor": 1}, args={"speculative-config": ngram})
    before = counters(page())
    _code, result, _report = qualify(tmp_path / "out", words, inventory, ignore_eos=True)
    text = page()
    after = counters(text)
    assert "spec_decode_num_accepted_tokens_per_pos_total" in text and "spec_decode_num_accepted_tokens_created" in text
    drafted, accepted = (after[n] - (before[n] or 0) for n in ("draft_tokens", "accepted_tokens"))
    assert accepted > 0
    measured = result["measured"]["metrics"]
    assert (measured["after"]["draft_tokens"], measured["after"]["accepted_tokens"]) == (
        after["draft_tokens"],
        after["accepted_tokens"],
    )
    print(f"acceptance {accepted / drafted:.3f} by the engine, {result['figures']['acceptance']:.3f} in the result")
    assert result["figures"]["acceptance"] == pytest.approx(accepted / drafted, abs=0.02)
