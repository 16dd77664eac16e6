# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What NCCL took, from a rank's log and from the kernel's queue pairs; and whether its container could use RDMA at all.

NCCL falls back to TCP sockets without a word of error (about ten times slower). Its lines appear with NCCL_DEBUG=INFO only; with
WARN, the queue pairs that the rank's processes hold are the evidence. Pure functions.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ansible_collections.gb10.fleet.plugins.module_utils._findings import ERROR, NOTE, WARNING, Finding

DEVICE = "/dev/infiniband"
# NCCL registers GiB of memory: 8 MiB (Docker's default) ends in ENOMEM.
MEMLOCK_BYTES = 1 << 30


def transport(log: str) -> dict[str, Any]:
    """NCCL's own lines: ``devices`` of ``NET/IB : Using``, and the lines that prove a socket.

    ``NET/IB : Made virtual device`` lines and a merged ``[0]a+b`` are read as the devices that they name.
    """
    devices: list[str] = []
    sockets: list[str] = []
    for line in log.splitlines():
        using = re.search(r"NET/IB : Using (.*)", line)
        if using:
            named = re.findall(r"\[\d+\]([\w+]+):\d+/", using.group(1))
            devices += [name for merged in named for name in merged.split("+") if name not in devices]
        elif re.search(r"NET/Socket|NET/IB : No device found|Using network Socket", line):
            sockets.append(line.strip())
    return {"devices": devices, "sockets": sockets, "says": bool(devices or sockets)}


def queue_pairs(text: str, pids: Iterable[int]) -> list[str]:
    """``rdma -j resource show qp`` → devices on which one of the processes holds a connected queue pair."""
    try:
        rows = json.loads(text or "[]")
    except ValueError:
        return []
    mine = set(pids)
    used = {
        str(row["ifname"])
        for row in rows
        if isinstance(row, dict) and row.get("type") == "RC" and row.get("state") == "RTS" and row.get("pid") in mine
    }
    return sorted(used)


def locked_memory(limits: str) -> int | None:
    """/proc/PID/limits → soft limit of locked memory in bytes; None for unlimited. The limit inside the container."""
    match = re.search(r"^Max locked memory\s+(\S+)", limits, re.MULTILINE)
    return int(match.group(1)) if match and match.group(1).isdigit() else None


def container_trouble(name: str, rank: str, inspect: Mapping[str, Any], limits: str | None) -> list[Finding]:
    """What the container lacks for RDMA."""
    host = inspect.get("HostConfig") or {}
    found = []

    def error(code: str, text: str) -> None:
        found.append(Finding(ERROR, code, name, f"{name}: {rank} {text}"))

    mapped = [str(device.get("PathOnHost")) for device in host.get("Devices") or []]
    if not host.get("Privileged"):
        if not any(path == DEVICE or path.startswith(f"{DEVICE}/") for path in mapped):
            error(
                "net-tcp-fallback",
                f"has no {DEVICE}, so NCCL falls back to TCP (about ten times slower). Give the recipe "
                f"container.devices: [{DEVICE}].",
            )
        caps = {str(cap).removeprefix("CAP_") for cap in host.get("CapAdd") or []}
        if not caps & {"IPC_LOCK", "ALL"}:
            error(
                "net-tcp-fallback",
                "lacks IPC_LOCK, so it cannot pin memory for RDMA. Give the recipe container.cap_add: [IPC_LOCK].",
            )
    limit = locked_memory(limits) if limits is not None else None
    if limit is not None and limit < MEMLOCK_BYTES:
        error(
            "pre-memlock",
            f"may lock only {limit // 1024} KiB (ulimit -l): registering memory for RDMA ends in `Cannot allocate "
            f"memory`. Give the recipe container.ulimits: {{memlock: -1}}.",
        )
    return found


def use_trouble(
    name: str, rank: str, planned: Sequence[str], said: Mapping[str, Any], connected: Sequence[str]
) -> list[Finding]:
    """Whether RDMA is used on the planned devices. Sockets are an error, fewer devices a warning, silence a note."""
    if said["sockets"]:
        return [
            Finding(
                ERROR,
                "net-tcp-fallback",
                name,
                f"{name}: {rank} talks over TCP sockets although RDMA is wanted (about ten times slower): "
                f"`{said['sockets'][0]}`. Wanted NET/IB on {', '.join(planned)}: look at the container's {DEVICE}, "
                "NCCL_IB_HCA and the GID index.",
            )
        ]
    used = list(said["devices"]) or list(connected)
    if not used:
        return [
            Finding(
                NOTE,
                "rdma-unproven",
                name,
                f"{name}: {rank} says nothing of its transport and holds no RDMA queue pair; with NCCL_DEBUG=WARN "
                "that proves neither. For a proof give the recipe env NCCL_DEBUG: INFO and NCCL_DEBUG_SUBSYS: "
                "INIT,NET.",
            )
        ]
    missing = [device for device in planned if device not in used]
    if missing:
        return [
            Finding(
                WARNING,
                "net-one-rail",
                name,
                f"{name}: {rank} uses {', '.join(used)}, not {', '.join(missing)}: {len(used)} of {len(planned)} "
                "rails, about 12.8 instead of 20.9 GB/s. Look at NCCL_IB_HCA and at the GID of that device.",
            )
        ]
    return []
