# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A journal of what files of the kernel held before we first changed them, so that all of it can be put back byte for byte.

Standard library only, and nothing of Ansible: the programs that stay on a node ship a copy of this file beside themselves.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from typing import Any


class JournalError(Exception):
    """The journal cannot be read or written; the message is a sentence for the user."""


def read_json(path: str, default: Any = None) -> Any:
    """The content of a JSON file, ``default`` when there is none. Raises JournalError when it is not JSON."""
    try:
        with open(path, encoding="utf-8") as file:  # noqa: PTH123 - pathlib costs the drift timer 10 ms a run
            return json.load(file)
    except FileNotFoundError:
        return default
    except (OSError, ValueError) as exc:
        raise JournalError(f"{path} cannot be read ({exc}). Remove it, or put back a good copy.") from exc


def write_json(path: str, content: Any, mode: int = 0o644) -> None:
    """Write a JSON file atomically (temporary file, fsync, rename); its folder is made when missing. Raises JournalError."""
    temporary = f"{path}.{os.getpid()}.tmp"
    try:
        os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)  # noqa: PTH103, PTH120
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1, sort_keys=True)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)  # noqa: PTH105
    except OSError as exc:
        with contextlib.suppress(OSError):
            os.unlink(temporary)  # noqa: PTH108
        raise JournalError(f"{path} cannot be written: {exc.strerror}.") from exc


def read_raw(path: str) -> str:
    """All bytes of a file as text, one character per byte (so that writing it back gives the same bytes). Raises OSError."""
    with open(path, "rb") as file:  # noqa: PTH123
        return file.read().decode("latin-1")


def write_raw(path: str, content: str) -> None:
    """Write text of :func:`read_raw` into an existing file, in one write: the kernel takes a value whole. Raises OSError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_TRUNC)
    try:
        os.write(descriptor, content.encode("latin-1"))
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def locked(path: str) -> Iterator[None]:
    """Hold an exclusive lock while the block runs: the drift timer and a playbook may come at the same time."""
    import fcntl

    try:
        os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)  # noqa: PTH103, PTH120
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as exc:
        raise JournalError(f"{path} cannot be locked: {exc.strerror}.") from exc
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


class Journal:
    """Previous contents by path. ``remember`` keeps the first value ever seen; ``save`` goes before the change itself.

    :param path: the journal's file.
    :param root: folder that stands for ``/`` (a host's root mounted in a container, or a test's).
    """

    def __init__(self, path: str, root: str = "/") -> None:
        self.path = path
        self.root = root.rstrip("/")
        content = read_json(path, {})
        if not isinstance(content, dict) or not isinstance(content.get("before", {}), dict):
            raise JournalError(f"{path} is not a journal of previous values. Remove it, or put back a good copy.")
        self.before: dict[str, str] = dict(content.get("before", {}))
        self._saved = dict(self.before)

    def read(self, path: str) -> str:
        """What the file at ``path`` (below the root) holds now, raw. Raises OSError."""
        return read_raw(self.root + path)

    def write(self, path: str, content: str) -> None:
        """Put raw content into the file at ``path`` (below the root). Raises OSError."""
        write_raw(self.root + path, content)

    def remember(self, path: str, content: str) -> None:
        """Keep what ``path`` held, unless an older value is known."""
        self.before.setdefault(path, content)

    def save(self) -> None:
        """Write the journal when it changed; an empty one is removed. Raises JournalError."""
        if self.before == self._saved:
            return
        if self.before:
            write_json(self.path, {"version": 1, "before": self.before})
        else:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path)  # noqa: PTH108
        self._saved = dict(self.before)
