"""All ranks together: which trouble counts, which came first, and the sentence about it. Logs are the recorded ones."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ansible_collections.gb10.fleet.plugins.module_utils import _engine_log
from ansible_collections.gb10.fleet.plugins.module_utils import _rank_state as state

FIXTURES = Path(__file__).parents[2] / "fixtures"
HEAD, WORKER = "spark-01", "spark-02"
ADDRESSES = {HEAD: "192.0.2.1", WORKER: "192.0.2.2"}
NOW = 1_000_000.0
SETTINGS: dict[str, Any] = {
    "budgets": dict(state.BUDGETS),
    "container": "vllm_glm53",
    "master": "192.0.2.1:29521",
    "waiting": True,
}


def rfc(time: str | None) -> str | None:
    """An engine's own time (no year, no zone) as Docker would have written it."""
    return f"2026-{time.replace(' ', 'T')}Z" if time and re.match(r"\d\d-\d\d ", time) else time


def report(host: str = WORKER, log: str | None = None, **over: Any) -> dict[str, Any]:
    """A report of a rank: running and well, or as its recorded log says."""
    out: dict[str, Any] = {
        "host": host, "rank": 0 if host == HEAD else 1, "at": NOW, "exists": True, "running": True, "status": "running",
        "container_id": "c1", "restart_count": 0, "started_at": "2026-11-29T12:00:00Z", "first_id": "c1",
        "first_started_at": "2026-11-29T12:00:00Z", "exit_code": None, "oom_killed": False, "error": None, "finished_at": None,
        "engine_alive": True, "stage": None, "stage_percent": None, "first_error": None, "fatal": None, "waits": {}, "facts": {},
        "kernel_lines": [], "last_lines": [], "group_since": NOW, "still_since": None, "stopped_since": None, "offset_s": 0.0,
        "failing_since": None, "memory": {"free_kib": 22334668},
    }  # fmt: skip
    if log:
        reader = _engine_log.LogReader()
        reader.feed((FIXTURES / log).read_bytes(), final=True)
        read = reader.state
        for known in (read["first_error"], read["fatal"], *read["waits"].values()):
            if known:
                known["time"] = rfc(known["time"])
        names = ("stage", "first_error", "fatal", "waits", "facts")
        out.update({name: read[name] for name in names}, last_lines=read["last"], stage_percent=read["percent"])
    out.update(over)
    return out


def ended(code: int, at: str = "2026-11-29T12:18:10Z", **over: Any) -> dict[str, Any]:
    return {"running": False, "status": "exited", "exit_code": code, "finished_at": at, "engine_alive": None, **over}


def judge(*reports: Mapping[str, Any], now: float = NOW) -> tuple[state.Trouble | None, dict[str, Any]]:
    settings = {**SETTINGS, "rendezvous_since": state.rendezvous_since(reports)}
    found = [t for r in reports if (t := state.trouble(r, settings, now))]
    if not found:
        return None, {}
    first = state.first_cause(found, ADDRESSES)
    return first, state.diagnosis("alpha", {r["host"]: r for r in reports}, first, found, 42.0)


def test_the_same_mistake_on_every_rank_is_told_by_the_head() -> None:
    """A checkpoint that no rank has: whose look came first, or 0.3 s between two clocks, is no cause."""
    line = "FileNotFoundError: No such file or directory: '/m/model.safetensors'"
    ranks = []
    for host, second in ((HEAD, "08.6"), (WORKER, "08.3")):
        at = f"2026-11-29T12:18:{second}Z"
        fatal = {
            "id": "ckpt-missing-file",
            "kind": "cause",
            "time": at,
            "line": line,
            "groups": {"path": "/m/model.safetensors"},
        }
        ranks.append(report(host, fatal=fatal, first_error={"time": at, "line": line}, **ended(1)))
    first = judge(*ranks)[0]
    assert first is not None and (first.host, first.id) == (HEAD, "ckpt-missing-file")


