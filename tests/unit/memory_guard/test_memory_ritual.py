"""The ritual before a launch, on real files and with memory that a test decides."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.testing import patch_module_args

from ansible_collections.gb10.fleet.plugins.module_utils import _pagecache
from ansible_collections.gb10.fleet.plugins.modules import memory_ritual

GIB = 1 << 20
TOTAL = 127600748


class Node:
    """A node of 121.7 GiB: what is free, cached and in large blocks; eviction and writes have the effect that a test wants."""

    def __init__(self, free_gib: float, cached_gib: float = 0.0, big_gib: float = 4.0) -> None:
        self.free, self.cached, self.big = free_gib * GIB, cached_gib * GIB, big_gib * GIB
        self.written: list[str] = []
        self.drop_frees = 0.0
        self.comes_back: list[float] = []  # GiB that return, one per look while waiting

    def memory(self) -> dict[str, int]:
        return {"MemTotal": TOTAL, "MemFree": round(self.free), "Cached": round(self.cached), "AnonPages": GIB}

    def sleep(self, _seconds: float) -> None:
        self.free += self.comes_back.pop(0) * GIB if self.comes_back else 0


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Any:
    def call(node: Node, check: bool = False, **options: Any) -> dict[str, Any]:
        def read(self: memory_ritual.Ritual) -> dict[str, int]:
            self.memory = node.memory()
            return self.memory

        def write(self: memory_ritual.Ritual, name: str) -> None:
            if not self.module.check_mode:
                node.written.append(name)
                node.free += node.drop_frees * GIB if name == "drop_caches" else 0
                node.big += GIB if name == "compact_memory" else 0

        monkeypatch.setattr(memory_ritual.Ritual, "read", read)
        monkeypatch.setattr(memory_ritual.Ritual, "write", write)
        monkeypatch.setattr(memory_ritual.Ritual, "big", lambda self: round(node.big))
        monkeypatch.setattr(memory_ritual.Ritual, "processes", lambda self: [PYTHON])
        monkeypatch.setattr(memory_ritual.time, "sleep", node.sleep)
        arguments = {"_ansible_check_mode": check, "utilization": 0.84, "timeout_s": 1, **options}
        with patch_module_args(arguments), pytest.raises(SystemExit):
            memory_ritual.main()
        return dict(json.loads(capfd.readouterr().out))

    return call


PYTHON = {"pid": 4211, "name": "python3", "kib": round(3.4 * GIB)}


def test_with_room_nothing_is_touched(run: Any) -> None:
    """A warm page cache beside enough free memory is worth keeping."""
    node = Node(free_gib=110, cached_gib=8)
    result = run(node)
    assert (result["changed"], result["actions"], result["enough"]) == (False, [], True)
    assert node.written == []
    assert result["wanted_gib"] == 103.72


def test_without_room_the_cache_is_dropped(run: Any) -> None:
    node = Node(free_gib=60, cached_gib=50)
    node.drop_frees = 48
    result = run(node)
    assert result["changed"] and result["enough"]
    assert result["actions"] == ["drop the page cache (50.0 GiB)"]
    assert node.written == ["drop_caches"]


def test_short_blocks_are_compacted_although_there_is_room(run: Any) -> None:
    node = Node(free_gib=110, big_gib=0.1)
    result = run(node)
    assert result["actions"] == ["compact memory, 102 MiB are free in blocks of 2 MiB and more"]
    assert result["changed"]
    assert run(node)["changed"] is False


def test_pre_mem_return_waits_for_the_driver(run: Any) -> None:
    """pre-mem-return: a stopped container's memory comes back minutes later."""
    node = Node(free_gib=100)
    node.comes_back = [0, 1, 2, 3]
    result = run(node, timeout_s=60)
    assert result["enough"] and result["free_gib"] >= 103.72
    assert result["changed"] is False


def test_timeout_names_what_holds_the_memory(run: Any) -> None:
    """The tone of the project's errors: node's figures, what was wanted, one thing to do, who holds it."""
    result = run(Node(free_gib=98.9), timeout_s=0)
    assert result["failed"]
    assert result["msg"] == (
        "98.9 GiB free after 0 s, 0.84 × 121.7 GiB + 1.5 GiB = 103.7 GiB wanted. Lower gpu-memory-utilization to 0.80, or free "
        "memory: python3 (pid 4211) holds 3.4 GiB; 21.8 GiB are in no process's account, as the GPU driver's are."
    )


def test_check_mode_says_what_it_would_do_and_does_not_wait(run: Any) -> None:
    node = Node(free_gib=60, cached_gib=50, big_gib=0)
    result = run(node, check=True, timeout_s=600)
    assert result["changed"] and not result["enough"] and not result.get("failed")
    assert [action.split()[0] for action in result["actions"]] == ["drop", "compact"]
    assert node.written == []
    assert "python3 (pid 4211) holds 3.4 GiB" in result["holders"]


# --- on a real kernel ---


@pytest.fixture
def shard() -> Iterator[Path]:
    path = Path(f"/var/tmp/gb10-ritual-test-{os.getpid()}.safetensors")
    with path.open("wb") as handle:
        handle.write(os.urandom(96 << 20))
        handle.flush()
        os.fsync(handle.fileno())
    yield path
    path.unlink()


def cached(path: Path) -> int:
    with path.open("rb") as handle:
        return _pagecache.cached_kib(handle.fileno()) or 0


def test_checkpoint_pages_go_first(run: Any, shard: Path) -> None:
    shard.read_bytes()
    if not cached(shard):
        pytest.skip("no cachestat(2) here (Linux < 6.5)")
    result = run(Node(free_gib=60), check=True, checkpoint_globs=[str(shard)])
    assert result["actions"] == ["evict 96 MiB of checkpoint pages"]
    assert cached(shard) == 96 * 1024
    run(Node(free_gib=60), checkpoint_globs=[str(shard)])
    assert cached(shard) == 0


def test_checkpoint_pages_stay_while_there_is_room(run: Any, shard: Path) -> None:
    shard.read_bytes()
    run(Node(free_gib=110), checkpoint_globs=[str(shard)])
    assert cached(shard) in (96 * 1024, 0)
    assert run(Node(free_gib=110), checkpoint_globs=[str(shard)])["actions"] == []


def test_files_count_once_whatever_link_leads_to_them(tmp_path: Path) -> None:
    blob = tmp_path / "blobs" / "hash"
    blob.parent.mkdir()
    with blob.open("wb") as handle:
        handle.truncate(1 << 20)
    (tmp_path / "a.safetensors").symlink_to(blob)
    with _pagecache.opened([str(tmp_path), str(tmp_path / "*.safetensors")], 512) as fds:
        assert len(fds) == 1
    with _pagecache.opened([str(tmp_path)], 2048) as fds:
        assert fds == []
