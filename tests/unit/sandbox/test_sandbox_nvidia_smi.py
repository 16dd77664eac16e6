"""The fake nvidia-smi against captures of a GB10, and of a real tool of the same driver series."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = ROOT / "roles/sandbox/files/node/nvidia_smi.py"
FIXTURES = ROOT / "tests/fixtures"


@pytest.fixture
def smi(tmp_path):
    """Call it with a folder of knobs: smi("-L", util="96")."""

    def call(*argv, **knobs):
        for name, value in knobs.items():
            (tmp_path / name).write_text(value)
        done = subprocess.run(
            [sys.executable, str(PROGRAM), *argv],
            env={**os.environ, "FAKE_GPU": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=20,
        )
        return done.stdout.rstrip("\n"), done.returncode

    return call


def query(smi, fields, form="csv,noheader", **knobs):
    return smi(f"--query-gpu={fields}", f"--format={form}", **knobs)[0]


def test_pre_nvsmi_na_query(smi):
    """The three one-line answers of the capture."""
    assert query(smi, "name,compute_cap,driver_version,memory.total") == "NVIDIA GB10, 12.1, 580.159.03, [N/A]"
    other = query(
        smi,
        "index,name,memory.total,memory.used,driver_version,utilization.gpu",
        "csv,noheader,nounits",
        driver="580.173.02",
    )
    assert other == "0, NVIDIA GB10, [N/A], [N/A], 580.173.02, 0"
    assert query(smi, "memory.used,memory.free") == "[N/A], [N/A]"


def test_table_is_laid_out_as_the_capture(smi):
    """Line by line, except time and the two graphics processes."""
    capture = (FIXTURES / "gb10/ref-nvidia-smi-idle-gb10.txt").read_text().splitlines()
    ours = smi(power="3", temperature="38")[0].splitlines()
    assert ours[1:17] == capture[1:17]
    assert ours[-2] == "|  No running processes found" + " " * 61 + "|"
    assert {len(line) for line in ours[1:] if line} == {91}


def test_header_and_units_as_the_real_tool_prints_them(smi):
    capture = (FIXTURES / "nvidia-smi/h200-580.159-query.csv").read_text().splitlines()[0]
    asked = (
        capture.replace("clocks.current.sm", "clocks.sm")
        .replace("clocks.current.memory", "clocks.mem")
        .replace("clocks.max.sm", "clocks.max.sm")
    )
    fields = ",".join(re.sub(r" \[.*?\]", "", name) for name in asked.split(", "))
    header, values = query(smi, fields, "csv").splitlines()
    assert header == capture
    assert values.split(", ")[3:9] == ["38", "3.50 W", "208 MHz", "3003 MHz", "[N/A]", "[N/A]"]


def test_xml_has_only_paths_of_the_real_tool(smi):
    def paths(element, prefix=""):
        for child in element:
            yield f"{prefix}/{child.tag}"
            yield from paths(child, f"{prefix}/{child.tag}")

    real = set(paths(ET.fromstring((FIXTURES / "nvidia-smi/h200-580.159-q.xml").read_text().split("\n", 2)[2])))
    ours = ET.fromstring(smi("-q", "-x")[0].split("\n", 2)[2])
    # Not in that capture: a process (the H200 was idle), and per-process fields below it.
    assert {path for path in paths(ours) if "process_info" not in path} - real == set()
    assert ours.findtext("gpu/fb_memory_usage/total") == "N/A"
    assert ours.findtext("gpu/max_clocks/graphics_clock") == "3003 MHz"


def test_tune_lgc_readback(smi):
    """Accepted with these words; no field says 2200 afterwards; the SM clock under load reads 2184 - 2190."""
    if os.geteuid() != 0:
        pytest.skip("locking clocks needs root, as on a node")
    reply, status = smi("-lgc", "300,2200")
    assert (reply, status) == (
        'GPU clocks set to "(gpuClkMin 300, gpuClkMax 2200)" for GPU 0000000F:01:00.0\nAll done.',
        0,
    )
    assert "2200" not in smi("-q", "-d", "CLOCK")[0]
    assert 2184 <= int(query(smi, "clocks.sm", "csv,noheader,nounits", util="96")) <= 2190
    assert query(smi, "power.draw,temperature.gpu") == "48.40 W, 70"
    smi("-rgc")
    assert query(smi, "clocks.sm,power.draw,temperature.gpu") == "2418 MHz, 78.00 W, 86"


def test_lock_takes_the_forms_of_the_real_option(smi, tmp_path):
    if os.geteuid() != 0:
        pytest.skip("locking clocks needs root, as on a node")
    for argv in (["-lgc=300,2100"], ["--lock-gpu-clocks=300,2100"], ["-i", "0", "-lgc", "300,2100"]):
        assert smi(*argv)[1] == 0
        assert (tmp_path / "lgc").read_text() == "300,2100\n"
    assert smi("-lgc", "2200,300")[1] != 0
    assert smi("-lgc", "fast")[1] == 2


def test_refusal_and_failure(smi):
    refused, status = smi("-lgc", "300,2200", refuse="Setting locked GPU clocks is not supported")
    assert status == 4
    if os.geteuid() == 0:
        assert refused.startswith("Setting locked GPU clocks is not supported")
    assert smi("-L", fail="NVIDIA-SMI has failed") == ("NVIDIA-SMI has failed", 9)


def test_pre_nvsmi_hang(smi):
    begun = time.monotonic()
    smi("-L", hang="0.5")
    assert time.monotonic() - begun >= 0.5


def test_tune_lowpower(smi):
    """The stuck state: 96 %, 799 MHz, 19.50 W, no reason."""
    line = query(
        smi,
        "utilization.gpu,clocks.sm,clocks.max.sm,power.draw,temperature.gpu,clocks_event_reasons.active",
        util="96",
        sm_clock="799",
        power="19.5",
        temperature="47",
    )
    assert line == "96 %, 799 MHz, 3003 MHz, 19.50 W, 47, 0x0000000000000000"


def test_unknown_field(smi):
    assert smi("--query-gpu=name,colour", "--format=csv") == ('Field "colour" is not a valid field to query.', 2)


def test_processes_that_are_gone_are_not_listed(smi):
    listed, _ = smi(
        "--query-compute-apps=pid,process_name,used_memory",
        "--format=csv,noheader,nounits",
        processes=f"{os.getpid()}, VLLM::Worker_TP0, 98304\n4194305, gone, 1\n",
    )
    assert listed == f"{os.getpid()}, VLLM::Worker_TP0, 98304"
    assert "VLLM::Worker_TP0" in smi("-q", "-x")[0]
