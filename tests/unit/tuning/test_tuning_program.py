"""gb10_tuning.py: apply, verify, restore, and what it records when someone else moves a value."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
PROGRAM = ROOT / "roles/thermal/files/gb10_tuning.py"
CPU, GPU = {"governor": "schedutil", "cap_mhz": 3300}, {"min_mhz": 300, "max_mhz": 2200}


@pytest.fixture(scope="module")
def program() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gb10_tuning", PROGRAM)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def call(program: ModuleType, command: str, config: str) -> int:
    return int(program.main(["gb10_tuning.py", command, config]))


def test_apply_twice_records_once(node: Any, program: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    node.policies()
    config = node.config(CPU, GPU)
    assert call(program, "apply", config) == 0
    assert (node.value("policy5/scaling_max_freq"), node.value("policy0/scaling_max_freq")) == ("3300000", "2860000")
    assert node.lock == "300,2200"
    events = node.events()
    assert [e["kind"] for e in events] == ["first"] * 30 + ["boot"]  # 20 governors, 10 caps, the clock lock
    assert "policy5/scaling_max_freq: 4004000 -> 3300000 (first)" in capsys.readouterr().out
    assert call(program, "apply", config) == 0
    assert node.events() == events
    assert call(program, "verify", config) == 0


def test_tune_reboot_lost(node: Any, program: ModuleType) -> None:
    """tonyd2wild OPEN-PROBLEMS §4, "lost three boots": governor, cap and -lgc come back without anyone's doing."""
    node.policies(per_core=False)
    config = node.config(CPU, GPU)
    call(program, "apply", config)
    node.reboot()
    assert call(program, "verify", config) == 1
    assert call(program, "apply", config) == 0
    assert (node.value("policy5/scaling_max_freq"), node.value("policy0/scaling_governor")) == ("3300000", "schedutil")
    assert node.lock == "300,2200"
    assert {e["kind"] for e in node.events()[-7:]} == {"boot"}
    assert call(program, "verify", config) == 0


def test_a_foreign_change_is_put_back_and_recorded(node: Any, program: ModuleType) -> None:
    node.policies(per_core=False)
    config = node.config(CPU, GPU)
    call(program, "apply", config)
    seen = len(node.events())
    (node.cpufreq / "policy5/scaling_governor").write_text("performance\n")
    (node.cpufreq / "policy15/scaling_max_freq").write_text("4004000\n")
    (node.smi.parent / "lock").unlink()
    node.gpu(sm=2418, util=96, watts="78.00 W")
    assert call(program, "apply", config) == 0
    assert (node.value("policy5/scaling_governor"), node.value("policy15/scaling_max_freq")) == ("schedutil", "3300000")
    assert node.lock == "300,2200"
    new = [{key: e[key] for key in ("kind", "what", "found", "wanted")} for e in node.events()[seen:]]
    assert new == [
        {"kind": "drift", "what": "policy5/scaling_governor", "found": "performance", "wanted": "schedutil"},
        {"kind": "drift", "what": "policy15/scaling_max_freq", "found": "4004000", "wanted": "3300000"},
        {
            "kind": "drift",
            "what": "gpu clock",
            "found": "the SM clock is 2418 MHz, above the lock of 2200 MHz",
            "wanted": "300-2200 MHz",
        },
    ]