def test_a_stage_counts_from_its_own_line() -> None:
    """Not from the look that found it: of ranks that wait for each other, the one that waited first is named."""
    stages = {"config": "2026-11-29T12:18:00Z", "rendezvous": "2026-11-29T12:18:01.5Z"}
    now = state.moment("2026-11-29T12:18:06Z")
    assert now is not None
    waiting = report(stage="rendezvous", stages=stages)
    assert state.group_since(waiting, now) == state.moment("2026-11-29T12:18:01.5Z")
    assert state.group_since(report(stage="load", stages=stages), now) == now
    assert state.group_since(report(stage="rendezvous", stages={"rendezvous": "11-29 12:18:01"}), now) == now


def test_healthy_ranks_are_no_trouble() -> None:
    assert judge(report(HEAD), report())[0] is None


def test_load_error_names_the_first_by_time() -> None:
    """A missing shard on both ranks: both died of it in the same second; the file is named."""
    first, said = judge(
        report(HEAD, "engine_logs/load_error_head.log", **ended(1)),
        report(WORKER, "engine_logs/load_error_worker.log", **ended(1)),
    )
    assert first and first.id == "ckpt-missing-file"
    assert said["cause"] == "/opt/model/model.safetensors is not there"
    assert said["doing"] == "loading weights"
    assert len(said["others"]) == 1


def test_launch_headless() -> None:
    """The head hangs without a line; the worker is named, with its exception and not "EngineCore failed to start."."""
    first, said = judge(
        report(HEAD, "engine_logs/worker_without_headless_head_hung.log"),
        report(WORKER, "engine_logs/worker_without_headless_worker.log", **ended(1)),
    )
    assert first and (first.host, first.id) == (WORKER, "launch-headless")
    text = state.message(said)
    assert "spark-02 (rank 1)" in text
    assert "AssertionError: collective_rpc should not be called on follower node" in text


def test_worker_killed_in_flight_names_the_worker() -> None:
    """The head shouts (connection reset); the worker was killed without a word."""
    first, said = judge(
        report(HEAD, "engine_logs/worker_killed_in_flight_head.log", **ended(1)), report(WORKER, **ended(137))
    )
    assert first and (first.host, first.id) == (WORKER, "rank-killed")
    assert said["others"][0]["id"] == "rank-peer-lost"


def test_peer_error_points_at_the_rank_that_gives_no_answer() -> None:
    silent = report(WORKER, failing_since=NOW - 40, failure="ssh: connect to host 192.0.2.12 port 22: No route to host")
    first, said = judge(report(HEAD, "engine_logs/headfirst_then_worker_killed_idle_head.log", **ended(1)), silent)
    assert first and (first.host, first.id) == (WORKER, "rank-unreachable")
    assert "(for 40 s: ssh: connect to host 192.0.2.12 port 22: No route to host)" in said["cause"]


def test_peer_error_alone_is_told_by_who_has_it() -> None:
    first, said = judge(report(HEAD, "engine_logs/worker_killed_in_flight_head.log", **ended(1)), report())
    assert first and (first.host, first.id) == (HEAD, "rank-peer-lost")
    assert said["cause"] == "the connection to the rank at 192.0.2.2 ended"


def test_worker_frozen() -> None:
    """The head's step timed out; the worker's processes are stopped."""
    first, _ = judge(
        report(HEAD, "engine_logs/worker_frozen_head.log", **ended(1)), report(WORKER, stopped_since=NOW - 9)
    )
    assert first and (first.host, first.id) == (WORKER, "rank-stopped")


def test_launch_wrong_master_by_the_workers_own_line() -> None:
    """The worker says where it looks: no need to wait until a connection fails (30 minutes if packets are dropped)."""
    worker = report(WORKER, "engine_logs/wrong_master_addr_worker.log", waits={})
    first, said = judge(report(HEAD, "engine_logs/wrong_master_addr_head.log"), worker)
    assert first and (first.host, first.id) == (WORKER, "launch-other-master")
    assert "at 192.0.2.99:29521; the head is at 192.0.2.1:29521" in said["cause"]


def test_launch_wrong_master_counts_when_it_lasts() -> None:
    worker = report(WORKER, "engine_logs/wrong_master_addr_worker.log", facts={})
    since = state.moment(worker["waits"]["launch-wrong-master"]["time"])
    assert since
    for later, verdict in ((10, None), (21, "launch-wrong-master")):
        now = since + later
        first, _ = judge(report(HEAD, at=now, group_since=now), {**worker, "at": now, "group_since": now}, now=now)
        assert (first.id if first else None) == verdict


