#!/usr/bin/python3
# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Stand-in `nvidia-smi` of a GB10: answers as the public captures of one do, with their `[N/A]`s.

Answers: no arguments (the table), -q [-x], -L, --query-gpu=F --format=csv[,noheader][,nounits], --query-compute-apps=F,
-lgc MIN,MAX, -rgc, -pm, -pl. A clock lock is accepted and, as on the real one, never reported back: only the SM clock under
load shows it.

Knobs, one file each in /run/fake-gpu (gone on reboot, like the lock itself):

    hang          seconds to sleep before anything is answered (a wedged driver)
    fail          a text: any call prints it and exits 9 (for instance: Unable to determine the device handle ...)
    refuse        a text: -lgc and -rgc print it and exit 4 (for instance: Setting locked clocks is not supported)
    util          GPU utilization in percent; >= 50 counts as loaded, from which clock, power and temperature follow
    power         watt         temperature   degrees Celsius         sm_clock     MHz          pstate      P0
    throttle      active clock event reasons, hexadecimal (0x0000000000000020)
    driver        driver version        name      product name (NVIDIA GB10)
    processes     lines "pid,name,MiB"; a process that is gone is no longer listed
    lgc           written by -lgc: "MIN,MAX"
"""

from __future__ import annotations

import os
import re
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

NA = "[N/A]"
BUS = "0000000F:01:00.0"
UUID = "GPU-6b1a0c1e-0000-4000-8000-00000000gb10"
IDLE_SM_MHZ, DEFAULT_SM_MHZ, MAX_SM_MHZ = 208, 2418, 3003
LOADED_PERCENT = 50
ABBREVIATIONS = ("mig", "pci", "gpu", "sm", "uuid")
NO_PERMISSION = "The current user does not have permission to change clocks for GPU"
ENDING = "Terminating early due to previous errors."


@dataclass(frozen=True)
class Process:
    pid: int
    name: str
    used_mib: int


class Gpu:
    """The state that the knobs describe."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def knob(self, name: str, default: str = "") -> str:
        try:
            return (self.folder / name).read_text(encoding="utf-8").strip() or default
        except OSError:
            return default

    def number(self, name: str, default: float) -> float:
        try:
            return float(self.knob(name))
        except ValueError:
            return default

    @property
    def lock(self) -> tuple[int, int] | None:
        found = re.fullmatch(r"(\d+),(\d+)", self.knob("lgc"))
        return (int(found[1]), int(found[2])) if found else None

    @property
    def util(self) -> int:
        return int(self.number("util", 0))

    @property
    def loaded(self) -> bool:
        return self.util >= LOADED_PERCENT

    @property
    def sm_clock(self) -> int:
        if not self.loaded:
            default = max(IDLE_SM_MHZ, self.lock[0]) if self.lock else IDLE_SM_MHZ
        elif self.lock:  # a 2200 cap reads 2184 - 2190 under load
            default = min(self.lock[1] - 13, DEFAULT_SM_MHZ) if self.lock[1] < DEFAULT_SM_MHZ else DEFAULT_SM_MHZ
        else:
            default = DEFAULT_SM_MHZ
        return int(self.number("sm_clock", default))

    @property
    def power(self) -> float:
        capped = self.lock is not None and self.lock[1] <= 2200
        return self.number("power", (48.4 if capped else 78.0) if self.loaded else 3.5)

    @property
    def temperature(self) -> int:
        capped = self.lock is not None and self.lock[1] <= 2200
        return int(self.number("temperature", (70 if capped else 86) if self.loaded else 38))

    @property
    def pstate(self) -> str:
        return self.knob("pstate", "P0" if self.loaded else "P8")

    @property
    def throttle(self) -> str:
        return self.knob("throttle", "0x0000000000000000" if self.loaded else "0x0000000000000001")

    @property
    def driver(self) -> str:
        return self.knob("driver", "580.159.03")

    @property
    def name(self) -> str:
        return self.knob("name", "NVIDIA GB10")

    def processes(self) -> Iterator[Process]:
        for line in self.knob("processes").splitlines():
            pid, name, mib = (part.strip() for part in line.split(",", 2))
            if Path(f"/proc/{pid}").exists():
                yield Process(int(pid), name, int(mib))


