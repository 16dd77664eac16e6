#!/usr/bin/env python3
# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# ruff: noqa: PTH105, PTH108, PTH110, PTH112, PTH113, PTH116, PTH118, PTH120, PTH123, PTH207
"""Keep MemFree above a floor while a checkpoint streams through the page cache of a unified-memory host.

The GPU allocator of such a host is granted MemFree and nothing else, and the page cache of a load takes exactly that.
This program lives with one load. It watches MemFree and its rate of fall and acts before the floor, gentlest means first:

1. posix_fadvise(DONTNEED) on the checkpoint's own files, those that hold page cache (cachestat(2) tells);
2. drop_caches=1, when that did not bring MemFree over the floor, at least 1 s apart, less and less often while it is useless;
3. compact_memory, at least 5 s apart, only while free blocks of 2 MiB and more are short.

An action that frees little is not repeated at once: nothing evicts a page that some process has mapped, trying again only burns CPU
and slows the load. The program stops on a marker file (exit 0), on SIGTERM (0), at its deadline (3), or after it has stopped the
rank's container because available memory stayed under the hard floor (4). It leaves one JSON receipt, which it also keeps up to
date while it runs: a guard that was killed is carried on by the next one, and the receipt says so.

Standard library only, Python >= 3.10, one file. No pathlib: what is imported stays locked in memory during the load.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import glob
import json
import os
import select
import signal
import socket
import sys
import threading
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import Any

GIB = 1 << 20  # in KiB, the kernel's unit in /proc
PAGE_KIB = os.sysconf("SC_PAGE_SIZE") // 1024
SYS_CACHESTAT = 451  # the same number on x86-64 and arm64; Linux >= 6.5
MCL_CURRENT, MCL_FUTURE, M_ARENA_MAX = 1, 2, -8
EXIT_DEADLINE, EXIT_HARD_FLOOR = 3, 4
KEPT_EVENTS = 500
MARKER_WORDS = ("ready", "failed", "stopped")  # what the marker file may say; the receipt repeats it
BIG_BLOCK_KIB = 2048  # order 9 with 4 KiB pages: what the GPU driver asks the kernel for
# name: (default, help). On the command line with dashes (`--floor-mib 8192`), in the --config file (JSON) as they are.
OPTIONS: dict[str, tuple[Any, str]] = {
    "floor_mib": (8192, "MemFree is kept above this"),
    "order9_mib": (512, "free memory in blocks of 2 MiB and more that is to be there"),
    "files": ([], "pattern or folder of checkpoint files; repeatable"),
    "receipt": ("", "JSON file to leave behind"),
    "run": ("", "name of this run: a guard that is started again with it carries on"),
    "ready_marker": ("", "stop when this file appears"),
    "deadline_s": (2700.0, "stop with exit status 3 after this time (0: never)"),
    "trail": (False, "evict behind the reader, before the floor is near"),
    "trail_from_mib": (0, "once MemFree is under this (0: always, unless the checkpoint fits into free memory twice)"),
    "hard_floor_mib": (0, "stop the container when MemAvailable stays under this (0: never)"),
    "hard_floor_s": (3.0, "for that long"),
    "container": ("", "the container to stop at the hard floor"),
    "docker_socket": ("/var/run/docker.sock", "where its engine listens"),
    "lead_s": (0.3, "act when MemFree, falling as it does, would reach the floor within this time"),
    "min_sleep_s": (0.02, "shortest sleep between two looks"),
    "max_sleep_s": (0.5, "longest sleep between two looks"),
    "drop_every_s": (1.0, "least time between two drop_caches"),
    "drop_every_max_s": (30.0, "the same, after it was useless again and again"),
    "compact_every_s": (5.0, "least time between two compact_memory"),
    "compact_every_max_s": (60.0, "the same, after it was useless again and again"),
    "back_off_s": (0.25, "wait after an action that freed less than an eighth of the floor"),
    "back_off_max_s": (10.0, "the same, after it happened again and again"),
    "smallest_mib": (16, "leave files smaller than this alone"),
    "oom_score_adj": (-900, "how late the kernel is to pick this process when memory runs out"),
}


# --- What is read (pure) --------------------------------------------------------------------------------------------------


def parse_meminfo(text: bytes) -> tuple[int, int]:
    """(MemFree, MemAvailable) in KiB from the head of /proc/meminfo, whose first three lines are fixed since Linux 3.14."""
    words = text.split(maxsplit=9)
    if words[3:7:3] != [b"MemFree:", b"MemAvailable:"]:
        raise ValueError("unknown layout of /proc/meminfo")
    return int(words[4]), int(words[7])


def parse_buddyinfo(text: bytes, page_kib: int = PAGE_KIB) -> int:
    """KiB that are free in blocks of 2 MiB and more (order >= 9 with 4 KiB pages), over all zones."""
    first = max(0, (BIG_BLOCK_KIB // page_kib).bit_length() - 1)
    total = 0
    for line in text.splitlines():
        counts = line.split()[4:]
        total += sum(int(count) * (page_kib << order) for order, count in enumerate(counts) if order >= first)
    return total


def gib(kib: float) -> str:
    return f"{kib / GIB:.1f} GiB"


def amount(kib: float) -> str:
    """Short amounts in MiB, so that 0.0 GiB never hides one."""
    return gib(kib) if kib >= GIB // 2 else f"{kib / 1024:.0f} MiB"


# --- What is decided (pure) -----------------------------------------------------------------------------------------------


class FallRate:
    """KiB per second by which MemFree falls: a maximum that decays, so that one quiet moment does not hide a flood."""

    DECAY = 0.7
    LEAST_S = 0.01  # a grant of 64 MiB between two looks that follow each other at once is no flood

    def __init__(self) -> None:
        self.kib_s = 0.0
        self._last: tuple[float, int] | None = None

    def update(self, now: float, free: int) -> float:
        if self._last is None:
            self._last = (now, free)
        elif now - self._last[0] >= self.LEAST_S:
            fall = max(0.0, (self._last[1] - free) / (now - self._last[0]))
            self.kib_s = max(fall, self.kib_s * self.DECAY)
            self._last = (now, free)
        return self.kib_s

    def restart(self, now: float, free: int) -> None:
        """Measure from here: what an action freed is no rise of the load."""
        self._last = (now, free)


class BackOff:
    """A gate that opens later and later while what it lets through is useless."""

    def __init__(self, first_s: float, most_s: float, least_s: float = 0.0) -> None:
        self.first_s, self.most_s, self.least_s = first_s, most_s, least_s
        self.wait_s = least_s
        self._since = float("-inf")

    def open(self, now: float) -> bool:
        return now - self._since >= self.wait_s

    def passed(self, now: float, useful: bool) -> None:
        self._since = now
        self.wait_s = self.least_s if useful else min(self.most_s, max(self.first_s, self.wait_s * 2))

    def reset(self) -> None:
        self.wait_s = self.least_s


class Ladder:
    """Which step is due. The caller reads the clock and the memory, acts, and says what came of it."""

    REST_S = (0.1, 1.0)

    def __init__(self, options: Options) -> None:
        self.floor = options.floor_mib * 1024
        self.big = options.order9_mib * 1024
        self.lead_s = options.lead_s
        self.sleeps_s = (options.min_sleep_s, options.max_sleep_s)
        self.enough = self.floor // 8
        self.rate = FallRate()
        self.evict_gate = BackOff(options.back_off_s, options.back_off_max_s)
        self.blocks_gate = BackOff(options.drop_every_s, options.drop_every_max_s)
        self.drop_gate = BackOff(options.drop_every_s * 2, options.drop_every_max_s, options.drop_every_s)
        self.compact_gate = BackOff(options.compact_every_s * 2, options.compact_every_max_s, options.compact_every_s)
        self.ineffective = 0
        self._closed_at = float("-inf")

    def floor_is_near(self, free: int) -> bool:
        return free - self.rate.kib_s * self.lead_s < self.floor

    def wants_eviction(self, now: float, free: int) -> bool:
        return self.floor_is_near(free) and self.evict_gate.open(now)

    def evicted(self, now: float, before: int, after: int) -> None:
        """Back off longer and longer while the floor is missed; above it, a small yield asks for a rest only."""
        little = after - before < self.enough
        useless = little and after < self.floor
        self.ineffective += useless
        rest_s = min(self.REST_S[1], max(self.REST_S[0], self.evict_gate.wait_s * 2))
        self.evict_gate.passed(now, not useless)
        if little and not useless:
            self.evict_gate.wait_s = rest_s

    def something_closed(self, now: float) -> None:
        """A shard was closed: what was mapped can go now, so eviction is worth another try (not for each of many closes)."""
        if now - self._closed_at >= self.evict_gate.first_s:
            self._closed_at = now
            self.evict_gate.reset()

    def wants_drop(self, now: float, free: int) -> bool:
        return free < self.floor and self.drop_gate.open(now)

    def dropped(self, now: float, before: int, after: int) -> None:
        useful = after >= self.floor or after - before >= self.enough
        self.ineffective += not useful
        self.drop_gate.passed(now, useful)
        if useful:
            self.evict_gate.reset()

    def wants_blocks(self, now: float, big: int) -> bool:
        """Large blocks are short: what eviction frees often brings them back, and costs less than compaction."""
        return big < self.big and self.blocks_gate.open(now)

    def blocks_evicted(self, now: float, before: int, after: int) -> None:
        self.blocks_gate.passed(now, after >= self.big or after - before >= self.big // 8)

    def wants_compaction(self, now: float, big: int) -> bool:
        return big < self.big and self.compact_gate.open(now)

    def compacted(self, now: float, before: int, after: int) -> None:
        useful = after >= self.big or after - before >= self.big // 8
        self.ineffective += not useful
        self.compact_gate.passed(now, useful)

    def sleep_s(self, free: int) -> float:
        """A quarter of the time to the floor."""
        shortest, longest = self.sleeps_s
        if self.rate.kib_s <= 0:
            return longest
        return min(longest, max(shortest, (free - self.floor) / self.rate.kib_s / 4))


class HardFloor:
    """True once MemAvailable has been under the limit for the whole span: the last moment at which the host still answers."""

    def __init__(self, limit_kib: int, span_s: float) -> None:
        self.limit_kib, self.span_s = limit_kib, span_s
        self._since: float | None = None

    def reached(self, now: float, available: int) -> bool:
        if self.limit_kib <= 0 or available >= self.limit_kib:
            self._since = None
            return False
        if self._since is None:
            self._since = now
        return now - self._since >= self.span_s


class Trail:
    """What can go before the floor is near: pages of the checkpoint that were read once and are not read again.

    First the shards that were held and that nobody holds any more, the oldest first, once the loader has gone on to another one.
    Then the part of an open shard behind its reader, a step at a time. Whatever looks like a second reader or a second pass ends
    the trailing for good; the floor still stands. A shard is asked what the kernel knows of it: ``held``, ``cached_kib``.
    """

    STEP_KIB = 64 * 1024
    AHEAD_KIB = 32 * 1024  # the reader may be this far behind the last page that readahead brought
    ENOUGH_KIB = 64 * 1024  # less than this is a header, or noise

    def __init__(self) -> None:
        self.ended: str | None = None
        self.read_again_kib = 0
        self.holders: dict[Any, int] = {}
        self.closed: set[Any] = set()  # shards that everybody closed at some time
        self.read: list[Any] = []  # shards that were held and are no more, oldest first
        self.reading: dict[Any, int] = {}  # shard -> KiB that were let go at its head
        self.gone: set[Any] = set()  # shards that were let go
        self.mapped: set[Any] = set()  # shards of which a step did not go
        self.moved_on = False
        self.several_readers = False

    def opened(self, shard: Any) -> None:
        """Somebody opened this shard."""
        self.holders[shard] = self.holders.get(shard, 0) + 1
        if self.holders[shard] > 1:
            self.several_readers = True
        if shard in self.closed and shard not in self.gone and (shard.cached_kib() or 0) > self.ENOUGH_KIB:
            self.ended = self.ended or "a shard that was read is opened again"
        self.moved_on = self.moved_on or any(other is not shard for other in self.closed)
        self.reading.setdefault(shard, 0)

    def let_go_of(self, shard: Any) -> None:
        """Somebody closed it."""
        self.holders[shard] = max(0, self.holders.get(shard, 0) - 1)
        if not self.holders[shard] and (shard.cached_kib() or 0) > self.ENOUGH_KIB:
            self.closed.add(shard)

    def look(self, first: Iterable[Any] = ()) -> None:
        """Ask who holds what is being read (and ``first``: shards that may have been open before anybody watched)."""
        for shard in [*self.reading, *first]:
            held = shard.held()
            if held is None:
                self.ended = self.ended or "this file system does not tell who holds a file"
                return
            if held:
                self.reading.setdefault(shard, 0)
                self.check(shard)
            elif shard in self.reading:
                del self.reading[shard]
                self.holders[shard] = 0
                if (shard.cached_kib() or 0) > self.ENOUGH_KIB and shard not in self.gone:
                    self.closed.add(shard)
                    self.read.append(shard)

    def check(self, shard: Any) -> None:
        """Pages that are back where they were let go: somebody reads them again."""
        head = shard.size_kib if shard in self.gone else self.reading.get(shard, 0)
        back = (shard.cached_kib(0, head) or 0) if head else 0
        if back > self.ENOUGH_KIB:
            self.read_again_kib += back
            self.ended = "a shard is read again"

    def next_part(self) -> tuple[Any, int, int] | None:
        """(shard, offset, length in KiB) that can go now, the whole rest of a shard or a step behind its reader."""
        if self.ended or not self.moved_on:
            return None
        if self.read:
            shard = self.read.pop(0)
            self.gone.add(shard)
            return shard, 0, shard.size_kib
        for shard, behind in self.reading.items():
            if self.several_readers or shard in self.gone or shard in self.mapped:
                continue
            if not shard.cached_kib(behind + self.STEP_KIB + self.AHEAD_KIB, 64):
                continue  # the reader is not that far
            if (shard.cached_kib(behind, self.STEP_KIB) or 0) < self.STEP_KIB * 0.99:
                continue  # not read in order
            self.reading[shard] = behind + self.STEP_KIB
            return shard, behind, self.STEP_KIB
        return None

    def went(self, shard: Any, offset: int, length: int) -> None:
        """After the eviction: what a process has mapped stays, and is not tried again before it is closed."""
        if shard in self.reading and (shard.cached_kib(offset, length) or 0) > length // 2:
            self.reading[shard] = 0
            self.mapped.add(shard)


# --- The kernel -----------------------------------------------------------------------------------------------------------

libc = ctypes.CDLL(None, use_errno=True)
_range = (ctypes.c_uint64 * 2)()
_statistics = (ctypes.c_uint64 * 5)()


def cached_kib(fd: int, offset_kib: int = 0, length_kib: int = 0) -> int | None:
    """Page cache of an open file (of a range; length 0: to the end), None without cachestat(2)."""
    _range[0], _range[1] = offset_kib * 1024, length_kib * 1024
    if libc.syscall(SYS_CACHESTAT, fd, _range, _statistics, 0):
        return None
    return int(_statistics[0]) * PAGE_KIB


def held_elsewhere(fd: int) -> bool | None:
    """Whether anybody else has this file open or mapped; None where the file system cannot tell.

    A write lease is granted only to the sole holder. It is given back at once: an open in between waits for microseconds.
    """
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except BlockingIOError:
        return True
    except OSError:
        return None
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return False


class Opens:
    """Opens and closes of files, as they happen (inotify). A hint: the kernel merges equal events that follow each other."""

    OPEN, CLOSE = 0x20, 0x08 | 0x10

    def __init__(self) -> None:
        self.fd: int = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        self._keys: dict[int, Any] = {}

    def watch(self, fd: int, key: Any) -> None:
        watch = libc.inotify_add_watch(self.fd, f"/proc/self/fd/{fd}".encode(), self.OPEN | self.CLOSE)
        if watch >= 0:
            self._keys[watch] = key

    def take(self) -> list[tuple[Any, bool]]:
        """(key, whether it was an open), oldest first."""
        try:
            data = os.read(self.fd, 65536)
        except OSError:
            return []
        events = []
        at = 0
        while at + 16 <= len(data):
            watch = int.from_bytes(data[at : at + 4], sys.byteorder, signed=True)
            mask = int.from_bytes(data[at + 4 : at + 8], sys.byteorder)
            at += 16 + int.from_bytes(data[at + 12 : at + 16], sys.byteorder)
            if watch in self._keys and mask & (self.OPEN | self.CLOSE):
                events.append((self._keys[watch], bool(mask & self.OPEN)))
        return events


def write_to(path: str, value: str) -> bool:
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        os.write(fd, value.encode())
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def read_text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as handle:
            return handle.read().strip()
    except OSError:
        return ""


def own_status() -> dict[str, int]:
    """VmRSS, VmHWM and VmLck of this process in KiB."""
    rows = (line.split() for line in read_text("/proc/self/status").splitlines())
    return {row[0][:-1]: int(row[1]) for row in rows if row and row[0] in ("VmRSS:", "VmHWM:", "VmLck:")}


class Memory:
    """/proc/meminfo and /proc/buddyinfo, kept open."""

    def __init__(self, proc: str = "/proc") -> None:
        self._meminfo = os.open(f"{proc}/meminfo", os.O_RDONLY | os.O_CLOEXEC)
        self._buddyinfo = os.open(f"{proc}/buddyinfo", os.O_RDONLY | os.O_CLOEXEC)

    def read(self) -> tuple[int, int]:
        return parse_meminfo(os.pread(self._meminfo, 192, 0))

    def big(self) -> int:
        return parse_buddyinfo(os.pread(self._buddyinfo, 65536, 0))


def notify(message: str) -> None:
    """Tell systemd (sd_notify); without it, nobody."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        try:
            sock.settimeout(0.2)
            sock.sendto(message.encode(), "\0" + address[1:] if address[0] == "@" else address)
        except OSError:
            pass