def test_a_worker_that_waited_and_then_joined_is_well() -> None:
    worker = report(WORKER, "engine_logs/wrong_master_addr_worker.log", facts={}, stage="load")
    assert judge(report(HEAD), worker)[0] is None


def test_stale_worker_ends_by_the_rendezvous_budget() -> None:
    head = report(HEAD, "engine_logs/stale_worker_head.log", group_since=NOW - 181)
    first, said = judge(head, report(WORKER, "engine_logs/stale_worker_worker.log"))
    assert first and (first.host, first.id) == (HEAD, "stage-rendezvous")
    assert said["cause"] == "after 180 s the rank still waits for the others"


def test_a_worker_waits_as_long_as_the_head_needs_to_come() -> None:
    """The clock of the rendezvous begins when the last rank is there."""
    worker = report(WORKER, stage="rendezvous", group_since=NOW - 250)
    assert judge(report(HEAD, stage="engine", group_since=NOW - 250), worker)[0] is None
    assert judge(report(HEAD, stage="rendezvous", group_since=NOW - 100), worker)[0] is None
    first, _ = judge(report(HEAD, stage="rendezvous", group_since=NOW - 181), worker)
    assert first and first.id == "stage-rendezvous"


def test_of_two_still_ranks_the_one_that_came_least_far_is_named() -> None:
    """A head whose worker hangs in its load is just as still, and was still first."""
    head = report(HEAD, stage="loaded", still_since=NOW - 330, group_since=NOW - 340)
    worker = report(WORKER, stage="load", still_since=NOW - 310, group_since=NOW - 340)
    first, _ = judge(head, worker)
    assert first and (first.host, first.id) == (WORKER, "stage-still")


def test_launch_args_mismatch() -> None:
    """Case launch-args-mismatch: found before both GPUs spin at 100 %."""
    common = ["serve", "/m", "--max-num-seqs"]
    head = report(HEAD, argv=[*common, "6", "--node-rank", "0"])
    worker = report(WORKER, argv=[*common, "4", "--node-rank", "1", "--headless"])
    found = state.mismatch([head, worker])
    assert found and (found.host, found.id) == (WORKER, "launch-args-mismatch")
    assert found.groups["difference"] == "--max-num-seqs 4 here, 6 there"
    assert state.mismatch([head, report(WORKER, argv=[*common, "6", "--node-rank", "1", "--headless"])]) is None
    # Where the entrypoint ends and the arguments begin is no difference.
    split = report(WORKER, entrypoint=["serve"], argv=["/m", "--max-num-seqs", "6", "--node-rank", "1", "--headless"])
    assert state.mismatch([head, split]) is None


def test_launch_apiserver_entrypoint() -> None:
    """Case launch-apiserver-entrypoint: the module of the image's own entrypoint ignores --headless."""
    words = ["python3", "-m", "vllm.entrypoints.openai.api_server"]
    found = state.mismatch(
        [report(HEAD, entrypoint=words, argv=[]), report(WORKER, entrypoint=words, argv=["--headless"])]
    )
    assert found and (found.host, found.id) == (WORKER, "launch-apiserver-entrypoint")


def test_worker_that_exits_0_after_the_head_is_not_the_cause() -> None:
    """A headless worker exits 0 when the head is gone (measured)."""
    head = report(HEAD, **ended(137, "2026-11-29T12:38:24Z"))
    worker = report(WORKER, "engine_logs/head_killed_worker.log", **ended(0, "2026-11-29T12:38:40Z"))
    first, _ = judge(head, worker)
    assert first and (first.host, first.id) == (HEAD, "rank-killed")


def test_exit_code_0_is_a_failure_too() -> None:
    first, said = judge(report(HEAD), report(WORKER, **ended(0)))
    assert first and (first.host, first.id) == (WORKER, "rank-ended")
    assert "exit code 0" in said["cause"]


