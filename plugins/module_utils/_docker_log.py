# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Read what a container has logged since the last look, never the whole log again.

Two ways. With the right to read Docker's own file (root) it is read from the byte where the last look ended. Without, the
engine is asked for the lines since the last one; of a very long log only the beginning and the end.
Standard library only, nothing of Ansible.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timezone
from typing import Any

from ansible_collections.gb10.fleet.plugins.module_utils._docker_api import Docker, messages
from ansible_collections.gb10.fleet.plugins.module_utils._engine_log import LAST_LINES, LogReader

_BLOCK = 4 << 20
# The beginning of a log is always read line by line; behind it, more than a block at once is searched for what matters.
_CAREFUL = 4 << 20
_TAIL = 2000
_LONG_TAIL = 20000


def padded(text: str) -> str:
    """RFC 3339 with always nine digits, so that two of them compare as text (Docker's file leaves out trailing zeros)."""
    whole, dummy, rest = text.rstrip("Z").partition(".")
    return f"{whole}.{rest.ljust(9, '0')}Z"


def stamp_of(message: bytes) -> str:
    """The time in front of a message of the engine."""
    return padded(message[:40].decode("ascii", "replace").partition(" ")[0])


def epoch(text: str) -> str:
    """RFC 3339 with nanoseconds as Docker writes it -> ``seconds.nanoseconds`` since 1970, as its ``since`` wants it."""
    whole, dummy, rest = text.partition(".")
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
        much = os.fstat(file.fileno()).st_size - offset > _BLOCK
        file.seek(offset)
        rest = b""
        while block := file.read(_BLOCK):
            end = block.rfind(b"\n") + 1
            if not end:
                rest += block
                continue
            whole, rest = rest + block[:end], block[end:]
            offset += len(whole)
            self._lines(whole, much, self._from_file)
        return offset

    @staticmethod
    def _from_file(line: bytes) -> tuple[str, str] | None:
        """Text and time of a line of Docker's file."""
        try:
            record = json.loads(line)
            return str(record["log"]).rstrip("\n"), padded(str(record["time"]))
        except (ValueError, KeyError, TypeError):
            return None

    def _lines(self, raw: bytes, much: bool, decode: Callable[[bytes], tuple[str, str] | None]) -> None:
        """Feed whole lines; all of them, or in a flood those that matter (and keep the last ones)."""
        flood = much and self.cursor["bytes"] >= _CAREFUL
        self.cursor["bytes"] += len(raw)
        serving = self.reader.state["stage"] == "ready"
        lines = [raw[start:end] for start, end in LogReader.worth(raw, serving)] if flood else raw.splitlines()
        for line in lines:
            if (decoded := decode(line)) and decoded[1] >= self._since:
                self.reader.line(*decoded)
        if flood:
            ending = raw[-LAST_LINES * 400 :].splitlines()[1:][-LAST_LINES:]
            self.reader.state["last"] = [decoded[0] for line in ending if (decoded := decode(line))]

    # --- the engine -----------------------------------------------------------------------------------------------------
    def _read_engine(self) -> None:
        """The engine decodes its whole file for every question without a tail (26 s for 200 MB): so never more than the
        beginning, where the stages are, and the end, where the trouble is.
        """
        since = self.cursor["since"]
        if not since:
            if not self._ask_beginning():
                self._ask_tail(self.cursor["since"], _LONG_TAIL, whole=False)
        elif not self._ask_tail(since, _TAIL):
            self._ask_tail(since, _LONG_TAIL, whole=False)

    def _messages(self, since: str, tail: int | None = None) -> Iterator[bytes]:
        query = {"stdout": "1", "stderr": "1", "timestamps": "1", "since": epoch(since)}
        if tail:
            query["tail"] = str(tail)
        return messages(self.docker.stream(f"/containers/{self.id}/logs", query), self.tty)

    @staticmethod
    def _from_engine(line: bytes) -> tuple[str, str] | None:
        """Text and time of a message of the engine."""
        stamp, dummy, text = line.decode("utf-8", "replace").partition(" ")
        return text.rstrip("\n"), padded(stamp)

    def _ask_beginning(self) -> bool:
        """Feed the beginning; True when that was all there is."""
        held: list[bytes] = []
        size = 0
        for message in self._messages(self.started_at):
            held.append(message if message.endswith(b"\n") else message + b"\n")
            size += len(message)
            if size > _CAREFUL:
                break
        if held:
            self.cursor["since"] = stamp_of(held[-1])
            self._lines(b"".join(held), False, self._from_engine)
        return size <= _CAREFUL

    def _ask_tail(self, since: str, tail: int, whole: bool = True) -> bool:
        """Feed the lines after ``since`` that are among the last ``tail``.

        :param whole: feed nothing and return False when there may be more of them than that.
        """
        new = [message for message in self._messages(since, tail) if stamp_of(message) > since]
        if whole and len(new) >= tail:
            return False
        if new:
            self.cursor["since"] = stamp_of(new[-1])
            self._lines(b"".join(m if m.endswith(b"\n") else m + b"\n" for m in new), False, self._from_engine)
        return True
