# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The program: ``python -m watchdog CONFIG``. Look, advance the state, write it down, act; every few seconds."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import machine, rules
from .outside import SSH, Alerts, NodeEye, Run, notify, read, write

WORKING = r"jit_monitor|[Aa]utotun|torch\.compile|Capturing CUDA graph|Compiling"


class Watchdog:
    """One cluster."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.settings = {**rules.SETTINGS, **config["settings"]}
        self.folder = Path(config["state_dir"])
        self.state = machine.State.read(read(self.folder / "state.json").get("state") or {})
        self.specs = {name: node["spec"] for name, node in config["nodes"].items()}
        self.marks: rules.Marks = {}
        self.run: Run | None = None
        self.alerts = Alerts(config)
        self.asked = time.monotonic()
        self.written: dict[str, Any] = {}
        self.me = socket.gethostname()
        source = Path(__file__).with_name("eye.py").read_text(encoding="utf-8")
        self.eyes = {
            name: NodeEye(self.argv(node), source, self.eye_settings(node)) for name, node in config["nodes"].items()
        }

    def argv(self, node: Mapping[str, Any]) -> list[str]:
        if node["local"]:
            return []
        files = ["-i", self.config["key"], "-o", f"UserKnownHostsFile={self.config['known_hosts']}"]
        return [*SSH, *files, "-p", str(node["port"]), f"{node['user']}@{node['address']}"]

    def eye_settings(self, node: Mapping[str, Any]) -> dict[str, Any]:
        return {
            **self.config["eye"],
            "head": node["rank"] == 0,
            "container": node["container"],
            "interval_s": self.settings["interval_s"],
            "fatal": self.config["fatal"],
            "working": WORKING,
        }

    def look(self) -> dict[str, Any]:
        for eye in self.eyes.values():
            eye.poll()
        nodes = {
            name: {"rank": self.config["nodes"][name]["rank"], "age_s": eye.age_s(), "eye": eye.line}
            for name, eye in self.eyes.items()
        }
        look: dict[str, Any] = {"now": time.time(), "nodes": nodes, "run": None, "launch": None}
        if self.run is not None:
            result = self.run.poll()
            look["run"] = result or "running"
            if self.run.stops:
                look["run"] = None if result else "stopping"
            self.run = None if result else self.run
        look["launch"] = next((r for n in nodes.values() if (r := self.launch(n["eye"]))), None)
        return look

    def launch(self, eye: Mapping[str, Any] | None) -> dict[str, Any] | None:
        """Somebody else's launch: not ours, not of a process of this machine that has ended, not past its time."""
        record = (eye or {}).get("launch") or {}
        if record.get("kind") != "serving" or time.time() >= float(record.get("expires") or 0):
            return None
        pid = int(record.get("pid") or 0)
        if record.get("controller") == self.me and (
            not Path(f"/proc/{pid}").exists() or (self.run and self.run.mine(pid))
        ):
            return None
        return dict(record)

    def canary(self, look: Mapping[str, Any]) -> None:
        """One token: now and then while nobody asks, and at once when a node falls silent."""
        head = rules.head_of(look)
        engine = (rules.head_eye(look, self.settings).get("http")) or {}
        idle = engine.get("health") == 200 and not engine.get("running") and not engine.get("waiting")
        silent = any(not rules.fresh(node, self.settings) for node in look["nodes"].values())
        wait = self.config["canary_s"] if not silent else 3 * self.settings["interval_s"]
        suspected = bool((rules.head_eye(look, self.settings).get("canary") or {}).get("ok") is False)
        if idle and time.monotonic() - self.asked >= (wait if not suspected else 2 * self.settings["interval_s"]):
            self.asked = time.monotonic()
            self.eyes[head].tell("canary")

    def step(self) -> None:
        look = self.look()
        step = machine.advance(self.state, look, self.marks, self.specs, self.settings)
        if self.state.name in ("serving", "degraded", "waiting", "foreign"):
            self.canary(look)
        self.keep()
        if step.action == machine.LAUNCH:
            events = step.events
            step = machine.rule_out(self.state, self.kernel(look), time.time())
            step.events = events + step.events
            self.keep()
        self.act(step.action)
        for event in step.events:
            self.tell(event)
        for eye in self.eyes.values():
            if eye.line is not None:
                eye.line["fatal"] = []
        self.alerts.reap()

    def act(self, action: str | None) -> None:
        if action == machine.LAUNCH:
            # Told to launch: else serve.yml would ask an engine that hangs, and wait for its answer.
            steps = [("evidence", {}), ("serve", {"serve_restart": True})]
            self.run = Run(self.config, steps, self.config["launch_limit_s"])
        elif action == machine.CANCEL and self.run is not None:
            self.run.cancel()
            self.run = None
        elif action == machine.STOP:
            self.run = Run(self.config, [("stop", {})], self.config["launch_limit_s"])

    def kernel(self, look: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
        """What the catalogue of the collection knows of each kernel's log since its rank started."""
        from ansible_collections.gb10.fleet.plugins.module_utils import _failures

        out = {}
        for name, eye in rules.eyes(look, self.settings).items():
            since = rules.moment((eye["container"] or {}).get("started_at")) or time.time() - 3600
            words = ["journalctl", "--dmesg", "--no-pager", "--output", "short-unix", "--since", f"@{since:.0f}"]
            argv = self.argv(self.config["nodes"][name])
            try:
                answer = subprocess.run(
                    [*argv, "sudo", "-n", *words] if argv else words,
                    capture_output=True,
                    text=True,
                    timeout=15,
                    check=False,
                )
            except (OSError, subprocess.TimeoutExpired):
                continue
            out[name] = _failures.kernel_lines(answer.stdout)
        return out

    def keep(self) -> None:
        """Write the state when it changed, and the incident into its own file."""
        data = {"cluster": self.config["cluster"], "state": self.state.data()}
        if data == self.written:
            return
        before = self.written.get("state") or {}
        self.written = json.loads(json.dumps(data))
        incident = self.state.incident or self.state.last_incident
        if incident and incident != (before.get("incident") or before.get("last_incident")):
            incident["evidence"] = self.config["evidence_dir"]
            write(self.folder / "incidents" / f"{incident['id']}.json", incident)
        write(self.folder / "state.json", data)
        if before.get("name") != self.state.name:
            notify(f"STATUS={self.state.name}: {self.state.why}")
            print(f"{self.state.name}{': ' if self.state.why else ''}{self.state.why}", flush=True)

    def tell(self, event: str) -> None:
        incident = self.state.incident or self.state.last_incident or {}
        text = self.state.why or incident.get("said") or ""
        if event == "recovered":
            text = (
                f"{incident.get('node')}: {incident.get('said')}; it serves again after {incident.get('downtime_s')} s"
            )
        body = {"event": event, "cluster": self.config["cluster"], "text": text, "state": self.state.name}
        self.alerts.send({**body, "at": time.time(), "incident": incident})

    def close(self) -> None:
        for eye in self.eyes.values():
            eye.close()
        if self.run is not None:
            self.run.cancel()


def main() -> int:
    config = read(Path(sys.argv[1]))
    if not config:
        print(f"{sys.argv[1]} cannot be read. Run playbooks/watchdog.yml.", file=sys.stderr)
        return 2
    watchdog = Watchdog(config)
    going = [True]

    def leave(number: int, frame: object) -> None:
        going.clear()

    signal.signal(signal.SIGTERM, leave)
    signal.signal(signal.SIGINT, leave)
    notify("READY=1")
    beat = int(os.environ.get("WATCHDOG_USEC", "0")) > 0
    while going:
        begun = time.monotonic()
        watchdog.step()
        if beat:
            notify("WATCHDOG=1")
        time.sleep(max(0.2, watchdog.settings["interval_s"] - (time.monotonic() - begun)))
    watchdog.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
