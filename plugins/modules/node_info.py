#!/usr/bin/python
# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

DOCUMENTATION = r"""
module: node_info
short_description: Read what a launch needs to know of a node
version_added: "0.1.0"
description:
  - One call reads identity (GPU, driver, kernel, operating system), memory both ways, the largest holders of memory, the Docker
    daemon as this very session reaches it, GPU runtime and CDI specifications, file systems, ports and their owners, name
    resolution, clock, C(sudo), foreign GPU processes and orphaned engine processes.
  - Every external command ends. An C(nvidia-smi) that does not answer is a verdict of its own (the driver is wedged), not a
    missing GPU.
  - Run it without become - whether Docker answers and whether C(sudo) asks for a password is a question about the session.
author:
  - The gb10.fleet maintainers (@gb10-fleet)
extends_documentation_fragment:
  - gb10.fleet.attributes
  - gb10.fleet.attributes.read_only
options:
  cluster:
    description: Name of the cluster. Containers with its label are its own ranks.
    type: str
  ports:
    description: TCP ports that this rank will listen on.
    type: list
    elements: int
    default: []
  image:
    description: Reference of the image, to know whether it is there and which one it is.
    type: str
  folders:
    description: Folders that will be written to.
    type: list
    elements: dict
    default: []
    suboptions:
      what:
        description: What is written there, for messages.
        type: str
        required: true
      path:
        description: The folder. It need not exist yet.
        type: path
        required: true
      size_gib:
        description: Size of the whole; what is there already is subtracted.
        type: float
        default: 0.0
  image_size_gib:
    description: Size of the image. Counted against the file system of Docker's own folder where the image is missing.
    type: float
    default: 0.0
  controller_time_s:
    description: Seconds since the epoch on the controller when the task was sent.
    type: float
  nvidia_smi_timeout_s:
    description: How long nvidia-smi may take.
    type: float
    default: 10.0
  root:
    description: Root of the C(/sys), C(/proc) and C(/etc) trees to read. For tests and for captured trees.
    type: path
    default: /
"""

EXAMPLES = r"""
- name: Read this node
  gb10.fleet.node_info:
    ports: [8000, 29521]
    folders:
      - what: checkpoint
        path: /var/tmp/models/GLM-5.3-Flash-NVFP4-redhat
        size_gib: 172.3
    controller_time_s: "{{ now(utc=true).timestamp() }}"
  register: node
"""

RETURN = r"""
node:
  description: What the node says.
  returned: success
  type: dict
  contains:
    identity:
      description: C(hostname), C(kernel), C(architecture), C(os), C(product), C(vendor), C(python), C(has_requests).
      type: dict
    gpu:
      description:
        - C(verdict) (ok, absent, wedged, failed), C(error), C(gpus) (C(name), C(driver), C(memory_total_mib), C(memory_used_mib),
          C(temperature_celsius), C(power_w), C(utilization_percent); null where the driver does not say) and C(processes).
      type: dict
    memory:
      description: Fields of C(/proc/meminfo) in KiB, and C(min_free_kib).
      type: dict
    holders:
      description: The largest holders of memory, with C(pid), C(name) and C(kib).
      type: list
      elements: dict
    docker:
      description:
        - C(state) (ok, absent, stopped, denied, timeout, refused), C(error), C(version), C(root), C(runtimes), C(hook) (that of
          NVIDIA's toolkit, and C(hook_is_newer) than the daemon), C(cdi), C(mode), C(containers) of any cluster of this collection,
          C(image).
      type: dict
    session:
      description: C(user), C(groups) of this session, C(docker_group) members, C(sudo) without a password.
      type: dict
    folders:
      description: Needs by folder with C(device), C(mount), C(free_kib) and C(need_kib).
      type: list
      elements: dict
    ports:
      description: Asked-for ports that somebody listens on, with C(name), C(pid), C(container) and C(cluster).
      type: list
      elements: dict
    names:
      description: C(hostname) and the C(addresses) that it resolves to.
      type: dict
    clock_offset_s:
      description: This node's clock less the controller's, null when that was not given.
      type: float
    orphans:
      description: Engine processes that belong to no running container.
      type: list
      elements: dict
    pcie_faults:
      description: Kernel lines since boot of a fatal PCIe error of the CX7. Empty where the kernel log may not be read.
      type: list
      elements: str
"""

