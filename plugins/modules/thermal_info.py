#!/usr/bin/python
# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: thermal_info
short_description: Read temperatures, clocks, power and the busiest engine threads of a node
version_added: "0.1.0"
description:
  - Reads every thermal zone, the GPU, every cpufreq policy and the CPU time of the engine's processes over a short time, and says
    what makes the heat, with evidence and lever.
  - A node without GPU, cpufreq driver or thermal zones gives V(null) for what it lacks; nothing of this is an error.
  - Needs no privilege.
author:
  - The gb10.fleet maintainers (@gb10-fleet)
extends_documentation_fragment:
  - gb10.fleet.attributes
  - gb10.fleet.attributes.read_only
options:
  duration_s:
    description: Seconds to sample for while the engine is idle or there is none.
    type: float
    default: 2
  loaded_duration_s:
    description: Seconds to sample for when O(metrics_url) tells that requests are running.
    type: float
    default: 30
  settle_s:
    description:
      - Seconds to wait before the samples when requests are running. Temperatures follow a change slowly.
    type: float
    default: 0
  metrics_url:
    description: Prometheus page of the engine, for its running requests and decode speed. Not read when not set.
    type: str
  record:
    description: File of M(gb10.fleet.gpu_clock) that records the clock lock.
    type: path
    default: /run/gb10-fleet/tuning.json
  nvidia_smi:
    description: The tool, by name or path.
    type: str
    default: nvidia-smi
  timeout_s:
    description: Seconds after which nvidia-smi counts as hanging in a wedged driver.
    type: float
    default: 10
  root:
    description: Folder that stands for V(/), for tests and captured trees.
    type: path
    default: /
seealso:
  - module: gb10.fleet.cpu_frequency
  - module: gb10.fleet.gpu_clock
"""

EXAMPLES = r"""
- name: Read the node under its current load
  gb10.fleet.thermal_info:
    metrics_url: http://127.0.0.1:8000/metrics
  register: thermal

- name: Show what makes the heat
  ansible.builtin.debug:
    var: thermal.findings
"""

RETURN = r"""
zones:
  description: Every thermal zone - C(name), C(kind) and C(celsius).
  returned: success
  type: list
  elements: dict
policies:
  description:
    - Every cpufreq policy - C(name), C(cpus), C(core_type), C(governor), C(available_governors), C(current_mhz), C(max_mhz),
      C(hardware_min_mhz), C(hardware_max_mhz). A current frequency far above the hardware's maximum is V(null).
  returned: success
  type: list
  elements: dict
gpu:
  description:
    - The GPU as C(nvidia-smi -q -x) tells it at the end - C(name), C(bus_id), C(driver_version), C(temperature_celsius),
      C(power_w), C(utilization_percent), C(sm_mhz), C(gr_max_mhz), C(pstate), C(persistence), C(reasons). V(null) when it cannot
      be read.
  returned: success
  type: dict
gpu_error:
  description: Why the GPU could not be read. A driver that hangs is told apart from a GPU that is not there.
  returned: success
  type: str
lock:
  description: The recorded clock lock (C(min_mhz), C(max_mhz)), V(null) without one.
  returned: success
  type: dict
window:
  description:
    - Means and maxima over C(seconds) - C(power_w) and C(utilization_percent) (means), C(sm_mhz) (median), C(gpu_celsius) and
      C(soc_celsius) (highest), C(reasons), C(samples).
  returned: success
  type: dict
decode_tokens_per_s:
  description: Generated tokens per second over the window. V(null) when nothing was running.
  returned: success
  type: float
requests_running:
  description: Running requests at the start. V(null) without O(metrics_url) or when the page does not answer.
  returned: success
  type: float
processes:
  description: The engine's processes that use the CPU most - C(id), C(name), C(cpu_percent) (100 is one core), C(threads).
  returned: success
  type: list
  elements: dict
findings:
  description: What makes the heat - C(code), C(finding), C(evidence), C(lever).
  returned: success
  type: list
  elements: dict
