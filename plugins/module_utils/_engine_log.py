# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Read an engine's log as it grows: stage, percent, first error by time, what the catalogue knows. Pure functions and state.

The state is a plain mapping (JSON), so that a module can hand it to its next call and read only what came in between.
Lines are those of vLLM 0.20 to 0.33 (recorded in tests/fixtures/engine_logs). Standard library only, and nothing of Ansible.
"""

from __future__ import annotations

import codecs
import re
from typing import Any

from ansible_collections.gb10.fleet.plugins.module_utils import _failures

# Stages in the order in which a rank passes them, and what a person reads while one lasts.
STAGES: dict[str, str] = {
    "container": "starting",
    "config": "reading its configuration",
    "engine": "starting the engine",
    "rendezvous": "waiting for the other ranks",
    "joined": "joined by all ranks",
    "load": "loading weights",
    "loaded": "weights loaded",
    "compile": "compiling",
    "kv_cache": "at the KV cache",
    "capture": "capturing graphs",
    "warm": "engine warm",
    "server": "starting the server",
    "ready": "serving",
    "stopped": "shutting down",
}
ORDER = {name: number for number, name in enumerate(STAGES)}

# One line each, in the order of the stages. A worker has no line for `ready` and no HTTP port.
_STAGE_LINES: tuple[tuple[str, str], ...] = (
    ("config", r"non-default args: |Resolved architecture: |Using max model len "),
    ("engine", r"Initializing a V1 LLM engine|Launching vLLM .*headless|DP group leader: node_rank="),
    (
        "rendezvous",
        r"world_size=(?P<world>\d+) rank=(?P<rank>\d+) .*distributed_init_method=|\[ray\] waiting for the head",
    ),
    ("joined", r"rank \d+ in world size \d+ is assigned|Ray runtime started"),
    ("load", r"Starting to load model|Loading safetensors checkpoint shards"),
    ("loaded", r"Loading weights took|Model loading took"),
    (
        "compile",
        r"torch\.compile took|Dynamo bytecode transform|Compiling a graph|Cache the graph|Autotuning process starts",
    ),
    ("kv_cache", r"Available KV cache memory: |KV cache size: |for KV cache on node"),
    ("capture", r"Capturing CUDA graphs|Graph capturing finished"),
    ("warm", r"init engine \(profile"),
    ("server", r"Starting vLLM (?:API )?server"),
    ("ready", r"Application startup complete"),
    (
        "stopped",
        r"\[shutdown\] (?:API server: shutdown triggered|Executor: waiting for worker exit)|Application shutdown complete",
    ),
)
_STAGE = re.compile("|".join(f"(?P<s_{name}>{pattern})" for name, pattern in _STAGE_LINES))
# A head that starts anew inside the same log (docker restart) says its arguments again.
_BOOT = "non-default args: "
_PROGRESS = re.compile(
    r"(?:Loading safetensors checkpoint shards|Capturing CUDA graphs[^:]*):\s+(?P<percent>\d+)%"
    r".*?(?P<done>\d+)/(?P<total>\d+) \[(?P<elapsed>[\d:]+)<(?P<left>[\d:?]+)"
)
_LEVEL = re.compile(
    r"(?:^|\) |\] )(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL) (?P<time>\d\d-\d\d \d\d:\d\d:\d\d) \[[^\]]*\] ?"
)
_PROCESS = re.compile(r"^\((?P<process>[A-Za-z][\w-]*) pid=\d+\) ?")
_EXCEPTION = re.compile(r"^(?:[A-Za-z_][\w]*\.)*(?P<name>[A-Z]\w*|Exception)(?:: (?P<message>.*))?$")
_PLAIN_ERROR = re.compile(r"^ERROR:\s{2,}|^(?:vllm|api_server\.py)(?: serve)?: error: |: error: unrecognized arguments")
_TRACEBACK = "Traceback (most recent call last):"
_CHAINED = ("The above exception was the direct cause", "During handling of the above exception")
_FRAMES = ("frame #", "<omitting python frames>", "Exception raised from ", _TRACEBACK, *_CHAINED)
# A prompt that a user sent may quote any error; an engine that logs requests must not be declared dead for it.
_USER_TEXT = ("Received request ", "prompt: ")
# A line without any of these words is not looked at (60 of them cost 2 microseconds, the patterns behind them 40).
_WORDS: tuple[str, ...] = (
    "ERROR", "Error", "Exception", "Errno", "EADDRINUSE", "Traceback", "CRITICAL", "NCCL ", "ncclSystem", "ncclUnhandled",
    "ncclInternal", "ncclRemote", "NET/", "ibv_", "IBV_", "Insufficient", "OutOf", "CUDA", "Timed out", "timed out", "Watchdog",
    "Worker proc", "WorkerProc", "EngineCore ", "EngineDead", "Engine core", "No available", "No common", "Free memory",
    "memory utilization", "To serve", "estimated maximum", "TCP client", "Unable to find", "Every node", "Waiting for creating",
    "Unknown vLLM", "Cannot find", "Connection ", "Failed to recv", "recvValue", "remote process", "connectFullMesh", "SO_ERROR",
    "Consistency check", "Model arch", "Safetensor", "does not appear", "current platform", "collective_rpc", "killed due to",
    "largest fitting", "cannot rejoin", "error: ", "non-default", "Resolved arch", "Using max", "Initializing a V1",
    "Launching vLLM", "DP group", "world_size=", "is assigned", "Starting ", "Loading ", "Model loading", "torch.compile",
    "Dynamo", "Compiling", "Cache the", "Autotuning", "KV cache", "kv-cache-memory", "Capturing", "Graph capt", "init engine",
    "Application ", "[shutdown]", "Setting attention", "max_num_batched", "[ray] ", "Ray runtime",
)  # fmt: skip
# In a flood (megabytes at once) only these are looked for: errors, and the stages. Raw bytes, as Docker's file holds them.
_FLOOD_ERROR = re.compile(rb"E(?:RROR|rror|rrno|xception|ADDRINUSE|ngineDead)")
_FLOOD_WORDS: tuple[bytes, ...] = (
    b"NCCL WARN", b"Watchdog caught", b"recvValue failed", b"cannot rejoin", b"[shutdown]", b"non-default args",
)  # fmt: skip
# Only as long as the engine has not begun to serve.
_FLOOD_STAGES: tuple[bytes, ...] = (
    b"largest fitting", b"[ray] waiting", b"Ray runtime started", b"world_size=", b"is assigned as",
    b"Starting to load", b"Loading safetensors", b"Loading weights took",
    b"KV cache size: ", b"Graph capturing finished", b"Starting vLLM", b"Application startup",
)  # fmt: skip
_FACTS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("kv_available_gib", re.compile(r"Available KV cache memory: (-?[\d.]+) GiB")),
    ("kv_tokens", re.compile(r"KV cache size: ([\d,]+) tokens")),
    ("block_size", re.compile(r"Setting attention block size to (\d+) tokens")),
    ("max_model_len", re.compile(r"Using max model len (\d+)")),
    ("max_num_batched_tokens", re.compile(r"max_num_batched_tokens=(\d+)")),
    ("master", re.compile(r"(?:head node address |distributed_init_method=tcp://)(\[?[\w.:]+\]?:\d+)")),
    ("world_size", re.compile(r"world_size=(\d+) rank=\d+")),
    ("weights_gib", re.compile(r"Model loading took ([\d.]+) GiB")),
)
# "to fit into requested memory" is the careful figure, "to fully utilize gpu memory" leaves nothing for anything else.
_PROPOSAL = re.compile(r"--kv-cache-memory(?:-bytes)?=(?P<bytes>\d+)`? \([\d.]+ GiB\) to (?P<aim>fit|fully)")
LAST_LINES = 40
MAX_LINE = 2000


def seconds(text: str) -> int | None:
    """Seconds of a tqdm time (``05:57``, ``1:02:03``), None for ``?``."""
    if not text or "?" in text:
        return None
    total = 0
    for part in text.split(":"):
        total = total * 60 + int(part or 0)
    return total


def telling(line: str) -> bool:
    """Whether a line says something to a person: no frame of a traceback, no blank."""
    level, process = _LEVEL.search(line), _PROCESS.match(line)
    message = line[level.end() :] if level else line[process.end() :] if process else line
    return bool(message.strip()) and not message[0].isspace() and not message.startswith(_FRAMES)


def later(one: str | None, other: str | None) -> bool:
    """Whether stage ``one`` comes after ``other``; every stage comes after None."""
    return ORDER.get(one or "", -1) > ORDER.get(other or "", -1)


def new_state() -> dict[str, Any]:
    """The state before the first line."""
    return {
        "stage": None,
        "percent": None,
        "left_s": None,
        "stages": {},
        "first_error": None,
        "fatal": None,
        "waits": {},
        "notes": {},
        "facts": {},
        "lines": 0,
        "last_time": None,
        "last": [],
        "traces": {},
    }


class LogReader:
    """Takes lines (or raw bytes) and keeps :attr:`state`. Feeding all at once or byte by byte gives the same state."""

    def __init__(self, state: dict[str, Any] | None = None) -> None:
        self.state = state or new_state()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest = ""

    # --- bytes to lines ---------------------------------------------------------------------------------------------
    def feed(self, data: bytes, final: bool = False) -> None:
        """Raw bytes as a file or pipe gives them: cut anywhere, even inside a character."""
        text = self._rest + self._decoder.decode(data, final)
        *lines, self._rest = text.split("\n")
        for line in lines:
            self.line(line)
        if final and self._rest:
            self.line(self._rest)
            self._rest = ""

    @staticmethod
    def worth(raw: bytes, serving: bool = False) -> list[tuple[int, int]]:
        """Start and end of the lines in ``raw`` that matter, for megabytes at once.

        :param serving: the engine serves already; only a new start would bring stages again.
        """
        hits = [found.start() for found in _FLOOD_ERROR.finditer(raw)]
        for word in _FLOOD_WORDS if serving and b"non-default args" not in raw else _FLOOD_WORDS + _FLOOD_STAGES:
            position = raw.find(word)
            while position >= 0:
                hits.append(position)
                position = raw.find(word, position + len(word))
        lines: list[tuple[int, int]] = []
        for position in sorted(hits):
            if not lines or position >= lines[-1][1]:
                end = raw.find(b"\n", position)
                lines.append((raw.rfind(b"\n", 0, position) + 1, end if end >= 0 else len(raw)))
        return lines

    # --- one line -----------------------------------------------------------------------------------------------------
    def line(self, text: str, time: str | None = None) -> None:
        """One line without its newline. A carriage return starts the line over, as on a terminal (tqdm).

        :param time: when Docker received it (RFC 3339); the engine's own time is taken when there is none.
        """
        for piece in text.rstrip("\r").split("\r"):
            if piece.strip():
                self._piece(piece.rstrip()[:MAX_LINE], time)

    def _piece(self, text: str, time: str | None) -> None:
        state = self.state
        state["lines"] += 1
        worth = any(word in text for word in _WORDS)
        level = _LEVEL.search(text) if worth or time is None else None
        if time is None and level:
            time = level["time"]
        time = time or state["last_time"]
        state["last_time"] = time
        state["last"].append(text)
        del state["last"][:-LAST_LINES]
        if not worth or any(word in text for word in _USER_TEXT):
            return
        process = _PROCESS.match(text)
        message = text[level.end() :] if level else text[process.end() :] if process else text
        self._stage(message, time)
        self._facts(message)
        self._error(process["process"] if process else "", level["level"] if level else "", message, time)

    def _stage(self, message: str, time: str | None) -> None:
        state = self.state
        if _BOOT in message and ORDER.get(state["stage"] or "", 0) > ORDER["config"]:
            kept = {name: state[name] for name in ("lines", "last_time", "last")}
            state.update({**new_state(), **kept})
        if progress := _PROGRESS.search(message):
            stage = "load" if message.lstrip().startswith("Loading") else "capture"
            self._enter(stage, time)
            if state["stage"] == stage:
                state["percent"], state["left_s"] = int(progress["percent"]), seconds(progress["left"])
            return
        if (found := _STAGE.search(message)) and found.lastgroup:
            names = [name[2:] for name, value in found.groupdict().items() if value and name.startswith("s_")]
            # An engine that shuts down because it failed is shown at the stage in which it failed.
            if names[0] != "stopped" or not state["fatal"]:
                self._enter(names[0], time)

    def _enter(self, stage: str, time: str | None) -> None:
        state = self.state
        state["stages"].setdefault(stage, time)
        if later(stage, state["stage"]):
            state.update(stage=stage, percent=None, left_s=None)

    def _facts(self, message: str) -> None:
        facts = self.state["facts"]
        for name, pattern in _FACTS:
            if found := pattern.search(message):
                facts[name] = found.group(1).replace(",", "")
        for proposal in _PROPOSAL.finditer(message):
            facts["kv_cache_memory" if proposal["aim"] == "fit" else "kv_cache_memory_full"] = int(proposal["bytes"])

    def _error(self, process: str, level: str, message: str, time: str | None) -> None:
        known = _failures.match(message)
        if known and level in ("DEBUG", "INFO", "WARNING") and not _failures.at_any_level(known.id):
            # An optional part that could not be imported is reported with a whole traceback, as a warning.
            known = None
        if known and known.kind == _failures.NOTE:
            note = self.state["notes"].setdefault(
                known.id, {"count": 0, "time": time, "line": message, "groups": known.groups}
            )
            note["count"] += 1
            return
        if known and known.kind == _failures.WAIT:
            self.state["waits"].setdefault(
                known.id, {"time": time, "line": message, "groups": known.groups, "count": 0}
            )["count"] += 1
            return
        exception = self._traceback(process, message)
        if known:
            self._fatal(known, exception or message, time)
        bare = not level and (_TRACEBACK in message or _PLAIN_ERROR.search(message))
        is_error = bool(level in ("ERROR", "CRITICAL") or bare or known)
        if is_error and self.state["first_error"] is None:
            self.state["first_error"] = {
                "time": time,
                "line": message.strip(),
                "id": known.id if known else None,
                "process": process,
            }
        first = self.state["first_error"]
        if first and exception and process == first["process"] and level in ("", "ERROR", "CRITICAL"):
            self._better(first, exception, known)

    def _traceback(self, process: str, message: str) -> str | None:
        """The exception line when ``message`` ends a traceback of ``process``, else None."""
        traces = self.state["traces"]
        if _TRACEBACK in message:
            traces[process] = True
            return None
        if not traces.get(process) or not message.strip() or message[:1].isspace():
            return None
        if message.startswith(_CHAINED):
            return None
        if _EXCEPTION.match(message):
            traces[process] = False
            return message.strip()
        return None

    @staticmethod
    def _better(first: dict[str, Any], exception: str, known: _failures.Match | None) -> None:
        """Say the exception instead of "EngineCore failed to start.": the first one that explains best."""
        had = _failures.WEIGHT.get(_failures.kind_of(first["id"]) or "", 9)
        have = _failures.WEIGHT[known.kind] if known else 9
        if not first.get("exception") or have < had:
            if first.get("exception") and ": " in first["line"] and have >= had:
                return
            first.update(line=exception, exception=True)
            if known and have < had:
                first["id"] = known.id

    def _fatal(self, known: _failures.Match, line: str, time: str | None) -> None:
        fatal = self.state["fatal"]
        if fatal and _failures.WEIGHT[known.kind] >= _failures.WEIGHT[fatal["kind"]]:
            return
        self.state["fatal"] = {
            "id": known.id,
            "kind": known.kind,
            "time": time,
            "line": line.strip(),
            "groups": known.groups,
            "stage": self.state["stage"],
        }


def verdict(state: dict[str, Any]) -> str:
    """What the log alone says: ``failed``, ``stopped``, ``ready`` (a worker never says so) or ``starting``."""
    if state["fatal"]:
        return "failed"
    if state["stage"] == "stopped":
        return "stopped"
    return "ready" if state["stage"] == "ready" else "starting"
