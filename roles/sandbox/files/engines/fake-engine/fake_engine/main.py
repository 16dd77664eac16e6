# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Arguments and environment to a rank, and its exit code."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from . import arguments
from .faults import SettingError, Settings
from .head import Head
from .journal import Rank
from .runner import Failed
from .worker import Worker


def make_rank(chosen: dict[str, Any], settings: Settings, environment: dict[str, str]) -> Rank:
    """The rank that the arguments describe."""
    names = chosen.get("served_model_name")
    model = str(chosen.get("model", "Qwen/Qwen3-0.6B"))
    block = int(settings.number("BLOCK_SIZE", 0)) or int(chosen.get("block_size", 16))
    master = str(chosen.get("master_addr", "127.0.0.1"))
    head = not chosen.get("node_rank")
    rank = Rank(
        model=model,
        served=(names[0] if isinstance(names, list) else names) or model,
        max_model_len=int(chosen.get("max_model_len", 4096)),
        tensor=int(chosen.get("tensor_parallel_size", 1)),
        pipeline=int(chosen.get("pipeline_parallel_size", 1)),
        nodes=int(chosen.get("nnodes", 1)),
        number=int(chosen.get("node_rank", 0)),
        headless=bool(chosen.get("headless")),
        master_addr=master,
        master_port=int(chosen.get("master_port", 29501)),
        host=str(chosen.get("host") or "0.0.0.0"),  # noqa: S104  as the real engine
        port=int(chosen.get("port", 8000)),
        host_ip=environment.get("VLLM_HOST_IP") or (master if head else "127.0.0.1"),
        block_size=block,
        utilization=float(chosen.get("gpu_memory_utilization", 0.92)),
        platform=settings.platform,
        given=chosen,
    )
    if rank.max_model_len < 1:
        rank.max_model_len = 4096
    return rank


def main(argv: list[str]) -> int:
    environment = dict(os.environ)
    chosen = arguments.parse(argv)
    try:
        settings = Settings(environment, int(chosen.get("node_rank", 0)))
    except SettingError as error:
        print(f"fake engine: {error}", file=sys.stderr)
        return 64
    rank = make_rank(chosen, settings, environment)
    runner: Head | Worker
    runner = Worker(rank, settings, environment) if rank.headless and rank.number else Head(rank, settings, environment)
    signal.signal(signal.SIGTERM, lambda *_args: runner.told())
    signal.signal(signal.SIGINT, lambda *_args: runner.told())
    try:
        code = runner.run()
    except Failed as failure:
        code = failure.code
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
