"""Each fault of a node, injected, and the sentence that preflight.yml has to print."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from ansible_collections.gb10.fleet.molecule.fabric import faults

CHECK = "playbooks/preflight.yml"
# A new SSH connection: the groups of a session are those of its start.
ANEW = {"ANSIBLE_SSH_ARGS": "-o ControlMaster=no -o ControlPath=none"}
HOOK = "/usr/bin/nvidia-container-runtime-hook"


@pytest.fixture(scope="module")
def cluster() -> Any:
    return faults.Cluster()


def test_healthy_nodes(cluster: Any) -> None:
    said = cluster.play(CHECK)
    assert said.rc == 0, said.raw
    assert "error:" not in said.text
    ours = "\n".join(part.partition("\nok:")[0] for part in said.raw.split("cluster alpha:")[1:])
    assert [line for line in ours.splitlines() if len(line) > 100] == []
    for node in (cluster.head, cluster.worker):
        assert f"{node.name} GB10 580.159.03" in said.text


FAULTS = {
    # id: (node, command, undo, extra variables, exit code, sentence)
    "pre-nvsmi-hang": (
        "worker",
        "echo 60 > /run/fake-gpu/hang",
        "gb10-sandbox-reset",
        {"preflight_nvidia_smi_timeout_s": 2},
        2,
        "error: {worker}: nvidia-smi -q -x gave no answer within 2 s: the NVIDIA driver is wedged",
    ),
    "driver-differs": (
        "worker",
        "echo 580.95.05 > /run/fake-gpu/driver",
        "gb10-sandbox-reset",
        {},
        2,
        "error: The ranks have different NVIDIA drivers: 580.159.03 on {head}, 580.95.05 on {worker}. Install the "
        "same one on every node",
    ),
    "disk": (
        "worker",
        "true",
        "true",
        {"recipe_overrides": {"checkpoint": {"size_gib": 5000}}},
        2,
        "GiB free on /, 500",
    ),
    "launch-port-in-use": (
        "head",
        "systemd-run -q --unit=gb10-squatter python3 -m http.server 8000",
        "systemctl stop gb10-squatter",
        {},
        2,
        "error: {head}: port 8000 (the API) is taken by python3 (pid",
    ),
    "no-docker": (
        "worker",
        "systemctl stop docker.socket docker.service",
        "systemctl start docker.socket docker.service",
        {},
        2,
        "error: {worker}: ",
    ),
    "net-gloo-loopback": (
        "worker",
        "cp /etc/hosts /tmp/hosts && (echo 127.0.1.1 $(hostname); cat /tmp/hosts) > /etc/hosts",
        "cat /tmp/hosts > /etc/hosts",
        {},
        0,
        "{worker}: hostname {worker} resolves to 127.0.1.1, which Gloo would advertise to the other ranks. "
        "GLOO_SOCKET_IFNAME=enp1s0f0np0 is set for this rank",
    ),
    "pre-sudo": (
        "worker",
        "mv /etc/sudoers.d/spark /root/spark.sudoers",
        "mv /root/spark.sudoers /etc/sudoers.d/spark",
        {"preflight_become": ["kernel", "memory_guard"]},
        0,
        "warning: {worker}: sudo asks user spark for a password. The roles kernel, memory_guard need root",
    ),
    "no-requests": (
        "worker",
        "mv /usr/lib/python3/dist-packages/requests /root/requests.away",
        "mv /root/requests.away /usr/lib/python3/dist-packages/requests",
        {},
        2,
        "error: {worker}: Python 3.",
    ),
    "tune-minfree-trap": (
        "worker",
        "cp /proc/sys/vm/min_free_kbytes /tmp/min_free && echo 4194304 > /proc/sys/vm/min_free_kbytes",
        "cat /tmp/min_free > /proc/sys/vm/min_free_kbytes",
        {},
        0,
        "warning: {worker}: vm.min_free_kbytes is raised to 4.0 GiB, which takes about 6.2 GiB from the memory",
    ),
    "launch-util-too-high": (
        "worker",
        "true",
        "true",
        {"preflight_utilization": 0.999},
        2,
        "wanted. Lower gpu-memory-utilization to 0.",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault(cluster: Any, name: str) -> None:
    where, command, undo, variables, rc, sentence = FAULTS[name]
    with getattr(cluster, where).fault(command, undo):
        said = cluster.play(CHECK, **variables)
    assert cluster.fill(sentence) in said.text, said.raw
    assert said.rc == rc
    assert "Traceback" not in said.raw
    if name == "pre-nvsmi-hang":
        assert said.seconds < 60


def test_pre_docker_runtime(cluster: Any) -> None:
    """The toolkit's hook is missing; once it is there again, Docker has to be restarted to see it."""
    worker = cluster.worker
    with worker.fault(f"mv {HOOK} {HOOK}.away", f"mv {HOOK}.away {HOOK}; touch /run/docker.pid"):
        said = cluster.play(CHECK)
    assert said.rc == 2
    assert f"error: {worker.name}: Docker has no NVIDIA runtime hook" in said.text
    assert (
        "Install nvidia-container-toolkit, run `nvidia-ctk runtime configure --runtime=docker` and restart Docker."
        in said.text
    )


