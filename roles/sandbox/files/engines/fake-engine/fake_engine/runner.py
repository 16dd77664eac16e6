# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the head and its workers have in common: stages, their lines, their time, their faults."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import NoReturn

from . import failures
from .failures import DEVICE_GIB
from .faults import Fault, Settings
from .journal import Journal, Rank
from .peers import Hub, Peer, interface_missing

KILLED = 137
GIB = 1 << 30
# What the recorded model takes of a GB10's memory (public case ready-success-log).
CONSUMED_GIB, ACTIVATION_GIB, GRAPHS_GIB = 86.93, 3.6, 0.26


class Stopped(Exception):
    """SIGTERM or SIGINT."""


class Failed(Exception):
    """The rank said why it fails; its exit code."""

    def __init__(self, code: int = 1) -> None:
        super().__init__(code)
        self.code = code


def gone() -> NoReturn:
    """As by SIGKILL, which a container's first process cannot send to itself."""
    sys.stdout.flush()
    if os.getpid() != 1:
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(KILLED)


def frozen() -> None:
    """As by SIGSTOP."""
    if os.getpid() != 1:
        os.kill(os.getpid(), signal.SIGSTOP)
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    threading.Event().wait()


def shm_free_mib() -> int:
    state = os.statvfs("/dev/shm")  # noqa: S108  it is what the engine shares tensors through
    return state.f_bavail * state.f_frsize >> 20