def field(gpu: Gpu, name: str) -> tuple[str, str, str] | None:
    """(column header, value, unit) of a --query-gpu field, None if there is no such field."""
    timestamp = time.strftime("%Y/%m/%d %H:%M:%S.000")
    plain = {
        "timestamp": timestamp,
        "name": gpu.name,
        "gpu_name": gpu.name,
        "index": "0",
        "count": "1",
        "uuid": UUID,
        "gpu_uuid": UUID,
        "serial": NA,
        "driver_version": gpu.driver,
        "compute_cap": "12.1",
        "pci.bus_id": BUS,
        "gpu_bus_id": BUS,
        "pstate": gpu.pstate,
        "persistence_mode": "Enabled",
        "compute_mode": "Default",
        "display_active": "Disabled",
        "mig.mode.current": NA,
        "ecc.mode.current": NA,
        "clocks_event_reasons.active": gpu.throttle,
        "clocks_throttle_reasons.active": gpu.throttle,
        "clocks_event_reasons.hw_thermal_slowdown": "Not Active",
        "clocks_event_reasons.sw_thermal_slowdown": "Not Active",
        "clocks_event_reasons.sw_power_cap": "Not Active",
        "temperature.gpu": str(gpu.temperature),
        "temperature.memory": NA,
        "fan.speed": NA,
    }
    if name in plain:
        header = "clocks_event_reasons.active" if name == "clocks_throttle_reasons.active" else name
        return header, plain[name], ""
    clock = {
        "clocks.sm": "sm",
        "clocks.current.sm": "sm",
        "clocks.gr": "graphics",
        "clocks.current.graphics": "graphics",
    }
    if name in clock:
        return f"clocks.current.{clock[name]}", str(gpu.sm_clock), "MHz"
    top = {"clocks.max.sm": "sm", "clocks.max.gr": "graphics", "clocks.max.graphics": "graphics"}
    if name in top:
        return f"clocks.max.{top[name]}", str(MAX_SM_MHZ), "MHz"
    united = {
        "power.draw": (f"{gpu.power:.2f}", "W"),
        "power.draw.average": (f"{gpu.power:.2f}", "W"),
        "power.draw.instant": (f"{gpu.power:.2f}", "W"),
        "power.limit": (NA, "W"),
        "enforced.power.limit": (NA, "W"),
        "power.max_limit": (NA, "W"),
        "utilization.gpu": (str(gpu.util), "%"),
        "utilization.memory": ("0", "%"),
        "memory.total": (NA, "MiB"),
        "memory.used": (NA, "MiB"),
        "memory.free": (NA, "MiB"),
        "memory.reserved": (NA, "MiB"),
        "clocks.mem": (NA, "MHz"),
        "clocks.max.mem": (NA, "MHz"),
    }
    if name in united:
        header = {"clocks.mem": "clocks.current.memory", "clocks.max.mem": "clocks.max.memory"}.get(name, name)
        return header, *united[name]
    return None


def csv(rows: list[list[tuple[str, str, str]]], header: list[tuple[str, str, str]], formats: set[str]) -> list[str]:
    """Lines of --format=csv; a value that is not available never carries a unit."""
    units = "nounits" not in formats
    lines = []
    if "noheader" not in formats:
        lines.append(", ".join(f"{name} [{unit}]" if unit else name for name, _, unit in header))
    for row in rows:
        lines.append(
            ", ".join(f"{value} {unit}" if unit and units and value != NA else value for _, value, unit in row)
        )
    return lines


def query_gpu(gpu: Gpu, names: list[str], formats: set[str]) -> tuple[list[str], int]:
    cells = []
    for name in names:
        cell = field(gpu, name)
        if cell is None:
            return [f'Field "{name}" is not a valid field to query.', ""], 2
        cells.append(cell)
    return csv([cells], cells, formats), 0


