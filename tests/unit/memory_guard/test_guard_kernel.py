"""What the guard asks of the kernel, on a real one: cachestat(2), fadvise, leases, inotify on a scratch file."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SIZE_MIB = 32
RELEASE = tuple(int("".join(c for c in part if c.isdigit()) or 0) for part in platform.release().split(".")[:2])
needs_cachestat = pytest.mark.skipif(RELEASE < (6, 5), reason="cachestat(2) came with Linux 6.5")


@pytest.fixture
def scratch() -> Iterator[Path]:
    """On a disk: /tmp may be a tmpfs, whose pages cannot be evicted. Outside of the checkout, which others search through."""
    path = Path(f"/var/tmp/gb10-guard-test-{os.getpid()}.safetensors")
    with path.open("wb") as handle:
        handle.write(os.urandom(SIZE_MIB << 20))
        handle.flush()
        os.fsync(handle.fileno())
    yield path
    path.unlink()


@pytest.fixture
def shard(guard: ModuleType, scratch: Path) -> Iterator[Any]:
    fd = guard.open_quietly(str(scratch))
    signal.signal(signal.SIGIO, signal.SIG_IGN)
    yield guard.Shard((0, 0), fd, SIZE_MIB * 1024)
    os.close(fd)


@needs_cachestat
def test_cachestat_counts_and_fadvise_evicts(shard: Any, scratch: Path) -> None:
    shard.evict()
    assert shard.cached_kib() == 0
    scratch.read_bytes()
    assert shard.cached_kib() == SIZE_MIB * 1024
    assert shard.cached_kib(8 * 1024, 4 * 1024) == 4 * 1024
    shard.evict(8 * 1024, 8 * 1024)
    assert shard.cached_kib(8 * 1024, 8 * 1024) == 0
    assert shard.cached_kib() == (SIZE_MIB - 8) * 1024
    shard.evict()
    assert shard.cached_kib() == 0


@needs_cachestat
def test_mapped_pages_stay(shard: Any, scratch: Path) -> None:
    """Neither fadvise nor drop_caches evicts what is in a page table: the floor must exceed the largest shard."""
    with scratch.open("rb") as handle, mmap.mmap(handle.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert sum(mapped[i] for i in range(0, len(mapped), 4096)) >= 0
        shard.evict()
        assert shard.cached_kib() == SIZE_MIB * 1024
    shard.evict()
    assert shard.cached_kib() == 0


def test_without_cachestat_every_file_is_evicted(
    guard: ModuleType, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux before 6.5 answers ENOSYS: the guard cannot tell, so it tries all."""
    monkeypatch.setattr(guard, "SYS_CACHESTAT", 100000)
    checkpoint = guard.Checkpoint([str(scratch)], 16 * 1024)
    checkpoint.scan()
    scratch.read_bytes()
    assert guard.cached_kib(next(iter(checkpoint.shards.values())).fd) is None
    assert checkpoint.evict(0.0, held=False) == (1, 0)
    monkeypatch.undo()
    assert guard.cached_kib(next(iter(checkpoint.shards.values())).fd) in (0, None)


def test_held_by_another_process_or_a_mapping(guard: ModuleType, shard: Any, scratch: Path) -> None:
    assert shard.held() is False
    with scratch.open("rb") as handle:
        assert shard.held() is True
        other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=[handle.fileno()])
    assert shard.held() is True  # the other process has it now
    assert other.stdin is not None
    other.stdin.write(b"\n")
    other.stdin.close()
    other.wait(10)
    assert shard.held() is False


