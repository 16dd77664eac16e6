"""The sampler of a node: what it reads, whom it names for major faults, what it costs; on a real /proc and on a made-up one."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .conftest import ROOT

PROGRAM = ROOT / "roles/qualify/files/qualify_sampler.py"
GPU = (
    "utilization.gpu [%], power.draw [W], clocks.current.sm [MHz], temperature.gpu, driver_version\n"
    "96 %, 48.10 W, 2190 MHz, 70, 580.95\n"
)


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """The program as the role ships it: beside the shared reader of nvidia-smi."""
    for source in (PROGRAM, ROOT / "plugins/module_utils/_nvidia_smi.py"):
        (tmp_path / source.name).write_text(source.read_text(encoding="utf-8"), encoding="utf-8")
    return tmp_path / PROGRAM.name


@contextlib.contextmanager
def sampling(program: Path, *flags: str, smi: str = "") -> Iterator[list[dict[str, Any]]]:
    """Lines of a sampler that runs while the block does."""
    out, tool = program.parent / "out.jsonl", program.parent / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{smi or 'cat <<END' + chr(10) + GPU + 'END'}\n", encoding="utf-8")
    tool.chmod(0o755)
    argv = [
        sys.executable,
        str(program),
        str(out),
        "--every",
        "0.2",
        "--gpu-every",
        "0.1",
        "--nvidia-smi",
        str(tool),
        *flags,
    ]
    child, rows = subprocess.Popen(argv), []
    try:
        end = time.monotonic() + 120
        while time.monotonic() < end and not (out.exists() and '"k":"s"' in out.read_text(encoding="utf-8")):
            time.sleep(0.05)
        yield rows
    finally:
        child.send_signal(signal.SIGTERM)
        assert child.wait(60) == 0
        rows += [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]


def made_up(root: Path) -> Path:
    """A node with one engine process, a zone, and a rail."""
    files = {
        "proc/meminfo": "MemTotal: 127000000 kB\nMemFree: 9000000 kB\nMemAvailable: 30000000 kB\n",
        "proc/vmstat": "nr_free_pages 1\npgmajfault 100\n",
        "proc/41/stat": "41 (VLLM::Worker) S 1 41 41 0 -1 0 10 0 5 0 100 50 0 0 20",
        "proc/41/cmdline": "VLLM::Worker_TP1\0",
        "proc/41/task/41/stat": "41 (VLLM::Worker) S 1 41 41 0 -1 0 10 0 5 0 100 50 0 0 20",
        "proc/50/stat": "50 (a (b) c) S 1 41 41 0 -1 0 10 0 7 0 100 50 0 0 20",
        "proc/50/cmdline": "dd\0if=x\0",
        "sys/class/thermal/thermal_zone0/type": "acpitz\n",
        "sys/class/thermal/thermal_zone0/temp": "61500\n",
        "sys/class/thermal/thermal_zone1/type": "nvme\n",
        "sys/class/thermal/thermal_zone1/temp": "99000\n",
        "sys/class/infiniband/rocep1s0f0/ports/1/counters/link_downed": "1\n",
        "sys/class/infiniband/rocep1s0f0/ports/1/counters/port_xmit_data": "5\n",
        "sys/class/infiniband/rocep1s0f0/ports/1/hw_counters/out_of_sequence": "0\n",
    }
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
    return root


def test_a_node(program: Path, tmp_path: Path) -> None:
    root = made_up(tmp_path / "node")
    with sampling(program, "--root", str(root)) as rows:
        (root / "proc/41/stat").write_text("41 (VLLM::Worker) S 1 41 41 0 -1 0 10 0 8 0 100 50 0 0 20")
        (root / "proc/50/stat").write_text("50 (a (b) c) S 1 41 41 0 -1 0 10 0 27 0 100 50 0 0 20")
        (root / "proc/41/task/41/stat").write_text("41 (VLLM::Worker) S 1 41 41 0 -1 0 10 0 8 0 190 60 0 0 20")
        (root / "sys/class/infiniband/rocep1s0f0/ports/1/counters/link_downed").write_text("3\n")
        (root / "sys/class/infiniband/rocep1s0f0/ports/1/counters/port_xmit_data").write_text("999\n")
        (root / "proc/vmstat").write_text("nr_free_pages 1\npgmajfault 123\n")
        time.sleep(0.5)
    sample, end = rows[1], rows[-1]
    gpu = next(row for row in rows if "util" in row)
    assert (rows[0]["k"], rows[0]["engines"]) == ("start", [41])
    assert (sample["free"], sample["avail"], sample["soc"]) == (9000000, 30000000, 61.5), (
        "an acpitz zone, not the disk's"
    )
    assert (gpu["util"], gpu["power"], gpu["clock"], gpu["temp"]) == (96, 48.1, 2190, 70)
    assert end["faults"] == [
        {"name": "a (b) c", "engine": False, "count": 20},
        {"name": "VLLM::Worker", "engine": True, "count": 3},
    ]
    assert end["kernel_faults"] == 23
    assert end["rdma"] == {"rocep1s0f0/link_downed": 2}, "bytes are no errors"
    assert end["threads"][0]["name"] == "VLLM::Worker" and end["driver"] == "580.95"


def test_a_storm_is_named(program: Path, tmp_path: Path) -> None:
    """Real major faults of a real process: a mapped file, evicted again and again; the innocent sampler has none of them."""
    data = tmp_path / "data"
    data.write_bytes(os.urandom(1 << 20) * 4)
    with data.open("rb") as file:
        os.fsync(file.fileno())
        with sampling(program) as rows, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as view:
            view.madvise(mmap.MADV_RANDOM)
            taken = 0
            for _ in range(8):
                view.madvise(mmap.MADV_DONTNEED)
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                taken += sum(view[at] for at in range(0, len(view), 65536)) * 0 + 1
            time.sleep(0.5)
    named = {row["name"]: row["count"] for row in rows[-1]["faults"]}
    own = Path("/proc/self/comm").read_text(encoding="utf-8").strip()
    if not any(named.values()):
        pytest.skip("this file system keeps every page: no major fault can be made here")
    assert named.get(own, 0) > 100, named
    assert rows[-1]["cost"]["major_faults"] == 0


def test_a_driver_that_hangs_is_asked_once(program: Path, tmp_path: Path) -> None:
    text = program.read_text(encoding="utf-8").replace("GPU_TIMEOUT_S = 8.0", "GPU_TIMEOUT_S = 0.3")
    program.write_text(text, encoding="utf-8")
    with sampling(
        program, "--root", str(made_up(tmp_path / "node")), smi=f"echo x >>{tmp_path}/asked; exec sleep 30"
    ) as rows:
        time.sleep(0.6)
    assert (tmp_path / "asked").read_text() == "x\n"
    assert "wedged" in rows[-1]["gpu_error"] and len(rows) > 3


def test_no_gpu(program: Path, tmp_path: Path) -> None:
    with sampling(
        program, "--root", str(made_up(tmp_path / "node")), smi="echo 'No devices were found'; exit 6"
    ) as rows:
        time.sleep(0.3)
    assert "exit code 6" in rows[-1]["gpu_error"]


def test_it_ends_by_itself(program: Path) -> None:
    out = program.parent / "out.jsonl"
    done = subprocess.run(
        [sys.executable, str(program), str(out), "--every", "0.1", "--limit", "0.5"], timeout=10, check=False
    )
    assert done.returncode == 0
    assert json.loads(out.read_text(encoding="utf-8").splitlines()[-1])["k"] == "end"
