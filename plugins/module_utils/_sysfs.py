# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Reading a node: files under a root, and commands that always end.

This is the only file of the fabric and preflight code that does I/O; what the values mean is decided in
``_fabric.py`` and ``_node.py``.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

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


@dataclass(frozen=True)
class Answer:
    """What a command said. ``rc`` is None when it did not run; ``timed_out`` is a verdict of its own."""

    argv: tuple[str, ...]
    rc: int | None
    out: str = ""
    err: str = ""
    timed_out: bool = False
    missing: bool = False

    @property
    def ok(self) -> bool:
        return self.rc == 0


def environment() -> dict[str, str]:
    """The C locale, and the sbin folders that an SSH session of an ordinary user leaves out of PATH."""
    env = dict(os.environ, LC_ALL="C", LANGUAGE="C")
    paths = env.get("PATH", "").split(os.pathsep)
    for extra in ("/usr/local/bin", "/usr/bin", "/bin", "/usr/local/sbin", "/usr/sbin", "/sbin"):
        if extra not in paths:
            paths.append(extra)
    env["PATH"] = os.pathsep.join(path for path in paths if path)
    return env


def find(program: str) -> str | None:
    return shutil.which(program, path=environment()["PATH"])


def run(argv: Sequence[str], timeout_s: float = 10.0, stdin: str | None = None) -> Answer:
    """Run ``argv`` (no shell), never longer than ``timeout_s``: nvidia-smi has blocked for minutes on a wedged driver.

    A child that sits in the kernel (state D) cannot be killed: it is left behind, and we go on.
    """
    env = environment()
    program = shutil.which(argv[0], path=env["PATH"])
    if program is None:
        return Answer(tuple(argv), None, missing=True, err=f"{argv[0]}: not found")
    try:
        child = subprocess.Popen(
            [program, *argv[1:]],
            stdin=subprocess.PIPE if stdin is not None else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=env,
            start_new_session=True,
        )
    except OSError as error:
        return Answer(tuple(argv), None, err=str(error))
    try:
        out, err = child.communicate(stdin, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        _end(child)
        return Answer(tuple(argv), None, timed_out=True, err=f"no answer within {timeout_s:g} s")
    return Answer(tuple(argv), child.returncode, out, err)


def _end(child: subprocess.Popen[str]) -> None:
    """Kill the whole session of a child and give it one second to go; close our ends of its pipes either way."""
    with contextlib.suppress(OSError):
        os.killpg(child.pid, 9)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(1)
    for stream in (child.stdin, child.stdout, child.stderr):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()


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
