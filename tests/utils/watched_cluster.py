"""A cluster of two nodes as the watchdog sees it, with a clock of its own; nothing here runs."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "roles/watchdog/files"))

from watchdog import machine, rules

SPECS = {"spark-01": "aaa", "spark-02": "bbb"}


class Cluster:
    """Two nodes that serve; a test breaks one thing, then lets looks pass."""

    def __init__(self) -> None:
        self.now = 1_800_000_000.0
        self.state = machine.State()
        self.marks: rules.Marks = {}
        self.launches: list[float] = []
        self.events: list[str] = []
        self.actions: list[str] = []
        self.names: list[str] = []
        self.kernel: dict[str, list[dict[str, Any]]] = {}
        self.run: Any = None
        self.launch: dict[str, Any] | None = None
        self.silent: set[str] = set()
        self.nodes = {name: self.eye(name) for name in SPECS}

    def eye(self, name: str) -> dict[str, Any]:
        eye = {
            "boot": "boot-1",
            "available_gib": 20.0,
            "container": self.container(name),
            "docker": None,
            "stopped": False,
            "compiling": False,
            "working": False,
            "fatal": [],
            "launch": None,
            "holds": {},
        }
        if name == "spark-01":
            eye.update(http={"health": 200, "iterations": 100, "running": 0, "waiting": 0}, canary=None, gpu=None)
        return eye

    def container(self, name: str, ident: str = "one") -> dict[str, Any]:
        return {
            "id": ident,
            "running": True,
            "status": "running",
            "exit_code": None,
            "oom_killed": False,
            # 2027-01-14: one day before the clock of the tests.
            "started_at": "2027-01-14T08:00:00Z",
            "restarts": 0,
            "spec": SPECS[name],
            "recipe": "glm",
        }

    @property
    def head(self) -> dict[str, Any]:
        return self.nodes["spark-01"]

    @property
    def worker(self) -> dict[str, Any]:
        return self.nodes["spark-02"]

    def end(self, name: str, code: int = 0) -> None:
        self.nodes[name]["container"].update(running=False, status="exited", exit_code=code)
        if name == "spark-01":
            self.head["http"] = None

    def stop_all(self) -> None:
        for eye in self.nodes.values():
            eye["container"] = None
        self.head["http"] = None

    def serve(self, ident: str = "") -> None:
        ident = ident or f"of launch {len(self.launches)}"
        for name, eye in self.nodes.items():
            eye.update(container=self.container(name, ident), stopped=False, fatal=[])
        self.head.update(http={"health": 200, "iterations": 1, "running": 0, "waiting": 0}, canary=None)

    def look(self) -> machine.Step:
        """One look, as the program does it: state kept as JSON, kernels asked before a launch."""
        look = {
            "now": self.now,
            "nodes": {
                name: {"rank": rank, "age_s": 600.0 if name in self.silent else 1.0, "eye": copy.deepcopy(eye)}
                for rank, (name, eye) in enumerate(self.nodes.items())
            },
            "run": self.run,
            "launch": self.launch,
        }
        self.run = self.run if self.run in ("running", "stopping") else None
        step = machine.advance(self.state, look, self.marks, SPECS)
        if step.action == machine.LAUNCH:
            ruled = machine.rule_out(self.state, self.kernel, self.now)
            step = machine.Step(ruled.action, step.events + ruled.events)
        self.state = machine.State.read(self.state.data())
        if step.action == machine.LAUNCH:
            self.launches.append(self.now)
            self.run = "running"
        if step.action == machine.CANCEL:
            self.run = None
        if step.action:
            self.actions.append(step.action)
        self.events += step.events
        self.names.append(self.state.name)
        return step

    def looks(self, seconds: float) -> Cluster:
        until = self.now + seconds
        while self.now < until:
            self.now += 5
            self.look()
        return self

    def fail(self, said: str = "spark-02: no room", seconds: float = 30) -> None:
        """The launch that runs fails after this time."""
        self.stop_all()
        self.looks(seconds)
        self.run = {"rc": 2, "said": said, "log": "/x/stdout"}
        self.looks(5)

    def succeed(self, seconds: float = 60) -> None:
        self.stop_all()
        self.looks(seconds / 2)
        self.serve()
        self.looks(seconds / 2)
        self.run = {"rc": 0, "said": "", "log": "/x/stdout"}
        self.looks(10)

    def kill_watchdog(self) -> None:
        """kill -9: what is in memory is gone, the state file is not; systemd ends the launch with it."""
        self.marks = {}
        self.run = None
