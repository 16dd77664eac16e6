# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The engine behind the API: slots, a queue, a prefix cache, tokens, and the other ranks, which every step needs."""

from __future__ import annotations

import heapq
import itertools
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from .faults import Settings
from .journal import TOKENS_PER_GIB, Journal, Rank
from .metrics import Page
from .peers import Hub, PeerLost, PeerSilent

DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."
REPLACED = "안녕하\ufffd요. 저\ufffd 두 대의 노드\ufffd\ufffd 실행됩니다."
THOUGHT = "The question is clear."


class EngineDead(Exception):
    """The engine failed on this request or before it."""


class Refused(Exception):
    """The request fails, the engine lives on."""


@dataclass
class Job:
    """One request and what came of it."""

    prompt: str
    max_tokens: int
    priority: int = 0
    ignore_eos: bool = False
    answer: str = ""
    arrived: float = field(default_factory=time.monotonic)
    prompt_tokens: int = 0
    cached: int = 0
    tokens: int = 0
    finish: str = "length"


def pieces(text: str) -> list[str]:
    """`text` in pieces of at most four characters: near enough to tokens."""
    return re.findall(r"\s?[^\s]{1,4}|\s", text)


class PrefixCache:
    """Which blocks of which prompts were seen, oldest forgotten first."""

    def __init__(self, block: int, blocks: int) -> None:
        self.block, self.blocks = block, max(1, blocks)
        self._seen: OrderedDict[int, None] = OrderedDict()
        self._lock = threading.Lock()

    def look_up(self, tokens: list[str]) -> int:
        """Tokens of the longest known prefix in whole blocks (never the whole prompt); remembers all blocks."""
        known, matching, chain = 0, True, 0
        with self._lock:
            for begin in range(0, len(tokens) - self.block + 1, self.block):
                chain = hash((chain, *tokens[begin : begin + self.block]))
                if matching and chain in self._seen and begin + self.block < len(tokens):
                    known = begin + self.block
                else:
                    matching = False
                self._seen[chain] = None
                self._seen.move_to_end(chain)
            while len(self._seen) > self.blocks:
                self._seen.popitem(last=False)
        return known


