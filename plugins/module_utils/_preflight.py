# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Can these nodes carry the ranks of a cluster? Pure functions over what ``node_info`` read on each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ansible_collections.gb10.fleet.plugins.module_utils import _meminfo, _node
from ansible_collections.gb10.fleet.plugins.module_utils._findings import ERROR, NOTE, WARNING, Finding

# The kernel's own reserve on a 121.7 GiB node is 45-256 MiB; above this somebody raised it.
RESERVE_KIB = 512 * 1024


@dataclass(frozen=True)
class Wanted:
    """What a launch wants of its nodes; from the recipe, with the role's defaults where there is none."""

    cluster: str | None = None
    gpus: bool = True
    gb10: bool = True
    image: str | None = None
    utilization: float | None = None
    safe_utilization: float | None = None
    free_gib: float | None = None
    rdma: bool = False
    ranks: int = 1
    env: Mapping[str, str] = field(default_factory=dict)
    disk_margin_gib: float = 5.0
    clock_s: float = 30.0
    become: tuple[str, ...] = ()


@dataclass(frozen=True)
class Node:
    """One node: its report, or None when it gave none; its ports and what their use is; its fabric environment."""

    name: str
    info: Mapping[str, Any] | None
    ports: Mapping[int, str] = field(default_factory=dict)
    address: str | None = None
    fabric_env: Mapping[str, str] = field(default_factory=dict)
    interfaces: tuple[str, ...] | None = None

    def found(self, severity: str, code: str, text: str) -> Finding:
        return Finding(severity, code, self.name, f"{self.name}: {text}")

    def error(self, code: str, text: str) -> Finding:
        return self.found(ERROR, code, text)

    def warning(self, code: str, text: str) -> Finding:
        return self.found(WARNING, code, text)

    def note(self, code: str, text: str) -> Finding:
        return self.found(NOTE, code, text)


def judge(nodes: Sequence[Node], wanted: Wanted) -> list[Finding]:
    """All findings of all nodes, then those that only the comparison shows."""
    findings: list[Finding] = []
    for node in nodes:
        if node.info is None:
            findings.append(
                Finding(
                    ERROR,
                    "no-report",
                    node.name,
                    f"{node.name} gave no report: it is unreachable over SSH, or an earlier step failed there. Put "
                    "it right and run again.",
                )
            )
            continue
        for check in CHECKS:
            findings += check(node, node.info, wanted)
    findings += compare(nodes, wanted)
    return findings


Found = Iterable[Finding]


# --- GPU and driver -------------------------------------------------------------------------------------------------


def check_gpu(node: Node, info: Mapping[str, Any], wanted: Wanted) -> Found:
    gpu, identity = info["gpu"], info["identity"]
    if gpu["verdict"] == "wedged":
        yield node.error("pre-nvsmi-hang", f"{str(gpu['error']).rstrip('.')}. Nothing is launched on it.")
    elif gpu["verdict"] != "ok" and wanted.gpus:
        yield node.error("no-gpu", f"{str(gpu['error']).rstrip('.')}.")
    elif not gpu["gpus"] and wanted.gpus:
        yield node.error("no-gpu", "nvidia-smi lists no GPU. Look at `dmesg | grep -i nvrm`.")
    for item in gpu["gpus"]:
        if wanted.gb10 and "GB10" not in str(item["name"]):
            yield node.warning(
                "not-a-gb10",
                f"its GPU is {item['name']} (driver {item['driver']}) in a {identity['product'] or 'machine'}, not a "
                "GB10. The recipes' figures were measured on GB10 nodes; check memory and architecture yourself.",
            )


def check_foreign(node: Node, info: Mapping[str, Any], wanted: Wanted) -> Found:
    """Compute processes of somebody else, and engine processes that no container owns."""
    own = own_containers(info, wanted)
    foreign = [p for p in info["gpu"]["processes"] if p["kind"] == "C" and p["container"] not in own]
    if foreign:
        shown = ", ".join(
            f"{p['name'].rsplit('/', 1)[-1]} (pid {p['pid']}"
            + (f", {p['used_mib'] / 1024:.1f} GiB" if p["used_mib"] is not None else "")
            + ")"
            for p in foreign
        )
        yield node.warning(
            "foreign-gpu-process",
            f"{len(foreign)} foreign {'process' if len(foreign) == 1 else 'processes'} on the GPU: {shown}. A serve "
            "takes the whole node: stop them.",
        )
    for process in info["orphans"]:
        yield node.warning(
            "orphan",
            f"engine process {process['name']} (pid {process['pid']}, {_node.gib(process['rss_kib']):.1f} GiB) "
            "belongs to no running container. Stop it: its memory comes back only then.",
        )