def stop_container(name: str, docker_socket: str, grace_s: int = 2, timeout_s: float = 20.0) -> str:
    """Stop a container through the engine's socket (a docker command would need memory first). Returns what the engine said."""
    request = f"POST /containers/{name}/stop?t={grace_s} HTTP/1.0\r\nHost: docker\r\nContent-Length: 0\r\n\r\n"
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as sock:
            sock.settimeout(timeout_s)
            sock.connect(docker_socket)
            sock.sendall(request.encode())
            answer = sock.recv(4096).decode("utf-8", "replace").splitlines()
    except OSError as error:
        return f"not stopped: {docker_socket}: {error}"
    status = answer[0].split()[1] if answer and len(answer[0].split()) > 1 else "no answer"
    return {"204": "stopped", "304": "was not running", "404": "no such container"}.get(status, f"HTTP {status}")


# --- The checkpoint -------------------------------------------------------------------------------------------------------


class Shard:
    """One file of the checkpoint, kept open. ``key`` is the same whatever name or link it was found by."""

    def __init__(self, key: tuple[int, int], fd: int, size_kib: int) -> None:
        self.key, self.fd, self.size_kib = key, fd, size_kib

    def cached_kib(self, offset_kib: int = 0, length_kib: int = 0) -> int | None:
        return cached_kib(self.fd, offset_kib, length_kib)

    def held(self) -> bool | None:
        return held_elsewhere(self.fd)

    def evict(self, offset_kib: int = 0, length_kib: int = 0) -> None:
        os.posix_fadvise(self.fd, offset_kib * 1024, length_kib * 1024, os.POSIX_FADV_DONTNEED)

    @property
    def deleted(self) -> bool:
        return os.fstat(self.fd).st_nlink == 0


