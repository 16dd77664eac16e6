# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a node's files and tools say, as values. Pure functions; ``node_info`` reads, ``_preflight.py`` judges."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

GIB_KIB = 1024 * 1024
# Names that engine processes give themselves (setproctitle), or their command lines.
ENGINE = re.compile(r"VLLM::|(?:^|/| )vllm serve|\bray::|raylet|gcs_server|(?:^|/| )tensorfold serve|vllm\.entrypoints")


def gib(kib: float | None) -> float | None:
    return None if kib is None else kib / GIB_KIB


def meminfo(text: str) -> dict[str, int]:
    """/proc/meminfo in KiB by field."""
    values = {}
    for line in text.splitlines():
        name, rest = line.partition(":")[::2]
        words = rest.split()
        if words and words[0].isdigit():
            values[name.strip()] = int(words[0])
    return values


def kho_reserve(memory: Mapping[str, int]) -> bool:
    """Kexec HandOver gave pages away as movable: CmaFree > CmaTotal. RDMA cannot pin them (7.0.0-10xx-nvidia)."""
    return memory.get("CmaFree", 0) > memory.get("CmaTotal", 0)


def os_release(text: str) -> dict[str, str]:
    found = re.findall(r'^([A-Z_]+)="?([^"\n]*)"?$', text, re.MULTILINE)
    return {name.lower(): value for name, value in found}


def container_of(cgroup: str) -> str | None:
    """Container id out of /proc/PID/cgroup (v1 and v2, cgroupfs and systemd drivers); the innermost one."""
    found = re.findall(r"(?:docker[-/]|/)([0-9a-f]{64})(?:\.scope)?(?=[/\n]|$)", cgroup)
    return str(found[-1])[:12] if found else None


def listeners(table: str) -> list[dict[str, Any]]:
    """Listening sockets of /proc/net/tcp or tcp6: port, uid and whether it listens on every address."""
    found = []
    for line in table.splitlines()[1:]:
        words = line.split()
        if len(words) < 10 or words[3] != "0A":
            continue
        address, port = words[1].rpartition(":")[::2]
        found.append({"port": int(port, 16), "uid": int(words[7]), "everywhere": not address.strip("0")})
    return found


def socket_owners(text: str) -> dict[int, dict[str, Any]]:
    """``ss -Hltnp`` → {port: {name, pid}}; needs root for the sockets of others."""
    owners: dict[int, dict[str, Any]] = {}
    for line in text.splitlines():
        match = re.search(r":(\d+)\s+\S+\s+.*?users:\(\(\"([^\"]+)\",pid=(\d+)", line)
        if match:
            owners[int(match.group(1))] = {"name": match.group(2), "pid": int(match.group(3))}
    return owners


def group_members(line: str) -> list[str]:
    """``getent group docker`` → the users that the group file names."""
    fields = line.strip().split(":")
    return [name for name in fields[3].split(",") if name] if len(fields) >= 4 else []


def ahosts(text: str) -> list[str]:
    """``getent ahosts NAME`` → distinct addresses."""
    return list(dict.fromkeys(line.split()[0] for line in text.splitlines() if line.split()))


def driver_of_cdi(text: str) -> str | None:
    """Driver version that a CDI specification was written for (libcuda.so.580.159.03)."""
    match = re.search(r"lib(?:cuda|nvidia-ml)\.so\.(\d+\.\d+(?:\.\d+)?)", text)
    return match.group(1) if match else None


def pcie_faults(kernel_log: str) -> list[str]:
    """Kernel lines of a fatal PCIe error that took the CX7 with it. Corrected errors, and the warning about 27 W that healthy
    units print as well, are none (dgx-spark-playbooks#108)."""
    fatal = re.compile(r"AER:.*Uncorrect\w* \(Fatal\)|mlx5_pci_err_detected|mlx5_pci_slot_reset|soft lockup.*aerdrv")
    return [line.strip() for line in kernel_log.splitlines() if fatal.search(line)]


def top_users(
    processes: Iterable[Mapping[str, Any]], gpu: Iterable[Mapping[str, Any]], number: int = 3
) -> list[dict[str, Any]]:
    """Largest holders of memory. GPU allocations of a GB10 are in no process's resident set, so both are added up.

    :param processes: ``pid``, ``name``, ``rss_kib``.
    :param gpu: ``pid``, ``name``, ``used_mib`` as nvidia-smi lists them.
    """
    held: dict[int, dict[str, Any]] = {
        int(p["pid"]): {"pid": int(p["pid"]), "name": p["name"], "kib": int(p["rss_kib"])} for p in processes
    }
    for item in gpu:
        entry = held.setdefault(int(item["pid"]), {"pid": int(item["pid"]), "name": item["name"], "kib": 0})
        entry["kib"] += int((item.get("used_mib") or 0) * 1024)
    return sorted(held.values(), key=lambda entry: -entry["kib"])[:number]


def missing_kib(size_gib: float | None, present_bytes: int) -> float:
    """What is still to be written of something that is ``size_gib`` large; sizes are rounded, so 1 % counts as complete."""
    whole = (size_gib or 0.0) * GIB_KIB
    missing = whole - present_bytes / 1024
    return missing if missing > whole / 100 else 0.0


def per_file_system(needs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Needs summed where they share a file system.

    :param needs: ``what``, ``path``, ``device``, ``mount``, ``free_kib``, ``need_kib``.
    """
    systems: dict[Any, dict[str, Any]] = {}
    for need in needs:
        entry = systems.setdefault(
            need["device"], {"mount": need["mount"], "free_kib": need["free_kib"], "need_kib": 0.0, "parts": []}
        )
        entry["need_kib"] += need["need_kib"]
        if need["need_kib"]:
            entry["parts"].append(f"{need['what']} {need['need_kib'] / GIB_KIB:.1f} GiB")
    return list(systems.values())
