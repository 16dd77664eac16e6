# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The HTTP side: who asks, which lane, a place in its queue, then bytes from the engine to the client as they come."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import time
from typing import Any

import aiohttp
from aiohttp import web
from aiohttp.web_protocol import RequestHandler
from multidict import CIMultiDict

from .body import ROUTES, Body, Rules, check, leaves, sequences
from .metrics import Metrics
from .queue import Lane, Queue
from .refusal import Refusal
from .settings import ANYBODY, Key, Keys, Settings, held, reason

log = logging.getLogger("gateway")

MIB = 1 << 20
# All else stays here: X-Vllm-Priority, X-Data-Parallel-Rank, keys, cookies, and whatever an engine learns to read tomorrow.
TO_ENGINE = ("Accept", "Content-Type", "User-Agent", "X-Request-Id", "Traceparent", "Tracestate")
# Of this connection only, or written anew.
NOT_TO_CLIENT = frozenset(
    (
        *(
            "connection",
            "keep-alive",
            "proxy-authenticate",
            "proxy-authorization",
            "te",
            "trailer",
            "transfer-encoding",
        ),
        *("upgrade", "content-length", "server", "date"),
    )
)
# The engine's server closes an idle connection after 5 s; one that it just closed would fail a request that is not sent twice.
REUSE_S = 2.0
TICK_S = 5.0


class ClientGone(Exception):
    """The client closed its connection while its answer was written."""


class WholeResponse(web.StreamResponse):
    """An answer whose length is known: its headers go out together with its body, in one system call."""

    _send_headers_immediately = False


class Watch:
    """Ends a request that takes too long as a whole, or whose client neither reads nor writes; remembers why."""

    def __init__(self, settings: Settings) -> None:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._total_s, self._stall_s = settings.total_s, settings.stall_s
        self._deadline = self._loop.time() + settings.total_s
        self.client_since: float | None = None
        self.why: Refusal | None = None
        self._timer = self._again()

    def _again(self) -> asyncio.TimerHandle:
        return self._loop.call_later(min(TICK_S, self._total_s, self._stall_s), self._look)

    def _look(self) -> None:
        now = self._loop.time()
        if now >= self._deadline:
            self.why = Refusal(504, "total_timeout", f"The request took longer than {self._total_s:g} s.")
        elif self.client_since is not None and now - self.client_since >= self._stall_s:
            self.why = Refusal(408, "client_stalled", f"The client moved no byte for {self._stall_s:g} s.")
        if self.why is None:
            self._timer = self._again()
        elif self._task is not None:
            self._task.cancel()

    def end(self) -> None:
        self._timer.cancel()


class Record:
    """What the access log and the metrics keep of one request. Never a prompt, a key, or other text of the client."""

    __slots__ = (
        "answer",
        "bytes_in",
        "bytes_out",
        "first_at",
        "key",
        "lane",
        "outcome",
        "route",
        "started",
        "status",
        "wait_s",
    )

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.route, self.key, self.lane, self.outcome, self.status = "-", "-", "none", "error", 0
        self.bytes_in = self.bytes_out = 0
        self.wait_s: float | None = None
        self.first_at: float | None = None
        self.answer: web.StreamResponse | None = None

    def line(self) -> str:
        words = [f"route={self.route} lane={self.lane} key={self.key} status={self.status} outcome={self.outcome}"]
        for name, value in (
            ("wait_ms", self.wait_s),
            ("first_byte_ms", self.first_at and self.first_at - self.started),
            ("total_ms", time.monotonic() - self.started),
        ):
            words.append(f"{name}={'-' if value is None else round(value * 1000)}")
        return " ".join([*words, f"bytes_in={self.bytes_in} bytes_out={self.bytes_out}"])


