# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The queue: so many requests per lane at the engine, the others wait their turn, fairly between keys."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from dataclasses import dataclass, field

from .refusal import Refusal


@dataclass(eq=False)
class Ticket:
    """One request's place in a lane: so many of its sequences, on account of one key."""

    lane: Lane
    name: str
    limit: int | None
    weight: int
    granted: asyncio.Future[None]


@dataclass(eq=False)
class Lane:
    """:param capacity: sequences of this lane at the engine at once. :param max_queued: requests that may wait."""

    name: str
    capacity: int
    max_queued: int
    max_wait_s: float
    running: int = 0
    queued: int = 0
    # Waiting tickets by key, the key whose turn it is first.
    turns: dict[str, deque[Ticket]] = field(default_factory=dict)
    # Mean duration of a request, for the advice when to come back.
    mean_s: float = 5.0

    def retry_after_s(self) -> float:
        return min(120.0, max(1.0, self.mean_s * (self.queued + 1) / self.capacity))


class Queue:
    """All lanes before one engine."""

    def __init__(self, lanes: list[Lane]) -> None:
        self.lanes = {lane.name: lane for lane in lanes}
        self.used: Counter[str] = Counter()

    @property
    def running(self) -> int:
        return sum(lane.running for lane in self.lanes.values())

    async def enter(self, lane: Lane, name: str, limit: int | None, weight: int) -> Ticket:
        """Wait for a place. Raises Refusal when the lane's queue is full, or the wait too long."""
        most = lane.capacity if limit is None else min(limit, lane.capacity)
        if weight > most:
            raise Refusal(
                400,
                "too_many_sequences",
                f"The request asks for {weight} sequences at once, {most} are allowed here. Ask for fewer.",
            )
        ticket = Ticket(lane, name, limit, weight, asyncio.get_running_loop().create_future())
        lane.turns.setdefault(name, deque()).append(ticket)
        lane.queued += 1
        self._admit(lane)
        if ticket.granted.done():
            return ticket
        if lane.queued > lane.max_queued:
            self._forget(ticket)
            raise Refusal(
                429,
                "queue_full",
                f"{lane.max_queued} requests wait in lane {lane.name} already. Come back later.",
                lane.retry_after_s(),
            )
        try:
            await asyncio.wait({ticket.granted}, timeout=lane.max_wait_s)
        except asyncio.CancelledError:
            self._give_up(ticket)
            raise
        if not ticket.granted.done():
            self._give_up(ticket)
            raise Refusal(
                429,
                "queue_timeout",
                f"No place in lane {lane.name} came free within {lane.max_wait_s:g} s. Come back later.",
                lane.retry_after_s(),
            )
        ticket.granted.result()
        return ticket

    def leave(self, ticket: Ticket, took_s: float | None = None) -> None:
        lane = ticket.lane
        lane.running -= ticket.weight
        self.used[ticket.name] -= ticket.weight
        if took_s is not None:
            lane.mean_s += 0.1 * (took_s - lane.mean_s)
        # A key that has a limit of its own may wait in any lane.
        for other in self.lanes.values():
            self._admit(other)

    def close(self, why: Refusal) -> None:
        """Whoever waits is told why, at once."""
        for lane in self.lanes.values():
            waiting = [ticket for tickets in lane.turns.values() for ticket in tickets]
            lane.turns.clear()
            lane.queued = 0
            for ticket in waiting:
                ticket.granted.set_exception(why)

    def _give_up(self, ticket: Ticket) -> None:
        if not ticket.granted.done():
            self._forget(ticket)
        elif ticket.granted.exception() is None:
            self.leave(ticket)  # the place came together with the end of the wait

    def _forget(self, ticket: Ticket) -> None:
        lane = ticket.lane
        tickets = lane.turns[ticket.name]
        tickets.remove(ticket)
        if not tickets:
            del lane.turns[ticket.name]
        lane.queued -= 1
        self._admit(lane)

    def _admit(self, lane: Lane) -> None:
        while (ticket := self._next(lane)) is not None:
            tickets = lane.turns.pop(ticket.name)
            tickets.popleft()
            if tickets:
                lane.turns[ticket.name] = tickets  # behind all other keys
            lane.queued -= 1
            lane.running += ticket.weight
            self.used[ticket.name] += ticket.weight
            ticket.granted.set_result(None)

    def _next(self, lane: Lane) -> Ticket | None:
        for tickets in lane.turns.values():
            ticket = tickets[0]
            if ticket.limit is not None and self.used[ticket.name] + ticket.weight > ticket.limit:
                continue  # waits for itself: others pass
            # Its turn: nobody passes while it waits for room, or a heavy request would wait for ever.
            return ticket if lane.running + ticket.weight <= lane.capacity else None
        return None