def check_pcie(node: Node, info: Mapping[str, Any], wanted: Wanted) -> Found:
    faults = info["pcie_faults"]
    if faults:
        yield node.error(
            "net-cx7-aer",
            f"the kernel reports a fatal PCIe error of the CX7 since boot ({len(faults)} lines, first "
            f"`{faults[0]}`): its functions are lost, and restarting the engine does not bring them back. Reboot "
            "this node; if it comes again, cap the GPU clock.",
        )


# --- memory ---------------------------------------------------------------------------------------------------------


def own_containers(info: Mapping[str, Any], wanted: Wanted) -> set[str]:
    """Running containers of this very cluster: a launch stops them first."""
    return {c["id"] for c in info["docker"]["containers"] if c["cluster"] == wanted.cluster and c["state"] == "running"}


def pool(info: Mapping[str, Any]) -> tuple[float, float, float]:
    """(total, available, free) GiB of what a rank allocates from: unified memory, or a GPU's own."""
    memory = info["memory"]
    gpus = info["gpu"]["gpus"]
    if gpus and gpus[0]["memory_total_mib"] is not None:
        total = gpus[0]["memory_total_mib"] / 1024
        free = total - (gpus[0]["memory_used_mib"] or 0) / 1024
        return total, free, free
    return tuple((memory.get(name) or 0) / _node.GIB_KIB for name in ("MemTotal", "MemAvailable", "MemFree"))  # type: ignore[return-value]


def largest_utilization(info: Mapping[str, Any]) -> float:
    """Largest gpu-memory-utilization that vLLM's start-up check lets pass here: MemAvailable / total, rounded down."""
    total, available, _free = pool(info)
    return _meminfo.largest_utilization(round(total * _node.GIB_KIB), round(available * _node.GIB_KIB), 0.0)


def check_memory(node: Node, info: Mapping[str, Any], wanted: Wanted) -> Found:
    """Both ways: vLLM's check reads MemAvailable, CUDA sees MemFree. Never from nvidia-smi on a GB10."""
    memory = info["memory"]
    if not memory.get("MemTotal"):
        yield node.error("no-meminfo", "/proc/meminfo cannot be read.")
        return
    total, available, free = pool(info)
    reserve = (memory.get("min_free_kib") or 0) / _node.GIB_KIB
    raised = (memory.get("min_free_kib") or 0) > RESERVE_KIB
    if raised:
        # 4 GiB cost 6.2 GiB of MemAvailable and the check failed, 98.9 < 102.2 GiB (case tune-minfree-trap).
        yield node.warning(
            "tune-minfree-trap",
            f"vm.min_free_kbytes is raised to {reserve:.1f} GiB, which takes about {reserve * 1.55:.1f} GiB from the "
            "memory that vLLM's start-up check sees. Leave the kernel's own value: remove it from /etc/sysctl.d and "
            "reboot.",
        )
    need, why = needed(wanted, total)
    if need is None:
        return
    if own_containers(info, wanted):
        yield node.note(
            "memory-later",
            "a rank of this cluster runs here and holds its memory; memory is checked again when it is stopped.",
        )
        return
    usable = free - (reserve if raised else 0)
    if available < need:
        held = ", ".join(_meminfo.holders(memory, info["holders"]))
        lower = (
            f"Lower gpu-memory-utilization to {largest_utilization(info):.2f}, or free memory"
            if wanted.utilization
            else "Free memory"
        )
        yield node.error(
            "launch-util-too-high", f"{available:.1f} GiB free, {why} wanted. {lower}{': ' + held if held else ''}."
        )
    elif usable < need:
        yield node.note(
            "pre-uma-two-numbers",
            f"{available:.1f} GiB available, but CUDA sees only {usable:.1f} GiB free until the page cache "
            f"({(memory.get('Cached') or 0) / _node.GIB_KIB:.1f} GiB) is evicted; {why} wanted. The launch does "
            "that.",
        )
    if wanted.utilization and wanted.safe_utilization and wanted.utilization > wanted.safe_utilization:
        yield node.warning(
            "launch-util-too-high",
            f"gpu-memory-utilization {wanted.utilization:g} is above {wanted.safe_utilization:g}, the largest that "
            "this recipe is known to survive.",
        )