@pytest.mark.parametrize(
    ("over", "verdict"),
    [
        ({"exists": False, "running": False}, "rank-missing"),
        ({"restart_count": 1}, "rank-restarted"),
        ({"container_id": "c2"}, "rank-restarted"),
        ({"started_at": "2026-11-29T12:30:00Z"}, "rank-restarted"),
        ({"running": False, "status": "paused"}, "rank-stopped"),
        (ended(137, oom_killed=True), "rank-oom-killed"),
        (ended(127, error='could not select device driver "" with capabilities: [[gpu]]'), "pre-docker-runtime"),
        (ended(1, error="exec /usr/local/bin/vllm: exec format error"), "img-arm64"),
        ({"failing_since": NOW - 31, "failure": "x"}, "rank-unreachable"),
    ],
)
def test_state_of_a_container(over: dict[str, Any], verdict: str) -> None:
    first, _ = judge(report(HEAD), report(WORKER, **over))
    assert first and (first.host, first.id) == (WORKER, verdict)


def test_a_short_silence_of_a_node_is_no_verdict() -> None:
    assert judge(report(HEAD), report(WORKER, failing_since=NOW - 20, failure="x"))[0] is None


def test_the_kernel_says_why_a_rank_was_killed() -> None:
    killed = {
        "id": "kernel-oom-killer",
        "severity": "hard",
        "time": "1795966001.1",
        "count": 1,
        "groups": {"pid": "1234", "name": "python"},
        "line": "Out of memory: Killed process 1234 (python)",
    }
    first, said = judge(report(HEAD), report(WORKER, **ended(137), kernel_lines=[killed]))
    assert first and first.id == "kernel-oom-killer"
    assert "the kernel killed python (pid 1234)" in said["cause"]


def test_clocks_that_differ_are_brought_together() -> None:
    """The worker's clock is an hour behind: its error of 11:18:08 came first, although the head's says 12:18:10."""
    head = report(HEAD, first_error={"time": "2026-11-29T12:18:10Z", "line": "ValueError: b", "id": None}, **ended(1))
    worker = report(
        WORKER,
        first_error={"time": "2026-11-29T11:18:00Z", "line": "ValueError: a", "id": None},
        **ended(1),
        offset_s=3600.0,
    )
    first, _ = judge(head, worker)
    assert first and first.host == WORKER
    worker["offset_s"] = 3700.0
    first, _ = judge(head, worker)
    assert first and first.host == HEAD


def test_an_unknown_error_well_before_a_known_one_is_the_first() -> None:
    head = report(HEAD, "engine_logs/load_error_head.log", **ended(1))
    worker = report(
        WORKER, first_error={"time": "2026-11-29T13:20:00Z", "line": "ZorkError: grue", "id": None}, **ended(1)
    )
    first, _ = judge(head, worker)
    assert first and (first.host, first.line) == (WORKER, "ZorkError: grue")


@pytest.mark.parametrize(
    ("stage", "budget", "verdict"),
    [("config", "start_s", "stage-budget"), ("load", "load_s", "stage-budget"), ("compile", "compile_s", "stage-budget"),
     ("rendezvous", "rendezvous_s", "stage-rendezvous"), ("ready", "first_token_s", "endpoint-silent")],
)  # fmt: skip
def test_ready_variable_boot_budgets_per_stage(stage: str, budget: str, verdict: str) -> None:
    """Case ready-variable-boot: no single wall time, a budget for each stage."""
    limit = state.BUDGETS[budget]
    worker = report(stage="kv_cache")
    assert judge(report(HEAD, stage=stage, group_since=NOW - limit + 1), worker)[0] is None
    first, _ = judge(report(HEAD, stage=stage, group_since=NOW - limit - 1), worker)
    assert first and (first.host, first.id) == (HEAD, verdict)


def test_launch_ray_silent_a_quiet_load_with_progress_is_well() -> None:
    """Nine minutes without a line, but the rank reads its shards: it is not still."""
    head = report(HEAD, stage="load", still_since=None, group_since=NOW - 540)
    assert judge(head, report(WORKER, stage="load"))[0] is None


def test_a_stage_in_which_nothing_moves_is_stuck() -> None:
    first, said = judge(report(HEAD, stage="load", still_since=NOW - 301, group_since=NOW - 310), report())
    assert first and first.id == "stage-still"
    assert said["cause"] == "no sign of life while loading weights: for 301 s no new log line and no CPU time"


