"""Bad input ends before any host is touched, with a sentence that names it (the hosts of these inventories cannot be reached)."""

from __future__ import annotations

import pytest
from fleet import run_playbook

A = {"cluster": "alpha", "rank": 0, "ansible_host": "127.0.0.1", "fabric_address": "198.51.100.11"}
B = {"cluster": "alpha", "rank": 1, "ansible_host": "127.0.0.1", "fabric_address": "198.51.100.12"}
NVFP4 = {"recipe": "glm-5.3-flash-nvfp4"}


@pytest.mark.parametrize(
    ("hosts", "variables", "groups", "sentence"),
    [
        pytest.param(
            {"spark-01": A, "spark-02": {**B, "rank": 0}},
            NVFP4,
            {},
            "cluster alpha: rank 0 (the head) is given to spark-01, spark-02.",
            id="two rank 0",
        ),
        pytest.param(
            {"spark-01": A, "spark-02": {**B, "rank": 2}},
            NVFP4,
            {},
            "cluster alpha: rank 1 is missing (found spark-01 = 0, spark-02 = 2).",
            id="a hole in ranks",
        ),
        pytest.param(
            {"spark-01": A},
            NVFP4,
            {},
            "cluster alpha has 1 host (spark-01), its recipe wants 2.",
            id="node count differs from the recipe",
        ),
        pytest.param(
            {"spark-01": A, "spark-02": B},
            NVFP4,
            {"cluster_beta": {"hosts": {"spark-02": {}}}},
            "spark-02 is in two clusters",
            id="a host in two clusters",
        ),
        pytest.param(
            {"spark-01": A, "spark-02": {**B, "fabric_address": "198.51.100.11"}},
            NVFP4,
            {},
            "spark-01 and spark-02 have the same address 198.51.100.11.",
            id="two hosts with one address",
        ),
        pytest.param(
            {"spark-01": A, "spark-02": B},
            {"recipe": "glm-5.3-flash-nvp4"},
            {},
            "cluster alpha, recipe glm-5.3-flash-nvp4: there is no such recipe: did you mean glm-5.3-flash-nvfp4?",
            id="unknown recipe",
        ),
        pytest.param(
            {"spark-01": A, "spark-02": B},
            {**NVFP4, "recipe_overrides": {"prallel": {"tensor": 2}}},
            {},
            "cluster alpha, recipe glm-5.3-flash-nvfp4: prallel is not a key of a recipe: did you mean parallel?",
            id="misspelt override",
        ),
        pytest.param(
            {"spark-01": A, "spark-02": B},
            {**NVFP4, "recipe_overrides": {"args": {"gpu-memory-utilization": 1.7}}},
            {},
            "args.gpu-memory-utilization is 1.7, wanted a share of memory between 0 and 1",
            id="a utilization over 1",
        ),
        pytest.param(
            {"spark-01": A, "spark-02": {k: v for k, v in B.items() if k != "rank"}},
            NVFP4,
            {},
            "spark-02: rank is None, wanted a whole number",
            id="no rank",
        ),
        pytest.param(
            {"spark-01": A, "spark-02": B}, {}, {}, "recipe is None, wanted the name of a recipe", id="no recipe"
        ),
    ],
)
def test_bad_input(inventory, hosts, variables, groups, sentence) -> None:
    done = run_playbook("serve", inventory(hosts, variables, groups))
    told = " ".join(done.stdout.split())
    assert done.returncode == 2, done.stdout + done.stderr
    assert sentence in told
    assert "unreachable=1" not in told
    assert "Traceback" not in done.stdout + done.stderr


def test_misspelt_recipe_key(inventory, tmp_path) -> None:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes/mine.yml").write_text("nodes: 2\nserved_nam: x\n")
    done = run_playbook("serve", inventory({"spark-01": A, "spark-02": B}, {"recipe": "mine"}))
    assert "cluster alpha, recipe mine: served_nam is not a key of a recipe: did you mean served_name?" in " ".join(
        done.stdout.split()
    )
    assert done.returncode == 2


def test_a_bad_cluster_is_named_and_the_other_one_goes_on(inventory) -> None:
    """The mistake of alpha is told; beta goes on until its (unreachable) host is contacted."""
    beta = {"cluster": "beta", "rank": 0, "ansible_host": "127.0.0.1", "fabric_address": "198.51.100.21"}
    single = {"nodes": 1, "parallel": {"tensor": 1}}
    hosts = {"spark-01": {**A, "rank": 1}, "spark-03": {**beta, "recipe_overrides": single}}
    done = run_playbook("serve", inventory(hosts, NVFP4))
    told = " ".join(done.stdout.split())
    assert "cluster alpha: rank 0 is missing" in told
    assert "spark-03 : ok=1 changed=0 unreachable=1" in told


def test_limit_that_cuts_a_cluster_is_refused(inventory) -> None:
    done = run_playbook("serve", inventory({"spark-01": A, "spark-02": B}, NVFP4), "--limit", "spark-01")
    assert "cluster alpha: spark-02 is left out of this run." in " ".join(done.stdout.split())
    assert done.returncode == 2


def test_render_contacts_nothing_and_prints_headless_once() -> None:
    """`--headless` exactly once, last, on rank 1."""
    done = run_playbook("render", "inventories/spark")
    assert done.returncode == 0
    worker, head = done.stdout.split("# spark-01: cluster alpha, rank 0 of 2 (head)")
    assert worker.count("--headless") == 1
    assert worker.rstrip().endswith("--master-port 29521 \\\n  --headless")
    assert "--headless" not in head