import contextlib
import getpass
import grp
import importlib.util
import json
import os
import platform
import time
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.gb10.fleet.plugins.module_utils import _meminfo, _node, _nvidia_smi
from ansible_collections.gb10.fleet.plugins.module_utils._command import environment, find, run
from ansible_collections.gb10.fleet.plugins.module_utils._docker_api import DEFAULT_SOCKET, Docker, DockerError
from ansible_collections.gb10.fleet.plugins.module_utils._rank_spec import LABEL_CLUSTER, LABEL_RANK
from ansible_collections.gb10.fleet.plugins.module_utils._sysfs import Privilege, Tree

IFNAMES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "MN_IF_NAME")


class NodeReader:
    """Reads one node. ``read()`` returns the module's ``node`` value."""

    def __init__(self, params: dict[str, Any]) -> None:
        self.params = params
        self.tree = Tree(params["root"])
        self.privilege = Privilege()
        self.engine = Docker(os.environ.get("DOCKER_HOST") or DEFAULT_SOCKET)

    def read(self) -> dict[str, Any]:
        received = time.time()
        sent = self.params["controller_time_s"]
        docker = self.docker()
        gpu = self.gpu()
        processes = self.processes()
        return {
            "identity": self.identity(),
            "gpu": gpu,
            "memory": self.memory(),
            "holders": _node.top_users(processes, gpu["processes"]),
            "docker": docker,
            "session": self.session(),
            "folders": self.folders(docker),
            "ports": self.ports(docker),
            "names": self.names(),
            "clock_offset_s": None if sent is None else round(received - sent, 3),
            "orphans": self.orphans(processes, docker),
            "pcie_faults": _node.pcie_faults(self.privilege.run(["dmesg"], 5).out)[:20],
        }

    def identity(self) -> dict[str, Any]:
        release = _node.os_release(self.tree.text("etc/os-release") or "")
        dgx = _node.os_release(self.tree.text("etc/dgx-release") or "")
        return {
            "hostname": self.tree.text("proc/sys/kernel/hostname") or platform.node(),
            "kernel": self.tree.text("proc/sys/kernel/osrelease") or platform.release(),
            "architecture": platform.machine(),
            "os": release.get("pretty_name"),
            "dgx_os": dgx.get("dgx_ota_version") or dgx.get("dgx_swbuild_version"),
            "product": self.tree.text("sys/class/dmi/id/product_name"),
            "vendor": self.tree.text("sys/class/dmi/id/sys_vendor"),
            "python": platform.python_version(),
            "has_requests": importlib.util.find_spec("requests") is not None,
        }

    # --- GPU and memory ---

    def gpu(self) -> dict[str, Any]:
        result: dict[str, Any] = {"verdict": "ok", "error": None, "gpus": [], "processes": []}
        os.environ["PATH"] = environment()["PATH"]
        try:
            gpus = _nvidia_smi.snapshot(timeout_s=self.params["nvidia_smi_timeout_s"])
        except _nvidia_smi.NvidiaSmiAbsent as error:
            return {**result, "verdict": "absent", "error": str(error)}
        except _nvidia_smi.NvidiaSmiTimeout as error:
            return {**result, "verdict": "wedged", "error": str(error)}
        except _nvidia_smi.NvidiaSmiError as error:
            return {**result, "verdict": "failed", "error": str(error)}
        for gpu in gpus:
            result["gpus"].append(
                {
                    "name": gpu.name,
                    "bus_id": gpu.bus_id,
                    "driver": gpu.driver_version,
                    "memory_total_mib": gpu.memory_total_mib,
                    "memory_used_mib": gpu.memory_used_mib,
                    "temperature_celsius": gpu.temperature_celsius,
                    "power_w": gpu.power_w,
                    "utilization_percent": gpu.utilization_percent,
                }
            )
            for process in gpu.processes:
                result["processes"].append(
                    {
                        "pid": process.pid,
                        "name": process.name,
                        "kind": process.kind,
                        "used_mib": process.used_mib,
                        "container": self.container_of(process.pid),
                    }
                )
        return result

    def memory(self) -> dict[str, Any]:
        fields: dict[str, Any] = dict(_node.meminfo(self.tree.text("proc/meminfo") or ""))
        fields["min_free_kib"] = self.tree.number("proc/sys/vm/min_free_kbytes")
        return fields

    def processes(self) -> list[dict[str, Any]]:
        found = []
        for name in self.tree.names("proc"):
            status = self.tree.text("proc", name, "status") if name.isdigit() else None
            own = _meminfo.own_kib(status) if status else None
            if own and own[1]:
                found.append({"pid": int(name), "name": own[0], "rss_kib": own[1]})
        return found

    def container_of(self, pid: int) -> str | None:
        return _node.container_of(self.tree.text("proc", str(pid), "cgroup") or "")

    def orphans(self, processes: list[dict[str, Any]], docker: dict[str, Any]) -> list[dict[str, Any]]:
        """Engine processes outside of any running container: they hold memory that no stop gives back."""
        found = []
        for process in processes:
            words = (self.tree.text("proc", str(process["pid"]), "cmdline") or "").replace("\0", " ").strip()
            if not (_node.ENGINE.search(process["name"]) or _node.ENGINE.search(words[:200])):
                continue
            container = self.container_of(process["pid"])
            if container is None or (docker["state"] == "ok" and container not in docker["running"]):
                found.append({**process, "command": words[:120]})
        return found

    # --- Docker ---

    def docker(self) -> dict[str, Any]:
        result: dict[str, Any] = {
            **{"state": "ok", "error": None, "version": None, "root": None, "runtimes": [], "mode": None},
            **{"containers": [], "running": [], "image": None, "cdi": [], "command": find("docker") is not None},
            **self.hook(),
        }
        result["cdi"] = self.cdi()
        config = self.tree.text("etc/nvidia-container-runtime/config.toml") or ""
        result["mode"] = "cdi" if 'mode = "cdi"' in config else None
        try:
            info = self.engine.get("/info")
            result["version"] = info.get("ServerVersion")
            result["root"] = info.get("DockerRootDir")
            result["runtimes"] = sorted(info.get("Runtimes") or {})
            containers = self.engine.get("/containers/json", {"all": "1"})
        except DockerError as error:
            return {**result, "state": refusal(error), "error": str(error)}
        for item in containers:
            labels = item.get("Labels") or {}
            if item.get("State") == "running":
                result["running"].append(item["Id"][:12])
            if LABEL_CLUSTER in labels:
                result["containers"].append(
                    {
                        "id": item["Id"][:12],
                        "name": (item.get("Names") or ["?"])[0].lstrip("/"),
                        "cluster": labels[LABEL_CLUSTER],
                        "rank": labels.get(LABEL_RANK),
                        "state": item.get("State"),
                    }
                )
        result["image"] = self.image()
        return result

    def hook(self) -> dict[str, bool]:
        """dockerd looks for the toolkit's hook when it starts: one that came later is not seen until a restart."""
        path = find("nvidia-container-runtime-hook")
        result = {"hook": path is not None, "hook_is_newer": False}
        if path is not None:
            with contextlib.suppress(OSError):
                started = self.tree.path("run/docker.pid").stat().st_mtime
                result["hook_is_newer"] = Path(path).resolve().stat().st_ctime > started + 1
        return result

    def image(self) -> dict[str, Any] | None:
        if not self.params["image"]:
            return None
        try:
            found = self.engine.get(f"/images/{self.params['image']}/json")
        except DockerError:
            return None
        env = (found.get("Config") or {}).get("Env") or []
        return {
            "id": found.get("Id"),
            "architecture": found.get("Architecture"),
            "interface_names": [item for item in env if item.partition("=")[0] in IFNAMES],
        }

    def cdi(self) -> list[dict[str, Any]]:
        found = []
        for folder in ("etc/cdi", "var/run/cdi"):
            for name in self.tree.names(folder):
                text = self.tree.text(folder, name) or ""
                if "nvidia.com" in text:
                    found.append({"path": f"/{folder}/{name}", "driver": _node.driver_of_cdi(text)})
        return found

    # --- session, disk, ports, names ---

    def session(self) -> dict[str, Any]:
        names = []
        for gid in {*os.getgroups(), os.getegid()}:
            try:
                names.append(grp.getgrgid(gid).gr_name)
            except KeyError:
                continue
        try:
            user = getpass.getuser()
        except (KeyError, OSError):
            user = str(os.getuid())
        return {
            "user": user,
            "root": self.privilege.is_root,
            "groups": sorted(names),
            "docker_group": _node.group_members(run(["getent", "group", "docker"], 5).out),
            "sudo": self.privilege.passwordless,
        }

    def folders(self, docker: dict[str, Any]) -> list[dict[str, Any]]:
        needs = []
        if docker["root"]:
            size = 0.0 if docker["image"] else self.params["image_size_gib"]
            needs.append(self.need("image", Path(docker["root"]), _node.missing_kib(size, 0)))
        for folder in self.params["folders"]:
            path = Path(folder["path"])
            needs.append(self.need(folder["what"], path, _node.missing_kib(folder["size_gib"], _present(path))))
        return needs

    @staticmethod
    def need(what: str, path: Path, need_kib: float) -> dict[str, Any]:
        there = path
        while not os.access(there, os.F_OK) and there != there.parent:
            there = there.parent
        system = os.statvfs(there)
        device = there.stat().st_dev
        mount = there
        while mount != mount.parent and mount.parent.stat().st_dev == device:
            mount = mount.parent
        free = system.f_bavail * system.f_frsize // 1024
        return {
            **{"what": what, "path": str(path), "device": device, "mount": str(mount)},
            **{"free_kib": free, "need_kib": need_kib, "inodes_free": system.f_favail},
        }

    def ports(self, docker: dict[str, Any]) -> list[dict[str, Any]]:
        tables = [self.tree.text("proc/net", name) or "" for name in ("tcp", "tcp6")]
        taken = {entry["port"]: entry for table in tables for entry in _node.listeners(table)}
        wanted = [port for port in self.params["ports"] if port in taken]
        if not wanted:
            return []
        owners = _node.socket_owners(self.privilege.run(["ss", "-Hltnp"], 5).out)
        clusters = {container["id"]: container["cluster"] for container in docker["containers"]}
        found = []
        for port in wanted:
            owner = owners.get(port) or {"name": None, "pid": None}
            container = self.container_of(owner["pid"]) if owner["pid"] else None
            found.append({"port": port, **owner, "container": container, "cluster": clusters.get(container or "")})
        return found

    def names(self) -> dict[str, Any]:
        hostname = self.tree.text("proc/sys/kernel/hostname") or platform.node()
        return {"hostname": hostname, "addresses": _node.ahosts(run(["getent", "ahosts", hostname], 3).out)}


