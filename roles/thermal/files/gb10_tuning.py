#!/usr/bin/python3
# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Hold a node's CPU and GPU frequency settings: apply, verify, restore, and put back what drifted.

    gb10_tuning.py apply|verify|restore|status [CONFIG]

``apply`` runs at boot and once a minute (gb10-tuning.service and .timer). It writes what differs from CONFIG
(/etc/gb10-fleet/tuning.json), reads it back, and records who moved: ``boot`` (nothing survives a reboot), ``driver`` (a driver that
was loaded again has no clock lock), ``drift`` (someone else). ``verify`` and ``status`` only read. ``restore`` puts every value of
the journal back, byte for byte.

Exit code: 0 all is as wanted, 1 something is not (a sentence on stderr says what), 2 wrong call or configuration.

It runs 1440 times a day: no argument parser, no site module, one nvidia-smi call as a rule (benchmarks/tuning_drift).
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from typing import Any

try:  # On a node the three files lie beside this one; in a test they come from the collection.
    import _cpufreq
    import _journal
    import _nvidia_smi
except ImportError:
    from ansible_collections.gb10.fleet.plugins.module_utils import _cpufreq, _journal, _nvidia_smi

CONFIG = "/etc/gb10-fleet/tuning.json"
DRIFT_LOG_BYTES = 256 * 1024
ERRORS = (_cpufreq.CpuFrequencyError, _journal.JournalError, _nvidia_smi.NvidiaSmiError, OSError)


