#!/usr/bin/python
# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: rank_info
short_description: Say how the rank on this node is
version_added: "0.1.0"
description:
  - Looks at one rank container in one cheap call - Docker's state of it, whether an engine process is alive in it, and memory.
    On request it also reads what came into its log since the last call, asks the GPU and the kernel log, and sends one real
    completion.
  - A container that does not exist is an answer, not an error.
  - The log is never read twice. Give O(cursor) back from the result of the last call and only what came in between is read.
author:
  - The gb10.fleet maintainers (@gb10-fleet)
extends_documentation_fragment:
  - gb10.fleet.attributes
  - gb10.fleet.attributes.read_only
options:
  container:
    description: Name of the rank container.
    type: str
    required: true
  expected_spec:
    description: sha256 of the rank spec that should run; compared with the label C(gb10.fleet.spec).
    type: str
  log:
    description:
      - Read the log since the container started, or since O(cursor). Gives stage, percent, first error, and what the failure
        catalogue knows. O(wait_for) and O(cursor) imply it.
    type: bool
    default: false
  cursor:
    description: RV(rank.cursor) of an earlier call.
    type: dict
  log_lines:
    description: How many of the last log lines to return.
    type: int
    default: 5
  wait_for:
    description:
      - Return as soon as one of these stages (or a later one) is in the log, the rank ended or is known to fail, or O(timeout_s) is
        over. Not coming as far is no failure of this module; look at RV(rank.stage).
    type: list
    elements: str
    choices: [config, engine, rendezvous, joined, load, loaded, compile, kv_cache, capture, warm, server, ready]
  timeout_s:
    description: Limit of O(wait_for).
    type: float
    default: 20
  probe:
    description: Send one streamed chat completion from this node to the engine and time it. Meant for the head.
    type: dict
    suboptions:
      url:
        description: Base URL of the engine as this node reaches it.
        type: str
        required: true
      model:
        description: Model name that must be listed and is asked.
        type: str
        required: true
      prompt:
        description: What to ask.
        type: str
        default: "Say: ready"
      max_tokens:
        description: Length of the answer.
        type: int
        default: 8
      timeout_s:
        description: Limit for list and completion together.
        type: float
        default: 30
      api_key_file:
        description: File on this node whose first line is the API key.
        type: path
  guard_unit:
    description: systemd unit of the memory guard to look at.
    type: str
  gpu:
    description: Ask nvidia-smi for utilization, power, clock and temperature. During a O(probe) it is asked while the answer comes.
    type: bool
    default: false
  kernel:
    description: Read the kernel log since the container started and return the lines that the failure catalogue knows.
    type: bool
    default: false
  activity:
    description: Return CPU seconds used and bytes read by the container so far.
    type: bool
    default: false
  docker_socket:
    description: Socket of the Docker engine.
    type: path
    default: /var/run/docker.sock
  holds_dir:
    description: Folder of the notes to the watchdog (see C(watchdog_holds_dir) of the role watchdog).
    type: path
    default: /var/lib/gb10-fleet/hold
"""

EXAMPLES = r"""
- name: Look at the rank, and ask for a completion on the head
  gb10.fleet.rank_info:
    container: "{{ topology_spec.name }}"
    expected_spec: "{{ topology_spec_hash }}"
    probe: "{{ topology_probe if topology_rank == 0 else omit }}"
  register: rank

- name: Wait until a worker waits for the head
  gb10.fleet.rank_info:
    container: vllm_glm53
    wait_for: [rendezvous]
    timeout_s: 20
  register: worker

- name: Show how far the rank has come, its GPU and its guard
  gb10.fleet.rank_info:
    container: vllm_glm53
    log: true
    gpu: true
    guard_unit: gb10-memory-guard@alpha.service
