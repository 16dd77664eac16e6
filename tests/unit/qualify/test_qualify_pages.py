"""The pages: the seed's figures give the seed's verdict; nothing in them is taken for markup; they stay small."""

from __future__ import annotations

import json
import os
import re
from html.parser import HTMLParser
from typing import Any

import jinja2
import pytest

from ansible_collections.gb10.fleet.plugins.filter import qualify as filters
from ansible_collections.gb10.fleet.plugins.module_utils import _qualify, _qualify_page

from .conftest import ROOT, line

TEMPLATES = ROOT / "roles/qualify/templates"
SEED = ROOT / "tests/fixtures/qualify/seed-local-ai-systems.json"
GOLDEN = ROOT / "tests/fixtures/golden/qualify-seed.html"


def render(template: str, **variables: Any) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), trim_blocks=True, undefined=jinja2.StrictUndefined
    )
    return environment.get_template(template).render(**variables)


def seed() -> dict[str, Any]:
    return _qualify.judge(json.loads(SEED.read_text(encoding="utf-8")))


class Balanced(HTMLParser):
    """Fails on a tag that is not closed in order."""

    VOID = ("meta", "link", "br", "rect", "line", "circle")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.seen.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag


def test_the_seed_is_qualified() -> None:
    """Seed "Local AI Systems", full test results: 0.986, 258,048, 191.7 s, 2.98 s, 55.6 tokens/s, 0.928, 0 faults on both nodes."""
    result = seed()
    assert result["verdict"] == "pass"
    shown = {one["key"]: _qualify_page.shown(one) for one in result["lines"]}
    table = {
        "prefix_hit_ratio": "0.986", "prefix_cached_tokens": "258,048", "ttft_cold_s": "191.7 s", "ttft_cached_p95_s": "2.98 s",
        "decode_tokens_per_s": "55.6 tokens/s", "acceptance": "0.928", "major_faults": "0", "power_w": "50 W",
        "gpu_celsius": "71 °C",
    }  # fmt: skip
    assert {key: shown[key]["measured"] for key in table} == table
    assert {shown[key]["status"] for key in table} == {"pass"}


def requests(result: dict[str, Any], stage: str, **values: Any) -> None:
    for request in result["measured"]["requests"]:
        if request["stage"] == stage:
            request.update(values)


def no_hits(result: dict[str, Any]) -> None:
    requests(result, "cached", cached_tokens=0)
    result["measured"]["stages"][1]["counters"]["hits"] = 0


@pytest.mark.parametrize(
    ("change", "key"),
    [
        (no_hits, "prefix_hit_ratio"),
        (lambda r: requests(r, "cached", ttft_s=191.7), "ttft_cached_p95_s"),
        (lambda r: requests(r, "decode", tokens_per_s=44.5), "decode_tokens_per_s"),
        (lambda r: r["nodes"]["spark-02"].update(power_w=78.0), "power_w"),
        (lambda r: r["nodes"]["spark-02"]["faults"].update(engine=237), "major_faults"),
    ],
)
def test_the_seed_before_its_fixes_is_not(change: Any, key: str) -> None:
    """0 hits, 191.7 s for each repeat, 78 W without the cap, 237 faults by the guard; and an engine 20 % slower."""
    result = json.loads(SEED.read_text(encoding="utf-8"))
    change(result)
    judged = _qualify.judge(result)
    assert judged["verdict"] == "fail"
    assert line(judged, key)["status"] == "fail"


def test_the_page_of_the_seed() -> None:
    """Golden: with UPDATE_GOLDEN=1 in the environment it is written anew; read the difference before it is committed."""
    page = render("report.html.j2", qualify_shown=filters.qualify_page(seed()))
    if os.environ.get("UPDATE_GOLDEN"):
        GOLDEN.write_text(page, encoding="utf-8")
    assert page == GOLDEN.read_text(encoding="utf-8")


