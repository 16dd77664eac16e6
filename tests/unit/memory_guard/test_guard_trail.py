"""Trailing: what may go before the floor is near, and what ends it. Shards are stand-ins with a page cache of their own."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

MIB = 1024
SIZE = 2048 * MIB


class FakeShard:
    """Page cache as a set of MiB, and whether somebody holds the file."""

    def __init__(self, size_kib: int = SIZE) -> None:
        self.size_kib = size_kib
        self.pages: set[int] = set()
        self.is_held: bool | None = False
        self.mapped = False

    def held(self) -> bool | None:
        return self.is_held

    def cached_kib(self, offset: int = 0, length: int = 0) -> int:
        last = (offset + (length or self.size_kib)) / MIB
        return len([p for p in self.pages if offset // MIB <= p < last]) * MIB

    def evict(self, offset: int = 0, length: int = 0) -> None:
        if not self.mapped:
            last = (offset + (length or self.size_kib)) // MIB
            self.pages = {p for p in self.pages if not offset // MIB <= p < last}

    def read_to(self, mib: int, start: int = 0) -> None:
        self.pages |= set(range(start, mib))


class Loader:
    """Opens, reads and closes shards; the trail hears of it as the guard tells it."""

    def __init__(self, trail: Any) -> None:
        self.trail = trail

    def open(self, shard: FakeShard) -> None:
        shard.is_held = True
        self.trail.opened(shard)
        self.trail.look()

    def close(self, shard: FakeShard) -> None:
        shard.is_held = False
        self.trail.let_go_of(shard)
        self.trail.look()

    def read(self, shard: FakeShard) -> None:
        self.open(shard)
        shard.read_to(2048)
        self.close(shard)

    def evict_all(self) -> list[tuple[FakeShard, int, int]]:
        parts = []
        while part := self.trail.next_part():
            shard, offset, length = part
            shard.evict(offset, length)
            self.trail.went(shard, offset, length)
            parts.append(part)
        return parts


@pytest.fixture
def trail(guard: ModuleType) -> Any:
    return guard.Trail()


@pytest.fixture
def loader(trail: Any) -> Loader:
    return Loader(trail)


def test_a_shard_goes_when_the_loader_has_gone_on_to_another(loader: Loader) -> None:
    one, two = FakeShard(), FakeShard()
    loader.read(one)
    assert loader.evict_all() == []  # it may still be opened again
    loader.open(two)
    assert loader.evict_all() == [(one, 0, SIZE)]
    assert not one.pages


def test_oldest_shard_goes_first(loader: Loader) -> None:
    shards = [FakeShard() for _ in range(4)]
    for shard in shards[:3]:
        loader.read(shard)
    loader.open(shards[3])
    assert [part[0] for part in loader.evict_all()] == shards[:3]


def test_an_open_shard_goes_in_steps_behind_its_reader(loader: Loader, trail: Any) -> None:
    one, two = FakeShard(), FakeShard()
    step, ahead = trail.STEP_KIB // MIB, trail.AHEAD_KIB // MIB
    loader.read(one)
    loader.open(two)
    loader.evict_all()
    two.read_to(step + ahead)
    assert loader.evict_all() == []
    two.read_to(step + ahead + 1)
    assert loader.evict_all() == [(two, 0, step * MIB)]
    two.read_to(3 * step + ahead + 1, start=step)
    assert loader.evict_all() == [(two, step * MIB, step * MIB), (two, 2 * step * MIB, step * MIB)]
    two.read_to(2048, start=3 * step)
    loader.close(two)
    loader.open(FakeShard())
    assert [part[0] for part in loader.evict_all()] == [two]  # the rest, after it is closed


def test_the_first_shard_is_left_alone_while_it_is_read(loader: Loader) -> None:
    one = FakeShard()
    loader.open(one)
    one.read_to(2048)
    assert loader.evict_all() == []


def test_a_shard_that_is_not_read_in_order_waits_for_its_close(loader: Loader) -> None:
    """A rank that takes its slices of every tensor from a mapped shard leaves holes that it may come back to."""
    one, two = FakeShard(), FakeShard()
    loader.read(one)
    loader.open(two)
    loader.evict_all()
    two.pages = set(range(0, 2048, 2))
    assert loader.evict_all() == []


def test_what_is_mapped_is_tried_once(loader: Loader) -> None:
    one, two = FakeShard(), FakeShard()
    loader.read(one)
    loader.open(two)
    loader.evict_all()
    two.mapped = True
    two.read_to(2048)
    assert len(loader.evict_all()) == 1
    assert loader.evict_all() == []
    loader.trail.look()
    assert loader.trail.ended is None  # pages that never went are not read again
    two.mapped = False
    loader.close(two)
    loader.open(FakeShard())
    assert loader.evict_all() == [(two, 0, SIZE)]


def test_a_shard_that_is_read_twice_in_a_row_ends_it_before_anything_is_lost(loader: Loader, trail: Any) -> None:
    one = FakeShard()
    loader.read(one)
    loader.open(one)
    assert trail.ended == "a shard that was read is opened again"
    loader.open(FakeShard())
    assert loader.evict_all() == []
    assert len(one.pages) == 2048


def test_headers_that_are_read_first_are_no_pass(loader: Loader, trail: Any) -> None:
    """Some loaders open every shard for its header, close it, and come back."""
    shards = [FakeShard() for _ in range(3)]
    for shard in shards:
        loader.open(shard)
        shard.read_to(4)
        loader.close(shard)
    for shard in shards:
        loader.read(shard)
    assert trail.ended is None
    assert [part[0] for part in loader.evict_all()] == shards


def test_two_readers_of_one_shard_end_the_steps_and_not_the_shards(loader: Loader, trail: Any) -> None:
    """Two ranks on one node: the slower one reads from the page cache what the faster one brought in."""
    one, two = FakeShard(), FakeShard()
    loader.read(one)
    loader.open(two)
    trail.opened(two)
    loader.evict_all()
    two.read_to(2048)
    assert loader.evict_all() == []
    trail.let_go_of(two)
    assert loader.evict_all() == []  # the slower one still holds it
    loader.close(two)
    loader.open(FakeShard())
    assert loader.evict_all() == [(two, 0, SIZE)]


def test_a_second_pass_after_all_ends_it_at_once(loader: Loader, trail: Any) -> None:
    """As for a drafter whose tensors lie in the same files."""
    one, two = FakeShard(), FakeShard()
    loader.read(one)
    loader.open(two)
    loader.evict_all()
    loader.open(one)
    one.read_to(64)
    trail.look()
    assert trail.ended is None  # a header, or little
    one.read_to(65)
    trail.look()
    assert trail.ended == "a shard is read again"
    assert trail.read_again_kib == 65 * MIB


def test_a_reader_that_comes_back_behind_the_steps_ends_it(loader: Loader, trail: Any) -> None:
    one, two = FakeShard(), FakeShard()
    loader.read(one)
    loader.open(two)
    two.read_to(1000)
    loader.evict_all()
    two.read_to(70)
    trail.look()
    assert trail.ended == "a shard is read again"


def test_a_file_system_that_cannot_tell_ends_it(loader: Loader, trail: Any) -> None:
    one = FakeShard()
    loader.open(one)
    one.is_held = None
    trail.look()
    assert trail.ended == "this file system does not tell who holds a file"


def test_a_guard_that_starts_late_learns_who_reads(trail: Any) -> None:
    """Started again in the middle of a load: nobody told it of the opens before."""
    one = FakeShard()
    one.is_held = True
    one.read_to(100)
    trail.look([one])
    assert one in trail.reading
