# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Print the recorded lines of a real rank as this rank's own: its addresses, names, sizes, process numbers and times."""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from .arguments import RECORDED

# Where each stage begins in a recording (facts: the order of start-up lines of a head and of a worker).
HEAD = (
    ("start", r"find_triton_kernels"),
    ("arguments", r"\[api_utils\.py:\d+\] $"),
    ("config", r"Found ulimit|Resolved architecture"),
    ("engine", r"Initializing a V1 LLM engine"),
    ("worker", r"dispatcher\.py:138"),
    ("rendezvous", r"distributed_init_method="),
    ("assigned", r"CPU SHM communicator"),
    ("loading", r"Starting to load model"),
    ("loaded", r"Loading weights took"),
    ("kv", r"Using LBHNC KV cache layout"),
    ("warm", r"init engine \(profile"),
    ("server", r"Supported tasks"),
    ("serving", r"c10d_logger\.py:\d+: FutureWarning"),
    ("stop", r"API server: shutdown triggered"),
)
WORKER = (
    ("start", r"find_triton_kernels"),
    ("config", r"Resolved architecture"),
    ("engine", r"Launching vLLM .* headless"),
    ("worker", r"dispatcher\.py:138"),
    ("rendezvous", r"distributed_init_method="),
    ("assigned", r"CPU SHM communicator"),
    ("loading", r"Starting to load model"),
    ("loaded", r"Loading weights took"),
    ("kv", r"for KV cache on node"),
    ("serving", r"c10d_logger\.py:\d+: FutureWarning"),
    ("stop", r"Executor: waiting for worker exit"),
)
# What clients asked of the recorded engine, and its loader's bar (printed from the real number of files).
NOT_OURS = re.compile(r'HTTP/1\.1" \d|loggers\.py:\d+\] Engine 000|^\r?Loading safetensors|^$')
# Lines that a condition must hold for. `cpu`: only the CPU build says so.
CONDITIONS = (
    (r"Enforce eager set", "eager"),
    (r"TORCH_COMPILE_DISABLE is set", "no_compile"),
    (r"DP group leader|Inferred data_parallel_rank|Chunked prefill is enabled", "multi"),
    (
        r"triton|Triton|Inductor compilation was disabled|ompmultiprocessing|reduce_op|hasattr\(value|lookup\(vars|NUMA|CPU SHM|"
        r"tcmalloc|libiomp|LBHNC|KV cache size|for KV cache on node|err=-3|cpu\.py|all_gather_into_tensor|^  return func",
        "cpu",
    ),
)
ACCESS_500 = re.compile(r'HTTP/1\.1" 500')
# The KV cache per token of the recorded model, to say a size in tokens.
TOKENS_PER_GIB = 120_773


@dataclass
class Rank:
    """What a rank is and knows about itself: all that its lines say."""

    model: str = "/opt/model"
    served: str = "tiny"
    max_model_len: int = 2048
    tensor: int = 1
    pipeline: int = 1
    nodes: int = 1
    number: int = 0
    headless: bool = False
    master_addr: str = "127.0.0.1"
    master_port: int = 29501
    host: str = "0.0.0.0"  # noqa: S104
    port: int = 8000
    host_ip: str = "127.0.0.1"
    block_size: int = 16
    utilization: float = 0.92
    platform: str = "gb10"
    given: dict[str, Any] = field(default_factory=dict)

    @property
    def world(self) -> int:
        return max(self.tensor * self.pipeline, self.nodes)

    @property
    def multi(self) -> bool:
        return self.nodes > 1

    @property
    def backend(self) -> str:
        return "gloo" if self.platform == "cpu" else "nccl"

    @property
    def worker_name(self) -> str:
        """Process name of the worker once groups exist: Worker_TP1, Worker_PP0_TP1, Worker."""
        name = "Worker"
        name += f"_PP{self.number // self.tensor}" if self.pipeline > 1 else ""
        return name + (f"_TP{self.number % self.tensor}" if self.tensor > 1 else "")


