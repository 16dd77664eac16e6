# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Watch a node while an engine is measured, and cost nothing: a few kept file descriptors every two seconds.

    qualify_sampler.py OUTPUT [--every 2] [--gpu-every 5] [--limit 14400] [--nvidia-smi nvidia-smi] [--root /]

Writes JSON lines to OUTPUT until SIGTERM, SIGINT or the limit: one `start`, then samples (`s`), then one `end` with what grew.
Memory comes from /proc/meminfo, temperature from the thermal zones, GPU readings from nvidia-smi. A call of nvidia-smi costs tens
of milliseconds of CPU: after the first it is asked so seldom that all calls together stay under 0.2 % of a core. Which process took
major faults is looked up when the kernel counted some (every ten seconds at most) and at the end, the sampler's own apart. A driver
that hangs is asked once.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import _nvidia_smi

# As in plugins/module_utils/_node.py.
ENGINE = re.compile(r"VLLM::|(?:^|/| )vllm serve|\bray::|raylet|gcs_server|(?:^|/| )tensorfold serve|vllm\.entrypoints")
GPU = {"util": "utilization.gpu", "power": "power.draw", "clock": "clocks.sm", "temp": "temperature.gpu"}
DRIVER = "driver_version"
# Counters of an InfiniBand port that count something bad.
RDMA_BAD = re.compile(
    r"err|discard|_dropped|downed|link_error|local_ack_timeout|out_of_sequence|rnr_nak_retry|packet_seq|duplicate_request"
)
GPU_SHARE = 0.002
SCAN_EVERY_S = 10.0
GPU_TIMEOUT_S = 8.0
MOST_LINES = 100_000
ENDING = (signal.SIGTERM, signal.SIGINT)


class Kept:
    """A file that is read again and again through one descriptor."""

    def __init__(self, path: Path) -> None:
        self.fd: int | None = None
        with contextlib.suppress(OSError):
            self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def read(self) -> str:
        if self.fd is None:
            return ""
        try:
            return os.pread(self.fd, 65536, 0).decode("utf-8", "replace")
        except OSError:
            return ""


