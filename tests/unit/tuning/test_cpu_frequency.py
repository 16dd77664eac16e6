"""cpu_frequency: per policy, from what the policy can do; read back; put back byte for byte."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ansible_collections.gb10.fleet.plugins.module_utils import _cpufreq
from ansible_collections.gb10.fleet.plugins.modules import cpu_frequency

Run = Callable[..., dict[str, Any]]


@pytest.fixture
def apply(node: Any, run_module: Run) -> Run:
    def run(check: bool = False, **args: Any) -> dict[str, Any]:
        journal = str(node.state / "tuning.json")
        return run_module(cpu_frequency.main, check, **{"journal": journal, "root": str(node.root), **args})

    return run


@pytest.mark.parametrize("per_core", [True, False])
def test_tune_cpufreq_mixed(node: Any, apply: Run, per_core: bool) -> None:
    """Arm learning path, GB10 lscpu: reading cpu0 only hides the fast cores. 10 fast cores capped, 10 slow untouched."""
    node.policies(per_core)
    result = apply(governor="schedutil", cap_mhz=3300)
    assert result["changed"] is True
    fast = [p for p in node.cpufreq.iterdir() if (p / "cpuinfo_max_freq").read_text() == "4004000\n"]
    assert sum(len((p / "affected_cpus").read_text().split()) for p in fast) == 10
    for policy in node.cpufreq.iterdir():
        assert (policy / "scaling_governor").read_text() == "schedutil\n"
        assert (policy / "scaling_max_freq").read_text() == ("3300000\n" if policy in fast else "2860000\n")
    slow_touched = [a for a in result["actions"] if "2860000" in a]
    assert slow_touched == []


def test_only_governor_and_maximum_are_written(node: Any, apply: Run) -> None:
    """CPPC autonomous selection off costs a factor of three in memory bandwidth: nothing else may be touched."""
    node.policies(auto_select="1", energy_performance_preference="balance_performance")
    before = node.values()
    apply(governor="schedutil", cap_mhz=3300)
    changed = {name.partition("/")[2] for name, content in node.values().items() if content != before[name]}
    assert changed == {"scaling_governor", "scaling_max_freq"}


def test_check_then_run_then_check_then_run(node: Any, apply: Run) -> None:
    node.policies(per_core=False)
    before = node.values()
    proposed = apply(check=True, governor="schedutil", cap_mhz=3300)
    assert node.values() == before and not node.state.exists()
    assert proposed["changed"] is True
    done = apply(governor="schedutil", cap_mhz=3300)
    assert (
        done["actions"] == proposed["actions"]
        and done["diff"] == proposed["diff"]
        and done["policies"] == proposed["policies"]
    )
    assert "policy5/scaling_max_freq: 4004000 -> 3300000" in done["actions"]
    assert done["diff"]["before"].splitlines()[1:3] == [
        "policy5/scaling_governor: performance",
        "policy5/scaling_max_freq: 4004000",
    ]
    for check in (True, False):
        again = apply(check=check, governor="schedutil", cap_mhz=3300)
        assert (again["changed"], again["actions"]) == (False, [])


def test_restore_is_byte_for_byte(node: Any, apply: Run) -> None:
    """Each file as it was, odd line ends included; the slow cores had a limit of their own."""
    node.policies(per_core=False)
    (node.cpufreq / "policy5/scaling_governor").write_text("ondemand")
    (node.cpufreq / "policy15/scaling_max_freq").write_text("3900000\n\n")
    before = node.values()
    apply(governor="schedutil", cap_mhz=3300)
    apply(governor="powersave", cap_mhz=3000)
    assert node.values() != before
    assert apply(check=True, state="absent")["changed"] is True
    assert apply(state="absent")["changed"] is True
    assert node.values() == before
    assert not (node.state / "tuning.json").exists()
    (node.state / "tuning.lock").unlink()
    assert apply(state="absent")["changed"] is False
    assert not (node.state / "tuning.lock").exists()


def test_what_is_no_longer_asked_is_put_back(node: Any, apply: Run) -> None:
    node.policies(per_core=False)
    apply(governor="schedutil", cap_mhz=3300)
    assert apply(governor="schedutil", cap_mhz=0)["changed"] is True
    assert node.value("policy5/scaling_max_freq") == "4004000"
    assert node.value("policy5/scaling_governor") == "schedutil"


def test_governor_not_available_names_those_that_are(node: Any, apply: Run) -> None:
    node.policies(per_core=False, governors="performance powersave")
    before = node.values()
    result = apply(governor="schedutil")
    assert result["msg"] == (
        "policy0 (CPUs 0-4): governor schedutil is not available here. Available: performance, powersave."
    )
    assert node.values() == before


def test_auto_governor_keeps_what_it_cannot_change(node: Any, apply: Run) -> None:
    node.policies(per_core=False, governors="performance powersave")
    result = apply(governor="auto", cap_mhz=3300)
    assert node.value("policy0/scaling_governor") == "performance"
    assert node.value("policy5/scaling_max_freq") == "3300000"
    assert result["warnings"] == [
        "policy0 (CPUs 0-4) has no schedutil governor (available: performance, powersave): "
        "4 of 4 policies keep performance."
    ]


def test_cap_below_a_policys_minimum(node: Any, apply: Run) -> None:
    node.policies(per_core=False)
    before = node.values()
    result = apply(cap_mhz=1000)
    assert result["msg"] == (
        "policy5 (CPUs 5-9): a cap of 1000 MHz is below its minimum of 1378 MHz (it goes up to 4004 MHz)."
    )
    assert node.values() == before


def test_no_cpufreq_driver(apply: Run) -> None:
    result = apply(governor="schedutil")
    assert result["msg"].startswith(
        "/sys/devices/system/cpu/cpufreq has no policy: this kernel runs no cpufreq driver."
    )


def test_a_kernel_that_holds_another_value_is_told(node: Any, apply: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read-back: a write that succeeds and is not held is a failure, not a success."""
    node.policies(per_core=False)
    real = cpu_frequency.Journal.write

    def write(self: Any, path: str, content: str) -> None:
        real(self, path, "3198000\n" if path.endswith("policy5/scaling_max_freq") else content)

    monkeypatch.setattr(cpu_frequency.Journal, "write", write)
    result = apply(cap_mhz=3300)
    assert result["msg"] == (
        "policy5/scaling_max_freq: 3300000 was written, the kernel holds 3198000. "
        "Another program or the firmware limits this policy."
    )
    # What was there before is in the journal although the run failed.
    monkeypatch.setattr(cpu_frequency.Journal, "write", real)
    apply(state="absent")
    assert node.value("policy5/scaling_max_freq") == "4004000"