def refusal(error: DockerError) -> str:
    """Why the engine did not answer; the kernel's own word tells a missing daemon from a missing permission."""
    causes = (FileNotFoundError, "absent"), (PermissionError, "denied"), (TimeoutError, "timeout"), (OSError, "stopped")
    return next((word for cause, word in causes if isinstance(error.__cause__, cause)), "refused")


def _present(path: Path) -> int:
    """Bytes below a folder; links (hub layout) count once, as the file that they point to lies below as well."""
    total = 0
    for folder, _folders, files in os.walk(path):
        for name in files:
            try:
                total += os.lstat(os.path.join(folder, name)).st_size  # noqa: PTH118 - a hub cache has thousands
            except OSError:
                continue
    return total


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "cluster": {"type": "str"},
            "ports": {"type": "list", "elements": "int", "default": []},
            "image": {"type": "str"},
            "folders": {
                "type": "list",
                "elements": "dict",
                "default": [],
                "options": {
                    "what": {"type": "str", "required": True},
                    "path": {"type": "path", "required": True},
                    "size_gib": {"type": "float", "default": 0.0},
                },
            },
            "image_size_gib": {"type": "float", "default": 0.0},
            "controller_time_s": {"type": "float"},
            "nvidia_smi_timeout_s": {"type": "float", "default": 10.0},
            "root": {"type": "path", "default": "/"},
        },
        supports_check_mode=True,
    )
    try:
        node = NodeReader(module.params).read()
    except OSError as error:
        module.fail_json(msg=f"This node cannot be read: {error}")
    module.exit_json(changed=False, node=json.loads(json.dumps(node)))


if __name__ == "__main__":
    main()
