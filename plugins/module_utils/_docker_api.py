# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Ask the Docker engine of this node over its socket: a question costs about 2 ms, where starting the docker command costs 50.

HTTP/1.0 on purpose: the answer then ends with the connection and is never chunked, so a few lines of socket code are enough.
Standard library only, and nothing of Ansible.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

DEFAULT_SOCKET = "/var/run/docker.sock"
_CHUNK = 1 << 18


class DockerError(Exception):
    """The engine cannot be asked or refused; the message is a sentence for the user."""


class DockerNotFound(DockerError):
    """There is no such container."""


def quote(text: str) -> str:
    """Percent-encode a query value (urllib.parse costs 10 ms to import)."""
    safe = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~"
    return "".join(chr(b) if chr(b) in safe else f"%{b:02X}" for b in text.encode())


class Docker:
    """One engine. Every answer is bounded by ``timeout_s`` between two pieces of data."""

    def __init__(self, path: str = DEFAULT_SOCKET, timeout_s: float = 10.0) -> None:
        self.path = path.removeprefix("unix://")
        self.timeout_s = timeout_s

    def get(self, path: str, query: dict[str, str] | None = None) -> Any:
        """The JSON answer to ``GET path``."""
        body = b"".join(self.stream(path, query))
        try:
            return json.loads(body)
        except ValueError as exc:
            raise DockerError(f"The Docker engine answered GET {path} with something that is not JSON.") from exc

    def find(self, path: str) -> dict[str, Any] | None:
        """As :meth:`get`, None where there is no such thing."""
        try:
            return dict(self.get(path))
        except DockerNotFound:
            return None

    def stream(self, path: str, query: dict[str, str] | None = None) -> Iterator[bytes]:
        """The body of the answer to ``GET path``, piece by piece. The caller may stop reading at any time."""
        words = "&".join(f"{name}={quote(value)}" for name, value in (query or {}).items())
        connection = self._connect()
        try:
            target = path + (f"?{words}" if words else "")
            connection.sendall(f"GET {target} HTTP/1.0\r\nHost: docker\r\nAccept: */*\r\n\r\n".encode())
            head, body = self._head(connection, path)
            status = int(head.split(b" ", 2)[1])
            if status >= 400:
                raise self._refusal(connection, path, status, body)
            if body:
                yield body
            while piece := connection.recv(_CHUNK):
                yield piece
        except TimeoutError as exc:
            raise DockerError(
                f"The Docker engine gave no answer to GET {path} within {self.timeout_s:g} s. Run: systemctl status docker"
            ) from exc
        except OSError as exc:
            raise DockerError(
                f"The connection to the Docker engine broke ({exc}). Run: systemctl status docker"
            ) from exc
        finally:
            connection.close()

    def _connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(self.timeout_s)
        try:
            connection.connect(self.path)
        except FileNotFoundError as exc:
            connection.close()
            raise DockerError(f"{self.path} is missing: Docker does not run here. Run: systemctl start docker") from exc
        except PermissionError as exc:
            connection.close()
            # Case pre-docker-sock: a session that was opened before the user joined the group does not know it.
            raise DockerError(
                f"This user may not use {self.path}. Add it to the group docker and log in anew, or connect with become."
            ) from exc
        except OSError as exc:
            connection.close()
            raise DockerError(f"{self.path} does not answer ({exc}). Run: systemctl status docker") from exc
        return connection

    @staticmethod
    def _head(connection: socket.socket, path: str) -> tuple[bytes, bytes]:
        received = b""
        while b"\r\n\r\n" not in received:
            piece = connection.recv(_CHUNK)
            if not piece:
                raise DockerError(f"The Docker engine closed the connection without an answer to GET {path}.")
            received += piece
        head, dummy, body = received.partition(b"\r\n\r\n")
        return head, body

    @staticmethod
    def _refusal(connection: socket.socket, path: str, status: int, body: bytes) -> DockerError:
        while len(body) < 65536 and (piece := connection.recv(_CHUNK)):
            body += piece
        try:
            message = str(json.loads(body).get("message", ""))
        except (ValueError, AttributeError):
            message = body.decode("utf-8", "replace").strip()
        if status == 404:
            return DockerNotFound(message or f"{path}: not found")
        return DockerError(f"The Docker engine refused GET {path} ({status}): {message}")


def messages(pieces: Iterator[bytes], tty: bool = False) -> Iterator[bytes]:
    """The messages of a log stream. Without a TTY each has a header of 8 bytes (stream, three zeros, length)."""
    buffer = bytearray()
    for piece in pieces:
        buffer += piece
        start = 0
        while len(buffer) - start >= 8 and not tty:
            length = int.from_bytes(buffer[start + 4 : start + 8], "big")
            if len(buffer) - start - 8 < length:
                break
            yield bytes(buffer[start + 8 : start + 8 + length])
            start += 8 + length
        while tty and (end := buffer.find(b"\n", start)) >= 0:
            yield bytes(buffer[start : end + 1])
            start = end + 1
        del buffer[:start]
    if tty and buffer:
        yield bytes(buffer)
