"""A node's frequency surfaces in a folder: cpufreq policies of a GB10, thermal zones, and a fake nvidia-smi that keeps a lock."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# Arm learning path, GB10 lscpu: Cortex-X925 4004/1378 MHz on CPUs 5-9, 15-19; Cortex-A725 2860/338 MHz on CPUs 0-4, 10-14.
FAST, SLOW = (4004000, 1378000), (2860000, 338000)
FAST_CPUS = (*range(5, 10), *range(15, 20))
GOVERNORS = "conservative ondemand userspace powersave performance schedutil "
MIDR = {FAST: "0x00000000410fd850", SLOW: "0x00000000410fd870"}

FAKE_SMI = """#!/bin/sh
# Keeps the lock in a file, and like the driver never reports it.
here={folder}
echo "$@" >> $here/calls
[ -e $here/reply ] && {{ cat $here/reply; exit $(cat $here/rc 2>/dev/null || echo 0); }}
case "$1" in
  -lgc) echo "${{2}}" > $here/lock
        echo "GPU clocks set to \\"(gpuClkMin ${{2%,*}}, gpuClkMax ${{2#*,}})\\" for GPU 0000000F:01:00.0"; echo "All done." ;;
  -rgc) rm -f $here/lock; echo "Reset GPU clocks to default for GPU 0000000F:01:00.0"; echo "All done." ;;
  --query-gpu={fields}) cat $here/query.csv ;;
  --query-gpu=*) echo "Field is not a valid field to query."; exit 2 ;;
  -q) cat $here/q.xml ;;
esac
"""
QUERY_FIELDS = (
    "clocks.max.gr,clocks.sm,utilization.gpu,power.draw,persistence_mode,clocks_event_reasons.active,temperature.gpu"
)
QUERY_HEADER = (
    "clocks.max.graphics [MHz], clocks.current.sm [MHz], utilization.gpu [%], power.draw [W], persistence_mode, "
    "clocks_event_reasons.active, temperature.gpu"
)


class Node:
    """Folder with the surfaces, and what a test says about them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.smi = root / "bin" / "nvidia-smi"
        self.cpufreq = root / "sys/devices/system/cpu/cpufreq"
        self.state, self.run = root / "var/lib/gb10-fleet", root / "run/gb10-fleet"
        self.smi.parent.mkdir(parents=True)
        self.smi.write_text(FAKE_SMI.format(folder=self.smi.parent, fields=QUERY_FIELDS))
        self.smi.chmod(0o755)
        self.gpu()

    def policies(self, per_core: bool = True, **changed: Any) -> None:
        """One policy per core, or one per cluster of five."""
        groups = [(cpu,) for cpu in range(20)] if per_core else [tuple(range(s, s + 5)) for s in (0, 5, 10, 15)]
        for cpus in groups:
            self.policy(cpus, FAST if cpus[0] in FAST_CPUS else SLOW, **changed)

    def policy(self, cpus: tuple[int, ...], limits: tuple[int, int], governors: str = GOVERNORS, **files: str) -> None:
        folder = self.cpufreq / f"policy{cpus[0]}"
        folder.mkdir(parents=True)
        content = {
            "affected_cpus": " ".join(map(str, cpus)),
            "cpuinfo_max_freq": str(limits[0]),
            "cpuinfo_min_freq": str(limits[1]),
            "scaling_max_freq": str(limits[0]),
            "scaling_min_freq": str(limits[1]),
            "scaling_cur_freq": str(limits[0]),
            "scaling_governor": "performance",
            "scaling_available_governors": governors,
            **files,
        }
        for name, text in content.items():
            (folder / name).write_text(text + "\n")
        for cpu in cpus:
            midr = self.root / f"sys/devices/system/cpu/cpu{cpu}/regs/identification/midr_el1"
            midr.parent.mkdir(parents=True)
            midr.write_text(MIDR.get(limits, "0x0") + "\n")

    def gpu(
        self,
        sm: float = 208,
        util: int = 0,
        watts: str = "10.00 W",
        persistence: str = "Enabled",
        reasons: str = "0x0",
        temp: int = 41,
    ) -> None:
        """What the GPU does from now on."""
        row = f"3003 MHz, {sm:.0f} MHz, {util} %, {watts}, {persistence}, {reasons}, {temp}"
        (self.smi.parent / "query.csv").write_text(f"{QUERY_HEADER}\n{row}\n")

    def refuse(self, text: str, rc: int = 0) -> None:
        (self.smi.parent / "reply").write_text(text)
        (self.smi.parent / "rc").write_text(str(rc))

    @property
    def lock(self) -> str | None:
        file = self.smi.parent / "lock"
        return file.read_text().strip() if file.exists() else None

    @property
    def calls(self) -> list[str]:
        file = self.smi.parent / "calls"
        return file.read_text().splitlines() if file.exists() else []

    def values(self) -> dict[str, bytes]:
        """Every byte of every policy file."""
        return {
            str(p.relative_to(self.cpufreq)): p.read_bytes() for p in sorted(self.cpufreq.rglob("*")) if p.is_file()
        }

    def value(self, name: str) -> str:
        return (self.cpufreq / name).read_text().strip()

    def reboot(self) -> None:
        """The kernel starts with its defaults, /run is empty, the driver has no lock."""
        for policy in self.cpufreq.iterdir():
            (policy / "scaling_governor").write_text("performance\n")
            (policy / "scaling_max_freq").write_text((policy / "cpuinfo_max_freq").read_text())
        for file in self.run.iterdir():
            file.unlink()
        (self.smi.parent / "lock").unlink(missing_ok=True)

    def config(self, cpu: dict[str, Any] | None, gpu: dict[str, Any] | None) -> str:
        path = self.root / "tuning.json"
        full = None if gpu is None else {"command": str(self.smi), "timeout_s": 5, "reassert_s": 300, **gpu}
        settings = {
            "cpu": cpu,
            "gpu": full,
            "root": str(self.root),
            "state_dir": str(self.state),
            "run_dir": str(self.run),
        }
        path.write_text(json.dumps(settings))
        return str(path)

    def events(self) -> list[dict[str, str]]:
        file = self.state / "tuning-drift.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path / "node")


@pytest.fixture
def run_module(capfd: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    """Run a module's main() with arguments and return its JSON, warnings as plain texts."""
    from ansible.module_utils.common import warnings
    from ansible.module_utils.testing import patch_module_args

    def run(main: Callable[[], None], check: bool = False, **args: Any) -> dict[str, Any]:
        capfd.readouterr()
        warnings._global_warnings.clear()  # they outlive a module that runs inside a test
        with (
            patch_module_args({**args, "_ansible_check_mode": check, "_ansible_diff": True}),
            pytest.raises(SystemExit),
        ):
            main()
        result: dict[str, Any] = json.loads(capfd.readouterr().out)
        result["warnings"] = [w if isinstance(w, str) else w["event"]["msg"] for w in result.get("warnings", [])]
        return result

    return run
