# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Carry a qualification plan out: stages of requests through the one client, and the engine's counters around each stage.

Nothing is judged here (``_qualify.py`` does that): a request that fails is a row with an error; a run that cannot go on says why.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ansible_collections.gb10.fleet.plugins.module_utils._openai_client import Deadline, Endpoint
from ansible_collections.gb10.fleet.plugins.module_utils._qualify import median
from ansible_collections.gb10.fleet.plugins.module_utils._thermal import metric

# Our name of a counter -> its names in vLLM, newest first. Names are exact: `_created` and per-position series are others.
COUNTERS: dict[str, tuple[str, ...]] = {
    "queries": ("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total"),
    "hits": ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"),
    "prompt_tokens": ("vllm:prompt_tokens_total",),
    "cached_tokens": ("vllm:prompt_tokens_cached_total",),
    "generation_tokens": ("vllm:generation_tokens_total",),
    "preemptions": ("vllm:num_preemptions_total",),
    "drafts": ("vllm:spec_decode_num_drafts_total",),
    "draft_tokens": ("vllm:spec_decode_num_draft_tokens_total",),
    "accepted_tokens": ("vllm:spec_decode_num_accepted_tokens_total",),
}
RUNNING = "vllm:num_requests_running"
# Both answers are compared: long enough to tell two answers apart, short beside a prefill.
ANSWER_TOKENS = 16
CHECK_TOKENS = 512
METRICS_TIMEOUT_S = 10.0
# The page follows the last answer by an engine step.
SETTLE_S, SETTLE_LIMIT_S = 0.1, 3.0
TOPICS = ("a lighthouse", "a market", "a long train ride", "the sea in winter", "an old library", "a mountain village",
          "a night shift", "a workshop")  # fmt: skip
KOREAN = "퍼셉트론이 무엇인지 한국어로 세 문장으로 설명해 주세요."
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather forecast of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city", "days"],
        },
    },
}
NODE = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "cores": {"type": "integer"}},
    "required": ["name", "cores"],
    "additionalProperties": False,
}


class Ended(Exception):
    """The run cannot go on; ``row`` is the request that showed it."""

    def __init__(self, row: Mapping[str, Any]) -> None:
        super().__init__(row["error"])
        self.row = row


def counters(page: str) -> dict[str, float | None]:
    """Counters of a metrics page by our names; None for what it does not have."""
    return {
        name: next((value for known in names if (value := metric(page, known)) is not None), None)
        for name, names in COUNTERS.items()
    }


class Prompts:
    """Prompts that no cache has seen: each begins with a number of its own, and is as long as asked for."""

    def __init__(self, count: Callable[[str], int], seed: int) -> None:
        self.count, self.random = count, random.Random(seed)  # noqa: S311 - words, no secrets
        self.tokens_per_word: float | None = None

    def words(self, number: int) -> list[str]:
        letters = "abcdefghijklmnoprstuvw"
        return ["".join(self.random.choices(letters, k=5)) for dummy in range(number)]

    def make(self, tokens: int, ending: str = "", middle: str = "") -> str:
        """A prompt of at most ``tokens`` tokens and hardly less; ``middle`` stands in its middle, ``ending`` at its end."""
        head = f"Text {self.random.randrange(10**9):09d}:"

        def text(words: Sequence[str]) -> str:
            half = len(words) // 2
            return " ".join(part for part in (head, *words[:half], middle, *words[half:], ending) if part)

        if self.tokens_per_word is None:
            self.tokens_per_word = max(self.count(text(self.words(64))) - self.count(text([])), 64) / 64
        base = self.count(text([]))
        words = self.words(max(int((tokens - base) / self.tokens_per_word), 0))
        slack = max(2.0, 2 * self.tokens_per_word, tokens / 1000)
        for dummy in range(8):
            left = tokens - self.count(text(words))
            if 0 <= left <= slack or (left < 0 and not words):
                break
            change = int(left / self.tokens_per_word) - (left < 0)
            words = words[:change] if change < 0 else [*words, *self.words(max(change, 1))]
        return text(words)