class Gateway:
    """Answers requests. One object for the life of the program; keys are replaced while it runs."""

    def __init__(self, settings: Settings, keys: Keys) -> None:
        self.settings, self.keys = settings, keys
        ruled = [path for lane in settings.lanes.values() for path in leaves(lane.forced)]
        self.rules = {name: Rules(lane.forced, lane.defaults, ruled) for name, lane in settings.lanes.items()}
        self.aliases = {alias: name for name, lane in settings.lanes.items() for alias in lane.aliases}
        self.queue = Queue(
            [Lane(name, lane.max_concurrent, lane.max_queued, lane.max_wait_s) for name, lane in settings.lanes.items()]
        )
        self.metrics = Metrics(self.queue)
        self.stopping = False
        self.buffered = 0
        self._ready: tuple[float, str | None] = (0.0, None)
        self._created = int(time.time())
        # As the engine's server has it: no limit of our own on connections, the lanes are the limit.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=REUSE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=settings.connect_s, sock_read=settings.idle_s),
            auto_decompress=False,
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    async def close(self) -> None:
        await self._session.close()

    # --- Routes ---

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        path, method = request.raw_path.partition("?")[0], request.method
        if path == "/healthz" and method == "GET":
            return self._json({"status": "ok", "in_flight": self.queue.running, "stopping": self.stopping})
        if path == "/readyz" and method == "GET":
            why = await self._why_not_ready()
            return self._json({"status": "ready" if why is None else why}, 200 if why is None else 503)
        record, watch = Record(), Watch(self.settings)
        try:
            return await self._answer(request, path, method, record, watch)
        except Refusal as refusal:
            return await self._refuse(request, record, refusal)
        except asyncio.CancelledError:
            if watch.why is None:
                record.outcome = "client_gone"
                raise
            return await self._refuse(request, record, watch.why)
        except ClientGone:
            record.outcome = "client_gone"
            raise ConnectionResetError from None
        finally:
            watch.end()
            self.metrics.outcomes.labels(record.lane, record.outcome).inc()
            log.info(record.line())

    async def _answer(
        self, request: web.BaseRequest, path: str, method: str, record: Record, watch: Watch
    ) -> web.StreamResponse:
        known = path in ("/v1/models", "/metrics") or path in self.settings.routes
        if known:
            record.route = path
        local = path == "/metrics" and request.remote in ("127.0.0.1", "::1")
        key = ANYBODY if local else self.keys.find(request.headers.getall("Authorization", []))
        if key is None:
            raise Refusal(
                401, "invalid_api_key", "The key is missing or not known here. Send Authorization: Bearer and your key."
            )
        record.key = key.name
        if not known:
            raise Refusal(404, "not_found", "There is no such path here.")
        wanted = "GET" if path in ("/v1/models", "/metrics") else "POST"
        if method != wanted:
            raise Refusal(405, "method_not_allowed", f"This path takes {wanted}.")
        if path == "/metrics":
            record.outcome, record.status = "ok", 200
            return self._respond(self.metrics.page(), "text/plain; version=0.0.4; charset=utf-8")
        if path == "/v1/models":
            record.outcome, record.status = "ok", 200
            return self._json(self._models(key))
        return await self._generate(request, path, key, record, watch)

    def _models(self, key: Key) -> dict[str, Any]:
        more = {} if self.settings.max_model_len is None else {"max_model_len": self.settings.max_model_len}
        return {
            "object": "list",
            "data": [
                {"id": alias, "object": "model", "created": self._created, "owned_by": "gb10.fleet", **more}
                for alias, lane in self.aliases.items()
                if key.lanes is None or lane in key.lanes
            ],
        }

    async def _why_not_ready(self) -> str | None:
        why = self._held()
        if why is not None:
            return why
        at, last = self._ready
        if time.monotonic() - at >= 1:
            try:
                timeout = aiohttp.ClientTimeout(total=2)
                async with self._session.get(f"{self.settings.upstream}/health", timeout=timeout) as answer:
                    last = None if answer.status == 200 else f"the engine's /health answers {answer.status}"
            except (aiohttp.ClientError, asyncio.TimeoutError):
                last = self._away()
            self._ready = (time.monotonic(), last)
        return last

    # --- Generating ---

    async def _generate(
        self, request: web.BaseRequest, path: str, key: Key, record: Record, watch: Watch
    ) -> web.StreamResponse:
        self._refuse_when_held()
        route = ROUTES[path]
        raw = await self._read(request, watch)
        record.bytes_in = len(raw)
        self.buffered += len(raw)
        try:
            body = Body(raw)
            alias = check(body, route)
            lane_name = self.aliases.get(alias)
            if lane_name is None:
                raise Refusal(
                    404,
                    "model_not_found",
                    f"There is no model {alias[:100]!r} here. /v1/models lists those that there are.",
                )
            if key.lanes is not None and lane_name not in key.lanes:
                raise Refusal(403, "lane_not_allowed", f"The key {key.name} may not use the model {alias}.")
            record.lane = lane_name
            weight = sequences(body, route)
            sent = self.rules[lane_name].apply(body, route, self.settings.model)
            del raw, body
            lane = self.queue.lanes[lane_name]
            asked = time.monotonic()
            ticket = await self.queue.enter(
                lane, key.name, key.max_concurrent, min(weight, lane.capacity) if path == "/v1/embeddings" else weight
            )
            granted = time.monotonic()
            try:
                record.wait_s = granted - asked
                self.metrics.wait.labels(lane_name).observe(record.wait_s)
                if record.wait_s > 0.001:  # it waited, and meanwhile things may have changed
                    self._refuse_when_held()
                return await self._relay(request, path, sent, record, watch)
            finally:
                self.queue.leave(ticket, time.monotonic() - granted)
        finally:
            self.buffered -= record.bytes_in

    async def _read(self, request: web.BaseRequest, watch: Watch) -> bytes:
        limit = self.settings.body_mib * MIB
        too_large = Refusal(413, "body_too_large", f"The body is larger than {self.settings.body_mib} MiB.")
        if request.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise Refusal(415, "encoding_refused", "Compressed bodies are not taken. Send the body as it is.")
        length = request.content_length or 0
        if length > limit:
            raise too_large
        if self.buffered + length > self.settings.buffer_mib * MIB:
            raise self._unavailable(
                "bodies_full", f"The gateway holds {self.settings.buffer_mib} MiB of waiting requests."
            )
        if request.headers.get("Expect", "").lower() == "100-continue":
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            request.writer.output_size = 0
        parts, size = [], 0
        watch.client_since = time.monotonic()
        async for chunk in request.content.iter_any():
            watch.client_since = time.monotonic()
            size += len(chunk)
            if size > limit:
                raise too_large
            parts.append(chunk)
        watch.client_since = None
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def _relay(
        self, request: web.BaseRequest, path: str, sent: bytes, record: Record, watch: Watch
    ) -> web.StreamResponse:
        headers = {name: request.headers[name] for name in TO_ENGINE if name in request.headers}
        try:
            async with self._session.post(
                self.settings.upstream + path,
                data=io.BytesIO(sent) if len(sent) > MIB else sent,
                headers=headers,
                allow_redirects=False,
            ) as answer:
                response = self._start(answer, record)
                record.answer = response
                try:
                    await response.prepare(request)
                except ConnectionError:
                    raise ClientGone from None
                async for chunk in answer.content.iter_any():
                    if record.first_at is None:
                        record.first_at = time.monotonic()
                        self.metrics.ttft.labels(record.lane).observe(record.first_at - record.started)
                    record.bytes_out += len(chunk)
                    await self._give(response, chunk, watch)
                await self._give(response, b"", watch)
                record.outcome = "ok" if answer.status < 400 else f"engine_{answer.status // 100}xx"
                return response
        except aiohttp.SocketTimeoutError:
            raise Refusal(504, "engine_silent", f"The engine sent no byte for {self.settings.idle_s:g} s.") from None
        except aiohttp.ClientConnectorError:
            raise self._unavailable("engine_away", f"The engine does not answer: {self._away()}.") from None
        except aiohttp.ClientError:
            raise self._unavailable("engine_broke_off", f"The engine broke off this request: {self._away()}.") from None

    @staticmethod
    async def _give(response: web.StreamResponse, chunk: bytes, watch: Watch) -> None:
        """A client that does not read holds this up, and with it the engine's stream: nothing piles up here."""
        watch.client_since = time.monotonic()
        try:
            await (response.write(chunk) if chunk else response.write_eof())
        except ConnectionError:
            raise ClientGone from None
        watch.client_since = None

    def _start(self, answer: aiohttp.ClientResponse, record: Record) -> web.StreamResponse:
        named = {word.strip().lower() for word in answer.headers.get("Connection", "").split(",")}
        headers: CIMultiDict[str] = CIMultiDict(
            (name, value) for name, value in answer.headers.items() if name.lower() not in NOT_TO_CLIENT | named
        )
        headers["Server"] = "gb10-gateway"
        headers["X-Gateway-Lane"] = record.lane
        headers["X-Gateway-Wait-Ms"] = str(round((record.wait_s or 0) * 1000))
        kind = web.StreamResponse if answer.content_length is None else WholeResponse
        response = kind(status=answer.status, reason=answer.reason, headers=headers)
        record.status = answer.status
        if answer.content_length is not None:
            response.content_length = answer.content_length
        return response

    # --- Refusing ---

    def _held(self) -> str | None:
        return "the gateway is stopping" if self.stopping else held(self.settings.hold_file)

    def _away(self) -> str:
        return reason(self.settings.reason_file) or "it is starting, restarting or down"

    def _unavailable(self, code: str, sentence: str) -> Refusal:
        return Refusal(503, code, sentence, self.settings.retry_after_s)

    def _refuse_when_held(self) -> None:
        why = self._held()
        if why is not None:
            raise self._unavailable("held", f"New requests are held back: {why}.")

    def stop(self) -> None:
        """From here on new requests are refused, and those that wait as well."""
        self.stopping = True
        self.queue.close(self._unavailable("held", "New requests are held back: the gateway is stopping."))

    async def _refuse(self, request: web.BaseRequest, record: Record, refusal: Refusal) -> web.StreamResponse:
        record.outcome = refusal.code
        started = record.answer
        if started is None or not started.prepared:
            record.status = refusal.status
            response = self._respond(refusal.body(), "application/json", refusal.status, refusal.headers())
            if not request.content.is_eof():
                response.force_close()  # the rest of a body is not worth reading
            return response
        # Too late for a status: an event that OpenAI's clients raise, then an end that no client takes for a good one.
        if started.content_type == "text/event-stream" and refusal.code != "client_stalled":
            await started.write(b"data: " + refusal.body() + b"\n\n")
        if request.transport is not None and refusal.code == "client_stalled":
            request.transport.abort()
        elif request.transport is not None:
            request.transport.close()
        return started

    def _json(self, content: Any, status: int = 200) -> web.Response:
        return self._respond(json.dumps(content).encode(), "application/json", status)

    @staticmethod
    def _respond(body: bytes, kind: str, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
        more = {"Content-Type": kind, "Server": "gb10-gateway", **(headers or {})}
        return web.Response(body=body, status=status, headers=more)


class Connection(RequestHandler):
    """aiohttp's, whose own refusals (a broken header, two lengths) take our shape."""

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        if request.writer.output_size > 0:
            raise ConnectionError("an answer is under way")
        if status >= 500:
            log.error("A request failed inside the gateway: %r", exc)
        refusal = Refusal(
            status, "bad_request" if status < 500 else "gateway_error", _PARSER_SAYS.get(status, "The gateway failed.")
        )
        response = web.Response(
            body=refusal.body(), status=status, headers={**refusal.headers(), "Server": "gb10-gateway"}
        )
        response.force_close()
        return response


_PARSER_SAYS = {
    400: "The request is not well-formed HTTP.",
    413: "The request is too large.",
    431: "The headers are too large.",
}


class Server(web.Server):
    """aiohttp's server with connections of ours. A client that goes away ends its handler, and so the engine's work for it."""

    def __init__(self, gateway: Gateway) -> None:
        super().__init__(gateway.handle, handler_cancellation=True)

    def __call__(self) -> RequestHandler:
        return Connection(
            self,
            loop=self._loop,
            access_log=None,  # type: ignore[arg-type]
            auto_decompress=False,
            keepalive_timeout=75,
            lingering_time=2,
            tcp_keepalive=True,
        )
