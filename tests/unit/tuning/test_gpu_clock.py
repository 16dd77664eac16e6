"""gpu_clock: the driver does not report a lock, so the reply, our record and the loaded SM clock have to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ansible_collections.gb10.fleet.plugins.module_utils._nvidia_smi import Clocks
from ansible_collections.gb10.fleet.plugins.modules import gpu_clock

Run = Callable[..., dict[str, Any]]


@pytest.fixture
def clock(node: Any, run_module: Run) -> Run:
    def run(check: bool = False, **args: Any) -> dict[str, Any]:
        common = {"record": str(node.run / "tuning.json"), "nvidia_smi": str(node.smi), "timeout_s": 5}
        return run_module(gpu_clock.main, check, **{**common, **args})

    return run


def test_check_then_run_then_run_then_reset(node: Any, clock: Run) -> None:
    proposed = clock(check=True, max_mhz=2200)
    assert (proposed["changed"], node.lock, node.run.exists()) == (True, None, False)
    assert proposed["diff"] == {"before": "GPU clock: no lock of ours\n", "after": "GPU clock: 300-2200 MHz\n"}
    done = clock(max_mhz=2200)
    assert (done["changed"], node.lock) == (True, "300,2200")
    assert done["reply"] == 'GPU clocks set to "(gpuClkMin 300, gpuClkMax 2200)"'
    for check in (True, False):
        assert clock(check=check, max_mhz=2200)["changed"] is False
    assert node.calls.count("-lgc 300,2200") == 1
    assert (clock(check=True, state="absent")["changed"], node.lock) == (True, "300,2200")
    assert (clock(state="absent")["changed"], node.lock) == (True, None)
    assert clock(state="absent")["changed"] is False


def test_tune_lgc_readback(node: Any, clock: Run) -> None:
    """Host tests, driver 580.178.04: no field says 2200; under load a 2200 cap reads 2184, which is within the lock."""
    clock(max_mhz=2200)
    node.gpu(sm=2184, util=96, watts="47.50 W")
    result = clock(max_mhz=2200)
    assert (result["changed"], result["verified"]) == (False, True)
    # Idle: 208 MHz proves nothing.
    node.gpu(sm=208, util=0)
    assert clock(max_mhz=2200)["verified"] is None
    # Someone took the lock off: under load the SM clock is above it, so it is set again.
    node.gpu(sm=2418, util=96, watts="78.00 W")
    result = clock(max_mhz=2200)
    assert result["changed"] is True
    assert result["reason"] == "the SM clock is 2418 MHz, above the lock of 2200 MHz"
    assert result["verified"] is False, "the fake GPU still runs at 2418 MHz: never claimed as done"


def test_a_driver_that_was_loaded_again_has_no_lock(node: Any, clock: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_clock._nvidia_smi, "driver_load", lambda *_: 71)
    clock(max_mhz=2200)
    assert clock(max_mhz=2200)["changed"] is False
    monkeypatch.setattr(gpu_clock._nvidia_smi, "driver_load", lambda *_: 72)
    assert clock(max_mhz=2200)["reason"] == "the driver was loaded again, which drops the lock"


def test_tune_lowpower(node: Any, clock: Run) -> None:
    """Minefield trap 124: 96 % busy at 799 MHz and 19.5 W. -lgc is accepted, nothing is fixed, and we say so."""
    node.gpu(sm=799, util=96, watts="19.50 W", reasons="0x0000000000000000", temp=47)
    result = clock(max_mhz=2200)
    assert result["low_power"] is True
    assert result["warnings"] == [
        "The GPU is stuck in its low-power state (SM 799 MHz, 19.5 W, 96 % busy, no reason given). Shut the node down, take "
        "the AC away for at least 60 s and start it again: no clock setting and no reboot cures this state."
    ]
    node.gpu(sm=2281, util=96, watts="92.50 W", temp=68)
    assert clock(max_mhz=2300)["low_power"] is False


@pytest.mark.parametrize(
    ("clocks", "stuck"),
    [
        (Clocks(3003, 799, 96, 19.5, True, ()), True),
        (Clocks(3003, 799, 96, 19.5, True, ("gpu_idle",)), True),
        (Clocks(3003, 2281, 96, 92.5, True, ()), False),
        (Clocks(3003, 208, 0, 4.9, True, ("gpu_idle",)), False),  # idle
        (Clocks(3003, 850, 96, 19.5, True, ("sw_thermal_slowdown",)), False),  # hot: that is a reason
        (Clocks(3003, 799, 96, None, True, ()), False),  # nothing is claimed without the power
    ],
)
def test_stuck_low_power(clocks: Clocks, stuck: bool) -> None:
    assert clocks.stuck_low_power is stuck


def test_clock_over_the_maximum(node: Any, clock: Run) -> None:
    result = clock(max_mhz=3100)
    assert result["msg"] == "GPU clock maximum 3100 MHz is above what this GPU can do: 3003 MHz (clocks.max.gr)."
    assert node.lock is None
    assert clock(min_mhz=2300, max_mhz=2200)["msg"] == "GPU clock 2300-2200 MHz: the minimum is above the maximum."


def test_nvidia_smi_absent(clock: Run) -> None:
    result = clock(max_mhz=2200, nvidia_smi="/nonexistent/nvidia-smi")
    assert result["msg"].startswith("/nonexistent/nvidia-smi is not installed here.")


def test_nvidia_smi_hangs(node: Any, clock: Run) -> None:
    node.smi.write_text("#!/bin/sh\nexec sleep 60\n")
    result = clock(max_mhz=2200, timeout_s=0.3)
    assert "gave no answer within 0.3 s: the NVIDIA driver is wedged" in result["msg"]


@pytest.mark.parametrize(
    ("words", "rc"),
    [
        # Exit code 0, as a K80 answers.
        (
            "Setting locked GPU clocks is not supported for GPU 00000000:05:00.0.\nTreating as warning and moving on.\nAll done.\n",
            0,
        ),
        ("The current user does not have permission to change clocks for GPU 0000000F:01:00.0.\n", 4),
    ],
)
def test_nvidia_smi_refuses(node: Any, clock: Run, words: str, rc: int) -> None:
    clock(check=True, max_mhz=2200)
    real = node.smi.read_text()
    node.smi.write_text(real.replace("-lgc) ", f"-lgc) printf '%s' '{words}'; exit {rc}; "))
    result = clock(max_mhz=2200)
    assert result["failed"] is True
    assert words.splitlines()[0] in result["msg"]
    assert not (node.run / "tuning.json").exists()


def test_persistence_mode_off_is_a_warning(node: Any, clock: Run) -> None:
    node.gpu(persistence="Disabled")
    assert "Persistence mode is off" in clock(max_mhz=2200)["warnings"][0]
