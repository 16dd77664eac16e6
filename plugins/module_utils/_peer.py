# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Copying a checkpoint from rank to rank over the fabric: a file server that lives as long as the job, and its client.

Plain HTTP with ranges and sendfile, since ssh costs four times the CPU of the wire's speed here (benchmarks/fanout). The bytes are
not encrypted on the link between the nodes; a one-time token keeps others out, and every file is hashed where it arrives.

    GET  /item/<repo>          state of the source, its manifest (?manifest=1) and the paths that it has verified so far
    GET  /file/<repo>/<path>   one range of one verified file
    POST /done/<client>        the client has everything
"""

from __future__ import annotations

import contextlib
import hmac
import http.client
import json
import os
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from ansible_collections.gb10.fleet.plugins.module_utils._checkpoint import (
    CheckpointError,
    Manifest,
    gib,
    manifest_from_json,
)

WORKING, COMPLETE, FAILED = "working", "complete", "failed"
_SEND = 1 << 24


@dataclass
class Offer:
    """One checkpoint as the server offers it: verified files only."""

    manifest: Manifest
    locate: Callable[[str], Path]
    verified: set[str] = field(default_factory=set)


class PeerServer(ThreadingHTTPServer):
    """Serves offers to the clients that copy from this node. Use as a context manager."""

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 64

    def __init__(self, address: str, port: int, token: str, clients: Iterable[str]) -> None:
        self.offers: dict[str, Offer] = {}
        self.state, self.message = WORKING, ""
        self.token = token
        self.waiting_for = set(clients)
        self.told: set[str] = set()
        self.guard = threading.Lock()
        self.heard_at = time.monotonic()
        self.heard = False
        try:
            super().__init__((address, port), _Handler)
        except OSError as exc:
            raise CheckpointError(
                f"The other ranks cannot copy from here: {address} port {port} cannot be listened on ({exc.strerror}). "
                "Set checkpoint_peer_port to a free port, and fabric_address to an address of this node."
            ) from exc

    def __enter__(self) -> PeerServer:
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True).start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self.shutdown()
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away in the middle is its own affair: it comes back and continues."""

    def offer(self, repo: str, offer: Offer) -> None:
        self.offers[repo] = offer

    def wait(self, idle_s: float, first_s: float) -> list[str]:
        """Until every client has everything. Returns those that were given up: silent for ``idle_s`` (``first_s``: never seen)."""
        self.state = COMPLETE
        while True:
            with self.guard:
                left = sorted(self.waiting_for)
                quiet = time.monotonic() - self.heard_at
                limit = idle_s if self.heard else first_s
            if not left or quiet > limit:
                return left
            time.sleep(0.05)

    def fail(self, message: str, wait_s: float) -> None:
        """Tell the clients why there will be no more; wait until each has heard it."""
        self.message, self.state = message, FAILED
        deadline = time.monotonic() + wait_s
        while self.waiting_for - self.told and time.monotonic() < deadline:
            time.sleep(0.05)


