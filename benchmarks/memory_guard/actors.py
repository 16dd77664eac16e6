"""The processes of one measurement: a loader, a GPU allocator's stand-in, an innocent bystander, the seed's guard.

Started by bench.py as ``python actors.py NAME …``; each talks over stdin/stdout (one line each way) and leaves one JSON file.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import resource
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any

MIB = 1 << 20
MADV_POPULATE_WRITE = 23
BLOCK = 8 * MIB
SELF_EVICT_STEP = 64 * MIB


def kib(field: str) -> int:
    """One field of /proc/meminfo in KiB."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1])
    raise KeyError(field)


def save(path: str, result: dict[str, Any]) -> None:
    Path(path).write_text(json.dumps(result))


def say(word: str) -> None:
    print(word, flush=True)


def first_to_die(score: int = 900) -> None:
    """Whatever goes wrong in a measurement, the kernel shall end the measurement first."""
    Path("/proc/self/oom_score_adj").write_text(str(score))


def load_by_read(path: str, view: memoryview, evict_behind: bool) -> int:
    done = 0
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    while (got := os.readv(fd, [view])) > 0:
        done += got
        if evict_behind and done % SELF_EVICT_STEP == 0:
            os.posix_fadvise(fd, done - SELF_EVICT_STEP, SELF_EVICT_STEP, os.POSIX_FADV_DONTNEED)
    os.close(fd)
    return done


def load_by_mmap(path: str, view: memoryview) -> tuple[int, mmap.mmap]:
    fd = os.open(path, os.O_RDONLY)
    mapped = mmap.mmap(fd, 0, prot=mmap.PROT_READ, flags=mmap.MAP_PRIVATE)
    os.close(fd)
    mapped.madvise(mmap.MADV_SEQUENTIAL)
    with memoryview(mapped) as source:
        for start in range(0, len(mapped), BLOCK):
            end = min(start + BLOCK, len(mapped))
            view[: end - start] = source[start:end]
    return len(mapped), mapped


def load(mode: str, files: list[str], kept: list[mmap.mmap]) -> int:
    view = memoryview(bytearray(BLOCK))
    total = 0
    for path in files:
        if mode in ("read", "self-evict", "second-pass"):
            total += load_by_read(path, view, mode == "self-evict")
            if mode == "second-pass":
                total += load_by_read(path, view, False)
        else:
            size, mapped = load_by_mmap(path, view)
            total += size
            if mode == "mmap-keep":
                kept.append(mapped)
            else:
                mapped.close()
    return total


def loader(args: argparse.Namespace) -> None:
    """Read every shard once: by read(2), by mmap and close, by mmap kept to the end, or evicting behind itself.

    ``second-pass`` reads every shard twice in a row, as a loader does that comes back for a drafter's tensors.
    ``two-ranks`` are two processes that read the same shards, the second one begins half a second later.
    """
    first_to_die()
    kept: list[mmap.mmap] = []
    begun = time.monotonic()
    total, other_cpu_s = 0, 0.0
    if args.mode == "two-ranks":
        child = os.fork()
        time.sleep(0.5 if child == 0 else 0)
        total = load("read", args.files, kept)
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        other_cpu_s = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
        total *= 2
    else:
        total = load(args.mode, args.files, kept)
    seconds = time.monotonic() - begun
    result: dict[str, Any] = {"bytes": total, "seconds": seconds, "cpu_s": time.process_time() + other_cpu_s}
    if kept:
        say("loaded")
        sys.stdin.readline()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
        total = 0
        for mapped in kept:
            for offset in range(0, len(mapped), MIB):
                total ^= mapped[offset]
        result["faults_of_mapped_shards"] = resource.getrusage(resource.RUSAGE_SELF).ru_majflt - before
    save(args.out, result)


class Allocator:
    """Stands for a GPU allocator on unified memory: a chunk is granted only when MemFree covers it, nothing is reclaimed for it."""

    def __init__(self, leave_kib: int) -> None:
        self.leave_kib = leave_kib
        self.held: list[mmap.mmap] = []
        self.stalled_s = 0.0
        self.refused = 0
        self.failed = False

    def take(self, size: int, patience_s: float) -> bool:
        begun = time.monotonic()
        while kib("MemFree") < size // 1024 + 65536:
            self.refused += 1
            time.sleep(0.02)
            if time.monotonic() - begun > patience_s:
                self.failed = True
                self.stalled_s += patience_s
                return False
        self.stalled_s += time.monotonic() - begun
        if kib("MemAvailable") < size // 1024 + self.leave_kib:
            return False  # the other users of this machine come first
        chunk = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        chunk.madvise(mmap.MADV_HUGEPAGE)
        chunk.madvise(MADV_POPULATE_WRITE)
        self.held.append(chunk)
        return True

    @property
    def held_mib(self) -> int:
        return sum(len(chunk) for chunk in self.held) // MIB