def needed(wanted: Wanted, total: float) -> tuple[float | None, str]:
    """(GiB, in words) that must be available before a start; None when the recipe states nothing."""
    if wanted.utilization:
        need = wanted.utilization * total
        return need, f"{wanted.utilization:g} × {total:.1f} GiB = {need:.1f} GiB"
    if wanted.free_gib:
        return wanted.free_gib, f"{wanted.free_gib:.1f} GiB"
    return None, ""


def check_kho(node: Node, info: Mapping[str, Any], wanted: Wanted) -> Found:
    memory = info["memory"]
    if _node.kho_reserve(memory):
        yield node.found(
            ERROR if wanted.rdma and wanted.ranks > 1 else WARNING,
            "pre-kernel-kho",
            f"kernel {info['identity']['kernel']} keeps a Kexec HandOver reserve (CmaFree "
            f"{memory['CmaFree'] / 1024:.0f} MiB > CmaTotal {memory.get('CmaTotal', 0) / 1024:.0f} MiB): RDMA "
            "registration fails with `Cannot allocate memory` although memlock is unlimited. Boot with kho=off, or "
            "an older kernel; memlock is not to blame.",
        )


# --- Docker ---------------------------------------------------------------------------------------------------------


def check_docker(node: Node, info: Mapping[str, Any], wanted: Wanted) -> Found:
    docker, session = info["docker"], info["session"]
    state = docker["state"]
    if state == "denied":
        yield node.error("pre-docker-sock", docker_denied(session))
    elif state == "absent" and not docker["command"]:
        yield node.error("no-docker", "Docker is not installed. Install docker-ce or docker.io.")
    elif state != "ok":
        yield node.error("no-docker", str(docker["error"]))
    else:
        yield from _runtime(node, info, wanted)
        for item in (docker["image"] or {}).get("interface_names") or []:
            yield node.note(
                "net-ifname-baked",
                f"the image bakes {item} in; the rank's own value replaces it, since all four interface variables "
                "are set.",
            )
    if not info["identity"]["has_requests"]:
        yield node.error(
            "no-requests",
            f"Python {info['identity']['python']} has no requests module, which community.docker needs. Run `apt-get "
            "install python3-requests`.",
        )


def docker_denied(session: Mapping[str, Any]) -> str:
    """Not in the group, or in it but not in this session: two different things to do."""
    user = session["user"]
    if "docker" in session["groups"]:
        return (
            f"user {user} is in the group docker of this session, yet may not open the Docker socket. Look at `ls -l "
            "/var/run/docker.sock`."
        )
    if user in session["docker_group"]:
        return (
            f"user {user} was added to the group docker, but this session is older than that. End it: `ssh -O exit` "
            "to the host (ControlPersist keeps it), or run `meta: reset_connection`."
        )
    return (
        f"permission denied on the Docker socket: user {user} is not in the group docker. Run `sudo usermod -aG "
        f"docker {user}`, then log in again."
    )


def _runtime(node: Node, info: Mapping[str, Any], wanted: Wanted) -> Found:
    """`--gpus` needs the toolkit's hook on dockerd's PATH when the daemon starts, or a CDI specification of this driver.
    The runtime named nvidia alone is not enough."""
    docker = info["docker"]
    if not wanted.gpus:
        return
    if "/snap/" in str(docker["root"]):
        yield node.error(
            "pre-docker-runtime",
            f"Docker is the snap ({docker['root']}), which cannot use NVIDIA's runtime. Run `snap remove docker` and "
            "install docker-ce.",
        )
        return
    drivers = [gpu["driver"] for gpu in info["gpu"]["gpus"] if gpu["driver"]]
    if docker["mode"] == "cdi" and not docker["cdi"]:
        yield node.error(
            "pre-cdi",
            "the NVIDIA runtime is in CDI mode, but no specification lies in /etc/cdi or /var/run/cdi "
            "(`unresolvable CDI devices`). Run `nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml`.",
        )
    elif not docker["hook"] and not docker["cdi"]:
        yield node.error(
            "pre-docker-runtime",
            f"Docker has no NVIDIA runtime hook (runtimes: {', '.join(docker['runtimes']) or 'none'}); a start would "
            "end in `could not select device driver`. Install nvidia-container-toolkit, run `nvidia-ctk runtime "
            "configure --runtime=docker` and restart Docker.",
        )
    elif docker["hook_is_newer"]:
        yield node.warning(
            "pre-docker-runtime",
            "NVIDIA's container toolkit was installed after the Docker daemon started, which may not see it yet. "
            "Run `systemctl restart docker`.",
        )
    for spec in docker["cdi"]:
        if spec["driver"] and drivers and spec["driver"] not in drivers:
            yield node.found(
                ERROR if docker["mode"] == "cdi" else WARNING,
                "pre-cdi",
                f"{spec['path']} was written for driver {spec['driver']}, the driver is {drivers[0]}. Run "
                f"`nvidia-ctk cdi generate --output={spec['path']}`.",
            )


