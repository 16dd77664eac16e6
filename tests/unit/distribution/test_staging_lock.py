"""Staging and serving exclude each other (case ckpt-during-serve)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ansible_collections.gb10.fleet.plugins.module_utils._staging_lock import (
    Held,
    StagingLock,
    launch_under_way,
    sentence,
)
from ansible_collections.gb10.fleet.plugins.modules import checkpoint, serving_lock

from .conftest import HubHandle, Node, _run

HOLDER = "import sys, time; from ansible_collections.gb10.fleet.plugins.module_utils._staging_lock import StagingLock\n"
HOLDER += "with StagingLock(sys.argv[1]).staging('fetch of a/b, pid 7'):\n    print('held', flush=True); time.sleep(60)"


def hold(path: Path) -> subprocess.Popen[str]:
    """Another process that stages."""
    root = str(Path(__file__).parents[3] / "collections")
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": root},
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def serving() -> dict[str, Any]:
    return {"kind": "serving", "holder": "container vllm_glm53 of cluster alpha", "since": 1_790_000_000}


def test_ckpt_during_serve(node: Node, hub: HubHandle, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fetch on a serving node is refused, with the holder and since when, and moves nothing."""
    monkeypatch.setattr(checkpoint, "running_rank", serving)
    hub.rules()
    refused = node.fetch()
    assert refused["failed"] and hub.sent() == 0
    assert "This node serves (container vllm_glm53 of cluster alpha, since 2026-09-2" in refused["msg"]
    assert "Run playbooks/stop.yml first" in refused["msg"]
    assert node.fetch(while_serving=True)["changed"]


def test_complete_checkpoint_on_a_serving_node_is_no_matter(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.fetch()
    monkeypatch.setattr(checkpoint, "running_rank", serving)
    assert not node.fetch().get("failed")


def test_launch_while_staging_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving_lock, "running_rank", lambda: None)
    path = tmp_path / "serving.lock"
    process = hold(path)
    try:
        refused = _run(serving_lock, {"lock_file": str(path), "holder": "launch of alpha"}, False, capfd)
        assert refused["failed"] and refused["msg"].startswith("A fetch runs on this node (fetch of a/b, pid 7, since ")
    finally:
        process.kill()
        process.wait()
    # The kernel let go of it with the process, however it died.
    assert not _run(serving_lock, {"lock_file": str(path)}, False, capfd).get("failed")


def test_staging_during_a_launch_is_refused_until_it_expires(tmp_path: Path) -> None:
    lock = StagingLock(str(tmp_path / "serving.lock"))
    lock.take("launch of alpha", 0.3)
    with pytest.raises(Held, match="launch of alpha"), lock.staging("fetch"):
        pass
    time.sleep(0.35)
    with lock.staging("fetch"):
        pass


def test_release_lets_staging_in(tmp_path: Path) -> None:
    lock = StagingLock(str(tmp_path / "serving.lock"))
    lock.take("launch of alpha", 3600)
    assert lock.holder() and lock.release() and lock.holder() is None


def test_queue_waits_for_the_end(tmp_path: Path) -> None:
    path = tmp_path / "serving.lock"
    process = hold(path)
    notes: list[str] = []
    try:
        with pytest.raises(Held), StagingLock(str(path)).staging("second", wait_s=0.3, note=notes.append):
            pass
        assert notes and "fetch of a/b" in notes[0]
        process.send_signal(signal.SIGKILL)
        with StagingLock(str(path)).staging("second", wait_s=10):
            pass
    finally:
        process.kill()
        process.wait()


def test_sentence_names_holder_and_what_to_do() -> None:
    assert "Wait for its end" in sentence({"kind": "staging", "holder": "fetch of a/b", "since": 0})


def test_launch_twice_the_second_is_told_who_holds_the_node(tmp_path: Path) -> None:
    """Two controllers at once: each would stop the other's ranks."""
    lock = StagingLock(str(tmp_path / "serving.lock"))
    lock.take("launch of alpha (a) on desk", 3600, "desk", 100)
    lock.take("launch of alpha (a) on desk", 3600, "desk", 100)
    for controller, pid, dead in (("desk", 200, ()), ("laptop", 100, (100,)), ("desk", 200, (99,))):
        with pytest.raises(Held, match=r"^launch of alpha \(a\) on desk is under way since .* run stop.yml first"):
            lock.take("launch of alpha (a) on laptop", 3600, controller, pid, dead)
    lock.take("launch of alpha (b) on desk", 3600, "desk", 200, (100,))
    assert launch_under_way(str(lock.path))["pid"] == 200  # type: ignore[index]
    lock.release()
    assert launch_under_way(str(lock.path)) is None
    lock.take("launch of alpha (b) on laptop", 3600, "laptop", 300)