"""

import os
import time
from http.client import HTTPException
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.urls import open_url

from ansible_collections.gb10.fleet.plugins.module_utils import _cpufreq, _nvidia_smi, _thermal
from ansible_collections.gb10.fleet.plugins.module_utils._journal import JournalError, read_json
from ansible_collections.gb10.fleet.plugins.module_utils._node import ENGINE
from ansible_collections.gb10.fleet.plugins.module_utils._sysfs import Tree

SAMPLES = 15
METRICS_TIMEOUT_S = 5


class ThermalReader:
    def __init__(self, module: AnsibleModule) -> None:
        self.params = module.params
        self.tree = Tree(self.params["root"])
        self.smi = {"command": self.params["nvidia_smi"], "timeout_s": self.params["timeout_s"]}
        self.gpu_error: str | None = None
        self.ticks_per_second = os.sysconf("SC_CLK_TCK")

    def run(self) -> dict[str, Any]:
        page, read_at = self.metrics(), time.monotonic()
        running = _thermal.metric(page, "vllm:num_requests_running")
        seconds = self.params["loaded_duration_s"] if running else self.params["duration_s"]
        if running and self.params["settle_s"] > 0:
            time.sleep(self.params["settle_s"])
            page, read_at = self.metrics(), time.monotonic()
        engines = self.engines()
        cpu, processes = self.tree.text("proc/stat") or "", self.cpu_times(engines)
        threads = {pid: self.thread_times(pid) for pid in engines}
        started = time.monotonic()
        samples = self.sample_for(seconds)
        elapsed = time.monotonic() - started
        info: dict[str, Any] = {
            "zones": [zone._asdict() for zone in self.zones()],
            "policies": self.policies(),
            "cores": _thermal.core_busy(cpu, self.tree.text("proc/stat") or ""),
            "window": _thermal.summary(samples, elapsed),
            "requests_running": running,
            "decode_tokens_per_s": self.decode_speed(page, running, read_at),
            "processes": _thermal.busiest(processes, self.cpu_times(engines), elapsed),
        }
        for process in info["processes"]:
            before, after = threads[process["id"]], self.thread_times(process["id"])
            process["threads"] = _thermal.busiest(before, after, elapsed, most=3)
        info["gpu"] = self.gpu()
        info["gpu_error"] = self.gpu_error
        info["lock"] = self.lock()
        info["findings"] = _thermal.findings(info)
        del info["cores"]
        return info

    def sample_for(self, seconds: float) -> list[dict[str, Any]]:
        """Readings spread over ``seconds``; one at least. A driver that does not answer is asked once."""
        samples, end = [], time.monotonic() + seconds
        while True:
            samples.append(self.sample())
            left = end - time.monotonic()
            if left <= 0:
                return samples
            time.sleep(min(left, max(seconds / SAMPLES, 1.0)))

    def sample(self) -> dict[str, Any]:
        out: dict[str, Any] = {"soc_celsius": _thermal.soc_celsius(self.zones())}
        if self.gpu_error is None:
            try:
                clocks = _nvidia_smi.read_clocks(**self.smi)
            except _nvidia_smi.NvidiaSmiError as exc:
                self.gpu_error = str(exc)
            else:
                out.update(
                    power_w=clocks.power_w,
                    utilization_percent=clocks.utilization_percent,
                    sm_mhz=clocks.sm_mhz,
                    gpu_celsius=clocks.temperature_celsius,
                    reasons=clocks.reasons,
                )
        return out

    def gpu(self) -> dict[str, Any] | None:
        if self.gpu_error is not None:
            return None
        try:
            gpu = _nvidia_smi.snapshot(**self.smi)[0]
        except _nvidia_smi.NvidiaSmiError as exc:
            self.gpu_error = str(exc)
            return None
        return {**gpu._asdict(), "processes": [process._asdict() for process in gpu.processes]}

    def lock(self) -> dict[str, Any] | None:
        try:
            record = (read_json(self.params["record"], None) or {}).get("gpu")
        except JournalError:
            return None
        return {key: record[key] for key in ("min_mhz", "max_mhz")} if record else None

    def zones(self) -> list[_thermal.Zone]:
        zones = []
        for name in self.tree.names("sys/class/thermal"):
            millidegrees = self.tree.number("sys/class/thermal", name, "temp")
            if name.startswith("thermal_zone") and millidegrees is not None:
                kind = self.tree.text("sys/class/thermal", name, "type") or "?"
                zones.append(_thermal.Zone(name, kind, millidegrees / 1000))
        return zones

    def policies(self) -> list[dict[str, Any]]:
        try:
            policies = _cpufreq.read_policies(self.params["root"])
        except _cpufreq.CpuFrequencyError:
            return []
        return [_thermal.policy_dict(policy, self.core_type(policy)) for policy in policies]

    def core_type(self, policy: _cpufreq.Policy) -> str | None:
        first = policy.cpus[0] if policy.cpus else 0
        midr = self.tree.text(f"sys/devices/system/cpu/cpu{first}/regs/identification/midr_el1")
        return _thermal.core_type(midr)

    def engines(self) -> list[int]:
        """Processes of an engine, by the names that they give themselves."""
        found = []
        for name in self.tree.names("proc"):
            if name.isdigit():
                command = (self.tree.text("proc", name, "cmdline") or "").replace("\0", " ")
                if ENGINE.search(command) or ENGINE.search(self.tree.text("proc", name, "comm") or ""):
                    found.append(int(name))
        return found

    def cpu_times(self, pids: list[int]) -> dict[int, _thermal.Ticks]:
        return self.ticks({pid: f"proc/{pid}/stat" for pid in pids})

    def thread_times(self, pid: int) -> dict[int, _thermal.Ticks]:
        return self.ticks(
            {int(tid): f"proc/{pid}/task/{tid}/stat" for tid in self.tree.names("proc", str(pid), "task")}
        )

    def ticks(self, paths: dict[int, str]) -> dict[int, _thermal.Ticks]:
        read = {
            key: _thermal.stat_seconds(self.tree.text(path) or "", self.ticks_per_second) for key, path in paths.items()
        }
        return {key: ticks for key, ticks in read.items() if ticks is not None}

    def metrics(self) -> str:
        if not self.params["metrics_url"]:
            return ""
        try:
            response = open_url(self.params["metrics_url"], timeout=METRICS_TIMEOUT_S, use_proxy=False)
            return response.read().decode("utf-8", "replace")
        except (OSError, ValueError, HTTPException):
            return ""

    def decode_speed(self, before: str, running: float | None, read_at: float) -> float | None:
        """Tokens per second since ``before`` was read, by the clock at both readings."""
        if not running:
            return None
        name = "vllm:generation_tokens_total"
        last, seconds = _thermal.metric(self.metrics(), name), time.monotonic() - read_at
        first = _thermal.metric(before, name)
        return None if first is None or last is None or last < first else round((last - first) / seconds, 1)


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "duration_s": {"type": "float", "default": 2},
            "loaded_duration_s": {"type": "float", "default": 30},
            "settle_s": {"type": "float", "default": 0},
            "metrics_url": {"type": "str"},
            "record": {"type": "path", "default": "/run/gb10-fleet/tuning.json"},
            "nvidia_smi": {"type": "str", "default": "nvidia-smi"},
            "timeout_s": {"type": "float", "default": 10},
            "root": {"type": "path", "default": "/"},
        },
        supports_check_mode=True,
    )
    module.exit_json(changed=False, **ThermalReader(module).run())


if __name__ == "__main__":
    main()
