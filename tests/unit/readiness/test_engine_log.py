"""Each recorded log gives the right verdict, stage and first error, however it is cut into pieces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ansible_collections.gb10.fleet.plugins.module_utils import _engine_log as log

LOGS = Path(__file__).parents[2] / "fixtures" / "engine_logs"
CASES = LOGS.parent / "cases"

# log: verdict, stage, id of the first error, what its line says. Read from the captures themselves.
TABLE: dict[str, tuple[str, str | None, str | None, str]] = {
    "address_not_local_head": (
        "failed",
        "engine",
        "net-host-ip-foreign",
        "Cannot assign requested address (addr='tcp://198.51.100.250:0')",
    ),
    "bad_block_size": ("failed", "kv_cache", "engine-block-size", "No common block size for 16"),
    "head_alone_bounded_timeout_head": ("failed", "rendezvous", "launch-rendezvous-timeout", "1/2 clients joined"),
    "head_killed_worker": ("stopped", "stopped", None, ""),
    "headfirst_then_worker_killed_idle_head": (
        "failed",
        "ready",
        "rank-peer-lost",
        "Connection closed by peer [192.0.2.2]",
    ),
    "load_error_head": ("failed", "load", "ckpt-missing-file", "/opt/model/model.safetensors"),
    "load_error_worker": ("failed", "load", "ckpt-missing-file", "/opt/model/model.safetensors"),
    "no_weights_worker": ("failed", "load", "ckpt-no-weights", "Cannot find any model weights with"),
    "port_in_use": ("failed", "config", "launch-port-in-use", "[Errno 98] Address already in use"),
    "pp2_eager_first_chat_500_head": ("failed", "ready", "launch-pp-eager", "KeyError: 'chatcmpl-"),
    "pp2_success_head": ("ready", "ready", None, ""),
    "ray_head_start": ("starting", "joined", None, ""),
    "ray_refused_on_cpu_head": ("failed", "engine", "launch-ray-platform", "current platform cpu does not support ray"),
    "shm_too_small_head": ("failed", "engine", "launch-shm-small", "160 MiB required, 64 MiB free"),
    "shm_too_small_worker_waits": ("starting", "rendezvous", None, ""),
    # Two starts in one log: the second one waits for a worker that belongs to the first.
    "stale_worker_head": ("starting", "rendezvous", None, ""),
    "stale_worker_worker": ("starting", "kv_cache", None, ""),
    "success_head": ("stopped", "stopped", None, ""),
    "success_worker": ("stopped", "stopped", None, ""),
    "worker_frozen_head": ("failed", "ready", "launch-exec-timeout", "RPC call to execute_model timed out"),
    "worker_killed_in_flight_head": (
        "failed",
        "ready",
        "rank-peer-lost",
        "Read error [192.0.2.2]:27276: Connection reset by peer",
    ),
    "worker_without_headless_head_hung": ("starting", "loaded", None, ""),
    "worker_without_headless_worker": ("failed", "loaded", "launch-headless", "should not be called on follower node"),
    "wrong_master_addr_head": ("starting", "rendezvous", None, ""),
    "wrong_master_addr_worker": ("starting", "rendezvous", None, ""),
}


def read(name: str) -> bytes:
    return (LOGS / f"{name}.log").read_bytes()


def state_of(data: bytes, step: int = 0) -> dict[str, Any]:
    reader = log.LogReader()
    for start in range(0, len(data), step) if step else ():
        reader.feed(data[start : start + step])
    reader.feed(b"" if step else data, final=True)
    return reader.state


def test_every_capture_is_in_the_table() -> None:
    captures = {path.stem for path in LOGS.glob("*.log") if not path.stem.startswith("synthetic")}
    assert captures == set(TABLE)


@pytest.mark.parametrize("name", TABLE)
def test_verdict_stage_and_first_error(name: str) -> None:
    verdict, stage, identity, words = TABLE[name]
    state = state_of(read(name))
    assert (log.verdict(state), state["stage"]) == (verdict, stage)
    if identity is None:
        assert state["first_error"] is None
        assert state["fatal"] is None
    else:
        assert state["first_error"]["id"] == state["fatal"]["id"] == identity
        assert words in state["first_error"]["line"]


@pytest.mark.parametrize("name", TABLE)
def test_fed_byte_by_byte(name: str) -> None:
    """Partial lines, tqdm's carriage returns, and the banner's block characters (three bytes of UTF-8 each) cut in two."""
    data = read(name)
    assert state_of(data, step=1) == state_of(data)


@pytest.mark.parametrize("name", TABLE)
def test_state_survives_json_at_any_line(name: str) -> None:
    """The cursor that a module hands to its next call."""
    whole = state_of(read(name))
    state: dict[str, Any] | None = None
    for line in read(name).split(b"\n"):
        reader = log.LogReader(state)
        reader.feed(line + b"\n", final=True)
        state = json.loads(json.dumps(reader.state))
    assert state == whole


@pytest.mark.parametrize("name", TABLE)
def test_a_flood_is_judged_like_any_log(name: str) -> None:
    """What is picked from megabytes at once leads to the same verdict, first error and end."""
    data = read(name)
    reader = log.LogReader()
    for start, end in log.LogReader.worth(data):
        reader.feed(data[start:end] + b"\n")
    whole = state_of(data)
    for key in ("fatal", "first_error"):
        assert (reader.state[key] or {}).get("id") == (whole[key] or {}).get("id"), key
    assert (reader.state["first_error"] or {}).get("line") == (whole["first_error"] or {}).get("line")
    if whole["stage"] in ("rendezvous", "joined", "load", "ready", "stopped"):
        assert reader.state["stage"] == whole["stage"]


def test_ready_success_log() -> None:
    """Case ready-success-log: a whole start on a real GB10 (vLLM 0.20), one rank."""
    state = state_of((CASES / "ready-success-log.txt").read_bytes())
    assert log.verdict(state) == "ready"
    assert list(state["stages"]) == [
        "config", "engine", "rendezvous", "joined", "load", "loaded", "compile", "kv_cache", "capture", "warm", "server", "ready",
    ]  # fmt: skip
    assert state["stages"]["loaded"] == "06-07 13:27:19"
    assert state["first_error"] is None
    assert state["facts"]["kv_available_gib"] == "40.61"
    assert state["facts"]["kv_tokens"] == "177440"
    assert state["facts"]["weights_gib"] == "48.5"


def test_percent_and_time_left_of_a_load() -> None:
    lines = (CASES / "ready-success-log.txt").read_bytes().split(b"\n")
    upto = next(i for i, line in enumerate(lines) if b" 50% Completed" in line) + 1
    state = state_of(b"\n".join(lines[:upto]) + b"\n")
    assert (state["stage"], state["percent"], state["left_s"]) == ("load", 50, 5 * 60 + 57)


def test_percent_of_a_bar_that_only_returns_the_carriage() -> None:
    """tqdm overwrites its line: the last piece counts."""
    bar = "\rCapturing CUDA graphs (decode, FULL):   0%|          | 0/35 [00:00<?, ?it/s]"
    bar += "\rCapturing CUDA graphs (decode, FULL):  51%|█████     | 18/35 [00:01<00:02, 17.6it/s]\n"
    state = state_of(bar.encode())
    assert (state["stage"], state["percent"], state["left_s"]) == ("capture", 51, 2)


def test_five_stages_of_a_worker() -> None:
    state = state_of(read("success_worker"))
    assert [s for s in state["stages"] if s != "stopped"] == [
        "config", "engine", "rendezvous", "joined", "load", "loaded", "kv_cache",
    ]  # fmt: skip


def test_launch_other_master_is_read() -> None:
    assert state_of(read("wrong_master_addr_worker"))["facts"]["master"] == "192.0.2.99:29521"
    wait = state_of(read("wrong_master_addr_worker"))["waits"]["launch-wrong-master"]
    assert wait["groups"] == {"address": "192.0.2.99", "port": "29521"}
    assert wait["count"] == 4


def test_ready_shm_info_is_never_fatal() -> None:
    state = state_of((CASES / "ready-shm-info.txt").read_bytes())
    assert log.verdict(state) == "starting"
    assert state["first_error"] is None
    assert state["notes"]["ready-shm-info"]["count"] == 1


def test_a_warning_with_a_traceback_is_no_error() -> None:
    """An optional part that cannot be imported is warned of with a whole traceback; healthy boots show it."""
    data = b"\n".join(
        b"(EngineCore pid=9) WARNING 08-22 20:20:14 [import_utils.py:408] " + text
        for text in (
            b"Module x was found but failed to import",
            b"Traceback (most recent call last):",
            b"AssertionError",
        )
    )
    state = state_of(data + b"\n" + read("pp2_success_head"))
    assert log.verdict(state) == "ready"
    assert state["first_error"] is None


def test_a_users_prompt_may_quote_any_error() -> None:
    line = (
        b"(APIServer pid=1) INFO 06-07 13:29:19 [logger.py:40] Received request chat-1: prompt: 'CUDA out of memory'\n"
    )
    state = state_of(read("pp2_success_head") + line)
    assert (log.verdict(state), state["first_error"]) == ("ready", None)


def test_an_error_before_the_cause_keeps_its_time() -> None:
    """First "WorkerProc failed to start.", the reason follows in the same second: time of the first, words of the reason."""
    first = state_of(read("load_error_worker"))["first_error"]
    assert first["time"] == "11-29 13:21:07"
    assert first["line"] == "FileNotFoundError: No such file or directory: /opt/model/model.safetensors"


def test_an_unknown_exception_is_the_first_error() -> None:
    text = read("load_error_worker").replace(
        b"FileNotFoundError: No such file or directory: /opt/model/model.safetensors", b"ZorkError: grue"
    )
    state = state_of(text)
    assert state["first_error"]["line"] == "ZorkError: grue"
    assert state["first_error"]["id"] in (None, "engine-failed")
    assert state["fatal"]["id"] == "engine-failed"


def test_kv_cache_proposal() -> None:
    """The careful figure ("to fit into requested memory") is the one to use, the greedy one is kept apart."""
    facts = state_of(read("synthetic_kv_proposal"))["facts"]
    assert facts["kv_cache_memory"] == 9169698816
    assert facts["kv_cache_memory_full"] == 13969219584
    assert facts["kv_available_gib"] == "8.54"


def test_block_size_qual_prefix_zero() -> None:
    assert state_of((CASES / "qual-prefix-zero.txt").read_bytes())["facts"]["block_size"] == "3584"


def test_time_of_docker_wins() -> None:
    reader = log.LogReader()
    reader.line("(Worker pid=1) INFO 11-29 12:48:26 [parallel_state.py:1906] world_size=2 rank=1 local_rank=0 "
                "distributed_init_method=tcp://192.0.2.1:29521 backend=gloo", "2026-11-29T12:48:27.5Z")  # fmt: skip
    assert reader.state["stages"] == {"rendezvous": "2026-11-29T12:48:27.5Z"}


def test_every_stage_and_signature_passes_the_filter() -> None:
    """A line without any of the filter's words is never looked at: no stage line and no signature may be among those."""
    for path in [*LOGS.glob("*.log"), *CASES.glob("*.txt")]:
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            if any(word in line for word in log._WORDS):
                continue
            assert not log._STAGE.search(line), (path.name, line)
            known = log._failures.match(line)
            assert known is None, (path.name, line, known)
