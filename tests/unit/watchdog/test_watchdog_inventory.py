"""What the watchdog starts is what the person's own inventory starts."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from ansible_collections.gb10.fleet.plugins.action.topology import load_recipe
from ansible_collections.gb10.fleet.plugins.module_utils._rank_spec import rank_spec, spec_hash
from ansible_collections.gb10.fleet.plugins.module_utils._watchdog import host_variables, written_recipe

ROOT = Path(__file__).resolve().parents[3]
TOPOLOGY = {
    "cluster": "alpha",
    "rank": 0,
    "address": "198.51.100.11",
    "head_address": "198.51.100.11",
    "models_dir": "/var/tmp/models",
}


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "recipes").glob("*.yml")))
def test_a_resolved_recipe_written_down_is_the_same_recipe(name: str, tmp_path: Path) -> None:
    # What a site has to bring: an image of its own, and folders of mods.
    over = {"env": {"X_TEST": "1"}, "image": {"reference": "registry.example.org/engine:1"}, "mods": []}
    recipe = load_recipe(name, [str(ROOT / "recipes")], over)
    (tmp_path / f"{name}.yml").write_text(
        yaml.safe_dump(written_recipe(recipe, str(tmp_path)), sort_keys=False), encoding="utf-8"
    )
    again = load_recipe(name, [str(tmp_path)])
    topology = {**TOPOLOGY, "size": recipe["nodes"]}
    assert spec_hash(rank_spec(again, topology, {})) == spec_hash(rank_spec(recipe, topology, {}))


def test_secrets_and_what_the_recipe_holds_stay_away() -> None:
    variables = {
        "cluster": "alpha",
        "rank": 0,
        "recipe": "glm",
        "image_registry": "198.18.0.2:5000",
        "image_pull_timeout_s": 9,
        "checkpoint_token": "hf_x",
        "gateway_keys": [{"key": "sk-x"}],
        "ansible_become_password": "x",
        "ansible_ssh_private_key_file": "~/.ssh/id",
        "watchdog_webhook": "https://x",
        "topology_rank": 0,
        "memory_guard_started": {"changed": True},
    }
    names = {"image_pull_timeout_s", "checkpoint_token", "gateway_keys", "watchdog_webhook", "image_registry"}
    assert host_variables(variables, names) == {"cluster": "alpha", "image_pull_timeout_s": 9, "rank": 0}
