"""What tests and benchmarks share: run a playbook as a user does, look into the sandbox's nodes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker
import yaml

ROOT = Path(__file__).resolve().parents[2]
SANDBOX = "inventories/sandbox"
HEAD, WORKER = "spark-01", "spark-02"
ENDPOINT = "http://198.18.0.11:8000"


def playbook_argv(name: str, inventory: Path | str, *words: str) -> list[str]:
    return [
        str(Path(sys.executable).with_name("ansible-playbook")),
        f"playbooks/{name}.yml",
        "-i",
        str(inventory),
        *words,
    ]


def playbook_environment() -> dict[str, str]:
    return {**os.environ, "ANSIBLE_NOCOLOR": "1", "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), "COLUMNS": "100"}


def run_playbook(
    name: str, inventory: Path | str, *words: str, timeout: float = 1800
) -> subprocess.CompletedProcess[str]:
    """`ansible-playbook playbooks/<name>.yml` from the root of the clone. The limit only ends a run that hangs."""
    return subprocess.run(
        playbook_argv(name, inventory, *words),
        cwd=ROOT,
        env=playbook_environment(),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def start_playbook(name: str, inventory: Path | str, *words: str) -> subprocess.Popen[str]:
    """The same in the background; its output goes to a pipe that `communicate` reads."""
    return subprocess.Popen(
        playbook_argv(name, inventory, *words),
        cwd=ROOT,
        env=playbook_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def rendered(stdout: str) -> dict[str, str]:
    """Each rank's `docker run`, as render.yml prints it, on one line without Ansible's own: host -> command."""
    found = re.findall(r"^# (\S+): cluster .*?(^docker run .*?)(?=\n\n|\nok: \[)", stdout, re.DOTALL | re.MULTILINE)
    return {name: command.replace("\\\n", " ") for name, command in found}


def recap(stdout: str) -> dict[str, dict[str, int]]:
    """The PLAY RECAP of a run: host -> counter -> number."""
    hosts = {}
    for line in stdout.split("PLAY RECAP", 1)[1].splitlines()[1:]:
        name, _, counters = line.partition(" : ")
        if counters:
            hosts[name.strip()] = {k: int(v) for k, v in (pair.split("=") for pair in counters.split())}
    return hosts


def wait_until(what: str, ready: Any, limit_s: float = 600, every_s: float = 0.2) -> None:
    """Wait for an event; the limit only ends a wait for something that will never come."""
    deadline = time.monotonic() + limit_s
    while not ready():
        assert time.monotonic() < deadline, f"{what}: not within {limit_s:.0f} s"
        time.sleep(every_s)


@dataclass
class Node:
    """A sandbox node: a container of the local engine that has an engine of its own."""

    name: str
    client: docker.DockerClient
    prefix: str = "gb10-sandbox-"

    def run(self, *argv: str) -> str:
        code, output = self.client.containers.get(self.prefix + self.name).exec_run(list(argv))
        assert code == 0, f"{self.name}: {' '.join(argv)}: {output.decode(errors='replace')}"
        return output.decode(errors="replace")

    def ranks(self) -> list[dict[str, Any]]:
        """`docker inspect` of every rank container of the node."""
        ids = self.run("docker", "ps", "--all", "--quiet", "--filter", "label=gb10.fleet.cluster").split()
        return json.loads(self.run("docker", "inspect", *ids)) if ids else []

    def rank_identity(self) -> tuple[str, str]:
        (rank,) = self.ranks()
        return rank["Id"], rank["State"]["StartedAt"]


def watchdog_state(head: Node) -> dict[str, Any]:
    """What the watchdog of cluster alpha has on its node's disk. Fails while the node is down."""
    state: dict[str, Any] = json.loads(head.run("cat", "/var/lib/gb10-fleet/watchdog/alpha/state.json"))["state"]
    return state


def sandbox_nodes(*names: str) -> dict[str, Node]:
    client = docker.from_env()
    return {name: Node(name, client) for name in names or (HEAD, WORKER)}


def sandbox_inventory(folder: Path, count: int) -> Path:
    """The sandbox's inventory with the first nodes of it, in a folder."""
    hosts = {
        f"spark-{n:02d}": {
            "cluster": "alpha",
            "rank": n - 1,
            "ansible_host": f"198.18.0.{10 + n}",
            "fabric_address": f"198.51.100.{10 + n}",
        }
        for n in range(1, count + 1)
    }
    target = folder / "inventory"
    (target / "group_vars").mkdir(parents=True)
    (target / "hosts.yml").write_text(yaml.safe_dump({"all": {"hosts": hosts}}))
    site = (ROOT / SANDBOX / "group_vars/all.yml").read_text()
    site = site.replace("{{ inventory_dir | default('inventories/sandbox') }}/../../.sandbox", str(ROOT / ".sandbox"))
    (target / "group_vars/all.yml").write_text(site)
    (target / "zz_constructed.yml").write_text((ROOT / SANDBOX / "zz_constructed.yml").read_text())
    return target


def stream_completion(endpoint: str, model: str, prompt: str = "Hello", limit_s: float = 120) -> str:
    """One streamed chat completion from the controller; the text of all its pieces. It may be silent for the limit."""
    body = {"model": model, "messages": [{"role": "user", "content": prompt}], "max_tokens": 16, "stream": True}
    request = urllib.request.Request(
        f"{endpoint}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    text = ""
    with urllib.request.urlopen(request, timeout=limit_s) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    text += choice["delta"].get("content") or ""
    return text
