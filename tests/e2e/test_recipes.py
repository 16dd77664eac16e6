"""Recipes on the sandbox: refused before a stop, a user's own, the stand-ins of TensorFold and the kit, Ray, pipelines."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import docker
import pytest
import ray_image
import yaml
from fleet import (
    ENDPOINT,
    HEAD,
    ROOT,
    SANDBOX,
    WORKER,
    Node,
    recap,
    run_playbook,
    sandbox_inventory,
    sandbox_nodes,
    stream_completion,
)

MINE = Path(__file__).with_name("recipes")
FAKE = {"reference": "sandbox/fake-engine:1", "digest": None, "platform": None, "size_gib": 0.1}
TINY = {"repo": "sandbox/tiny-llama", "size_gib": 0.001, "quantization": None}


def serve(
    recipe: str, inventory: Path | str = SANDBOX, dirs: Path | None = None, **overrides: Any
) -> subprocess.CompletedProcess[str]:
    variables = {"recipe": recipe, "recipe_overrides": overrides, **({"recipe_dirs": [str(dirs)]} if dirs else {})}
    return run_playbook("serve", inventory, "-e", json.dumps(variables))


def served(
    recipe: str, inventory: Path | str = SANDBOX, dirs: Path | None = None, **overrides: Any
) -> subprocess.CompletedProcess[str]:
    done = serve(recipe, inventory, dirs, **overrides)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return done


def identities(nodes: dict[str, Node]) -> dict[str, tuple[str, str]]:
    return {name: node.rank_identity() for name, node in nodes.items()}


def test_a_typo_in_a_flag_is_refused_while_the_old_engine_answers(nodes) -> None:
    """Real vLLM's own parser, before the stop: the same containers run on, and answer."""
    served("sandbox-tiny")
    before = identities(nodes)
    done = serve("sandbox-tiny", args={"max-modl-len": 1024})
    told = " ".join(done.stdout.split())
    assert done.returncode == 2, told[-3000:]
    assert "unrecognized arguments: --max-modl-len" in told
    assert "Did you mean --max-model-len?" in told
    assert identities(nodes) == before
    assert stream_completion(ENDPOINT, "tiny").strip()


def test_a_fifth_recipe_of_a_users_own(nodes, tmp_path) -> None:
    """Written by docs/recipes.md, outside the collection; no code is touched."""
    guide = (ROOT / "docs/recipes.md").read_text()
    text = guide.split("```yaml\n# recipes/mine.yml\n")[1].split("```")[0]
    mine = yaml.safe_load(text)
    mine |= {"image": {"reference": "sandbox/fake-engine:1"}, "checkpoint": {"repo": "sandbox/tiny-llama"}}
    mine["guard"] = {"floor_gib": 1}
    (tmp_path / "mine.yml").write_text(yaml.safe_dump(mine, sort_keys=False))
    served("mine", dirs=tmp_path)
    assert stream_completion(ENDPOINT, mine["served_name"]).strip()
    first = identities(nodes)
    done = served("mine", dirs=tmp_path, expect={"decode_tokens_per_s": 1})
    assert identities(nodes) == first, "an expectation restarts nothing"
    assert {host: counters["changed"] for host, counters in recap(done.stdout).items()} == {HEAD: 0, WORKER: 0}
    served("mine", dirs=tmp_path, options={"context": 1024})
    second = identities(nodes)
    assert all(second[name] != first[name] for name in nodes), "one argument restarts all ranks"
    served("mine", dirs=tmp_path, options={"context": 1024})
    assert identities(nodes) == second, "and once"


def test_tensorfold_as_its_recipe_says(nodes) -> None:
    """The stand-in checks arguments and environment, prints none of vLLM's lines, and answers."""
    fold = {"image": FAKE, "checkpoint": {**TINY, "layout": "flat", "revision": None}, "guard": {"floor_gib": 1}}
    served("glm-5.3-flash-tensorfold", options={"drafter": "mtp", "memory_reserve_gib": 20}, **fold)
    assert stream_completion("http://198.18.0.11:8888", "GLM-5.3-Flash-EXL3").strip()
    for rank, node in enumerate(nodes.values()):
        (found,) = node.ranks()
        assert found["Config"]["Cmd"][:2] == ["tensorfold", "serve"]
        words = found["Config"]["Cmd"]
        assert words[words.index("--rank") + 1] == str(rank)
        assert words[words.index("--parallel") + 1] == "1"
        assert "TENSORFOLD_MEMORY_RESERVE_GIB=20" in found["Config"]["Env"]


def test_a_window_that_does_not_fit_is_taken_once(nodes, tmp_path) -> None:
    """The stand-in names 524288, as TensorFold does: one launch later it serves with that; the next run changes nothing."""
    fold = {"image": FAKE, "checkpoint": {**TINY, "layout": "flat", "revision": None}, "guard": {"floor_gib": 1}}
    fold |= {"options": {"drafter": "mtp"}, "env": {"FAKE_ENGINE_WINDOW": "524288"}}
    learned = ("-e", json.dumps({"readiness_learned_dir": str(tmp_path)}))
    words = ("-e", json.dumps({"recipe": "glm-5.3-flash-tensorfold", "recipe_overrides": fold}), *learned)
    run_playbook("stop", SANDBOX)
    done = run_playbook("serve", SANDBOX, *words)
    assert done.returncode == 0, done.stdout[-6000:]
    assert "1048576 tokens do not fit: starting once more with a window of 524288" in done.stdout
    for node in nodes.values():
        (found,) = node.ranks()
        assert found["Config"]["Cmd"][found["Config"]["Cmd"].index("--context") + 1] == "524288"
    before = identities(nodes)
    assert run_playbook("serve", SANDBOX, *words).returncode == 0
    assert identities(nodes) == before


