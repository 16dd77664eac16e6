# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Run nvidia-smi with a timeout and read what it says.

On a GB10 memory, fan, power cap and memory clock are ``[N/A]`` or ``Not Supported`` (leptonai/gpud#1170): every such text is
``None`` here, never 0 and never an error. A call can block for minutes on a wedged driver (491-737 s seen), so every call has a
timeout, and a timeout is a verdict of its own: :class:`NvidiaSmiTimeout`.

Standard library only, nothing of Ansible and no other file of the collection: the programs that stay on a node ship a copy of this
file beside themselves. (Hence a runner of its own, without the imports of ``_command.py``, which a minutely timer would pay for.)
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

TIMEOUT_S = 10.0
# Bit of clocks_event_reasons.active (nvml.h, nvmlClocksEventReasons) -> its name in the XML.
_REASONS = (
    (0x001, "gpu_idle"),
    (0x002, "applications_clocks_setting"),
    (0x004, "sw_power_cap"),
    (0x008, "hw_slowdown"),
    (0x010, "sync_boost"),
    (0x020, "sw_thermal_slowdown"),
    (0x040, "hw_thermal_slowdown"),
    (0x080, "hw_power_brake_slowdown"),
    (0x100, "display_clocks_setting"),
)
_NOTHING = frozenset(("", "n/a", "not supported", "not available", "unknown error", "err!", "insufficient permissions"))


class NvidiaSmiError(Exception):
    """nvidia-smi gave no usable answer; the message is a sentence for the user."""


class NvidiaSmiAbsent(NvidiaSmiError):
    """There is no nvidia-smi on this node."""


class NvidiaSmiTimeout(NvidiaSmiError):
    """nvidia-smi did not come back: the driver is wedged. Not the same as "no GPU"."""


class NvidiaSmiFailed(NvidiaSmiError):
    """nvidia-smi came back with an error (``rc``) or refused (``text`` holds its words)."""

    def __init__(self, message: str, rc: int = 0, text: str = "") -> None:
        super().__init__(message)
        self.rc = rc
        self.text = text


class Process(NamedTuple):
    """A process on the GPU. ``used_mib`` works on GB10 although the memory totals do not."""

    pid: int
    name: str
    kind: str
    used_mib: float | None


class Gpu(NamedTuple):
    """One GPU of ``nvidia-smi -q -x``. ``None``: the driver does not say (memory, caps and fan of a GB10)."""

    bus_id: str
    name: str | None
    uuid: str | None
    driver_version: str | None
    persistence: bool | None
    pstate: str | None
    temperature_celsius: float | None
    power_w: float | None
    utilization_percent: float | None
    gr_mhz: float | None
    sm_mhz: float | None
    gr_max_mhz: float | None
    sm_max_mhz: float | None
    memory_total_mib: float | None
    memory_used_mib: float | None
    reasons: tuple[str, ...]
    processes: tuple[Process, ...]

    @property
    def unified_memory(self) -> bool:
        """True when CPU and GPU share one pool: then only /proc/meminfo tells how much is free."""
        return self.memory_total_mib is None


def text_or_none(text: str | None) -> str | None:
    """A value as nvidia-smi prints it, or None for ``[N/A]``, ``Not Supported``, ``[Unknown Error]`` and their like."""
    stripped = (text or "").strip()
    if stripped.strip("[]").strip().lower() in _NOTHING or (stripped.startswith("[") and stripped.endswith("]")):
        return None
    return stripped


def number_or_none(text: str | None) -> float | None:
    """The number in front of a unit (``124.89 W``, ``0 %``, ``2184 MHz``), or None when there is none."""
    words = (text_or_none(text) or "").split()
    try:
        return float(words[0]) if words else None
    except ValueError:
        return None


def reasons_of_mask(text: str | None) -> tuple[str, ...]:
    """Names of the bits in ``clocks_event_reasons.active`` (``0x0000000000000001`` -> ``("gpu_idle",)``)."""
    stripped = text_or_none(text)
    if stripped is None:
        return ()
    try:
        mask = int(stripped, 16)
    except ValueError:
        return ()
    return tuple(name for bit, name in _REASONS if mask & bit)


def parse_csv(text: str) -> list[dict[str, str | None]]:
    """Rows of ``--format=csv`` by field name without its unit (``power.draw [W]`` -> ``power.draw``).

    Only the last field of a row may hold a comma (a process name): ask for it last.
    """
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        return []
    names = [name.strip().partition(" [")[0] for name in lines[0].split(",")]
    rows = []
    for line in lines[1:]:
        cells = line.split(",", len(names) - 1)
        if len(cells) == len(names):
            rows.append({name: text_or_none(cell) for name, cell in zip(names, cells, strict=True)})
    return rows


def parse_xml(text: str) -> list[Gpu]:
    """The GPUs of ``nvidia-smi -q -x``, one at least. Raises NvidiaSmiFailed when the text is not that document."""
    from xml.etree import ElementTree

    try:
        root = ElementTree.fromstring(text)  # noqa: S314 - the driver's own tool wrote it
    except ElementTree.ParseError as exc:
        raise NvidiaSmiFailed(f"nvidia-smi -q -x did not print XML ({exc}): {_first_line(text)}", text=text) from exc
    driver = text_or_none(root.findtext("driver_version"))
    gpus = [_gpu(node, driver) for node in root.iter("gpu")]
    if not gpus:
        raise NvidiaSmiFailed("nvidia-smi -q -x names no GPU. Check the NVIDIA driver: nvidia-smi -L.", text=text)
    return gpus


def _gpu(node: Any, driver: str | None) -> Gpu:
    def word(path: str) -> str | None:
        return text_or_none(node.findtext(path))

    def number(*paths: str) -> float | None:
        return next((n for n in (number_or_none(node.findtext(p)) for p in paths) if n is not None), None)

    persistence = word("persistence_mode")
    reasons = []
    # Drivers before 535 say "throttle" where later ones say "event".
    for path in ("clocks_event_reasons", "clocks_throttle_reasons"):
        for child in node.findall(f"{path}/*"):
            if (child.text or "").strip() == "Active":
                reasons.append(child.tag.partition("_reason_")[2])
    processes = [
        Process(
            int(number_or_none(info.findtext("pid")) or 0),
            text_or_none(info.findtext("process_name")) or "?",
            text_or_none(info.findtext("type")) or "?",
            number_or_none(info.findtext("used_memory")),
        )
        for info in node.findall("processes/process_info")
    ]
    return Gpu(
        bus_id=str(node.get("id") or ""),
        name=word("product_name"),
        uuid=word("uuid"),
        driver_version=driver,
        persistence=None if persistence is None else persistence == "Enabled",
        pstate=word("performance_state"),
        temperature_celsius=number("temperature/gpu_temp"),
        power_w=number(
            "gpu_power_readings/average_power_draw",
            "gpu_power_readings/instant_power_draw",
            "gpu_power_readings/power_draw",
            "power_readings/power_draw",
        ),
        utilization_percent=number("utilization/gpu_util"),
        gr_mhz=number("clocks/graphics_clock"),
        sm_mhz=number("clocks/sm_clock"),
        gr_max_mhz=number("max_clocks/graphics_clock"),
        sm_max_mhz=number("max_clocks/sm_clock"),
        memory_total_mib=number("fb_memory_usage/total"),
        memory_used_mib=number("fb_memory_usage/used"),
        reasons=tuple(reasons),
        processes=tuple(processes),
    )


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "(no output)")


