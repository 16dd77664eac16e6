# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Qualification: what to measure for a recipe, and what the figures mean. Pure functions.

A *plan* says what the client sends, *measured* is what it saw (``_qualify_client.py``), *nodes* what the samplers saw
(``_qualify_nodes.py``). :func:`judge` compares them with the recipe's ``expect``, one line per figure.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ansible_collections.gb10.fleet.plugins.module_utils._recipe import nearest

SCHEMA = 1
PASS, FAIL, NOT_APPLICABLE = "pass", "fail", "not applicable"

CHECKS = {
    "needle": "Needle in a long prompt",
    "korean": "Korean without broken characters",
    "tool_call": "Tool call that parses",
    "json_schema": "Answer that fits a JSON schema",
    "not_empty": "Content within the budget",
    "same_answer": "Same answer cold and cached",
}
# Keys of a recipe's `expect`, and the share by which a figure may be worse. `decode_tokens_per_s_4` is that of 4 streams together.
EXPECT: dict[str, float] = {
    "prefix_hit_ratio": 0.002,
    "prefix_cached_tokens": 0.0,
    "ttft_cold_s": 0.10,
    "ttft_cached_p95_s": 0.10,
    "ttft_short_p50_s": 0.25,
    "decode_tokens_per_s": 0.05,
    "prefill_tokens_per_s": 0.10,
    "acceptance": 0.03,
    "major_faults": 0.0,
    "other_major_faults": 0.0,
    "power_w": 0.05,
    "gpu_celsius": 0.03,
}
# Figures of `expect` that hold for a prompt of `context_tokens` only.
OF_CONTEXT = ("prefix_hit_ratio", "prefix_cached_tokens", "ttft_cold_s", "ttft_cached_p95_s")
OTHER_KEYS = ("context_tokens", "checks", "tolerance")
# Faults of processes that are not the engine's (cron, logins) and do not fail a node yet.
OTHER_MAJOR_FAULTS = 100

SIZES: dict[str, dict[str, Any]] = {
    # prompt_tokens 0: all of the context. `limit`: max_num_seqs prompts near the context's end at once.
    "quick": {
        "prompt_tokens": 8192, "colds": 2, "repeats": 10, "short": 10, "decode_runs": 3, "decode_tokens": 128,
        "concurrency_prompt_tokens": 64, "concurrency_tokens": 64, "needle_tokens": 4096, "limit": False, "soak_s": 0,
        "rounds": 3, "request_timeout_s": 120,
    },
    "standard": {
        "prompt_tokens": 65536, "colds": 2, "repeats": 12, "short": 20, "decode_runs": 5, "decode_tokens": 256,
        "concurrency_prompt_tokens": 1024, "concurrency_tokens": 128, "needle_tokens": 32768, "limit": False, "soak_s": 0,
        "rounds": 3, "request_timeout_s": 600,
    },
    "full": {
        "prompt_tokens": 0, "colds": 1, "repeats": 12, "short": 20, "decode_runs": 8, "decode_tokens": 512,
        "concurrency_prompt_tokens": 4096, "concurrency_tokens": 256, "needle_tokens": 131072, "limit": True, "soak_s": 600,
        "rounds": 3, "request_timeout_s": 1800,
    },
}  # fmt: skip
# What an answer needs of the context, at most: the seed's full run sends 262,144 - 512 tokens.
ANSWER_ROOM = 512
# Most request slots that are worth a step of their own.
MOST_STREAMS = 64
# The longest prompt that a pinned KV cache was seen to fail at (case launch-kv-pin).
KV_PIN_TOKENS = 28672
KV_GAP_GIB = 1.0
# Drafters that propose from the prompt itself; every other one drops the last matched block.
_DRAFT_FREE = ("ngram", "suffix")


_STREAMS = re.compile(r"^decode_tokens_per_s_(\d+)$")


class PlanError(ValueError):
    """A plan or ``expect`` that cannot be used; the message is one sentence."""


# --- what to measure -------------------------------------------------------------------------------------------------
def flag(args: Mapping[str, Any], name: str) -> Any:
    """Value of an engine argument, however its name is written."""
    return next((value for key, value in args.items() if key.replace("_", "-") == name), None)