def query_apps(gpu: Gpu, names: list[str], formats: set[str]) -> tuple[list[str], int]:
    known = {
        "pid",
        "process_name",
        "name",
        "used_memory",
        "used_gpu_memory",
        "gpu_uuid",
        "gpu_name",
        "gpu_bus_id",
        "timestamp",
    }
    for name in names:
        if name not in known:
            return [f'Field "{name}" is not a valid field to query.', ""], 2

    def cell(name: str, process: Process | None) -> tuple[str, str, str]:
        values = {
            "gpu_uuid": UUID,
            "gpu_name": gpu.name,
            "gpu_bus_id": BUS,
            "timestamp": time.strftime("%Y/%m/%d %H:%M:%S.000"),
        }
        if process:
            values |= {"pid": str(process.pid), "process_name": process.name, "name": process.name}
            values |= dict.fromkeys(("used_memory", "used_gpu_memory"), str(process.used_mib))
        header = {"name": "process_name", "used_memory": "used_gpu_memory"}.get(name, name)
        return header, values.get(name, ""), "MiB" if header == "used_gpu_memory" else ""

    rows = [[cell(name, process) for name in names] for process in gpu.processes()]
    return csv(rows, [cell(name, None) for name in names], formats), 0


def table(gpu: Gpu) -> list[str]:
    """The default output, laid out as the capture of a GB10."""
    edge = "+" + "-" * 41 + "+" + "-" * 24 + "+" + "-" * 22 + "+"
    power = f"{gpu.power:.0f}W /  N/A"
    lines = [
        time.strftime("%a %b %e %H:%M:%S %Y"),
        "+" + "-" * 89 + "+",
        f"| {'NVIDIA-SMI ' + gpu.driver:<34}{'Driver Version: ' + gpu.driver:<31}{'CUDA Version: 13.0':<23}|",
        edge,
        "| GPU  Name                 Persistence-M | Bus-Id          Disp.A | Volatile Uncorr. ECC |",
        "| Fan  Temp   Perf          Pwr:Usage/Cap |           Memory-Usage | GPU-Util  Compute M. |",
        "|                                         |                        |               MIG M. |",
        "|" + "=" * 41 + "+" + "=" * 24 + "+" + "=" * 22 + "|",
        f"|   0  {gpu.name:<30} On  |   {BUS} Off |                  N/A |",
        f"| N/A   {gpu.temperature}C    {gpu.pstate}{power:>23}  | Not Supported          | {gpu.util:>6}%      Default |",
        "|                                         |                        |                  N/A |",
        edge,
        "",
        "+" + "-" * 89 + "+",
        f"| {'Processes:':<88}|",
        "|  GPU   GI   CI              PID   Type   Process name                        GPU Memory |",
        "|        ID   ID                                                               Usage      |",
        "|" + "=" * 89 + "|",
    ]
    processes = list(gpu.processes())
    if not processes:
        lines.append(f"|  {'No running processes found':<87}|")
    for process in processes:
        name = process.name if len(process.name) <= 30 else f"...{process.name[-27:]}"
        lines.append(f"|    0   N/A  N/A {process.pid:>16}      C   {name:<30} {process.used_mib:>11}MiB |")
    lines.append("+" + "-" * 89 + "+")
    return lines


