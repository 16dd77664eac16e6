# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Reading a node: files under a root, and commands as root where that needs no password.

This is the only shared file of the fabric and preflight code that does I/O; what the values mean is decided in
``_fabric.py`` and ``_node.py``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from ansible_collections.gb10.fleet.plugins.module_utils._command import Answer, run

# `gid_attrs/types/<index>` of an empty entry answers EINVAL, and a hot-unplugged function ENODEV: both are OSError.
MAX_FILE = 1 << 20


class Tree:
    """Files below ``root``: ``/`` on a node, a folder with a captured or synthetic tree in a test."""

    def __init__(self, root: str | Path = "/") -> None:
        self.root = Path(root)

    def path(self, *parts: str) -> Path:
        return self.root.joinpath(*(part.lstrip("/") for part in parts))

    def text(self, *parts: str) -> str | None:
        """Content without surrounding white space, or None when it cannot be read."""
        try:
            with self.path(*parts).open("rb") as handle:
                return handle.read(MAX_FILE).decode("utf-8", "replace").strip()
        except OSError:
            return None

    def number(self, *parts: str) -> int | None:
        """First integer of a file; None when it is absent or no number (sysfs says ``-1`` or EINVAL for "unknown")."""
        text = self.text(*parts)
        try:
            return int((text or "").split()[0])
        except (ValueError, IndexError):
            return None

    def names(self, *parts: str) -> list[str]:
        try:
            return sorted(path.name for path in self.path(*parts).iterdir())
        except OSError:
            return []

    def exists(self, *parts: str) -> bool:
        return self.path(*parts).exists()

    def link_name(self, *parts: str) -> str | None:
        """Last component of where a symbolic link points, e.g. the PCI address behind ``net/<name>/device``."""
        try:
            return self.path(*parts).readlink().name
        except OSError:
            return None


class Privilege:
    """Root, or ``sudo -n`` where that needs no password; found out once."""

    def __init__(self) -> None:
        self._sudo: bool | None = None

    @property
    def is_root(self) -> bool:
        return os.geteuid() == 0

    @property
    def passwordless(self) -> bool:
        if self.is_root:
            return True
        if self._sudo is None:
            self._sudo = run(["sudo", "-n", "true"], 5.0).ok
        return self._sudo

    def run(self, argv: Sequence[str], timeout_s: float = 10.0) -> Answer:
        """As root if possible, else as we are."""
        return run(argv if self.is_root or not self.passwordless else ["sudo", "-n", *argv], timeout_s)

    def text(self, path: Path) -> str | None:
        """A file that only root may read (netplan files are 0600)."""
        try:
            return path.read_text(encoding="utf-8", errors="replace")
        except PermissionError:
            pass
        except OSError:
            return None
        answer = self.run(["cat", str(path)], 5.0)
        return answer.out if answer.ok else None
