# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The part of a real engine that is Ray's: one worker on each node of a real cluster. The CPU build of vLLM refuses Ray."""

from __future__ import annotations

import importlib
import os
from typing import Any

from .journal import Journal, Rank


def run(rank: Rank, journal: Journal) -> None:
    """Place a task on each of the nodes that the parallel sizes want, at the same time, and say where each one ran."""
    wanted = rank.tensor * rank.pipeline
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError:
        journal.say("EngineCore", "INFO", "ray_utils.py:464", "no Ray in this image: nothing is placed")
        return
    placement: Any = importlib.import_module("ray.util.placement_group")
    strategies: Any = importlib.import_module("ray.util.scheduling_strategies")
    ray.init(address="auto", log_to_driver=False, configure_logging=False)
    group = placement.placement_group([{"CPU": 1}] * wanted, strategy="STRICT_SPREAD")
    if not placement.placement_group_table(group) or not group.wait(120):
        raise SystemExit(f"Waiting for creating a placement group of specs for 120 seconds: {wanted} nodes wanted")

    def where() -> tuple[str, int]:
        return ray.util.get_node_ip_address(), os.getpid()

    task = ray.remote(num_cpus=1)(where)
    asked = [
        task.options(
            scheduling_strategy=strategies.PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number)
        ).remote()
        for number in range(wanted)
    ]
    for number, (address, pid) in enumerate(ray.get(asked, timeout=120)):
        journal.say(
            "EngineCore",
            "INFO",
            "ray_executor.py:1",
            f"(RayWorkerWrapper pid={pid}, ip={address}) rank {number} of {wanted}",
        )
    placement.remove_placement_group(group)
    ray.shutdown()