class _Handler(BaseHTTPRequestHandler):
    server: PeerServer
    protocol_version = "HTTP/1.1"
    server_version = "gb10-peer/1"
    disable_nagle_algorithm = True
    wbufsize = -1

    def setup(self) -> None:
        """A client that stops reading holds a thread for two minutes. (A Python timeout would make sendfile return early.)"""
        super().setup()
        limit = struct.pack("ll", 120, 0)
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the job's progress says it all."""

    def _json(self, code: int, value: Any) -> None:
        body = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _known(self) -> bool:
        given = (self.headers.get("Authorization") or "").encode()
        if not hmac.compare_digest(given, f"Bearer {self.server.token}".encode()):
            self._json(403, {"error": "wrong token"})
            return False
        with self.server.guard:
            self.server.heard, self.server.heard_at = True, time.monotonic()
        return True

    def do_POST(self) -> None:
        if self._known():
            with self.server.guard:
                self.server.waiting_for.discard(unquote(self.path.removeprefix("/done/")))
            self._json(200, {})

    def do_GET(self) -> None:
        if not self._known():
            return
        url = urlsplit(self.path)
        kind, dummy, rest = url.path.lstrip("/").partition("/")
        if kind == "item":
            return self._item(unquote(rest), "manifest=1" in url.query)
        repo, dummy, path = rest.partition("/")
        offer = self.server.offers.get(unquote(repo))
        path = unquote(path)
        if kind != "file" or offer is None or path not in offer.verified:
            return self._json(404, {"error": "not here (yet)"})
        return self._file(offer, path)

    def _item(self, repo: str, with_manifest: bool) -> None:
        offer = self.server.offers.get(repo)
        answer: dict[str, Any] = {
            "state": self.server.state,
            "message": self.server.message,
            "ready": [],
            "manifest": None,
        }
        if offer is not None:
            answer["ready"] = sorted(offer.verified)
            answer["manifest"] = offer.manifest.to_json() if with_manifest else None
        self._json(200, answer)
        if answer["state"] == FAILED:
            self.server.told.add(unquote(self.headers.get("X-Client") or ""))

    def _file(self, offer: Offer, path: str) -> None:
        size = offer.manifest.files[path].size
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
        start = min(int(asked[1]), size) if asked else 0
        with offer.locate(path).open("rb") as stream:
            self.send_response(206)
            self.send_header("Content-Length", str(size - start))
            self.end_headers()
            self.wfile.flush()
            descriptor, offset = stream.fileno(), start
            while offset < size:
                count = os.sendfile(self.connection.fileno(), descriptor, offset, min(_SEND, size - offset))
                if count == 0:
                    self.close_connection = True
                    return
                offset += count
                self.server.heard_at = time.monotonic()
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


class PeerClient:
    """The rank that this node copies from."""

    def __init__(
        self, name: str, address: str, port: int, token: str, me: str, patience_s: float = 60, first_s: float = 120
    ) -> None:
        self.name, self.address, self.port = name, address, port
        self.headers = {"Authorization": f"Bearer {token}", "X-Client": quote(me)}
        self.me = me
        self.patience_s, self.first_s = patience_s, first_s
        self.seen_at: float | None = None
        self.begun_at = time.monotonic()

    def connect(self, timeout_s: float = 30) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection(self.address, self.port, timeout=timeout_s)
        connection.connect()
        return connection

    def _silent(self, error: BaseException) -> None:
        """Raise once the source was silent for too long."""
        since, limit = (self.begun_at, self.first_s) if self.seen_at is None else (self.seen_at, self.patience_s)
        if time.monotonic() - since > limit:
            text = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise CheckpointError(
                f"{self.name}, which this node copies from, does not answer on "
                f"{self.address} port {self.port} ({text}; {limit:.0f} s "
                "waited). Look at its own error, or open that port between the ranks; what has arrived is kept."
            ) from None

    def ask(self, repo: str, manifest: bool = False) -> Mapping[str, Any] | None:
        """What the source says of a checkpoint; None when it could not be asked this time."""
        try:
            with contextlib.closing(self.connect(10)) as connection:
                connection.request(
                    "GET", f"/item/{quote(repo, safe='')}" + ("?manifest=1" if manifest else ""), headers=self.headers
                )
                answer = connection.getresponse()
                body = answer.read()
        except (OSError, http.client.HTTPException) as exc:
            self._silent(exc)
            return None
        if answer.status != 200:
            raise CheckpointError(
                f"{self.name} refuses to be copied from ({answer.status}): another run fetches there, or something "
                f"else listens on {self.address} port {self.port}."
            )
        self.seen_at = time.monotonic()
        data: dict[str, Any] = json.loads(body)
        if data["state"] == FAILED:
            raise CheckpointError(f"{self.name}, which this node copies from, gave up: {data['message']}")
        return data

    def manifest(self, repo: str) -> Manifest:
        """The manifest of the source, as soon as it has one."""
        while True:
            data = self.ask(repo, manifest=True)
            if data and data["manifest"]:
                return manifest_from_json(data["manifest"])
            time.sleep(0.1 if time.monotonic() - self.begun_at < 5 else 0.5)

    def done(self) -> None:
        with (
            contextlib.suppress(OSError, http.client.HTTPException),
            contextlib.closing(self.connect(10)) as connection,
        ):
            connection.request("POST", f"/done/{quote(self.me, safe='')}", headers=self.headers)
            connection.getresponse().read()

    def describe(self, size: int) -> str:
        return f"{gib(size)} from {self.name}"