class Run:
    """One run of a plan against one engine."""

    def __init__(
        self,
        endpoint: Endpoint,
        model: str,
        plan: Mapping[str, Any],
        metrics: Endpoint | None = None,
        done: Mapping[str, Any] | None = None,
        tell: Callable[[str], None] = lambda line: None,
        keep: Callable[[Mapping[str, Any]], None] = lambda measured: None,
    ) -> None:
        """``done``: what an interrupted run measured. ``tell`` gets lines of progress, ``keep`` what is measured so far."""
        self.endpoint, self.model, self.plan = endpoint, model, plan
        self.metrics, self.tell, self.keep = metrics or endpoint, tell, keep
        self.measured: dict[str, Any] = {
            "began": time.time(), "seed": random.SystemRandom().randrange(2**31), "requests": [], "stages": [],
            "concurrency": [], "limit": None, "soak": None, "checks": {}, "ended_early": None,
            "metrics": {"error": None, "before": None, "after": None, "reset": None}, "resumed": False,
            **({**done, "resumed": True} if done else {}),
        }  # fmt: skip
        self.lock = threading.Lock()
        self.stage_name = ""
        self.ratio: float | None = None
        # Another seed after an interruption: what was sent before it is in the cache.
        self.prompts = Prompts(self.count, self.measured["seed"] + len(self.measured["stages"]))
        self.endless: dict[str, Any] = {"ignore_eos": True} if plan.get("ignore_eos") else {}

    # -- requests ------------------------------------------------------------------------------------------------------
    def ask(self, prompt: str, max_tokens: int, stage: str = "", **extra: Any) -> dict[str, Any]:
        """One request and its row. Raises Ended where no further one would be answered."""
        row: dict[str, Any] = {"stage": stage or self.stage_name, "at": time.time(), "status": None, "error": None,
                               "ttft_s": None, "tokens_per_s": None, "completion_tokens": None, "prompt_tokens": None,
                               "cached_tokens": None, "total_s": None}  # fmt: skip
        timeout, answer, fatal = self.plan["request_timeout_s"], {}, False
        try:
            answer = self.endpoint.chat(self.model, prompt, max_tokens, Deadline(timeout), **extra)
            row.update({name: answer[name] for name in row if name in answer})
            fatal = row["status"] in (401, 403, 404)
        except TimeoutError:
            row["error"], fatal = f"no answer within {timeout:g} s", True
        except ConnectionRefusedError:
            row["error"], fatal = f"nothing listens on {self.endpoint.host}:{self.endpoint.port}", True
        except (OSError, http.client.HTTPException, ValueError) as exc:
            row["error"] = f"the connection broke ({exc.__class__.__name__} {exc})".strip()
        with self.lock:
            self.measured["requests"].append(row)
        if fatal:
            raise Ended(row)
        return {"text": "", "content": "", "tool_calls": [], "finish_reason": None, **answer, **row}

    def count(self, text: str) -> int:
        """Tokens of a chat with this text, by /tokenize; where there is none, from one request of one token."""
        if self.ratio is None:
            body = {"model": self.model, "messages": [{"role": "user", "content": text}]}
            try:
                status, said = self.endpoint.text("POST", "/tokenize", Deadline(60), body)
                if status == 200:
                    return int(json.loads(said)["count"])
            except (OSError, http.client.HTTPException, ValueError, KeyError):
                pass
            row = self.ask(text, 1, stage="size")
            if not row["prompt_tokens"]:
                return max(len(text) // 4, 1)
            self.ratio = row["prompt_tokens"] / len(text)
        return max(round(len(text) * self.ratio), 1)

    def page(self) -> str:
        """The metrics page, empty where there is none (``metrics.error`` says why)."""
        try:
            status, said = self.metrics.text("GET", "/metrics", Deadline(METRICS_TIMEOUT_S))
        except (OSError, http.client.HTTPException, ValueError) as exc:
            status, said = 0, f"{exc.__class__.__name__} {exc}".strip()
        if status != 200:
            # A page that was there before is gone with its engine: that is told elsewhere.
            if self.measured["metrics"]["before"] is None:
                self.measured["metrics"]["error"] = said if not status else f"HTTP {status}"
            return ""
        return said

    def settled(self) -> dict[str, float | None] | None:
        """The counters, once nothing runs and they stand still."""
        end, last = time.monotonic() + SETTLE_LIMIT_S, None
        while page := self.page():
            now = counters(page)
            if (now == last and not metric(page, RUNNING)) or time.monotonic() >= end:
                return now
            last = now
            time.sleep(SETTLE_S)
        return None

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[bool]:
        """A stage with its counters; yields False when an earlier run did it already."""
        if any(done["name"] == name for done in self.measured["stages"]):
            yield False
            return
        self.stage_name = name
        self.measured["requests"] = [r for r in self.measured["requests"] if r["stage"] != name]
        before, began = self.settled(), time.time()
        metrics = self.measured["metrics"]
        if metrics["before"] is None:
            metrics["before"] = before
        entry: dict[str, Any] = {"name": name, "began": began, "ended": None, "counters": None}
        try:
            yield True
        finally:
            after, entry["ended"] = self.settled(), time.time()
            if before and after:
                grown = {key: now - value for key, value in before.items()
                         if value is not None and (now := after[key]) is not None}  # fmt: skip
                entry["counters"] = grown
                if any(value < 0 for value in grown.values()):
                    metrics["reset"] = metrics["reset"] or name
            if after:
                metrics["after"] = after
            self.measured["stages"].append(entry)
        self.keep(self.measured)

    # -- stages --------------------------------------------------------------------------------------------------------
    def run(self) -> dict[str, Any]:
        """All stages. What was measured until then when the engine stops answering."""
        try:
            for stage in (
                self.short,
                self.cold_and_cached,
                self.decode,
                self.concurrency,
                self.limit,
                self.checks,
                self.soak,
            ):
                stage()
        except Ended as end:
            row = end.row
            self.measured["ended_early"] = {
                "stage": row["stage"], "error": row["error"], "status": row["status"], "key_needed": row["status"] in (401, 403),
            }  # fmt: skip
        self.measured["ended"] = time.time()
        return self.measured

    def short(self) -> None:
        with self.stage("short") as due:
            for number in range(self.plan["short"] if due else 0):
                self.tell(f"short prompts, {number + 1} of {self.plan['short']}")
                self.ask(f"{self.prompts.random.randrange(10**9)}: say hello.", ANSWER_TOKENS)

    def cold_and_cached(self) -> None:
        """Unique prompts, and the last of them again and again: nothing else in between."""
        plan, prompt, first = self.plan, "", None
        done = {stage["name"] for stage in self.measured["stages"]}
        if {"cold", "cached"} <= done:
            return
        # A repeat needs its first: both stages belong together.
        self.measured["stages"] = [s for s in self.measured["stages"] if s["name"] != "cold"]
        # Prompts are sized before the stage, so that its counters hold its own requests only.
        self.stage_name = "size"
        self.tell(f"making prompts of {plan['prompt_tokens']:,} tokens")
        prompts = [self.prompts.make(plan["prompt_tokens"], "Go on with this text.") for dummy in range(plan["colds"])]
        with self.stage("cold"):
            for number, prompt in enumerate(prompts):
                self.tell(f"cold prompt of {plan['prompt_tokens']:,} tokens, {number + 1} of {plan['colds']}")
                first = self.ask(prompt, ANSWER_TOKENS)
        with self.stage("cached"):
            texts = []
            for number in range(plan["repeats"]):
                self.tell(f"the same prompt again, {number + 1} of {plan['repeats']}")
                row = self.ask(prompt, ANSWER_TOKENS)
                texts += [row["text"]] if not row["error"] else []
        if "same_answer" in plan["checks"] and first is not None and not first["error"] and texts:
            other = next((text for text in texts if text != first["text"]), None)
            self.measured["checks"]["same_answer"] = {
                "ok": other is None,
                "why": f"{len(texts)} repeats say what the first said." if other is None
                else f"Cold: {first['text'][:60]!r}, cached: {other[:60]!r}.",
                "next": "Cached blocks are not what was computed (kv-cache-dtype?), or sampling ignores temperature 0.",
            }  # fmt: skip

    def decode(self) -> None:
        with self.stage("decode") as due:
            for number in range(self.plan["decode_runs"] if due else 0):
                self.tell(f"decode, {number + 1} of {self.plan['decode_runs']}")
                topic = TOPICS[number % len(TOPICS)]
                self.ask(
                    f"{self.prompts.random.randrange(10**9)}: write a long story about {topic}.",
                    self.plan["decode_tokens"],
                    **self.endless,
                )

    def at_once(self, prompts: Sequence[str], max_tokens: int) -> dict[str, Any]:
        """All prompts at the same time: tokens a second of all together."""
        begun = time.monotonic()

        def one(prompt: str) -> dict[str, Any]:
            try:
                return self.ask(prompt, max_tokens, **self.endless)
            except Ended as end:
                return dict(end.row)

        with ThreadPoolExecutor(max_workers=len(prompts)) as pool:
            rows = list(pool.map(one, prompts))
        seconds = time.monotonic() - begun
        failed = [row for row in rows if row["error"]]
        tokens = sum(row["completion_tokens"] or 0 for row in rows if not row["error"])
        return {
            "streams": len(prompts), "seconds": round(seconds, 3), "tokens": tokens, "tokens_per_s": round(tokens / seconds, 2),
            "ttft_p50_s": median(row["ttft_s"] for row in rows), "errors": len(failed),
            "error": failed[0]["error"] if failed else None,
        }  # fmt: skip

    def concurrency(self) -> None:
        """Every step once, then all of them again: what disturbs the machine for a moment hits one round of each."""
        plan = self.plan
        for number in range(plan["rounds"]):
            for streams in plan["concurrency"]:
                self.stage_name = "size"
                name = f"streams {streams}, round {number + 1}"
                if any(stage["name"] == name for stage in self.measured["stages"]):
                    continue
                prompts = [self.prompts.make(plan["concurrency_prompt_tokens"], "Write a story about this text.")
                           for dummy in range(streams)]  # fmt: skip
                with self.stage(name):
                    self.tell(f"{streams} requests at once, round {number + 1} of {plan['rounds']}")
                    step = self.step_of(self.at_once(prompts, plan["concurrency_tokens"]))
                if step["errors"]:
                    # Whether the engine outlived it.
                    self.ask("Say: ready", ANSWER_TOKENS)
                    return

    def step_of(self, one: dict[str, Any]) -> dict[str, Any]:
        """The step that a round belongs to, with the round in it: sums, and the median of tokens a second."""
        step = next((s for s in self.measured["concurrency"] if s["streams"] == one["streams"]), None)
        if step is None:
            self.measured["concurrency"].append({**one, "rounds": [one["tokens_per_s"]]})
            return one
        step["rounds"].append(one["tokens_per_s"])
        step.update(seconds=round(step["seconds"] + one["seconds"], 3), tokens=step["tokens"] + one["tokens"],
                    tokens_per_s=median(step["rounds"]), errors=one["errors"], error=one["error"])  # fmt: skip
        return step

    def limit(self) -> None:
        """Every slot with a prompt near the end of the context (case qual-concurrency3: stable at two, dead at three)."""
        if not self.plan["limit"]:
            return
        streams, tokens = self.plan["concurrency"][-1], self.plan["limit_tokens"]
        self.stage_name = "size"
        prompts = [self.prompts.make(tokens, "Go on with this text.") for dummy in range(streams)]
        with self.stage("limit") as due:
            if due:
                self.tell(f"{streams} requests of {tokens:,} tokens at once")
                self.measured["limit"] = {**self.at_once(prompts, ANSWER_TOKENS), "prompt_tokens": tokens}
        if self.measured["limit"]["errors"]:
            self.ask("Say: ready", ANSWER_TOKENS)

    def soak(self) -> None:
        """Half of the slots busy for ``soak_s`` seconds."""
        seconds = self.plan["soak_s"]
        if not seconds:
            return
        streams = max(self.plan["concurrency"][-1] // 2, 1)
        with self.stage("soak") as due:
            if not due:
                return
            begun, windows, requests, errors = time.monotonic(), [], 0, 0
            length = max(min(60.0, seconds / 5), 1.0)
            while (spent := time.monotonic() - begun) < seconds:
                self.tell(f"soak, {spent:.0f} of {seconds} s")
                window, tokens = time.monotonic(), 0
                while time.monotonic() - window < length:
                    prompts = [f"{self.prompts.random.randrange(10**9)}: write a story about {TOPICS[n % len(TOPICS)]}."
                               for n in range(streams)]  # fmt: skip
                    step = self.at_once(prompts, self.plan["concurrency_tokens"])
                    requests, errors, tokens = requests + streams, errors + step["errors"], tokens + step["tokens"]
                    if step["errors"]:
                        self.ask("Say: ready", ANSWER_TOKENS)
                spent = time.monotonic() - window
                windows.append({"at": time.time(), "tokens_per_s": round(tokens / spent, 2)})
            self.measured["soak"] = {"seconds": round(time.monotonic() - begun, 1), "streams": streams, "requests": requests,
                                     "errors": errors, "windows": windows}  # fmt: skip

    # -- correctness ---------------------------------------------------------------------------------------------------
    def checks(self) -> None:
        with self.stage("checks") as due:
            for name, check in (("needle", self.needle), ("korean", self.korean), ("tool_call", self.tool_call),
                                ("json_schema", self.json_schema), ("not_empty", self.not_empty)):  # fmt: skip
                if due and name in self.plan["checks"]:
                    self.tell(f"check: {name.replace('_', ' ')}")
                    self.measured["checks"][name] = check()

    def needle(self) -> dict[str, Any]:
        code = f"{self.prompts.random.randrange(1000, 10000)}-{self.prompts.random.randrange(1000, 10000)}"
        prompt = self.prompts.make(self.plan["needle_tokens"], "What is the code of the box? Answer with the code only.",
                                   f"The code of the box is {code}.")  # fmt: skip
        row = self.ask(prompt, CHECK_TOKENS)
        if row["error"]:
            return {"ok": False, "why": f"{row['error']}."}
        if code in row["text"]:
            return {"ok": True, "why": f"Found in the middle of {row['prompt_tokens']:,} tokens."}
        return {"ok": False, "why": f"{code} in the middle of {row['prompt_tokens'] or 0:,} tokens was not found; the answer: "
                f"{row['text'][:80]!r}.", "next": "Does it pass with a shorter prompt (qualify_plan.needle_tokens)? Then look at "
                "the KV cache's type and the model's own context length."}  # fmt: skip

    def korean(self) -> dict[str, Any]:
        """Case ckpt-modelopt-corrupt: token ids that are no text, with 200 OK."""
        row = self.ask(KOREAN, 256)
        if row["error"]:
            return {"ok": False, "why": f"{row['error']}."}
        text = row["text"]
        if row["finish_reason"] == "length":
            text = text.rstrip("\ufffd")  # a character cut in two by the limit
        broken = text.count("\ufffd")
        if broken:
            return {"ok": False, "why": f"{broken} broken characters (U+FFFD) in {len(text)}: {text[:60]!r}.",
                    "next": "The quantization corrupts token ids (vllm-project/vllm#54150): take another build."}  # fmt: skip
        if not any("가" <= letter <= "힣" for letter in text):
            return {"ok": None, "why": f"The answer has no Korean letter: {text[:60]!r}."}
        return {"ok": True, "why": f"{len(text)} characters, none broken."}

    def tool_call(self) -> dict[str, Any]:
        row = self.ask("What will the weather be in Paris for the next 3 days? Use the tool.", CHECK_TOKENS, tools=[WEATHER],
                       tool_choice="auto")  # fmt: skip
        if row["error"]:
            return {"ok": False, "why": f"{row['error']}."}
        hint = "Does tool-call-parser fit this model's chat template?"
        if not row["tool_calls"]:
            return {"ok": False, "why": f"No call came; the answer: {row['text'][:80]!r}.", "next": hint}
        call = row["tool_calls"][0]
        try:
            given = json.loads(call["arguments"])
        except ValueError:
            return {"ok": False, "why": f"The arguments are no JSON: {call['arguments'][:80]!r}.", "next": hint}
        missing = [name for name in ("city", "days") if not isinstance(given, dict) or name not in given]
        if call["name"] != "get_weather" or missing:
            return {
                "ok": False,
                "why": f"{call['name']}({call['arguments'][:80]}) is not what was asked for.",
                "next": hint,
            }
        return {"ok": True, "why": f"{call['name']}({call['arguments'][:80]})"}

    def json_schema(self) -> dict[str, Any]:
        wanted = {"type": "json_schema", "json_schema": {"name": "node", "schema": NODE, "strict": True}}
        row = self.ask(
            "Describe a computer named spark-01 with 20 cores as JSON.", CHECK_TOKENS, response_format=wanted
        )
        hint = "An engine without structured output: leave json_schema out of the recipe's expect.checks."
        if row["error"]:
            return {"ok": False, "why": f"{row['error']}.", "next": hint}
        try:
            given = json.loads(row["content"])
            fits = (
                isinstance(given["name"], str)
                and isinstance(given["cores"], int)
                and not isinstance(given["cores"], bool)
                and len(given) == 2
            )
        except (ValueError, KeyError, TypeError):
            fits = False
        return {
            "ok": fits,
            "why": ("" if fits else "It does not fit the schema: ") + repr(row["content"][:80]),
            "next": hint,
        }

    def not_empty(self) -> dict[str, Any]:
        """Content within the budget, not thoughts alone; and no empty answer in all of the run."""
        row = self.ask("Say in one sentence what a computer is.", CHECK_TOKENS)
        empty = [r for r in self.measured["requests"] if r["error"] == "the answer is empty"]
        if empty:
            return {"ok": False, "why": f"{len(empty)} empty answers, the first in stage {empty[0]['stage']}.",
                    "next": "Does the model end at once (chat template, stop tokens)?"}  # fmt: skip
        if row["error"]:
            return {"ok": False, "why": f"{row['error']}."}
        if not row["content"].strip():
            return {"ok": False, "why": f"No content in {row['completion_tokens']} tokens: all of the budget went into thinking.",
                    "next": "default-chat-template-kwargs: {enable_thinking: false}, or a larger max_tokens."}  # fmt: skip
        return {"ok": True, "why": f"{row['content'][:60]!r}"}