def own_rules(rank: Rank, pid: int) -> list[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]]:
    """Pattern -> replacement: what of a recorded line is the recorded rank's and becomes this one's."""
    pids = {"APIServer": pid, "MainProcess": pid, "EngineCore": pid + 1, "Worker": pid + 2, "VllmWorker": pid + 2}

    def process(found: re.Match[str]) -> str:
        kind = re.split(r"[_-]", found[1])[0]
        name = rank.worker_name if found[1].startswith("Worker_") else found[1]
        name = f"VllmWorker-{rank.number}" if kind == "VllmWorker" else name
        return f"({name} pid={pids[kind]})"

    def fixed(text: object) -> Callable[[re.Match[str]], str]:
        return lambda found: found[1] + str(text)

    stages = f"PP rank {rank.number // rank.tensor}, PCP rank 0, TP rank {rank.number % rank.tensor}, "
    stages += f"ETP rank {rank.number % rank.tensor}, "
    given = "{" + ", ".join(f"{key!r}: {value!r}" for key, value in rank.given.items()) + "}"
    method = f"tcp://{rank.master_addr}:{rank.master_port}" if rank.multi else "file:///tmp/vllm_dist_0123456789abcdef"
    return [
        (re.compile(r"^\(((?:APIServer|MainProcess|EngineCore|Worker\w*|VllmWorker-\d+)) pid=\d+\)"), process),
        (re.compile(r"/opt/(?:sandbox/\./)?venv/"), "/opt/vllm/"),
        (re.compile(r"\[cpu_model_runner"), "[cpu_model_runner" if rank.platform == "cpu" else "[gpu_model_runner"),
        (re.compile(r"/opt/model"), lambda _found: rank.model),
        (re.compile(r"(non-default args: )\{.*\}"), lambda found: found[1] + given),
        (re.compile(r"(Using max model len |max_seq_len=)\d+"), fixed(rank.max_model_len)),
        (re.compile(r"(served_model_name=)\w+"), fixed(rank.served)),
        (re.compile(r"(tensor_parallel_size=)\d+"), fixed(rank.tensor)),
        (re.compile(r"(pipeline_parallel_size=)\d+"), fixed(rank.pipeline)),
        (re.compile(r"(enforce_eager=)\w+"), fixed(bool(rank.given.get("enforce_eager")))),
        (re.compile(r"(from node_rank )\d+"), fixed(rank.number)),
        (re.compile(r"(master_addr=)[\d.]+"), fixed(rank.master_addr)),
        (re.compile(r"(mq_connect_ip=)[\d.]+"), fixed(rank.host_ip)),
        (re.compile(r"(head node address )\S+"), fixed(f"{rank.master_addr}:{rank.master_port}")),
        (re.compile(r"(world_size=)\d+(?= rank=)"), fixed(rank.world)),
        (re.compile(r"(world_size=)\d+(?=, local)"), fixed(rank.world)),
        (re.compile(r"(world_size=\d+ rank=)\d+"), fixed(rank.number)),
        (re.compile(r"(distributed_init_method=)\S+ backend=\w+"), fixed(f"{method} backend={rank.backend}")),
        (re.compile(r"rank \d+ in world size \d+"), f"rank {rank.number} in world size {rank.world}"),
        (re.compile(r"PP rank \d+, PCP rank 0, TP rank \d+, ETP rank \d+, "), stages),
        (re.compile(r"(for group )\w+:"), fixed("tp:" if rank.tensor > 1 else "pp:")),
        (re.compile(r"(server on http://)\S+"), fixed(f"{rank.host}:{rank.port}")),
        (re.compile(r"(server process \[)\d+"), fixed(pid)),
        (re.compile(r"(process EngineCore pid )\d+"), fixed(pid + 1)),
        (re.compile(r"VLLM::Worker\w* pid \d+"), f"VLLM::{rank.worker_name} pid {pid + 2}"),
        (re.compile(r"VllmWorker-\d+"), f"VllmWorker-{rank.number}"),
    ]


