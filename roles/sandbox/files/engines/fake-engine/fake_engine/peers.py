# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How ranks meet: one TCP connection from each worker to the head, lines of JSON, kept for as long as both live."""

from __future__ import annotations

import errno
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .journal import Journal, Rank

# A refused connection is tried again in silence, as c10d does; only a timeout or a network error is said.
RETRY_S = 0.1


class PeerLost(Exception):
    """A peer's connection closed; `where` is its address as gloo writes it."""

    def __init__(self, where: str) -> None:
        super().__init__(where)
        self.where = where


class PeerSilent(Exception):
    """A peer did not answer in time."""


class PortTaken(Exception):
    """Somebody listens on the port."""


class StoreTimeout(Exception):
    """Not all ranks joined in time; `joined` counts this one."""

    def __init__(self, joined: int) -> None:
        super().__init__(joined)
        self.joined = joined


class Peer:
    """One end of a connection between two ranks."""

    def __init__(self, connection: socket.socket, rank: int = 0) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection, self.rank = connection, rank
        address = connection.getpeername()
        self.where = f"[{address[0].removeprefix('::ffff:')}]:{address[1]}"
        self._reader = connection.makefile("rb")

    def send(self, message: dict[str, Any]) -> None:
        try:
            self.connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise PeerLost(self.where) from error

    def receive(self, timeout_s: float | None = None) -> dict[str, Any]:
        self.connection.settimeout(timeout_s)
        try:
            line = self._reader.readline()
        except TimeoutError as error:
            raise PeerSilent(self.where) from error
        except OSError as error:
            raise PeerLost(self.where) from error
        if not line:
            raise PeerLost(self.where)
        return dict(json.loads(line))

    def expect(self, key: str, timeout_s: float | None = None) -> Any:
        """The value of the next message, which must have `key`."""
        return self.receive(timeout_s)[key]


class Hub:
    """The head's side: listens on the master port and talks to all workers at once."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.peers: list[Peer] = []
        self._lock = threading.Lock()
        self._step = 0
        try:
            self.listener = socket.create_server(("", rank.master_port), backlog=64)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            raise PortTaken from error

    def join(self, timeout_s: float) -> None:
        """Wait until every other rank has connected, then let all go on. A worker that left while waiting is forgotten."""
        end = time.monotonic() + timeout_s
        while len(self.peers) < self.rank.world - 1:
            self.listener.settimeout(max(0.01, end - time.monotonic()))
            try:
                connection, _address = self.listener.accept()
            except TimeoutError as error:
                raise StoreTimeout(len(self.peers) + 1) from error
            peer = Peer(connection)
            try:
                peer.rank = int(peer.expect("rank", 5.0))
            except (PeerLost, PeerSilent, ValueError, KeyError):
                connection.close()
                continue
            self.peers = [other for other in self.peers if other.rank != peer.rank] + [peer]
        for peer in self.peers:
            peer.send({"go": self.rank.world})

    def gather(self, key: str, timeout_s: float | None = None) -> list[Any]:
        return [peer.expect(key, timeout_s) for peer in self.peers]

    def tell(self, message: dict[str, Any]) -> None:
        for peer in self.peers:
            peer.send(message)

    def step(self, timeout_s: float) -> None:
        """One step of the model on all ranks: each must answer."""
        if not self.peers:
            return
        with self._lock:
            self._step += 1
            self.tell({"step": self._step})
            for peer in self.peers:
                while peer.expect("step", timeout_s) != self._step:
                    pass


def connect(rank: Rank, journal: Journal, timeout_s: float, stopped: Callable[[float], bool]) -> Peer | None:
    """The worker's side: connect to the head, for as long as it takes. None when told to stop while waiting."""
    target = f"({rank.master_addr}, {rank.master_port})"
    attempt, said = 0, 0.0
    end = time.monotonic() + timeout_s
    while True:
        try:
            peer = Peer(socket.create_connection((rank.master_addr, rank.master_port), timeout=3.0))
            peer.send({"rank": rank.number})
            return peer
        except ConnectionRefusedError:
            failure, delay_s = "", RETRY_S
        except (OSError, PeerLost) as error:
            number = getattr(error, "errno", None) or errno.ETIMEDOUT
            failure, delay_s = f"(errno: {number} - {os.strerror(number)}).", min(2.0, 0.4 * 2**attempt)
        now = time.monotonic()
        if now > end:
            milliseconds = int(timeout_s * 1000)
            text = f"The client socket has timed out after {milliseconds}ms while trying to connect to {target}."
            journal.write(journal.own(f"[E0101 0:0:0 socket.cpp:1028] [c10d] {text}"))
            retrying(journal, rank, attempt, timeout_s, 76.659, text)
            attempt, end = attempt + 1, now + timeout_s
        elif failure and now - said > 0.2:
            where = f"{rank.master_addr}:{rank.master_port}"
            failed = f"The client socket has failed to connect to {where} {failure}"
            text = f"The client socket has failed to connect to any network address of {target}."
            journal.write(journal.own(f"[W0101 0:0:0 socket.cpp:764] [c10d] {failed}"))
            journal.write(journal.own(f"[E0101 0:0:0 socket.cpp:818] [c10d] {text}"))
            retrying(journal, rank, attempt, timeout_s, delay_s, f"{text} {failed}")
            attempt, said = attempt + 1, now
        if stopped(delay_s):
            return None


def retrying(journal: Journal, rank: Rank, attempt: int, timeout_s: float, delay_s: float, text: str) -> None:
    what = f"(try={attempt}, timeout={int(timeout_s * 1000)}ms, delay={int(delay_s * 1000)}ms): {text}"
    host = f"{rank.master_addr}:{rank.master_port}"
    line = f"[c10d] TCP client failed to connect/validate to host {host} - retrying {what}"
    journal.write(journal.own(f"[W0101 0:0:0 TCPStore.cpp:340] {line}"))


def interface_missing(name: str) -> bool:
    return bool(name) and not any((Path("/sys/class/net") / part).exists() for part in name.split(","))
