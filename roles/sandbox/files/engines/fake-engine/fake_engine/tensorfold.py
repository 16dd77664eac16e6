# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A stand-in for `tensorfold serve`: its arguments and environment checked, its ranks, its /health, none of vLLM's lines.

FAKE_ENGINE_WINDOW: the largest window that fits (default: any); a rank 0 that is asked for more ends as the real one does.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path
from typing import NoReturn

from .api import Api
from .faults import SettingError, Settings
from .head import Head
from .journal import Rank
from .runner import Failed
from .worker import Worker

# What each rank reads at its start, and the values that it takes (kit at 05f75fde, start.sh and scripts/config.sh).
ENVIRONMENT: dict[str, tuple[str, ...]] = {
    "TF_GLM_KV": ("fp8", "bf16"),
    "TF_GLM_DENSE": ("q4", "fp8", "bf16"),
    "TF_GLM_COMM": ("nccl", "roce"),
    "TF_GLM_SHARED_PREFIX": ("0", "1"),
    "HF_HUB_OFFLINE": ("0", "1"),
    "TENSORFOLD_MEMORY_RESERVE_GIB": (),
}


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tensorfold")
    serve = parser.add_subparsers(dest="command", required=True).add_parser("serve")
    serve.add_argument("model")
    for name in ("tp", "rank", "context", "parallel", "max-tokens", "master-port", "port"):
        serve.add_argument(f"--{name}", type=int, default=0)
    for name in ("master", "drafter", "name", "host"):
        serve.add_argument(f"--{name}", default="")
    serve.add_argument("--thinking", action=argparse.BooleanOptionalAction, default=True)
    serve.add_argument("--vision", action="store_true")
    serve.add_argument("--vision-urls", action="store_true")
    return parser


def wrong(given: argparse.Namespace, environment: dict[str, str]) -> str | None:
    """What a rank cannot start with, in one sentence."""
    for name, values in ENVIRONMENT.items():
        if name not in environment or (values and environment[name] not in values):
            return f"{name} is {environment.get(name)!r}, wanted {' or '.join(values) or 'a number'}"
    for folder in [given.model, *([given.drafter] if given.drafter not in ("", "none") else [])]:
        if not (Path(folder) / "config.json").is_file():
            return f"no config.json in {folder}"
    if given.rank == 0 and not (given.name and given.port):
        return "rank 0 has no name or no port"
    if given.drafter == "none" and given.parallel > 1:
        return f"parallel {given.parallel} needs a drafter: the checkpoint's own head serves one request at a time"
    return None


def say(text: str) -> None:
    print(text, flush=True)


class FoldHead(Head):
    """Rank 0: no line of vLLM's, a /health that counts."""

    def load(self) -> None:
        say(f"[tensorfold] rank 0 of {self.rank.world}: loading {self.rank.model}")
        window = int(self.settings.number("WINDOW", 0))
        if window and self.rank.max_model_len > window:
            say(f"the window does not fit; largest fitting prompt-plus-reply window: {window} tokens")
            raise Failed(1)
        super().load()

    def dress(self, api: Api) -> None:
        window = self.rank.max_model_len
        api.health = {
            "requests_running": 0,
            "pool_tokens": 2 * window,
            "pool_free_tokens": 2 * window,
            "iteration_s": 0.1,
        }
        say(f"[tensorfold] serving {self.rank.served}, window {window}")


class FoldWorker(Worker):
    """A rank above 0: ends when rank 0 does."""

    def lost(self) -> NoReturn:
        say(f"rank {self.rank.number} ends, since a rank that left cannot rejoin")
        raise Failed(1)


def main(argv: list[str]) -> int:
    environment = dict(os.environ)
    given = build_parser().parse_args(argv)
    problem = wrong(given, environment)
    if problem:
        print(f"tensorfold: error: {problem}", file=sys.stderr)
        return 2
    try:
        settings = Settings(environment, given.rank)
    except SettingError as error:
        print(f"fake engine: {error}", file=sys.stderr)
        return 64
    rank = Rank(
        model=given.model,
        served=given.name,
        max_model_len=given.context or int(settings.number("WINDOW", 0)) or 1048576,
        tensor=given.tp,
        nodes=given.tp,
        number=given.rank,
        headless=given.rank > 0,
        master_addr=given.master,
        master_port=given.master_port,
        host=given.host or "0.0.0.0",  # noqa: S104  as the real engine
        port=given.port,
        host_ip=given.master if given.rank == 0 else "127.0.0.1",
        given={"max_num_seqs": given.parallel, "served_model_name": given.name},
    )
    runner: FoldHead | FoldWorker
    runner = FoldWorker(rank, settings, environment) if given.rank else FoldHead(rank, settings, environment)
    runner.journal.write = lambda _line: None  # type: ignore[method-assign]
    signal.signal(signal.SIGTERM, lambda *_args: runner.told())
    signal.signal(signal.SIGINT, lambda *_args: runner.told())
    say(f"[tensorfold] rank {given.rank} of {given.tp}: waiting at {given.master}:{given.master_port}")
    try:
        code = runner.run()
    except Failed as failure:
        code = failure.code
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
