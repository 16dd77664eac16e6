"""Faults on the nodes of a scenario, and what a playbook says about them. Shared with molecule/preflight.

GB10_FAULT_INVENTORY and GB10_FAULT_CONTAINERS (comma list, head first) point the tests at other nodes of the sandbox.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker

ROOT = Path(__file__).resolve().parents[2]
INVENTORY = Path(os.environ.get("GB10_FAULT_INVENTORY", ROOT / "molecule/shared/inventory"))
CONTAINERS = os.environ.get("GB10_FAULT_CONTAINERS", "gb10-molecule-1,gb10-molecule-2").split(",")


@dataclass(frozen=True)
class Said:
    """Exit code, and the output with wrapped lines joined again."""

    rc: int
    text: str
    raw: str
    seconds: float


class Node:
    """One node: its inventory name, addresses, and commands as root on it."""

    def __init__(self, name: str, container: str, variables: dict[str, Any]) -> None:
        self.name = name
        self.management = variables["ansible_host"]
        self.rail1 = variables["fabric_address"]
        first, _, last = self.rail1.rpartition(".")
        self.rail2 = f"{first}.{int(last) + 128}"
        self.container = docker.from_env().containers.get(container)

    def run(self, command: str, check: bool = True) -> str:
        rc, output = self.container.exec_run(["sh", "-c", command])
        assert rc == 0 or not check, f"{self.name}: {command}: {output.decode()}"
        return str(output.decode())

    @contextlib.contextmanager
    def fault(self, command: str, undo: str = "gb10-sandbox-reset") -> Iterator[None]:
        self.run(command)
        try:
            yield
        finally:
            self.run(undo)


class Cluster:
    """The nodes of cluster alpha, and playbooks run against them."""

    def __init__(self) -> None:
        listing = subprocess.run(
            [self.program("ansible-inventory"), "-i", str(INVENTORY), "--list"],
            check=True,
            capture_output=True,
            text=True,
            cwd=ROOT,
        )
        self.variables: dict[str, dict[str, Any]] = json.loads(listing.stdout)["_meta"]["hostvars"]
        hosts = self.variables
        names = sorted(
            (name for name, v in hosts.items() if v.get("cluster") == "alpha"), key=lambda n: hosts[n]["rank"]
        )
        self.head, self.worker = (
            Node(name, container, hosts[name]) for name, container in zip(names, CONTAINERS, strict=True)
        )

    @staticmethod
    def program(name: str) -> str:
        return str(ROOT / ".venv/bin" / name)

    def play(
        self,
        playbook: str,
        env: dict[str, str] | None = None,
        options: tuple[str, ...] = (),
        inventory: Path = INVENTORY,
        **variables: Any,
    ) -> Said:
        """Run a playbook of the collection; the output is that of a person's terminal."""
        argv = [self.program("ansible-playbook"), playbook, "-i", str(inventory), "-e", json.dumps(variables), *options]
        started = time.monotonic()
        inherited = {name: value for name, value in os.environ.items() if name != "ANSIBLE_FORCE_COLOR"}
        environment = {**inherited, "ANSIBLE_NOCOLOR": "1", **(env or {})}
        done = subprocess.run(argv, check=False, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=300)
        raw = done.stdout + done.stderr
        return Said(done.returncode, re.sub(r"\s+", " ", raw), raw, time.monotonic() - started)

    def apart(self, folder: Path) -> Path:
        """An inventory of the same two nodes, each as a cluster of its own: the head is alpha, the worker beta."""
        hosts = {
            node.name: {**self.variables[node.name], "cluster": name, "rank": 0}
            for node, name in ((self.head, "alpha"), (self.worker, "beta"))
        }
        (folder / "hosts.yml").write_text(json.dumps({"all": {"hosts": hosts}}))
        (folder / "zz_constructed.yml").write_text((INVENTORY / "zz_constructed.yml").read_text())
        return folder

    def fill(self, sentence: str) -> str:
        """A sentence with {head}, {worker}, {head.rail1} and so on filled in."""
        return sentence.format(head=self.head, worker=self.worker)


Node.__format__ = lambda self, _spec: self.name  # type: ignore[method-assign]
