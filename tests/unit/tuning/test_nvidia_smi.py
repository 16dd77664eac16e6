"""nvidia-smi: a real capture (H200, driver 580.159), the texts of a GB10 (leptonai/gpud#1170), and a driver that hangs."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from ansible_collections.gb10.fleet.plugins.module_utils import _nvidia_smi as smi

FIXTURES = Path(__file__).parents[2] / "fixtures" / "nvidia-smi"
# Field by field as nvidia-smi writes a GB10 (facts: memory, caps and fan absent; bus 0000000F; graphics clock max 3003).
GB10_XML = """<?xml version="1.0" ?>
<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v13.dtd">
<nvidia_smi_log>
  <driver_version>580.159.03</driver_version>
  <gpu id="0000000F:01:00.0">
    <product_name>NVIDIA GB10</product_name>
    <persistence_mode>Enabled</persistence_mode>
    <fan_speed>N/A</fan_speed>
    <performance_state>P0</performance_state>
    <clocks_event_reasons>
      <clocks_event_reason_gpu_idle>Not Active</clocks_event_reason_gpu_idle>
      <clocks_event_reason_sw_thermal_slowdown>Active</clocks_event_reason_sw_thermal_slowdown>
    </clocks_event_reasons>
    <fb_memory_usage><total>N/A</total><used>Not Supported</used></fb_memory_usage>
    <utilization><gpu_util>96 %</gpu_util></utilization>
    <temperature><gpu_temp>65 C</gpu_temp></temperature>
    <gpu_power_readings><average_power_draw>[Unknown Error]</average_power_draw>
      <instant_power_draw>33.10 W</instant_power_draw><current_power_limit>N/A</current_power_limit></gpu_power_readings>
    <clocks><graphics_clock>2184 MHz</graphics_clock><sm_clock>2184 MHz</sm_clock><mem_clock>N/A</mem_clock></clocks>
    <max_clocks><graphics_clock>3003 MHz</graphics_clock><sm_clock>3003 MHz</sm_clock></max_clocks>
    <supported_clocks>N/A</supported_clocks>
    <processes><process_info><pid>454928</pid><type>C</type><process_name>VLLM::Worker_TP0</process_name>
      <used_memory>15136 MiB</used_memory></process_info></processes>
  </gpu>
</nvidia_smi_log>
"""


def fake(tmp_path: Path, body: str) -> str:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{body}\n")
    tool.chmod(0o755)
    return str(tool)


def test_real_capture_xml() -> None:
    (gpu,) = smi.parse_xml((FIXTURES / "h200-580.159-q.xml").read_text())
    assert (gpu.name, gpu.bus_id, gpu.driver_version) == ("NVIDIA H200", "00000000:00:06.0", "580.159.04")
    assert (gpu.temperature_celsius, gpu.power_w, gpu.utilization_percent) == (39.0, 124.89, 0.0)
    assert (gpu.sm_mhz, gpu.gr_mhz, gpu.sm_max_mhz, gpu.gr_max_mhz) == (435.0, 435.0, 1980.0, 1980.0)
    assert (gpu.memory_total_mib, gpu.memory_used_mib, gpu.unified_memory) == (143771.0, 0.0, False)
    assert (gpu.persistence, gpu.pstate, gpu.reasons, gpu.processes) == (True, "P0", ("gpu_idle",), ())


def test_real_capture_csv() -> None:
    (row,) = smi.parse_csv((FIXTURES / "h200-580.159-query.csv").read_text())
    assert row["name"] == "NVIDIA H200"
    assert smi.number_or_none(row["power.draw"]) == 122.38
    assert smi.number_or_none(row["clocks.current.sm"]) == 435
    assert smi.number_or_none(row["temperature.gpu"]) == 38
    assert smi.reasons_of_mask(row["clocks_event_reasons.active"]) == ("gpu_idle",)


def test_pre_nvsmi_na() -> None:
    """leptonai/gpud#1170: [N/A] and Not Supported are "unknown", not 0 and not an error."""
    (gpu,) = smi.parse_xml(GB10_XML)
    assert gpu.memory_total_mib is None and gpu.memory_used_mib is None and gpu.unified_memory
    assert gpu.bus_id == "0000000F:01:00.0"
    assert (gpu.sm_mhz, gpu.gr_max_mhz, gpu.power_w, gpu.temperature_celsius) == (2184.0, 3003.0, 33.1, 65.0)
    assert gpu.reasons == ("sw_thermal_slowdown",)
    assert gpu.processes == (smi.Process(454928, "VLLM::Worker_TP0", "C", 15136.0),)
    # "other boxes": 0, NVIDIA GB10, [N/A], [N/A], 580.173.02, 0
    (row,) = smi.parse_csv(
        "index, name, memory.total [MiB], memory.used [MiB], driver_version, utilization.gpu [%]\n"
        "0, NVIDIA GB10, [N/A], [N/A], 580.173.02, 0 %\n"
    )
    assert row == {
        "index": "0",
        "name": "NVIDIA GB10",
        "memory.total": None,
        "memory.used": None,
        "driver_version": "580.173.02",
        "utilization.gpu": "0 %",
    }


