"""What /proc says about memory, and the sentences made of it. Figures are those of public GB10 reports."""

from __future__ import annotations

from types import ModuleType

import pytest

from ansible_collections.gb10.fleet.plugins.module_utils import _meminfo
from ansible_collections.gb10.fleet.plugins.module_utils._node import meminfo

GIB = _meminfo.GIB_KIB
TOTAL = 127600748  # MemTotal of a GB10, as captured: 121.69 GiB, the same as CUDA's total


def test_launch_wants_share_of_total_and_margin() -> None:
    """The recipe's 0.85 of 121.69 GiB is 103.4 GiB; with 1.5 GiB beside it."""
    assert _meminfo.wanted_kib(TOTAL, 0.85, 1.5) / GIB == pytest.approx(104.94, abs=0.01)
    assert _meminfo.wanted_words(TOTAL, 0.84, 1.5) == "0.84 × 121.7 GiB + 1.5 GiB = 103.7 GiB"


def test_launch_without_a_share_wants_its_least() -> None:
    assert _meminfo.wanted_kib(TOTAL, 0.0, 1.5, 110.0) == round(111.5 * GIB)
    assert _meminfo.wanted_words(TOTAL, 0.0, 1.5, 110.0) == "110.0 GiB + 1.5 GiB = 111.5 GiB"
    assert _meminfo.wanted_words(TOTAL, 0.0, 1.5) == "1.5 GiB"


def test_launch_util_too_high_names_the_one_that_fits() -> None:
    """STYLE's example: 98.9 GiB free and 0.84 wanted; without a margin 0.81 fits, with 1.5 GiB beside it 0.80."""
    assert _meminfo.largest_utilization(TOTAL, round(98.9 * GIB), 0.0) == 0.81
    assert _meminfo.largest_utilization(TOTAL, round(98.9 * GIB), 1.5) == 0.8
    assert _meminfo.largest_utilization(TOTAL, GIB, 1.5) == 0.0


def test_parsers_agree_with_the_guard_program(guard: ModuleType) -> None:
    """The guard is one file and has its own: both must see the same."""
    text = "Node 0, zone   Normal   1656   1444   1938   2122   2779   1687    782    443    240      1    824\n"
    assert _meminfo.parse_buddyinfo(text) == guard.parse_buddyinfo(text.encode(), page_kib=4)
    head = f"MemTotal: {TOTAL} kB\nMemFree: 9542348 kB\nMemAvailable: 98234560 kB\nBuffers: 1 kB\n"
    found = meminfo(head)
    assert guard.parse_meminfo(head.encode()) == (found["MemFree"], found["MemAvailable"])


def test_guard_cgroup_blind_driver_memory_is_what_is_missing() -> None:
    """guard-cgroup-blind: memory.current 13.96 GiB, resident 7.2 GiB, nvidia-smi 57.9 GiB: no account holds the rest."""
    memory = {
        "MemTotal": TOTAL,
        "MemFree": TOTAL - round((57.9 + 7.2 + 6.0) * GIB),
        "AnonPages": round(7.2 * GIB),
        "Cached": round(5.5 * GIB),
        "Slab": round(0.5 * GIB),
    }
    assert _meminfo.unaccounted(memory) / GIB == pytest.approx(57.9, abs=0.01)
    said = _meminfo.holders(memory, [{"pid": 4211, "name": "python3", "kib": round(3.4 * GIB)}])
    assert said == [
        "python3 (pid 4211) holds 3.4 GiB",
        "3.8 GiB in smaller processes",
        "57.9 GiB are in no process's account, as the GPU driver's are",
    ]


def test_real_machine_has_little_that_no_field_explains() -> None:
    """On a machine without a GPU driver the sum comes out: within 5 % of all memory."""
    with open("/proc/meminfo") as handle:  # noqa: PTH123
        memory = meminfo(handle.read())
    assert _meminfo.unaccounted(memory) < memory["MemTotal"] * 0.05


def test_holders_name_what_else_holds_memory() -> None:
    memory = {"MemTotal": TOTAL, "MemFree": TOTAL - 20 * GIB, "Cached": 6 * GIB, "Shmem": 6 * GIB, "SUnreclaim": GIB}
    memory |= {"Slab": 2 * GIB, "HugePages_Total": 6144, "Hugepagesize": 2048}
    said = _meminfo.holders(memory, [], checkpoint_kib=4 * GIB)
    assert said == [
        "4.0 GiB of checkpoint pages stay, some process has them mapped",
        "6.0 GiB in /dev/shm and other shared memory",
        "1.0 GiB in kernel objects",
        "12.0 GiB in vm.nr_hugepages",
    ]


def test_top_users_are_the_large_ones() -> None:
    processes = [{"pid": n, "name": "p", "kib": n * 100 * 1024} for n in range(1, 8)]
    assert [p["pid"] for p in _meminfo.top(processes)] == [7, 6, 5]
    assert _meminfo.top([{"pid": 1, "name": "p", "kib": 1024}]) == []


def test_file_pages_are_nobodys_own() -> None:
    """/proc/<pid>/status as captured of a python3 process; a kernel thread has no Rss lines."""
    status = (
        "Name:\tpython3\nVmRSS:\t  445124 kB\nRssAnon:\t  401320 kB\nRssFile:\t   43800 kB\nRssShmem:\t       4 kB\n"
    )
    assert _meminfo.own_kib(status) == ("python3", 401324)
    assert _meminfo.own_kib("Name:\tkswapd0\nState:\tS (sleeping)\n") is None


def test_cache_that_can_be_dropped_is_clean_and_not_mapped() -> None:
    memory = {"Cached": 10 * GIB, "Buffers": GIB, "Shmem": 2 * GIB, "Mapped": GIB, "Dirty": GIB // 2}
    assert _meminfo.reclaimable_cache(memory) == 7.5 * GIB
    assert _meminfo.reclaimable_cache({"Cached": 1, "Mapped": 5}) == 0


def test_vmstat() -> None:
    assert _meminfo.parse_vmstat("nr_free_pages 4811\npgmajfault 237\nbroken\n") == {
        "nr_free_pages": 4811,
        "pgmajfault": 237,
    }
