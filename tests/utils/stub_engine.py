"""A stand-in for an engine's HTTP side, for the gateway's tests and benchmark: it records what it gets and answers at once.

``python stub_engine.py PORT [CHUNKS] [DELAY_S]`` runs it alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass
class Call:
    path: str
    headers: list[tuple[str, str]]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class StubEngine:
    """Streams ``chunks`` events ``delay_s`` apart, each padded by ``big`` bytes. ``gate`` holds every answer until it is set."""

    chunks: int = 3
    delay_s: float = 0.0
    big: int = 0
    status: int = 200
    record: bool = True
    calls: list[Call] = field(default_factory=list)
    gate: asyncio.Event | None = None
    running: int = 0
    peak: int = 0
    cancelled: int = 0
    sent: int = 0
    runner: Any = None
    port: int = 0

    async def start(self, port: int = 0) -> None:
        server = web.Server(self.handle, handler_cancellation=True, access_log=None)
        self.runner = web.ServerRunner(server, shutdown_timeout=0.1)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", port, reuse_address=True, backlog=1024).start()
        self.port = self.runner.addresses[0][1]

    async def stop(self) -> None:
        await self.runner.cleanup()

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.raw_path == "/health":
            return web.Response()
        request._client_max_size = 0  # no limit here
        body = await request.read()
        if self.record:
            self.calls.append(Call(request.raw_path, list(request.headers.items()), body))
        self.running += 1
        self.peak = max(self.peak, self.running)
        try:
            return await self._answer(request, json.loads(body))
        except (asyncio.CancelledError, ConnectionError):
            self.cancelled += 1
            raise
        finally:
            self.running -= 1

    async def _answer(self, request: web.BaseRequest, body: dict[str, Any]) -> web.StreamResponse:
        if self.gate is not None:
            await self.gate.wait()
        if self.status != 200:
            return web.json_response({"error": {"message": "from the engine"}}, status=self.status)
        if not body.get("stream"):
            await asyncio.sleep(self.delay_s)
            return web.Response(body=b'{"object": "chat.completion",  "choices": []}', content_type="application/json")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        for number in range(self.chunks):
            if number or self.delay_s:
                await asyncio.sleep(self.delay_s)
            event = b'data: {"choices":[{"index":0,"delta":{"content":"%d"}}]}\n\n' % number + b" " * self.big
            await response.write(event)
            self.sent += len(event)
        await response.write(b"data: [DONE]\n\n")
        return response


async def _alone(port: int, chunks: int, delay_s: float) -> None:
    engine = StubEngine(chunks=chunks, delay_s=delay_s, record=False)
    await engine.start(port)
    print("ready", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(
            _alone(
                int(sys.argv[1]),
                int(sys.argv[2]) if len(sys.argv) > 2 else 20,
                float(sys.argv[3]) if len(sys.argv) > 3 else 0.02,
            )
        )
