# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Kernel settings and swap: names, file contents and arithmetic. Pure functions.

Published kernel settings for these machines contradict each other (swappiness 0, 10, 60 and 100), so nothing here has an opinion on
values, with one exception: raising ``vm.min_free_kbytes`` keeps vLLM from starting (tonyd2wild GLM-5.3#19), and that is said.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

GIB_KIB = 1024 * 1024
MIN_FREE = "vm.min_free_kbytes"
DEFAULT_RESERVE_KIB = 67584
# A reserve of 4 GiB instead of the default took 6.2 GiB from MemAvailable: the kernel counts its high watermark (1.5 x the reserve)
# as not available, and part of the page cache as needed to stay above the low one.
AVAILABLE_PER_RESERVE = 6.2 * GIB_KIB / (4 * GIB_KIB - DEFAULT_RESERVE_KIB)
# Where systemd-sysctl reads, most important folder first: the same file name there hides the others'.
SYSCTL_FOLDERS = ("/etc/sysctl.d", "/run/sysctl.d", "/usr/local/lib/sysctl.d", "/usr/lib/sysctl.d", "/lib/sysctl.d")


def sysctl_path(name: str) -> str:
    """``vm.swappiness`` -> ``/proc/sys/vm/swappiness``; with a slash first, dots belong to names (``net/ipv4/conf/eth0.1/x``)."""
    if "/" in name and name.index("/") < (name.index(".") if "." in name else len(name)):
        return "/proc/sys/" + name
    return "/proc/sys/" + name.translate(str.maketrans("./", "/."))


def same(one: str, other: str) -> bool:
    """Whether two contents of a setting are the same value: ``4096 87380`` and ``4096\\t87380\\n`` are."""
    return one.split() == other.split()


def nearest(name: str, known: Iterable[str]) -> str:
    """``" Did you mean vm.swappiness?"`` or nothing."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" Did you mean {close[0]}?" if close else ""


def sysctl_file(settings: Mapping[str, str], header: str) -> str:
    """Content of a sysctl.d file with exactly these settings."""
    return "".join([f"# {header}\n", *(f"{name} = {value}\n" for name, value in sorted(settings.items()))])


def parse_sysctl_file(text: str) -> dict[str, str]:
    """Settings of a sysctl.d file; a leading ``-`` (failures are ignored) is dropped."""
    settings = {}
    for line in text.splitlines():
        stripped = line.strip()
        if stripped and stripped[0] not in "#;" and "=" in stripped:
            name, dummy, value = stripped.partition("=")
            settings[name.strip().lstrip("-").replace("/", ".")] = value.strip()
    return settings


def overridden(path: str, settings: Mapping[str, str], files: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """Which of our settings another file sets to something else at the next boot: (name, its value, its path).

    :param path: our file.
    :param files: every other sysctl.d file by path; ``/etc/sysctl.conf`` counts when a link in a folder names it.
    """
    first: dict[str, str] = {}
    for other in sorted(files, key=_folder_rank):
        first.setdefault(other.rpartition("/")[2], other)
    ours, out = path.rpartition("/")[2], {}
    for base in sorted(first):
        if base > ours:
            for name, value in parse_sysctl_file(files[first[base]]).items():
                out[name] = (value, first[base])
    return [(name, *out[name]) for name in sorted(settings) if name in out and not same(out[name][0], settings[name])]


def _folder_rank(path: str) -> int:
    folder = path.rpartition("/")[0]
    return SYSCTL_FOLDERS.index(folder) if folder in SYSCTL_FOLDERS else len(SYSCTL_FOLDERS)


def min_free_warning(wanted_kib: int, now_kib: int, memory: Mapping[str, int], utilization: float | None) -> str:
    """Two or three sentences with the arithmetic of a raised kernel reserve.

    :param memory: /proc/meminfo in KiB, as it is with ``now_kib``.
    :param utilization: the engine's share of the memory, None when it is not known.
    """

    def cost(more_kib: int) -> float:
        return max(more_kib, 0) / GIB_KIB * AVAILABLE_PER_RESERVE

    total = memory.get("MemTotal", 0) / GIB_KIB
    left = memory.get("MemAvailable", 0) / GIB_KIB - cost(wanted_kib - now_kib)
    text = (
        f"{MIN_FREE} = {wanted_kib} reserves {wanted_kib / GIB_KIB:.1f} GiB and takes about "
        f"{cost(wanted_kib - DEFAULT_RESERVE_KIB):.1f} GiB from MemAvailable, which vLLM checks at its start. "
        f"{left:.1f} of {total:.1f} GiB are left"
    )
    if utilization is None:
        text += "."
    elif left < utilization * total:
        text += (
            f", {utilization:g} × {total:.1f} = {utilization * total:.1f} GiB are wanted: vLLM will refuse to start."
        )
    else:
        text += f", {utilization:g} × {total:.1f} = {utilization * total:.1f} GiB are wanted."
    return text + " Leave the kernel's own reserve alone."


class Swap(NamedTuple):
    """A line of /proc/swaps."""

    path: str
    size_kib: int
    used_kib: int


def parse_swaps(text: str) -> list[Swap]:
    """/proc/swaps. A blank in a path is written as ``\\040``."""
    swaps = []
    for line in text.splitlines()[1:]:
        fields = line.split()
        if len(fields) >= 4:
            swaps.append(Swap(_unescape(fields[0]), int(fields[2]), int(fields[3])))
    return swaps


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), text)


def fstab_with(text: str, path: str, wanted: bool) -> str:
    """/etc/fstab with, or without, our swap file; every other line stays as it is, byte for byte."""
    kept, found = [], False
    for line in text.splitlines(keepends=True):
        fields = line.split()
        mine = len(fields) >= 3 and fields[0] == path and fields[2] == "swap"
        if mine and (found or not wanted):
            continue
        found = found or mine
        kept.append(line)
    if wanted and not found:
        if kept and not kept[-1].endswith("\n"):
            kept[-1] += "\n"
        kept.append(f"{path} none swap sw 0 0\n")
    return "".join(kept)


def disk_problem(path: str, folder: str, wanted_gib: float, free_gib: float, margin_gib: float) -> str | None:
    """A sentence when a swap file does not fit, else None."""
    if free_gib - wanted_gib >= margin_gib:
        return None
    return (
        f"{path}: {wanted_gib:g} GiB of swap are wanted, {folder} has {max(free_gib, 0):.1f} GiB free and {margin_gib:g} GiB "
        "have to stay free. Ask for less, or put the file on another disk."
    )


def refused_sysctls(names: Sequence[str]) -> str | None:
    """A sentence when one of the names is an action and not a setting, else None."""
    actions = [name for name in names if name in ("vm.drop_caches", "vm.compact_memory", "kernel.sysrq_trigger")]
    return f"{actions[0]} is an action and not a setting: it cannot be kept in a file." if actions else None