def open_quietly(path: str) -> int:
    """Read-only and without touching the access time, where that is allowed."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        return os.open(path, flags | os.O_NOATIME)
    except PermissionError:
        return os.open(path, flags)


class Checkpoint:
    """The files that match the patterns: links are followed (hub layout), each file counts once, later ones are found as well."""

    STUCK_S = 30.0

    def __init__(self, patterns: Sequence[str], smallest_kib: int) -> None:
        self.patterns, self.smallest_kib = list(patterns), smallest_kib
        self.shards: dict[tuple[int, int], Shard] = {}
        self.stuck: dict[Shard, float] = {}
        self.unreadable = 0

    def names(self) -> Iterable[str]:
        """A pattern that matches a folder stands for all files below it."""
        for pattern in self.patterns:
            for name in glob.iglob(pattern, recursive=True):
                if os.path.isdir(name):
                    for folder, _, files in os.walk(name):
                        yield from (os.path.join(folder, file) for file in files)
                else:
                    yield name

    def scan(self) -> int:
        """Find what is new, let go of what was deleted (an open file keeps its disk space). Returns the number of changes."""
        gone = [key for key, shard in self.shards.items() if shard.deleted]
        for key in gone:
            shard = self.shards.pop(key)
            self.stuck.pop(shard, None)
            os.close(shard.fd)
        found = 0
        self.unreadable = 0
        for name in self.names():
            try:
                status = os.stat(name)
                key = (status.st_dev, status.st_ino)
                if key in self.shards or status.st_size < self.smallest_kib * 1024 or not os.path.isfile(name):
                    continue
                self.shards[key] = Shard(key, open_quietly(name), status.st_size // 1024)
                found += 1
            except OSError:
                self.unreadable += os.path.lexists(name)
        return found + len(gone)

    @property
    def size_kib(self) -> int:
        return sum(shard.size_kib for shard in self.shards.values())

    def is_stuck(self, shard: Shard, now: float) -> bool:
        """Its pages did not go, some process has them mapped: not before it is closed, or after a while."""
        if shard in self.stuck and (now - self.stuck[shard] > self.STUCK_S or not shard.held()):
            del self.stuck[shard]
        return shard in self.stuck

    def cached_kib(self, now: float) -> int:
        """Page cache that can go, as far as known; 0 without cachestat."""
        return sum(shard.cached_kib() or 0 for shard in self.shards.values() if not self.is_stuck(shard, now))

    def evict(self, now: float, held: bool) -> tuple[int, int]:
        """Evict the files that somebody holds, or those that nobody does (all, where the file system cannot tell).

        Returns (files, KiB of page cache that they had; 0 without cachestat).
        """
        files = had = 0
        for shard in self.shards.values():
            if self.is_stuck(shard, now) or bool(shard.held()) != held:
                continue
            cached = shard.cached_kib()
            if cached is None or cached > 4096:
                shard.evict()
                files += 1
                had += cached or 0
                # To walk gigabytes of mapped pages takes a second and more: once is enough.
                if cached and held and (shard.cached_kib() or 0) > cached * 7 // 8:
                    self.stuck[shard] = now
        return files, had


# --- Receipt --------------------------------------------------------------------------------------------------------------


def utc(seconds: float | None = None) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def write_json(path: str, data: dict[str, Any]) -> None:
    """Atomically, and on the disk when it returns."""
    partial = f"{path}.{os.getpid()}.partial"
    try:
        with open(partial, "w", encoding="utf-8") as handle:
            json.dump(data, handle)
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(partial, path)
        folder = os.open(os.path.dirname(path) or ".", os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        say(f"the receipt {path} could not be written: {error}")
        with contextlib.suppress(OSError):
            os.unlink(partial)


class Receipt:
    """What happened, from the first start of a run to its end, whoever was killed in between."""

    def __init__(self, path: str, run: str, settings: dict[str, Any]) -> None:
        self.path = path
        self.began = time.monotonic()
        self._writing = threading.Lock()
        self._final = False
        self.data: dict[str, Any] = {
            "kind": "memory_guard",
            "version": 1,
            "run": run,
            "state": "running",
            "stopped_by": None,
            "exit_code": None,
            "pid": os.getpid(),
            "boot_id": read_text("/proc/sys/kernel/random/boot_id"),
            "started_at": utc(),
            "updated_at": utc(),
            "seconds": 0.0,
            "min_free_kib": None,
            "min_free_at_s": 0.0,
            "min_available_kib": None,
            "min_order9_kib": None,
            "below_floor_s": 0.0,
            "polls": 0,
            "ineffective_actions": 0,
            "totals": {},
            "events": [],
            "events_left_out": 0,
            "interruptions": [],
            "cpu_s": 0.0,
        }
        self.earlier_s = self.earlier_cpu_s = 0.0
        self._resume()
        self.data["settings"] = settings

    def _resume(self) -> None:
        """Carry on the receipt of a guard of the same run that did not live to end it."""
        try:
            with open(self.path, encoding="utf-8") as handle:
                earlier = json.load(handle)
        except (OSError, ValueError):
            return
        same = all(earlier.get(key) == self.data[key] for key in ("kind", "version", "run", "boot_id"))
        if not same or not self.data["run"] or earlier.get("state") != "running":
            return
        pid = self.data["pid"]
        self.data = {**self.data, **earlier, "pid": pid}
        # Wall time: the only clock that the two guards share with their file.
        silent = max(0.0, time.time() - os.stat(self.path).st_mtime)
        self.earlier_s = earlier["seconds"] + silent
        self.earlier_cpu_s = earlier["cpu_s"]
        self.data["interruptions"].append(
            {
                "pid": earlier["pid"],
                "at_s": round(earlier["seconds"], 1),
                "unseen_s": round(silent, 1),
                "seen_at": utc(),
            }
        )

    def write(self, data: dict[str, Any], final: bool = False) -> None:
        """From the loop's helper or from the end; nothing comes after what is final."""
        with self._writing:
            if not self._final:
                self._final = final
                write_json(self.path, data)

    @property
    def seconds(self) -> float:
        return self.earlier_s + time.monotonic() - self.began

    def lowest(self, free: int, available: int) -> None:
        if self.data["min_free_kib"] is None or free < self.data["min_free_kib"]:
            self.data["min_free_kib"], self.data["min_free_at_s"] = free, round(self.seconds, 2)
        if self.data["min_available_kib"] is None or available < self.data["min_available_kib"]:
            self.data["min_available_kib"] = available

    def action(self, name: str, before: int, after: int, took_s: float, **details: Any) -> None:
        total = self.data["totals"].setdefault(name, {"count": 0, "gained_kib": 0, "seconds": 0.0, "longest_s": 0.0})
        total["count"] += 1
        total["gained_kib"] += max(0, after - before)
        total["seconds"] = round(total["seconds"] + took_s, 4)
        total["longest_s"] = round(max(total["longest_s"], took_s), 4)
        events, at_s = self.data["events"], round(self.seconds - took_s, 2)
        if name == "trail" and events and events[-1]["action"] == name and at_s - events[-1]["at_s"] < 1:
            events[-1]["after_kib"] = after  # many small steps: one event a second
            events[-1]["seconds"] = round(events[-1]["seconds"] + took_s, 4)
            for key, value in details.items():
                events[-1][key] += value
        elif len(events) < KEPT_EVENTS:
            event = {
                "at_s": at_s,
                "action": name,
                "before_kib": before,
                "after_kib": after,
                "seconds": round(took_s, 4),
            }
            events.append({**event, **details})
        else:
            self.data["events_left_out"] += 1

    def snapshot(self, **fields: Any) -> dict[str, Any]:
        self.data.update(fields)
        times = os.times()
        self.data.update(
            updated_at=utc(),
            seconds=round(self.seconds, 2),
            below_floor_s=round(self.data["below_floor_s"], 3),
            cpu_s=round(self.earlier_cpu_s + times.user + times.system, 3),
            memory=own_status(),
        )
        return {**self.data, "events": list(self.data["events"]), "totals": dict(self.data["totals"])}