def speculation(args: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The speculative configuration of the recipe, None without one."""
    given = flag(args, "speculative-config")
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError:
            return {"method": "?"}
    return given if isinstance(given, Mapping) else None


def caching(args: Mapping[str, Any]) -> bool:
    """Whether the arguments leave prefix caching on."""
    return not flag(args, "no-enable-prefix-caching") and flag(args, "enable-prefix-caching") is not False


def steps(most: int) -> list[int]:
    """1, 2, 4, … and the most that the engine takes at once."""
    out = [1]
    while out[-1] * 2 < most:
        out.append(out[-1] * 2)
    return out if most <= 1 else [*out, most]


def check_expect(expect: Mapping[str, Any]) -> None:
    """Raises PlanError for a key that does not exist."""
    known = [*EXPECT, *OTHER_KEYS]
    for name in expect:
        if name not in known and not _STREAMS.match(str(name)):
            raise PlanError(f"expect.{name} is not a figure that is measured: {nearest(str(name), known)}")
    for name in expect.get("tolerance") or {}:
        if name not in EXPECT:
            raise PlanError(
                f"expect.tolerance.{name} is not a figure that is measured: {nearest(str(name), list(EXPECT))}"
            )
    for name in expect.get("checks") or []:
        if name not in CHECKS:
            raise PlanError(f"expect.checks: {name} is not a check: {nearest(str(name), list(CHECKS))}")


def plan(
    recipe: Mapping[str, Any],
    size: str = "quick",
    facts: Mapping[str, Any] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """What to send for a recipe. Raises PlanError.

    :param facts: figures of the engine's log (``rank_info``: ``block_size`` may have been raised, ``max_model_len``).
    :param overrides: single values of the size.
    """
    if size not in SIZES:
        raise PlanError(f"qualify_size is {size!r}: {nearest(size, list(SIZES))}")
    check_expect(recipe.get("expect") or {})
    facts, args = facts or {}, recipe["args"]
    chosen = {**SIZES[size], **(overrides or {})}
    for name in chosen:
        if name not in (*SIZES[size], "checks", "ignore_eos"):
            raise PlanError(f"qualify_plan.{name} is not a value of a plan: {nearest(name, list(SIZES[size]))}")
    block = int(facts.get("block_size") or flag(args, "block-size") or 16)
    length = int(facts.get("max_model_len") or flag(args, "max-model-len") or 8192)
    room = length - min(ANSWER_ROOM, length // 4)
    seqs = int(flag(args, "max-num-seqs") or 8)
    if "prompt_tokens" not in (overrides or {}) and chosen["prompt_tokens"]:
        # A quick run still has to show whether the cache works: two blocks can be hit although a drafter drops one.
        chosen["prompt_tokens"] = max(chosen["prompt_tokens"], math.ceil(3.5 * block))
    speculative = speculation(args)
    checks = list((recipe.get("expect") or {}).get("checks") or CHECKS)
    return {
        # For a model that ends after a few words: nobody can time those.
        "ignore_eos": False,
        **chosen,
        "size": size,
        "prompt_tokens": min(chosen["prompt_tokens"] or room, room),
        "needle_tokens": min(chosen["needle_tokens"], room - 64),
        "decode_tokens": min(chosen["decode_tokens"], length - room),
        "concurrency_tokens": min(chosen["concurrency_tokens"], length - room),
        "concurrency_prompt_tokens": min(chosen["concurrency_prompt_tokens"], room),
        "limit_tokens": room,
        "concurrency": steps(min(seqs, MOST_STREAMS)),
        "max_num_seqs": seqs,
        "max_model_len": length,
        "block_size": block,
        "drops_last_block": speculative is not None and speculative.get("method") not in _DRAFT_FREE,
        "speculative": speculative is not None,
        "caching": caching(args),
        "kv_pinned": bool(flag(args, "kv-cache-memory") or flag(args, "kv-cache-memory-bytes")),
        "tools": bool(flag(args, "enable-auto-tool-choice")),
        "checks": [name for name in chosen.get("checks") or checks if name != "tool_call" or flag(args, "enable-auto-tool-choice")],
    }  # fmt: skip


# --- arithmetic ------------------------------------------------------------------------------------------------------
def percentile(values: Iterable[float | None], share: float) -> float | None:
    """Nearest-rank percentile of what is there (``share`` 0.95: p95); None of nothing."""
    known = sorted(value for value in values if value is not None)
    return known[max(math.ceil(share * len(known)), 1) - 1] if known else None


def median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def expected_cached(prompt_tokens: int, block: int, drops_last_block: bool) -> int:
    """Tokens of an exact repeat that a working prefix cache serves: whole blocks, never the whole prompt, and one block less with
    a drafter that drops the last match (112 × 2304 = 258,048 of 261,632, seed "Local AI Systems")."""
    blocks = (prompt_tokens - 1) // block
    return max(blocks - (1 if drops_last_block else 0), 0) * block


def delta(measured: Mapping[str, Any], name: str, stage: str | None = None) -> float | None:
    """By how much an engine's counter grew in a stage, or in the whole run; None when the page does not have it."""
    if stage is not None:
        found = [s["counters"] for s in measured.get("stages") or [] if s["name"] == stage and s.get("counters")]
        return found[-1].get(name) if found else None
    before, after = (((measured.get("metrics") or {}).get(side) or {}).get(name) for side in ("before", "after"))
    return None if before is None or after is None else after - before


def of_stage(measured: Mapping[str, Any], stage: str) -> list[Mapping[str, Any]]:
    """The requests of a stage that came back well."""
    return [r for r in measured.get("requests") or [] if r["stage"] == stage and not r.get("error")]


def figures(measured: Mapping[str, Any]) -> dict[str, Any]:
    """The seed's table out of what was measured. A figure that could not be measured is None."""
    cached, cold = of_stage(measured, "cached"), of_stage(measured, "cold")
    queries, hits = delta(measured, "queries", "cached"), delta(measured, "hits", "cached")
    drafted, accepted = delta(measured, "draft_tokens"), delta(measured, "accepted_tokens")
    prompt, cold_s = median(r["prompt_tokens"] for r in cold), median(r["ttft_s"] for r in cold)
    told = [r["cached_tokens"] for r in cached if r.get("cached_tokens") is not None]
    return {
        # Colds differ by a few tokens; repeats are judged by their own.
        "prompt_tokens": median(r["prompt_tokens"] for r in cached or cold),
        "repeats": len(cached),
        "queries": queries,
        "hits": hits,
        "prefix_hit_ratio": hits / queries if queries and hits is not None else None,
        # The engine's word for each repeat, or its counter shared out over them.
        "cached_tokens": min(told) if told else hits / len(cached) if hits is not None and cached else None,
        "ttft_cold_s": cold_s,
        "prefill_tokens_per_s": prompt / cold_s if prompt and cold_s else None,
        "ttft_cached_p50_s": percentile([r["ttft_s"] for r in cached], 0.5),
        "ttft_cached_p95_s": percentile([r["ttft_s"] for r in cached], 0.95),
        "ttft_short_p50_s": percentile([r["ttft_s"] for r in of_stage(measured, "short")], 0.5),
        "decode_tokens_per_s": median(
            r["tokens_per_s"] for r in of_stage(measured, "decode") if (r.get("completion_tokens") or 0) >= 8
        ),
        **{
            f"decode_tokens_per_s_{step['streams']}": step["tokens_per_s"]
            for step in measured.get("concurrency") or []
            if step["streams"] > 1 and not step["errors"]
        },
        "draft_tokens": drafted,
        "accepted_tokens": accepted,
        "acceptance": accepted / drafted if drafted and accepted is not None else None,
    }


# --- what it means ---------------------------------------------------------------------------------------------------
def number(value: float | None, unit: str = "") -> str:
    """A figure as a person reads it: ``258,048``, ``2.98 s``, ``0.986``."""
    if value is None:
        return "-"
    if unit == "ms":
        return f"{value * 1000:,.0f} ms"
    if float(value).is_integer() and abs(value) >= 10:
        text = f"{value:,.0f}"
    elif abs(value) >= 100:
        text = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.1f}"
    elif abs(value) >= 10:
        text = f"{value:.1f}"
    elif float(value).is_integer():
        text = f"{value:.0f}"
    else:
        text = f"{value:.3f}" if unit in ("", "s") and abs(value) < 1 else f"{value:.2f}"
    return f"{text} {unit}".rstrip()


