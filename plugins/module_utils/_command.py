# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Commands that always end.

``AnsibleModule.run_command`` has no timeout, and nvidia-smi has blocked for minutes on a wedged driver (case pre-nvsmi-hang).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Answer:
    """What a command said. ``rc`` is None when it did not run to its end; ``timed_out`` is a verdict of its own."""

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
    """Path of a program, looked up as :func:`run` does."""
    return shutil.which(program, path=environment()["PATH"])


def run(argv: Sequence[str], timeout_s: float = 10.0, stdin: str | None = None) -> Answer:
    """Run ``argv`` (no shell), never longer than ``timeout_s`` seconds.

    A child that sits in the kernel (state D) cannot be killed: it is left behind, and we go on.
    """
    program = find(argv[0])
    if program is None:
        return Answer(tuple(argv), None, missing=True, err=f"{argv[0]}: not found")
    try:
        child = subprocess.Popen(  # pylint: disable=ansible-bad-function
            [program, *argv[1:]],
            stdin=subprocess.PIPE if stdin is not None else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=environment(),
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
        os.killpg(child.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(1)
    for stream in (child.stdin, child.stdout, child.stderr):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()
