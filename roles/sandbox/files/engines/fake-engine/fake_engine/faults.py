# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the fake engine is told to do: faults and settings from the environment."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

# Stages of a rank in order; the head alone has `arguments`, `server`. Shares of FAKE_ENGINE_START_S.
STAGES: dict[str, float] = {
    "start": 0.02,
    "arguments": 0.03,
    "config": 0.1,
    "engine": 0.15,
    "worker": 0.1,
    "rendezvous": 0.0,
    "assigned": 0.05,
    "loading": 0.25,
    "compile": 0.05,
    "kv": 0.1,
    "graphs": 0.05,
    "warm": 0.05,
    "server": 0.05,
    "serving": 0.0,
}

# Kind -> (stage where it strikes unless told, what it does).
KINDS: dict[str, tuple[str, str]] = {
    "die": ("loading", "the rank is gone at once, as by SIGKILL: exit 137"),
    "freeze": ("serving", "the rank stops, as by SIGSTOP"),
    "stuck": ("rendezvous", "the rank says nothing more and does not go on; SIGTERM is ignored"),
    "exit": ("loading", "the rank ends without a word, exit code VALUE (0)"),
    "slow": ("loading", "VALUE seconds more in the stage"),
    "shm": ("engine", "shared memory too small: 160 MiB wanted, VALUE (64) free"),
    "nccl": ("assigned", "NCCL dies: system (default), errno61, memlock or timeout"),
    "free_memory": ("assigned", "only VALUE GiB (98.89) free on the device"),
    "oom": ("loading", "CUDA out of memory"),
    "load_error": ("loading", "a file of the checkpoint is missing: VALUE (model.safetensors)"),
    "bad_block_size": ("kv", "no common block size"),
    "kv_too_small": ("kv", "max-model-len does not fit; estimated maximum VALUE (80 % of it)"),
    "no_kv": ("kv", "no memory for the cache at all"),
    "port_in_use": ("arguments", "the API port is taken"),
    "tcp": ("assigned", "NCCL falls back to sockets"),
    "unhealthy": ("serving", "/health answers 503"),
    "hang": ("serving", "requests are never answered; /health stays 200"),
    "dead": ("serving", "the engine behind a healthy API is dead: the next request gets 500, then the head ends"),
    "error500": ("serving", "requests get 500 and the head lives on"),
    "fffd": ("serving", "replacement characters in the answer"),
    "empty": ("serving", "an empty answer"),
    "bad_tool_call": ("serving", "a tool call whose arguments are cut off"),
    "slow_first_token": ("serving", "VALUE seconds (5) before a first token"),
    "no_prefix_hits": ("serving", "the prefix cache never hits"),
    "reset": ("serving", "counters start again at 0, once"),
}

_FAULT = re.compile(r"(?:rank(?P<rank>\d+):)?(?P<kind>[a-z_0-9]+)(?:=(?P<value>[^@]*))?(?:@(?P<stage>[a-z]+))?")


class SettingError(Exception):
    """FAKE_ENGINE_* asks for something that does not exist: a test would prove nothing."""


@dataclass(frozen=True)
class Fault:
    """One fault of this rank."""

    kind: str
    stage: str
    value: str = ""


def parse(text: str, rank: int) -> list[Fault]:
    """Faults of `rank` in "rank1:die@loading, oom"; unknown kinds and stages are errors that list the known ones."""
    out = []
    for part in filter(None, (part.strip() for part in re.split(r"[,;\n]", text))):
        found = _FAULT.fullmatch(part)
        if not found or found["kind"] not in KINDS:
            raise SettingError(f"unknown fault {part!r}; known: {', '.join(KINDS)}")
        stage = found["stage"] or KINDS[found["kind"]][0]
        if stage not in STAGES:
            raise SettingError(f"unknown stage in {part!r}; known: {', '.join(STAGES)}")
        if found["rank"] is None or int(found["rank"]) == rank:
            out.append(Fault(found["kind"], stage, found["value"] or ""))
    return out


def of_rank(text: str, rank: int) -> str | None:
    """`text` itself, or the part for `rank` of "rank0=8.54,rank1=5.54"."""
    if not text.startswith("rank"):
        return text
    pairs = dict(part.strip().split("=", 1) for part in text.split(",") if "=" in part)
    return pairs.get(f"rank{rank}")


class Settings:
    """FAKE_ENGINE_* of one rank."""

    def __init__(self, environment: Mapping[str, str], rank: int) -> None:
        self.environment, self.rank = environment, rank
        self.faults = parse(environment.get("FAKE_ENGINE_FAULT", ""), rank)
        self.delays: dict[str, float] = {}
        for part in filter(None, self.text("DELAYS", "").split(",")):
            stage, _equals, seconds = part.strip().partition("=")
            if stage not in STAGES:
                raise SettingError(f"FAKE_ENGINE_DELAYS: unknown stage {stage!r}; known: {', '.join(STAGES)}")
            self.delays[stage] = float(seconds)
        self.start_s = self.number("START_S", 3.0)
        self.platform = self.text("PLATFORM", "gb10")
        if self.platform not in ("gb10", "cpu"):
            raise SettingError(f"FAKE_ENGINE_PLATFORM is {self.platform!r}; known: gb10, cpu")
        self.control = Path(self.text("CONTROL", "/run/fake-engine"))
        # State of the control file and what it said, as one: requests are served by many threads.
        self._told: tuple[tuple[int, int] | None, list[Fault]] = (None, [])

    def text(self, name: str, default: str) -> str:
        value = of_rank(self.environment.get(f"FAKE_ENGINE_{name}", default), self.rank)
        return default if value is None else value

    def number(self, name: str, default: float) -> float:
        value = self.text(name, str(default))
        try:
            return float(value)
        except ValueError:
            raise SettingError(f"FAKE_ENGINE_{name} is {value!r}, not a number") from None

    def delay_s(self, stage: str) -> float:
        """Seconds that a stage takes, `slow` included."""
        slow = sum(float(fault.value or 5) for fault in self.faults if fault.kind == "slow" and fault.stage == stage)
        return slow + self.delays.get(stage, self.start_s * STAGES[stage])

    def at(self, stage: str) -> list[Fault]:
        return [fault for fault in self.faults if fault.stage == stage]

    def serving(self) -> dict[str, Fault]:
        """Faults of a serving rank by kind: from the environment and from the control file, read anew when it changed."""
        try:
            state = self.control.stat()
            seen = (state.st_mtime_ns, state.st_size)
        except OSError:
            seen = None
        told = self._told
        if seen != told[0]:
            told = self._told = (seen, parse(self.control.read_text(encoding="utf-8"), self.rank) if seen else [])
        return {fault.kind: fault for fault in [*self.at("serving"), *told[1]]}

    @property
    def control_version(self) -> object:
        """Changes when the control file does."""
        return self._told[0]