class Verdict:
    """Collects lines and findings of one result."""

    def __init__(self, result: Mapping[str, Any]) -> None:
        self.measured: Mapping[str, Any] = result["measured"]
        self.plan: Mapping[str, Any] = result["plan"]
        self.nodes: Mapping[str, Any] = result.get("nodes") or {}
        self.expect: Mapping[str, Any] = result.get("expect") or {}
        self.figures = figures(self.measured)
        self.lines: list[dict[str, Any]] = []
        self.findings: list[dict[str, Any]] = []

    def line(self, key: str, label: str, status: str, why: str, next_: str = "", **more: Any) -> None:
        self.lines.append(
            {"key": key, "label": label, "status": status, "why": why, "next": next_, "measured": more.get("measured"),
             "expected": more.get("expected"), "unit": more.get("unit", "")}
        )  # fmt: skip

    def find(self, text: str, node: str | None = None, next_: str = "") -> None:
        self.findings.append({"node": node, "text": text, "next": next_})

    def tolerance(self, key: str) -> float:
        known = "decode_tokens_per_s" if _STREAMS.match(key) else key
        return float((self.expect.get("tolerance") or {}).get(known, EXPECT[known]))

    # -- the run itself
    def answers(self) -> None:
        """Every request answered, by an engine that was the same from first to last."""
        label, requests = "Every request answered", self.measured.get("requests") or []
        failed = [r for r in requests if r.get("error") and r["stage"] != "checks"]
        ended, total = self.measured.get("ended_early"), len(requests)
        if ended and ended.get("key_needed"):
            self.line("answers", label, FAIL, f"{ended['status']}: the endpoint wants an API key.",
                      "Set qualify_api_key_file to a file on the head whose first line is the key.")  # fmt: skip
        elif ended:
            frozen = [name for name, node in self.nodes.items() if node.get("processes_stopped")]
            gone = [
                name for name, node in self.nodes.items() if node.get("engine_alive") is False and name not in frozen
            ]
            restarted = [name for name, node in self.nodes.items() if node.get("restarts")]
            # The first failure tells more than the refused connection after it.
            stage, words = (failed[0]["stage"], failed[0]["error"]) if failed else (ended["stage"], ended["error"])
            where = "".join(
                f" {', '.join(names)}: {state}."
                for names, state in (
                    (frozen, "a process of the rank is stopped"),
                    (gone, "no engine process is alive"),
                    (restarted, "the rank was started anew"),
                )
                if names
            )
            self.line("answers", label, FAIL, f"The run ended in stage {stage}: {words.rstrip('.')}.{where}",
                      "ansible-playbook playbooks/diagnose.yml names the cause; then launch again with serve.yml.",
                      measured=total)  # fmt: skip
        elif failed:
            first = failed[0]
            self.line("answers", label, FAIL, f"{len(failed)} of {total} requests failed, the first in stage {first['stage']}: "
                      f"{first['error']}.", "ansible-playbook playbooks/diagnose.yml", measured=total - len(failed))  # fmt: skip
        else:
            self.line("answers", label, PASS, f"{total} requests.", measured=total)

    def restarts(self) -> None:
        label = "No restart in the run"
        restarted = [name for name, node in self.nodes.items() if node.get("restarts")]
        metrics = self.measured.get("metrics") or {}
        if restarted:
            self.line("restarts", label, FAIL, f"{', '.join(restarted)}: the rank was started anew while it was measured.",
                      "Its log before the restart: ansible-playbook playbooks/evidence.yml", measured=len(restarted),
                      expected=0)  # fmt: skip
        elif metrics.get("reset"):
            self.line("restarts", label, FAIL, f"The engine's counters began anew in stage {metrics['reset']}: the engine behind "
                      "the endpoint is another one now.", "Look for a supervisor that restarts it (docker ps, the gateway).",
                      expected=0)  # fmt: skip
        elif not self.nodes and metrics.get("error"):
            self.line("restarts", label, NOT_APPLICABLE, "Neither counters nor ranks could be read.", expected=0)
        else:
            self.line("restarts", label, PASS, "The same engine from first to last.", measured=0, expected=0)

    def counted(self) -> None:
        """What the engine counted beside what was sent."""
        label, metrics = "Engine counters agree with the requests", self.measured.get("metrics") or {}
        if metrics.get("error"):
            self.line("counters", label, NOT_APPLICABLE, f"/metrics: {metrics['error']}.",
                      "Set qualify_metrics_url to where the engine's own /metrics can be reached.")  # fmt: skip
            return
        if self.measured.get("resumed"):
            self.line(
                "counters", label, NOT_APPLICABLE, "The run was interrupted in between: not all that was sent is known."
            )
            return
        if metrics.get("reset") or self.measured.get("ended_early"):
            self.line("counters", label, NOT_APPLICABLE, "The run did not end with the engine that it began with.")
            return
        sent = sum(r.get("prompt_tokens") or 0 for r in self.measured.get("requests") or [])
        counted = delta(self.measured, "prompt_tokens")
        told = [r.get("cached_tokens") for r in self.measured.get("requests") or [] if not r.get("error")]
        hits = delta(self.measured, "hits")
        if counted is None:
            self.line("counters", label, NOT_APPLICABLE, "The page has no vllm:prompt_tokens_total.")
        elif counted > sent:
            self.line("counters", label, FAIL, f"The engine counted {number(counted)} prompt tokens, {number(sent)} were sent: "
                      "someone else used it.", "Measure again while nobody else sends requests.", measured=counted,
                      expected=sent)  # fmt: skip
        elif counted < sent:
            self.line("counters", label, FAIL, f"The engine counted {number(counted)} prompt tokens of {number(sent)} sent.",
                      "Is qualify_metrics_url the page of this engine?", measured=counted, expected=sent)  # fmt: skip
        elif hits is not None and told and None not in told and hits != sum(told):
            self.line("counters", label, FAIL, f"The engine counted {number(hits)} hits and told {number(sum(told))} cached "
                      "tokens in its answers.", measured=hits, expected=sum(told))  # fmt: skip
        else:
            self.line(
                "counters",
                label,
                PASS,
                f"{number(counted)} prompt tokens, to the token.",
                measured=counted,
                expected=sent,
            )

    # -- prefix cache
    def prefix(self) -> None:
        """Hit rate and cached tokens of exact repeats, judged by counter, cached_tokens and TTFT together (case qual-prefix-zero:
        the counter can stay 0 while caching works, and a short prompt can never hit)."""
        rate_label, label = "Prefix-cache hit rate, repeated prompt", "Cached tokens on the repeat"
        f, block = self.figures, self.plan["block_size"]
        tokens, repeats = f["prompt_tokens"], f["repeats"]
        if not repeats or tokens is None:
            for key, words in (("prefix_hit_ratio", rate_label), ("prefix_cached_tokens", label)):
                self.line(key, words, NOT_APPLICABLE, "Not measured: no repeat came back.")
            return
        due = expected_cached(int(tokens), block, self.plan["drops_last_block"])
        blocks, cached = int(tokens) // block, f["cached_tokens"]
        hits = f["hits"]
        if not due and not cached:
            drafter = " (a drafter drops the last one)" if self.plan["drops_last_block"] and blocks else ""
            size = "is below one block" if not blocks else f"holds no more than {blocks} whole block{drafter}"
            why = f"0 hits: prompt {number(tokens)} tokens {size} of {number(block)}."
            if blocks:
                why = f"0 hits: prompt {number(tokens)} tokens {size}, blocks are {number(block)} tokens."
            for key, words in (("prefix_hit_ratio", rate_label), ("prefix_cached_tokens", label)):
                self.line(key, words, NOT_APPLICABLE, why, f"Repeat with a prompt of {number(3 * block)} tokens or more "
                          "(qualify_plan.prompt_tokens).", measured=0)  # fmt: skip
            return
        faster = (f["ttft_cold_s"] or 0) > 3 * (f["ttft_cached_p50_s"] or math.inf)
        if not cached and not hits:
            if hits is None and cached is None and faster:
                why = "The engine tells neither hits nor cached tokens; repeats start " \
                      f"{f['ttft_cold_s'] / f['ttft_cached_p50_s']:.0f} times faster than the first."  # fmt: skip
                for key, words in (("prefix_hit_ratio", rate_label), ("prefix_cached_tokens", label)):
                    self.line(
                        key, words, NOT_APPLICABLE, why, "enable-prompt-tokens-details: true in the recipe's args."
                    )
                return
            why = f"cache broken: {number(due // block)} blocks repeated {repeats} times, 0 hits."
            if faster:
                why += f" Repeats start faster all the same ({number(f['ttft_cached_p50_s'], 's')} against " \
                       f"{number(f['ttft_cold_s'], 's')}): the counter may be the broken part."  # fmt: skip
            next_ = "The recipe's args switch prefix caching off." if not self.plan["caching"] else (
                "A drafter's cache group can cut every hit to 0: does the image have the draft-group patch (mods)?"
                if self.plan["drops_last_block"] else "Look for 'prefix caching' in the head's log.")  # fmt: skip
            self.line("prefix_hit_ratio", rate_label, FAIL, why, next_, measured=0, expected=due / tokens)
            self.line("prefix_cached_tokens", label, FAIL, why, next_, measured=0, expected=due)
            return
        if not hits and cached:
            self.find(
                "The engine's hit counter stays 0 while its answers tell cached tokens: the counter is what is broken."
            )
            rate: float | None = cached / tokens
        else:
            rate = f["prefix_hit_ratio"]
        cold_hits = sum(r.get("cached_tokens") or 0 for r in of_stage(self.measured, "cold"))
        if cold_hits >= 2 * block:
            self.find(
                f"The cold prompts had {number(cold_hits)} cached tokens: their time to first token is not a cold one."
            )
        expected, source = self.figure_of("prefix_hit_ratio", due / tokens)
        ok = rate is not None and rate >= expected * (1 - self.tolerance("prefix_hit_ratio"))
        next_ = "" if ok else "More than one request at a time, or a KV cache too small for the prompt, evicts blocks."
        measured = f"{number(hits)} of {number(f['queries'])} tokens" if hits else "as the answers tell"
        self.line("prefix_hit_ratio", rate_label, PASS if ok else FAIL, f"{measured}; {source}.", next_, measured=rate,
                  expected=expected)  # fmt: skip
        expected, source = self.figure_of("prefix_cached_tokens", due)
        ok = cached is not None and cached >= expected * (1 - self.tolerance("prefix_cached_tokens"))
        self.line("prefix_cached_tokens", label, PASS if ok else FAIL,
                  f"{number((cached or 0) // block)} blocks of {number(block)}; "
                  f"{source}.", next_ if not ok else "", measured=cached, expected=expected)  # fmt: skip

    def figure_of(self, key: str, computed: float) -> tuple[float, str]:
        """What the recipe expects where it holds for this prompt, else what was computed."""
        if key in self.expect and self.comparable(key):
            return float(self.expect[key]), "expected by the recipe"
        return computed, "computed from prompt and block size"

    def comparable(self, key: str) -> bool:
        """Whether a figure of ``expect`` holds for the prompt that was sent."""
        return key not in OF_CONTEXT or (self.figures["prompt_tokens"] or 0) >= 0.95 * self.context

    @property
    def context(self) -> int:
        """Length of the prompt that the recipe's figures were measured with."""
        return int(self.expect.get("context_tokens") or self.plan["max_model_len"])

    # -- plain figures
    def compare(self, key: str, label: str, unit: str, smaller_is_better: bool, next_: str) -> None:
        found, expected = self.figures.get(key), self.expect.get(key)
        if found is None:
            why = "Not measured: the run ended before it." if self.measured.get("ended_early") else "Not measured."
            if key == "decode_tokens_per_s" and of_stage(self.measured, "decode"):
                why = "The answers were too short to time (fewer than 8 tokens)."
            self.line(key, label, NOT_APPLICABLE, why, unit=unit, expected=expected)
        elif expected is None:
            self.line(key, label, NOT_APPLICABLE, "The recipe expects no figure.", unit=unit, measured=found)
        elif not self.comparable(key):
            tokens = (
                f"{number(self.figures['prompt_tokens'])} tokens"
                if self.figures["prompt_tokens"]
                else "a shorter prompt"
            )
            self.line(key, label, NOT_APPLICABLE, f"The recipe's figure is for {number(self.context)} "
                      f"tokens, this prompt has {tokens}.", "-e qualify_size=full", unit=unit, measured=found,
                      expected=expected)  # fmt: skip
        else:
            share = self.tolerance(key)
            limit = expected * (1 + share) if smaller_is_better else expected * (1 - share)
            ok = found <= limit if smaller_is_better else found >= limit
            apart = (found / expected - 1) * 100 if expected else 0.0
            bound = f"; {share * 100:g} % worse is allowed" if not ok and share else ""
            self.line(key, label, PASS if ok else FAIL, f"{apart:+.1f} %{bound}.", "" if ok else next_, unit=unit,
                      measured=found, expected=expected)  # fmt: skip

    def speed(self) -> None:
        heat = "A hot or throttled node: playbooks/thermal_report.yml; a rail on TCP: playbooks/check_network.yml."
        self.compare("ttft_cold_s", "Time to first token, cold", "s", True, heat)
        self.compare("prefill_tokens_per_s", "Prefill speed, cold", "tokens/s", False, heat)
        self.compare("ttft_cached_p95_s", "Time to first token, cached (p95)", "s", True, "Look at the hit rate first.")
        self.compare(
            "ttft_short_p50_s", "Time to first token, short prompt (p50)", "s", True, "Requests of others in the queue?"
        )
        self.compare("decode_tokens_per_s", "Decode speed, one stream (p50)", "tokens/s", False, heat)
        steps_ = [step["streams"] for step in self.measured.get("concurrency") or [] if step["streams"] > 1]
        wanted = {int(found[1]) for key in self.expect if (found := _STREAMS.match(str(key)))}
        for streams in sorted(wanted | set(steps_[-1:])):
            self.compare(
                f"decode_tokens_per_s_{streams}", f"Decode speed, {streams} streams together", "tokens/s", False, heat
            )

    def acceptance(self) -> None:
        label, f = "Drafter acceptance", self.figures
        if not self.plan["speculative"] and not f["draft_tokens"]:
            self.line("acceptance", label, NOT_APPLICABLE, "The recipe has no speculation.")
        elif f["acceptance"] is None:
            status, why = NOT_APPLICABLE, "The page has no counters of speculation."
            if f["draft_tokens"] == 0 and self.plan["drops_last_block"]:
                status, why = FAIL, "The engine drafted nothing."
            elif f["draft_tokens"] == 0:
                why = "Nothing was drafted: n-grams propose only what repeats itself."
            self.line("acceptance", label, status, why, "Does the head's log name the drafter?",
                      expected=self.expect.get("acceptance"))  # fmt: skip
        else:
            self.compare("acceptance", label, "", False,
                         "Speculation that is mostly refused costs speed (case qual-acceptance-tax): is the drafter the one "
                         "for this checkpoint, in its weight format?")  # fmt: skip
            self.lines[-1]["why"] = f"{number(f['accepted_tokens'])} of {number(f['draft_tokens'])} drafted tokens; " + \
                self.lines[-1]["why"][:1].lower() + self.lines[-1]["why"][1:]  # fmt: skip

    # -- several at once
    def concurrency(self) -> None:
        label, done = "All request slots at once", self.measured.get("concurrency") or []
        limit = self.measured.get("limit")
        bad = [step for step in [*done, *([limit] if limit else [])] if step["errors"]]
        if not done or (bad and bad[0]["streams"] == 1):
            # One at a time that fails is no matter of concurrency.
            self.line("concurrency", label, NOT_APPLICABLE, "Not measured.")
        elif bad:
            step = bad[0]
            long = f" of {number(step['prompt_tokens'])} tokens" if step.get("prompt_tokens") else ""
            self.line("concurrency", label, FAIL, f"{step['streams']} requests{long} at once: {step['errors']} failed "
                      f"({step['error']}).", "Lower max-num-seqs below that, or max-model-len (case qual-concurrency3).",
                      measured=max((s["streams"] for s in done if not s["errors"]), default=0),
                      expected=self.plan["max_num_seqs"])  # fmt: skip
        else:
            most = done[-1]["streams"]
            beside = f", and {limit['streams']} of {number(limit['prompt_tokens'])} tokens" if limit else ""
            self.line("concurrency", label, PASS if most >= min(self.plan["max_num_seqs"], MOST_STREAMS) else NOT_APPLICABLE,
                      f"{most} at once{beside}.", measured=most, expected=self.plan["max_num_seqs"])  # fmt: skip

    def soak(self) -> None:
        soak = self.measured.get("soak")
        if soak:
            windows = [w["tokens_per_s"] for w in soak["windows"]]
            slower = len(windows) > 2 and windows[-1] < 0.9 * max(windows[:2])
            why = f"{soak['requests']} requests in {number(soak['seconds'], 's')}, {soak['errors']} failed"
            if slower:
                why += f"; {number(windows[-1])} tokens/s at the end, {number(max(windows[:2]))} at the beginning"
            self.line("soak", "Steady under load", FAIL if soak["errors"] or slower else PASS, f"{why}.",
                      "Temperature and clock of the nodes over time say whether heat did it." if slower else "",
                      measured=windows[-1] if windows else None, unit="tokens/s")  # fmt: skip

    def checks(self) -> None:
        done = self.measured.get("checks") or {}
        for name, label in CHECKS.items():
            said = done.get(name)
            if name not in self.plan["checks"]:
                why = "The recipe's args do not enable-auto-tool-choice." if name == "tool_call" and not self.plan["tools"] else \
                      "Not asked of this model (expect.checks)."  # fmt: skip
                self.line(name, label, NOT_APPLICABLE, why)
            elif said is None:
                self.line(name, label, NOT_APPLICABLE, "Not measured: the run ended before it.")
            else:
                status = NOT_APPLICABLE if said["ok"] is None else PASS if said["ok"] else FAIL
                self.line(name, label, status, said["why"], said.get("next", "") if status == FAIL else "")

    # -- the nodes
    def faults(self) -> None:
        for key, label, words in (
            ("major_faults", "Major faults of the engine", "engine"),
            ("other_major_faults", "Major faults of other processes", "other"),
        ):
            sampled = {name: node for name, node in self.nodes.items() if node.get("faults") is not None}
            if not sampled:
                self.line(key, label, NOT_APPLICABLE, "No sampler ran on the nodes.")
                continue
            counts = {name: node["faults"][words] for name, node in sampled.items()}
            limit = self.expect.get(key, 0 if words == "engine" else OTHER_MAJOR_FAULTS)
            over = {name: count for name, count in counts.items() if count > limit}
            worst = max(counts.values())
            for name, node in sampled.items():
                sources = [
                    f"{s['name']} {number(s['count'])}"
                    for s in node["faults"]["sources"]
                    if s["engine"] is (words == "engine")
                ]
                if counts[name]:
                    self.find(f"{number(counts[name])} major faults by {', '.join(sources[:4])}.", name)
            if over:
                self.line(key, label, FAIL, "; ".join(f"{name}: {number(count)}" for name, count in over.items()) + ".",
                          "Pages of the engine were evicted: is a guard still on, does something read large files there?"
                          if words == "engine" else "Stop what reads files on that node while it serves.",
                          measured=worst, expected=limit)  # fmt: skip
            else:
                self.line(
                    key,
                    label,
                    PASS,
                    f"on {len(sampled)} node{'s' * (len(sampled) > 1)}.",
                    measured=worst,
                    expected=limit,
                )

    def heat(self) -> None:
        for key, label, unit in (
            ("power_w", "GPU power under load", "W"),
            ("gpu_celsius", "GPU temperature under load", "°C"),
        ):
            seen = {name: node[key] for name, node in self.nodes.items() if node.get(key) is not None}
            expected = self.expect.get(key)
            if not seen:
                self.line(key, label, NOT_APPLICABLE, "No GPU readings.", unit=unit, expected=expected)
                continue
            hottest = max(seen, key=lambda name: seen[name])
            each = ", ".join(f"{name} {number(value, unit)}" for name, value in seen.items())
            if expected is None:
                self.line(
                    key,
                    label,
                    NOT_APPLICABLE,
                    f"The recipe expects no figure; {each}.",
                    unit=unit,
                    measured=seen[hottest],
                )
            else:
                ok = seen[hottest] <= expected * (1 + self.tolerance(key))
                self.line(key, label, PASS if ok else FAIL, f"{each}.",
                          "" if ok else "playbooks/tune_thermal.yml caps the GPU clock.", unit=unit,
                          measured=seen[hottest], expected=expected)  # fmt: skip

    def hardware(self) -> None:
        """Errors of the fabric, lines of the kernel, and what is only worth a look."""
        sampled = {name: node for name, node in self.nodes.items() if node.get("rdma_errors") is not None}
        if not sampled:
            self.line("rdma_errors", "RDMA errors", NOT_APPLICABLE, "No sampler ran on the nodes.")
        else:
            bad = {name: node["rdma_errors"] for name, node in sampled.items() if node["rdma_errors"]}
            why = "; ".join(
                f"{name}: " + ", ".join(f"{k} +{v}" for k, v in errors.items()) for name, errors in bad.items()
            )
            self.line("rdma_errors", "RDMA errors", FAIL if bad else PASS, f"{why or 'None'}.",
                      "playbooks/check_network.yml" if bad else "", measured=sum(sum(e.values()) for e in bad.values()),
                      expected=0)  # fmt: skip
        hard = [(name, line) for name, node in self.nodes.items() for line in node.get("kernel_lines") or []]
        worst = [(name, line) for name, line in hard if line["severity"] != "soft"]
        self.line("kernel", "Kernel log", FAIL if worst else PASS if self.nodes else NOT_APPLICABLE,
                  f"{worst[0][0]}: {worst[0][1]['id']}, {worst[0][1]['line']}" if worst else
                  "Nothing that the failure catalogue knows." if self.nodes else "No node was looked at.",
                  "docs/troubleshooting.md" if worst else "")  # fmt: skip
        for name, line in hard:
            if (name, line) not in worst[:1]:
                self.find(f"kernel: {line['id']} ({line['count']} times): {line['line']}", name)
        self.memory()

    def memory(self) -> None:
        kv = {
            name: float(node["kv_available_gib"]) for name, node in self.nodes.items() if node.get("kv_available_gib")
        }
        if len(kv) > 1 and max(kv.values()) - min(kv.values()) > KV_GAP_GIB:
            low = min(kv, key=lambda name: kv[name])
            self.find(f"It offers {kv[low]:.2f} GiB for the KV cache, the best rank {max(kv.values()):.2f} GiB: the pool is the "
                      f"smallest rank's, {max(kv.values()) - min(kv.values()):.2f} GiB per rank are given away.", low,
                      "What else uses memory there: playbooks/status.yml (case qual-rank-kv-gap).")  # fmt: skip
        for name, node in self.nodes.items():
            if (node.get("guard") or {}).get("active"):
                self.find("A memory guard was on while it was measured: its drops cost major faults.", name,
                          "serve.yml takes it off; recipe key guard.keep.")  # fmt: skip
            if node.get("gpu_error"):
                self.find(f"No GPU readings: {node['gpu_error']}", name)
            if node.get("missing"):
                self.find(f"Nothing was sampled there: {node['missing']}", name)
        pinned = self.plan.get("kv_pinned")
        tokens = self.figures["prompt_tokens"] or 0
        if pinned and tokens < KV_PIN_TOKENS <= self.plan["max_model_len"]:
            self.find(f"kv-cache-memory is pinned and the longest prompt had {number(tokens)} tokens: a pinned cache can die "
                      f"on its first prompt of {number(KV_PIN_TOKENS)} (case launch-kv-pin).", None,
                      "-e qualify_size=standard")  # fmt: skip

    def all(self) -> None:
        for step in (self.answers, self.restarts, self.counted, self.prefix, self.speed, self.acceptance, self.faults,
                     self.concurrency, self.soak, self.checks, self.heat, self.hardware):  # fmt: skip
            step()


