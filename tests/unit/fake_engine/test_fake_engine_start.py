"""The fake engine's lines, exit codes and manners while starting and ending, against recordings of real ranks."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest
from fake_engine import peers
from fake_engine.journal import Journal, Rank

from .conftest import Cluster, normal, normal_lines, recorded

Make = Callable[..., Cluster]


def test_success_is_the_recorded_start_and_end(cluster: Make) -> None:
    """success_head.log, success_worker.log: every line, in order, from the first to the last."""
    ranks = cluster()
    head, worker = ranks.pair()
    assert ranks.chat()[0] == 200
    head.signal(signal.SIGTERM)
    assert head.wait() == 0
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0
    assert normal_lines(head.text) == normal_lines(recorded("success_head.log"))
    assert normal_lines(worker.text) == normal_lines(recorded("success_worker.log"))


def test_head_first_works_as_well(cluster: Make) -> None:
    """headfirst_*: the head waits after its world_size line, and goes on when the worker joins."""
    ranks = cluster()
    head = ranks.start(0)
    head.wait_line("world_size=2 rank=0")
    assert "is assigned" not in head.text
    ranks.start(1)
    head.wait_line("Application startup complete")


def test_single_node(cluster: Make) -> None:
    ranks = cluster(nodes=1)
    head = ranks.start()
    head.wait_line("Application startup complete")
    assert "world_size=1 rank=0 local_rank=0 distributed_init_method=file:///tmp/vllm_dist_" in head.text
    assert "DP group leader" not in head.text


def test_three_nodes_pipeline(cluster: Make) -> None:
    ranks = cluster("--pipeline-parallel-size", "3", "--tensor-parallel-size", "1", nodes=3)
    for rank in (2, 1):
        ranks.start(rank)
    head = ranks.start(0)
    head.wait_line("Application startup complete")
    assert "rank 0 in world size 3 is assigned" in head.text
    assert "(Worker_PP0 pid=" in head.text
    assert ranks.chat()[0] == 200


def test_gb10_lines_stand_where_a_spark_has_them(cluster: Make) -> None:
    """facts of public cases ready-success-log, launch-util-too-high (proposal) and qual-rank-kv-gap (8.54 and 5.54 GiB)."""
    ranks = cluster()
    ranks.arguments.remove("--enforce-eager")
    head, worker = ranks.pair(
        FAKE_ENGINE_PLATFORM="gb10", FAKE_ENGINE_KV_GIB="rank0=8.54,rank1=5.54", FAKE_ENGINE_BLOCK_SIZE="2304"
    )
    order = [
        "Loading weights took",
        "Model loading took",
        "torch.compile took",
        "Available KV cache memory: 8.54 GiB",
        "Setting attention block size to 2304 tokens",
        "GPU KV cache size: 669,082 tokens",
        "Graph capturing finished",
        "Replace gpu_memory_utilization config with `--kv-cache-memory=",
        "init engine (profile",
        "Starting vLLM server on",
        "Application startup complete.",
    ]
    places = [head.text.index(part) for part in order]
    assert places == sorted(places)
    assert "Available KV cache memory: 5.54 GiB" in worker.text
    assert "Replace gpu_memory_utilization" in worker.text
    assert "CPU KV cache size" not in head.text


@pytest.mark.parametrize(
    ("environment", "line"),
    [
        ({"NCCL_IB_HCA": "rocep1s0f0,roceP2p1s0f0", "NCCL_IB_DISABLE": "1"}, "NET/Socket : Using [0]lo:127.0.0.1<0>"),
        ({"NCCL_IB_HCA": "rocep1s0f0,roceP2p1s0f0", "FAKE_ENGINE_FAULT": "tcp"}, "NET/IB : No device found."),
    ],
)
def test_net_tcp_fallback(cluster: Make, environment: dict[str, str], line: str) -> None:
    """Public case net-tcp-fallback: what NCCL says when it does not use the HCAs."""
    common = {"NCCL_DEBUG": "INFO", "NCCL_SOCKET_IFNAME": "lo", "VLLM_HOST_IP": "127.0.0.1"}
    head, _worker = cluster().pair(**common, **environment)
    assert line in head.text
    assert "via NET/Socket/0" in head.text


def test_missing_shard_ends_both_ranks(cluster: Make) -> None:
    """load_error_*.log: the traceback of each side, exit 1 on both."""
    ranks = cluster(environment={"FAKE_ENGINE_FAULT": "load_error"})
    worker, head = ranks.start(1), ranks.start(0)
    assert (head.wait(), worker.wait()) == (1, 1)
    for process, name in ((head, "load_error_head.log"), (worker, "load_error_worker.log")):
        assert normal_lines(process.text, "WorkerProc failed") == normal_lines(recorded(name), "WorkerProc failed")


def test_port_in_use(cluster: Make) -> None:
    """port_in_use.log: seen before anything is loaded; exit 1."""
    ranks = cluster(nodes=1)
    with socket.create_server(("127.0.0.1", ranks.port)):
        head = ranks.start()
        assert head.wait() == 1
    assert normal_lines(head.text, "^Traceback") == normal_lines(recorded("port_in_use.log"), "^Traceback")
    assert "Resolved architecture" not in head.text


def test_master_port_in_use(cluster: Make) -> None:
    """Public case launch-port-in-use (vllm#39015): the rendezvous port is taken by a stale process."""
    ranks = cluster()
    with socket.create_server(("127.0.0.1", ranks.master_port)):
        head = ranks.start()
        assert head.wait() == 1
    assert f"port: {ranks.master_port}, useIpv6: false, code: -98, name: EADDRINUSE" in head.text


def test_bad_block_size(cluster: Make) -> None:
    ranks = cluster("--block-size", "16", nodes=1)
    head = ranks.start(FAKE_ENGINE_FAULT="bad_block_size")
    assert head.wait() == 1
    mark = "WorkerProc hit an exception"
    assert normal_lines(head.text, mark) == normal_lines(recorded("bad_block_size.log"), mark)


def test_shm_too_small(cluster: Make) -> None:
    """shm_too_small_head.log: the head dies, exit 1; the worker waits without a line, and SIGTERM ends it, exit 0."""
    ranks = cluster()
    worker = ranks.start(1)
    head = ranks.start(FAKE_ENGINE_FAULT="rank0:shm")
    assert head.wait() == 1
    mark = "EngineCore failed to start"
    assert normal_lines(head.text, mark) == normal_lines(recorded("shm_too_small_head.log"), mark)
    last = worker.wait_line("world_size=2 rank=1")
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0
    assert worker.text.split(last)[0] and "Executor: waiting for worker exit count=1" in worker.text.split(last)[1]


def test_worker_without_headless(cluster: Make) -> None:
    """worker_without_headless_*: the worker dies, exit 1; the head stops after its weights, silent, deaf to SIGTERM."""
    ranks = cluster()
    worker, head = ranks.start(1, headless=False), ranks.start(0)
    assert worker.wait() == 1
    mark = "EngineCore failed to start"
    assert normal_lines(worker.text, mark) == normal_lines(recorded("worker_without_headless_worker.log"), mark)
    head.wait_line("Loading weights took")
    head.signal(signal.SIGTERM)
    with pytest.raises(Exception, match="timed out"):
        head.wait(0.5)
    assert normal_lines(head.text) == normal_lines(recorded("worker_without_headless_head_hung.log"))


def test_worker_killed_while_loading(cluster: Make) -> None:
    """worker_killed_loading_head.log (measured with the real engine): the head finishes its load, then dies, exit 1."""
    ranks = cluster()
    worker = ranks.start(1, FAKE_ENGINE_FAULT="rank1:die@loading")
    head = ranks.start(0)
    assert worker.wait() == -signal.SIGKILL
    assert head.wait() == 1
    mark = "Error ignored in is_in_the_same_node"
    assert normal_lines(head.text, mark) == normal_lines(recorded("worker_killed_loading_head.log"), mark)
    assert "Loading weights took" in head.text.split(mark)[0]


def test_head_alone_with_a_bounded_wait(cluster: Make) -> None:
    """head_alone_bounded_timeout_head.log, with 1 s instead of 40."""
    head = cluster("--distributed-timeout-seconds", "1").start()
    assert head.wait() == 1
    mark = "WorkerProc failed to start"
    expected = [
        line.replace("41 seconds", "2 seconds")
        for line in normal_lines(recorded("head_alone_bounded_timeout_head.log"), mark)
    ]
    assert normal_lines(head.text, mark) == expected


def test_head_that_waits_ignores_sigterm(cluster: Make) -> None:
    """Measured for 40 s: docker stop of a head in rendezvous ends with SIGKILL, 137."""
    head = cluster().start()
    head.wait_line("world_size=2 rank=0")
    head.signal(signal.SIGTERM)
    with pytest.raises(Exception, match="timed out"):
        head.wait(0.5)


def test_worker_alone_ends_when_told(cluster: Make) -> None:
    """worker_alone_stopped_worker.log: no head; three lines, exit 0."""
    worker = cluster().start(1)
    worker.wait_line("world_size=2 rank=1")
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0
    mark = "Executor: waiting"
    expected = [
        line
        for line in normal_lines(recorded("worker_alone_stopped_worker.log"), mark)
        if "multiproc_executor.py" in line
    ]
    assert normal_lines(worker.text, mark) == expected


def test_stale_worker_keeps_a_new_head_waiting(cluster: Make) -> None:
    """stale_worker: a head that was restarted waits for a worker that will not come; the old worker stays, silent."""
    ranks = cluster()
    head, worker = ranks.pair()
    before = worker.text
    head.signal(signal.SIGKILL)
    head.wait()
    new = ranks.start(0)
    new.wait_line("world_size=2 rank=0")
    with pytest.raises(Exception, match="timed out"):
        new.wait(0.5)
    assert "is assigned" not in new.text
    assert worker.child.poll() is None
    assert worker.text == before


def test_head_killed_worker_ends_as_recorded(cluster: Make) -> None:
    ranks = cluster()
    head, worker = ranks.pair()
    head.signal(signal.SIGKILL)
    head.wait()
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0
    mark = "Executor: waiting"
    assert normal_lines(worker.text, mark) == normal_lines(recorded("success_worker.log"), mark)


@pytest.mark.parametrize(
    ("fault", "fatal"),
    [
        ("oom", r"torch.OutOfMemoryError: CUDA out of memory"),
        (
            "free_memory=98.89",
            "(98.89/121.69 GiB) on startup is less than desired GPU memory utilization (0.84, 102.22 GiB)",
        ),
        ("nccl=errno61", "ibv_modify_qp failed with error No data available errno 61"),
        ("nccl", "NCCL error: unhandled system error"),
        ("kv_too_small=1536", "estimated maximum model length is 1536"),
        ("no_kv", "No available memory for the cache blocks"),
    ],
)
def test_failures_of_gpus(cluster: Make, fault: str, fatal: str) -> None:
    """Public cases launch-util-too-high, launch-kv-too-small, net-gid-empty-errno61: no GPU here, so the text only."""
    head = cluster("--gpu-memory-utilization", "0.84", nodes=1).start(FAKE_ENGINE_FAULT=fault)
    assert head.wait() == 1
    assert fatal in head.text
    assert "EngineCore failed to start." in head.text
    assert head.text.rstrip().splitlines()[-1].startswith("RuntimeError: Engine core initialization failed.")


def test_net_ifname_baked(cluster: Make) -> None:
    """Public case net-ifname-baked: an interface of another machine."""
    head = cluster(nodes=1).start(GLOO_SOCKET_IFNAME="enp9s9f9")
    assert head.wait() == 1
    assert "Unable to find address for: enp9s9f9" in head.text


@pytest.mark.parametrize(
    "setting", [{"FAKE_ENGINE_FAULT": "explode"}, {"FAKE_ENGINE_FAULT": "die@nowhere"}, {"FAKE_ENGINE_DELAYS": "nap=1"}]
)
def test_a_setting_that_does_not_exist_is_an_error(cluster: Make, setting: dict[str, str]) -> None:
    head = cluster(nodes=1).start(**setting)
    assert head.wait() == 64
    assert "known: " in head.text


def test_a_fault_is_for_its_rank_only(cluster: Make) -> None:
    head, worker = cluster().pair(FAKE_ENGINE_FAULT="rank7:die@start")
    assert head.child.poll() is None and worker.child.poll() is None


def test_head_stuck_silently(cluster: Make) -> None:
    """ready-variable-boot ("never"): no line, no end, deaf to SIGTERM; the worker waits for it."""
    ranks = cluster()
    worker = ranks.start(1)
    head = ranks.start(0, FAKE_ENGINE_FAULT="stuck@kv")
    head.wait_line("Explicitly set")
    head.signal(signal.SIGTERM)
    with pytest.raises(Exception, match="timed out"):
        head.wait(0.5)
    assert worker.child.poll() is None
    assert "init engine" not in head.text


def test_slow_boot_and_stage_delays(cluster: Make) -> None:
    """Progress by stages: weights of several files, each with its line."""
    ranks = cluster(nodes=1)
    begin = time.monotonic()
    head = ranks.start(FAKE_ENGINE_SHARDS="4", FAKE_ENGINE_DELAYS="loading=0.4", FAKE_ENGINE_FAULT="slow=0.3@kv")
    head.wait_line("Application startup complete")
    assert time.monotonic() - begin > 0.7
    steps = [line for line in head.lines if "checkpoint shards" in line]
    assert [line.split("shards:")[1].split("%")[0].strip() for line in steps] == ["0", "25", "50", "75", "100"]


def test_a_rank_that_ends_without_a_word(cluster: Make) -> None:
    head, worker = cluster().pair(FAKE_ENGINE_FAULT="rank1:exit=0@serving")
    assert worker.wait() == 0
    assert head.child.poll() is None


def test_wrong_master_address(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """wrong_master_addr_worker.log: no route to the head's address, again and again."""
    journal = Journal(Rank(nodes=2, tensor=2, number=1, headless=True, master_addr="192.0.2.99", master_port=29521), {})
    attempts: list[Any] = []

    def unreachable(address: Any, timeout: float) -> socket.socket:
        attempts.append(address)
        raise OSError(113, "No route to host")

    monkeypatch.setattr(peers.socket, "create_connection", unreachable)
    monkeypatch.setattr(peers.time, "monotonic", lambda: float(len(attempts)))
    assert peers.connect(journal.rank, journal, 1800.0, lambda _seconds: len(attempts) > 2) is None
    said = [normal(line) for line in capfd.readouterr().err.splitlines()]
    real = [normal(line) for line in recorded("wrong_master_addr_worker.log").splitlines() if "[c10d]" in line]
    assert said[1] == next(line for line in real if "any network address" in line)
    start = "TCPStore.cpp:340] [c10d] TCP client failed to connect/validate to host ADDR:PORT "
    start += "- retrying (try=0, timeout=1800000ms, delay="
    assert any(start in line for line in real)
    assert start in said[2]
    assert "(errno: 113 - No route to host)." in said[0]
