#!/usr/bin/python
# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: rank_stop
short_description: Stop every rank container of a node and confirm that it is gone
version_added: "0.1.0"
description:
  - Stops and removes every container that carries the label C(gb10.fleet.cluster), whatever cluster or recipe started it, and the
    containers named in O(names). One node serves one cluster at a time.
  - Then confirms that nothing is left - no container, none of its processes, no listener on O(ports) - and fails with what is left
    otherwise. A rank that is believed gone and is not makes the next start hang (cases launch-stop-leftover, launch-port-in-use).
  - A head that is stuck in its rendezvous ignores SIGTERM; it is killed after O(stop_timeout_s).
  - A process that outlives its container (Ray's, of a container with the node's process numbers) is killed. It is known by number
    and start time from the container that it was in, never by a name.
author:
  - The gb10.fleet maintainers (@gb10-fleet)
extends_documentation_fragment:
  - gb10.fleet.attributes
  - gb10.fleet.attributes.full
options:
  names:
    description: Containers to stop by name as well, labelled or not.
    type: list
    elements: str
    default: []
  ports:
    description: TCP ports on which nothing may listen afterwards, besides the port that the container's own label names.
    type: list
    elements: int
    default: []
  stop_timeout_s:
    description: Seconds from SIGTERM to SIGKILL.
    type: int
    default: 60
  confirm_timeout_s:
    description: Seconds to wait, after the containers are removed, until processes and ports are gone.
    type: int
    default: 60
"""

EXAMPLES = r"""
- name: Stop the rank of this node
  gb10.fleet.rank_stop:
    names: [vllm_glm53]
    ports: [8000]
"""

RETURN = r"""
stopped:
  description: The containers that were stopped (in check mode, that would be).
  returned: always
  type: list
  elements: dict
  sample:
    - {id: 3f1c2a9b7d10, name: vllm_glm53, cluster: alpha, rank: "1", port: "8000", status: running}
seconds:
  description: How long it took.
  returned: always
  type: float
  sample: 2.4
"""

import contextlib
import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.gb10.fleet.plugins.module_utils._docker_api import Docker, DockerError, DockerNotFound
from ansible_collections.gb10.fleet.plugins.module_utils._docker_command import docker
from ansible_collections.gb10.fleet.plugins.module_utils._rank_spec import LABEL_CLUSTER, LABEL_PORT, LABEL_RANK

LISTEN = "0A"


def listening_ports(tables: list[str]) -> set[int]:
    """Ports with a listener, from the text of /proc/net/tcp and /proc/net/tcp6."""
    ports = set()
    for table in tables:
        for line in table.splitlines()[1:]:
            fields = line.split()
            if len(fields) > 3 and fields[3] == LISTEN:
                ports.add(int(fields[1].rsplit(":", 1)[1], 16))
    return ports


def process_starts(pids: list[int], proc: Path = Path("/proc")) -> dict[int, str]:
    """Start time (clock ticks since boot) of each process that exists: pid and start time together name one process."""
    starts = {}
    for pid in pids:
        try:
            starts[pid] = (proc / str(pid) / "stat").read_text().rsplit(") ", 1)[1].split()[19]
        except (OSError, IndexError):
            continue
    return starts


class RankStop:
    """Stops, removes and confirms. Every call of the engine has a timeout."""

    def __init__(self, module: AnsibleModule) -> None:
        self.module = module
        self.params = module.params
        self.engine = Docker(timeout_s=60)

    def find(self) -> list[dict[str, Any]]:
        wanted = [{"label": [LABEL_CLUSTER]}]
        if names := self.params["names"]:
            wanted.append({"name": [f"^/?{name}$" for name in names]})
        found: dict[str, dict[str, Any]] = {}
        for filters in wanted:
            for row in self.engine.get("/containers/json", {"all": "true", "filters": json.dumps(filters)}):
                labels = row.get("Labels") or {}
                found[row["Id"]] = {
                    "id": row["Id"][:12],
                    "name": row["Names"][0].lstrip("/"),
                    "cluster": labels.get(LABEL_CLUSTER, ""),
                    "rank": labels.get(LABEL_RANK, ""),
                    "port": labels.get(LABEL_PORT, ""),
                    "status": row["State"],
                }
        return list(found.values())

    def processes(self, containers: list[dict[str, Any]]) -> dict[int, str]:
        pids: list[int] = []
        for container in containers:
            if container["status"] != "running":
                continue
            with contextlib.suppress(DockerError):  # it ended between two questions
                rows = self.engine.get(f"/containers/{container['id']}/top", {"ps_args": "-eo pid"})["Processes"]
                pids += [int(row[0]) for row in rows]
        return process_starts(pids)

    def stop(self, container: dict[str, Any]) -> None:
        grace = self.params["stop_timeout_s"]
        with contextlib.suppress(DockerNotFound):
            docker(["docker", "stop", "--time", str(grace), container["id"]], grace + 60)
            docker(["docker", "rm", "--force", container["id"]], 120)

    @staticmethod
    def kill(processes: dict[int, str]) -> None:
        """End what is left of removed containers. Processes of another user stay; the confirmation names them."""
        for pid, start in process_starts(list(processes)).items():
            if processes[pid] == start:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)

    def left_over(self, processes: dict[int, str], watched: set[int]) -> list[str]:
        left = [f"container {c['name']} ({c['status']})" for c in self.find()]
        alive = process_starts(list(processes))
        left += [f"process {pid}" for pid, start in alive.items() if processes[pid] == start]
        tables = [p.read_text() for p in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")) if p.exists()]
        left += [f"a listener on port {port}" for port in sorted(listening_ports(tables) & watched)]
        return left

    def apply(self) -> dict[str, Any]:
        started = time.monotonic()
        containers = self.find()
        result: dict[str, Any] = {"changed": bool(containers), "stopped": containers}
        result["diff"] = {
            "before": "".join(f"{c['name']} {c['status']}\n" for c in containers),
            "after": "",
        }
        if not self.module.check_mode:
            processes = self.processes(containers)
            with ThreadPoolExecutor(max_workers=4) as pool:
                list(pool.map(self.stop, containers))
            self.kill(processes)
            watched = {int(c["port"]) for c in containers if c["port"].isdigit()} | set(self.params["ports"])
            self.confirm(processes, watched)
        result["seconds"] = round(time.monotonic() - started, 2)
        return result

    def confirm(self, processes: dict[int, str], watched: set[int]) -> None:
        deadline = time.monotonic() + self.params["confirm_timeout_s"]
        while left := self.left_over(processes, watched):
            if time.monotonic() > deadline:
                self.module.fail_json(
                    msg=f"After the stop this node still has {', '.join(left)} ({self.params['confirm_timeout_s']} s waited). "
                    "End what holds it (`ss -ltnp` names the owner of a port), then run this again."
                )
            time.sleep(0.2)


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "names": {"type": "list", "elements": "str", "default": []},
            "ports": {"type": "list", "elements": "int", "default": []},
            "stop_timeout_s": {"type": "int", "default": 60},
            "confirm_timeout_s": {"type": "int", "default": 60},
        },
        supports_check_mode=True,
    )
    try:
        module.exit_json(**RankStop(module).apply())
    except DockerError as exc:
        module.fail_json(msg=str(exc))


if __name__ == "__main__":
    main()