# --- disk, ports, names, clock, session -----------------------------------------------------------------------------


def check_disk(node: Node, info: Mapping[str, Any], wanted: Wanted) -> Found:
    for system in _node.per_file_system(info["folders"]):
        need = system["need_kib"] / _node.GIB_KIB
        free = system["free_kib"] / _node.GIB_KIB
        if need and free < need + wanted.disk_margin_gib:
            yield node.error(
                "disk",
                f"{free:.1f} GiB free on {system['mount']}, {need + wanted.disk_margin_gib:.1f} GiB wanted "
                f"({' + '.join(system['parts'])} + {wanted.disk_margin_gib:.1f} GiB margin). Free space, or point "
                "models_dir elsewhere.",
            )


def check_ports(node: Node, info: Mapping[str, Any], wanted: Wanted) -> Found:
    for taken in info["ports"]:
        own = taken["cluster"] is not None and taken["cluster"] == wanted.cluster
        # Without root the owner is unknown; our own rank that runs here is then the likely one.
        if own or (taken["pid"] is None and own_containers(info, wanted)):
            continue
        if taken["cluster"]:
            who, what = f"a rank of cluster {taken['cluster']}", "Stop that cluster first"
        elif taken["pid"]:
            who, what = f"{taken['name']} (pid {taken['pid']})", f"Stop it, or change the port (`kill {taken['pid']}`)"
            if taken["container"]:
                who, what = (
                    f"{who} in container {taken['container']}",
                    f"Run `docker stop {taken['container']}`, or change the port",
                )
        else:
            who, what = "a process of another user", "Run `sudo ss -ltnp` to see which, and stop it"
        yield node.error(
            "launch-port-in-use",
            f"port {taken['port']} ({node.ports.get(taken['port'], 'engine')}) is taken by {who}. {what}.",
        )


def check_names(node: Node, info: Mapping[str, Any], wanted: Wanted) -> Found:
    hostname, addresses = info["names"]["hostname"], info["names"]["addresses"]
    loopback = [a for a in addresses if a.startswith("127.") or a == "::1"]
    if loopback and wanted.ranks > 1:
        name = node.fabric_env.get("GLOO_SOCKET_IFNAME")
        done = (
            f"GLOO_SOCKET_IFNAME={name} is set for this rank, so nothing is to be done here; programs without it "
            "would hang"
            if name
            else "Set fabric_interface, so that GLOO_SOCKET_IFNAME is set"
        )
        yield node.found(
            NOTE if name else WARNING,
            "net-gloo-loopback",
            f"hostname {hostname} resolves to {loopback[0]}, which Gloo would advertise to the other ranks. {done}.",
        )
    for what, name in (("inventory name", node.name), ("hostname", hostname), ("address", node.address or "")):
        if "_" in name:
            yield node.warning(
                "net-hostname-underscore",
                f"the {what} {name} has an underscore, which is no valid host name (RFC 1123); Ray and Horovod "
                "refuse it. Ranks are given numeric addresses; use a hyphen all the same.",
            )
    for key, value in wanted.env.items():
        if not key.endswith(("_IFNAME", "_IF_NAME")) or not value:
            continue
        if node.interfaces is not None and value.lstrip("=^").split(",")[0] not in node.interfaces:
            yield node.error(
                "net-ifname-baked",
                f"the recipe sets {key}={value}, an interface that does not exist here (found "
                f"{', '.join(node.interfaces)}). Remove it from the recipe: it is found on each node.",
            )
    if wanted.ranks > 1 and "VLLM_HOST_IP" in wanted.env:
        yield node.error(
            "net-host-ip-collision",
            f"the recipe sets VLLM_HOST_IP={wanted.env['VLLM_HOST_IP']} for every rank, wanted each node's own "
            "address. Remove it from the recipe: each rank is given its own.",
        )


def check_clock(node: Node, info: Mapping[str, Any], wanted: Wanted) -> Found:
    offset = info["clock_offset_s"]
    if offset is not None and abs(offset) > wanted.clock_s:
        yield node.warning(
            "clock",
            f"its clock is {abs(offset):.0f} s {'ahead of' if offset > 0 else 'behind'} the controller's "
            f"({wanted.clock_s:.0f} s allowed): TLS and log times go wrong. Run `timedatectl set-ntp true`.",
        )