def test_a_lower_lock_of_someone_else_is_replaced_blindly(
    node: Any, program: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing tells that someone locked the clock to 300-1000: the lock is set again every reassert_s."""
    node.policies(per_core=False)
    config = node.config(None, {**GPU, "reassert_s": 300})
    call(program, "apply", config)
    (node.smi.parent / "lock").write_text("300,1000\n")
    call(program, "apply", config)
    assert node.lock == "300,1000"
    now = program.time.clock_gettime(program.time.CLOCK_BOOTTIME)
    monkeypatch.setattr(program.time, "clock_gettime", lambda _: now + 300)
    call(program, "apply", config)
    assert node.lock == "300,2200"
    assert [e["kind"] for e in node.events()] == ["boot"]


def test_a_driver_reload_is_told_apart(node: Any, program: ModuleType) -> None:
    node.policies(per_core=False)
    config = node.config(CPU, GPU)
    folder = node.root / "sys/module/nvidia"
    folder.mkdir(parents=True)
    call(program, "apply", config)
    (node.root / "sys/module/other").mkdir()  # keeps the inode of the first from coming back
    folder.rename(node.root / "sys/module/gone")
    folder.mkdir()
    (node.smi.parent / "lock").unlink()
    call(program, "apply", config)
    assert node.lock == "300,2200"
    assert (node.events()[-1]["kind"], node.events()[-1]["what"]) == ("driver", "gpu clock")


def test_a_wedged_driver_does_not_keep_the_cpu_hot(
    node: Any, program: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    node.policies(per_core=False)
    config = node.config(CPU, {**GPU, "timeout_s": 0.3})
    node.smi.write_text("#!/bin/sh\nexec sleep 60\n")
    for _ in range(2):
        assert call(program, "apply", config) == 1
        assert "the NVIDIA driver is wedged" in capsys.readouterr().err
    assert node.value("policy5/scaling_max_freq") == "3300000"
    assert [e["kind"] for e in node.events()].count("error") == 1, "once, not once a minute"


def test_restore_is_byte_for_byte(node: Any, program: ModuleType) -> None:
    node.policies(per_core=False)
    (node.cpufreq / "policy5/scaling_governor").write_text("ondemand")
    before = node.values()
    config = node.config(CPU, GPU)
    call(program, "apply", config)
    (node.cpufreq / "policy5/scaling_governor").write_text("powersave\n")
    assert call(program, "restore", config) == 0
    assert node.values() == before
    assert node.lock is None
    assert list(node.state.iterdir()) == list(node.run.iterdir()) == []


def test_low_power_is_recorded_once_and_never_called_fixed(
    node: Any, program: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    node.policies(per_core=False)
    config = node.config(CPU, GPU)
    call(program, "apply", config)
    node.gpu(sm=799, util=96, watts="19.50 W")
    for _ in range(2):
        assert call(program, "apply", config) == 1
    assert [e["kind"] for e in node.events()].count("low_power") == 1
    assert "take the AC away for at least 60 s" in capsys.readouterr().err


def test_status(node: Any, program: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    node.policies(per_core=False)
    config = node.config(CPU, GPU)
    call(program, "apply", config)
    (node.cpufreq / "policy5/scaling_governor").write_text("performance\n")
    capsys.readouterr()
    assert call(program, "status", config) == 0
    status = json.loads(capsys.readouterr().out)
    assert status["differs"] == ["policy5/scaling_governor is performance, wanted schedutil"]
    assert status["events"] == {"first": 6, "boot": 1}


def test_the_drift_log_is_bounded(node: Any, program: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "DRIFT_LOG_BYTES", 4096)
    tuning = program.Tuning({"state_dir": str(node.state), "run_dir": str(node.run)})
    for number in range(200):
        tuning.record("drift", "policy5/scaling_governor", str(number), "schedutil")
    assert (node.state / "tuning-drift.jsonl").stat().st_size < 4096 + 200
    assert tuning.events()[-1]["found"] == "199"


@pytest.mark.parametrize(("argv", "rc"), [([], 2), (["--help"], 0), (["tune"], 2), (["apply", "/nonexistent.json"], 2)])
def test_wrong_calls(program: ModuleType, argv: list[str], rc: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["gb10_tuning.py", *argv]) == rc
    assert capsys.readouterr().err


def test_it_runs_alone_on_a_node(node: Any, tmp_path: Path) -> None:
    """As the role lays it down: four files in one folder, no Ansible, no site module."""
    folder = tmp_path / "opt"
    folder.mkdir()
    for source in (PROGRAM, *(ROOT / f"plugins/module_utils/_{n}.py" for n in ("cpufreq", "journal", "nvidia_smi"))):
        shutil.copy(source, folder)
    node.policies()
    argv = [sys.executable, "-E", "-s", "-S", str(folder / "gb10_tuning.py"), "apply", node.config(CPU, GPU)]
    done = subprocess.run(
        argv, env={"PATH": os.environ["PATH"]}, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert node.value("policy5/scaling_max_freq") == "3300000"