def document(gpu: Gpu) -> dict[str, object]:
    """The tree behind -q and -q -x; keys are the XML's."""
    na = "N/A"
    return {
        "product_name": gpu.name,
        "product_brand": "NVIDIA",
        "product_architecture": "Blackwell",
        "persistence_mode": "Enabled",
        "addressing_mode": "ATS",
        "mig_mode": {"current_mig": na, "pending_mig": na},
        "serial": na,
        "uuid": UUID,
        "minor_number": "0",
        "vbios_version": "9A.0B.1F.00.00",
        "gpu_part_number": na,
        "pci": {"pci_bus": "01", "pci_device": "00", "pci_domain": "000F", "pci_bus_id": BUS},
        "fan_speed": na,
        "performance_state": gpu.pstate,
        "clocks_event_reasons": {
            "clocks_event_reason_gpu_idle": "Not Active" if gpu.loaded else "Active",
            "clocks_event_reason_sw_power_cap": "Not Active",
            "clocks_event_reason_hw_slowdown": "Not Active",
            "clocks_event_reason_hw_thermal_slowdown": "Not Active",
            "clocks_event_reason_hw_power_brake_slowdown": "Not Active",
            "clocks_event_reason_sw_thermal_slowdown": "Not Active",
        },
        "fb_memory_usage": {"total": na, "reserved": na, "used": na, "free": na},
        "bar1_memory_usage": {"total": na, "used": na, "free": na},
        "compute_mode": "Default",
        "utilization": {"gpu_util": f"{gpu.util} %", "memory_util": "0 %"},
        "temperature": {
            "gpu_temp": f"{gpu.temperature} C",
            "gpu_temp_tlimit": na,
            "gpu_temp_max_tlimit_threshold": na,
            "gpu_temp_slow_tlimit_threshold": na,
            "memory_temp": na,
        },
        "gpu_power_readings": {
            "power_state": gpu.pstate,
            "average_power_draw": f"{gpu.power:.2f} W",
            "instant_power_draw": f"{gpu.power:.2f} W",
            "current_power_limit": na,
            "requested_power_limit": na,
            "default_power_limit": na,
            "min_power_limit": na,
            "max_power_limit": na,
        },
        "clocks": {
            "graphics_clock": f"{gpu.sm_clock} MHz",
            "sm_clock": f"{gpu.sm_clock} MHz",
            "mem_clock": na,
            "video_clock": na,
        },
        "applications_clocks": {"graphics_clock": na, "mem_clock": na},
        "default_applications_clocks": {"graphics_clock": na, "mem_clock": na},
        "max_clocks": {
            "graphics_clock": f"{MAX_SM_MHZ} MHz",
            "sm_clock": f"{MAX_SM_MHZ} MHz",
            "mem_clock": na,
            "video_clock": na,
        },
        "supported_clocks": na,
        "processes": [
            {
                "process_info": {
                    "gpu_instance_id": na,
                    "compute_instance_id": na,
                    "pid": str(process.pid),
                    "type": "C",
                    "process_name": process.name,
                    "used_memory": f"{process.used_mib} MiB",
                }
            }
            for process in gpu.processes()
        ],
    }


def to_xml(parent: ET.Element, tree: dict[str, object]) -> None:
    for key, value in tree.items():
        child = ET.SubElement(parent, key)
        if isinstance(value, dict):
            to_xml(child, value)
        elif isinstance(value, list):
            for item in value:
                to_xml(child, item)
        else:
            child.text = str(value)


def query_xml(gpu: Gpu) -> list[str]:
    root = ET.Element("nvidia_smi_log")
    head: dict[str, object] = {"timestamp": time.strftime("%a %b %e %H:%M:%S %Y"), "driver_version": gpu.driver}
    to_xml(root, head | {"cuda_version": "13.0", "attached_gpus": "1"})
    to_xml(ET.SubElement(root, "gpu", id=BUS), document(gpu))
    ET.indent(root, "\t")
    first = ['<?xml version="1.0" ?>', '<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v13.dtd">']
    return first + ET.tostring(root, encoding="unicode").splitlines()


def query_text(gpu: Gpu) -> list[str]:
    """-q: the same tree, indented, with readable keys."""

    def lines(tree: dict[str, object], depth: int) -> Iterator[str]:
        for key, value in tree.items():
            words = (word.upper() if word in ABBREVIATIONS else word.capitalize() for word in key.split("_"))
            label = " ".join(words)
            if isinstance(value, dict):
                yield " " * depth + label
                yield from lines(value, depth + 4)
            elif isinstance(value, list):
                yield f"{' ' * depth}{label:<{50 - depth}}{': None' if not value else ''}".rstrip()
                for item in value:
                    yield from lines(item, depth + 4)
            else:
                yield f"{' ' * depth}{label:<{50 - depth}}: {value}"

    head = [
        "",
        "==============NVSMI LOG==============",
        "",
        f"{'Timestamp':<50}: {time.strftime('%a %b %e %H:%M:%S %Y')}",
    ]
    head += [
        f"{'Driver Version':<50}: {gpu.driver}",
        f"{'CUDA Version':<50}: 13.0",
        "",
        f"{'Attached GPUs':<50}: 1",
        f"GPU {BUS}",
    ]
    return [*head, *lines(document(gpu), 4)]