# --- Saying -------------------------------------------------------------------------------------------------------------


def say(text: str, level: int = 6) -> None:
    """One line for the journal. Never waits: a journal that hangs must not hold the guard."""
    prefix = f"<{level}>" if os.environ.get("JOURNAL_STREAM") else ""
    with contextlib.suppress(OSError):
        os.write(1, f"{prefix}{text}\n".encode())


class Voice:
    """Actions as lines, at most one a second: what happens more often is summed up."""

    def __init__(self, every_s: float = 1.0) -> None:
        self.every_s = every_s
        self._last = float("-inf")
        self._count = 0
        self._gained = 0

    def action(self, now: float, text: str, gained: int) -> None:
        if now - self._last < self.every_s:
            self._count += 1
            self._gained += max(0, gained)
            return
        self.rest()
        self._last = now
        say(text)

    def rest(self) -> None:
        if self._count:
            say(f"and {self._count} more like this, {amount(self._gained)}")
        self._count = self._gained = 0


# --- The guard ------------------------------------------------------------------------------------------------------------


class Worker(threading.Thread):
    """Runs one slow thing at a time beside the loop: a drop_caches has blocked for 4.2 s, and MemFree falls meanwhile."""

    def __init__(self) -> None:
        super().__init__(name="slow", daemon=True)
        self._work = threading.Semaphore(0)
        self._job: tuple[str, Callable[[], Any]] | None = None
        self._done: tuple[str, float, Any] | None = None
        self.name_of_job: str | None = None

    @property
    def busy(self) -> bool:
        return self.name_of_job is not None

    def begin(self, name: str, call: Callable[[], Any]) -> bool:
        if self.busy:
            return False
        self.name_of_job, self._job = name, (name, call)
        self._work.release()
        return True

    def run(self) -> None:
        while True:
            self._work.acquire()
            assert self._job is not None
            name, call = self._job
            began = time.monotonic()
            value = call()
            self._done = (name, time.monotonic() - began, value)

    def take(self) -> tuple[str, float, Any] | None:
        """The finished job as (name, seconds, value), once."""
        done = self._done
        if done is not None:
            self._done, self.name_of_job = None, None
        return done


