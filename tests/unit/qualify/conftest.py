"""The fake engine as a process on loopback, and results made of it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ansible_collections.gb10.fleet.plugins.module_utils import _qualify, _qualify_client
from ansible_collections.gb10.fleet.plugins.module_utils._openai_client import Endpoint

ROOT = Path(__file__).resolve().parents[3]


def _module(name: str, path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


Cluster = _module("fake_engine_ranks", ROOT / "tests/unit/fake_engine/conftest.py").Cluster

ARGS = {"max-model-len": 2048, "max-num-seqs": 4, "block-size": 32, "enable-auto-tool-choice": True}
FLAGS = ("--enable-prompt-tokens-details", "--enable-auto-tool-choice", "--tool-call-parser", "hermes")
SMALL = {"colds": 1, "repeats": 10, "short": 3, "decode_runs": 3, "rounds": 1, "request_timeout_s": 20}


def recipe(**over: Any) -> dict[str, Any]:
    return {"args": {**ARGS, **over.pop("args", {})}, "expect": over.pop("expect", {}), **over}


def result_of(
    measured: dict[str, Any],
    plan: dict[str, Any],
    nodes: dict[str, Any] | None = None,
    expect: dict[str, Any] | None = None,
) -> dict[str, Any]:
    return _qualify.judge({"cluster": "alpha", "recipe": "fake", "plan": plan, "expect": expect or {}, "measured": measured,
                           "nodes": nodes or {}, "provenance": {}})  # fmt: skip


def line(result: dict[str, Any], key: str) -> dict[str, Any]:
    return next(one for one in result["lines"] if one["key"] == key)


class Engine:
    """One head without workers, and runs against it."""

    def __init__(self, ranks: Any) -> None:
        self.ranks = ranks
        self.url = f"http://127.0.0.1:{ranks.port}"
        self.control = Path(ranks.environment["FAKE_ENGINE_CONTROL"])

    def fault(self, text: str) -> None:
        self.control.write_text(text, encoding="utf-8")

    def run(self, hook: Callable[[str], None] = lambda line: None, plan: dict[str, Any] | None = None, key: str | None = None,
            **over: Any) -> tuple[dict[str, Any], dict[str, Any]]:  # fmt: skip
        wanted = _qualify.plan(recipe(**over), "quick", None, {**SMALL, **(plan or {})})
        return _qualify_client.Run(Endpoint(self.url, key), "tiny", wanted, tell=hook).run(), wanted

    def result(self, **over: Any) -> dict[str, Any]:
        expect = over.get("expect") or {}
        measured, plan = self.run(**over)
        return result_of(measured, plan, expect=expect)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    made: list[Any] = []

    def make(*flags: str, nodes: int = 1, **environment: str) -> Engine:
        environment.setdefault("FAKE_ENGINE_CONTROL", str(tmp_path / "control"))
        environment.setdefault("FAKE_ENGINE_ANSWER", " ".join(f"word{n}" for n in range(40)))
        ranks = Cluster(*FLAGS, *flags, nodes=nodes, environment=environment)
        made.append(ranks)
        if nodes > 1:
            ranks.pair()
        else:
            ranks.start().wait_line("Application startup complete")
        return Engine(ranks)

    yield make
    for ranks in made:
        ranks.end()
