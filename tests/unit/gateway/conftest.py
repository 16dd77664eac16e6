"""The gateway in this process, between a client and a stub engine that records what reaches it."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from stub_engine import StubEngine

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "roles/gateway/files"))

from gateway.server import Gateway, Server
from gateway.settings import Keys, LaneSettings, Settings

# The lanes of seed "GLM-5.3-Flash on 2× NVIDIA DGX Spark": a fast answer at low effort, heavy work at high effort.
LANES: dict[str, dict[str, Any]] = {
    "chat": {"aliases": ["glm"], "forced": {"priority": 0, "reasoning_effort": "low"}, "max_concurrent": 6},
    "batch": {
        "aliases": ["glm-batch"],
        "forced": {"priority": 10, "reasoning_effort": "high"},
        "defaults": {"max_tokens": 4096},
        "max_concurrent": 2,
        "max_queued": 4,
    },
}
SECRETS = {"alice": "sk-alice-Zq81", "bob": "sk-bob-77ab"}
KEYS = [
    {"name": "alice", "sha256": hashlib.sha256(SECRETS["alice"].encode()).hexdigest()},
    {
        "name": "bob",
        "sha256": hashlib.sha256(SECRETS["bob"].encode()).hexdigest(),
        "lanes": ["chat"],
        "max_concurrent": 2,
    },
]


@dataclass
class Setup:
    engine: StubEngine
    gateway: Gateway
    client: aiohttp.ClientSession
    port: int
    folder: Path
    engine_port: int
    tasks: list[asyncio.Task[Any]] = field(default_factory=list)

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}{path}"

    async def ask(
        self, body: Any, path: str = "/v1/chat/completions", key: str | None = "alice", **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        given = {"Content-Type": "application/json", **headers}
        if key is not None:
            given["Authorization"] = f"Bearer {SECRETS.get(key, key)}"
        async with self.client.post(self.url(path), data=data, headers=given) as answer:
            return answer.status, {k.lower(): v for k, v in answer.headers.items()}, await answer.read()

    async def raw(self, request: bytes, to_end: bool = False) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(request)
        await writer.drain()
        with contextlib.suppress(asyncio.TimeoutError, ConnectionError):
            answer = await asyncio.wait_for(reader.read() if to_end else reader.read(65536), 5)
        writer.close()
        return answer

    def later(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        self.tasks.append(asyncio.ensure_future(coroutine))
        return self.tasks[-1]

    async def until(self, wanted: Callable[[], bool]) -> None:
        for _turn in range(500):
            if wanted():
                return
            await asyncio.sleep(0.01)
        raise AssertionError("it did not come to that in 5 s")


@contextlib.asynccontextmanager
async def between(folder: Path, **changes: Any) -> AsyncIterator[Setup]:
    engine = StubEngine()
    await engine.start()
    keys_file = folder / "keys.json"
    keys_file.write_text(json.dumps(changes.pop("keys", KEYS)), encoding="utf-8")
    keys_file.chmod(0o600)
    lanes = {name: LaneSettings(**lane) for name, lane in changes.pop("lanes", LANES).items()}
    settings = Settings(
        **{
            "upstream": f"http://127.0.0.1:{engine.port}",
            "model": "glm",
            "lanes": lanes,
            "keys_file": str(keys_file),
            "hold_file": str(folder / "hold"),
            "reason_file": str(folder / "watchdog.json"),
            **changes,
        }
    )
    gateway = Gateway(settings, Keys(settings))
    runner = web.ServerRunner(Server(gateway), shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
        setup = Setup(engine, gateway, client, runner.addresses[0][1], folder, engine.port)
        try:
            yield setup
        finally:
            for task in setup.tasks:
                task.cancel()
            await asyncio.gather(*setup.tasks, return_exceptions=True)
            await runner.cleanup()
            await gateway.close()
            await engine.stop()


Scenario = Callable[[Setup], Coroutine[Any, Any, None]]


@pytest.fixture
def play(tmp_path: Path) -> Callable[..., None]:
    """Run a scenario against a gateway with these settings."""

    def run(scenario: Scenario, **changes: Any) -> None:
        async def whole() -> None:
            async with between(tmp_path, **changes) as setup:
                await asyncio.wait_for(scenario(setup), 30)

        asyncio.run(whole())

    return run