def busy(nodes: int = 2, samples: int = 7200) -> dict[str, Any]:
    """The seed's result with series of four hours, every chart, and words that look like markup."""
    result = json.loads(SEED.read_text(encoding="utf-8"))
    measured = result["measured"]
    began = measured["began"]
    lines = "\n".join(
        json.dumps({"k": "s", "at": began + 2 * n, "avail": 30_000_000 + n, "free": 9_000_000, "soc": 60 + n % 20,
                    "temp": 70 + n % 3, "power": 48.0, "util": 96, "clock": 2190}) for n in range(samples)
    )  # fmt: skip
    lines += "\n" + json.dumps({
        "k": "end", "seconds": 2.0 * samples, "faults": [{"name": "dd", "engine": False, "count": 4}],
        "kernel_faults": 4, "rdma": {}, "threads": [{"pid": 4211, "name": "VLLM::Worker_TP1", "cpu_percent": 123.0}],
        "gpu_error": "",
        "cost": {"cpu_s": 5.1, "nvidia_smi_cpu_s": 20.0, "percent_of_a_core": 0.17, "major_faults": 0, "rss_mib": 12.0},
    })  # fmt: skip
    from ansible_collections.gb10.fleet.plugins.module_utils._qualify_nodes import node

    result["nodes"] = {
        f"spark-{n:02}": node(n, lines, {"node_time": began}, {"engine_alive": True}) for n in range(nodes)
    }
    measured["concurrency"] = [
        {"streams": s, "tokens": 512, "seconds": 9.0, "tokens_per_s": 55.6 * s**0.6, "ttft_p50_s": 0.4, "errors": 0, "error": None}
        for s in (1, 2, 4, 6)
    ]  # fmt: skip
    measured["requests"] += [{**measured["requests"][-1], "stage": "short", "ttft_s": 0.2 + n / 50} for n in range(20)]
    result["plan"]["checks"] = ["korean"]
    measured["checks"] = {
        "korean": {"ok": False, "why": "'<script>alert(1)</script>' & \ufffd", "next": "<b>another build</b>"}
    }
    return _qualify.judge(result)


def test_a_page_with_everything() -> None:
    page = render("report.html.j2", qualify_shown=filters.qualify_page(busy()))
    assert len(page.encode()) < 300_000
    parser = Balanced()
    parser.feed(page)
    assert parser.open == []
    assert parser.seen.count("svg") == 6, "TTFT, streams, and four over time"
    assert "script" not in parser.seen and "b" not in parser.seen
    assert "&lt;script&gt;" in page
    assert not re.search(r'(?:src|href)="(?!data:)|url\(|@import', page), "nothing is loaded from anywhere"


def test_the_page_of_eight_nodes_is_small() -> None:
    assert len(render("report.html.j2", qualify_shown=filters.qualify_page(busy(8))).encode()) < 300_000


def test_an_empty_run_has_a_page() -> None:
    """A key was needed: nothing was measured."""
    result = json.loads(SEED.read_text(encoding="utf-8"))
    result["measured"].update(
        requests=[], stages=[], metrics={"error": "HTTP 404", "before": None, "after": None, "reset": None}
    )
    result["measured"]["ended_early"] = {"stage": "short", "error": "Unauthorized", "status": 401, "key_needed": True}
    result["nodes"] = {}
    judged = _qualify.judge(result)
    assert judged["verdict"] == "fail"
    assert "✗ Not qualified" in render("report.html.j2", qualify_shown=filters.qualify_page(judged))


def test_two_results_side_by_side() -> None:
    first, second = seed(), seed()
    for request in second["measured"]["requests"]:
        request["tokens_per_s"] = request["tokens_per_s"] and 44.5
    second["nodes"]["spark-01"]["power_w"] = 40.0
    rows = filters.qualify_compare(first, _qualify.judge(second))
    page = render(
        "compare.html.j2",
        qualify_rows=rows,
        qualify_before=filters.qualify_page(first),
        qualify_after=filters.qualify_page(first),
    )
    assert "✗ worse" in page and "✓ better" in page and "within noise" in page
    told = {row["figure"]: (row["change"], row["verdict"]) for row in rows}
    assert told["Decode speed, one stream"] == ("-20.0 %", "worse")
    assert told["GPU power, spark-01"] == ("-20.0 %", "better")


def test_a_foreign_file_is_refused() -> None:
    with pytest.raises(Exception, match=r"no result\.json"):
        filters.qualify_page({"a": 1})
    with pytest.raises(Exception, match="schema 2"):
        filters.qualify_page({**seed(), "schema": 2})


def test_the_text_for_a_terminal() -> None:
    text = filters.qualify_text(busy(), "/tmp/report.html")
    assert max(len(one) for one in text.splitlines()) <= 132
    assert text.splitlines()[-1] == "alpha: NOT qualified, /tmp/report.html"
    assert "✗ Korean without broken characters" in text


def test_ticks_are_round() -> None:
    assert _qualify_page.ticks(0, 228.4) == [0, 100, 200, 300]
    assert _qualify_page.ticks(61.0, 79.0) == [60, 65, 70, 75, 80]
    flat = _qualify_page.ticks(5.0, 5.0)
    assert flat[0] <= 5.0 <= flat[-1] and len(flat) > 1, "a level line has an axis, too"
