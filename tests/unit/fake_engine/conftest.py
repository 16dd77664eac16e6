"""Ranks of the fake engine as processes on loopback, and the recordings that they are held against."""

from __future__ import annotations

import ast
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
ENGINES = ROOT / "roles" / "sandbox" / "files" / "engines"
RECORDED = ROOT / "tests" / "fixtures" / "vllm_logs"
sys.path[:0] = [str(ENGINES), str(ENGINES / "fake-engine")]

# What clients asked, averages, and the loader's bar: not the engine's own doing.
CLIENTS = re.compile(r'HTTP/1\.1" \d|loggers\.py:\d+\] Engine|Loading safetensors|^\s*$')


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def normal(line: str) -> str:
    """A line without what differs from run to run: times, process numbers, addresses, ports, seconds, sizes of memory."""
    line = line.rstrip("\r\n").lstrip("\r")
    line = re.sub(r"^\((\S+) pid=\d+\)", r"(\1)", line)
    line = re.sub(r"\b\d\d-\d\d \d\d:\d\d:\d\d\b", "TIME", line)
    line = re.sub(r"^(\[?[WE])\d{4} [\d:.]+ (\d+ )?", r"\1 ", line)
    line = re.sub(r"/opt/(?:sandbox/\./)?venv/", "/opt/vllm/", line)
    line = re.sub(r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?![\w.])", "ADDR", line)
    line = re.sub(r"ADDR\]?:\d+", "ADDR:PORT", line)
    line = re.sub(r"(process \[|pid )\d+", r"\1N", line)
    line = re.sub(r"took [\d.]+ s(econds)?", "took N s", line)
    line = re.sub(r"Available RAM: [\d.]+", "Available RAM: N", line)
    line = re.sub(r"ulimit of \d+", "ulimit of N", line)
    return line


def normal_lines(text: str, begin: str = "") -> list[str]:
    """Normal form of a log, from the first line that has `begin` on; "non-default args" as what they say."""
    lines = [line for line in text.splitlines() if not CLIENTS.search(line)]
    if begin:
        first = next((number for number, line in enumerate(lines) if re.search(begin, line)), len(lines))
        lines = lines[first:]
    out = []
    for line in map(normal, lines):
        head, found, given = line.partition("non-default args: ")
        if found:
            options = ast.literal_eval(re.sub(r"<[^>]*>", "None", given))
            for name in ("host", "port", "master_addr", "master_port", "kv_cache_memory_bytes"):
                options.pop(name, None)
            line = head + found + str(sorted(options.items()))
        out.append(line)
    return out


def recorded(name: str) -> str:
    return (RECORDED / name).read_text(encoding="utf-8").replace("\r", "")


class Process:
    """One rank; its lines arrive as events."""

    def __init__(self, argv: list[str], environment: dict[str, str], program: str = "vllm") -> None:
        base = {"PATH": os.environ["PATH"], "FAKE_ENGINE_START_S": "0", "FAKE_ENGINE_PLATFORM": "cpu"}
        base |= {"TORCH_COMPILE_DISABLE": "1", "PYTHONDONTWRITEBYTECODE": "1", "FAKE_ENGINE_WORKER_STOP_S": "0"}
        self.child = subprocess.Popen(
            [sys.executable, str(ENGINES / "fake-engine" / program), *argv],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=base | environment,
        )
        self.lines: list[str] = []
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.child.stdout
        for raw in self.child.stdout:
            with self._news:
                self.lines.append(raw.decode("utf-8", "replace"))
                self._news.notify_all()
        with self._news:
            self._news.notify_all()

    @property
    def text(self) -> str:
        with self._news:
            return "".join(self.lines)

    def wait_line(self, pattern: str, timeout_s: float = 10.0) -> str:
        """The first line that matches; fails at once when the rank ends without it."""
        end = time.monotonic() + timeout_s
        seen = 0
        with self._news:
            while True:
                for line in self.lines[seen:]:
                    if re.search(pattern, line):
                        return line
                seen = len(self.lines)
                left = end - time.monotonic()
                if left <= 0 or (self.child.poll() is not None and not self._reader.is_alive()):
                    raise AssertionError(f"no line {pattern!r} in:\n{''.join(self.lines)[-3000:]}")
                self._news.wait(min(left, 0.2))

    def wait(self, timeout_s: float = 10.0) -> int:
        """Exit code, all lines read."""
        code = self.child.wait(timeout_s)
        self._reader.join(5)
        return code

    def signal(self, number: int) -> None:
        self.child.send_signal(number)

    def end(self) -> None:
        if self.child.poll() is None:
            self.child.send_signal(signal.SIGCONT)
            self.child.kill()
        self.child.wait(5)
        self._reader.join(5)