def lock_clocks(gpu: Gpu, wanted: str | None) -> tuple[list[str], int]:
    """-lgc MIN,MAX (or one value) and, with None, -rgc."""
    if os.geteuid() != 0:
        return [f"{NO_PERMISSION} {BUS}.", ENDING], 4
    if gpu.knob("refuse"):
        return [gpu.knob("refuse"), ENDING], 4
    record = gpu.folder / "lgc"
    if wanted is None:
        record.unlink(missing_ok=True)
        return ["All done."], 0
    found = re.fullmatch(r"(\d+)(?:,(\d+))?", wanted)
    if not found:
        return [f"Option -lgc: {wanted!r} is not MIN,MAX in MHz."], 2
    low, high = int(found[1]), int(found[2] or found[1])
    if low > high:
        return [f"GPU clocks could not be set for GPU {BUS}: Invalid Argument", ENDING], 2
    gpu.folder.mkdir(exist_ok=True)
    record.write_text(f"{low},{high}\n", encoding="utf-8")
    return [f'GPU clocks set to "(gpuClkMin {low}, gpuClkMax {high})" for GPU {BUS}', "All done."], 0


def options(argv: list[str]) -> dict[str, str | None]:
    """Options of the real tool: -x, -lgc A,B, -lgc=A,B, --lock-gpu-clocks=A,B."""
    short = {
        "lock-gpu-clocks": "lgc",
        "reset-gpu-clocks": "rgc",
        "query": "q",
        "xml-format": "x",
        "id": "i",
        "list-gpus": "L",
    }
    short |= {"persistence-mode": "pm", "power-limit": "pl", "display": "d"}
    takes_value = {"lgc", "i", "pm", "pl", "d", "format", "query-gpu", "query-compute-apps"}
    found: dict[str, str | None] = {}
    words = list(argv)
    while words:
        name, has_value, value = words.pop(0).partition("=")
        name = name.lstrip("-")
        name = short.get(name, name)
        if name in takes_value and not has_value and words:
            value, has_value = words.pop(0), "="
        found[name] = value if has_value else None
    return found


def answer(gpu: Gpu, argv: list[str]) -> tuple[list[str], int]:
    """(lines, exit status) for a command line."""
    given = options(argv)
    if gpu.knob("fail"):
        return [gpu.knob("fail")], 9
    formats = set((given.get("format") or "").split(","))
    for name, query in (("query-gpu", query_gpu), ("query-compute-apps", query_apps)):
        if name in given:
            if "csv" not in formats:
                return ['"--format=" with "csv" must be given.'], 2
            return query(gpu, [part.strip() for part in (given[name] or "").split(",")], formats)
    if "lgc" in given:
        return lock_clocks(gpu, given["lgc"] or "")
    if "rgc" in given:
        return lock_clocks(gpu, None)
    if "pm" in given:
        return [f"Persistence mode is already Enabled for GPU {BUS}.", "All done."], 0
    if "pl" in given:
        refused = f"Changing power management limit is not supported for GPU: {BUS}."
        return [refused, "Treating as warning and moving on.", "All done."], 0
    if "L" in given:
        return [f"GPU 0: {gpu.name} (UUID: {UUID})"], 0
    if "q" in given:
        return (query_xml(gpu) if "x" in given else query_text(gpu)), 0
    unknown = [name for name in given if name not in ("i", "")]
    if unknown:
        return [f"Invalid combination of input arguments. Please run 'nvidia-smi -h' for help: {unknown[0]}"], 2
    return table(gpu), 0


def main() -> int:
    gpu = Gpu(Path(os.environ.get("FAKE_GPU", "/run/fake-gpu")))
    time.sleep(gpu.number("hang", 0))
    lines, status = answer(gpu, sys.argv[1:])
    print("\n".join(lines))
    return status


if __name__ == "__main__":
    raise SystemExit(main())
