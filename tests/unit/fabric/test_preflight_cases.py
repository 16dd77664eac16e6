"""Preflight cases by id: recorded input through the parsers to the sentence. And what only the comparison of nodes shows."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ansible_collections.gb10.fleet.plugins.module_utils import _findings, _node, _nvidia_smi
from ansible_collections.gb10.fleet.plugins.module_utils._preflight import (
    Node,
    Wanted,
    judge,
    largest_utilization,
    rows,
)
from ansible_collections.gb10.fleet.plugins.modules.node_info import NodeReader

GIB = 1024 * 1024
TOTAL = 127600748  # kB, a GB10's MemTotal: the 121.69 GiB that CUDA sees


def report(**changes: Any) -> dict[str, Any]:
    """A healthy node's report; ``changes`` replace a section's keys."""
    base: dict[str, Any] = {
        "identity": {
            "hostname": "spark-01",
            "kernel": "6.17.0-1014-nvidia",
            "product": "NVIDIA_DGX_Spark",
            "python": "3.12.3",
            "has_requests": True,
        },
        "gpu": {
            "verdict": "ok",
            "error": None,
            "processes": [],
            "gpus": [
                {"name": "NVIDIA GB10", "driver": "580.159.03", "memory_total_mib": None, "memory_used_mib": None}
            ],
        },
        "memory": {
            "MemTotal": TOTAL,
            "MemAvailable": 115 * GIB,
            "MemFree": 114 * GIB,
            "Cached": GIB,
            "min_free_kib": 45183,
        },
        "holders": [],
        "docker": {
            "state": "ok",
            "error": None,
            "version": "28.0",
            "root": "/var/lib/docker",
            "runtimes": ["nvidia", "runc"],
            "hook": True,
            "hook_is_newer": False,
            "cdi": [],
            "mode": None,
            "containers": [],
            "running": [],
            "image": None,
            "command": True,
        },
        "session": {
            "user": "user",
            "root": False,
            "groups": ["docker", "user"],
            "docker_group": ["user"],
            "sudo": True,
        },
        "folders": [],
        "ports": [],
        "names": {"hostname": "spark-01", "addresses": ["192.0.2.1"]},
        "clock_offset_s": 0.1,
        "orphans": [],
        "pcie_faults": [],
    }
    merged = {
        key: {**value, **changes[key]} if isinstance(value, dict) and key in changes else changes.get(key, value)
        for key, value in base.items()
    }
    memory = merged["memory"]  # what is used belongs to processes, unless a test says otherwise
    memory.setdefault("AnonPages", memory["MemTotal"] - memory["MemFree"] - memory["Cached"])
    return merged


def said(
    wanted: Wanted | None = None, node: dict[str, Any] | None = None, **changes: Any
) -> list[tuple[str, str, str]]:
    found = judge([Node("spark-01", report(**changes), **(node or {}))], wanted or Wanted())
    return [(f.severity, f.code, f.text) for f in found]


def test_a_healthy_node_has_nothing_to_say() -> None:
    assert said(Wanted(utilization=0.85, safe_utilization=0.85, rdma=True, ranks=2)) == []


# --- kernel, GPU ---


def test_pre_kernel_kho(kit: Any) -> None:
    """CmaFree 940604 kB > CmaTotal 0 on 7.0.0-1019 (MiaAI DSpark#259): memlock is not to blame."""
    text = kit.case("pre-kernel-kho")
    memory = {**report()["memory"], **_node.meminfo(text)}
    kernel = text.splitlines()[2]
    found = said(Wanted(rdma=True, ranks=2), memory=memory, identity={"kernel": kernel})
    assert found == [
        (
            "error",
            "pre-kernel-kho",
            "spark-01: kernel 7.0.0-1019-nvidia keeps a Kexec HandOver reserve (CmaFree 919 MiB > CmaTotal 0 MiB): "
            "RDMA registration fails with `Cannot allocate memory` although memlock is unlimited. Boot with "
            "kho=off, or an older kernel; memlock is not to blame.",
        )
    ]
    assert not _node.kho_reserve({"CmaTotal": 65536, "CmaFree": 60000})
    assert not _node.kho_reserve({"CmaTotal": 0, "CmaFree": 0})


def test_pre_nvsmi_na(kit: Any) -> None:
    """`NVIDIA GB10, 12.1, 580.159.03, [N/A]`: absent values are None, memory is read from /proc, the GPU is there."""
    line = next(line for line in kit.case("pre-nvsmi-na").splitlines() if line.startswith("NVIDIA GB10, 12.1"))
    (gpu,) = _nvidia_smi.parse_csv("name, compute_cap, driver_version, memory.total [MiB]\n" + line)
    assert gpu == {"name": "NVIDIA GB10", "compute_cap": "12.1", "driver_version": "580.159.03", "memory.total": None}
    assert largest_utilization(report()) == 0.94  # 115 of 121.7 GiB, from MemAvailable


def test_pre_nvsmi_hang(kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A blocked nvidia-smi (rc=124 after 10 s in the report) ends in time and is not "no GPU"."""
    assert "rc=124" in kit.case("pre-nvsmi-hang")
    blocked = tmp_path / "nvidia-smi"
    blocked.write_text("#!/bin/sh\nsleep 60\n")
    blocked.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    started = time.monotonic()
    gpu = NodeReader({"root": "/", "nvidia_smi_timeout_s": 0.3}).gpu()
    assert time.monotonic() - started < 3
    assert gpu["verdict"] == "wedged"
    ((severity, code, text),) = said(gpu=gpu)
    assert (severity, code) == ("error", "pre-nvsmi-hang")
    assert "gave no answer within 0.3 s: the NVIDIA driver is wedged" in text
    assert text.endswith("Nothing is launched on it.")


def test_net_cx7_aer(kit: Any) -> None:
    faults = _node.pcie_faults(kit.case("net-cx7-aer"))
    assert len(faults) == 3
    ((severity, code, text),) = said(pcie_faults=faults)
    assert (severity, code) == ("error", "net-cx7-aer")
    assert (
        "3 lines, first `06:38:10 kernel: pcieport 0000:00:00.0: AER: Uncorrectable (Fatal) error message received"
        in text
    )
    assert "Reboot this node" in text
    assert _node.pcie_faults(kit.case("net-cx7-13gbps")) == []  # the 27 W line is on healthy units as well


def test_not_a_gb10() -> None:
    gpus = [{"name": "NVIDIA H200", "driver": "580.159.04", "memory_total_mib": 143771.0, "memory_used_mib": 0.0}]
    ((severity, code, text),) = said(gpu={"gpus": gpus}, identity={"product": "Standard PC"})
    assert (severity, code) == ("warning", "not-a-gb10")
    assert text.startswith("spark-01: its GPU is NVIDIA H200 (driver 580.159.04) in a Standard PC, not a GB10.")


# --- memory ---


def two_numbers(line: str) -> dict[str, int]:
    values = dict(re.findall(r"(\w+)=\s*([\d.]+)", line))
    return {
        "MemFree": round(float(values["MemFree"]) * GIB),
        "MemAvailable": round(float(values["MemAvailable"]) * GIB),
        "Cached": round(float(values["Cached"]) * GIB),
    }


def test_pre_uma_two_numbers(kit: Any) -> None:
    """60 GB written: CUDA sees 41.52 GiB, vLLM's check 115.65 (unsloth#10704). No error: the launch evicts the page cache."""
    lines = kit.case("pre-uma-two-numbers").splitlines()
    baseline, written = two_numbers(lines[1]), two_numbers(lines[2])
    assert said(Wanted(utilization=0.84), memory=baseline) == []
    ((severity, code, text),) = said(Wanted(utilization=0.84), memory=written)
    assert (severity, code) == ("note", "pre-uma-two-numbers")
    assert text == (
        "spark-01: 115.6 GiB available, but CUDA sees only 41.5 GiB free until the page cache (72.6 GiB) is "
        "evicted; 0.84 × 121.7 GiB = 102.2 GiB wanted. The launch does that."
    )


def test_pre_mem_return(kit: Any) -> None:
    """A container that exited gives its memory back minutes later: 31.2, 58.9, then 115.8 of at least 110 GiB."""
    values = [float(value) for value in re.findall(r"MemAvailable: ([\d.]+) GiB", kit.case("pre-mem-return"))]
    assert values == [31.2, 58.9, 115.8]
    wanted = Wanted(free_gib=110)
    verdicts = [said(wanted, memory={"MemAvailable": round(v * GIB), "MemFree": round(v * GIB)}) for v in values]
    assert [[code for severity, code, _ in found if severity == "error"] for found in verdicts] == [
        ["launch-util-too-high"],
        ["launch-util-too-high"],
        [],
    ]
    assert verdicts[0][0][2].startswith("spark-01: 31.2 GiB free, 110.0 GiB wanted. Free memory")


@pytest.mark.parametrize(
    ("free", "utilization", "largest"), [(104.46, 0.87, "0.85"), (100.94, 0.835, "0.82"), (109.53, 0.91, "0.90")]
)
def test_launch_util_too_high(kit: Any, free: float, utilization: float, largest: str) -> None:
    """Three refusals of vLLM's own check, said before the launch with the largest value that passes."""
    assert f"({free}/121.69 GiB) on startup is less than desired GPU memory utilization ({utilization}," in kit.case(
        "launch-util-too-high"
    )
    memory = {"MemAvailable": round(free * GIB), "MemFree": round(free * GIB)}
    holders = [{"pid": 4211, "name": "python3", "kib": round(3.4 * GIB)}, {"pid": 1, "name": "systemd", "kib": 9000}]
    ((severity, _code, text),) = said(Wanted(utilization=utilization), memory=memory, holders=holders)
    assert severity == "error"
    assert text.startswith(
        f"spark-01: {free:.1f} GiB free, {utilization:g} × 121.7 GiB = {utilization * TOTAL / GIB:.1f} GiB wanted. "
        f"Lower gpu-memory-utilization to {largest}, or free memory: python3 (pid 4211) holds 3.4 GiB"
    )


def test_the_success_line_of_the_same_check_passes(kit: Any) -> None:
    assert "(110.34/121.69 GiB) on startup. Desired GPU memory utilization is (0.87" in kit.case("launch-util-too-high")
    memory = {"MemAvailable": round(110.34 * GIB), "MemFree": round(110.34 * GIB)}
    assert said(Wanted(utilization=0.87, safe_utilization=0.87), memory=memory) == []


def test_tune_minfree_trap(kit: Any) -> None:
    """vm.min_free_kbytes = 4194304 costs about 6.2 GiB, and 98.89 < 102.22 GiB."""
    raised = int(re.findall(r"min_free_kbytes = (\d+)", kit.case("tune-minfree-trap"))[0])
    found = said(
        Wanted(utilization=0.84),
        memory={"MemAvailable": round(98.89 * GIB), "MemFree": round(98 * GIB), "min_free_kib": raised},
    )
    assert [(severity, code) for severity, code, _ in found] == [
        ("warning", "tune-minfree-trap"),
        ("error", "launch-util-too-high"),
    ]
    assert "raised to 4.0 GiB, which takes about 6.2 GiB" in found[0][2]
    assert "98.9 GiB free, 0.84 × 121.7 GiB = 102.2 GiB wanted. Lower gpu-memory-utilization to 0.81" in found[1][2]


def test_memory_of_our_own_rank_is_not_held_against_us() -> None:
    docker = {
        "containers": [{"id": "abc", "name": "vllm", "cluster": "alpha", "rank": "0", "state": "running"}],
        "running": ["abc"],
    }
    found = said(Wanted(cluster="alpha", utilization=0.85), memory={"MemAvailable": 10 * GIB}, docker=docker)
    assert [(severity, code) for severity, code, _ in found] == [("note", "memory-later")]


def test_gpu_memory_counts_for_its_holder() -> None:
    """GPU allocations are in no resident set (jschmied/dgx-spark-setup-guide): both are added up."""
    top = _node.top_users(
        [{"pid": 1, "name": "systemd", "rss_kib": 9000}, {"pid": 454928, "name": "llama-server", "rss_kib": 1024}],
        [{"pid": 454928, "name": "llama-server", "used_mib": 15136}],
    )
    assert top[0] == {"pid": 454928, "name": "llama-server", "kib": 1024 + 15136 * 1024}


def test_a_gpu_with_memory_of_its_own_is_judged_by_it() -> None:
    gpus = [{"name": "NVIDIA GB10", "driver": "x", "memory_total_mib": 143771.0, "memory_used_mib": 100000.0}]
    ((_, code, text),) = said(Wanted(utilization=0.85), gpu={"gpus": gpus})
    assert code == "launch-util-too-high"
    assert "42.7 GiB free, 0.85 × 140.4 GiB = 119.3 GiB wanted" in text


# --- Docker ---


def test_pre_docker_runtime(kit: Any) -> None:
    text = kit.case("pre-docker-runtime")
    runtimes = sorted(json.loads(next(line for line in text.splitlines() if line.startswith("{"))))
    ((severity, code, message),) = said(docker={"runtimes": runtimes, "hook": False})
    assert (severity, code) == ("error", "pre-docker-runtime")
    assert message.startswith(
        "spark-01: Docker has no NVIDIA runtime hook (runtimes: io.containerd.runc.v2, runc); a start would end in "
        "`could not"
    )
    assert said(Wanted(gpus=False), docker={"runtimes": runtimes, "hook": False}) == []
    ((severity, _, message),) = said(docker={"hook_is_newer": True})
    assert (severity, "systemctl restart docker" in message) == ("warning", True)
    ((_, code, message),) = said(docker={"root": "/var/snap/docker/common/var-lib-docker"})
    assert "Docker is the snap" in message


def test_pre_cdi(kit: Any) -> None:
    assert "Found 0 CDI devices" in kit.case("pre-cdi")
    ((severity, code, text),) = said(docker={"mode": "cdi"})
    assert (severity, code) == ("error", "pre-cdi")
    assert "Run `nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml`" in text
    stale = [{"path": "/etc/cdi/nvidia.yaml", "driver": _node.driver_of_cdi("hostPath: /usr/lib/libcuda.so.580.95.05")}]
    ((severity, _code, text),) = said(docker={"cdi": stale})
    assert severity == "warning"
    assert "written for driver 580.95.05, the driver is 580.159.03" in text


def test_pre_docker_sock(kit: Any) -> None:
    """In /etc/group but not in this session (ControlPersist), against not in the group at all."""
    lines = kit.case("pre-docker-sock").splitlines()
    session = {
        "groups": re.findall(r"\((\w+)\)", lines[3].partition("groups=")[2]),
        "docker_group": _node.group_members(lines[5]),
    }
    assert session == {"groups": ["user", "sudo"], "docker_group": ["user"]}
    denied: dict[str, Any] = {"state": "denied", "version": None, "root": None}
    ((severity, code, text),) = said(docker=denied, session=session)
    assert (severity, code) == ("error", "pre-docker-sock")
    assert text == (
        "spark-01: user user was added to the group docker, but this session is older than that. End it: `ssh -O "
        "exit` to the host (ControlPersist keeps it), or run `meta: reset_connection`."
    )
    ((_, _, text),) = said(docker=denied, session={**session, "docker_group": []})
    assert "user user is not in the group docker. Run `sudo usermod -aG docker user`, then log in again." in text


def test_no_docker_and_no_requests() -> None:
    absent = {"state": "absent", "error": "/var/run/docker.sock is missing", "command": False, "root": None}
    found = said(docker=absent, identity={"has_requests": False})
    assert [code for _, code, _ in found] == ["no-docker", "no-requests"]


# --- session, names, disk, ports, clock ---


def test_pre_sudo(kit: Any) -> None:
    assert "passwordless sudo not available" in kit.case("pre-sudo")
    found = said(Wanted(become=("kernel", "memory_guard")), session={"sudo": False})
    assert found == [
        (
            "warning",
            "pre-sudo",
            "spark-01: sudo asks user user for a password. The roles kernel, memory_guard need root: run their "
            "playbooks with -K, or allow NOPASSWD.",
        )
    ]
    assert said(session={"sudo": False}) == []


def test_net_gloo_loopback(kit: Any) -> None:
    """`127.0.1.1 spark-01` in /etc/hosts: explained, and harmless once the interface is set."""
    hosts = next(line.split() for line in kit.case("net-gloo-loopback").splitlines() if line.startswith("127.0.1.1"))
    addresses = _node.ahosts(f"{hosts[0]}       STREAM {hosts[1]}\n{hosts[0]}       DGRAM\n{hosts[0]}       RAW\n")
    names = {"hostname": hosts[1], "addresses": addresses}
    ((severity, _, text),) = said(Wanted(ranks=2), {"fabric_env": {"GLOO_SOCKET_IFNAME": "enp1s0f0np0"}}, names=names)
    assert severity == "note"
    assert text.startswith(
        "spark-01: hostname spark-01 resolves to 127.0.1.1, which Gloo would advertise to the other ranks."
    )
    ((severity, _, text),) = said(Wanted(ranks=2), names=names)
    assert severity == "warning"
    assert text.endswith("Set fabric_interface, so that GLOO_SOCKET_IFNAME is set.")


def test_net_ifname_baked_into_a_recipe(kit: Any) -> None:
    missing = re.search(r"Unable to find address for: (\S+)", kit.case("net-ifname-baked"))
    assert missing is not None
    found = said(Wanted(env={"TP_SOCKET_IFNAME": missing.group(1)}), {"interfaces": ("enP7s7", "enp1s0f0np0")})
    assert found[0][:2] == ("error", "net-ifname-baked")
    assert (
        "the recipe sets TP_SOCKET_IFNAME=enp1s0f1np1, an interface that does not exist here (found enP7s7, "
        "enp1s0f0np0)" in found[0][2]
    )


def test_net_host_ip_collision_in_a_recipe(kit: Any) -> None:
    value = re.search(r"VLLM_HOST_IP=(\S+)", kit.case("net-host-ip-collision"))
    assert value is not None
    ((severity, code, _),) = said(Wanted(ranks=2, env={"VLLM_HOST_IP": value.group(1)}))
    assert (severity, code) == ("error", "net-host-ip-collision")


def test_net_hostname_underscore(kit: Any) -> None:
    name = kit.case("net-hostname-underscore").splitlines()[1].partition(":")[0]
    found = [f.text for f in judge([Node(name, report(), address=f"{name}.local")], Wanted())]
    assert found[0] == (
        "spark_01: the inventory name spark_01 has an underscore, which is no valid host name (RFC 1123); Ray and "
        "Horovod refuse it. Ranks are given numeric addresses; use a hyphen all the same."
    )
    assert "the address spark_01.local has an underscore" in found[1]


def test_disk_is_summed_where_image_and_checkpoint_share_a_file_system() -> None:
    def need(what: str, gib: float, device: int = 1) -> dict[str, Any]:
        return {
            "what": what,
            "path": "/x",
            "device": device,
            "mount": "/",
            "free_kib": 190 * GIB,
            "need_kib": gib * GIB,
        }

    ((severity, code, text),) = said(folders=[need("image", 25), need("checkpoint", 172.3)])
    assert (severity, code) == ("error", "disk")
    assert text == (
        "spark-01: 190.0 GiB free on /, 202.3 GiB wanted (image 25.0 GiB + checkpoint 172.3 GiB + 5.0 GiB margin). "
        "Free space, or point models_dir elsewhere."
    )
    assert said(folders=[need("image", 25), need("checkpoint", 172.3, device=2)]) == []
    assert _node.missing_kib(172.3, round(172.29 * GIB * 1024)) == 0


def test_launch_port_in_use() -> None:
    taken = {"port": 29521, "name": "python3", "pid": 4211, "container": None, "cluster": None}
    found = said(Wanted(cluster="alpha"), {"ports": {29521: "the master port"}}, ports=[taken])
    assert found == [
        (
            "error",
            "launch-port-in-use",
            "spark-01: port 29521 (the master port) is taken by python3 (pid 4211). Stop it, or change the port "
            "(`kill 4211`).",
        )
    ]
    assert said(Wanted(cluster="alpha"), ports=[{**taken, "container": "abc", "cluster": "alpha"}]) == []
    assert "a rank of cluster beta" in said(Wanted(cluster="alpha"), ports=[{**taken, "cluster": "beta"}])[0][2]
    assert "a process of another user" in said(ports=[{**taken, "pid": None}])[0][2]


def test_listeners_and_their_owners() -> None:
    table = (
        "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n   0: "
        "00000000:1F40 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 12345 1 0 100 0 0 10 "
        "0\n   1: 0B6433C6:7351 0C6433C6:9C40 01 00000000:00000000 00:00000000 00000000     0        0 12346 1 0 20 "
        "4 30 10 -1\n"
    )
    assert _node.listeners(table) == [{"port": 8000, "uid": 1000, "everywhere": True}]
    ss = 'LISTEN 0      2048         0.0.0.0:8000      0.0.0.0:*    users:(("vllm",pid=4211,fd=23))\n'
    assert _node.socket_owners(ss) == {8000: {"name": "vllm", "pid": 4211}}


def test_clock() -> None:
    assert said(clock_offset_s=-90.0)[0][2].startswith(
        "spark-01: its clock is 90 s behind the controller's (30 s allowed)"
    )
    assert said(clock_offset_s=None) == []


def test_foreign_gpu_process_and_orphan(kit: Any) -> None:
    assert "llama-server      15136MiB" in kit.case("pre-nvsmi-na")
    foreign = [
        {"pid": 454928, "name": "/opt/build/bin/llama-server", "kind": "C", "used_mib": 15136.0, "container": None}
    ]
    orphans = [{"pid": 99, "name": "ray::RayWorkerP", "rss_kib": 2 * GIB, "command": ""}]
    found = said(gpu={"processes": foreign}, orphans=orphans)
    assert [text for _, _, text in found] == [
        "spark-01: 1 foreign process on the GPU: llama-server (pid 454928, 14.8 GiB). A serve takes the whole node: "
        "stop them.",
        "spark-01: engine process ray::RayWorkerP (pid 99, 2.0 GiB) belongs to no running container. Stop it: its "
        "memory comes back only then.",
    ]


@pytest.mark.parametrize(
    "cgroup",
    [
        "0::/system.slice/docker-{id}.scope",
        "12:pids:/docker/{id}\n1:name=systemd:/docker/{id}",
        "0::/docker/{outer}/docker/{id}",
        "0::/system.slice/docker-{id}.scope/init",
    ],
)
def test_container_of_a_process(cgroup: str) -> None:
    assert _node.container_of(cgroup.format(id="ab" * 32, outer="cd" * 32)) == ("ab" * 32)[:12]
    assert _node.container_of("0::/user.slice/user-1000.slice") is None


# --- the comparison ---


def pair(**second: Any) -> list[Node]:
    other = report(**{**second, "identity": {"hostname": "spark-02", **second.get("identity", {})}})
    return [Node("spark-01", report()), Node("spark-02", other)]


def test_driver_differs_between_ranks() -> None:
    gpus = [{"name": "NVIDIA GB10", "driver": "580.95.05", "memory_total_mib": None, "memory_used_mib": None}]
    (finding,) = judge(pair(gpu={"gpus": gpus}), Wanted(ranks=2))
    assert (finding.severity, finding.code) == ("error", "driver-differs")
    assert finding.text == (
        "The ranks have different NVIDIA drivers: 580.159.03 on spark-01, 580.95.05 on spark-02. Install the same "
        "one on every node and reboot."
    )
    (accepted,) = _findings.accept([finding], ["driver-differs"])
    assert accepted.severity == "warning"


def test_kernel_image_and_host_name() -> None:
    nodes = pair(
        identity={"kernel": "7.0.0-1019-nvidia", "hostname": "spark-01"},
        docker={"image": {"id": "sha256:b", "interface_names": []}},
    )
    assert nodes[0].info is not None
    nodes[0] = Node(
        "spark-01",
        {**nodes[0].info, "docker": {**nodes[0].info["docker"], "image": {"id": "sha256:a", "interface_names": []}}},
    )
    found = judge(nodes, Wanted(ranks=2, image="vllm:1"))
    assert [(f.severity, f.code) for f in found] == [
        ("warning", "kernel-differs"),
        ("warning", "img-digest-mismatch"),
        ("warning", "hostname-collision"),
    ]


def test_the_least_node_decides_the_largest_utilization() -> None:
    nodes = pair(memory={"MemAvailable": 98 * GIB, "MemFree": 98 * GIB})
    found = judge(nodes, Wanted(ranks=2, utilization=0.85))
    assert [f.severity for f in found] == ["error", "note"]
    assert (
        found[1].text == "The largest gpu-memory-utilization that every node can give now is 0.80 (spark-02 decides)."
    )


def test_errors_of_all_nodes_come_in_one_report() -> None:
    nodes = [
        Node("spark-01", report(docker={"state": "stopped", "error": "the Docker engine does not answer"})),
        Node("spark-02", report(identity={"hostname": "spark-02", "has_requests": False})),
        Node("spark-03", None),
    ]
    text = _findings.report("cluster alpha", judge(nodes, Wanted(ranks=3)))
    assert text.splitlines()[0] == "cluster alpha: 3 errors"
    assert all(name in text for name in ("spark-01", "spark-02", "spark-03"))
    assert max(len(line) for line in text.splitlines()) <= 100


def test_the_table_fits_100_columns() -> None:
    from ansible_collections.gb10.fleet.plugins.module_utils._text import table

    folders: Callable[[], list[dict[str, Any]]] = lambda: [  # noqa: E731
        {"what": "image", "path": "/", "device": 1, "mount": "/", "free_kib": 3600 * GIB, "need_kib": 0}
    ]
    text = table(rows([Node("spark-01", report(folders=folders())), Node("spark-02", None)]))
    assert max(len(line) for line in text.splitlines()) <= 100
    assert re.search(r"GB10 +580.159.03  6.17.0-1014-nvidia  121.7      115.0  114.0", text)
