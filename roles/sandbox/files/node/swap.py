#!/usr/bin/python3
# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Stand-in `swapon` and `swapoff`: swap belongs to the whole host, so a node only keeps the list in its own /proc/swaps.

Knows `swapon FILE`, `swapon -p N FILE`, `swapon -a`, `swapon --show[=..] [--noheadings] [--bytes]`, `swapoff FILE`, `swapoff -a`.
"""

from __future__ import annotations

import sys
from pathlib import Path

SWAPS = Path("/proc/swaps")
MAGIC = b"SWAPSPACE2"


def entries(text: str) -> dict[str, list[str]]:
    """Path to [type, size KiB, used, priority]."""
    return {line.split()[0]: line.split()[1:] for line in text.splitlines()[1:] if line.strip()}


def render(found: dict[str, list[str]]) -> str:
    rows = ["Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority"]
    rows += [
        f"{path:<39} {kind}\t\t{size}\t\t{used}\t\t{priority}" for path, (kind, size, used, priority) in found.items()
    ]
    return "\n".join(rows) + "\n"


def from_fstab(text: str) -> list[str]:
    lines = (line.split() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#"))
    return [
        words[0]
        for words in lines
        if len(words) >= 3 and words[2] == "swap" and (len(words) < 4 or "noauto" not in words[3])
    ]


def switch_on(found: dict[str, list[str]], path: str, priority: str = "-2") -> str | None:
    """Add one; a sentence when the kernel would refuse it."""
    file = Path(path)
    if not file.exists():
        return f"swapon: cannot open {path}: No such file or directory"
    if path in found:
        return f"swapon: {path}: swapon failed: Device or resource busy"
    with file.open("rb") as stream:
        stream.seek(4086)
        if stream.read(10) != MAGIC:
            return f"swapon: {path}: read swap header failed"
    found[path] = ["file", str(file.stat().st_size // 1024 - 4), "0", priority]
    return None


def main(argv: list[str]) -> int:
    name = Path(argv[0]).name
    flags = [word for word in argv[1:] if word.startswith("-")]
    paths = [word for word in argv[1:] if not word.startswith("-")]
    found = entries(SWAPS.read_text(encoding="utf-8"))
    everything = "-a" in flags or "--all" in flags
    problems: list[str] = []
    if name == "swapoff":
        for path in list(found) if everything else paths:
            if found.pop(path, None) is None:
                problems.append(f"swapoff: {path}: swapoff failed: Invalid argument")
    elif any(flag.startswith(("--show", "-s")) for flag in flags) or not (paths or everything):
        if not any(flag.startswith("--noheadings") for flag in flags) and found:
            print("NAME TYPE SIZE USED PRIO")
        for path, (kind, size, used, priority) in found.items():
            print(path, kind, int(size) * 1024 if "--bytes" in flags else f"{int(size) // 1024}M", used, priority)
        return 0
    else:
        priority = "-2"
        if "-p" in flags and paths:
            priority = paths.pop(0)
        wanted = paths or [
            path for path in from_fstab(Path("/etc/fstab").read_text(encoding="utf-8")) if path not in found
        ]
        problems += [problem for path in wanted if (problem := switch_on(found, path, priority))]
    SWAPS.write_text(render(found), encoding="utf-8")
    for problem in problems:
        print(problem, file=sys.stderr)
    return 255 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv))
