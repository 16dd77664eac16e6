"""What playbooks/render.yml shows of a cluster with a gateway: no host is touched."""

from __future__ import annotations

from fleet import run_playbook

LANES = (
    '{"recipe_overrides": {"lanes": {"chat": {"priority": 0}, "batch": {"priority": 10}}%s}, "gateway_enabled": true}'
)


def test_the_engine_is_bound_to_loopback_and_orders_by_priority() -> None:
    done = run_playbook("render", "inventories/spark", "-e", LANES % "", timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    for words in ("--host 127.0.0.1", "--scheduling-policy priority"):
        assert done.stdout.count(words) == 2, words  # on both ranks


def test_lanes_that_cannot_work_end_before_any_host_is_touched() -> None:
    done = run_playbook("serve", "inventories/spark", "-e", LANES % ', "options": {"parallel": 1}', timeout=120)
    assert done.returncode != 0
    said = " ".join(done.stdout.split())
    assert "cluster alpha, recipe glm-5.3-flash-nvfp4: args.max-num-seqs is 1: lanes can only take turns" in said
    assert "Look at every rank" not in said
