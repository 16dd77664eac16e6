# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Where the heat is: readings, their summary over a time, and findings with evidence. Pure functions.

Diagnosis comes before levers (seed "GLM-5.3-Flash on 2x NVIDIA DGX Spark"): its head node ran at 89-90 °C, and the biggest lever
was not the GPU but a worker that burned two cores while it waited.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ansible_collections.gb10.fleet.plugins.module_utils import _cpufreq, _nvidia_smi

# Fast cores are capped at this by default (seed: 3.9 GHz -> 3.3 GHz), so only policies above it are "fast" in a finding.
FAST_MHZ = 3300
SPIN_PERCENT = 150.0  # a Worker_TP at 198 % spins; after GLM53_SPINWAIT_MS=16 it was at 123 %
HOT_CELSIUS = 90.0
BUSY_GPU_PERCENT = 90.0
IDLE_CORE_PERCENT = 10.0
# CPU part numbers of MIDR_EL1, Arm Ltd.
_CORES = {0xD85: "Cortex-X925", 0xD87: "Cortex-A725"}


class Zone(NamedTuple):
    """A thermal zone of the kernel."""

    name: str
    kind: str
    celsius: float


class Ticks(NamedTuple):
    """CPU time of a process or thread so far, in seconds."""

    name: str
    seconds: float


def core_type(midr: str | None) -> str | None:
    """Name of the core from its MIDR_EL1 (``0x00000000410fd850`` -> ``Cortex-X925``); None for one that is not of a GB10."""
    try:
        value = int(midr or "", 16)
    except ValueError:
        return None
    return _CORES.get((value >> 4) & 0xFFF) if value >> 24 & 0xFF == 0x41 else None


def soc_celsius(zones: Iterable[Zone]) -> float | None:
    """The hottest ``acpitz`` zone. A GB10 has seven of them and no way to tell which is where; without any, the hottest zone."""
    zones = list(zones)
    acpi = [zone.celsius for zone in zones if zone.kind == "acpitz"]
    return max(acpi or [zone.celsius for zone in zones], default=None)


def metric(text: str, name: str) -> float | None:
    """Sum of a Prometheus metric over its labels; None when the page does not have it."""
    found = re.findall(rf"^{re.escape(name)}(?:\{{[^\n]*\}})? (\S+)", text, re.MULTILINE)
    values = [float(value) for value in found]
    return sum(values) if values else None


def stat_seconds(stat: str, ticks_per_second: int) -> Ticks | None:
    """Name and CPU time out of ``/proc/<pid>/stat``. The name may hold spaces and brackets."""
    start, end = stat.find("("), stat.rfind(")")
    fields = stat[end + 1 :].split()
    if start < 0 or len(fields) < 13:
        return None
    return Ticks(stat[start + 1 : end], (int(fields[11]) + int(fields[12])) / ticks_per_second)


def busiest(
    before: Mapping[int, Ticks], after: Mapping[int, Ticks], seconds: float, most: int = 5
) -> list[dict[str, Any]]:
    """Those of ``after`` (id -> ticks) that used the CPU most since ``before``: {id, name, cpu_percent}, 100 is one core."""
    rows = [
        {"id": key, "name": now.name, "cpu_percent": round((now.seconds - before[key].seconds) / seconds * 100, 1)}
        for key, now in after.items()
        if key in before and seconds > 0
    ]
    rows.sort(key=lambda row: (-float(str(row["cpu_percent"])), row["id"]))
    return rows[:most]


def core_busy(before: str, after: str) -> dict[int, float]:
    """Busy percent of each CPU between two readings of ``/proc/stat``."""

    def times(text: str) -> dict[int, tuple[int, int]]:
        out = {}
        for cpu, rest in re.findall(r"^cpu(\d+) (.*)$", text, re.MULTILINE):
            fields = [int(f) for f in rest.split()]
            out[int(cpu)] = (sum(fields[:8]), fields[3] + fields[4])
        return out

    first, busy = times(before), {}
    for cpu, (total, idle) in times(after).items():
        elapsed = total - first.get(cpu, (0, 0))[0]
        if cpu in first and elapsed > 0:
            busy[cpu] = round(100 - (idle - first[cpu][1]) / elapsed * 100, 1)
    return busy


