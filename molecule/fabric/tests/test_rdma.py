"""After the launch: a rank's container and log on a node, and what tasks_from=verify_rdma says of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ansible_collections.gb10.fleet.molecule.fabric import faults

VERIFY = "molecule/fabric/verify_rdma.yml"
IMAGE = "198.18.0.2:5000/sandbox/fake-engine:1"
NET_IB = "NCCL INFO NET/IB : Using [0]rocep1s0f0:1/RoCE [1]roceP2p1s0f0:1/RoCE [RO]; OOB enp1s0f0np0:192.0.2.1<0>"
NET_SOCKET = "NCCL INFO NET/Socket : Using [0]enP7s7:192.0.2.11<0>"
WHOLE = "--device /dev/infiniband:/dev/infiniband --cap-add IPC_LOCK"
# A node without CAP_SYS_RESOURCE cannot lift memlock over its own hard limit.
SMALL = {"fabric_accept": ["pre-memlock"]}


@pytest.fixture(scope="module")
def cluster() -> Any:
    return faults.Cluster()


@pytest.fixture
def rank(cluster: Any) -> Any:
    """Start a container that says one line as a rank would; it is gone after the test."""

    def start(options: str, line: str) -> None:
        cluster.head.run(
            f"docker run -d --name gb10-rank --init --ulimit memlock=8388608 {options} --entrypoint sh {IMAGE} "
            f"-c 'echo \"{line}\"; sleep 300'"
        )

    start_it: Callable[[str, str], None] = start
    yield start_it
    cluster.head.run("docker rm -f gb10-rank", check=False)


def test_both_rails_in_the_log(cluster: Any, rank: Any) -> None:
    rank(WHOLE, NET_IB)
    said = cluster.play(VERIFY, **SMALL)
    assert said.rc == 0, said.raw
    assert "proven=True used=rocep1s0f0,roceP2p1s0f0" in said.text


def test_net_tcp_fallback_without_dev_infiniband(cluster: Any, rank: Any) -> None:
    rank("", NET_SOCKET)
    said = cluster.play(VERIFY, **SMALL)
    assert said.rc == 2
    assert (
        f"error: {cluster.head.name}: rank container gb10-rank has no /dev/infiniband, so NCCL falls back to TCP"
        in said.text
    )
    assert f"error: {cluster.head.name}: rank container gb10-rank lacks IPC_LOCK" in said.text
    assert (
        f"error: {cluster.head.name}: rank container gb10-rank talks over TCP sockets although RDMA is wanted"
        in said.text
    )


def test_pre_memlock(cluster: Any, rank: Any) -> None:
    rank(WHOLE, NET_IB)
    said = cluster.play(VERIFY, fabric_accept=[])
    assert said.rc == 2
    assert f"error: {cluster.head.name}: rank container gb10-rank may lock only 8192 KiB (ulimit -l)" in said.text


def test_net_one_rail(cluster: Any, rank: Any) -> None:
    rank(WHOLE, NET_IB.replace(" [1]roceP2p1s0f0:1/RoCE", ""))
    said = cluster.play(VERIFY, **SMALL)
    assert said.rc == 0
    assert "uses rocep1s0f0, not roceP2p1s0f0: 1 of 2 rails" in said.text


def test_silence_proves_nothing_and_fails_nothing(cluster: Any, rank: Any) -> None:
    rank(WHOLE, "INFO Application startup complete.")
    said = cluster.play(VERIFY, **SMALL)
    assert said.rc == 0
    assert "proven=False" in said.text