"""

RETURN = r"""
rank:
  description: The rank. What was not asked for is null.
  returned: always
  type: dict
  contains:
    exists: {description: "Whether there is such a container.", type: bool, returned: always, sample: true}
    running: {description: "Whether it runs.", type: bool, returned: always, sample: true}
    status: {description: "Docker's word for it.", type: str, returned: always, sample: running}
    container_id: {description: "Id of the container.", type: str, returned: when it exists, sample: 3f1c2a9b7d10}
    image: {description: "Image reference.", type: str, returned: when it exists, sample: "198.18.0.2:5000/sandbox/fake-engine:1"}
    image_id: {description: "Image id.", type: str, returned: when it exists, sample: "sha256:8c1f"}
    exit_code: {description: "Exit code; null while it runs.", type: int, returned: when it exists, sample: 137}
    oom_killed: {description: "Whether Docker saw the kernel kill it for lack of memory.", type: bool, returned: when it exists}
    error: {description: "Why Docker could not start it, if so.", type: str, returned: when it exists}
    restart_count: {description: "Restarts by Docker.", type: int, returned: when it exists, sample: 0}
    started_at: {description: "When it started (RFC 3339).", type: str, returned: when it exists}
    finished_at: {description: "When it ended; null while it runs.", type: str, returned: when it exists}
    labels: {description: "Labels of the container.", type: dict, returned: when it exists}
    spec: {description: "Label C(gb10.fleet.spec).", type: str, returned: when it exists}
    spec_matches: {description: "Whether it is O(expected_spec).", type: bool, returned: with O(expected_spec)}
    recipe: {description: "Label C(gb10.fleet.recipe).", type: str, returned: when it exists}
    entrypoint: {description: "Entrypoint words.", type: list, elements: str, returned: with O(log)}
    argv: {description: "Argument words, secrets left out.", type: list, elements: str, returned: with O(log)}
    settings:
      description: >-
        What it depends on besides its arguments - init, ipc_mode, network_mode, shm_size, restart_policy, memlock, devices, env
        (no secrets).
      type: dict
      returned: with O(log)
    engine_alive: {description: "Whether an engine process runs in it that is neither dead nor stopped.", type: bool, returned: while it runs}
    processes_stopped: {description: "Whether a process of it is stopped (SIGSTOP).", type: bool, returned: while it runs}
    stage: {description: "Stage reached by the log.", type: str, returned: with O(log), sample: load}
    stage_percent: {description: "Percent of that stage.", type: int, returned: with O(log), sample: 37}
    stage_left_s: {description: "Seconds left as the engine's own progress bar says.", type: int, returned: with O(log)}
    stages: {description: "Time at which each stage was reached.", type: dict, returned: with O(log)}
    first_error: {description: "First error by time - time, line, and id in the catalogue.", type: dict, returned: with O(log)}
    fatal: {description: "What the catalogue knows of it - id, kind, time, line, groups, stage.", type: dict, returned: with O(log)}
    waits: {description: "Lines that count only when they last.", type: dict, returned: with O(log)}
    notes: {description: "Lines that are worth a finding.", type: dict, returned: with O(log)}
    facts: {description: "Figures from the log (block size, KV cache, proposals of the engine).", type: dict, returned: with O(log)}
    log_bytes: {description: "Bytes of log read so far.", type: int, returned: with O(log)}
    last_lines: {description: "Last lines of the log.", type: list, elements: str, returned: with O(log)}
    cursor: {description: "To be given back as O(cursor).", type: dict, returned: with O(log)}
    gpu: {description: "utilization_percent, power_w, sm_clock_mhz, temperature_celsius; or error.", type: dict, returned: with O(gpu)}
    holds: {description: "Names of the notes that tell this node's watchdog to keep off - paused, stopped.", type: list, elements: str, returned: always}
    launch: {description: "holder, controller, pid, since of a launch that is under way on this node.", type: dict, returned: always}
    memory: {description: "total_kib, free_kib, available_kib of the node.", type: dict, returned: always}
    guard: {description: "unit, active, sub, since of the memory guard.", type: dict, returned: with O(guard_unit)}
    kernel_lines: {description: "Kernel lines since the start that the catalogue knows - id, severity, time, line, groups.", type: list, elements: dict, returned: with O(kernel)}
    activity: {description: "cpu_s and read_bytes of the container.", type: dict, returned: with O(activity)}
    probe:
      description: >-
        ok, status, model_listed, listed, key_needed, timed_out, text, completion_tokens, prompt_tokens, cached_tokens, ttft_s,
        total_s, tokens_per_s, error.
      type: dict
      returned: with O(probe)
    node_time: {description: "Clock of the node (seconds since 1970).", type: float, returned: always}
