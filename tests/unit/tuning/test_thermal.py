"""thermal_info and its findings: the seed's table, a real nvidia-smi capture, and what a node may lack."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ansible_collections.gb10.fleet.plugins.filter import thermal as thermal_filter
from ansible_collections.gb10.fleet.plugins.module_utils import _thermal
from ansible_collections.gb10.fleet.plugins.modules import thermal_info

Run = Callable[..., dict[str, Any]]
FIXTURES = Path(__file__).parents[2] / "fixtures"


def policy(name: str, cpus: range, hardware: int, **changed: Any) -> dict[str, Any]:
    base = {"governor": "performance", "current_mhz": hardware, "max_mhz": hardware, "hardware_max_mhz": hardware}
    return {"name": name, "cpu_list": list(cpus), **base, **changed}


def seed_node(**changed: Any) -> dict[str, Any]:
    """The head node of the seed "GLM-5.3-Flash on 2x NVIDIA DGX Spark" before its fix."""
    window = {
        "seconds": 5.0,
        "power_w": 33.0,
        "utilization_percent": 96.0,
        "sm_mhz": 2418.0,
        "gpu_celsius": 65.0,
        "soc_celsius": 93.7,
        "reasons": [],
    }
    return {
        "policies": [
            policy("policy0", range(0, 5), 2800),
            policy("policy5", range(5, 10), 3900),
            policy("policy10", range(10, 15), 2800),
            policy("policy15", range(15, 20), 3900),
        ],
        "cores": {cpu: 99.0 if cpu in (5, 6) else 1.0 for cpu in range(20)},
        "window": {**window, **changed.pop("window", {})},
        "processes": [{"id": 4211, "name": "VLLM::Worker_TP", "cpu_percent": 198.0}],
        "lock": None,
        "gpu_error": None,
        **changed,
    }


def codes(info: dict[str, Any]) -> list[str]:
    return [finding["code"] for finding in _thermal.findings(info)]


def test_tune_thermal() -> None:
    """The seed's four findings with their evidence; 93.7 °C is near the power-off of MiaAI DSpark#146."""
    found = {f["code"]: f for f in _thermal.findings(seed_node())}
    assert list(found) == ["governor_pinned", "fast_cores_uncapped", "spin_wait", "gpu_floor_heat", "hot"]
    assert found["governor_pinned"]["finding"] == "Governor pins 20 of 20 cores at their maximum, always"
    assert found["governor_pinned"]["evidence"] == "performance governor; 18 idle cores at 2800-3900 MHz doing nothing"
    assert found["fast_cores_uncapped"]["finding"] == "10 fast cores boost to 3.9 GHz under load"
    assert found["fast_cores_uncapped"]["evidence"] == "cpuinfo_max_freq of CPUs 5-9,15-19; cpu0 alone says 2800 MHz"
    assert found["spin_wait"]["finding"] == "Busy-wait polling burns 2.0 cores"
    assert found["spin_wait"]["evidence"] == "VLLM::Worker_TP (pid 4211) at 198 % CPU over 5 s"
    assert found["gpu_floor_heat"]["evidence"] == "GPU die 65 °C, 33 W at 2418 MHz: it soaks the SoC zones"
    assert found["hot"]["evidence"] == "hottest acpitz zone 93.7 °C"


def test_after_the_fix_nothing_but_the_floor_heat_is_left() -> None:
    """80.3 °C peak, worker at 123 %, cores capped at 3.3 GHz, clock lock of 2200 MHz."""
    after = seed_node(
        policies=[
            policy("policy0", range(0, 5), 2800, governor="schedutil"),
            policy("policy5", range(5, 10), 3900, governor="schedutil", max_mhz=3300),
        ],
        processes=[{"id": 4211, "name": "VLLM::Worker_TP", "cpu_percent": 123.0}],
        window={"soc_celsius": 80.3, "sm_mhz": 2184.0},
        lock={"min_mhz": 300, "max_mhz": 2200},
    )
    assert codes(after) == ["gpu_floor_heat"]