def summary(samples: Sequence[Mapping[str, Any]], seconds: float) -> dict[str, Any]:
    """One reading out of many: the mean of power and load, the median SM clock, the highest temperatures."""

    def values(key: str) -> list[float]:
        return [sample[key] for sample in samples if sample.get(key) is not None]

    def rounded(number: float | None) -> float | None:
        return None if number is None else round(number, 1)

    power, load, clock = values("power_w"), values("utilization_percent"), values("sm_mhz")
    return {
        "seconds": round(seconds, 1),
        "samples": len(samples),
        "power_w": rounded(statistics.fmean(power)) if power else None,
        "utilization_percent": rounded(statistics.fmean(load)) if load else None,
        "sm_mhz": rounded(statistics.median(clock)) if clock else None,
        "gpu_celsius": max(values("gpu_celsius"), default=None),
        "soc_celsius": max(values("soc_celsius"), default=None),
        "reasons": sorted({reason for sample in samples for reason in sample.get("reasons") or ()}),
    }


def speed_groups(policies: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
    """Fast and slow policies: fast is within a tenth of the highest hardware maximum. All are fast when all are alike."""
    top = max((policy["hardware_max_mhz"] for policy in policies), default=0)
    fast = [policy for policy in policies if policy["hardware_max_mhz"] >= 0.9 * top]
    return fast, [policy for policy in policies if policy not in fast]


def findings(info: Mapping[str, Any]) -> list[dict[str, str]]:
    """What makes the heat, each with its evidence and its lever: {code, finding, evidence, lever}.

    :param info: ``policies``, ``cores`` (busy percent by CPU), ``window`` (:func:`summary`), ``processes`` (:func:`busiest`),
        ``lock`` (the recorded clock lock), ``gpu_error``.
    """
    return [
        {"code": code, "finding": finding, "evidence": evidence, "lever": lever}
        for code, finding, evidence, lever in (*_cpu(info), *_threads(info), *_gpu(info))
    ]


_Row = tuple[str, str, str, str]


def _cpu(info: Mapping[str, Any]) -> list[_Row]:
    policies, rows = list(info.get("policies") or []), []
    cores = {cpu: policy for policy in policies for cpu in policy["cpu_list"]}
    pinned = [cpu for cpu, policy in cores.items() if policy["governor"] == "performance"]
    if pinned:
        busy = info.get("cores") or {}
        idle = [cpu for cpu in pinned if busy.get(cpu, 100.0) < IDLE_CORE_PERCENT]
        speeds = sorted({cores[cpu]["current_mhz"] for cpu in idle if cores[cpu]["current_mhz"]})
        doing = ""
        if speeds:
            at = f"{speeds[0]}" if len(speeds) == 1 else f"{speeds[0]}-{speeds[-1]}"
            doing = f"; {len(idle)} idle cores at {at} MHz doing nothing"
        rows.append(
            (
                "governor_pinned",
                f"Governor pins {len(pinned)} of {len(cores)} cores at their maximum, always",
                f"performance governor{doing}",
                "thermal_governor: auto",
            )
        )
    open_fast = [p for p in policies if p["hardware_max_mhz"] > FAST_MHZ and p["max_mhz"] > FAST_MHZ]
    if open_fast:
        top = max(p["max_mhz"] for p in open_fast)
        cpus = sorted(cpu for p in open_fast for cpu in p["cpu_list"])
        first = cores.get(0)
        hidden = f"; cpu0 alone says {first['hardware_max_mhz']} MHz" if first and first not in open_fast else ""
        rows.append(
            (
                "fast_cores_uncapped",
                f"{len(cpus)} fast cores boost to {top / 1000:.1f} GHz under load",
                f"cpuinfo_max_freq of CPUs {_cpufreq.ranges(cpus)}{hidden}",
                f"thermal_cpu_cap_mhz: {FAST_MHZ}",
            )
        )
    return rows


def _threads(info: Mapping[str, Any]) -> list[_Row]:
    rows = []
    for process in info.get("processes") or []:
        if process["cpu_percent"] >= SPIN_PERCENT and "Worker" in process["name"]:
            rows.append(
                (
                    "spin_wait",
                    f"Busy-wait polling burns {process['cpu_percent'] / 100:.1f} cores",
                    f"{process['name']} (pid {process['id']}) at {process['cpu_percent']:.0f} % CPU over "
                    f"{info['window']['seconds']:g} s",
                    "the engine's spin window, in the recipe that supports it (env GLM53_SPINWAIT_MS: 16 with the EXL3 kit)",
                )
            )
    return rows


def _gpu(info: Mapping[str, Any]) -> list[_Row]:
    window, rows = info.get("window") or {}, []
    if info.get("gpu_error"):
        return [("gpu_unreadable", "The GPU cannot be read", info["gpu_error"], "see the evidence")]
    load, watts, die = window.get("utilization_percent"), window.get("power_w"), window.get("gpu_celsius")
    clock, lock = window.get("sm_mhz"), info.get("lock")
    reasons = [r for r in window.get("reasons") or [] if "thermal" in r]
    state = _nvidia_smi.Clocks(None, clock, load, watts, None, tuple(window.get("reasons") or ()))
    if state.stuck_low_power:
        rows.append(
            (
                "low_power_state",
                "The GPU is stuck in its low-power state",
                f"{state.shown}, no reason given",
                state_cure(),
            )
        )
    elif load is not None and load >= BUSY_GPU_PERCENT:
        rows.append(
            (
                "gpu_floor_heat",
                f"GPU at {load:.0f} % is the floor heat",
                f"GPU die {_number(die)} °C, {_number(watts)} W at {_number(clock)} MHz: it soaks the SoC zones",
                "none needed" if lock else "thermal_gpu_clock_max_mhz: 2200",
            )
        )
    if lock and clock is not None and clock > lock["max_mhz"] + _nvidia_smi.SM_STEP_MHZ:
        rows.append(
            (
                "lock_lost",
                "The GPU clock lock is not in force",
                f"SM {clock:.0f} MHz, locked to {lock['min_mhz']}-{lock['max_mhz']} MHz",
                "the drift timer sets it again within a minute",
            )
        )
    if reasons:
        rows.append(
            (
                "thermal_slowdown",
                "The GPU slows down because it is hot",
                f"{', '.join(reasons)}; GPU {_number(die)} °C",
                "thermal_gpu_clock_max_mhz: a lower one (91 °C became 65 °C at 2100)",
            )
        )
    soc = window.get("soc_celsius")
    if soc is not None and soc >= HOT_CELSIUS:
        rows.append(
            (
                "hot",
                "The node is near the temperature at which it powers off without a log line",
                f"hottest acpitz zone {soc:.1f} °C",
                "the levers above; power-offs with another cause exist, they show cool zones",
            )
        )
    return rows


def state_cure() -> str:
    """What to do about the stuck low-power state."""
    return _nvidia_smi.LOW_POWER_CURE


def _number(value: float | None) -> str:
    return "?" if value is None else f"{value:g}"


def row(node: str, when: str, info: Mapping[str, Any]) -> dict[str, Any]:
    """One line of the table before/after: governor, caps, clocks, power, temperatures, speed."""
    fast, slow = speed_groups(info.get("policies") or [])
    window, gpu = info.get("window") or {}, info.get("gpu") or {}

    def one(policies: Sequence[Mapping[str, Any]], key: str) -> Any:
        values = sorted({policy[key] for policy in policies})
        return values[0] if len(values) == 1 else "/".join(map(str, values)) or None

    return {
        "node": node,
        "when": when,
        "governor": one([*fast, *slow], "governor"),
        "fast_MHz": one(fast, "max_mhz"),
        "slow_MHz": one(slow, "max_mhz"),
        "SM_MHz": window.get("sm_mhz") if window.get("sm_mhz") is not None else gpu.get("sm_mhz"),
        "GPU_%": window.get("utilization_percent"),
        "GPU_W": window.get("power_w"),
        "GPU_°C": window.get("gpu_celsius"),
        "SoC_°C": window.get("soc_celsius"),
        "tok/s": info.get("decode_tokens_per_s"),
    }


def policy_dict(policy: _cpufreq.Policy, kind: str | None) -> dict[str, Any]:
    """A policy as the modules return it, frequencies in MHz."""
    return {
        "name": policy.name,
        "cpus": _cpufreq.ranges(policy.cpus),
        "cpu_list": list(policy.cpus),
        "core_type": kind,
        "governor": policy.governor,
        "available_governors": list(policy.governors),
        "current_mhz": None if policy.current_khz is None else policy.current_khz // 1000,
        "max_mhz": policy.scaling_max_khz // 1000,
        "hardware_min_mhz": policy.hardware_min_khz // 1000,
        "hardware_max_mhz": policy.hardware_max_khz // 1000,
    }
