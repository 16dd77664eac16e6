"""What only nodes can show: whose page faults they were, which rank froze or was started anew; and that nothing is left."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ansible_collections.gb10.fleet.molecule.fabric import faults

OVERRIDES = {
    "args": {"enable-prompt-tokens-details": True, "enable-auto-tool-choice": True, "tool-call-parser": "hermes"},
    "env": {"FAKE_ENGINE_START_S": "3"},
}
PROGRESS = "/run/gb10-fleet/qualify/alpha.progress"
# A mapped file, dropped and read again: real major faults.
STORM = """
import mmap, os, time
with open("/var/tmp/storm", "wb") as file:
    file.write(os.urandom(8 << 20)); os.fsync(file.fileno())
file = open("/var/tmp/storm", "rb")
view = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
view.madvise(mmap.MADV_RANDOM)
end = time.time() + 6
while time.time() < end:
    view.madvise(mmap.MADV_DONTNEED); os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    sum(view[at] for at in range(0, len(view), 65536)); time.sleep(0.05)
os.unlink("/var/tmp/storm")
time.sleep(12)
"""


@pytest.fixture(scope="module")
def cluster() -> Any:
    return faults.Cluster()


@pytest.fixture
def launched(cluster: Any) -> Iterator[Any]:
    """Both ranks serve, before each test."""
    said = cluster.play("molecule/readiness/launch.yml", recipe_overrides=OVERRIDES)
    assert said.rc == 0, said.text[-3000:]
    yield cluster


def qualify(cluster: Any, folder: Path, at: str = "", do: Any = None, **plan: Any) -> tuple[Any, dict[str, Any]]:
    """A run, with something done as soon as its progress says ``at``."""

    def watch() -> None:
        end = time.monotonic() + 90
        while time.monotonic() < end:
            if at in cluster.head.run(f"cat {PROGRESS}", check=False):
                do()
                return
            time.sleep(0.3)

    cluster.head.run(f"rm -f {PROGRESS}")
    watcher = threading.Thread(target=watch, daemon=True)
    if at:
        watcher.start()
    said = cluster.play(
        "playbooks/qualify.yml", recipe_overrides=OVERRIDES, qualify_results_dir=str(folder), qualify_plan=plan
    )
    results = sorted(folder.glob("*/result.json"))
    assert results, said.text[-3000:]
    assert (results[-1].parent / "report.html").stat().st_size < 300_000
    return said, json.loads(results[-1].read_text(encoding="utf-8"))


def line(result: dict[str, Any], key: str) -> dict[str, Any]:
    return next(one for one in result["lines"] if one["key"] == key)


def test_an_innocent_run(launched: Any, tmp_path: Path) -> None:
    # Long enough for a share of a core to mean something: one call of nvidia-smi is 40 ms.
    said, result = qualify(launched, tmp_path, soak_s=20)
    assert said.rc == 0, said.text[-3000:]
    assert result["verdict"] == "pass"
    assert line(result, "major_faults")["measured"] == 0
    assert line(result, "counters")["status"] == line(result, "soak")["status"] == "pass"
    assert set(result["nodes"]) == {"molecule-1", "molecule-2"}
    for node in result["nodes"].values():
        assert node["missing"] is None and node["series"]["memory_available_gib"]
        assert node["sampler"]["percent_of_a_core"] <= 0.5 and node["sampler"]["major_faults"] == 0


def test_a_storm_belongs_to_its_node(launched: Any, tmp_path: Path) -> None:
    def storm() -> None:
        threading.Thread(target=launched.worker.run, args=(f"exec python3 -c '{STORM}'",), daemon=True).start()

    _, result = qualify(launched, tmp_path, "short prompts", storm, short=40, decode_runs=10)
    counts = {name: node["faults"]["other"] for name, node in result["nodes"].items()}
    assert counts["molecule-2"] > 100 > counts["molecule-1"], counts
    assert line(result, "other_major_faults")["why"].startswith("molecule-2: ")
    assert any(f["node"] == "molecule-2" and "python3" in f["text"] for f in result["findings"])


def test_a_frozen_worker_is_named(launched: Any, tmp_path: Path) -> None:
    stop = "pkill -STOP -f 'vllm serve'"
    try:
        said, result = qualify(
            launched, tmp_path, "decode", lambda: launched.worker.run(stop), request_timeout_s=8, decode_runs=20
        )
    finally:
        launched.worker.run("pkill -CONT -f 'vllm serve'", check=False)
    assert said.rc == 2
    assert "no answer within 8 s. molecule-2: a process of the rank is stopped." in line(result, "answers")["why"]


def test_a_restart_is_seen(launched: Any, tmp_path: Path) -> None:
    said, result = qualify(
        launched, tmp_path, "decode", lambda: launched.head.run("docker restart -t 1 gb10-fake"), decode_runs=20
    )
    assert said.rc == 2
    assert line(result, "restarts")["why"].startswith("molecule-1: the rank was started anew")


def test_nothing_is_left(cluster: Any) -> None:
    said = cluster.play("playbooks/qualify.yml", recipe_overrides=OVERRIDES, qualify_state="absent")
    assert said.rc == 0
    for node in (cluster.head, cluster.worker):
        assert node.run("ls -d /opt/gb10-fleet/qualify /run/gb10-fleet/qualify 2>/dev/null", check=False) == ""
        assert "gb10-qualify" not in node.run("systemctl list-units --all --plain --no-legend")