def test_tune_lowpower_is_found() -> None:
    window = {"sm_mhz": 799.0, "power_w": 19.5, "gpu_celsius": 47.0, "soc_celsius": 55.0}
    (finding,) = [f for f in _thermal.findings(seed_node(window=window)) if f["code"] == "low_power_state"]
    assert finding["evidence"] == "SM 799 MHz, 19.5 W, 96 % busy, no reason given"
    assert "take the AC away for at least 60 s" in finding["lever"]
    assert "gpu_floor_heat" not in codes(seed_node(window=window))


def test_other_findings() -> None:
    slow = seed_node(window={"reasons": ["sw_thermal_slowdown"], "gpu_celsius": 91.0})
    assert "thermal_slowdown" in codes(slow)
    assert "lock_lost" in codes(seed_node(lock={"min_mhz": 300, "max_mhz": 2200}))
    wedged = seed_node(gpu_error="nvidia-smi gave no answer within 10 s: the NVIDIA driver is wedged")
    assert [c for c in codes(wedged) if c.startswith("gpu")] == ["gpu_unreadable"]
    assert _thermal.findings({}) == []


def test_soc_is_the_hottest_of_seven_acpitz_zones() -> None:
    zones = [
        _thermal.Zone(f"thermal_zone{i}", "acpitz", c) for i, c in enumerate((70.1, 80.3, 74.0, 61.5, 60.0, 59.9, 71.2))
    ]
    assert _thermal.soc_celsius([*zones, _thermal.Zone("thermal_zone7", "mlx5", 95.0)]) == 80.3
    assert _thermal.soc_celsius([_thermal.Zone("thermal_zone0", "x86_pkg_temp", 44.0)]) == 44.0
    assert _thermal.soc_celsius([]) is None


@pytest.mark.parametrize(
    ("midr", "name"),
    [
        ("0x00000000410fd850", "Cortex-X925"),
        ("0x00000000410fd870", "Cortex-A725"),
        ("0x00000000410fd4f0", None),
        (None, None),
    ],
)
def test_core_type(midr: str | None, name: str | None) -> None:
    assert _thermal.core_type(midr) == name


def test_metric_reads_a_real_page() -> None:
    page = (FIXTURES / "metrics/vllm-single.prom").read_text()
    assert _thermal.metric(page, "vllm:generation_tokens_total") == 48.0
    assert _thermal.metric(page, "vllm:num_requests_running") == 0.0
    assert _thermal.metric(page, "vllm:num_requests") is None
    assert _thermal.metric("", "vllm:num_requests_running") is None


def test_stat_of_a_name_with_brackets() -> None:
    line = "4211 (VLLM::Worker) x) R 1 4211 4211 0 -1 4194304 1 0 0 0 19800 200 0 0 20 0 5 0 100 0 0"
    assert _thermal.stat_seconds(line, 100) == _thermal.Ticks("VLLM::Worker) x", 200.0)
    assert _thermal.stat_seconds("", 100) is None


def test_busiest_and_core_busy() -> None:
    before = {1: _thermal.Ticks("a", 10.0), 2: _thermal.Ticks("b", 1.0)}
    after = {1: _thermal.Ticks("a", 10.1), 2: _thermal.Ticks("b", 4.96), 3: _thermal.Ticks("new", 9.0)}
    assert [(row["id"], row["cpu_percent"]) for row in _thermal.busiest(before, after, 2.0)] == [(2, 198.0), (1, 5.0)]
    first = "cpu  9 9 9 9\ncpu0 100 0 0 900 0 0 0 0 0 0\ncpu5 0 0 0 100 0 0 0 0 0 0\n"
    last = "cpu  9 9 9 9\ncpu0 101 0 0 999 0 0 0 0 0 0\ncpu5 100 0 0 100 0 0 0 0 0 0\n"
    assert _thermal.core_busy(first, last) == {0: 1.0, 5: 100.0}


