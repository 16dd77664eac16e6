"""Every decision of the memory guard: fall rate, ladder, back-off, compaction, hard floor. Clock and memory are synthetic here;
the constants are the measured ones (floor 8 GiB on a GB10 of 121.7 GiB)."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

GIB = 1 << 20
FLOOR = 8 * GIB


@pytest.fixture
def ladder(guard: ModuleType) -> Any:
    return guard.Ladder(guard.Options())


# --- what is read ---

# Head of /proc/meminfo of a GB10 (MemTotal as in a public capture), the rest synthetic.
MEMINFO = b"MemTotal:       127600748 kB\nMemFree:         9542348 kB\nMemAvailable:   98234560 kB\nBuffers:           12345 kB\n"
# /proc/buddyinfo of a machine of 24 GiB, as captured: columns are the orders 0 to 10.
BUDDYINFO = b"""Node 0, zone      DMA      0      0      0      0      0      0      0      0      1      1      3
Node 0, zone    DMA32      3      2      6      3      8      6      4      5      4      3    751
Node 0, zone   Normal   1656   1444   1938   2122   2779   1687    782    443    240      1    824
"""


def test_meminfo_is_read_by_position(guard: ModuleType) -> None:
    assert guard.parse_meminfo(MEMINFO) == (9542348, 98234560)
    with pytest.raises(ValueError, match="layout"):
        guard.parse_meminfo(b"MemTotal: 1 kB\nHighFree: 2 kB\nMemAvailable: 3 kB\n")


def test_blocks_of_2_mib_and_more_are_summed_over_zones(guard: ModuleType) -> None:
    orders = {9: 1 + 3 + 1, 10: 3 + 751 + 824}
    assert guard.parse_buddyinfo(BUDDYINFO, page_kib=4) == orders[9] * 2048 + orders[10] * 4096


def test_blocks_of_2_mib_with_64_kib_pages_begin_at_order_5(guard: ModuleType) -> None:
    assert guard.parse_buddyinfo(b"Node 0, zone Normal 9 9 9 9 9 2 1\n", page_kib=64) == 2 * 2048 + 4096


def test_guard_pagecache_frag_is_seen_in_the_blocks(guard: ModuleType) -> None:
    """guard-pagecache-frag: head 138 MB free and no block of order 8 or more; a fresh node has thousands."""
    head = b"Node 0, zone   Normal   9000   5000   2000    500    100     50     20      9      0      0      0\n"
    assert guard.parse_buddyinfo(head, page_kib=4) == 0
    assert guard.Ladder(guard.Options()).wants_compaction(0.0, 0)


# --- fall rate and sleep ---


def test_rate_is_a_decaying_maximum(guard: ModuleType) -> None:
    rate = guard.FallRate()
    assert rate.update(0.0, 20 * GIB) == 0
    assert rate.update(0.5, 19 * GIB) == 2 * GIB
    assert rate.update(1.0, 19 * GIB) == pytest.approx(1.4 * GIB)  # quiet: decays by 0.7
    assert rate.update(1.5, 16 * GIB) == 6 * GIB  # faster: at once


def test_rise_of_free_memory_is_no_fall(guard: ModuleType) -> None:
    rate = guard.FallRate()
    rate.update(0.0, 8 * GIB)
    assert rate.update(0.5, 60 * GIB) == 0


def test_two_looks_at_the_same_moment_are_one(guard: ModuleType) -> None:
    """A grant of 64 MiB within 50 microseconds once looked like a flood of 1.2 TiB/s and made the guard spin."""
    rate = guard.FallRate()
    rate.update(0.0, 20 * GIB)
    rate.update(0.5, 20 * GIB)
    assert rate.update(0.50005, 20 * GIB - 65536) == 0
    assert rate.update(0.52, 20 * GIB - 65536) == pytest.approx(65536 / 0.02)


@pytest.mark.parametrize(
    ("free_gib", "rate_gib", "sleep_s"),
    [
        (60, 0.0, 0.5),  # nothing happens: the longest sleep
        (60, 1.5, 0.5),
        (9.2, 1.5, 0.2),  # 1.2 GiB of headroom at 1.5 GiB/s = 0.8 s, a quarter of it
        (8.0, 1.5, 0.02),
        (6.0, 1.5, 0.02),
    ],
)
def test_sleep_is_a_quarter_of_the_time_to_the_floor(
    ladder: Any, free_gib: float, rate_gib: float, sleep_s: float
) -> None:
    ladder.rate.kib_s = rate_gib * GIB
    assert ladder.sleep_s(int(free_gib * GIB)) == pytest.approx(sleep_s, rel=0.01)


# --- step 1: evict checkpoint pages ---


def test_acts_before_the_floor_by_the_fall_rate(ladder: Any) -> None:
    """1.4 GiB/s for 0.3 s is 0.42 GiB: at 8.4 GiB free it is time, at 8.5 GiB not yet."""
    ladder.rate.kib_s = 1.4 * GIB
    assert ladder.wants_eviction(0.0, int(8.41 * GIB))
    assert not ladder.wants_eviction(0.0, int(8.43 * GIB))


def test_acts_under_the_floor_even_when_nothing_falls(ladder: Any) -> None:
    assert ladder.wants_eviction(0.0, FLOOR - 1)
    assert not ladder.wants_eviction(0.0, FLOOR)


def test_useless_evictions_back_off_from_a_quarter_second_to_ten(ladder: Any) -> None:
    """A loader that keeps all shards mapped makes every guard powerless; one without back-off burned 27 s of CPU."""
    now, waits = 0.0, []
    for _ in range(8):
        assert ladder.wants_eviction(now, FLOOR // 2)
        ladder.evicted(now, FLOOR // 2, FLOOR // 2)
        waits.append(ladder.evict_gate.wait_s)
        assert not ladder.wants_eviction(now + waits[-1] * 0.99, FLOOR // 2)
        now += waits[-1]
    assert waits == [0.25, 0.5, 1, 2, 4, 8, 10, 10]
    assert ladder.ineffective == 8


def test_an_eviction_that_frees_an_eighth_of_the_floor_is_useful(ladder: Any) -> None:
    ladder.evicted(0.0, 4 * GIB, 4 * GIB + FLOOR // 8)
    assert ladder.wants_eviction(0.0, 5 * GIB)
    ladder.evicted(0.0, 4 * GIB, 4 * GIB + FLOOR // 8 - 1)
    assert not ladder.wants_eviction(0.0, 5 * GIB)
    assert ladder.ineffective == 1


def test_a_useful_eviction_ends_the_back_off(ladder: Any) -> None:
    for now in (0.0, 1.0, 2.0):
        ladder.evicted(now, 4 * GIB, 4 * GIB)
    ladder.evicted(10.0, 4 * GIB, 9 * GIB)
    assert ladder.wants_eviction(10.0, 4 * GIB)


def test_a_small_yield_above_the_floor_asks_for_a_rest_and_is_not_counted(ladder: Any) -> None:
    """All shards mapped, memory falling: each try walks gigabytes of pages for nothing."""
    ladder.rate.kib_s = 2 * GIB
    waits, now = [], 0.0
    for _ in range(5):
        ladder.evicted(now, FLOOR + 1000, FLOOR + 2000)
        waits.append(ladder.evict_gate.wait_s)
        assert not ladder.wants_eviction(now + waits[-1] * 0.99, FLOOR + 2000)
        now += waits[-1] + 0.001
        assert ladder.wants_eviction(now, FLOOR + 2000)
    assert waits == [0.1, 0.2, 0.4, 0.8, 1.0]
    assert ladder.ineffective == 0


def test_a_close_makes_eviction_worth_another_try_but_not_each_of_many(ladder: Any) -> None:
    """Some loaders open and close a shard for every tensor."""
    for now in (0.0, 1.0, 2.0, 3.0):
        ladder.evicted(now, 4 * GIB, 4 * GIB)
    assert not ladder.wants_eviction(3.1, 4 * GIB)
    ladder.something_closed(3.1)
    assert ladder.wants_eviction(3.1, 4 * GIB)
    ladder.evicted(3.1, 4 * GIB, 4 * GIB)
    ladder.something_closed(3.2)
    assert not ladder.wants_eviction(3.2, 4 * GIB)


# --- step 2: drop_caches ---


def test_drops_caches_only_under_the_floor_and_a_second_apart(ladder: Any) -> None:
    assert not ladder.wants_drop(0.0, FLOOR)
    assert ladder.wants_drop(0.0, FLOOR - 1)
    ladder.dropped(0.0, 4 * GIB, 9 * GIB)
    assert not ladder.wants_drop(0.99, FLOOR - 1)
    assert ladder.wants_drop(1.0, FLOOR - 1)


def test_useless_drops_double_to_thirty_seconds(ladder: Any) -> None:
    now, waits = 0.0, []
    for _ in range(7):
        assert ladder.wants_drop(now, FLOOR // 2)
        ladder.dropped(now, FLOOR // 2, FLOOR // 2)
        waits.append(ladder.drop_gate.wait_s)
        now += waits[-1]
    assert waits == [2, 4, 8, 16, 30, 30, 30]


def test_a_useful_drop_reopens_the_eviction_as_well(ladder: Any) -> None:
    ladder.evicted(0.0, 4 * GIB, 4 * GIB)
    ladder.dropped(0.1, 4 * GIB, 7 * GIB)
    assert ladder.wants_eviction(0.1, 7 * GIB)


# --- step 3: compaction ---


def test_compacts_only_while_large_blocks_are_short_and_five_seconds_apart(ladder: Any) -> None:
    wanted = 512 * 1024
    assert not ladder.wants_compaction(0.0, wanted)
    assert ladder.wants_compaction(0.0, wanted - 1)
    ladder.compacted(0.0, wanted // 2, wanted)
    assert not ladder.wants_compaction(4.9, 0)
    assert ladder.wants_compaction(5.0, 0)


def test_short_blocks_ask_for_eviction_first(ladder: Any) -> None:
    """Free memory is far from the floor, its large blocks are not."""
    short = 511 * 1024
    assert ladder.wants_blocks(0.0, short) and not ladder.wants_eviction(0.0, 60 * GIB)
    waits, now = [], 0.0
    for _ in range(6):  # nothing comes of it: compaction may try
        assert ladder.wants_blocks(now, short) and ladder.wants_compaction(now, short)
        ladder.blocks_evicted(now, short, short)
        waits.append(ladder.blocks_gate.wait_s)
        now += waits[-1]
    assert waits == [1, 2, 4, 8, 16, 30]
    ladder.blocks_evicted(now, short, short + 64 * 1024)
    assert ladder.wants_blocks(now, short)
    assert not ladder.wants_blocks(now, 512 * 1024)


def test_useless_compactions_double_to_a_minute(ladder: Any) -> None:
    waits = []
    for _ in range(5):
        ladder.compacted(0.0, 1000, 1000)
        waits.append(ladder.compact_gate.wait_s)
    assert waits == [10, 20, 40, 60, 60]


# --- hard floor ---


def test_guard_silent_wedge_hard_floor_wants_a_span(guard: ModuleType) -> None:
    """guard-silent-wedge: MemAvailable went from 34.0 to 12.7 GiB in 1.5 s before a wedge; under 4 GiB for 3 s is the end."""
    hard = guard.HardFloor(4 * GIB, 3.0)
    assert not hard.reached(0.0, int(34.0 * GIB))
    assert not hard.reached(1.5, int(12.7 * GIB))
    assert not hard.reached(2.0, 3 * GIB)
    assert not hard.reached(4.9, 3 * GIB)
    assert hard.reached(5.0, 3 * GIB)


def test_hard_floor_begins_anew_when_memory_comes_back(guard: ModuleType) -> None:
    hard = guard.HardFloor(4 * GIB, 3.0)
    hard.reached(0.0, 3 * GIB)
    hard.reached(2.9, 5 * GIB)
    assert not hard.reached(3.1, 3 * GIB)
    assert hard.reached(6.2, 3 * GIB)


def test_hard_floor_is_off_by_default(guard: ModuleType) -> None:
    hard = guard.HardFloor(guard.Options().hard_floor_mib * 1024, 3.0)
    assert not hard.reached(0.0, 0)
    assert not hard.reached(99.0, 0)


# --- options and words ---


def test_options_have_the_measured_defaults(guard: ModuleType) -> None:
    options = guard.Options()
    assert (options.floor_mib, options.lead_s, options.min_sleep_s, options.max_sleep_s) == (8192, 0.3, 0.02, 0.5)
    assert (options.drop_every_s, options.drop_every_max_s, options.compact_every_s) == (1.0, 30.0, 5.0)
    assert (options.back_off_s, options.back_off_max_s, options.deadline_s) == (0.25, 10.0, 2700.0)


def test_command_line_wins_over_the_file(guard: ModuleType, tmp_path: Any) -> None:
    config = tmp_path / "c.json"
    config.write_text('{"floor_mib": 4096, "files": ["/a/*"], "trail": true, "deadline_s": 60}')
    options = guard.Options.parse(["--config", str(config), "--floor-mib", "1024", "--ready-marker", "/run/x"])
    assert (options.floor_mib, options.files, options.trail, options.deadline_s) == (1024, ["/a/*"], True, 60.0)
    assert options.ready_marker == "/run/x"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--flor-mib", "1"], "unknown option --flor-mib"),
        (["--floor-mib", "much"], "--floor-mib: .*much"),
        (["--floor-mib"], "needs a value"),
        (["x"], "unknown option x"),
        (["--floor-mib", "-5"], "floor_mib is -5"),
    ],
)
def test_bad_options_are_said_plainly(guard: ModuleType, words: list[str], message: str) -> None:
    with pytest.raises(guard.UsageError, match=message):
        guard.Options.parse(words)


def test_config_with_an_unknown_or_wrong_value(guard: ModuleType) -> None:
    with pytest.raises(guard.UsageError, match="unknown option flor"):
        guard.Options(flor=1)
    with pytest.raises(guard.UsageError, match="floor_mib is 'big', wanted something like 8192"):
        guard.Options(floor_mib="big")
    with pytest.raises(guard.UsageError, match="trail is 1"):
        guard.Options(trail=1)


def test_amounts_never_show_as_nothing(guard: ModuleType) -> None:
    assert guard.amount(12 * 1024) == "12 MiB"
    assert guard.amount(3.2 * GIB) == "3.2 GiB"


def test_voice_speaks_once_a_second_and_sums_up(guard: ModuleType, capfd: pytest.CaptureFixture[str]) -> None:
    voice = guard.Voice()
    for now in (0.0, 0.2, 0.4, 1.1):
        voice.action(now, f"dropped at {now}", GIB)
    assert capfd.readouterr().out.splitlines() == ["dropped at 0.0", "and 2 more like this, 2.0 GiB", "dropped at 1.1"]
