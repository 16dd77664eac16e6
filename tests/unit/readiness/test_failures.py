"""The failure catalogue: every entry is recognised in the log where it was met, and says cause and remedy with its numbers."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ansible_collections.gb10.fleet.plugins.module_utils import _engine_log, _failures, _rank_state

ROOT = Path(__file__).parents[3]
FIXTURES = ROOT / "tests" / "fixtures"


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "generate_troubleshooting", ROOT / "scripts" / "generate_troubleshooting.py"
    )
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


GENERATOR = generator()
ENTRIES: list[dict[str, Any]] = GENERATOR.load()
SIGNED = [entry for entry in ENTRIES if entry["source"] != "state"]


def test_generated_files_are_up_to_date() -> None:
    assert GENERATOR.DATA.read_text(encoding="utf-8") == GENERATOR.data_text(ENTRIES)
    assert GENERATOR.PAGE.read_text(encoding="utf-8") == GENERATOR.page_text(ENTRIES)


@pytest.mark.parametrize("entry", SIGNED, ids=lambda e: e["id"])
def test_entry_is_recognised_in_its_evidence(entry: dict[str, Any]) -> None:
    assert entry.get("evidence"), "an entry with a signature needs a log in which it was met"
    for name in entry["evidence"]:
        lines = (FIXTURES / name).read_text(encoding="utf-8", errors="replace").splitlines()
        found = {known.id for line in lines if (known := _failures.match(line, entry["source"]))}
        assert entry["id"] in found, name


@pytest.mark.parametrize("entry", [e for e in SIGNED if e["source"] == "engine"], ids=lambda e: e["id"])
def test_entry_ends_a_launch_only_if_it_is_hard(entry: dict[str, Any]) -> None:
    """Fed to the log reader, a hard entry is the verdict (or waits its patience); a soft one never is."""
    reader = _engine_log.LogReader()
    reader.feed((FIXTURES / entry["evidence"][0]).read_bytes(), final=True)
    state = reader.state
    if entry["kind"] == "note":
        assert entry["id"] in state["notes"]
    elif entry["kind"] == "wait":
        assert entry["id"] in state["waits"]
    else:
        assert state["fatal"] is not None


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda e: e["id"])
def test_entry_has_whole_words(entry: dict[str, Any]) -> None:
    assert entry["stage"] in _engine_log.STAGES
    for key in ("cause", "fix"):
        assert not entry[key].endswith("."), "clauses; the sentence is made where they are shown"
    said = _failures.explain(entry["id"], {}, "the line")
    assert "{" not in said["cause"] + said["fix"]


def sentence(name: str, case: str, source: str = "engine") -> str:
    """Cause and fix of the first line of a fixture that the catalogue knows by ``name``."""
    for line in (FIXTURES / case).read_text(encoding="utf-8").splitlines():
        known = _failures.match(line, source)
        if known and known.id == name:
            said = _failures.explain(name, known.groups, line)
            return f"{said['cause']}; {said['fix']}"
    raise AssertionError(f"{name} is not in {case}")


def test_launch_util_too_high() -> None:
    """104.46 of 121.69 GiB free carry 0.85 (0.858), not the 0.87 that was asked for."""
    text = sentence("launch-util-too-high", "cases/launch-util-too-high.txt")
    assert "104.46 GiB of 121.69 GiB are free, 0.87 x 121.69 GiB = 105.87 GiB are wanted" in text
    assert "lower gpu-memory-utilization to 0.85 on all ranks" in text


def test_launch_util_too_high_ok_line_is_no_error() -> None:
    """The success line of the same check begins with the same words."""
    line = next(
        line
        for line in (FIXTURES / "cases/launch-util-too-high.txt").read_text().splitlines()
        if line.startswith("Free memory on device (110")
    )
    assert _failures.match(line) is None


def test_launch_kv_too_small() -> None:
    """The engine's own number becomes the setting."""
    text = sentence("launch-kv-too-small", "cases/launch-kv-too-small.txt")
    assert "max-model-len 700160 needs 6.11 GiB of KV cache, 5.17 GiB are there" in text
    assert "set max-model-len to 566784 at most" in text


def test_launch_port_in_use() -> None:
    text = sentence("launch-port-in-use", "cases/launch-port-in-use.txt")
    assert "port 29500 of this node is held" in text


def test_launch_shm_small() -> None:
    text = sentence("launch-shm-small", "engine_logs/shm_too_small_head.log")
    assert "160 MiB in /dev/shm, 64 MiB are free" in text


def test_launch_exec_timeout() -> None:
    assert "sample_tokens did not come back" in sentence("launch-exec-timeout", "cases/launch-exec-timeout.txt")


def test_launch_ray_pg() -> None:
    assert "waited 150 s" in sentence("launch-ray-pg", "cases/launch-ray-pg.txt")


def test_launch_skip_check_env() -> None:
    assert "VLLM_SKIP_INIT_MEMORY_CHECK does nothing" in sentence(
        "launch-skip-check-env", "cases/launch-skip-check-env.txt"
    )


def test_guard_ray_memmon() -> None:
    assert "113.76GB of 119.70GB" in sentence("guard-ray-memmon", "cases/guard-ray-memmon.txt")


def test_guard_nvrm_benign() -> None:
    """The NoLog line of healthy boots is soft; a refused allocation and the OOM killer are hard."""
    lines = (FIXTURES / "cases/guard-nvrm-benign.txt").read_text(encoding="utf-8").splitlines()
    known = [k for line in lines if (k := _failures.match(line, _failures.KERNEL))]
    assert [(k.id, k.severity) for k in known] == [
        ("guard-nvrm-benign", "soft"), ("kernel-nvrm-alloc", "hard"), ("kernel-oom-killer", "hard"),
    ]  # fmt: skip
    assert known[2].groups == {"pid": "1234", "name": "python"}


def test_a_specific_cause_wins_over_a_summary() -> None:
    known = _failures.match("RuntimeError: NCCL error: Call to ibv_modify_qp failed, errno 61 (No data available)")
    assert known and known.id == "net-gid-empty-errno61"


def test_unknown_verdict_says_its_line() -> None:
    assert _failures.explain("zork", {}, "the grue")["cause"] == "the grue"


def test_budgets_have_words() -> None:
    """Every stage counts against a budget that exists."""
    assert set(_rank_state.BUDGET_OF) == set(_engine_log.STAGES)
    assert set(_rank_state.BUDGET_OF.values()) <= set(_rank_state.BUDGETS)