"""  # noqa: E501

import contextlib
import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.gb10.fleet.plugins.module_utils import _node
from ansible_collections.gb10.fleet.plugins.module_utils._docker_api import Docker, DockerError

# The cheap look imports no more than this: a node compiles a module's files on every call. The rest is imported where it is used.
if TYPE_CHECKING:
    from ansible_collections.gb10.fleet.plugins.module_utils._docker_log import DockerLog

LABELS = ("gb10.fleet.spec", "gb10.fleet.recipe")
WAIT_FOR = [
    "config",
    "engine",
    "rendezvous",
    "joined",
    "load",
    "loaded",
    "compile",
    "kv_cache",
    "capture",
    "warm",
    "server",
    "ready",
]
# Processes that are there for others: the init that reaps, and shells.
HELPERS = ("docker-init", "tini", "catatonit", "sleep", "sh", "bash", "dumb-init")
POLL_S = 0.25
GPU_TIMEOUT_S = 11.0
SERVING_LOCK = "/run/gb10-fleet/serving.lock"
HOLDS = "/var/lib/gb10-fleet/hold"
# What is null until it is known.
UNKNOWN = (
    *(
        "container_id",
        "image",
        "image_id",
        "exit_code",
        "oom_killed",
        "error",
        "restart_count",
        "started_at",
        "finished_at",
    ),
    *("spec", "spec_matches", "recipe", "entrypoint", "argv", "settings", "engine_alive", "processes_stopped"),
    *("stage", "stage_percent", "stage_left_s", "first_error", "fatal", "cursor", "log_bytes"),
    *("gpu", "guard", "activity", "probe"),
)
# Environment that says how ranks find each other and how long they wait.
ENV = (
    "NCCL_",
    "GLOO_",
    "TP_",
    "MN_",
    "VLLM_",
    "RAY_",
    "PYTORCH_",
    "TORCH_",
    "UCX_",
    "HF_HUB_",
    "MALLOC_ARENA_MAX",
    "OMP_NUM_THREADS",
)
GPU_FIELDS = {
    "utilization_percent": "utilization.gpu",
    "power_w": "power.draw",
    "sm_clock_mhz": "clocks.sm",
    "temperature_celsius": "temperature.gpu",
}


def processes_alive(rows: list[list[str]]) -> tuple[bool, bool]:
    """``(the engine is alive, a process of it is stopped)`` from the rows pid, state, command of ps.

    A dead process (Z, X) does not serve; one that is stopped (T) makes all ranks wait. Init and shells are no engine.
    """
    living = []
    for row in rows:
        command = row[2].split()
        name = command[0].rsplit("/", 1)[-1] if command else ""
        if name not in HELPERS and row[1][:1] not in ("Z", "X"):
            living.append(row[1][:1])
    stopped = any(state in ("T", "t") for state in living)
    return bool(living) and not stopped, stopped


def memory() -> dict[str, int | None]:
    """Memory of the node in KiB."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:  # noqa: PTH123
            said = _node.meminfo(file.read())
    except OSError:
        said = {}
    return {
        "total_kib": said.get("MemTotal"),
        "free_kib": said.get("MemFree"),
        "available_kib": said.get("MemAvailable"),
    }


def launch() -> dict[str, Any] | None:
    """The launch that holds this node now, if one does."""
    if not os.path.exists(SERVING_LOCK):  # noqa: PTH110
        return None
    from ansible_collections.gb10.fleet.plugins.module_utils import _staging_lock

    return _staging_lock.launch_under_way(SERVING_LOCK)


def settings(inspect: Mapping[str, Any]) -> dict[str, Any]:
    """What a rank depends on besides its arguments, from ``docker inspect``; environment by name only where it is no secret."""
    from ansible_collections.gb10.fleet.plugins.module_utils import _redact

    host, config = inspect.get("HostConfig") or {}, inspect.get("Config") or {}
    env = dict(pair.split("=", 1) for pair in config.get("Env") or [] if "=" in pair)
    limits = {limit["Name"]: limit["Soft"] for limit in host.get("Ulimits") or []}
    return {
        "init": bool(host.get("Init")),
        "ipc_mode": host.get("IpcMode") or "",
        "network_mode": host.get("NetworkMode") or "",
        "shm_size": host.get("ShmSize"),
        "restart_policy": (host.get("RestartPolicy") or {}).get("Name") or "no",
        "memlock": limits.get("memlock"),
        "devices": [device.get("PathOnHost") for device in host.get("Devices") or []],
        "env": {
            name: value for name, value in sorted(env.items()) if name.startswith(ENV) and not _redact.is_secret(name)
        },
    }


