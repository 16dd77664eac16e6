#!/usr/bin/python
# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: evidence_collect
short_description: Collect what a person needs to find out why a rank failed
version_added: "0.1.0"
description:
  - Packs the log and settings of the rank container, memory, kernel lines, GID tables, network, GPU, units, receipts and
    the difference to the rank spec of this node into one archive, and fetches it to the controller. B(Secrets are taken out
    before anything is written.)
  - Changes nothing on the node. What cannot be read is named in the archive and is no failure. What only root may read is
    read with C(sudo -n) where that works.
  - This is an action plugin around a module of the same name.
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
  spec:
    description: The rank spec that was asked for; its difference to the container is shown.
    type: dict
  stage_dir:
    description: Folder on the controller to fetch the archive into, as C(<inventory name>.tar.gz).
    type: str
    required: true
  units:
    description: systemd units to look at, besides C(gb10-*).
    type: list
    elements: str
    default: [docker.service, nvidia-persistenced.service]
  folders:
    description: Folders whose files (receipts, configuration, markers) are packed, up to 1 MiB each.
    type: list
    elements: path
    default: [/var/lib/gb10-fleet, /etc/gb10-fleet, /run/gb10-fleet]
  log_mib:
    description: How much of the engine's log to pack. A longer one keeps its first quarter and its end.
    type: int
    default: 16
  docker_socket:
    description: Socket of the Docker engine.
    type: path
    default: /var/run/docker.sock
"""

EXAMPLES = r"""
- name: Collect evidence
  gb10.fleet.evidence_collect:
    container: "{{ topology_spec.name }}"
    spec: "{{ topology_spec }}"
    stage_dir: /tmp/evidence-alpha
"""

RETURN = r"""
archive:
  description: The archive on the controller.
  returned: success
  type: str
  sample: /tmp/evidence-alpha/spark-02.tar.gz
evidence:
  description: The short form for the page on top - state, kernel, differences, missing, files.
  returned: success
  type: dict
