"""Recipes: a mistake is one sentence that names the key."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from ansible_collections.gb10.fleet.plugins.action.topology import find_recipe, load_recipe
from ansible_collections.gb10.fleet.plugins.module_utils._recipe import RecipeError, merge, normalise, through_registry

ROOT = Path(__file__).resolve().parents[3]
NVFP4 = yaml.safe_load((ROOT / "recipes/glm-5.3-flash-nvfp4.yml").read_text())


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ({"checkpont": {}}, "checkpont is not a key of a recipe: did you mean checkpoint?"),
        ({"image": {"refrence": "x"}}, "image.refrence is not a key of a recipe: did you mean reference?"),
        ({"nodes": "two"}, "nodes is 'two', wanted a whole number."),
        ({"nodes": True}, "nodes is True, wanted a whole number."),
        ({"nodes": 3}, "parallel.tensor × parallel.pipeline = 2, but nodes is 3: a GB10 has one GPU, make them equal."),
        ({"engine": "sglang"}, "engine is 'sglang', wanted one of vllm, tensorfold, kit."),
        ({"args": {"--max-model-len": 1}}, "args.--max-model-len is not a flag: write it without dashes in front"),
        (
            {"args": {"node_rank": 1}},
            "args.node_rank is written by the rank spec: set the inventory variable rank instead.",
        ),
        (
            {"args": {"gpu-memory-utilization": 1.7}},
            "args.gpu-memory-utilization is 1.7, wanted a share of memory between 0 and 1 (this recipe",
        ),
        ({"image": {"digest": "sha256:12"}}, "image.digest is 'sha256:12', wanted sha256: and 64 hexadecimal digits."),
        (
            {"checkpoint": {"revision": "main"}},
            "checkpoint.revision is 'main', wanted a full commit of 40 hexadecimal digits.",
        ),
        (
            {"image": {"build": {"context": "a", "repository": "https://example.org/b"}}},
            "image.build wants context (a folder of the controller) or repository (with commit), one of them.",
        ),
        ({"host": {"sysctl": {}}}, "host.sysctl is not a key of a recipe: did you mean sysctls?"),
        ({"env": {"A": True}}, "env.A is True, wanted text or a number (quote true and false)."),
        ({"served_name": None}, "served_name is missing: every recipe needs it."),
        (
            {"checkpoint": {"repo": "LibertAIDAI/GLM-5.3-Flash-NVFP4"}},
            "checkpoint.repo LibertAIDAI/GLM-5.3-Flash-NVFP4 is refused: its ModelOpt quantization silently corrupts token ids "
            "(vllm-project/vllm#54150). Use RedHatAI/GLM-5.3-Flash-NVFP4.",
        ),
    ],
)
def test_a_mistake_is_one_sentence_that_names_the_key(overrides: dict, sentence: str) -> None:
    with pytest.raises(RecipeError) as error:
        normalise("r", merge(NVFP4, overrides))
    assert str(error.value).startswith(sentence)


def test_merge_lays_mappings_over_and_null_removes() -> None:
    merged = merge(NVFP4, {"args": {"max-num-seqs": 4, "moe-backend": None}, "description": None})
    assert merged["args"]["max-num-seqs"] == 4
    assert merged["args"]["block-size"] == 2304
    assert "moe-backend" not in merged["args"]
    assert "description" not in merged
    assert "moe-backend" in NVFP4["args"], "the recipe itself is not touched"


def test_users_own_recipe_comes_before_the_collections(tmp_path: Path) -> None:
    mine = tmp_path / "glm-5.3-flash-nvfp4.yml"
    mine.write_text("{}")
    assert find_recipe("glm-5.3-flash-nvfp4", [str(tmp_path)]) == mine
    assert find_recipe("glm-5.3-flash-nvfp4", []) == ROOT / "recipes/glm-5.3-flash-nvfp4.yml"
    assert find_recipe(str(mine), []) == mine


def test_an_unknown_recipe_names_the_nearest() -> None:
    with pytest.raises(RecipeError, match=r"there is no such recipe: did you mean glm-5\.3-flash-nvfp4\?"):
        find_recipe("glm-5.3-flash-nvp4", [])


def test_a_file_that_is_not_yaml_says_so(tmp_path: Path) -> None:
    (tmp_path / "bad.yml").write_text("a: [")
    with pytest.raises(RecipeError, match=r"bad\.yml is not YAML: while parsing"):
        load_recipe("bad", [str(tmp_path)])


@pytest.mark.parametrize(
    ("reference", "registry", "wanted"),
    [
        ("ghcr.io/a/b:1", "198.18.0.2:5000", "198.18.0.2:5000/a/b:1"),
        ("sandbox/fake-engine:1", "198.18.0.2:5000", "198.18.0.2:5000/sandbox/fake-engine:1"),
        ("localhost/b", "mirror.example.org/cache/", "mirror.example.org/cache/b"),
        ("ghcr.io/a/b:1", "", "ghcr.io/a/b:1"),
    ],
)
def test_a_sites_own_registry_takes_the_place_of_the_recipes(reference: str, registry: str, wanted: str) -> None:
    assert through_registry(reference, registry) == wanted
