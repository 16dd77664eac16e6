"""The guard as a process: how it ends, what it leaves, what it tells systemd. Floors are tiny, so that it never acts here."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

QUIET = ["--floor-mib", "1", "--order9-mib", "0"]


class Running:
    """One guard and the socket on which it talks to systemd."""

    def __init__(self, program: Path, folder: Path, *words: str, watchdog_us: int = 0) -> None:
        self.folder = folder
        self.receipt = folder / "receipt.json"
        self.marker = folder / "ready"
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        address = folder / f"notify-{time.monotonic_ns()}"
        self.socket.bind(str(address))
        self.socket.settimeout(10)
        env = {**os.environ, "NOTIFY_SOCKET": str(address)}
        if watchdog_us:
            env["WATCHDOG_USEC"] = str(watchdog_us)
        argv = [sys.executable, "-I", "-S", str(program), *QUIET, "--receipt", str(self.receipt)]
        argv += ["--ready-marker", str(self.marker), *words]
        self.process = subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.messages: list[str] = []

    def hear(self, word: str) -> str:
        """Wait for a message that holds this word."""
        while True:
            message = self.socket.recv(4096).decode()
            self.messages.append(message)
            if word in message:
                return message

    def end(self) -> tuple[int, dict[str, Any], str]:
        code = self.process.wait(10)
        assert self.process.stdout is not None
        return code, json.loads(self.receipt.read_text()), self.process.stdout.read()


@pytest.fixture
def start(program: Path, tmp_path: Path) -> Iterator[Any]:
    guards: list[Running] = []

    def begin(*words: str, **kwargs: Any) -> Running:
        guards.append(Running(program, tmp_path, *words, **kwargs))
        return guards[-1]

    yield begin
    for guard in guards:
        with contextlib.suppress(ProcessLookupError):
            guard.process.kill()
        guard.process.wait(10)
        guard.socket.close()


def test_marker_ends_it_with_0(start: Any) -> None:
    guard = start()
    assert "files" in guard.hear("READY=1")
    guard.marker.write_text("ready")
    code, receipt, said = guard.end()
    assert (code, receipt["stopped_by"], receipt["state"], receipt["exit_code"]) == (0, "ready", "ended", 0)
    assert receipt["min_free_kib"] > 0 and receipt["below_floor_s"] == 0
    assert said.splitlines()[-1].startswith("stopped by ready after ")
    assert "STOPPING=1" in guard.hear("STOPPING")


def test_marker_may_say_why(start: Any) -> None:
    guard = start()
    guard.hear("READY")
    word = guard.marker.with_suffix(".new")
    word.write_text("failed\n")
    word.rename(guard.marker)
    assert guard.end()[1]["stopped_by"] == "failed"


def test_sigterm_ends_it_with_0_and_at_once(start: Any) -> None:
    guard = start()
    guard.hear("READY")
    began = time.monotonic()
    guard.process.terminate()
    code, receipt, _ = guard.end()
    assert (code, receipt["stopped_by"]) == (0, "signal")
    assert time.monotonic() - began < 2


def test_deadline_ends_it_with_3(start: Any) -> None:
    guard = start("--deadline-s", "0.3")
    code, receipt, said = guard.end()
    assert (code, receipt["stopped_by"], receipt["exit_code"]) == (3, "deadline", 3)
    assert "stopped by deadline" in said


def test_crash_leaves_a_receipt_too(start: Any, tmp_path: Path) -> None:
    """A sleep without end is no time that the kernel knows: the loop raises what nobody expects."""
    (tmp_path / "config.json").write_text('{"min_sleep_s": Infinity, "max_sleep_s": Infinity}')
    guard = start("--config", str(tmp_path / "config.json"))
    code, receipt, said = guard.end()
    assert code == 1
    assert (receipt["stopped_by"], receipt["state"]) == ("crash", "ended")
    assert receipt["error"].startswith("OverflowError: ")
    assert "Traceback" in said


def test_killed_guard_is_carried_on_and_not_hidden(start: Any) -> None:
    first = start("--run", "r1", "--deadline-s", "1.5")
    first.hear("READY")
    wait_for(first.receipt)
    first.process.send_signal(signal.SIGKILL)
    first.process.wait(10)
    second = start("--run", "r1", "--deadline-s", "1.5")
    second.hear("READY")
    code, receipt, said = second.end()
    assert len(receipt["interruptions"]) == 1
    assert receipt["interruptions"][0]["pid"] == first.process.pid
    assert receipt["pid"] == second.process.pid
    assert f"(pid {first.process.pid}) ended without a word" in said
    assert "the guard was killed 1 times" in said
    # The deadline counts from the first start.
    assert code == 3 and 1.5 <= receipt["seconds"] < 3


def test_another_run_begins_a_new_receipt(start: Any) -> None:
    first = start("--run", "r1")
    first.hear("READY")
    wait_for(first.receipt)
    first.process.send_signal(signal.SIGKILL)
    first.process.wait(10)
    second = start("--run", "r2", "--deadline-s", "0.2")
    assert second.end()[1]["interruptions"] == []


def test_receipt_of_an_ended_run_is_not_carried_on(start: Any) -> None:
    assert start("--run", "r1", "--deadline-s", "0.2").end()[0] == 3
    receipt = start("--run", "r1", "--deadline-s", "0.2").end()[1]
    assert receipt["interruptions"] == [] and receipt["seconds"] < 2


def test_systemd_watchdog_is_fed(start: Any) -> None:
    guard = start(watchdog_us=400_000)
    guard.hear("READY")
    began = time.monotonic()
    for _ in range(3):
        guard.hear("WATCHDOG=1")
    assert time.monotonic() - began < 2
    guard.process.terminate()
    assert guard.end()[0] == 0


def test_status_is_a_sentence(start: Any) -> None:
    guard = start()
    guard.hear("READY")
    assert guard.hear("STATUS=free ").endswith("floor 0.0 GiB")


def test_rss_is_within_20_mib(start: Any) -> None:
    guard = start()
    guard.hear("READY")
    time.sleep(0.3)
    rows = dict(line.split(":", 1) for line in Path(f"/proc/{guard.process.pid}/status").read_text().splitlines())
    assert int(rows["VmHWM"].split()[0]) <= 20 * 1024


def test_opens_and_closes_do_not_make_it_spin(start: Any, tmp_path: Path) -> None:
    """Once, an event that was not taken at once woke it again and again: 3350 looks in 32 s instead of 800."""
    shard = tmp_path / "a.safetensors"
    with shard.open("wb") as handle:
        handle.truncate(17 << 20)
    guard = start("--trail", "--trail-from-mib", "1", "--files", str(shard))
    guard.hear("READY")
    with shard.open("rb"):
        for _ in range(10):
            shard.read_bytes()
            time.sleep(0.1)
    guard.process.terminate()
    receipt = guard.end()[1]
    assert receipt["checkpoint"]["files"] == 1
    assert receipt["polls"] < receipt["seconds"] * 26 + 2 * 11 + 10


def test_says_what_it_may_not_do(start: Any) -> None:
    """As an ordinary user: no drop_caches, no compaction, little locked memory. The rest works."""
    if os.geteuid() != 0:
        pytest.skip("needs root to become somebody else")
    guard = start()
    guard.hear("READY")
    abilities = wait_for(guard.receipt)["abilities"]
    assert set(abilities) == {"drop_caches", "compact_memory", "cachestat", "memory_locked", "oom_score_adj"}
    assert abilities["drop_caches"] is True


def wait_for(path: Path) -> dict[str, Any]:
    for _ in range(100):
        if path.exists():
            return dict(json.loads(path.read_text()))
        time.sleep(0.05)
    raise AssertionError(f"{path} did not appear")


# --- hard floor ---


class FakeDocker(threading.Thread):
    """The engine's socket: takes one request, answers 204."""

    def __init__(self, path: Path, receipt: Path) -> None:
        super().__init__(daemon=True)
        self.receipt, self.request, self.receipt_before = receipt, "", {}
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.bind(str(path))
        self.socket.listen(1)

    def run(self) -> None:
        connection, _ = self.socket.accept()
        self.request = connection.recv(4096).decode()
        self.receipt_before = json.loads(self.receipt.read_text())
        connection.sendall(b"HTTP/1.0 204 No Content\r\n\r\n")
        connection.close()