def test_pre_docker_sock(cluster: Any) -> None:
    """Not in the group; then in the group, but in a session that is older than that."""
    worker = cluster.worker
    persistent = {
        "ANSIBLE_SSH_CONTROL_PATH": "/tmp/gb10-preflight-%%C",
        "ANSIBLE_SSH_ARGS": "-o ControlMaster=auto -o ControlPersist=30s",
    }
    with worker.fault("gpasswd -d spark docker", "gpasswd -a spark docker"):
        said = cluster.play(CHECK, env=persistent)
        assert said.rc == 2
        assert (
            f"error: {worker.name}: permission denied on the Docker socket: user spark is not in the group docker."
            in said.text
        )
        worker.run("gpasswd -a spark docker")
        said = cluster.play(CHECK, env=persistent)
        assert (
            f"error: {worker.name}: user spark was added to the group docker, but this session is older than that."
            in said.text
        )
    assert cluster.play(CHECK, env=ANEW).rc == 0


def test_one_cluster_does_not_stop_another(cluster: Any, tmp_path: Path) -> None:
    """Two clusters of one node each, one with a wedged driver: the other passes, and the exit code says that one failed."""
    alone = {"nodes": 1, "parallel": {"tensor": 1}}
    with cluster.worker.fault("echo 60 > /run/fake-gpu/hang"):
        said = cluster.play(
            CHECK, inventory=cluster.apart(tmp_path), recipe_overrides=alone, preflight_nvidia_smi_timeout_s=2
        )
    assert said.rc == 2
    assert "cluster beta: 1 error" in said.text
    assert re.search(rf"{cluster.head.name} : ok=\d+ changed=0 unreachable=0 failed=0", said.text)
    assert re.search(rf"{cluster.worker.name} : ok=\d+ changed=0 unreachable=0 failed=1", said.text)


def test_all_findings_of_all_nodes_in_one_report(cluster: Any) -> None:
    """A network fault on one node, a GPU fault on the other: one report, one exit code."""
    down = 'echo "1: DOWN" > /sys/class/infiniband/rocep1s0f0/ports/1/state'
    with cluster.head.fault(down), cluster.worker.fault("echo 'No devices were found' > /run/fake-gpu/fail"):
        said = cluster.play(CHECK)
    assert said.rc == 2
    assert f"error: {cluster.head.name}: rail 1 (enp1s0f0np0): rocep1s0f0 is DOWN" in said.text
    assert f"error: {cluster.worker.name}: nvidia-smi -q -x ended with exit code 9: No devices were found" in said.text
    assert "cluster alpha: 2 errors" in said.text
