# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Staging and serving exclude each other on a node: a download beside a model load starves the GPU (case ckpt-during-serve).

``serving.lock`` is a file with the record of its last holder, and an flock on it.

* Staging (a fetch of a checkpoint) holds the flock while it runs: the kernel releases it when the process dies, however it dies.
* Serving has no process of its own here. A launch writes its record (under the flock, so not while anything is staged or launched
  from elsewhere), which counts until it is released or expires; after that the running rank container counts.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

PATH = "/run/gb10-fleet/serving.lock"
STAGING = "staging"
SERVING = "serving"
LAUNCHING = "launching"
LAUNCH_ADVICE = "Wait for its end; if its controller died, run stop.yml first."


class Held(Exception):
    """Somebody else holds the lock; the message says who, since when, and what to do."""

    def __init__(self, record: dict[str, Any]) -> None:
        super().__init__(sentence(record))
        self.record = record


def since(record: Mapping[str, Any]) -> str:
    started = record.get("since")
    if not isinstance(started, (int, float)):
        return "an unknown time"
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(started))


def parsed(data: bytes) -> dict[str, Any]:
    """The record in the lock file; empty when there is none, or none that can be read."""
    try:
        record = json.loads(data or b"{}")
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}


def launch_record(record: Mapping[str, Any]) -> dict[str, Any] | None:
    """The launch that is under way: holder, controller, pid, since (seconds and text), expires; None when there is none."""
    if record.get("kind") != SERVING or time.time() >= float(record.get("expires") or 0):
        return None
    return {"controller": "", "pid": 0, **record, "since_text": since(record)}


def launch_under_way(path: str = PATH) -> dict[str, Any] | None:
    """What ``launch_record`` says of the node's lock file, read without locking it and without root."""
    try:
        return launch_record(parsed(Path(path).read_bytes()))
    except OSError:
        return None


def under_way(launch: Mapping[str, Any]) -> str:
    """Who launches, and since when by the clock of its node."""
    return f"{launch.get('holder')} is under way since {launch.get('since_text') or since(launch)}"


def sentence(record: dict[str, Any]) -> str:
    """Who holds the node, since when, and what to do about it."""
    holder = record.get("holder") or "an unknown process"
    if record.get("kind") == SERVING:
        return (
            f"This node serves ({holder}, since {since(record)}), and a fetch beside a model starves its memory. "
            "Run playbooks/stop.yml first, or let the fetch wait (checkpoint_lock: queue)."
        )
    if record.get("kind") == LAUNCHING:
        return f"{under_way({**record, 'holder': holder})}. {LAUNCH_ADVICE}"
    return f"A fetch runs on this node ({holder}, since {since(record)}). Wait for its end, then run this again."


class StagingLock:
    """The lock of one node. ``serving`` tells whether a rank container runs, as a record or None."""

    def __init__(self, path: str = PATH, serving: Callable[[], dict[str, Any] | None] = lambda: None) -> None:
        self.path = Path(path)
        self.serving = serving

    def _open(self) -> int:
        self.path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        return os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)

    @staticmethod
    def _lock(descriptor: int) -> bool:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            if exc.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise
        return True

    @staticmethod
    def _read(descriptor: int) -> dict[str, Any]:
        return parsed(os.pread(descriptor, 65536, 0))

    @staticmethod
    def _write(descriptor: int, record: dict[str, Any]) -> None:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(record).encode() if record else b"", 0)

    @contextlib.contextmanager
    def _flock(self) -> Iterator[int]:
        """The flock, or Held with the record of the staging process that has it."""
        descriptor = self._open()
        try:
            if not self._lock(descriptor):
                raise Held({"kind": STAGING, **self._read(descriptor)})
            yield descriptor
        finally:
            os.close(descriptor)

    def holder(self) -> dict[str, Any] | None:
        """Who holds the node now: a staging process, a launch, a running rank, or nobody."""
        try:
            with self._flock() as descriptor:
                return self._serving_record(descriptor)
        except Held as held:
            return held.record

    def _serving_record(self, descriptor: int) -> dict[str, Any] | None:
        record = self._read(descriptor)
        running = self.serving()
        if running:
            return {**record, **running} if record.get("kind") == SERVING else running
        return record if launch_record(record) else None

    @contextlib.contextmanager
    def staging(
        self,
        holder: str,
        wait_s: float = 0,
        while_serving: bool = False,
        note: Callable[[str], None] = lambda _text: None,
    ) -> Iterator[None]:
        """Hold the node for a fetch. Raises Held at once, or after ``wait_s`` seconds."""
        deadline = time.monotonic() + wait_s
        while True:
            try:
                with self._flock() as descriptor:
                    record = None if while_serving else self._serving_record(descriptor)
                    if record:
                        raise Held(record)
                    before = self._read(descriptor)
                    self._write(
                        descriptor, {"kind": STAGING, "holder": holder, "pid": os.getpid(), "since": time.time()}
                    )
                    try:
                        yield
                    finally:
                        self._write(descriptor, before if before.get("kind") == SERVING else {})
                return
            except Held as held:
                if time.monotonic() >= deadline:
                    raise
                note(f"waits for the node: {held.record.get('holder')}")
                time.sleep(min(2.0, max(0.1, deadline - time.monotonic())))

    def take(
        self, holder: str, expires_s: float, controller: str = "", pid: int = 0, dead: Collection[int] = ()
    ) -> None:
        """Write a launch's record, which counts for ``expires_s`` seconds. Raises Held.

        A launch that is under way keeps another one off, unless it came from the same controller and is among ``dead``.
        """
        with self._flock() as descriptor:
            other, now = launch_record(self._read(descriptor)), time.time()
            if other and (other["controller"] != controller or other["pid"] not in (pid, *dead)):
                raise Held({**other, "kind": LAUNCHING})
            record = {"kind": SERVING, "holder": holder, "controller": controller, "pid": pid}
            self._write(descriptor, {**record, "since": now, "expires": now + expires_s})

    def release(self) -> bool:
        """Remove a launch's record. A staging process is not disturbed."""
        with contextlib.suppress(Held), self._flock() as descriptor:
            if self._read(descriptor).get("kind") == SERVING:
                self._write(descriptor, {})
                return True
        return False