def test_mods_are_laid_over_the_image_and_a_moved_image_is_refused(nodes, tmp_path) -> None:
    folder = tmp_path / "patches"
    folder.mkdir()
    (folder / "run.sh").write_text('echo "[patches] applied"\n')
    replaced = {
        "name": "other-answer",
        "target": "/opt/fake-engine/fake_engine/api.py",
        "replace": [{"anchor": 'ANSWER = "This is the fake engine', "with": 'ANSWER = "This is the patched engine'}],
    }
    started = {"name": "patches", "folder": str(folder), "log": ["[patches] applied"]}
    served("sandbox-fake", mods=[replaced, started])
    assert "This is the patched engine" in stream_completion(ENDPOINT, "fake")
    before = identities(nodes)
    done = serve("sandbox-fake", mods=[{**replaced, "original_sha256": "0" * 64}, started])
    told = " ".join(done.stdout.split())
    assert done.returncode == 2
    assert f"the mod was made for {'0' * 64}. The image moved on" in told
    assert identities(nodes) == before
    silent = {**started, "log": ["[patches] never said"]}
    done = serve("sandbox-fake", mods=[silent])
    assert "mods patches is not in effect: the container never said '[patches] never said'" in " ".join(
        done.stdout.split()
    )


def test_the_kit_runs_its_patches_first(nodes) -> None:
    kit = {"image": FAKE, "checkpoint": {**TINY, "layout": "flat", "revision": None}, "guard": {"floor_gib": 1}}
    served(
        "glm-5.3-flash-exl3", options={"drafter": "none", "spin_wait_ms": 16, "utilization": 0.1}, warmup="chat", **kit
    )
    assert stream_completion("http://198.18.0.11:8888", "GLM-5.3-Flash-EXL3").strip()
    for node in nodes.values():
        log = node.run("docker", "logs", "glm53-exl3")
        assert log.index("[kit] spin wait 16") < log.index("[kit] dense fp8: dense,kda") < log.index("vLLM")


def test_pipeline_parallel_2_with_real_vllm(nodes) -> None:
    """On a CPU it needs compile mode instead of eager (facts; fixture pp2_success_head.log)."""
    compiled = {"enforce-eager": None, "compilation-config": {"mode": 1, "backend": "eager"}}
    served("sandbox-tiny", parallel={"tensor": 1, "pipeline": 2}, args=compiled, env={"TORCH_COMPILE_DISABLE": "0"})
    assert stream_completion(ENDPOINT, "tiny").strip()
    assert "PP rank 1" in nodes[WORKER].run("docker", "logs", "gb10-tiny")


def test_speculative_ngram_on_one_node(tmp_path) -> None:
    ngram = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    inventory = sandbox_inventory(tmp_path, 1)
    served("sandbox-tiny", inventory, nodes=1, parallel={"tensor": 1}, args={"speculative-config": ngram})
    assert stream_completion(ENDPOINT, "tiny", "one two three one two three one two").strip()


# --- three nodes ---------------------------------------------------------------------------------------------------------
@pytest.fixture
def three(tmp_path) -> Iterator[Path]:
    done = run_playbook("sandbox", "localhost,", "--tags", "up", "-e", '{"sandbox_nodes": 3}')
    assert done.returncode == 0, done.stdout[-4000:]
    yield sandbox_inventory(tmp_path, 3)
    client = docker.from_env()
    client.containers.get("gb10-sandbox-spark-03").remove(force=True)
    client.volumes.get("gb10-sandbox-spark-03-docker").remove(force=True)


def test_a_real_ray_cluster_of_three_nodes(three) -> None:
    """Formed, a job run on every node, cleaned up, no process left. vLLM's CPU build refuses Ray, so the fake engine is on it."""
    ray_image.build()
    deep = [str(ROOT / ".sandbox/models/sandbox/tiny-deep"), "--layers=3"]
    subprocess.run(
        [sys.executable, str(ROOT / "roles/sandbox/files/engines/tiny_model.py"), *deep], check=True, timeout=60
    )
    nodes = sandbox_nodes("spark-01", "spark-02", "spark-03")
    run_playbook("stop", three)  # whatever ran on two of the nodes
    served("sandbox-ray", three, MINE)
    assert stream_completion(ENDPOINT, "ray").strip()
    log = nodes["spark-01"].run("docker", "logs", "gb10-ray")
    for address in ("198.51.100.11", "198.51.100.12", "198.51.100.13"):
        assert f"ip={address})" in log, "a task of the job ran on each node"
    before = identities(nodes)
    served("sandbox-ray", three, MINE)
    assert identities(nodes) == before
    done = run_playbook("stop", three)
    assert done.returncode == 0, done.stdout
    for node in nodes.values():
        assert node.ranks() == []
        assert [line for line in node.run("ps", "-eo", "args").splitlines() if "ray" in line.split("/")[-1]] == []
