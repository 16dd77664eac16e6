"""A launch that fails says which node, which rank and why, leaves nothing running, and never touches another cluster."""

from __future__ import annotations

import json
import shutil
import time

import pytest
import yaml
from fleet import HEAD, ROOT, SANDBOX, WORKER, recap, run_playbook, start_playbook, wait_until


def overrides(**recipe: object) -> tuple[str, str]:
    return "-e", json.dumps({"recipe_overrides": recipe})


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("rank1:die@loading", ["spark-02", "rank 1"]),
        ("rank0:oom@loading", ["spark-01", "rank 0", "CUDA out of memory"]),
    ],
)
def test_a_fault_is_named_and_nothing_is_left(stopped, nodes, fault: str, words: list[str]) -> None:
    done = run_playbook("serve", SANDBOX, "-e", "recipe=sandbox-fake", *overrides(env={"FAKE_ENGINE_FAULT": fault}))
    assert done.returncode == 2, done.stdout
    told = " ".join(done.stdout.split())
    assert [word for word in words if word not in told] == []
    assert all(node.ranks() == [] for node in nodes.values())


@pytest.mark.parametrize("recipe", ["sandbox-fake", "sandbox-tiny"])
def test_worker_killed_while_the_head_loads(stopped, nodes, recipe: str) -> None:
    """The run ends with the node, the rank and its last lines, and leaves nothing running."""
    container = {"sandbox-fake": "gb10-fake", "sandbox-tiny": "gb10-tiny"}[recipe]
    slow = overrides(env={"FAKE_ENGINE_DELAYS": "loading=60"}) if recipe == "sandbox-fake" else ()
    run = start_playbook("serve", SANDBOX, "-e", f"recipe={recipe}", *slow)
    wait_until("the head is started", nodes[HEAD].ranks)
    nodes[WORKER].run("docker", "kill", container)
    killed = time.monotonic()
    told, _ = run.communicate(timeout=900)
    print(f"{recipe}: worker killed -> serve.yml ended after {time.monotonic() - killed:.1f} s")
    assert run.returncode == 2, told
    assert "spark-02" in told
    assert "rank 1" in told
    assert all(node.ranks() == [] for node in nodes.values())


def test_two_clusters_one_with_a_broken_image(stopped, nodes, tmp_path) -> None:
    """beta's image does not exist: alpha serves all the same, the exit code says that one failed, the recap which."""
    inventory = tmp_path / "inventories/two"
    shutil.copytree(ROOT / SANDBOX, inventory)
    (tmp_path / ".sandbox").symlink_to(ROOT / ".sandbox")
    data = yaml.safe_load((inventory / "hosts.yml").read_text())
    single = {"nodes": 1, "parallel": {"tensor": 1}}
    data["all"]["hosts"][HEAD] |= {"recipe_overrides": single}
    broken = {**single, "image": {"reference": "sandbox/no-such-image:1"}}
    data["all"]["hosts"][WORKER] |= {"cluster": "beta", "rank": 0, "recipe_overrides": broken}
    (inventory / "hosts.yml").write_text(yaml.safe_dump(data))
    done = run_playbook("serve", inventory, "-e", "recipe=sandbox-fake")
    assert done.returncode == 2, done.stdout
    failed = {host: counters["failed"] for host, counters in recap(done.stdout).items()}
    assert failed[HEAD] == 0
    assert failed[WORKER] > 0
    assert "no-such-image" in done.stdout
    assert [rank["State"]["Running"] for rank in nodes[HEAD].ranks()] == [True]
    assert nodes[WORKER].ranks() == []