class Tuning:
    """The settings of one node: ``config`` is {cpu: {governor, cap_mhz}|null, gpu: {min_mhz, max_mhz, ...}|null, ...}."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.cpu: dict[str, Any] = config.get("cpu") or {}
        self.gpu: dict[str, Any] | None = config.get("gpu")
        self.root: str = config.get("root", "/")
        state: str = config.get("state_dir", "/var/lib/gb10-fleet")
        self.journal_path = f"{state}/tuning.json"
        self.lock_path = f"{state}/tuning.lock"
        self.drift_path = f"{state}/tuning-drift.jsonl"
        # Below /run on purpose: what was set since this boot is forgotten by a reboot, as the kernel and the driver forget it.
        self.run_path: str = config.get("run_dir", "/run/gb10-fleet") + "/tuning.json"
        self.problems: list[str] = []

    # --- CPU

    def cpu_changes(
        self, journal: _journal.Journal, wanted: bool = True
    ) -> tuple[list[_cpufreq.Change], dict[str, str]]:
        """What differs on the CPU side, and the wanted values; with ``wanted`` false, what putting everything back would write."""
        if not self.cpu and not journal.before:
            return [], {}
        policies = _cpufreq.read_policies(self.root)
        values = _cpufreq.wanted_values(policies, self.cpu.get("governor"), self.cpu.get("cap_mhz")) if wanted else {}
        return _cpufreq.plan(policies, values, journal), values

    def apply_cpu(self, kind: str) -> None:
        """Write what differs, read it back, and record it as ``kind``."""
        journal = _journal.Journal(self.journal_path, self.root)
        known = set(journal.before)
        changes, wanted = self.cpu_changes(journal)
        if not changes:
            return
        _cpufreq.carry_out(changes, wanted, journal)
        for change in changes:
            first = change.path in wanted and change.path not in known
            self.record(
                "first" if first else kind, _cpufreq.short(change.path), change.before.strip(), change.after.strip()
            )

    # --- GPU

    def smi(self) -> dict[str, Any]:
        """Arguments for every nvidia-smi call."""
        gpu = self.gpu or {}
        return {"command": gpu.get("command", "nvidia-smi"), "timeout_s": gpu.get("timeout_s", _nvidia_smi.TIMEOUT_S)}

    def apply_gpu(self, run: dict[str, Any], kind: str) -> None:
        """Lock the GPU clock when the lock is not in force as far as one can know, and every ``reassert_s`` in any case."""
        if self.gpu is None:
            return
        low, high = self.gpu["min_mhz"], self.gpu["max_mhz"]
        clocks = _nvidia_smi.read_clocks(**self.smi())
        driver = _nvidia_smi.driver_load(self.root)
        record = run.get("gpu")
        why = _nvidia_smi.why_lock(record, low, high, driver, clocks)
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        # Nothing tells when someone else locks the clock lower, or unlocks it while the GPU idles.
        blind = record is not None and now - record.get("at", 0) >= self.gpu.get("reassert_s", 300)
        if why or blind or clocks.persistence is False:
            _nvidia_smi.check_lock(low, high, clocks)
            reply = _nvidia_smi.lock_clocks(low, high, **self.smi())
            run["gpu"] = {"min_mhz": low, "max_mhz": high, "driver": driver, "reply": reply, "at": now}
        if why:
            reloaded = record is not None and record.get("driver") != driver
            self.record(
                "driver" if reloaded else kind if record is None else "drift", "gpu clock", why, f"{low}-{high} MHz"
            )
        if clocks.stuck_low_power != bool(run.get("low_power")):
            run["low_power"] = clocks.stuck_low_power
            if clocks.stuck_low_power:
                self.record("low_power", "gpu", clocks.shown, _nvidia_smi.LOW_POWER_CURE)
        if clocks.stuck_low_power:
            self.problems.append(
                f"the GPU is stuck in its low-power state ({clocks.shown}). {_nvidia_smi.LOW_POWER_CURE}"
            )

    # --- Commands

    def apply(self) -> None:
        """Bring everything to the configuration. The CPU part does not wait for, or fail with, the GPU part."""
        run: dict[str, Any] = _journal.read_json(self.run_path, None) or {}
        before = json.dumps(run, sort_keys=True)
        kind = "drift" if run.get("applied") else "boot"
        try:
            with _journal.locked(self.lock_path):
                self.apply_cpu(kind)
        except ERRORS as exc:
            self.problems.append(str(exc))
        try:
            self.apply_gpu(run, kind)
            run.pop("gpu_error", None)
        except ERRORS as exc:
            self.problems.append(str(exc))
            if run.get("gpu_error") != str(exc):  # once, not once a minute
                run["gpu_error"] = str(exc)
                self.record("error", "gpu", str(exc), "")
        run["applied"] = True
        if json.dumps(run, sort_keys=True) != before:
            _journal.write_json(self.run_path, run)

    def verify(self) -> None:
        """Say what differs from the configuration; writes nothing."""
        changes, _ = self.cpu_changes(_journal.Journal(self.journal_path, self.root))
        for change in changes:
            self.problems.append(
                f"{_cpufreq.short(change.path)} is {change.before.strip()}, wanted {change.after.strip()}"
            )
        if self.gpu is not None:
            clocks = _nvidia_smi.read_clocks(**self.smi())
            record = (_journal.read_json(self.run_path, None) or {}).get("gpu")
            driver = _nvidia_smi.driver_load(self.root)
            why = _nvidia_smi.why_lock(record, self.gpu["min_mhz"], self.gpu["max_mhz"], driver, clocks)
            if why:
                self.problems.append(f"gpu clock: {why}, wanted {self.gpu['min_mhz']}-{self.gpu['max_mhz']} MHz")

    def restore(self) -> None:
        """Put every value of the journal back, take the clock lock off, and forget what was recorded."""
        run: dict[str, Any] = _journal.read_json(self.run_path, None) or {}
        with _journal.locked(self.lock_path):
            journal = _journal.Journal(self.journal_path, self.root)
            changes, _ = self.cpu_changes(journal, wanted=False)
            _cpufreq.carry_out(changes, {}, journal)
        for change in changes:
            print(f"{_cpufreq.short(change.path)}: {change.before.strip()} -> {change.after.strip()} (restored)")
        if run.get("gpu"):
            print(_nvidia_smi.reset_clocks(**self.smi()))
        for path in (self.run_path, self.drift_path, self.lock_path):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)  # noqa: PTH108

    def status(self) -> None:
        """Print the state as JSON: what differs, how often it drifted, the last events."""
        try:
            self.verify()
        except ERRORS as exc:
            self.problems.append(str(exc))
        events = self.events()
        count: dict[str, int] = {}
        for event in events:
            count[event["kind"]] = count.get(event["kind"], 0) + 1
        print(json.dumps({"differs": self.problems, "events": count, "last": events[-5:]}, indent=1))

    # --- Record

    def record(self, kind: str, what: str, found: str, wanted: str) -> None:
        """Append one event to the drift log (bounded) and say it on stdout, which systemd keeps."""
        print(f"{what}: {found} -> {wanted} ({kind})")
        event = {"at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "kind": kind, "what": what}
        line = json.dumps({**event, "found": found, "wanted": wanted}) + "\n"
        old = b""
        if os.path.exists(self.drift_path) and os.path.getsize(self.drift_path) > DRIFT_LOG_BYTES:  # noqa: PTH110, PTH202
            with open(self.drift_path, "rb") as file:  # noqa: PTH123
                old = file.read()[-DRIFT_LOG_BYTES // 2 :].partition(b"\n")[2]
            os.unlink(self.drift_path)  # noqa: PTH108
        os.makedirs(os.path.dirname(self.drift_path), mode=0o755, exist_ok=True)  # noqa: PTH103, PTH120
        with open(self.drift_path, "ab") as file:  # noqa: PTH123
            file.write(old + line.encode())
            file.flush()
            os.fsync(file.fileno())

    def events(self) -> list[dict[str, Any]]:
        """The recorded events, oldest first. A line cut short by a power-off is left out."""
        events = []
        try:
            with open(self.drift_path, encoding="utf-8", errors="replace") as file:  # noqa: PTH123
                for line in file:
                    try:
                        events.append(json.loads(line))
                    except ValueError:
                        continue
        except FileNotFoundError:
            pass
        return events


def main(argv: list[str]) -> int:
    commands = ("apply", "verify", "restore", "status")
    if len(argv) not in (2, 3) or argv[1] not in commands:
        print((__doc__ or "").strip(), file=sys.stderr)
        return 0 if "--help" in argv else 2
    path = argv[2] if len(argv) == 3 else CONFIG
    try:
        config = _journal.read_json(path)
    except _journal.JournalError as exc:
        print(exc, file=sys.stderr)
        return 2
    if not isinstance(config, dict):
        print(f"{path} holds no configuration. Run playbooks/tune_thermal.yml to write it.", file=sys.stderr)
        return 2
    tuning = Tuning(config)
    try:
        getattr(tuning, argv[1])()
    except ERRORS as exc:
        tuning.problems.append(str(exc))
    if argv[1] == "status":
        return 0
    for problem in tuning.problems:
        print(problem, file=sys.stderr)
    return 1 if tuning.problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
