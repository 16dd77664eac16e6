# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What /proc says about memory, and what a launch needs of it. Pure functions; sizes are KiB as in /proc unless named otherwise.

On a GB10 the GPU allocator is granted MemFree, and what it holds is in no process's account and in no cgroup: it is what is missing
when everything that the kernel accounts for is added up (case guard-cgroup-blind).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

GIB_KIB = 1 << 20
BIG_BLOCK_KIB = 2048  # order 9 with 4 KiB pages: what the GPU driver asks the kernel for

# Everything in /proc/meminfo that is memory in use and in no other of these fields.
_ACCOUNTED = (
    "MemFree",
    "Buffers",
    "Cached",
    "SwapCached",
    "AnonPages",
    "Slab",
    "KernelStack",
    "PageTables",
    "SecPageTables",
    "Percpu",
    "Zswap",
)


def gib(kib: float) -> str:
    """``98.9 GiB``; less than half a GiB as MiB, so that it never shows as nothing."""
    return f"{kib / GIB_KIB:.1f} GiB" if kib >= GIB_KIB // 2 or kib == 0 else f"{kib / 1024:.0f} MiB"


def parse_buddyinfo(text: str, page_kib: int = 4) -> int:
    """KiB that are free in blocks of 2 MiB and more, over all zones (/proc/buddyinfo: one column per order, from 0)."""
    first = max(0, (BIG_BLOCK_KIB // page_kib).bit_length() - 1)
    total = 0
    for line in text.splitlines():
        counts = line.split()[4:]
        total += sum(int(count) * (page_kib << order) for order, count in enumerate(counts) if order >= first)
    return total


def parse_vmstat(text: str) -> dict[str, int]:
    """/proc/vmstat: counters since boot, pages unless the name says otherwise."""
    pairs = (line.split() for line in text.splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def own_kib(status: str) -> tuple[str, int] | None:
    """(name, KiB that only this process can give back) from /proc/<pid>/status: file pages that it maps are not its own."""
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    if "RssAnon" not in fields:
        return None  # a kernel thread
    kib = sum(int(fields.get(name, "0 kB").split()[0]) for name in ("RssAnon", "RssShmem"))
    return fields.get("Name", "?").strip(), kib


def unaccounted(memory: Mapping[str, int]) -> int:
    """KiB in use that no field explains: on unified memory, what drivers hold for the GPU."""
    huge = memory.get("HugePages_Total", 0) * memory.get("Hugepagesize", 0)
    known = sum(memory.get(name, 0) for name in _ACCOUNTED) + huge
    return max(0, memory.get("MemTotal", 0) - known)


def reclaimable_cache(memory: Mapping[str, int]) -> int:
    """KiB of page cache that drop_caches can take: neither shared memory, nor mapped, nor dirty."""
    cache = memory.get("Cached", 0) + memory.get("Buffers", 0)
    stays = (memory.get(name, 0) for name in ("Shmem", "Mapped", "Dirty", "Writeback"))
    return max(0, cache - sum(stays))


def wanted_kib(total_kib: int, utilization: float, margin_gib: float, least_gib: float = 0.0) -> int:
    """MemFree that a launch needs: the engine takes its share of the total at once, the margin is for what else starts."""
    return round(max(utilization * total_kib, least_gib * GIB_KIB) + margin_gib * GIB_KIB)


def wanted_words(total_kib: int, utilization: float, margin_gib: float, least_gib: float = 0.0) -> str:
    """The same as a person would write it: ``0.84 × 121.7 GiB + 1.5 GiB = 103.7 GiB``."""
    whole = gib(wanted_kib(total_kib, utilization, margin_gib, least_gib))
    share = utilization * total_kib
    if least_gib * GIB_KIB > share or not share:
        return f"{least_gib:.1f} GiB + {margin_gib:.1f} GiB = {whole}" if least_gib else whole
    return f"{utilization:g} × {gib(total_kib)} + {margin_gib:.1f} GiB = {whole}"


def largest_utilization(total_kib: int, free_kib: int, margin_gib: float) -> float:
    """The largest gpu-memory-utilization that fits into what is free, rounded down to hundredths."""
    fits = (free_kib - margin_gib * GIB_KIB) / total_kib if total_kib else 0.0
    return max(0.0, math.floor(fits * 100) / 100)


def top(processes: Iterable[Mapping[str, Any]], least_kib: int = 256 * 1024, number: int = 3) -> list[dict[str, Any]]:
    """The largest holders (``pid``, ``name``, ``kib``), largest first; small ones explain nothing."""
    large = (dict(process) for process in processes if process["kib"] >= least_kib)
    return sorted(large, key=lambda process: (-process["kib"], process["pid"]))[:number]


def holders(memory: Mapping[str, int], processes: Sequence[Mapping[str, Any]], checkpoint_kib: int = 0) -> list[str]:
    """What holds memory, as clauses for an error message, most telling first.

    :param processes: ``pid``, ``name``, ``kib`` (GPU memory of the process included where the driver tells).
    :param checkpoint_kib: page cache of the checkpoint that could not be evicted.
    """
    words = [f"{p['name'].rsplit('/', 1)[-1]} (pid {p['pid']}) holds {gib(p['kib'])}" for p in top(processes)]
    if checkpoint_kib >= 64 * 1024:
        words.append(f"{gib(checkpoint_kib)} of checkpoint pages stay, some process has them mapped")
    small = memory.get("AnonPages", 0) + memory.get("Shmem", 0) - sum(process["kib"] for process in top(processes))
    if min(small, memory.get("AnonPages", 0)) >= GIB_KIB:
        words.append(f"{gib(min(small, memory['AnonPages']))} in smaller processes")
    driver = unaccounted(memory)
    if driver >= GIB_KIB:
        words.append(f"{gib(driver)} are in no process's account, as the GPU driver's are")
    for name, what in (("Shmem", "in /dev/shm and other shared memory"), ("SUnreclaim", "in kernel objects")):
        if memory.get(name, 0) >= GIB_KIB:
            words.append(f"{gib(memory[name])} {what}")
    huge = memory.get("HugePages_Total", 0) * memory.get("Hugepagesize", 0)
    if huge >= GIB_KIB:
        words.append(f"{gib(huge)} in vm.nr_hugepages")
    return words