def check_sudo(node: Node, info: Mapping[str, Any], wanted: Wanted) -> Found:
    if wanted.become and not info["session"]["sudo"]:
        yield node.warning(
            "pre-sudo",
            f"sudo asks user {info['session']['user']} for a password. The roles {', '.join(wanted.become)} need "
            "root: run their playbooks with -K, or allow NOPASSWD.",
        )


CHECKS: tuple[Callable[[Node, Mapping[str, Any], Wanted], Found], ...] = (
    check_gpu,
    check_foreign,
    check_pcie,
    check_memory,
    check_kho,
    check_docker,
    check_disk,
    check_ports,
    check_names,
    check_clock,
    check_sudo,
)


# --- what only the comparison shows ---------------------------------------------------------------------------------


def compare(nodes: Sequence[Node], wanted: Wanted) -> list[Finding]:
    """Same driver, kernel and image on all ranks."""
    known = [(node.name, node.info) for node in nodes if node.info is not None]
    findings: list[Finding] = []

    def differs(values: Mapping[str, Any], severity: str, code: str, what: str, advice: str) -> None:
        told = {name: value for name, value in values.items() if value}
        if len(set(told.values())) > 1:
            shown = ", ".join(f"{value} on {name}" for name, value in told.items())
            findings.append(
                Finding(severity, code, next(iter(told)), f"The ranks have different {what}: {shown}. {advice}")
            )

    first = {name: (info["gpu"]["gpus"] or [{}])[0] for name, info in known}
    differs(
        {name: gpu.get("driver") for name, gpu in first.items()},
        ERROR,
        "driver-differs",
        "NVIDIA drivers",
        "Install the same one on every node and reboot.",
    )
    differs(
        {name: gpu.get("name") for name, gpu in first.items()},
        WARNING,
        "gpu-differs",
        "GPUs",
        "The slowest one sets the pace.",
    )
    differs(
        {name: info["identity"]["kernel"] for name, info in known},
        WARNING,
        "kernel-differs",
        "kernels",
        "Boot the same one on every node.",
    )
    if wanted.image:
        differs(
            {name: (info["docker"]["image"] or {}).get("id") for name, info in known},
            WARNING,
            "img-digest-mismatch",
            f"builds of {wanted.image}",
            "The image role makes them the same, or refuses.",
        )
    hosts: dict[str, list[str]] = {}
    for name, info in known:
        hosts.setdefault(info["identity"]["hostname"], []).append(name)
    for hostname, names in hosts.items():
        if len(names) > 1:
            findings.append(
                Finding(
                    WARNING,
                    "hostname-collision",
                    names[0],
                    f"{', '.join(names)} all call themselves {hostname}. Give each its own host name.",
                )
            )
    short = [(largest_utilization(info), name) for name, info in known if info["memory"].get("MemTotal")]
    if (
        wanted.utilization
        and len(short) > 1
        and any(f.code == "launch-util-too-high" and f.severity == ERROR for f in _memory(nodes, wanted))
    ):
        least, name = min(short)
        findings.append(
            Finding(
                NOTE,
                "launch-util-too-high",
                name,
                f"The largest gpu-memory-utilization that every node can give now is {least:.2f} ({name} decides).",
            )
        )
    return findings


def _memory(nodes: Sequence[Node], wanted: Wanted) -> list[Finding]:
    return [finding for node in nodes if node.info for finding in check_memory(node, node.info, wanted)]


def rows(nodes: Sequence[Node]) -> list[dict[str, Any]]:
    """One row per node for a table of 100 columns."""
    table: list[dict[str, Any]] = []
    for node in nodes:
        info = node.info
        if info is None:
            table.append({"node": node.name, "GPU": "no report"})
            continue
        gpu = (info["gpu"]["gpus"] or [{}])[0]
        total, available, free = pool(info)
        systems = _node.per_file_system(info["folders"])
        table.append(
            {
                "node": node.name,
                "GPU": str(gpu.get("name") or info["gpu"]["verdict"]).replace("NVIDIA ", ""),
                "driver": gpu.get("driver"),
                "kernel": info["identity"]["kernel"],
                "total": round(total, 1),
                "available": round(available, 1),
                "free": round(free, 1),
                "docker": info["docker"]["version"] or info["docker"]["state"],
                "disk": round(min(s["free_kib"] for s in systems) / _node.GIB_KIB) if systems else None,
            }
        )
    return table