def test_row_of_the_table() -> None:
    row = _thermal.row("spark-01", "before", {**seed_node(), "decode_tokens_per_s": 55.6})
    assert row["fast_MHz"] == 3900 and row["slow_MHz"] == 2800
    assert (row["governor"], row["GPU_W"], row["SoC_°C"], row["tok/s"]) == ("performance", 33.0, 93.7, 55.6)
    assert _thermal.row("vm", "before", {})["fast_MHz"] is None


def host(rank: int, **samples: Any) -> dict[str, Any]:
    names = {f"thermal_{when}": sample for when, sample in samples.items()}
    return {"inventory_hostname": f"spark-0{rank + 1}", "topology_rank": rank, "topology_cluster": "alpha", **names}


def test_table_before_and_after() -> None:
    """The seed's figures; the head's decode speed is shown once for its cluster, and a skipped sample is no sample."""
    cool = {"soc_celsius": 80.3, "gpu_celsius": 70.0, "power_w": 48.4, "sm_mhz": 2184.0}
    before = {**seed_node(window={"power_w": 78.0, "gpu_celsius": 86.0}), "decode_tokens_per_s": 55.6}
    after = {**seed_node(window=cool), "decode_tokens_per_s": 55.6}
    text = thermal_filter.thermal_table(
        [host(0, before=before, after=after), host(1, before=before, after={"changed": False, "skipped": True})]
    )
    lines = [line.split() for line in text.splitlines()[1:]]
    assert [line[:3] for line in lines] == [
        ["spark-01", "before", "performance"],
        ["spark-01", "after", "performance"],
        ["spark-02", "now", "performance"],
    ]
    assert lines[0][5:] == ["2418.0", "96.0", "78.0", "86.0", "93.7", "55.6"]
    assert lines[1][5:] == ["2184.0", "96.0", "48.4", "70.0", "80.3", "55.6"]
    assert lines[2][-1] == "-"
    assert max(map(len, text.splitlines())) <= 100


def test_samples_for_a_file() -> None:
    (entry,) = thermal_filter.thermal_samples([host(0, before={**seed_node(), "ansible_facts": {}})])
    assert (entry["node"], entry["cluster"], entry["after"]) == ("spark-01", "alpha", None)
    assert entry["before"]["window"]["soc_celsius"] == 93.7
    assert "ansible_facts" not in entry["before"]


def test_findings_as_text() -> None:
    sample = {**seed_node(), "requests_running": 1.0}
    sample["findings"] = _thermal.findings(sample)
    text = thermal_filter.thermal_findings([host(0, before=sample), host(1)])
    lines = text.splitlines()
    assert (
        lines[0] == "spark-01: SoC 93.7 °C, GPU 65.0 °C, 33.0 W, SM 2418.0 MHz, 96.0 % busy; engine serves; over 5.0 s"
    )
    assert lines[1:4] == [
        "  Governor pins 20 of 20 cores at their maximum, always",
        "    evidence: performance governor; 18 idle cores at 2800-3900 MHz doing nothing",
        "    lever:    thermal_governor: auto",
    ]
    assert "spark-02" not in text and max(map(len, lines)) <= 100


@pytest.fixture
def read(node: Any, run_module: Run) -> Run:
    def run(**args: Any) -> dict[str, Any]:
        common = {"root": str(node.root), "nvidia_smi": str(node.smi), "duration_s": 0.0, "timeout_s": 5}
        return run_module(thermal_info.main, False, **{**common, "record": str(node.run / "tuning.json"), **args})

    return run