def test_a_worker_that_did_its_part_may_be_quiet() -> None:
    worker = report(WORKER, stage="kv_cache", still_since=NOW - 3000, group_since=NOW - 5000)
    assert judge(report(HEAD, stage="compile"), worker)[0] is None


def test_ready_health_200_with_a_dead_worker() -> None:
    """The head serves and says nothing; the worker is gone: trouble, whatever /health says."""
    first, _ = judge(report(HEAD, "engine_logs/pp2_success_head.log"), report(WORKER, **ended(137)))
    assert first and (first.host, first.id) == (WORKER, "rank-killed")


# --- what a person reads --------------------------------------------------------------------------------------------------
def test_message() -> None:
    _, said = judge(report(HEAD, "engine_logs/load_error_head.log", **ended(1)), report())
    text = state.message(said, last_lines=2)
    lines = text.splitlines()
    assert (
        lines[0] == "alpha: spark-01 (rank 0), loading weights, after 00:42: /opt/model/model.safetensors is not there."
    )
    assert lines[1].startswith("To do: run playbooks/prepare.yml")
    assert lines[2].endswith("[ckpt-missing-file]")
    assert lines[3] == "First error, 13:21:07 UTC: FileNotFoundError: No such file or directory:"
    assert lines[4] == "  /opt/model/model.safetensors"
    assert lines[5] == "Last lines of spark-01:"
    assert lines[6].startswith("  RuntimeError: Engine core initialization failed.")


def test_message_fits_a_terminal() -> None:
    """The longest ones: a worker without --headless, a peer that went, an error of 300 characters."""
    for head, worker in (
        ("worker_without_headless_head_hung", "worker_without_headless_worker"),
        ("worker_killed_in_flight_head", "wrong_master_addr_worker"),
    ):
        _, said = judge(
            report(HEAD, f"engine_logs/{head}.log"), report(WORKER, f"engine_logs/{worker}.log", **ended(1))
        )
        assert max(len(line) for line in state.message(said).splitlines()) <= 100


def test_last_lines_leave_the_frames_of_a_traceback_out() -> None:
    _, said = judge(report(HEAD), report(WORKER, "engine_logs/wrong_master_addr_worker.log", facts={}, **ended(1)))
    assert not [line for line in said["last_lines"] if "frame #" in line]


def test_progress_line_fits_a_terminal() -> None:
    reports = [
        report(HEAD, stage="load", stage_percent=37, stage_left_s=190),
        report(WORKER, stage="load", stage_percent=41),
    ]
    text = state.progress_line("alpha", 42, reports)
    assert text == (
        "alpha  00:42  spark-01 loading weights 37 %  spark-02 loading weights 41 %  free 21.3/21.3 GiB\n"
        "              ~3 min left"
    )
    assert max(len(line) for line in text.splitlines()) <= 100


def test_progress_of_a_worker_without_a_bar_is_what_it_read() -> None:
    """Only rank 0 prints a bar (success_worker.log has none)."""
    text = state.progress_line("alpha", 42, [report(WORKER, stage="load", activity={"read_bytes": 44_023_414_784})])
    assert "spark-02 loading weights (41.0 GiB read)" in text


def test_progress_is_worth_a_line_when_a_stage_or_ten_percent_changed() -> None:
    def key(percent: int) -> tuple[Any, ...]:
        return state.progress_key([report(HEAD, stage="load", stage_percent=percent)])

    assert key(31) == key(39)
    assert key(39) != key(40)
    assert key(39) != state.progress_key([report(HEAD, stage="loaded")])


def test_durations() -> None:
    assert [state.duration(s) for s in (0, 42.9, 725, 3723)] == ["00:00", "00:42", "12:05", "1:02:03"]


def test_a_peer_whose_address_is_nobodys_is_the_rank_that_ended() -> None:
    """A worker that left without a word (exit code 0); the head says an address that the inventory does not know."""
    head = report(HEAD, "engine_logs/worker_killed_in_flight_head.log", **ended(1))
    head["fatal"]["groups"]["peer"] = "198.51.100.77"
    first, _ = judge(head, report(WORKER, **ended(0, "2026-11-29T12:18:09Z")))
    assert first and (first.host, first.id) == (WORKER, "rank-ended")