def text(path: str | Path) -> str:
    """A small file of /proc or /sys, without the layers of open(): there may be thousands of processes."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        return os.read(fd, 65536).decode("utf-8", "replace")
    except OSError:
        return ""
    finally:
        os.close(fd)


def figure(table: str, name: str) -> int | None:
    """The number behind a name in a file of `name value` lines."""
    at = table.find(f"\n{name}") if not table.startswith(name) else -1
    words = table[at + 1 : at + 120].split(None, 2) if at >= 0 or table.startswith(name) else []
    return int(words[1]) if len(words) > 1 and words[1].isdigit() else None


def stat(content: str) -> tuple[str, int, int] | None:
    """Name, major faults and CPU ticks out of /proc/PID/stat; the name may hold spaces and brackets."""
    begin, end = content.find("("), content.rfind(")")
    fields = content[end + 1 :].split()
    if begin < 0 or len(fields) < 13:
        return None
    return content[begin + 1 : end], int(fields[9]), int(fields[11]) + int(fields[12])


class Sampler:
    """One run."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.root = options, Path(options.root)
        self.proc = self.root / "proc"
        self.meminfo, self.vmstat = Kept(self.proc / "meminfo"), Kept(self.proc / "vmstat")
        zones = sorted((self.root / "sys/class/thermal").glob("thermal_zone*"))
        acpi = [zone for zone in zones if text(zone / "type").strip() == "acpitz"]
        self.zones = [Kept(zone / "temp") for zone in acpi or zones]
        self.out = open(options.output, "w", encoding="utf-8", buffering=1)  # noqa: PTH123, SIM115
        self.lines = 0
        self.began, self.scan_due = 0.0, 0.0
        self.gpu_due, self.gpu_error = 0.0, ""
        self.driver: str | None = None
        self.faults_seen: dict[int, int] = {}
        self.sources: dict[str, dict[str, Any]] = {}
        self.first_cpu: dict[tuple[int, int], tuple[str, int]] = {}
        self.engines: dict[int, bool] = {}
        self.kernel_faults: int | None = None
        self.own = os.getpid()
        self.hertz = os.sysconf("SC_CLK_TCK")

    def write(self, kind: str, **values: Any) -> None:
        if self.lines < MOST_LINES or kind == "end":
            self.out.write(json.dumps({"k": kind, "at": round(time.time(), 2), **values}, separators=(",", ":")) + "\n")
            self.lines += 1

    # -- processes
    def is_engine(self, pid: int, name: str) -> bool:
        if pid not in self.engines:
            command = text(f"{self.proc}/{pid}/cmdline").replace("\0", " ")
            self.engines[pid] = bool(ENGINE.search(command) or ENGINE.search(name))
        return self.engines[pid]

    def scan(self, first: bool = False) -> None:
        """Who took major faults since the last scan. One that is new counts from its birth, except at the first."""
        for entry in os.listdir(self.proc):  # noqa: PTH208 - no Path per process
            if not entry.isdigit() or int(entry) == self.own:
                continue
            pid = int(entry)
            found = stat(text(f"{self.proc}/{entry}/stat"))
            if found is None:
                continue
            name, faults, _ticks = found
            grown = faults - self.faults_seen.get(pid, faults if first else 0)
            self.faults_seen[pid] = faults
            if grown > 0:
                engine = self.is_engine(pid, name)
                source = self.sources.setdefault(f"{name} {engine}", {"name": name, "engine": engine, "count": 0})
                source["count"] += grown

    def threads(self) -> dict[tuple[int, int], tuple[str, int]]:
        """CPU ticks of every thread of the engine."""
        out = {}
        for entry in os.listdir(self.proc):  # noqa: PTH208
            if not entry.isdigit() or not self.is_engine(int(entry), ""):
                continue
            with contextlib.suppress(OSError):
                for thread in os.listdir(self.proc / entry / "task"):  # noqa: PTH208
                    found = stat(text(f"{self.proc}/{entry}/task/{thread}/stat"))
                    if found:
                        out[int(entry), int(thread)] = (found[0], found[2])
        return out

    def rdma(self) -> dict[str, int]:
        out = {}
        for folder in (self.root / "sys/class/infiniband").glob("*/ports/*/*counters"):
            for path in sorted(folder.iterdir()) if folder.is_dir() else []:
                value = text(path).strip() if RDMA_BAD.search(path.name) else ""
                if value.isdigit():
                    out[f"{path.parents[3].name}/{path.name}"] = int(value)
        return out

    # -- readings
    def gpu(self, now: float) -> dict[str, Any]:
        if self.gpu_error or now < self.gpu_due:
            return {}
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        try:
            rows = _nvidia_smi.query_gpus(
                [*GPU.values(), DRIVER], command=self.options.nvidia_smi, timeout_s=GPU_TIMEOUT_S
            )
        except _nvidia_smi.NvidiaSmiError as error:
            self.gpu_error = str(error)
            return {}
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent = after.ru_utime + after.ru_stime  # by all calls so far: there are no other children
        cost = spent - before.ru_utime - before.ru_stime
        self.gpu_due = max(now + self.options.gpu_every, self.began + (spent + cost) / GPU_SHARE)
        row = rows[0] if rows else {}
        self.driver = row.get(DRIVER)
        values = {
            name: _nvidia_smi.number_or_none(row.get(field, row.get(field.replace("clocks.sm", "clocks.current.sm"))))
            for name, field in GPU.items()
        }
        return {name: value for name, value in values.items() if value is not None}

    def sample(self, now: float) -> None:
        memory = self.meminfo.read()
        values: dict[str, Any] = {"free": figure(memory, "MemFree:"), "avail": figure(memory, "MemAvailable:")}
        degrees = [int(value) for zone in self.zones if (value := zone.read().strip()).lstrip("-").isdigit()]
        if degrees:
            values["soc"] = max(degrees) / 1000
        values.update(self.gpu(now))
        faults = figure(self.vmstat.read(), "pgmajfault")
        if faults is not None and faults != self.kernel_faults:
            values["flt"] = faults - (self.kernel_faults or 0)
            self.kernel_faults = faults
            if now >= self.scan_due:
                self.scan()
                self.scan_due = now + SCAN_EVERY_S
        self.write("s", **values)

    def run(self) -> None:
        self.scan(first=True)
        self.first_cpu = self.threads()
        rdma = self.rdma()
        self.kernel_faults = figure(self.vmstat.read(), "pgmajfault")
        first_kernel = self.kernel_faults
        self.write("start", engines=[pid for pid, yes in self.engines.items() if yes], every=self.options.every)
        self.began = began = time.monotonic()
        # Not before the engine is at work: idle readings say nothing.
        self.gpu_due = began + min(2 * self.options.every, self.options.gpu_every)
        usage = [resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)]
        self.sample(began)
        # What the first sample loads comes from the disk, as the program itself did.
        own_faults = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
        while not signal.sigtimedwait(ENDING, self.options.every) and time.monotonic() - began < self.options.limit:
            self.sample(time.monotonic())
        seconds = time.monotonic() - began
        now = [resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)]
        self.scan()
        last_cpu, last_rdma = self.threads(), self.rdma()
        busy = []
        for key, (name, ticks) in last_cpu.items():
            if key in self.first_cpu and ticks > self.first_cpu[key][1]:
                share = (ticks - self.first_cpu[key][1]) / self.hertz / seconds * 100 if seconds else 0.0
                busy.append({"pid": key[0], "name": name, "cpu_percent": round(share, 1)})
        busy.sort(key=lambda row: -row["cpu_percent"])

        def cpu(index: int) -> float:
            return now[index].ru_utime + now[index].ru_stime - usage[index].ru_utime - usage[index].ru_stime

        self.write(
            "end",
            seconds=round(seconds, 2),
            faults=sorted(self.sources.values(), key=lambda row: -row["count"]),
            kernel_faults=(self.kernel_faults or 0) - (first_kernel or 0),
            rdma={name: value - rdma.get(name, 0) for name, value in last_rdma.items() if value > rdma.get(name, 0)},
            threads=busy[:8],
            gpu_error=self.gpu_error,
            driver=self.driver,
            kernel=os.uname().release,
            cost={
                "cpu_s": round(cpu(0), 4),
                "nvidia_smi_cpu_s": round(cpu(1), 4),
                "percent_of_a_core": round((cpu(0) + cpu(1)) / seconds * 100, 3) if seconds else 0.0,
                "major_faults": now[0].ru_majflt - own_faults,
                "rss_mib": round(now[0].ru_maxrss / 1024, 1),
            },
        )
        self.out.flush()
        os.fsync(self.out.fileno())


def main() -> int:
    parser = argparse.ArgumentParser(description="Watch a node while an engine is measured.")
    parser.add_argument("output")
    parser.add_argument("--every", type=float, default=2.0)
    parser.add_argument("--gpu-every", type=float, default=5.0)
    parser.add_argument("--limit", type=float, default=14400.0)
    parser.add_argument("--nvidia-smi", default="nvidia-smi")
    parser.add_argument("--root", default="/")
    options = parser.parse_args()
    # Waited for between two samples: a sample is always whole.
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    Sampler(options).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