class RankInfo:
    """One look at one rank."""

    def __init__(self, module: AnsibleModule) -> None:
        self.module = module
        self.params = module.params
        self.docker = Docker(self.params["docker_socket"])
        self.log: DockerLog | None = None

    def run(self) -> dict[str, Any]:
        p = self.params
        inspect = self.inspect()
        rank = self.state(inspect)
        if inspect and (p["log"] or p["cursor"] or p["wait_for"]):
            inspect, rank = self.follow(inspect, rank)
            rank.update(self.words(inspect))
        if inspect and rank["running"]:
            rank["engine_alive"], rank["processes_stopped"] = self.processes(inspect)
            if p["activity"]:
                rank["activity"] = self.activity(inspect)
        if p["guard_unit"]:
            rank["guard"] = self.guard(p["guard_unit"])
        if p["kernel"] and inspect:
            rank["kernel_lines"] = self.kernel(rank["started_at"])
        if p["probe"]:
            rank["probe"], rank["gpu"] = self.probe(p["probe"])
        elif p["gpu"]:
            rank["gpu"] = self.gpu()
        rank["launch"] = launch()
        with contextlib.suppress(OSError):
            rank["holds"] = sorted(os.listdir(p["holds_dir"]))  # noqa: PTH208
        rank["memory"] = memory()
        rank["node_time"] = time.time()
        return rank

    def inspect(self) -> dict[str, Any] | None:
        return self.docker.find(f"/containers/{self.params['container']}/json")

    def state(self, inspect: dict[str, Any] | None) -> dict[str, Any]:
        rank: dict[str, Any] = dict.fromkeys(UNKNOWN)
        rank.update(
            exists=inspect is not None, running=False, status="absent", labels={}, stages={}, waits={}, notes={}
        )
        rank.update(facts={}, last_lines=[], kernel_lines=[], holds=[])
        if inspect is None:
            return rank
        state, config = inspect["State"], inspect["Config"]
        running = bool(state.get("Running")) and not state.get("Paused") and not state.get("Restarting")
        labels = config.get("Labels") or {}
        wanted = self.params["expected_spec"]
        rank.update(
            running=running,
            status=state.get("Status"),
            container_id=inspect["Id"],
            image=config.get("Image"),
            image_id=inspect.get("Image"),
            exit_code=None if state.get("Running") else state.get("ExitCode"),
            oom_killed=bool(state.get("OOMKilled")),
            error=state.get("Error") or None,
            restart_count=inspect.get("RestartCount", 0),
            started_at=state.get("StartedAt"),
            finished_at=None if state.get("Running") else state.get("FinishedAt"),
            labels=labels,
            spec=labels.get(LABELS[0]),
            recipe=labels.get(LABELS[1]),
            spec_matches=None if wanted is None else labels.get(LABELS[0]) == wanted,
        )
        return rank

    @staticmethod
    def words(inspect: dict[str, Any] | None) -> dict[str, Any]:
        """What the rank was started with, without secrets."""
        from ansible_collections.gb10.fleet.plugins.module_utils import _redact

        if inspect is None:
            return {}
        config = inspect["Config"]
        argv = _redact.words(config.get("Cmd") or [])
        return {"entrypoint": config.get("Entrypoint") or [], "argv": argv, "settings": settings(inspect)}

    def follow(self, inspect: dict[str, Any], rank: dict[str, Any]) -> tuple[dict[str, Any] | None, dict[str, Any]]:
        """Read the log; with ``wait_for`` until it says what is waited for."""
        from ansible_collections.gb10.fleet.plugins.module_utils._docker_log import DockerLog

        deadline = time.monotonic() + self.params["timeout_s"]
        now: dict[str, Any] | None = inspect
        self.log = DockerLog(self.docker, inspect, self.params["cursor"])
        while True:
            self.read(rank)
            if self.arrived(rank) or time.monotonic() >= deadline:
                return now, rank
            time.sleep(POLL_S)
            now = self.inspect()
            if now is None or now["Id"] != inspect["Id"] or now["State"]["StartedAt"] != inspect["State"]["StartedAt"]:
                return now, self.state(now)
            rank = self.state(now)

    def read(self, rank: dict[str, Any]) -> None:
        if self.log is None:
            return
        log = self.log.read()
        count = self.params["log_lines"]
        rank.update(
            {name: log[name] for name in ("stage", "stages", "first_error", "fatal", "waits", "notes", "facts")},
            stage_percent=log["percent"],
            stage_left_s=log["left_s"],
            log_bytes=self.log.cursor["bytes"],
            last_lines=log["last"][-count:] if count > 0 else [],
            cursor=self.log.cursor,
        )

    def arrived(self, rank: dict[str, Any]) -> bool:
        wanted = self.params["wait_for"]
        if not wanted or not rank["running"] or rank["fatal"]:
            return True
        from ansible_collections.gb10.fleet.plugins.module_utils._engine_log import later

        return any(rank["stage"] == stage or later(rank["stage"], stage) for stage in wanted)

    def processes(self, inspect: dict[str, Any]) -> tuple[bool, bool]:
        try:
            top = self.docker.get(f"/containers/{inspect['Id']}/top", {"ps_args": "-eo pid,stat,args"})
        except DockerError:
            # It ended between two questions.
            return False, False
        return processes_alive([row for row in top.get("Processes") or [] if len(row) >= 3])

    def activity(self, inspect: dict[str, Any]) -> dict[str, Any] | None:
        try:
            stats = self.docker.get(f"/containers/{inspect['Id']}/stats", {"stream": "false", "one-shot": "true"})
        except DockerError:
            return None
        blocks = (stats.get("blkio_stats") or {}).get("io_service_bytes_recursive") or []
        return {
            "cpu_s": round(stats["cpu_stats"]["cpu_usage"]["total_usage"] / 1e9, 3),
            "read_bytes": sum(row["value"] for row in blocks if str(row.get("op")).lower() == "read"),
        }

    def guard(self, unit: str) -> dict[str, Any]:
        from ansible_collections.gb10.fleet.plugins.module_utils import _command

        names = {"ActiveState": "active", "SubState": "sub", "ActiveEnterTimestamp": "since"}
        answer = _command.run(["systemctl", "show", unit, "--property", ",".join(names)])
        said = dict(line.split("=", 1) for line in answer.out.splitlines() if "=" in line)
        return {"unit": unit, **{key: said.get(name) or None for name, key in names.items()}}

    def kernel(self, since: str) -> list[dict[str, Any]]:
        from ansible_collections.gb10.fleet.plugins.module_utils import _command, _failures
        from ansible_collections.gb10.fleet.plugins.module_utils._docker_log import epoch

        moment = epoch(since).split(".", 1)[0]
        answer = _command.run(
            ["journalctl", "--dmesg", "--no-pager", "--output", "short-unix", "--since", f"@{moment}"]
        )
        return _failures.kernel_lines(answer.out)

    def gpu(self) -> dict[str, Any]:
        from ansible_collections.gb10.fleet.plugins.module_utils import _nvidia_smi

        try:
            rows = _nvidia_smi.query_gpus(list(GPU_FIELDS.values()))
        except _nvidia_smi.NvidiaSmiError as exc:
            return {"error": str(exc), **dict.fromkeys(GPU_FIELDS)}
        row = rows[0] if rows else {}
        return {
            "error": None,
            **{name: _nvidia_smi.number_or_none(row.get(field, row.get(field.replace("clocks.sm", "clocks.current.sm"))))
               for name, field in GPU_FIELDS.items()},
        }  # fmt: skip

    def probe(self, wanted: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any] | None]:
        import threading

        from ansible_collections.gb10.fleet.plugins.module_utils import _openai_client

        try:
            key = _openai_client.read_key(wanted["api_key_file"])
        except OSError as exc:
            self.module.fail_json(msg=f"api_key_file {wanted['api_key_file']} cannot be read: {exc.strerror}.")
        seen: list[dict[str, Any]] = []
        watcher = threading.Thread(target=lambda: seen.append(self.gpu()), daemon=True)
        if self.params["gpu"]:
            watcher.start()
        names = ("url", "model", "prompt", "max_tokens", "timeout_s")
        answer = _openai_client.probe(key=key, **{name: wanted[name] for name in names})
        if self.params["gpu"]:
            watcher.join(GPU_TIMEOUT_S)
        return answer, seen[0] if seen else None