class Cluster:
    """Ranks with one set of arguments, as the recorded ones had them."""

    def __init__(self, *extra: str, nodes: int = 2, environment: dict[str, str] | None = None) -> None:
        self.port, self.master_port, self.nodes = free_port(), free_port(), nodes
        self.environment = environment or {}
        self.arguments = [
            "serve",
            "/opt/model",
            "--served-model-name",
            "tiny",
            "--host",
            "127.0.0.1",
            "--port",
            str(self.port),
        ]
        self.arguments += ["--enforce-eager", "--max-model-len", "2048", "--max-num-seqs", "4", "--block-size", "32"]
        if nodes > 1:
            self.arguments += [
                "--tensor-parallel-size",
                str(nodes),
                "--distributed-executor-backend",
                "mp",
                "--nnodes",
                str(nodes),
            ]
            self.arguments += ["--master-addr", "127.0.0.1", "--master-port", str(self.master_port)]
        self.arguments += extra
        self.processes: list[Process] = []

    def start(self, rank: int = 0, *extra: str, headless: bool = True, **environment: str) -> Process:
        argv = [*self.arguments, *extra]
        if rank:
            argv += ["--node-rank", str(rank), *(["--headless"] if headless else [])]
        process = Process(argv, self.environment | environment)
        self.processes.append(process)
        return process

    def pair(self, **environment: str) -> tuple[Process, Process]:
        """Worker first, then the head, both serving."""
        worker = self.start(1, **environment)
        head = self.start(0, **environment)
        head.wait_line("Application startup complete")
        return head, worker

    def ask(self, path: str, body: Any = None, timeout_s: float = 10.0, **headers: str) -> tuple[int, str]:
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        method = headers.pop("method", "GET" if data is None else "POST")
        kind = {"Content-Type": "application/json"} if data is not None else {}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data, kind | headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def chat(self, timeout_s: float = 10.0, **more: Any) -> tuple[int, str]:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "Who are you?"}]} | more
        return self.ask("/v1/chat/completions", body, timeout_s)

    def metric(self, name: str) -> float:
        page = self.ask("/metrics")[1]
        return sum(float(line.rsplit(" ", 1)[1]) for line in page.splitlines() if re.match(rf"{name}[{{ ]", line))

    def end(self) -> None:
        for process in self.processes:
            process.end()


@pytest.fixture
def cluster() -> Iterator[Callable[..., Cluster]]:
    """Makes clusters and ends all their ranks."""
    made: list[Cluster] = []

    def make(*extra: str, **more: Any) -> Cluster:
        made.append(Cluster(*extra, **more))
        return made[-1]

    yield make
    for one in made:
        one.end()


@pytest.fixture
def free() -> Callable[[], int]:
    """Gives ports that nothing listens on."""
    return free_port


@pytest.fixture
def process() -> Iterator[Callable[..., Process]]:
    """Starts single ranks and ends them all."""
    made: list[Process] = []

    def make(argv: list[str], environment: dict[str, str], program: str = "vllm") -> Process:
        made.append(Process(argv, environment, program))
        return made[-1]

    yield make
    for one in made:
        one.end()
