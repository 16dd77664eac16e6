# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A TCP listener on a high port that stays behind for a minute and tells each caller the address that it sees.

Engines open ephemeral ports in both directions, so one open master port proves nothing. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time

GREETING = b"gb10.fleet "


def open_listener() -> socket.socket:
    """A port out of the kernel's ephemeral range, where an engine's own ports lie. Raises OSError."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind(("0.0.0.0", 0))  # noqa: S104 - every rail is to be proven; it says nothing but an address and ends soon
    listener.listen(128)
    return listener


def serve(listener: socket.socket, seconds: float) -> None:
    """Tell each caller the address that we see it at, until the time is up."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        ready = select.select([listener], [], [], left)[0]
        if not ready:
            return
        with contextlib.suppress(OSError):
            caller, source = listener.accept()
            with caller:
                caller.settimeout(2.0)
                caller.sendall(GREETING + str(source[0]).encode() + b"\n")


def leave_behind(seconds: int) -> int:
    """Leave a listener behind and return its port. The grandchild has no terminal, no pipes of ours, and an end.

    Raises OSError.
    """
    listener = open_listener()
    port = int(listener.getsockname()[1])
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        listener.close()
        return port
    try:
        os.setsid()
        if os.fork():
            os._exit(0)
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(null, stream)
        kept = listener.fileno()
        os.closerange(3, kept)
        os.closerange(kept + 1, 256)
        os.chdir("/")
        serve(listener, seconds)
    finally:
        os._exit(0)