def test_guard_silent_wedge_stops_the_container_after_the_receipt_is_on_disk(start: Any, tmp_path: Path) -> None:
    docker = FakeDocker(tmp_path / "docker.sock", tmp_path / "receipt.json")
    docker.start()
    words = ["--hard-floor-mib", "99999999", "--hard-floor-s", "0.3", "--container", "vllm_glm53"]
    guard = start(*words, "--docker-socket", str(tmp_path / "docker.sock"))
    code, receipt, said = guard.end()
    assert code == 4
    assert docker.request.startswith("POST /containers/vllm_glm53/stop?t=2 HTTP/1.0\r\n")
    assert docker.receipt_before["hard_floor"]["result"] == "pending"
    assert receipt["hard_floor"]["result"] == "stopped" and receipt["stopped_by"] == "hard_floor"
    assert "stopping the container vllm_glm53 before the host wedges" in said


def test_hard_floor_without_an_engine_says_so(start: Any, tmp_path: Path) -> None:
    words = ["--hard-floor-mib", "99999999", "--hard-floor-s", "0", "--container", "x"]
    code, receipt, _ = start(*words, "--docker-socket", str(tmp_path / "none.sock")).end()
    assert code == 4
    assert receipt["hard_floor"]["result"].startswith("not stopped: ")


# --- the command line ---


def test_check_prints_what_the_node_allows(program: Path) -> None:
    done = subprocess.run([sys.executable, str(program), "--check"], capture_output=True, text=True, timeout=10)
    answer = json.loads(done.stdout)
    assert done.returncode == 0
    assert set(answer) == {"abilities", "shortcomings"}


def test_help_and_usage_errors(program: Path) -> None:
    done = subprocess.run([sys.executable, str(program), "--help"], capture_output=True, text=True, timeout=10)
    assert "--floor-mib  MemFree is kept above this (8192)" in done.stdout
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=10)
    assert done.returncode == 2 and done.stderr == "memory_guard: --receipt is needed\n"


def test_shortcomings_say_what_still_works(guard: Any) -> None:
    allowed = {"drop_caches": False, "compact_memory": False, "cachestat": False, "memory_locked": False}
    lines = guard.shortcomings({**allowed, "oom_score_adj": 0})
    assert len(lines) == 5
    assert "only checkpoint pages are evicted" in lines[0]
    nothing = {**dict.fromkeys(allowed, True), "oom_score_adj": -900}
    assert guard.shortcomings(nothing) == []