def test_module_reads_a_gb10(node: Any, read: Run) -> None:
    node.policies(per_core=False)
    for index, millidegrees in enumerate((70100, 93700, 74000)):
        zone = node.root / f"sys/class/thermal/thermal_zone{index}"
        zone.mkdir(parents=True)
        (zone / "type").write_text("acpitz\n")
        (zone / "temp").write_text(f"{millidegrees}\n")
    node.gpu(sm=2418, util=96, watts="78.00 W", temp=86)
    info = read()
    assert info["changed"] is False
    assert (info["window"]["soc_celsius"], info["window"]["gpu_celsius"], info["window"]["power_w"]) == (
        93.7,
        86.0,
        78.0,
    )
    assert [p["core_type"] for p in info["policies"]] == ["Cortex-A725", "Cortex-X925"] * 2
    assert (info["policies"][0]["cpus"], info["policies"][0]["hardware_max_mhz"]) == ("0-4", 2860)
    assert [f["code"] for f in info["findings"]][:2] == ["governor_pinned", "fast_cores_uncapped"]


def test_module_agrees_with_a_real_nvidia_smi(node: Any, read: Run) -> None:
    """Every number against the text of the same capture, read another way."""
    xml = (FIXTURES / "nvidia-smi/h200-580.159-q.xml").read_text()
    shutil.copy(FIXTURES / "nvidia-smi/h200-580.159-q.xml", node.smi.parent / "q.xml")
    gpu = read()["gpu"]
    for key, tag in (
        ("temperature_celsius", "gpu_temp"),
        ("power_w", "average_power_draw"),
        ("sm_mhz", "sm_clock"),
        ("utilization_percent", "gpu_util"),
    ):
        text = re.search(rf"<{tag}>([-\d.]+) ", xml)
        assert text is not None and gpu[key] == float(text[1])
    assert (gpu["name"], gpu["gr_max_mhz"], gpu["reasons"]) == ("NVIDIA H200", 1980.0, ["gpu_idle"])


def test_module_without_anything(read: Run) -> None:
    info = read(nvidia_smi="/nonexistent/nvidia-smi")
    assert (info["gpu"], info["policies"], info["zones"], info["processes"]) == (None, [], [], [])
    assert "is not installed here" in info["gpu_error"]
    assert info["window"]["soc_celsius"] is None


def test_module_asks_a_wedged_driver_once(node: Any, read: Run) -> None:
    node.smi.write_text(f"#!/bin/sh\necho x >> {node.smi.parent}/calls\nexec sleep 60\n")
    info = read(duration_s=1.5, timeout_s=2)
    assert "the NVIDIA driver is wedged" in info["gpu_error"]
    assert len(node.calls) == 1


def test_module_finds_the_busy_threads_of_an_engine(read: Run, tmp_path: Path) -> None:
    """A process that calls itself VLLM::Worker_TP0 and spins, as far as this machine lets it."""
    import subprocess
    import sys

    code = "import time\nt = time.time()\nwhile time.time() - t < 20: pass"
    spinner = subprocess.Popen([sys.executable, "-c", code, "VLLM::Worker_TP0"])
    try:
        info = read(root="/", duration_s=1.0)
    finally:
        spinner.kill()
        spinner.wait()
    mine = [process for process in info["processes"] if process["id"] == spinner.pid]
    assert mine and mine[0]["cpu_percent"] > 10
    assert mine[0]["threads"][0]["id"] == spinner.pid
    assert os.getpid() not in [process["id"] for process in info["processes"]]


def test_decode_speed_of_a_serving_engine(read: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    page = "vllm:num_requests_running{} 1.0\nvllm:generation_tokens_total{} "
    pages = iter((page + "1000\n", page + "1056\n"))
    monkeypatch.setattr(thermal_info.ThermalReader, "metrics", lambda self: next(pages))
    monkeypatch.setattr(
        thermal_info.ThermalReader, "sample_for", lambda self, s: [{}] if s == 30 else pytest.fail("idle")
    )
    clock = iter((100.0, 100.1, 100.9, 101.0))  # page read, sampling from, sampling to, page read again
    monkeypatch.setattr(thermal_info.time, "monotonic", lambda: next(clock))
    info = read(loaded_duration_s=30)
    assert (info["requests_running"], info["decode_tokens_per_s"]) == (1.0, 56.0)