def judge(result: Mapping[str, Any]) -> dict[str, Any]:
    """The result with ``figures``, ``lines``, ``findings`` and ``verdict`` (again, if it had them already)."""
    verdict = Verdict(result)
    verdict.all()
    failed = sum(line["status"] == FAIL for line in verdict.lines)
    return {
        **result,
        "schema": SCHEMA,
        "figures": verdict.figures,
        "lines": verdict.lines,
        "findings": verdict.findings,
        "verdict": FAIL if failed else PASS,
    }


# --- two results -----------------------------------------------------------------------------------------------------
# figure: label, unit, its samples, smaller is better (None: neither).
def _samples(result: Mapping[str, Any]) -> list[tuple[str, str, list[float], bool | None]]:
    measured, nodes = result["measured"], result.get("nodes") or {}

    def of(stage: str, key: str) -> list[float]:
        return [r[key] for r in of_stage(measured, stage) if r.get(key) is not None]

    out: list[tuple[str, str, list[float], bool | None]] = [
        ("Decode speed, one stream", "tokens/s", of("decode", "tokens_per_s"), False),
        ("Time to first token, cold", "s", of("cold", "ttft_s"), True),
        ("Time to first token, cached", "s", of("cached", "ttft_s"), True),
        ("Time to first token, short prompt", "s", of("short", "ttft_s"), True),
    ]
    out += [
        (f"Decode speed, {step['streams']} streams", "tokens/s", step.get("rounds") or [step["tokens_per_s"]], False)
        for step in measured.get("concurrency") or []
        if step["streams"] > 1 and not step["errors"]
    ]
    figures_ = result.get("figures") or figures(measured)
    for key, label in (("prefix_hit_ratio", "Prefix-cache hit rate"), ("acceptance", "Drafter acceptance")):
        out.append((label, "", [figures_[key]] if figures_.get(key) is not None else [], False))
    for name, node in nodes.items():
        for key, label, unit in (
            ("power_w", "GPU power", "W"),
            ("gpu_celsius", "GPU temperature", "°C"),
            ("soc_celsius", "SoC", "°C"),
        ):
            out.append((f"{label}, {name}", unit, [node[key]] if node.get(key) is not None else [], True))
        out.append((f"Major faults, {name}", "", [node["faults"]["engine"]] if node.get("faults") else [], True))
    return out


