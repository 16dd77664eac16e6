"""What the gateway adds to a request, and what it takes to hold many: one stub engine asked directly and through it, in turn.

    python benchmarks/gateway/bench.py            about 40 s, loopback only, needs aiohttp and prometheus_client

Direct and gateway take turns within each measurement, so that what else the machine does hits both. Ends with 1 when a limit is
missed. Client, engine and gateway share the machine's cores: the quieter it is, the more the figures say about the gateway.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import aiohttp

ROOT = Path(__file__).resolve().parents[2]
LIMITS = {"added_p50_ms": 1.0, "streams": 500, "rss_mib": 60.0}


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@contextlib.contextmanager
def program(argv: list[str], port: int, **env: str) -> Iterator[int]:
    process = subprocess.Popen(argv, env={**os.environ, **env}, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        for _turn in range(200):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 0.2):
                break
            time.sleep(0.05)
        yield process.pid
    finally:
        process.terminate()
        process.wait(10)


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


async def ask(client: aiohttp.ClientSession, url: str, stream: bool) -> tuple[float, float]:
    """(seconds to the first byte of the body, seconds to the last)."""
    body = {"model": "bench", "stream": stream, "messages": [{"role": "user", "content": "x" * 2000}]}
    begin = time.perf_counter()
    first = None
    async with client.post(f"{url}/v1/chat/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        async for _chunk in answer.content.iter_any():
            first = first or time.perf_counter() - begin
    assert first is not None
    return first, time.perf_counter() - begin


async def one_stream(client: aiohttp.ClientSession, urls: dict[str, str], count: int) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in urls}
    for number in range(count):
        for name, url in urls.items():
            took = (await ask(client, url, stream=False))[1]
            if number >= 20:
                times[name].append(took * 1000)
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {
        **{f"{name}_p50_ms": value for name, value in medians.items()},
        "added_p50_ms": medians["gateway"] - medians["direct"],
    }


async def many(client: aiohttp.ClientSession, urls: dict[str, str], streams: int, rounds: int) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in urls}

    # A stream takes 0.4 s: they come spread over that time, as people do, and stay 16 for three streams each.
    chance = random.Random(16)

    async def worker(name: str, url: str) -> None:
        await asyncio.sleep(chance.uniform(0, 0.4))
        for _turn in range(3):
            times[name].append((await ask(client, url, stream=True))[0] * 1000)

    for _turn in range(rounds):
        for name, url in urls.items():
            await asyncio.gather(*(worker(name, url) for _n in range(streams)))
    return {
        f"{name}_ttft_{label}_ms": percentile(values, share)
        for name, values in times.items()
        for label, share in (("p50", 0.5), ("p99", 0.99))
    }


async def open_streams(client: aiohttp.ClientSession, url: str, pid: int, streams: int) -> dict[str, float]:
    """All open at the same time (the engine takes 10 s a stream), none lost, and what the gateway holds then."""
    status = Path(f"/proc/{pid}/status")
    peak = {"rss": 0.0, "in_flight": 0.0}

    async def watch() -> None:
        while True:
            await asyncio.sleep(0.5)
            lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
            peak["rss"] = max(peak["rss"], int(lines["VmRSS"].split()[0]) / 1024)
            async with client.get(f"{url}/healthz") as answer:
                peak["in_flight"] = max(peak["in_flight"], (await answer.json())["in_flight"])

    watcher = asyncio.ensure_future(watch())
    done = await asyncio.gather(*(ask(client, url, stream=True) for _n in range(streams)), return_exceptions=True)
    watcher.cancel()
    lost = sum(isinstance(result, BaseException) for result in done)
    return {"open_streams": peak["in_flight"], "lost": lost, "rss_mib": peak["rss"]}


async def measure(args: argparse.Namespace, folder: Path) -> dict[str, float]:
    files = {"PYTHONPATH": str(ROOT / "roles/gateway/files"), "PYTHONDONTWRITEBYTECODE": "1"}
    prompt_at, engine_at, slow_at, *gateways_at = (free_port() for _n in range(6))
    stub = str(ROOT / "tests/utils/stub_engine.py")
    commands = []
    for at, upstream in zip(gateways_at, (prompt_at, engine_at, slow_at), strict=True):
        config = {
            "upstream": f"http://127.0.0.1:{upstream}",
            "model": "bench",
            "port": at,
            "lanes": {"chat": {"aliases": ["bench"], "forced": {"priority": 0}, "max_concurrent": 1000}},
        }
        path = folder / f"{at}.json"
        path.write_text(json.dumps(config), encoding="utf-8")
        commands.append([sys.executable, "-m", "gateway", "--config", str(path)])
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2)) as client:

        @contextlib.contextmanager
        def pair(number: int, engine_at: int, chunks: str, delay_s: str) -> Iterator[tuple[dict[str, str], int]]:
            at = gateways_at[number]
            with (
                program([sys.executable, stub, str(engine_at), chunks, delay_s], engine_at),
                program(commands[number], at, **files) as pid,
            ):
                yield {"direct": f"http://127.0.0.1:{engine_at}", "gateway": f"http://127.0.0.1:{at}"}, pid

        with pair(0, prompt_at, "1", "0") as (urls, _pid):
            found = await one_stream(client, urls, args.requests)
        with pair(1, engine_at, "20", "0.02") as (urls, _pid):
            found |= await many(client, urls, 16, args.rounds)
        with pair(2, slow_at, "10", "1") as (urls, pid):
            found |= await open_streams(client, urls["gateway"], pid, args.streams)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--streams", type=int, default=500)
    args = parser.parse_args()
    gc.freeze()
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(measure(args, Path(folder)))
    allowed = found["direct_ttft_p99_ms"] * 1.1 + 5
    checks = [
        ("added p50, 1 request at a time", found["added_p50_ms"], LIMITS["added_p50_ms"], "ms"),
        ("p99 to first token, 16 streams", found["gateway_ttft_p99_ms"], allowed, "ms"),
        ("memory with all streams open", found["rss_mib"], LIMITS["rss_mib"], "MiB"),
        ("streams lost", found["lost"], 0, ""),
    ]
    for name, value in found.items():
        print(f"{name:24} {value:8.2f}")
    for name, value, limit, unit in checks:
        print(f"{'ok  ' if value <= limit else 'MISS'} {name}: {value:.2f} {unit} (limit {limit:.2f})")
    return (
        0
        if all(value <= limit for _name, value, limit, _unit in checks) and found["open_streams"] >= args.streams
        else 1
    )


if __name__ == "__main__":
    sys.exit(main())