def test_a_mapping_without_a_descriptor_holds(guard: ModuleType, shard: Any, scratch: Path) -> None:
    """A loader maps a shard and closes it at once; Python's mmap would keep a descriptor, so this maps by hand."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    fd = os.open(scratch, os.O_RDONLY)
    address = libc.mmap(None, 4096, mmap.PROT_READ, mmap.MAP_PRIVATE, fd, 0)
    os.close(fd)
    assert shard.held() is True
    libc.munmap(address, 4096)
    assert shard.held() is False


def test_asking_who_holds_a_file_does_not_disturb_an_open(guard: ModuleType, shard: Any, scratch: Path) -> None:
    """The lease is given back at once: thousands of opens beside thousands of questions all succeed."""
    code = f"import sys\nfor _ in range(2000): open({str(scratch)!r}, 'rb').close()\nprint('done')"
    other = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    while other.poll() is None:
        for _ in range(100):
            assert shard.held() in (True, False)
    assert other.communicate()[0] == "done\n"
    assert other.returncode == 0


def test_opens_and_closes_are_told(guard: ModuleType, shard: Any, scratch: Path) -> None:
    opens = guard.Opens()
    opens.watch(shard.fd, "shard")
    assert opens.take() == []
    scratch.read_bytes()
    scratch.read_bytes()
    assert opens.take() == [("shard", True), ("shard", False), ("shard", True), ("shard", False)]
    os.close(opens.fd)


@needs_cachestat
def test_what_is_being_read_goes_last(guard: ModuleType, scratch: Path) -> None:
    checkpoint = guard.Checkpoint([str(scratch)], 16 * 1024)
    checkpoint.scan()
    with scratch.open("rb") as handle:
        handle.read()
        assert checkpoint.evict(0.0, held=False) == (0, 0)
        assert checkpoint.evict(0.0, held=True) == (1, SIZE_MIB * 1024)
    scratch.read_bytes()
    assert checkpoint.evict(0.0, held=True) == (0, 0)
    assert checkpoint.evict(0.0, held=False) == (1, SIZE_MIB * 1024)


@needs_cachestat
def test_mapped_shards_are_walked_once_until_they_are_closed(guard: ModuleType, scratch: Path) -> None:
    """One walk over 6 GiB of mapped pages took 0.2 to 0.5 s here; a loader that keeps all shards mapped may hold 100 GiB."""
    checkpoint = guard.Checkpoint([str(scratch)], 16 * 1024)
    checkpoint.scan()
    with scratch.open("rb") as handle, mmap.mmap(handle.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert sum(mapped[i] for i in range(0, len(mapped), 4096)) >= 0
        assert checkpoint.evict(0.0, held=True) == (1, SIZE_MIB * 1024)
        assert checkpoint.evict(1.0, held=True) == (0, 0)
        assert checkpoint.cached_kib(1.0) == 0
        assert checkpoint.evict(31.0, held=True)[0] == 1
    assert checkpoint.evict(32.0, held=False) == (1, SIZE_MIB * 1024)
    assert checkpoint.evict(33.0, held=False) == (0, 0)


# --- the files of a checkpoint ---


def big(path: Path, mib: int = 17) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as handle:
        handle.truncate(mib << 20)
    return path


def found(checkpoint: Any) -> int:
    checkpoint.scan()
    return len(checkpoint.shards)


def test_hub_layout_is_followed_and_counted_once(guard: ModuleType, tmp_path: Path) -> None:
    """models--x/snapshots/<revision>/*.safetensors are links to ../../blobs/<hash>."""
    root = tmp_path / "models--org--name"
    snapshot = root / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    for n in (1, 2):
        big(root / "blobs" / f"hash{n}")
        (snapshot / f"model-0000{n}-of-00002.safetensors").symlink_to(f"../../blobs/hash{n}")
    assert found(guard.Checkpoint([str(snapshot / "*.safetensors")], 16 * 1024)) == 2
    assert found(guard.Checkpoint([str(root)], 16 * 1024)) == 2  # as blob and as link: the same file
    assert found(guard.Checkpoint([str(snapshot), str(root)], 16 * 1024)) == 2


def test_files_that_appear_later_are_found(guard: ModuleType, tmp_path: Path) -> None:
    checkpoint = guard.Checkpoint([str(tmp_path / "m" / "*.safetensors")], 16 * 1024)
    assert found(checkpoint) == 0
    big(tmp_path / "m" / "a.safetensors")
    assert checkpoint.scan() == 1
    assert checkpoint.scan() == 0
    assert checkpoint.size_kib == 17 * 1024


def test_small_files_are_left_alone(guard: ModuleType, tmp_path: Path) -> None:
    big(tmp_path / "config.json", 1)
    assert found(guard.Checkpoint([str(tmp_path)], 16 * 1024)) == 0


def test_deleted_files_are_let_go_so_that_their_space_returns(guard: ModuleType, tmp_path: Path) -> None:
    path = big(tmp_path / "a.safetensors")
    checkpoint = guard.Checkpoint([str(tmp_path)], 16 * 1024)
    assert found(checkpoint) == 1
    path.unlink()
    assert checkpoint.scan() == 1
    assert not checkpoint.shards
    assert str(path) not in " ".join(str(link.resolve()) for link in Path("/proc/self/fd").iterdir())


def test_a_missing_folder_and_a_broken_link_are_no_error(guard: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").symlink_to("nowhere")
    checkpoint = guard.Checkpoint([str(tmp_path / "*"), str(tmp_path / "none" / "**")], 16 * 1024)
    assert found(checkpoint) == 0
    assert checkpoint.unreadable == 1


def test_a_pipe_in_the_folder_does_not_hang_the_guard(guard: ModuleType, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "p")
    assert found(guard.Checkpoint([str(tmp_path)], 0)) == 0
