# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Read what a container has logged since the last look, never the whole log again.

Two ways. With the right to read Docker's own file (root) it is read from the byte where the last look ended. Without, the
engine is asked for the lines since the last one; a tail bounds what it has to decode. Standard library only, nothing of Ansible.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

from ansible_collections.gb10.fleet.plugins.module_utils._docker_api import Docker, messages
from ansible_collections.gb10.fleet.plugins.module_utils._engine_log import LAST_LINES, LogReader

_BLOCK = 4 << 20
# More than this at once is searched for the words that matter instead of being decoded line by line.
_BULK = 1 << 20
_TAIL = 2000


def padded(text: str) -> str:
    """RFC 3339 with always nine digits, so that two of them compare as text (Docker's file leaves out trailing zeros)."""
    whole, _, rest = text.rstrip("Z").partition(".")
    return f"{whole}.{rest.ljust(9, '0')}"


def epoch(text: str) -> str:
    """RFC 3339 with nanoseconds as Docker writes it -> ``seconds.nanoseconds`` since 1970, as its ``since`` wants it."""
    whole, _, rest = text.partition(".")
    digits = "".join(c for c in rest if c.isdigit())[:9].ljust(9, "0")
    moment = datetime.fromisoformat(whole.rstrip("Z")[:19]).replace(tzinfo=timezone.utc)
    return f"{int(moment.timestamp())}.{digits}"


class DockerLog:
    """The log of one start of one container. :attr:`cursor` (JSON) carries everything to the next look."""

    def __init__(self, docker: Docker, inspect: Mapping[str, Any], cursor: Mapping[str, Any] | None = None) -> None:
        self.docker = docker
        self.id = str(inspect["Id"])
        self.started_at = str(inspect["State"]["StartedAt"])
        self._since = padded(self.started_at)
        self.tty = bool(inspect["Config"].get("Tty"))
        kind = (inspect["HostConfig"].get("LogConfig") or {}).get("Type")
        self.path = str(inspect.get("LogPath") or "") if kind == "json-file" else ""
        fresh = not cursor or cursor.get("id") != self.id or cursor.get("started_at") != self.started_at
        self.cursor: dict[str, Any] = (
            {"id": self.id, "started_at": self.started_at, "since": "", "inode": 0, "offset": 0, "bytes": 0}
            if fresh
            else dict(cursor or {})
        )
        self.reader = LogReader(self.cursor.get("state"))

    def read(self) -> dict[str, Any]:
        """Read what is new and return the state of the log reader."""
        if self.path and os.access(self.path, os.R_OK):
            self._read_file()
        else:
            self._read_engine()
        self.cursor["state"] = self.reader.state
        return self.reader.state

    # --- Docker's file ------------------------------------------------------------------------------------------------
    def _read_file(self) -> None:
        with open(self.path, "rb") as file:  # noqa: PTH123 - pathlib costs 10 ms to import
            inode = os.fstat(file.fileno()).st_ino
            if self.cursor["inode"] not in (0, inode):
                self._read_rotated()
                self.cursor["offset"] = 0
            self.cursor["inode"] = inode
            self.cursor["offset"] = self._read_from(file, self.cursor["offset"])

    def _read_rotated(self) -> None:
        """What was written to the file before it was rotated away, if Docker keeps it."""
        try:
            with open(f"{self.path}.1", "rb") as file:  # noqa: PTH123
                if os.fstat(file.fileno()).st_ino == self.cursor["inode"]:
                    self._read_from(file, self.cursor["offset"])
        except OSError:
            return

    def _read_from(self, file: Any, offset: int) -> int:
        size = os.fstat(file.fileno()).st_size
        bulk = size - offset > _BULK
        file.seek(offset)
        rest = b""
        while block := file.read(_BLOCK):
            end = block.rfind(b"\n") + 1
            whole, rest = rest + block[:end], (block[end:] if end else rest + block)
            if not end:
                continue
            offset += len(whole)
            self.cursor["bytes"] += len(whole)
            if bulk:
                self._bulk(whole)
            else:
                for line in whole.splitlines():
                    self._record(line)
        return offset

    def _record(self, line: bytes) -> None:
        try:
            record = json.loads(line)
            text, time = str(record["log"]), str(record["time"])
        except (ValueError, KeyError, TypeError):
            return
        if padded(time) >= self._since:
            self.reader.line(text.rstrip("\n"), time)

    def _bulk(self, raw: bytes) -> None:
        done = 0
        for position in LogReader.worth(raw):
            if position < done:
                continue
            start, end = raw.rfind(b"\n", 0, position) + 1, raw.find(b"\n", position)
            done = end if end >= 0 else len(raw)
            self._record(raw[start:done])
        last = []
        for line in raw[-LAST_LINES * 400 :].splitlines()[1:][-LAST_LINES:]:
            try:
                last.append(str(json.loads(line)["log"]).rstrip())
            except (ValueError, KeyError, TypeError):
                continue
        self.reader.state["last"] = last or self.reader.state["last"]

    # --- the engine -----------------------------------------------------------------------------------------------------
    def _read_engine(self) -> None:
        since = self.cursor["since"]
        if since and not self._ask(since, _TAIL):
            # More than the tail came in between: ask for all of it.
            self._ask(since, 0)
        elif not since:
            self._ask("", 0)

    def _ask(self, since: str, tail: int) -> bool:
        """Feed the lines after ``since``. False (and nothing fed) when ``tail`` cut some of them off."""
        query = {"stdout": "1", "stderr": "1", "timestamps": "1", "since": epoch(since or self.started_at)}
        if tail:
            query["tail"] = str(tail)
        stream = messages(self.docker.stream(f"/containers/{self.id}/logs", query), self.tty)
        held: list[tuple[str, str]] = []
        for message in stream:
            stamp, _, text = message.decode("utf-8", "replace").partition(" ")
            if since and stamp <= since:
                continue
            self.cursor["bytes"] += len(message)
            if tail:
                held.append((stamp, text.rstrip("\n")))
            else:
                self.reader.line(text.rstrip("\n"), stamp)
                self.cursor["since"] = stamp
        if tail and len(held) >= tail:
            return False
        for stamp, text in held:
            self.reader.line(text, stamp)
            self.cursor["since"] = stamp
        return True
