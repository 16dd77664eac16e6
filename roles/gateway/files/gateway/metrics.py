# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What Prometheus reads."""

from __future__ import annotations

from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from .queue import Queue

WAIT_S = (0.001, 0.01, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600)
TTFT_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 20, 40, 80, 160)


class Metrics:
    """Names start with ``gb10_gateway_``; the label ``lane`` is "none" for a request that reached no lane."""

    def __init__(self, queue: Queue) -> None:
        self.registry = CollectorRegistry()
        in_flight = Gauge("gb10_gateway_in_flight", "Sequences at the engine", ["lane"], registry=self.registry)
        queued = Gauge("gb10_gateway_queued", "Requests that wait for their turn", ["lane"], registry=self.registry)
        capacity = Gauge(
            "gb10_gateway_capacity", "Sequences that the lane may have at the engine", ["lane"], registry=self.registry
        )
        for name, lane in queue.lanes.items():
            in_flight.labels(name).set_function(partial(getattr, lane, "running"))
            queued.labels(name).set_function(partial(getattr, lane, "queued"))
            capacity.labels(name).set(lane.capacity)
        self.wait = Histogram(
            "gb10_gateway_wait_seconds", "Wait for a place", ["lane"], buckets=WAIT_S, registry=self.registry
        )
        self.ttft = Histogram(
            "gb10_gateway_time_to_first_byte_seconds",
            "From the request to the first byte of its answer, the wait included",
            ["lane"],
            buckets=TTFT_S,
            registry=self.registry,
        )
        self.outcomes = Counter(
            "gb10_gateway_requests",
            "Requests by how they ended: ok, or why not",
            ["lane", "outcome"],
            registry=self.registry,
        )

    def page(self) -> bytes:
        return generate_latest(self.registry)