def test_a_refusal_of_the_kernel_is_a_sentence(node: Any, apply: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    node.policies(per_core=False)

    def write(self: Any, path: str, content: str) -> None:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(cpu_frequency.Journal, "write", write)
    assert apply(cap_mhz=3300)["msg"] == (
        "policy5/scaling_max_freq: the kernel refuses 3300000: Permission denied. Run as root."
    )


def test_a_table_of_frequencies_rounds_down(node: Any, apply: Run) -> None:
    node.policy((0,), (3900000, 1000000), scaling_available_frequencies="3900000 3200000 2400000")
    apply(cap_mhz=3300)
    assert node.value("policy0/scaling_max_freq") == "3200000"
    assert apply(cap_mhz=3300)["changed"] is False


def test_a_policy_that_is_gone_does_not_stop_the_restore(node: Any, apply: Run) -> None:
    node.policies()
    apply(governor="schedutil", cap_mhz=3300)
    for file in (node.cpufreq / "policy19").iterdir():
        file.unlink()
    (node.cpufreq / "policy19").rmdir()
    assert apply(state="absent")["changed"] is True
    assert node.value("policy5/scaling_governor") == "performance"
    assert not (node.state / "tuning.json").exists()


def test_bogus_current_frequency_is_no_reading(node: Any) -> None:
    """The capture has 5564000 kHz on a core of 4004000 kHz, and 4160000, which is a boost and stays."""
    node.policy((15,), (4004000, 1378000), scaling_cur_freq="5564000")
    node.policy((16,), (4004000, 1378000), scaling_cur_freq="4160000")
    assert [p.current_khz for p in _cpufreq.read_policies(str(node.root))] == [None, 4160000]


def test_a_broken_journal_is_a_sentence(node: Any, apply: Run) -> None:
    node.policies()
    node.state.mkdir(parents=True)
    (node.state / "tuning.json").write_text("{")
    assert "tuning.json cannot be read" in apply(governor="schedutil")["msg"]


def test_ranges() -> None:
    assert _cpufreq.ranges((5, 6, 7, 8, 9, 15, 0)) == "0,5-9,15"