class Journal:
    """Recorded lines, printed as this rank's own; one line at a time, complete."""

    def __init__(self, rank: Rank, environment: dict[str, str]) -> None:
        self.rank = rank
        self.flags = {rank.platform} | ({"multi"} if rank.multi else set())
        self.flags |= {"eager"} if rank.given.get("enforce_eager") else set()
        self.flags |= {"no_compile"} if environment.get("TORCH_COMPILE_DISABLE") == "1" else set()
        self.rules = own_rules(rank, os.getpid())
        head = not rank.headless
        self.sections = sections("success_head.log" if head else "success_worker.log", HEAD if head else WORKER)
        self._lock = threading.Lock()

    def write(self, line: str) -> None:
        """The engine's own lines to standard output; what libraries print, to standard error."""
        out = sys.stdout if line[:1] == "(" or line.startswith("INFO:") else sys.stderr
        with self._lock:
            out.write(line + "\n")
            out.flush()

    def write_all(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def wanted(self, line: str) -> bool:
        for pattern, flag in CONDITIONS:
            if re.search(pattern, line):
                return flag in self.flags
        return True

    def own(self, line: str, stage: str = "") -> str:
        for pattern, replacement in self.rules:
            line = pattern.sub(replacement, line)
        now = time.time()
        clock = time.localtime(now)
        line = re.sub(r"\b\d\d-\d\d \d\d:\d\d:\d\d\b(?= \[)", time.strftime("%m-%d %H:%M:%S", clock), line)
        pid = os.getpid() + (2 if stage == "worker" else 0)
        stamp = time.strftime("%m%d %H:%M:%S", clock)
        line = re.sub(r"^W\d{4} [\d:.]+ \d+ ", f"W{stamp}.{int(now % 1 * 1e6):06d} {pid} ", line)
        return re.sub(r"^\[([WE])\d{4} [\d:.]+ ", rf"[\g<1>{stamp}.{int(now % 1 * 1e9):09d} ", line)

    def stage(self, name: str) -> None:
        """The lines of a stage of a start that went well."""
        self.lines(self.sections.get(name, ()), name)

    def lines(self, recorded: Iterable[str], stage: str = "") -> None:
        for line in recorded:
            if not NOT_OURS.search(line) and self.wanted(line):
                self.write(self.own(line, stage))

    def say(self, process: str, level: str, source: str, text: str) -> None:
        """A line that no recording has, in vLLM's form."""
        self.write(self.own(f"({process} pid=0) {level} 01-01 00:00:00 [{source}] {text}"))

    def tail(self, file: str, begin: str, *changes: tuple[str, str], until: str = "") -> None:
        """The end of a recording from the line that has `begin` on: how a real rank failed. `changes`: pattern, replacement."""
        lines = recording(file)
        first = next(number for number, line in enumerate(lines) if re.search(begin, line))
        for line in lines[first:]:
            if until and re.search(until, line):
                return
            if ACCESS_500.search(line) or NOT_OURS.search(line):
                continue
            line = self.own(line)
            for pattern, replacement in changes:
                line = re.sub(pattern, lambda _found, text=replacement: text, line)  # type: ignore[misc]
            self.write(line)


def recording(file: str) -> list[str]:
    return (RECORDED / file).read_text(encoding="utf-8").replace("\r", "").splitlines()


def sections(file: str, marks: tuple[tuple[str, str], ...]) -> dict[str, list[str]]:
    """Stage -> lines of a recording: a stage goes from its first line to that of the next one."""
    out: dict[str, list[str]] = {}
    ahead = list(marks)
    name = ""
    for line in recording(file):
        for number, (candidate, pattern) in enumerate(ahead):
            if re.search(pattern, line):
                name, ahead = candidate, ahead[number + 1 :]
                break
        out.setdefault(name, []).append(line)
    return out


def exchanges() -> dict[str, dict[str, Any]]:
    """Recorded requests and answers by name."""
    listed = json.loads((RECORDED / "http.json").read_text(encoding="utf-8"))["exchanges"]
    return {exchange["name"]: exchange for exchange in listed}