class Guard:
    TRAIL_EVERY_S = 0.04

    def __init__(self, options: Options) -> None:
        self.options = options
        self.ladder = Ladder(options)
        self.hard_floor = HardFloor(options.hard_floor_mib * 1024, options.hard_floor_s)
        self.trail = Trail() if options.trail else None
        self.trail_from = options.trail_from_mib * 1024 or sys.maxsize
        self.opens = Opens()
        self.watched: set[Shard] = set()
        self.unseen: list[Shard] = []
        self.memory = Memory()
        self.free_at_start = self.memory.read()[0]
        self.fits = True
        self.checkpoint = Checkpoint(options.files, options.smallest_mib * 1024)
        self.voice = Voice()
        self.worker = Worker()
        self.receipt = Receipt(options.receipt, options.run, self.settings())
        self.before_slow = 0
        self._wake, wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        self.signals: list[int] = []
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda got, _frame: self.signals.append(got))
        signal.signal(
            signal.SIGIO, signal.SIG_IGN
        )  # the kernel's word that somebody opened a file during held_elsewhere()

    def settings(self) -> dict[str, Any]:
        return {name: getattr(self.options, name) for name in OPTIONS}

    # What this node allows. Whatever is refused is said, and the rest still works.
    def prepare(self) -> dict[str, Any]:
        libc.mallopt(M_ARENA_MAX, 1)  # a second arena would be locked as well
        libc.malloc_trim(0)  # and what compiling this file took
        threading.stack_size(256 * 1024)
        self.worker.start()
        write_to("/proc/self/oom_score_adj", str(self.options.oom_score_adj))
        locked = libc.mlockall(MCL_CURRENT | MCL_FUTURE) == 0
        if not locked:  # and do not let later mappings fail against the limit
            libc.munlockall()
        os.set_blocking(1, False)
        self.scan()
        allowed = abilities()
        allowed["memory_locked"] = locked
        return allowed

    def run(self) -> tuple[str, int]:
        allowed = self.prepare()
        missing = shortcomings(allowed)
        receipt = self.receipt
        receipt.snapshot(abilities=allowed, shortcomings=missing, checkpoint=self.checkpoint_facts())
        for line in missing:
            say(line, 4)
        for cut in receipt.data["interruptions"][-1:]:
            unseen = f"nobody watched for up to {cut['unseen_s']:.0f} s"
            say(f"a guard of this run (pid {cut['pid']}) ended without a word; {unseen}", 4)
        receipt.write(receipt.snapshot())
        notify(f"READY=1\nSTATUS=floor {gib(self.ladder.floor)}, {len(self.checkpoint.shards)} files")
        say(
            f"floor {gib(self.ladder.floor)}, {len(self.checkpoint.shards)} checkpoint files of {gib(self.checkpoint.size_kib)}, "
            f"{'trailing, ' if self.trails() else ''}deadline {self.options.deadline_s:.0f} s"
        )
        return self.loop()

    def scan(self) -> None:
        """Look for files that came or went."""
        if self.checkpoint.scan():
            new = [shard for shard in self.checkpoint.shards.values() if shard not in self.watched]
            for shard in new:
                self.opens.watch(shard.fd, shard)
            self.watched.update(new)
            self.unseen += new
            # As pages and as weights: then nothing has to go, and the pages may serve the next start.
            fits = self.checkpoint.size_kib * 2 + self.ladder.floor < self.free_at_start
            self.fits = fits and not self.options.trail_from_mib
            self.receipt.data["checkpoint"] = self.checkpoint_facts()

    def trails(self) -> bool:
        return self.trail is not None and not self.trail.ended and not self.fits

    def checkpoint_facts(self) -> dict[str, Any]:
        found = self.checkpoint
        return {"files": len(found.shards), "size_kib": found.size_kib, "unreadable": found.unreadable}

    def loop(self) -> tuple[str, int]:
        receipt, ladder = self.receipt, self.ladder
        watchdog_s = float(os.environ.get("WATCHDOG_USEC", 0)) / 2e6
        due = {"big": 0.0, "scan": 5.0, "trail": 0.0, "watchdog": 0.0, "status": 2.0, "save": 10.0}
        began = last = time.monotonic()
        free, _ = self.memory.read()
        while True:
            now = time.monotonic()
            was_free = free
            free, available = self.memory.read()
            receipt.data["polls"] += 1
            receipt.lowest(free, available)
            if was_free < ladder.floor:
                receipt.data["below_floor_s"] += now - last
            last = now
            ladder.rate.update(now, free)
            self.collect(now, free)
            ending = self.ending(now, available)
            if ending:
                return ending
            at = now - began
            if ladder.wants_eviction(now, free):
                free = self.evict(free)
            if at >= due["trail"] and self.trails():
                due["trail"] = at + self.TRAIL_EVERY_S
                free = self.follow(free)
            if at >= due["big"]:
                due["big"] = at + 0.5
                free = self.check_blocks(now, free)
            if at >= due["scan"]:
                due["scan"] = at + (5 if self.checkpoint.shards else 1)
                self.scan()
            if watchdog_s and at >= due["watchdog"]:
                due["watchdog"] = at + watchdog_s / 2
                notify("WATCHDOG=1")
            if at >= due["status"]:
                due["status"] = at + 2
                notify(self.status(free))
            if at >= due["save"] and not self.worker.busy:
                due["save"] = at + 10
                self.save("receipt")
            if self.wait(free):
                due["trail"] = 0.0
                self.hear(time.monotonic())

    def wait(self, free: int) -> bool:
        """Sleep. A signal ends it, and an open or a close of a shard: then True."""
        sleep_s = self.ladder.sleep_s(free)
        if self.trails() and self.trail and self.trail.reading:
            sleep_s = min(sleep_s, self.TRAIL_EVERY_S)
        return self.opens.fd in select.select([self._wake, self.opens.fd], [], [], sleep_s)[0]

    def status(self, free: int) -> str:
        lowest = self.receipt.data["min_free_kib"] or free
        return f"STATUS=free {gib(free)}, lowest {gib(lowest)}, floor {gib(self.ladder.floor)}"

    def ending(self, now: float, available: int) -> tuple[str, int] | None:
        """(why, exit status) when it is over."""
        options = self.options
        if options.ready_marker and os.path.exists(options.ready_marker):
            said = read_text(options.ready_marker)
            return (said if said in MARKER_WORDS else MARKER_WORDS[0]), 0
        if self.signals:
            return "signal", 0
        if options.deadline_s and self.receipt.seconds > options.deadline_s:
            return "deadline", EXIT_DEADLINE
        if self.hard_floor.reached(now, available):
            return "hard_floor", EXIT_HARD_FLOOR
        return None

    def save(self, name: str) -> None:
        self.receipt.data["ineffective_actions"] = self.ladder.ineffective
        data = self.receipt.snapshot()
        self.worker.begin(name, lambda: self.receipt.write(data))

    # --- actions ---
    def evict(self, free: int) -> int:
        began = time.monotonic()
        fall = self.ladder.rate.kib_s
        files, held = self.checkpoint.evict(began, held=False)
        after, available = self.memory.read()
        if after < self.ladder.floor + self.ladder.enough:  # what is being read goes last
            more = self.checkpoint.evict(began, held=True)
            files, held = files + more[0], held + more[1]
            after, available = self.memory.read()
        ended = time.monotonic()
        self.ladder.evicted(ended, free, after)
        self.ladder.rate.restart(ended, after)
        self.receipt.lowest(after, available)
        self.receipt.action("evict", free, after, ended - began, files=files, cached_kib=held)
        self.voice.action(
            ended,
            f"free {gib(free)}, falling {gib(fall)}/s: dropped {amount(max(0, after - free))} of {amount(held)} checkpoint pages "
            f"in {ended - began:.2f} s",
            after - free,
        )
        if self.ladder.wants_drop(ended, after) and self.worker.begin(
            "drop_caches", lambda: write_to("/proc/sys/vm/drop_caches", "1")
        ):
            self.before_slow = after
        return after

    def hear(self, now: float) -> None:
        """Take note of who opened and closed shards."""
        for shard, opened in self.opens.take():
            if self.trails() and self.trail:
                (self.trail.opened if opened else self.trail.let_go_of)(shard)
            if not opened:
                self.ladder.something_closed(now)

    def follow(self, free: int) -> int:
        """Evict what was read and closed, and what lies behind the reader."""
        assert self.trail is not None
        trail, now = self.trail, time.monotonic()
        trail.look(self.unseen)
        self.unseen = []
        let_go = parts = 0
        before = free
        while free < self.trail_from and (part := trail.next_part()):
            shard, offset, length = part
            let_go += shard.cached_kib(offset, length) or 0
            shard.evict(offset, length)
            trail.went(shard, offset, length)
            parts += 1
            free, _ = self.memory.read()
        ended = time.monotonic()
        if parts:
            self.ladder.rate.restart(ended, free)
            self.receipt.action("trail", before, free, ended - now, parts=parts, cached_kib=let_go)
            text = f"free {gib(before)}: let go of {amount(let_go)} of checkpoint pages behind the reader"
            self.voice.action(ended, text, free - before)
        if trail.ended:
            say(f"trailing ends: {trail.ended}")
            self.receipt.data["trail"] = {"ended": trail.ended, "read_again_kib": trail.read_again_kib}
        return free

    def check_blocks(self, now: float, free: int) -> int:
        """The second sensor: blocks of 2 MiB and more."""
        big = self.memory.big()
        if self.receipt.data["min_order9_kib"] is None or big < self.receipt.data["min_order9_kib"]:
            self.receipt.data["min_order9_kib"] = big
        if self.ladder.wants_blocks(now, big):
            before = big
            if self.checkpoint.cached_kib(now) > self.ladder.enough:
                free = self.evict(free)
                big = self.memory.big()
            self.ladder.blocks_evicted(now, before, big)
        if self.ladder.wants_compaction(now, big) and self.worker.begin(
            "compact_memory", lambda: write_to("/proc/sys/vm/compact_memory", "1")
        ):
            self.before_slow = big
        return free

    def collect(self, now: float, free: int) -> None:
        """Take note of a slow action that has ended."""
        done = self.worker.take()
        if done is None or done[0] == "receipt":
            return
        name, took_s, written = done
        if name == "drop_caches":
            after = free
            self.ladder.dropped(now, self.before_slow, after)
            what = f"free {gib(self.before_slow)}: dropped caches, free {gib(after)} after {took_s:.2f} s"
        else:
            after = self.memory.big()
            self.ladder.compacted(now, self.before_slow, after)
            what = f"{amount(self.before_slow)} in blocks of 2 MiB and more: compacted, {amount(after)} after {took_s:.2f} s"
        self.receipt.action(name, self.before_slow, after, took_s, written=written)
        self.voice.action(now, what if written else f"{name} could not be written", after - self.before_slow)

    # --- end ---
    def finish(self, why: str, code: int) -> None:
        self.voice.rest()
        notify(f"STOPPING=1\nSTATUS=stopped: {why}")
        receipt = self.receipt
        receipt.data["ineffective_actions"] = self.ladder.ineffective
        if why == "hard_floor":
            self.stop_rank()
        receipt.write(receipt.snapshot(state="ended", stopped_by=why, exit_code=code, ended_at=utc()), final=True)
        say(summary(receipt.data), 4 if code else 6)

    def stop_rank(self) -> None:
        """The receipt first: the host may not live to write it afterwards."""
        options, data = self.options, self.receipt.data
        data["hard_floor"] = {
            "container": options.container,
            "available_kib": self.memory.read()[1],
            "result": "pending",
        }
        self.receipt.write(self.receipt.snapshot(stopped_by="hard_floor"))
        say(
            f"available memory stayed under {amount(self.hard_floor.limit_kib)} for {options.hard_floor_s:g} s: "
            f"stopping the container {options.container or '(none named)'} before the host wedges",
            2,
        )
        data["hard_floor"]["result"] = (
            stop_container(options.container, options.docker_socket) if options.container else "no container named"
        )