def main() -> None:
    probe = {
        "url": {"type": "str", "required": True},
        "model": {"type": "str", "required": True},
        "prompt": {"type": "str", "default": "Say: ready"},
        "max_tokens": {"type": "int", "default": 8, "no_log": False},
        "timeout_s": {"type": "float", "default": 30},
        "api_key_file": {"type": "path", "no_log": False},
    }
    module = AnsibleModule(
        argument_spec={
            "container": {"type": "str", "required": True},
            "expected_spec": {"type": "str"},
            "log": {"type": "bool", "default": False},
            "cursor": {"type": "dict"},
            "log_lines": {"type": "int", "default": 5},
            "wait_for": {"type": "list", "elements": "str", "choices": WAIT_FOR},
            "timeout_s": {"type": "float", "default": 20},
            "probe": {"type": "dict", "options": probe},
            "guard_unit": {"type": "str"},
            "gpu": {"type": "bool", "default": False},
            "kernel": {"type": "bool", "default": False},
            "activity": {"type": "bool", "default": False},
            "docker_socket": {"type": "path", "default": "/var/run/docker.sock"},
            "holds_dir": {"type": "path", "default": HOLDS},
        },
        supports_check_mode=True,
    )
    try:
        rank = RankInfo(module).run()
    except DockerError as exc:
        module.fail_json(msg=str(exc))
    module.exit_json(changed=False, rank=rank)


if __name__ == "__main__":
    main()
