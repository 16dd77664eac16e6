"""A Docker engine and an OpenAI-compatible endpoint, each a few lines behind a real socket."""

from __future__ import annotations

import contextlib
import http.server
import json
import socketserver
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest


class FakeDocker:
    """What the socket answers: one container, its log messages (RFC 3339 time, text), its processes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.inspect: dict[str, Any] | None = None
        self.messages: list[tuple[str, str]] = []
        self.processes: list[list[str]] = [["10", "Ss", "/sbin/docker-init -- vllm"], ["17", "Sl", "VLLM::Worker_TP1"]]
        self.cpu_s = 1.0
        self.asked: list[str] = []

    def container(self, **over: Any) -> dict[str, Any]:
        state = {"Running": True, "Status": "running", "StartedAt": "2026-11-29T12:48:18.5Z", "ExitCode": 0}
        words = {"Entrypoint": ["vllm"], "Cmd": ["serve", "/m"], "Env": []}
        state.update(over.pop("State", {}))
        self.inspect = {
            "Id": "c0ffee", "Image": "sha256:8c1f", "RestartCount": 0, "LogPath": "", "State": state,
            "Config": {"Image": "vllm:1", "Labels": {"gb10.fleet.spec": "abc"}, **words},
            "HostConfig": {"LogConfig": {"Type": "json-file"}, "Init": True},
            **over,
        }  # fmt: skip
        return self.inspect

    def answer(self, target: str) -> tuple[int, bytes]:
        parts = urlsplit(target)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        self.asked.append(target)
        if self.inspect is None:
            return 404, b'{"message": "No such container: x"}'
        if parts.path.endswith("/json"):
            return 200, json.dumps(self.inspect).encode()
        if parts.path.endswith("/top"):
            return 200, json.dumps({"Titles": ["PID", "STAT", "COMMAND"], "Processes": self.processes}).encode()
        if parts.path.endswith("/stats"):
            return 200, json.dumps(
                {"cpu_stats": {"cpu_usage": {"total_usage": int(self.cpu_s * 1e9)}}, "blkio_stats": {}}
            ).encode()
        return 200, self.log(query)

    def log(self, query: dict[str, str]) -> bytes:
        """As the engine does: from `since` on (seconds.nanoseconds, inclusive), and of those the last `tail`."""
        from ansible_collections.gb10.fleet.plugins.module_utils._docker_log import epoch

        wanted = self.messages[-int(query["tail"]) :] if "tail" in query else self.messages
        out = b""
        for stamp, text in wanted:
            if float(epoch(stamp)) >= float(query.get("since", 0)):
                body = f"{stamp} {text}\n".encode()
                out += b"\x01\0\0\0" + len(body).to_bytes(4, "big") + body
        return out


@pytest.fixture
def docker(tmp_path: Path) -> Iterator[FakeDocker]:
    fake = FakeDocker(tmp_path / "docker.sock")

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            target = self.rfile.readline().split()[1].decode()
            while self.rfile.readline().strip():
                pass
            status, body = fake.answer(target)
            self.wfile.write(f"HTTP/1.0 {status} X\r\nContent-Type: application/json\r\n\r\n".encode() + body)

    class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
        daemon_threads = True

    server = Server(str(fake.path), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    yield fake
    server.shutdown()
    server.server_close()


class FakeEngine:
    """An endpoint: how it answers can be changed at any time."""

    def __init__(self) -> None:
        self.models = ["tiny"]
        self.key: str | None = None
        self.words = ["Hello", " there", " you"]
        self.usage: dict[str, Any] = {"prompt_tokens": 9, "completion_tokens": 3}
        self.status = 200
        self.delay_s = 0.0
        self.field = "content"
        self.bodies: list[dict[str, Any]] = []
        self.url = ""
        self.hook: Callable[[], None] = lambda: None


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    fake = FakeEngine()
    released = threading.Event()

    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, *args: Any) -> None:
            pass

        def handle(self) -> None:
            with contextlib.suppress(ConnectionError):
                super().handle()

        def reply(self, status: int, content: Any) -> None:
            body = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def allowed(self) -> bool:
            if fake.key and self.headers.get("Authorization") != f"Bearer {fake.key}":
                self.reply(401, {"error": "Unauthorized"})
                return False
            return True

        def do_GET(self) -> None:
            if self.path == "/health":
                self.reply(200, {})
            elif self.allowed():
                self.reply(200, {"data": [{"id": name} for name in fake.models]})

        def do_POST(self) -> None:
            fake.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            fake.hook()
            if not self.allowed():
                return
            if fake.status != 200:
                self.reply(fake.status, {"error": {"message": "EngineCore encountered an issue.", "code": fake.status}})
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            for word in fake.words:
                released.wait(fake.delay_s)
                self.event({"choices": [{"delta": {fake.field: word}}]})
            self.event({"choices": [], "usage": fake.usage})
            self.wfile.write(b"data: [DONE]\n\n")

        def event(self, content: Any) -> None:
            self.wfile.write(b"data: " + json.dumps(content).encode() + b"\n\n")
            self.wfile.flush()

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    fake.url = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    yield fake
    released.set()
    server.shutdown()
    server.server_close()