def abilities() -> dict[str, Any]:
    """What this process may do here."""
    fd = os.open("/proc/self/exe", os.O_RDONLY | os.O_CLOEXEC)
    try:
        cachestat = cached_kib(fd) is not None
    finally:
        os.close(fd)
    return {
        "drop_caches": os.access("/proc/sys/vm/drop_caches", os.W_OK),
        "compact_memory": os.access("/proc/sys/vm/compact_memory", os.W_OK),
        "cachestat": cachestat,
        "oom_score_adj": int(read_text("/proc/self/oom_score_adj") or 0),
    }


def shortcomings(allowed: dict[str, Any]) -> list[str]:
    """What does not work here, and what still does. Plain sentences."""
    lines = []
    if not allowed["drop_caches"]:
        lines.append(
            "may not write drop_caches: only checkpoint pages are evicted, the step that does nearly all the work"
        )
    if not allowed["compact_memory"]:
        lines.append("may not write compact_memory: fragmented free memory is reported, not repaired")
    if not allowed["cachestat"]:
        lines.append(
            "no cachestat(2) (Linux < 6.5): every checkpoint file is evicted each time, also those that hold no pages"
        )
    if not allowed["memory_locked"]:
        lines.append(
            "may not lock its memory (RLIMIT_MEMLOCK, CAP_IPC_LOCK): it works, and may be slow when memory is short"
        )
    if allowed["oom_score_adj"] > -500:
        lines.append(
            "may not lower its oom_score_adj (CAP_SYS_RESOURCE): an out-of-memory kill may pick it before the engine"
        )
    return lines