class Engine:
    """Answers requests, a token a step, as long as all ranks do their part."""

    def __init__(
        self,
        rank: Rank,
        settings: Settings,
        journal: Journal,
        hub: Hub | None,
        environment: Mapping[str, str],
        kv_gib: float,
    ) -> None:
        self.rank, self.settings, self.journal, self.hub = rank, settings, journal, hub
        given = rank.given
        self.page = Page(rank.served, speculative="speculative_config" in given)
        self.slots = int(given.get("max_num_seqs", 256))
        self.by_priority = given.get("scheduling_policy") == "priority"
        self.timeout_s = float(environment.get("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", "300"))
        self.draft = int((given.get("speculative_config") or {}).get("num_speculative_tokens", 0))
        self.kv_tokens = int(kv_gib * TOKENS_PER_GIB)
        self.cache = PrefixCache(rank.block_size, self.kv_tokens // rank.block_size)
        self.dead = threading.Event()
        self.on_death = threading.Event()
        self._turn = threading.Condition()
        self._waiting: list[tuple[int, int]] = []
        self._tickets = itertools.count()
        self._running = 0
        self._death = threading.Lock()
        self._first_step = True
        self._reset_seen: object = object()

    # -- the step that all ranks take ---------------------------------------------------------------------------------

    def step(self) -> None:
        if self.dead.is_set():
            raise EngineDead
        try:
            if "dead" in self.settings.serving():
                raise PeerLost("[192.0.2.2]:62171")
            if self._first_step:
                self._first_step = False
                self.journal.stage("serving")
            if self.hub:
                self.hub.step(self.timeout_s)
        except PeerLost as error:
            self.die("headfirst_then_worker_killed_idle_head.log", r"WorkerProc hit an exception", error.where)
        except PeerSilent:
            self.die("worker_frozen_head.log", r"Dumping input data", "")

    def die(self, file: str, begin: str, where: str) -> None:
        """Say what a real head says when a step fails; the first request to meet it speaks."""
        with self._death:
            first = not self.dead.is_set()
            self.dead.set()
            if first:
                peer = (r"(?<=Connection closed by peer )\[[\d.]+\]:\d+", where)
                self.journal.tail(file, begin, peer, until=r"^INFO:     Shutting down")
        if first:
            self.on_death.set()
        raise EngineDead

    # -- requests -------------------------------------------------------------------------------------------------------

    def _gauges(self) -> None:
        waiting = len(self._waiting)
        self.page.set("vllm:num_requests_running", self._running)
        self.page.set("vllm:num_requests_waiting", waiting)
        self.page.set("vllm:num_requests_waiting_by_reason", waiting, 'reason="capacity"')
        self.page.set(
            "vllm:kv_cache_usage_perc", min(1.0, self._running * self.rank.block_size / max(1, self.kv_tokens))
        )

    def _admit(self, job: Job) -> None:
        """Wait for a slot: by priority (lower first) where the policy says so, else in order of arrival."""
        entry = (job.priority if self.by_priority else 0, next(self._tickets))
        with self._turn:
            heapq.heappush(self._waiting, entry)
            self._gauges()
            while not self.dead.is_set():
                stuck = "hang" in self.settings.serving()
                if not stuck and self._running < self.slots and self._waiting[0] == entry:
                    break
                self._turn.wait(0.2 if stuck else 1.0)
            self._waiting.remove(entry)
            heapq.heapify(self._waiting)
            self._running += not self.dead.is_set()
            self._gauges()
        if self.dead.is_set():
            raise EngineDead
        self.page.observe("vllm:request_queue_time_seconds", time.monotonic() - job.arrived)

    def _release(self) -> None:
        with self._turn:
            self._running -= 1
            self._gauges()
            self._turn.notify_all()

    def faults(self) -> dict[str, Any]:
        """Faults of this moment; `reset` acts here, once for each time that it is told."""
        found = self.settings.serving()
        version = self.settings.control_version
        if "reset" in found and version != self._reset_seen:
            self._reset_seen = version
            self.page.reset()
        return found

    def run(self, job: Job) -> Iterator[str]:
        """Pieces of the answer as they come. Closing the iterator aborts the request."""
        faults = self.faults()
        if "error500" in faults:
            raise Refused
        self._admit(job)
        reason = "abort"
        try:
            begin = time.monotonic()
            self._prefill(job, faults)
            last = first = time.monotonic()
            words = list(self._words(job, faults))
            for word in words:
                self.step()
                time.sleep(self.settings.number("ITL_S", 0.002))
                job.tokens += 1
                now = time.monotonic()
                self._count_token(job, now - last, first=job.tokens == 1, since=now - job.arrived)
                last = now
                yield word
            reason = job.finish
            self._count_request(job, begin, first, time.monotonic())
        finally:
            self.page.add("vllm:request_success_total", 1, f'finished_reason="{reason}"')
            self._release()

    def _words(self, job: Job, faults: Mapping[str, Any]) -> Iterator[str]:
        """The answer's tokens; sets how it ends. An end token counts as one (as measured: 20 words, 21 tokens)."""
        text = REPLACED if "fffd" in faults else "" if "empty" in faults else job.answer
        words = re.findall(r"\s*\S+", text) or [""]
        stream = itertools.cycle(words) if job.ignore_eos else iter([*words, ""] if words != [""] else words)
        out = list(itertools.islice(stream, job.max_tokens))
        ended = not job.ignore_eos and len(out) < job.max_tokens + 1 and out[-1:] == [""]
        job.finish = "stop" if ended else "length"
        return iter(out)

    def _prefill(self, job: Job, faults: Mapping[str, Any]) -> None:
        tokens = pieces(job.prompt)
        job.prompt_tokens = len(tokens)
        job.cached = 0 if "no_prefix_hits" in faults else self.cache.look_up(tokens)
        page, computed = self.page, job.prompt_tokens - job.cached
        page.add("vllm:prefix_cache_queries_total", job.prompt_tokens)
        page.add("vllm:prefix_cache_hits_total", job.cached)
        page.add("vllm:prompt_tokens_total", job.prompt_tokens)
        page.add("vllm:prompt_tokens_cached_total", job.cached)
        page.add("vllm:prompt_tokens_by_source_total", computed, 'source="local_compute"')
        page.add("vllm:prompt_tokens_by_source_total", job.cached, 'source="local_cache_hit"')
        page.add("vllm:prompt_tokens_cached_by_source_total", job.cached, 'source="device"')
        seconds = self.settings.number("TTFT_S", 0.01)
        rate = self.settings.number("PREFILL_TPS", 0)
        seconds += computed / rate if rate else 0.0
        if "slow_first_token" in faults:
            seconds += float(faults["slow_first_token"].value or 5)
        time.sleep(seconds)

    def _count_token(self, job: Job, since_last: float, *, first: bool, since: float) -> None:
        page = self.page
        page.add("vllm:generation_tokens_total")
        page.observe("vllm:iteration_tokens_total", 1 + (job.prompt_tokens - job.cached if first else 0))
        if first:
            page.observe("vllm:time_to_first_token_seconds", since)
        else:
            page.observe("vllm:inter_token_latency_seconds", since_last)
        if self.draft:
            page.add("vllm:spec_decode_num_drafts_total")
            page.add("vllm:spec_decode_num_draft_tokens_total", self.draft)
            page.add("vllm:spec_decode_num_accepted_tokens_total", self.draft * self.settings.number("ACCEPTANCE", 0.9))

    def _count_request(self, job: Job, begin: float, first: float, end: float) -> None:
        page = self.page
        decode = max(0.0, end - first)
        page.observe("vllm:e2e_request_latency_seconds", end - job.arrived)
        page.observe("vllm:request_inference_time_seconds", end - begin)
        page.observe("vllm:request_prefill_time_seconds", first - begin)
        page.observe("vllm:request_decode_time_seconds", decode)
        page.observe("vllm:request_time_per_output_token_seconds", decode / max(1, job.tokens - 1))
        page.observe("vllm:request_prompt_tokens", job.prompt_tokens)
        page.observe("vllm:request_generation_tokens", job.tokens)
        page.observe("vllm:request_max_num_generation_tokens", job.tokens)
        page.observe("vllm:request_params_max_tokens", job.max_tokens)
        page.observe("vllm:request_params_n", 1)
        page.observe("vllm:request_num_preemptions", 0)
        page.observe("vllm:request_prefill_kv_computed_tokens", job.prompt_tokens - job.cached)
