"""The foundation: serve.yml to a real answer from a real two-node engine, and back."""

from __future__ import annotations

import json
import re
import subprocess
import time

import pytest
from fleet import (
    ENDPOINT,
    HEAD,
    SANDBOX,
    WORKER,
    recap,
    rendered,
    run_playbook,
    start_playbook,
    stream_completion,
    wait_until,
)


@pytest.fixture(scope="module")
def serving() -> subprocess.CompletedProcess[str]:
    done = run_playbook("serve", SANDBOX)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return done


def test_two_ranks_answer_with_tensor_parallel_2(serving, nodes) -> None:
    """The head's own line proves the group: `rank 0 in world size 2` (fixtures: success_head.log)."""
    assert stream_completion(ENDPOINT, "tiny").strip()
    log = nodes[HEAD].run("docker", "logs", "gb10-tiny")
    assert "rank 0 in world size 2 is assigned" in log
    assert "TP rank 0" in log
    assert "TP rank 1" in nodes[WORKER].run("docker", "logs", "gb10-tiny")


def test_a_second_run_changes_nothing(serving, nodes) -> None:
    before = {name: node.rank_identity() for name, node in nodes.items()}
    done = run_playbook("serve", SANDBOX)
    assert done.returncode == 0, done.stdout
    assert {host: counters["changed"] for host, counters in recap(done.stdout).items()} == {HEAD: 0, WORKER: 0}
    assert "2 of 2 ranks alive" in done.stdout
    assert {name: node.rank_identity() for name, node in nodes.items()} == before


def test_a_lane_or_an_expectation_restarts_nothing(serving, nodes) -> None:
    before = {name: node.rank_identity() for name, node in nodes.items()}
    done = run_playbook(
        "serve", SANDBOX, "-e", json.dumps({"recipe_overrides": {"expect": {"decode_tokens_per_s": 1}}})
    )
    assert done.returncode == 0, done.stdout
    assert {name: node.rank_identity() for name, node in nodes.items()} == before


def test_the_started_rank_is_what_render_prints(serving, nodes) -> None:
    """One rendered launcher: the container that runs has the command line and labels that render.yml prints."""
    commands = rendered(run_playbook("render", SANDBOX).stdout)
    for name, node in nodes.items():
        (rank,) = node.ranks()
        printed = " ".join(commands[name].split())
        assert f"--label gb10.fleet.spec={rank['Config']['Labels']['gb10.fleet.spec']}" in printed
        assert printed.endswith(" ".join([rank["Config"]["Image"], *rank["Config"]["Cmd"]]))
        assert rank["HostConfig"]["RestartPolicy"]["Name"] == "no"
        assert rank["HostConfig"]["Init"] is True


def test_net_gid_differs_each_rank_has_its_own_index(serving, nodes) -> None:
    """Index 3 on one node and 4 on the other, as a public case had it: a constant would be wrong on one of them."""
    indexes = {}
    for name, node in nodes.items():
        (rank,) = node.ranks()
        environment = dict(pair.split("=", 1) for pair in rank["Config"]["Env"])
        indexes[name] = environment["NCCL_IB_GID_INDEX"]
    assert indexes == {HEAD: "3", WORKER: "4"}


def test_status_shows_every_rank(serving) -> None:
    done = run_playbook("status", SANDBOX)
    assert re.search(r"spark-01\s+0\s+running\s+serving\s+tiny answers", done.stdout), done.stdout
    assert re.search(r"spark-02\s+1\s+running\s+serving", done.stdout), done.stdout


def test_stop_leaves_nothing_and_a_second_stop_changes_nothing(serving, nodes) -> None:
    done = run_playbook("stop", SANDBOX)
    assert done.returncode == 0, done.stdout
    assert {counters["changed"] for counters in recap(done.stdout).values()} == {1}
    for node in nodes.values():
        assert node.ranks() == []
    assert ":8000" not in nodes[HEAD].run("ss", "-ltn")
    again = run_playbook("stop", SANDBOX)
    assert {counters["changed"] for counters in recap(again.stdout).values()} == {0}


def test_check_mode_says_what_would_start_and_starts_nothing(stopped, nodes) -> None:
    done = run_playbook("serve", SANDBOX, "--check", "--diff")
    assert done.returncode == 0, done.stdout
    assert "alpha: to be launched, because spark-01: no rank container" in done.stdout
    assert {counters["changed"] > 0 for counters in recap(done.stdout).values()} == {True}
    assert all(node.ranks() == [] for node in nodes.values())


def test_worker_killed_while_the_head_loads(stopped, nodes) -> None:
    """The run ends with the node, the rank and its last lines, and leaves nothing running."""
    run = start_playbook("serve", SANDBOX)
    wait_until("the head is started", nodes[HEAD].ranks)
    nodes[WORKER].run("docker", "kill", "gb10-tiny")
    killed = time.monotonic()
    told, _ = run.communicate(timeout=600)
    print(f"worker killed -> serve.yml ended: {time.monotonic() - killed:.1f} s")
    assert run.returncode == 2, told
    assert "spark-02" in told
    assert "rank 1" in told
    assert all(node.ranks() == [] for node in nodes.values())