@pytest.mark.parametrize(
    "text",
    ["[N/A]", "N/A", "Not Supported", "[Not Supported]", "[Unknown Error]", "[GPU requires reset]", "ERR!", "", None],
)
def test_nothing_is_none(text: str | None) -> None:
    assert smi.text_or_none(text) is None
    assert smi.number_or_none(text) is None


@pytest.mark.parametrize(
    ("mask", "names"),
    [("0x0000000000000000", ()), ("0x0000000000000060", ("sw_thermal_slowdown", "hw_thermal_slowdown")), ("[N/A]", ())],
)
def test_reasons(mask: str, names: tuple[str, ...]) -> None:
    assert smi.reasons_of_mask(mask) == names


def test_pre_nvsmi_hang(tmp_path: Path) -> None:
    """MiaAI DeepSeek-v4.1#23: nvidia-smi blocked 491-737 s. The verdict is "wedged", at once, not "no GPU"."""
    started = time.monotonic()
    with pytest.raises(smi.NvidiaSmiTimeout, match=r"no answer within 0\.3 s: the NVIDIA driver is wedged"):
        smi.snapshot(command=fake(tmp_path, "trap '' TERM; sleep 60"), timeout_s=0.3)
    assert time.monotonic() - started < 30


def test_a_process_that_cannot_be_killed_does_not_hang_us(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In uninterruptible sleep SIGKILL has no effect: subprocess.run(timeout=...) would wait for ever."""
    real = subprocess.Popen.wait

    def wait(self: subprocess.Popen[str], timeout: float | None = None) -> int:
        assert timeout is not None, "waits without an end for a process that may never go"
        return real(self, timeout)

    monkeypatch.setattr(smi.os, "killpg", lambda *_: None)
    monkeypatch.setattr(subprocess.Popen, "wait", wait)
    started = time.monotonic()
    with pytest.raises(smi.NvidiaSmiTimeout):
        smi.run([], command=fake(tmp_path, "exec sleep 20"), timeout_s=0.2)
    assert time.monotonic() - started < 15


def test_absent_and_failed(tmp_path: Path) -> None:
    with pytest.raises(smi.NvidiaSmiAbsent, match="is not installed here"):
        smi.run(["-L"], command=str(tmp_path / "none"))
    words = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."
    with pytest.raises(smi.NvidiaSmiFailed, match="exit code 9: NVIDIA-SMI has failed") as caught:
        smi.run(["-L"], command=fake(tmp_path, f'echo "{words}"; exit 9'))
    assert caught.value.rc == 9
    with pytest.raises(smi.NvidiaSmiFailed, match="did not print XML"):
        smi.parse_xml("No devices were found")


def test_processes(tmp_path: Path) -> None:
    body = "printf 'pid, used_gpu_memory [MiB], process_name\\n329657, 43 MiB, /usr/lib/xorg/Xorg, -core\\n7, [N/A], ray::W\\n'"
    assert smi.query_processes(command=fake(tmp_path, body)) == [
        smi.Process(329657, "/usr/lib/xorg/Xorg, -core", "C", 43.0),
        smi.Process(7, "ray::W", "C", None),
    ]