# Least share by which a figure has to move to be called different, whatever its spread: one sample has none.
LEAST_SHARE, LEAST_SHARE_ONE_SAMPLE = 0.05, 0.10
LEAST_CELSIUS, LEAST_TTFT_S = 3.0, 0.005


def _error(values: Sequence[float]) -> float:
    """Standard error of the median, by the median absolute deviation."""
    middle = statistics.median(values)
    deviation = statistics.median(abs(value - middle) for value in values)
    return 1.2533 * 1.4826 * deviation / math.sqrt(len(values))


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Two results side by side: ``{label, unit, before, after, percent, verdict}`` with ``verdict`` better, worse, different, same,
    or ``-`` where one of them lacks the figure. Different means: by more than the least share, and by three standard errors."""
    rows, second = [], {row[0]: row[2] for row in _samples(after)}
    for label, unit, first, smaller in _samples(before):
        other = second.get(label) or []
        if not first and not other:
            continue
        row: dict[str, Any] = {"label": label, "unit": unit, "before": median(first), "after": median(other)}
        row.update(percent=None, verdict="-")
        if first and other:
            a, b = statistics.median(first), statistics.median(other)
            row["percent"] = round((b / a - 1) * 100, 1) if a else None
            least = (LEAST_SHARE if min(len(first), len(other)) >= 3 else LEAST_SHARE_ONE_SAMPLE) * abs(a)
            if unit == "°C":
                least = LEAST_CELSIUS
            elif unit == "s":
                least = max(least, LEAST_TTFT_S)
            noise = 3 * math.hypot(_error(first), _error(other))
            real = abs(b - a) > max(least, noise)
            row["verdict"] = ("better" if (b < a) == smaller else "worse") if real else "same"
        rows.append(row)
    return rows