def _end(process: subprocess.Popen[str]) -> None:
    """Kill and do not wait for long: a process inside a wedged driver cannot be killed, and waiting for it would hang us too."""
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=0.5)
    if process.stdout is not None:
        process.stdout.close()


def run(arguments: Sequence[str], *, command: str = "nvidia-smi", timeout_s: float = TIMEOUT_S) -> str:
    """What ``nvidia-smi ARGUMENTS`` prints (both streams).

    Raises NvidiaSmiAbsent, NvidiaSmiTimeout, or NvidiaSmiFailed for an exit code other than 0.
    """
    queries = [argument for argument in arguments if argument.startswith("--query")]
    shown = " ".join((command, queries[0].partition("=")[0] if queries else " ".join(arguments))).strip()
    try:
        process = subprocess.Popen(  # pylint: disable=ansible-bad-function
            [command, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except FileNotFoundError as exc:
        raise NvidiaSmiAbsent(
            f"{command} is not installed here. Install the NVIDIA driver, or leave the GPU settings out."
        ) from exc
    except OSError as exc:
        raise NvidiaSmiFailed(f"{shown} cannot be started: {exc.strerror}.") from exc
    try:
        output, dummy = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired as exc:
        _end(process)
        raise NvidiaSmiTimeout(
            f"{shown} gave no answer within {timeout_s:g} s: the NVIDIA driver is wedged (this is not a missing GPU). "
            "Reboot this node."
        ) from exc
    if process.returncode != 0:
        raise NvidiaSmiFailed(
            f"{shown} ended with exit code {process.returncode}: {_first_line(output)}", process.returncode, output
        )
    return output


def query_gpus(
    fields: Sequence[str], *, command: str = "nvidia-smi", timeout_s: float = TIMEOUT_S
) -> list[dict[str, str | None]]:
    """``nvidia-smi --query-gpu=FIELDS``: one dictionary per GPU, absent values are None. Raises as :func:`run`."""
    return parse_csv(run([f"--query-gpu={','.join(fields)}", "--format=csv"], command=command, timeout_s=timeout_s))


def query_processes(*, command: str = "nvidia-smi", timeout_s: float = TIMEOUT_S) -> list[Process]:
    """Compute processes on the GPUs (``--query-compute-apps``). Raises as :func:`run`."""
    text = run(
        ["--query-compute-apps=pid,used_memory,process_name", "--format=csv"], command=command, timeout_s=timeout_s
    )
    processes = []
    for row in parse_csv(text):
        memory = row.get(
            "used_gpu_memory", row.get("used_memory")
        )  # asked for as used_memory, printed as used_gpu_memory
        name = row["process_name"] or "?"
        processes.append(Process(int(number_or_none(row["pid"]) or 0), name, "C", number_or_none(memory)))
    return processes


def snapshot(*, command: str = "nvidia-smi", timeout_s: float = TIMEOUT_S) -> list[Gpu]:
    """``nvidia-smi -q -x``: everything about every GPU, in one call. Raises as :func:`run`."""
    return parse_xml(run(["-q", "-x"], command=command, timeout_s=timeout_s))


# --- Clock lock -----------------------------------------------------------------------------------------------------------------
# The driver does not report a lock back: `-q -d CLOCK` keeps saying Max 3003 MHz and SUPPORTED_CLOCKS of a GB10 is empty (host
# tests, driver 580.178.04). What can be known is the tool's reply, our own record, and the SM clock under load. A cap snaps down
# to one of the GPU's steps (2200 reads 2184 or 2190).
SM_STEP_MHZ = 15.0
_REFUSED = ("not supported", "insufficient permission", "treating as warning", "unable to", "failed", "invalid")

LOW_POWER_CURE = (
    "Shut the node down, take the AC away for at least 60 s and start it again: "
    "no clock setting and no reboot cures this state."
)


class Clocks(NamedTuple):
    """What the GPUs of a node do now; of several GPUs the smallest maximum and the largest of everything else."""

    gr_max_mhz: float | None
    sm_mhz: float | None
    utilization_percent: float | None
    power_w: float | None
    persistence: bool | None
    reasons: tuple[str, ...]
    temperature_celsius: float | None = None

    @property
    def loaded(self) -> bool:
        """Busy enough for the SM clock to be at its cap."""
        return (self.utilization_percent or 0) >= 50

    @property
    def stuck_low_power(self) -> bool:
        """The state after a crash or power event in which a GB10 sits at 500-850 MHz and ~19 W, 96 % busy, without a reason.

        Healthy under the same load: 2281 MHz and 92.5 W. ``-lgc`` is accepted in this state and changes nothing.
        """
        busy = (self.utilization_percent or 0) > 90
        slow = self.sm_mhz is not None and self.sm_mhz < 1000
        weak = self.power_w is not None and self.power_w < 30
        return busy and slow and weak and not [r for r in self.reasons if r != "gpu_idle"]

    @property
    def shown(self) -> str:
        """``SM 799 MHz, 19.5 W, 96 % busy``."""
        return f"SM {_shown(self.sm_mhz)} MHz, {_shown(self.power_w, 1)} W, {_shown(self.utilization_percent)} % busy"


def _shown(number: float | None, digits: int = 0) -> str:
    return "?" if number is None else f"{number:.{digits}f}"


def read_clocks(*, command: str = "nvidia-smi", timeout_s: float = TIMEOUT_S) -> Clocks:
    """The GPUs' clocks, power and load in one call. Raises as :func:`run`, and NvidiaSmiFailed when there is no GPU."""
    fields = (
        "clocks.max.gr",
        "clocks.sm",
        "utilization.gpu",
        "power.draw",
        "persistence_mode",
        "clocks_event_reasons.active",
        "temperature.gpu",
    )
    rows = query_gpus(fields, command=command, timeout_s=timeout_s)
    if not rows:
        raise NvidiaSmiFailed(f"{command} names no GPU. Check the NVIDIA driver: nvidia-smi -L.")
    # The printed names differ from the asked ones (clocks.sm comes as clocks.current.sm), their order does not.
    columns = list(zip(*(row.values() for row in rows), strict=True))
    if len(columns) != len(fields):
        raise NvidiaSmiFailed(f"{command} answered {len(columns)} of {len(fields)} fields: {', '.join(rows[0])}.")
    numbers = [[n for n in map(number_or_none, column) if n is not None] for column in columns]
    modes = [text_or_none(mode) for mode in columns[4]]
    return Clocks(
        gr_max_mhz=min(numbers[0], default=None),
        sm_mhz=max(numbers[1], default=None),
        utilization_percent=max(numbers[2], default=None),
        power_w=max(numbers[3], default=None),
        persistence=None if None in modes else all(mode == "Enabled" for mode in modes),
        reasons=tuple(sorted({reason for mask in columns[5] for reason in reasons_of_mask(mask)})),
        temperature_celsius=max(numbers[6], default=None),
    )


def check_lock(min_mhz: int, max_mhz: int, clocks: Clocks) -> None:
    """Raise NvidiaSmiFailed (a sentence) for a lock that this GPU cannot hold."""
    if min_mhz > max_mhz:
        raise NvidiaSmiFailed(f"GPU clock {min_mhz}-{max_mhz} MHz: the minimum is above the maximum.")
    if clocks.gr_max_mhz is not None and max_mhz > clocks.gr_max_mhz:
        raise NvidiaSmiFailed(
            f"GPU clock maximum {max_mhz} MHz is above what this GPU can do: {clocks.gr_max_mhz:.0f} MHz (clocks.max.gr)."
        )


def driver_load(root: str = "/") -> int | None:
    """A number that changes when the driver is loaded again (the inode of its folder in sysfs); None without a driver module."""
    try:
        return os.stat(root.rstrip("/") + "/sys/module/nvidia").st_ino  # noqa: PTH116
    except OSError:
        return None


def why_lock(
    record: Mapping[str, Any] | None, min_mhz: int, max_mhz: int, driver: int | None, clocks: Clocks
) -> str | None:
    """Why ``-lgc`` has to be run: a short clause, or None when as far as one can know the lock is in force.

    :param record: what we last locked since this boot ({min_mhz, max_mhz, driver}), None when nothing.
    :param driver: :func:`driver_load` now.
    """
    if record is None:
        return "no lock is recorded since this node started"
    if (record.get("min_mhz"), record.get("max_mhz")) != (min_mhz, max_mhz):
        return f"locked to {record.get('min_mhz')}-{record.get('max_mhz')} MHz"
    if record.get("driver") != driver:
        return "the driver was loaded again, which drops the lock"
    if clocks.sm_mhz is not None and clocks.sm_mhz > max_mhz + SM_STEP_MHZ:
        return f"the SM clock is {clocks.sm_mhz:.0f} MHz, above the lock of {max_mhz} MHz"
    return None


def lock_clocks(min_mhz: int, max_mhz: int, *, command: str = "nvidia-smi", timeout_s: float = TIMEOUT_S) -> str:
    """``nvidia-smi -lgc MIN,MAX``; returns the tool's reply. Raises as :func:`run`, and NvidiaSmiFailed for a refusal.

    A refusal can come with exit code 0 ("Setting locked GPU clocks is not supported ... Treating as warning and moving on.").
    """
    text = run(["-lgc", f"{min_mhz},{max_mhz}"], command=command, timeout_s=timeout_s)
    wanted = f'GPU clocks set to "(gpuClkMin {min_mhz}, gpuClkMax {max_mhz})"'
    if wanted not in text:
        raise NvidiaSmiFailed(
            f"{command} -lgc {min_mhz},{max_mhz} did not lock the GPU clock: {_refusal(text)}", text=text
        )
    return wanted


def reset_clocks(*, command: str = "nvidia-smi", timeout_s: float = TIMEOUT_S) -> str:
    """``nvidia-smi -rgc``; returns the tool's reply. Raises as :func:`run`, and NvidiaSmiFailed for a refusal."""
    text = run(["-rgc"], command=command, timeout_s=timeout_s)
    if _refuses(text):
        raise NvidiaSmiFailed(f"{command} -rgc did not reset the GPU clock: {_refusal(text)}", text=text)
    return _first_line(text)


def _refuses(text: str) -> bool:
    lower = text.lower()
    return any(words in lower for words in _REFUSED)


def _refusal(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for line in lines if _refuses(line)), lines[0] if lines else "(no output)")
