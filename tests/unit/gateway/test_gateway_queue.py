"""Places in a lane: bounded, fair between keys, and never lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from gateway.queue import Lane, Queue, Ticket
from gateway.refusal import Refusal
from hypothesis import given, settings
from hypothesis import strategies as st


def run(scenario: Callable[[], Any]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 10))


async def settle() -> None:
    for _turn in range(5):
        await asyncio.sleep(0)


class Crowd:
    """Requests that enter a lane and say in which order they got their place."""

    def __init__(self, queue: Queue, lane: str = "batch") -> None:
        self.queue, self.lane = queue, queue.lanes[lane]
        self.order: list[str] = []
        self.tickets: list[Ticket] = []
        self.tasks: list[asyncio.Task[None]] = []

    def come(self, label: str, limit: int | None = None, weight: int = 1) -> asyncio.Task[None]:
        async def one() -> None:
            ticket = await self.queue.enter(self.lane, label[0], limit, weight)
            self.order.append(label)
            self.tickets.append(ticket)

        self.tasks.append(asyncio.ensure_future(one()))
        return self.tasks[-1]

    async def finish_one(self) -> None:
        self.queue.leave(self.tickets.pop(0))
        await settle()


def test_keys_take_turns() -> None:
    """One key sends nine requests, another one: it does not wait behind all nine."""

    async def scenario() -> None:
        crowd = Crowd(Queue([Lane("batch", 1, 100, 60)]))
        for number in range(9):
            crowd.come(f"a{number}")
        await settle()
        crowd.come("b0")
        crowd.come("b1")
        await settle()
        for _turn in range(10):
            await crowd.finish_one()
        assert crowd.order[:6] == ["a0", "a1", "b0", "a2", "b1", "a3"]
        assert len(crowd.order) == 11

    run(scenario)


def test_a_key_at_its_own_limit_holds_nobody_up() -> None:
    async def scenario() -> None:
        crowd = Crowd(Queue([Lane("batch", 3, 100, 60)]))
        crowd.come("a0", limit=1)
        crowd.come("a1", limit=1)
        crowd.come("b0")
        await settle()
        assert crowd.order == ["a0", "b0"]
        await crowd.finish_one()
        assert crowd.order == ["a0", "b0", "a1"]

    run(scenario)


def test_a_limit_counts_over_all_lanes() -> None:
    async def scenario() -> None:
        queue = Queue([Lane("chat", 2, 10, 60), Lane("batch", 2, 10, 60)])
        chat, batch = Crowd(queue, "chat"), Crowd(queue, "batch")
        chat.come("a0", limit=1)
        await settle()
        batch.come("a1", limit=1)
        await settle()
        assert batch.order == []
        await chat.finish_one()
        assert batch.order == ["a1"]

    run(scenario)


def test_a_heavy_request_is_not_passed_for_ever() -> None:
    async def scenario() -> None:
        crowd = Crowd(Queue([Lane("batch", 4, 100, 60)]))
        for number in range(4):
            crowd.come(f"a{number}")
        await settle()
        crowd.come("h", weight=4)
        for number in range(4, 8):
            crowd.come(f"a{number}")
        await settle()
        for _turn in range(4):
            await crowd.finish_one()
        assert crowd.order[4] == "h"

    run(scenario)


def test_a_full_queue_refuses_with_advice() -> None:
    async def scenario() -> None:
        queue = Queue([Lane("batch", 1, 2, 60)])
        crowd = Crowd(queue)
        for number in range(3):
            crowd.come(f"a{number}")
        await settle()
        with pytest.raises(Refusal) as caught:
            await queue.enter(queue.lanes["batch"], "b", None, 1)
        assert caught.value.status == 429 and "2 requests wait in lane batch" in caught.value.sentence
        assert int(caught.value.headers()["Retry-After"]) >= 1
        assert queue.lanes["batch"].queued == 2
        for task in crowd.tasks:
            task.cancel()

    run(scenario)


def test_a_wait_has_an_end() -> None:
    async def scenario() -> None:
        queue = Queue([Lane("batch", 1, 10, 0.05)])
        crowd = Crowd(queue)
        crowd.come("a0")
        await settle()
        with pytest.raises(Refusal) as caught:
            await queue.enter(queue.lanes["batch"], "b", None, 1)
        assert (caught.value.status, caught.value.code) == (429, "queue_timeout")
        assert (queue.running, queue.lanes["batch"].queued) == (1, 0)

    run(scenario)


def test_more_than_the_lane_holds_is_refused_at_once() -> None:
    async def scenario() -> None:
        queue = Queue([Lane("batch", 4, 10, 60)])
        for limit, weight in ((None, 5), (2, 3)):
            with pytest.raises(Refusal) as caught:
                await queue.enter(queue.lanes["batch"], "a", limit, weight)
            assert caught.value.status == 400

    run(scenario)


def test_closing_tells_all_who_wait() -> None:
    async def scenario() -> None:
        queue = Queue([Lane("batch", 1, 10, 60)])
        crowd = Crowd(queue)
        for label in ("a0", "a1", "b0"):
            crowd.come(label)
        await settle()
        queue.close(Refusal(503, "held", "stopping"))
        results = await asyncio.gather(*crowd.tasks, return_exceptions=True)
        assert [type(result) for result in results] == [type(None), Refusal, Refusal]
        assert (queue.running, queue.lanes["batch"].queued) == (1, 0)

    run(scenario)


steps = st.lists(
    st.one_of(
        st.tuples(st.just("come"), st.sampled_from("abc"), st.integers(1, 3)),
        st.tuples(st.just("finish"), st.integers(0, 5), st.just(0)),
        st.tuples(st.just("go away"), st.integers(0, 9), st.just(0)),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(steps, st.integers(1, 4), st.sampled_from([None, 1, 2]))
def test_no_place_is_lost_and_no_limit_passed(program: list[Any], capacity: int, limit: int | None) -> None:
    """Whatever comes, ends and goes away: never over the limits, all places free at the end, nobody waits beside a free place."""

    async def scenario() -> None:
        queue = Queue([Lane("batch", capacity, 8, 60)])
        lane = queue.lanes["batch"]
        crowd = Crowd(queue)
        for what, which, weight in program:
            if what == "come":
                crowd.come(which, limit if which == "a" else None, weight)
            elif what == "finish" and crowd.tickets:
                queue.leave(crowd.tickets.pop(which % len(crowd.tickets)))
            elif what == "go away" and crowd.tasks:
                crowd.tasks[which % len(crowd.tasks)].cancel()
            await settle()
            assert 0 <= lane.running <= capacity
            assert lane.queued == sum(len(tickets) for tickets in lane.turns.values()) <= 8
            assert limit is None or queue.used["a"] <= limit
            assert lane.running == sum(ticket.weight for ticket in crowd.tickets)
            heads = [tickets[0] for tickets in lane.turns.values()]
            eligible = [t for t in heads if t.limit is None or queue.used[t.name] + t.weight <= t.limit]
            assert not eligible or lane.running + eligible[0].weight > capacity
        while crowd.tickets:
            queue.leave(crowd.tickets.pop())
            await settle()
        assert (lane.running, lane.queued) == (0, 0) and not +queue.used
        await asyncio.gather(*crowd.tasks, return_exceptions=True)

    run(scenario)