"""

import io
import json
import os
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.gb10.fleet.plugins.module_utils import _command, _evidence, _failures, _node, _redact
from ansible_collections.gb10.fleet.plugins.module_utils._docker_api import (
    Docker,
    DockerError,
    DockerNotFound,
    messages,
)
from ansible_collections.gb10.fleet.plugins.module_utils._docker_log import DockerLog
from ansible_collections.gb10.fleet.plugins.module_utils._engine_log import telling

PROC = (
    *("meminfo", "buddyinfo", "vmstat", "loadavg", "swaps", "pressure/memory", "pressure/io", "pressure/cpu"),
    *("cmdline", "version", "driver/nvidia/version"),
)
FILES = ("/etc/os-release", "/etc/docker/daemon.json", "/etc/hosts")
# Name in the archive, command, whether it needs root.
COMMANDS: tuple[tuple[str, list[str], bool], ...] = (
    ("processes.txt", ["ps", "-eo", "pid,ppid,stat,etime,rss,args", "--sort=-rss"], False),
    ("listeners.txt", ["ss", "-ltnp"], True),
    ("network/addresses.txt", ["ip", "-details", "address"], False),
    ("network/routes.txt", ["ip", "route", "show", "table", "all"], False),
    ("network/rdma.txt", ["rdma", "link", "show"], False),
    ("gpu.txt", ["nvidia-smi", "-q"], False),
    ("units/failed.txt", ["systemctl", "--no-pager", "--failed"], False),
    ("units/gb10.txt", ["systemctl", "--no-pager", "--full", "status", "gb10-*"], False),
    ("kernel.log", ["journalctl", "--dmesg", "--no-pager", "--output", "short-iso", "--since", "-2h"], True),
    ("disk.txt", ["df", "-h"], False),
)
FILE_LIMIT = 1 << 20
TEXT_LIMIT = 8 << 20


def gid_tables(root: Path = Path("/sys/class/infiniband")) -> str:
    """Every GID entry that is not empty, with type and netdev: ``rocep1s0f0 1 3 0000:...:c0a8:0001 RoCE v2 enp1s0f0np0``."""
    lines = []
    for device in sorted(root.iterdir()) if root.is_dir() else []:
        for port in sorted((device / "ports").iterdir()):
            for gid in sorted((port / "gids").iterdir(), key=lambda p: int(p.name)):
                kind, netdev = port / "gid_attrs/types" / gid.name, port / "gid_attrs/ndevs" / gid.name
                value = _read(gid)
                if value.replace(":", "").strip("0"):
                    lines.append(f"{device.name} {port.name} {gid.name} {value} {_read(kind)} {_read(netdev)}")
    return "\n".join(lines) + "\n" if lines else "no RDMA device\n"


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError as exc:
        return f"({exc.strerror})"


def shortened(text: str, limit: int) -> str:
    """The first quarter and the end of a text that is too long, with a line that says so."""
    if len(text) <= limit:
        return text
    left_out = len(text) - limit
    return f"{text[: limit // 4]}\n[... {left_out} characters left out ...]\n{text[-(limit - limit // 4) :]}"


class Collector:
    """Everything of one node, in memory, without secrets; then one archive."""

    def __init__(self, params: dict[str, Any]) -> None:
        self.params = params
        self.docker = Docker(params["docker_socket"], 30.0)
        self.files: dict[str, str] = {}
        self.missing: list[str] = []
        self.known: set[str] = set()
        self.root = os.geteuid() == 0
        self.sudo = not self.root and _command.run(["sudo", "-n", "true"], 5.0).ok

    def run(self) -> dict[str, Any]:
        # The container first: it names the secrets that have to be taken out of all that follows.
        inspect = self.container()
        differences = []
        if self.params["spec"]:
            env = [f"{name}={value}" for name, value in self.params["spec"]["env"].items()]
            self.known |= set(_redact.secrets(env, [str(word) for word in self.params["spec"]["argv"]]))
            self.put("spec.json", json.dumps(self.params["spec"], indent=1))
            differences = (
                _evidence.spec_difference(self.params["spec"], inspect) if inspect else ["there is no container"]
            )
            self.put("spec-difference.txt", "\n".join(differences) + "\n")
        for name in PROC:
            self.file(f"proc/{name.replace('/', '-')}", Path("/proc") / name)
        for name in FILES:
            self.file(f"files/{Path(name).name}", Path(name))
        for folder in self.params["folders"]:
            self.folder(Path(folder))
        self.put("network/gids.txt", gid_tables())
        for name, argv, root in COMMANDS:
            self.command(name, argv, root)
        for unit in self.params["units"]:
            self.command(f"units/{unit}.txt", ["systemctl", "--no-pager", "--full", "status", unit], False)
        return {
            "state": self.state(inspect),
            "kernel": self.kernel(),
            "differences": differences,
            "missing": self.missing,
            "files": sorted(self.files),
        }

    def put(self, name: str, text: str) -> None:
        self.files[name] = _redact.log(shortened(text, TEXT_LIMIT), self.known)

    def file(self, name: str, path: Path) -> None:
        try:
            self.put(name, path.read_text(encoding="utf-8", errors="replace"))
        except FileNotFoundError:
            return
        except OSError as exc:
            self.missing.append(f"{path} ({exc.strerror})")

    def folder(self, folder: Path) -> None:
        for path in sorted(folder.rglob("*")) if folder.is_dir() else []:
            try:
                if (
                    path.is_file()
                    and not path.is_symlink()
                    and path.stat().st_size <= FILE_LIMIT
                    and "evidence" not in path.parts
                ):
                    self.file(f"files{path}", path)
            except OSError as exc:
                self.missing.append(f"{path} ({exc.strerror})")

    def command(self, name: str, argv: list[str], root: bool) -> None:
        answer = _command.run([*(["sudo", "-n"] if root and self.sudo else []), *argv], 15.0)
        if answer.missing:
            self.missing.append(f"{argv[0]} is not installed")
            return
        if answer.timed_out:
            self.missing.append(f"`{' '.join(argv)}` gave no answer within 15 s")
        self.put(name, answer.out + (f"\n{answer.err}" if answer.err.strip() else ""))

    # --- the container --------------------------------------------------------------------------------------------------
    def container(self) -> dict[str, Any] | None:
        try:
            inspect = dict(self.docker.get(f"/containers/{self.params['container']}/json"))
        except DockerNotFound:
            self.missing.append(f"there is no container {self.params['container']}")
            return None
        except DockerError as exc:
            self.missing.append(str(exc))
            return None
        clean, known = _redact.inspect(inspect)
        self.known |= known
        self.put("inspect.json", json.dumps(clean, indent=1))
        try:
            stream = self.docker.stream(
                f"/containers/{inspect['Id']}/logs", {"stdout": "1", "stderr": "1", "timestamps": "1"}
            )
            self.files["engine.log"] = self.log(messages(stream, bool(inspect["Config"].get("Tty"))))
        except DockerError as exc:
            self.missing.append(f"the log of the container: {exc}")
        return inspect

    def log(self, pieces: Any) -> str:
        """The log, bounded while it is read: a log of gigabytes must not fill a node that is short of memory."""
        limit = self.params["log_mib"] << 20
        head: list[bytes] = []
        tail: list[bytes] = []
        size = left_out = kept = 0
        for piece in pieces:
            if size < limit // 4:
                head.append(piece)
                size += len(piece)
                continue
            tail.append(piece)
            kept += len(piece)
            while kept > limit - limit // 4:
                gone = tail.pop(0)
                kept -= len(gone)
                left_out += len(gone)
        note = [f"[... {left_out} bytes left out ...]\n".encode()] if left_out else []
        return _redact.log(b"".join([*head, *note, *tail]).decode("utf-8", "replace"), self.known)

    def state(self, inspect: dict[str, Any] | None) -> dict[str, Any]:
        memory = {"free_kib": _node.meminfo(self.files.get("proc/meminfo", "")).get("MemFree")}
        if inspect is None:
            return {"status": "absent", "memory": memory}
        state = inspect["State"]
        out: dict[str, Any] = {
            "status": state.get("Status"),
            "exit_code": None if state.get("Running") else state.get("ExitCode"),
            "restart_count": inspect.get("RestartCount", 0),
            "started_at": state.get("StartedAt"),
            "finished_at": state.get("FinishedAt"),
            "error": state.get("Error") or None,
            "oom_killed": bool(state.get("OOMKilled")),
            "memory": memory,
        }
        try:
            read = DockerLog(self.docker, inspect).read()
        except DockerError:
            return out
        last = [_redact.text(line, self.known) for line in read["last"] if telling(line)]
        error = read["first_error"] or {}
        first = {"time": error["time"], "line": _redact.text(error["line"], self.known)} if error else None
        out.update(stage=read["stage"], first_error=first, last_lines=last)
        return out

    def kernel(self) -> list[dict[str, Any]]:
        return _failures.kernel_lines(self.files.get("kernel.log", ""))

    def pack(self, path: str) -> None:
        """Write the archive: temporary file, fsync, rename."""
        buffer = io.BytesIO()
        self.put("missing.txt", "\n".join(self.missing) + "\n")
        with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=6) as archive:
            for name, text in sorted(self.files.items()):
                data = text.encode("utf-8", "replace")
                entry = tarfile.TarInfo(name.lstrip("/"))
                entry.size, entry.mtime, entry.mode = len(data), int(time.time()), 0o644
                archive.addfile(entry, io.BytesIO(data))
        temporary = Path(f"{path}.tmp")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(buffer.getvalue())
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "container": {"type": "str", "required": True},
            "spec": {"type": "dict"},
            "stage_dir": {"type": "str", "required": True},
            "units": {"type": "list", "elements": "str", "default": ["docker.service", "nvidia-persistenced.service"]},
            "folders": {
                "type": "list",
                "elements": "path",
                "default": ["/var/lib/gb10-fleet", "/etc/gb10-fleet", "/run/gb10-fleet"],
            },
            "log_mib": {"type": "int", "default": 16},
            "docker_socket": {"type": "path", "default": "/var/run/docker.sock"},
        },
        supports_check_mode=True,
    )
    collector = Collector(module.params)
    evidence = collector.run()
    # Not in module.tmpdir, which is gone before the archive can be fetched; the action removes it afterwards.
    folder = tempfile.mkdtemp(prefix="gb10-evidence-")
    path = str(Path(folder) / "evidence.tar.gz")
    collector.pack(path)
    module.exit_json(changed=False, path=path, folder=folder, evidence=evidence)


if __name__ == "__main__":
    main()
