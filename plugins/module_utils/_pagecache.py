# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The page cache of files: how much of it there is, and letting go of it. This is I/O; standard library only.

(The guard program has its own copy of the two system calls: it is one file.)
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import os
from collections.abc import Iterator, Sequence

SYS_CACHESTAT = 451  # the same number on x86-64 and arm64; Linux >= 6.5
PAGE_KIB = os.sysconf("SC_PAGE_SIZE") // 1024
_libc = ctypes.CDLL(None, use_errno=True)


def cached_kib(fd: int) -> int | None:
    """Page cache of an open file in KiB; None without cachestat(2)."""
    whole = (ctypes.c_uint64 * 2)(0, 0)
    said = (ctypes.c_uint64 * 5)()
    if _libc.syscall(SYS_CACHESTAT, fd, whole, said, 0):
        return None
    return int(said[0]) * PAGE_KIB


def evict(fd: int) -> None:
    """Let go of the clean pages of a file that nobody has mapped."""
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def _names(patterns: Sequence[str]) -> Iterator[str]:
    for pattern in patterns:
        for name in glob.iglob(pattern, recursive=True):  # noqa: PTH207 - an absolute pattern
            if os.path.isdir(name):  # noqa: PTH112
                for folder, _folders, files in os.walk(name):
                    yield from (os.path.join(folder, file) for file in files)  # noqa: PTH118
            else:
                yield name


@contextlib.contextmanager
def opened(patterns: Sequence[str], smallest_kib: int) -> Iterator[list[int]]:
    """Descriptors of the regular files that match (a folder: all below it), links followed, each file once."""
    fds: dict[tuple[int, int], int] = {}
    try:
        for name in _names(patterns):
            with contextlib.suppress(OSError):
                status = os.stat(name)  # noqa: PTH116
                key = (status.st_dev, status.st_ino)
                regular = os.path.isfile(name)  # noqa: PTH113
                if key not in fds and regular and status.st_size >= smallest_kib * 1024:
                    fds[key] = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        yield list(fds.values())
    finally:
        for fd in fds.values():
            os.close(fd)
