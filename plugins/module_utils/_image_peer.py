# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""An image from rank to rank: a registry of one image that lives as long as the job, and the tunnel of the rank that pulls from it.

The registry serves a ``docker save`` of the image, layers as they lie in it; layers that the other rank has are not sent again.
An engine pulls over plain HTTP from its own loopback address only, so the pulling rank forwards a loopback port to the fabric
address of the other; nothing of the engine's configuration is changed.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import json
import os
import re
import socket
import struct
import tarfile
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_CONFIG = "application/vnd.oci.image.config.v1+json"
_LAYER = "application/vnd.oci.image.layer.v1.tar"
_SEND = 1 << 24
USER = "rank"


@dataclass(frozen=True)
class Blob:
    """A part of the archive: where it begins, how long it is."""

    offset: int
    size: int


def media_type(start: bytes) -> str:
    """Layers in the archive of an engine with the containerd store are compressed."""
    if start[:2] == b"\x1f\x8b":
        return _LAYER + "+gzip"
    if start[:4] == b"\x28\xb5\x2f\xfd":
        return _LAYER + "+zstd"
    return _LAYER


class Archive:
    """A ``docker save`` of one image, as the blobs of a registry. The archive is never unpacked."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.blobs: dict[str, Blob] = {}
        with tarfile.open(path, "r:") as tar:
            members = {m.name: m for m in tar.getmembers()}
            listed = json.load(self._open(tar, members["manifest.json"]))[0]
            config = self._open(tar, members[listed["Config"]]).read()
            layers = []
            diff_ids = json.loads(config)["rootfs"]["diff_ids"]
            for name, diff_id in zip(listed["Layers"], diff_ids):  # noqa: B905 - Python 3.10, and both come from one image
                member = self._real(members, name)
                digest = "sha256:" + name.rsplit("/", 1)[1] if name.startswith("blobs/sha256/") else diff_id
                self.blobs[digest] = Blob(member.offset_data, member.size)
                kind = media_type(self._open(tar, member).read(4))
                layers.append({"mediaType": kind, "digest": digest, "size": member.size})
        self.config_digest = "sha256:" + hashlib.sha256(config).hexdigest()
        self.documents = {self.config_digest: config}
        manifest = {
            "schemaVersion": 2,
            "mediaType": _MANIFEST,
            "config": {"mediaType": _CONFIG, "digest": self.config_digest, "size": len(config)},
            "layers": layers,
        }
        self.manifest = json.dumps(manifest, sort_keys=True).encode()
        self.digest = "sha256:" + hashlib.sha256(self.manifest).hexdigest()

    @staticmethod
    def _open(tar: tarfile.TarFile, member: tarfile.TarInfo) -> Any:
        stream = tar.extractfile(member)
        if stream is None:
            raise ValueError(f"{member.name} is no file")
        return stream

    @staticmethod
    def _real(members: dict[str, tarfile.TarInfo], name: str) -> tarfile.TarInfo:
        """Older engines save a layer that two images share as a link."""
        member = members[name]
        while member.issym() or member.islnk():
            target = member.linkname
            if member.issym():
                target = os.path.normpath(os.path.join(os.path.dirname(member.name), target))  # noqa: PTH118, PTH120
            member = members[target]
        return member


class ImageRegistry(ThreadingHTTPServer):
    """Serves one archive to the ranks that wait for it. Use as a context manager."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, address: str, port: int, token: str, clients: Iterable[str]) -> None:
        self.archive: Archive | None = None
        self.failure = ""
        self.token = token
        self.waiting_for = set(clients)
        self.heard_at = time.monotonic()
        self.heard = False
        self.sent = 0
        super().__init__((address, port), _Handler)

    def __enter__(self) -> ImageRegistry:
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True).start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self.shutdown()
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away in the middle comes back."""

    def wait(self, idle_s: float, first_s: float) -> list[str]:
        """Until every client has the image. Returns those that fell silent."""
        while self.waiting_for:
            if time.monotonic() - self.heard_at > (idle_s if self.heard else first_s):
                break
            time.sleep(0.05)
        return sorted(self.waiting_for)


class _Handler(BaseHTTPRequestHandler):
    server: ImageRegistry
    protocol_version = "HTTP/1.1"
    server_version = "gb10-images/1"
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

    def _answer(self, code: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _known(self) -> bool:
        wanted = "Basic " + base64.b64encode(f"{USER}:{self.server.token}".encode()).decode()
        given = self.headers.get("Authorization") or ""
        if not hmac.compare_digest(given.encode(), wanted.encode()):
            self._answer(
                401,
                b"{}",
                {"WWW-Authenticate": 'Basic realm="rank"', "Docker-Distribution-Api-Version": "registry/2.0"},
            )
            return False
        self.server.heard, self.server.heard_at = True, time.monotonic()
        return True

    def do_POST(self) -> None:
        if self._known():
            self.server.waiting_for.discard(self.path.removeprefix("/done/"))
            self._answer(200, b"{}", {})

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        if not self._known():
            return None
        archive = self.server.archive
        if self.path == "/state":
            state = {
                "ready": archive is not None,
                "failure": self.server.failure,
                "digest": archive.digest if archive else None,
            }
            return self._answer(200, json.dumps(state).encode(), {"Content-Type": "application/json"})
        if self.path.rstrip("/") == "/v2":
            return self._answer(200, b"{}", {"Docker-Distribution-Api-Version": "registry/2.0"})
        found = re.fullmatch(r"/v2/[^?]+/(manifests|blobs)/([^/?]+)", self.path)
        if not found or archive is None:
            return self._answer(404, b"{}", {})
        if found[1] == "manifests":
            headers = {"Content-Type": _MANIFEST, "Docker-Content-Digest": archive.digest}
            return self._answer(200, archive.manifest, headers)
        if found[2] in archive.documents:
            return self._answer(200, archive.documents[found[2]], {"Content-Type": "application/octet-stream"})
        if found[2] in archive.blobs:
            return self._blob(archive, archive.blobs[found[2]])
        return self._answer(404, b"{}", {})

    def _blob(self, archive: Archive, blob: Blob) -> None:
        start = 0
        asked = re.fullmatch(r"bytes=(\d+)-.*", self.headers.get("Range") or "")
        if asked:
            start = min(int(asked[1]), blob.size)
        self.send_response(206 if asked else 200)
        if asked:
            self.send_header("Content-Range", f"bytes {start}-{blob.size - 1}/{blob.size}")
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Content-Length", str(blob.size - start))
        self.end_headers()
        self.wfile.flush()
        if self.command == "HEAD":
            return
        with archive.path.open("rb") as stream:
            offset, end = blob.offset + start, blob.offset + blob.size
            while offset < end:
                count = os.sendfile(self.connection.fileno(), stream.fileno(), offset, min(_SEND, end - offset))
                if count == 0:
                    self.close_connection = True
                    return
                offset += count
                self.server.sent += count
                self.server.heard_at = time.monotonic()
            os.posix_fadvise(stream.fileno(), blob.offset, blob.size, os.POSIX_FADV_DONTNEED)


class Tunnel:
    """A loopback port of this node that leads to another rank. Use as a context manager."""

    def __init__(self, address: str, port: int) -> None:
        self.target = (address, port)
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=32)
        self.port = int(self.listener.getsockname()[1])
        self.carried = 0

    def __enter__(self) -> Tunnel:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self.listener.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _address = self.listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(self.target, timeout=30)
            except OSError:
                near.close()
                continue
            far.settimeout(None)
            threading.Thread(target=self._carry, args=(near, far, False), daemon=True).start()
            threading.Thread(target=self._carry, args=(far, near, True), daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket, count: bool) -> None:
        view = memoryview(bytearray(1 << 20))
        with contextlib.suppress(OSError):
            while size := source.recv_into(view):
                target.sendall(view[:size])
                if count:
                    self.carried += size
        for side in (source, target):
            with contextlib.suppress(OSError):
                side.shutdown(socket.SHUT_RDWR)
        source.close()
