"""Two lanes before a real engine: does a chat answer at once while batch work saturates the engine, and what does batch lose?

    python lanes.py --direct http://127.0.0.1:8000 --gateway http://127.0.0.1:8080 --model tiny --key-file key

Needs aiohttp; run it on the head, where the engine listens on loopback, with /opt/gb10-fleet/gateway/venv/bin/python. Three phases
of --seconds each: chat alone through the gateway; chat and batch sent to the engine as they are; both through the gateway, each in
its lane. Batch is --streams long streams at a time, chat one short stream every --every seconds. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp

PROMPT = "Write down what you know about the sea, and do not stop. "


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else float("nan")


class Load:
    """Chats and batch streams at one address, for so long."""

    def __init__(self, client: aiohttp.ClientSession, url: str, headers: dict[str, str], seconds: float) -> None:
        self.client, self.url, self.headers, self.seconds = client, url, headers, seconds
        self.first_s: list[float] = []
        self.tokens = self.failed = 0

    async def stream(self, model: str, number: int, max_tokens: int) -> None:
        """One stream; its tokens count as they come, its first one is timed when it is short."""
        body: dict[str, Any] = {
            "model": model,
            "stream": True,
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "messages": [{"role": "user", "content": f"{number}: {PROMPT * (1 if max_tokens < 50 else 4)}"}],
        }
        begin, first = time.monotonic(), True
        async with self.client.post(f"{self.url}/v1/chat/completions", json=body, headers=self.headers) as answer:
            if answer.status != 200:
                self.failed += 1
                return
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    if first and max_tokens < 50:
                        self.first_s.append(time.monotonic() - begin)
                    first = False
                    self.tokens += max_tokens >= 50

    async def run(self, chat: str, batch: str | None, streams: int, every: float) -> dict[str, float]:
        async def batches(number: int) -> None:
            while True:
                await self.stream(batch or "", number, 300)

        tasks = [asyncio.ensure_future(batches(n)) for n in range(streams if batch else 0)]
        await asyncio.sleep(5 if tasks else 0)  # until the engine is full
        self.tokens, begin = 0, time.monotonic()
        chats = []
        while time.monotonic() - begin < self.seconds:
            chats.append(asyncio.ensure_future(self.stream(chat, len(chats), 8)))
            await asyncio.sleep(every)
        tokens, took = self.tokens, time.monotonic() - begin
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.gather(*chats, return_exceptions=True), 60)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(2)  # the engine lets go of what was cancelled
        return {
            "chats": len(chats),
            "chats_answered": len(self.first_s),
            "failed": self.failed,
            "chat_first_token_p50_s": round(percentile(self.first_s, 0.5), 3),
            "chat_first_token_p95_s": round(percentile(self.first_s, 0.95), 3),
            "batch_tokens_per_s": round(tokens / took, 1),
        }


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {Path(args.key_file).read_text().strip()}"} if args.key_file else {}
    timeout = aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as client:

        def load(url: str, seconds: float) -> Load:
            return Load(client, url, headers, seconds)

        for _n in range(3):
            await load(args.gateway, 1).stream(args.model, 0, 8)  # warm
        alone = await load(args.gateway, args.seconds / 2).run(args.model, None, 0, args.every)
        direct = await load(args.direct, args.seconds).run(args.model, args.model, args.streams, args.every)
        lanes = await load(args.gateway, args.seconds).run(args.model, f"{args.model}-batch", args.streams, args.every)
    return {
        "alone": alone,
        "direct": direct,
        "lanes": lanes,
        "times_unloaded": round(lanes["chat_first_token_p95_s"] / alone["chat_first_token_p95_s"], 2),
        "times_better_than_direct": round(direct["chat_first_token_p95_s"] / lanes["chat_first_token_p95_s"], 2),
        "batch_share_of_direct": round(lanes["batch_tokens_per_s"] / direct["batch_tokens_per_s"], 3),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--direct", default="http://127.0.0.1:8000")
    parser.add_argument("--gateway", default="http://127.0.0.1:8080")
    parser.add_argument("--model", required=True)
    parser.add_argument("--key-file")
    parser.add_argument("--seconds", type=float, default=40)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--every", type=float, default=1.0)
    found = asyncio.run(measure(parser.parse_args()))
    print(json.dumps(found, indent=1))
    good = (
        found["times_unloaded"] <= 2
        and found["times_better_than_direct"] >= 5
        and found["batch_share_of_direct"] >= 0.85
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