class Runner:
    """What heads and workers have in common: stages, their lines, their time, their faults."""

    def __init__(self, rank: Rank, settings: Settings, environment: dict[str, str]) -> None:
        self.rank, self.settings, self.environment = rank, settings, environment
        self.journal = Journal(rank, environment)
        self.stop = threading.Event()
        self.hub: Hub | None = None
        self.peer: Peer | None = None
        self.kv_gib = settings.number("KV_GIB", 8.54)

    # -- time and faults ------------------------------------------------------------------------------------------------

    def wait(self, seconds: float) -> bool:
        """Let time pass; True when told to stop. A head that is not serving yet does not listen (as measured)."""
        if not self.rank.headless:
            time.sleep(seconds)
            return False
        return self.stop.wait(seconds)

    def pass_time(self, seconds: float) -> None:
        if self.wait(seconds):
            raise Stopped

    def forever(self) -> None:
        """Say nothing and go nowhere; a worker listens for the end."""
        while True:
            self.pass_time(3600)

    def stage(self, name: str) -> None:
        """Lines of a stage, then its faults, then its time."""
        self.journal.stage(name)
        for fault in self.settings.at(name):
            self.strike(fault)
        self.pass_time(self.settings.delay_s(name))

    def strike(self, fault: Fault) -> None:
        if fault.kind == "die":
            gone()
        elif fault.kind == "freeze":
            frozen()
        elif fault.kind == "exit":
            raise Failed(int(fault.value or 0))
        elif fault.kind == "stuck":
            threading.Event().wait()
        else:
            reason = failures.reason(fault, self.rank, self.kv_gib)
            if reason:
                self.journal.write_all(failures.warnings(fault))
                self.fail(*reason)

    def fail(self, where: str, text: str) -> NoReturn:
        """Say what a real rank says when its engine core or its worker process fails, and end."""
        journal, headless = self.journal, self.rank.headless
        if where == "core":
            error = (r"RuntimeError: Insufficient space.*", text)
            journal.tail("shm_too_small_head.log", "EngineCore failed to start", error)
        else:
            error = (r"FileNotFoundError: No such file or directory: .*", text)
            journal.tail(f"load_error_{'worker' if headless else 'head'}.log", "WorkerProc failed to start", error)
        raise Failed(1)

    # -- stages of every rank ---------------------------------------------------------------------------------------------

    def check_interface(self) -> None:
        for name in ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
            wanted = self.environment.get(name, "")
            if interface_missing(wanted):
                self.fail("worker", failures.NO_INTERFACE.format(name=wanted))

    def network_lines(self) -> None:
        """What NCCL says about the way that it takes, when it is told to say anything."""
        environment = self.environment
        if environment.get("NCCL_DEBUG", "").upper() not in ("INFO", "TRACE") or not self.rank.multi:
            return
        tag = f"{socket.gethostname()}:{os.getpid()}:{os.getpid()} [0] NCCL INFO"
        devices = [name for name in environment.get("NCCL_IB_HCA", "").lstrip("=^").split(",") if name]
        interface = environment.get("NCCL_SOCKET_IFNAME", "eth0").lstrip("=^").split(",")[0]
        away = environment.get("NCCL_IB_DISABLE") == "1"
        missing = not Path("/dev/infiniband").exists() or any(fault.kind == "tcp" for fault in self.settings.faults)
        if devices and not away and not missing:
            found = " ".join(f"[{number}]{name.split(':')[0]}:1/RoCE" for number, name in enumerate(devices))
            self.journal.write(f"{tag} NET/IB : Using {found} [RO]; OOB {interface}:{self.rank.host_ip}<0>")
            name, way = "IB", "IB/0"
        else:
            if not away:
                self.journal.write(f"{tag} NET/IB : No device found.")
            self.journal.write(f"{tag} NET/Socket : Using [0]{interface}:{self.rank.host_ip}<0>")
            name, way = "Socket", "Socket/0"
        self.journal.write(f"{tag} Using network {name}")
        other = (self.rank.number + 1) % self.rank.world
        self.journal.write(f"{tag} Channel 00/0 : {self.rank.number}[0] -> {other}[0] [send] via NET/{way}")

    def load(self) -> None:
        """Weights: the bar of the head's loader, one step a file."""
        journal, rank = self.journal, self.rank
        journal.stage("loading")
        files = int(self.settings.number("SHARDS", 0)) or len(list(Path(rank.model).glob("*.safetensors"))) or 1
        seconds = self.settings.delay_s("loading")
        self.bar(0, files, 0.0)
        self.pass_time(seconds / 2)
        for fault in self.settings.at("loading"):
            self.strike(fault)
        for done in range(1, files + 1):
            self.pass_time(seconds / 2 / files)
            self.bar(done, files, seconds * done / files)
        own = [line for line in journal.sections.get("loaded", ()) if "Loading weights took" in line]
        journal.lines(re.sub(r"(?<=took )[\d.]+", f"{seconds:.2f}", line) for line in own)
        if rank.platform == "gb10":
            took = f"Model loading took {CONSUMED_GIB} GiB memory and {seconds:.6f} seconds"
            journal.say(rank.worker_name, "INFO", "gpu_model_runner.py:5149", took)

    def bar(self, done: int, files: int, seconds: float) -> None:
        if self.rank.number == 0:
            left = "?" if done == 0 else "00:00"
            rate = "?it/s" if done == 0 else f"{done / max(seconds, 0.001):.2f}it/s"
            clock = f"{int(seconds) // 60:02d}:{int(seconds) % 60:02d}"
            text = f"{100 * done // files:3d}% Completed | {done}/{files} [{clock}<{left}, {rate}]"
            self.journal.write(f"\rLoading safetensors checkpoint shards: {text}" + ("\n" if done == files else ""))

    def compile(self) -> None:
        if "eager" not in self.journal.flags and self.rank.platform == "gb10":
            seconds = self.settings.delay_s("compile")
            self.journal.say(
                self.rank.worker_name, "INFO", "monitor.py:53", f"torch.compile took {seconds:.2f} s in total"
            )
        self.stage("compile")

    def say_kv(self) -> None:
        if self.rank.platform == "gb10":
            text = f"Available KV cache memory: {self.kv_gib:.2f} GiB"
            self.journal.say(self.rank.worker_name, "INFO", "gpu_worker.py:760", text)

    def graphs(self) -> None:
        rank, journal = self.rank, self.journal
        self.stage("graphs")
        if rank.platform != "gb10":
            return
        if "eager" not in journal.flags:
            text = f"Graph capturing finished in {self.settings.delay_s('graphs'):.0f} secs, took {GRAPHS_GIB:.2f} GiB"
            journal.say(rank.worker_name, "INFO", "gpu_model_runner.py:6581", text)
        if "kv_cache_memory_bytes" in rank.given:
            return
        desired = rank.utilization * DEVICE_GIB
        fits, most = self.kv_gib - 0.15, self.kv_gib + DEVICE_GIB - desired - 4.0
        journal.say(
            rank.worker_name,
            "INFO",
            "gpu_worker.py:1014",
            f"Free memory on device (110.34/{DEVICE_GIB} GiB) on startup. Desired GPU memory utilization is ({rank.utilization}, "
            f"{desired:.2f} GiB). Actual usage is {CONSUMED_GIB} GiB for consumed memory (weights + non-torch), "
            f"{ACTIVATION_GIB} GiB for peak activation, and {GRAPHS_GIB} GiB for CUDAGraph memory. "
            f"Replace gpu_memory_utilization config with `--kv-cache-memory={int(fits * GIB)}` ({fits:.2f} GiB) "
            f"to fit into requested memory, or `--kv-cache-memory={int(most * GIB)}` ({most:.2f} GiB) "
            f"to fully utilize gpu memory. Current kv cache memory in use is {self.kv_gib:.2f} GiB.",
        )