def ballast(args: argparse.Namespace) -> None:
    """Stands for the weights that are already there: on each line read, hold so much that --pool-mib stay available."""
    first_to_die(1000)
    held = Allocator(args.pool_mib * 1024)
    say("ready")
    while sys.stdin.readline().strip() == "adjust":
        while held.held and kib("MemAvailable") < args.pool_mib * 1024 - 64 * 1024:
            held.held.pop().close()
        while held.held_mib < 1 << 20 and held.take(128 * MIB, 6):
            pass
        say("adjusted")


def allocator(args: argparse.Namespace) -> None:
    """Take small chunks during the load, then a burst (profile run and KV cache)."""
    first_to_die(1000)
    alloc = Allocator(args.leave_mib * 1024)
    say("ready")
    begun = time.monotonic()
    while not Path(args.done).exists() and time.monotonic() - begun < 120:
        if alloc.held_mib < args.staging_mib:
            alloc.take(64 * MIB, 4)
        time.sleep(0.15)
    staged, stalled = alloc.held_mib, alloc.stalled_s
    profiled = sum(alloc.take(256 * MIB, 2) for _ in range(args.profile_mib // 256))
    say("profiled")
    sys.stdin.readline()
    save(
        args.out,
        {
            "failed": alloc.failed,
            "staged_mib": staged,
            "stalled_load_s": round(stalled, 2),
            "stalled_profile_s": round(alloc.stalled_s - stalled, 2),
            "profile_mib": profiled * 256,
            "profile_wanted_mib": args.profile_mib // 256 * 256,
            "refused": alloc.refused,
        },
    )


def bystander(args: argparse.Namespace) -> None:
    """A file wholly cached, its first half mapped and in use (a library); counts its major faults."""
    fd = os.open(args.files[0], os.O_RDONLY)
    size = os.fstat(fd).st_size
    offset = 0
    while chunk := os.pread(fd, MIB, offset):
        offset += len(chunk)
    mapped = mmap.mmap(fd, 0, prot=mmap.PROT_READ | mmap.PROT_EXEC, flags=mmap.MAP_PRIVATE)
    mapped.madvise(mmap.MADV_RANDOM)
    total = 0
    for offset in range(0, size // 2, 4096):
        total ^= mapped[offset]

    def faults() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_majflt

    before = faults()
    longest = 0.0
    say("ready")
    while not select.select([sys.stdin], [], [], 0.1)[0]:
        for _ in range(8):
            begun = time.monotonic()
            total ^= mapped[random.randrange(0, size // 2, 4096)]
            longest = max(longest, time.monotonic() - begun)
    for offset in range(0, size // 2, 65536):
        total ^= mapped[offset]
    live = faults() - before
    before = faults()
    for offset in range(size // 2, size, 65536):
        total ^= mapped[offset]
    save(
        args.out,
        {"faults_mapped": live, "faults_cached": faults() - before, "longest_touch_ms": round(longest * 1e3, 2)},
    )


def seed_guard(args: argparse.Namespace) -> None:
    """The seed's design ("Local AI Systems"): every second, MemFree under the floor -> drop caches and compact."""
    events: list[dict[str, Any]] = []
    ending: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: ending.append(number))
    say("ready")
    while not ending:
        before = kib("MemFree")
        if before < args.floor_mib * 1024:
            begun = time.monotonic()
            for name, value in (("drop_caches", "3"), ("compact_memory", "1")):
                Path("/proc/sys/vm", name).write_text(value)
            events.append(
                {"before_kib": before, "after_kib": kib("MemFree"), "seconds": round(time.monotonic() - begun, 3)}
            )
        time.sleep(1)
    save(args.out, {"events": events})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("actor", choices=["loader", "ballast", "allocator", "bystander", "seed-guard"])
    parser.add_argument("--out", default="")
    parser.add_argument("--mode", choices=["read", "mmap", "mmap-keep", "self-evict", "second-pass", "two-ranks"])
    parser.add_argument("--done")
    for name in ("pool", "leave", "staging", "profile", "floor"):
        parser.add_argument(f"--{name}-mib", type=int, default=0)
    parser.add_argument("files", nargs="*")
    args = parser.parse_intermixed_args()
    actors = {"loader": loader, "ballast": ballast, "allocator": allocator, "bystander": bystander}
    {**actors, "seed-guard": seed_guard}[args.actor](args)


if __name__ == "__main__":
    main()