def summary(data: dict[str, Any]) -> str:
    """One line on the whole run, from its receipt."""
    totals = data["totals"]
    evicted = sum(totals.get(name, {}).get("gained_kib", 0) for name in ("evict", "trail"))
    parts = [
        f"stopped by {data['stopped_by']} after {data['seconds']:.0f} s",
        f"lowest free {gib(data['min_free_kib'] or 0)} (floor {gib(data['settings']['floor_mib'] * 1024)})",
        f"{data['below_floor_s']:.1f} s under the floor",
        f"{amount(evicted)} of checkpoint pages dropped",
        f"{totals.get('drop_caches', {}).get('count', 0)} drop_caches",
        f"{totals.get('compact_memory', {}).get('count', 0)} compact_memory",
    ]
    if data["ineffective_actions"]:
        parts.append(f"{data['ineffective_actions']} actions freed little")
    if data["interruptions"]:
        parts.append(f"the guard was killed {len(data['interruptions'])} times")
    return ", ".join(parts)


class UsageError(ValueError):
    """An option that cannot be used."""


class Options:
    """The values of OPTIONS as attributes."""

    def __init__(self, **values: Any) -> None:
        for name, (default, _) in OPTIONS.items():
            setattr(self, name, list(default) if isinstance(default, list) else default)
        for name, value in values.items():
            if name not in OPTIONS:
                raise UsageError(f"unknown option {name}")
            setattr(self, name, self.fit(name, value))

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    @staticmethod
    def fit(name: str, value: Any) -> Any:
        default = OPTIONS[name][0]
        if isinstance(default, (bool, list, str)):
            fits = isinstance(value, type(default))
            fits = fits and (not isinstance(value, list) or all(isinstance(item, str) for item in value))
        else:
            fits = isinstance(value, (int, float)) and not isinstance(value, bool) and value >= min(0, default)
        if not fits:
            raise UsageError(f"{name} is {value!r}, wanted something like {default!r}")
        return type(default)(value)

    @classmethod
    def parse(cls, words: Sequence[str]) -> Options:
        """``--name value``, ``--flag``, ``--config FILE`` (the command line wins). Small, since argparse would stay in memory."""
        given: dict[str, Any] = {}
        config: dict[str, Any] = {}
        rest = list(words)
        while rest:
            word = rest.pop(0)
            name = word[2:].replace("-", "_")
            if name == "config" and rest:
                with open(rest.pop(0), encoding="utf-8") as handle:
                    config = json.load(handle)
                continue
            if not word.startswith("--") or name not in OPTIONS:
                raise UsageError(f"unknown option {word}")
            default = OPTIONS[name][0]
            if isinstance(default, bool):
                given[name] = True
            elif not rest:
                raise UsageError(f"{word} needs a value")
            elif isinstance(default, list):
                given.setdefault(name, []).append(rest.pop(0))
            else:
                try:
                    given[name] = type(default)(rest.pop(0))
                except ValueError as error:
                    raise UsageError(f"{word}: {error}") from None
        return cls(**{**config, **given})


def usage() -> str:
    lines = [
        (__doc__ or "").strip(),
        "",
        "--config FILE  JSON with the options below",
        "--check  say what this node allows",
    ]
    lines += [f"--{name.replace('_', '-')}  {text} ({default!r})" for name, (default, text) in OPTIONS.items()]
    return "\n".join(lines)


def check() -> int:
    allowed = abilities()
    allowed["memory_locked"] = libc.mlockall(MCL_CURRENT | MCL_FUTURE) == 0
    print(json.dumps({"abilities": allowed, "shortcomings": shortcomings(allowed)}))
    return 0


def main(words: Sequence[str]) -> int:
    if "--help" in words:
        print(usage())
        return 0
    if "--check" in words:
        return check()
    try:
        options = Options.parse(words)
        if not options.receipt:
            raise UsageError("--receipt is needed")
    except (UsageError, OSError, ValueError) as error:
        print(f"memory_guard: {error}", file=sys.stderr)
        return 2
    guard = Guard(options)
    why, code = "crash", 1
    try:
        why, code = guard.run()
    except BaseException as error:
        guard.receipt.data["error"] = f"{type(error).__name__}: {error}"
        raise
    finally:
        guard.finish(why, code)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
