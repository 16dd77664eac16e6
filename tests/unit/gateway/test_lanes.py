"""Lanes of a recipe: what is filled in, and what is refused because it cannot work."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from ansible_collections.gb10.fleet.plugins.action.topology import load_recipe
from ansible_collections.gb10.fleet.plugins.module_utils._lanes import gateway_config, key_records
from ansible_collections.gb10.fleet.plugins.module_utils._rank_spec import rank_spec
from ansible_collections.gb10.fleet.plugins.module_utils._recipe import RecipeError

# Seed "GLM-5.3-Flash on 2× NVIDIA DGX Spark": two lanes, six slots.
TWO = {
    "chat": {"priority": 0, "reasoning_effort": "low"},
    "batch": {"priority": 10, "reasoning_effort": "high"},
}


def glm(lanes: dict[str, Any], **more: Any) -> dict[str, Any]:
    return load_recipe("glm-5.3-flash-nvfp4", [], {"lanes": lanes, **more})


def test_what_a_recipe_leaves_open_is_filled_in() -> None:
    recipe = glm(TWO)
    chat, batch = recipe["lanes"]["chat"], recipe["lanes"]["batch"]
    assert (chat["aliases"], chat["max_concurrent"]) == (["glm-5.3-flash"], 6)
    assert (batch["aliases"], batch["max_concurrent"]) == (["glm-5.3-flash-batch"], 5)
    argv = rank_spec(
        recipe,
        {
            "cluster": "a",
            "rank": 0,
            "size": 2,
            "address": "198.51.100.1",
            "head_address": "198.51.100.1",
            "models_dir": "/m",
        },
        {"env": {}},
    )["argv"]
    assert argv[argv.index("--scheduling-policy") + 1] == "priority"


def test_without_lanes_nothing_changes() -> None:
    recipe = load_recipe("glm-5.3-flash-nvfp4", [])
    assert "scheduling-policy" not in recipe["args"] and recipe["lanes"] == {}
    assert gateway_config(recipe, {"port": 8080, "tls_key": None}) == {
        "upstream": "http://127.0.0.1:8000",
        "model": "glm-5.3-flash",
        "max_model_len": 262144,
        "lanes": {"all": {"aliases": ["glm-5.3-flash"], "max_concurrent": 6}},
        "port": 8080,
    }


def test_the_gateway_forces_what_the_lane_says() -> None:
    lanes = gateway_config(glm({**TWO, "batch": {**TWO["batch"], "forced": {"top_k": 40}}}), {})["lanes"]
    assert lanes["chat"]["forced"] == {"priority": 0, "reasoning_effort": "low"}
    assert lanes["batch"]["forced"] == {"priority": 10, "reasoning_effort": "high", "top_k": 40}


def test_tensorfold_has_a_word_for_what_gives_way() -> None:
    recipe = load_recipe(
        "glm-5.3-flash-tensorfold",
        [],
        {"lanes": {"chat": {"reasoning_effort": "low"}, "batch": {"priority": "background"}}},
    )
    assert recipe["lanes"]["batch"]["max_concurrent"] == 3
    assert "scheduling-policy" not in recipe["args"]
    lanes = gateway_config(recipe, {})["lanes"]
    assert (lanes["chat"]["aliases"], lanes["chat"]["forced"]) == (["GLM-5.3-Flash-EXL3"], {"reasoning_effort": "low"})
    assert lanes["batch"]["forced"] == {"priority": "background"}


@pytest.mark.parametrize(
    ("lanes", "more", "sentence"),
    [
        (TWO, {"options": {"parallel": 1}}, "args.max-num-seqs is 1: lanes can only take turns"),
        (TWO, {"args": {"max-num-seqs": None}}, "args.max-num-seqs is missing: lanes share the engine's slots"),
        (
            {**TWO, "batch": {"priority": 10, "max_concurrent": 6}},
            {},
            "lanes batch take 6 of the engine's 6 slots (args.max-num-seqs): lane chat would wait until one of their requests "
            "ends. Let their max_concurrent add up to 5 or less.",
        ),
        (
            {
                "chat": {"priority": 0},
                "a": {"priority": 5, "max_concurrent": 3},
                "b": {"priority": 6, "max_concurrent": 3},
            },
            {},
            "lanes a, b take 6 of the engine's 6 slots",
        ),
        (
            TWO,
            {"args": {"scheduling-policy": "fcfs"}},
            "args.scheduling-policy is fcfs, under which vLLM silently ignores",
        ),
        (
            {"a": {"priority": 1}, "b": {"priority": 1}},
            {},
            "lanes a, b all have the priority 1: no request would go first.",
        ),
        ({"a": {"priority": "background"}}, {}, "lanes.a.priority is 'background', wanted a whole number"),
        ({"a": {}}, {}, "lanes.a.priority is None, wanted a whole number"),
        (
            {"a": {"priority": 0, "aliases": ["x"]}, "b": {"priority": 1, "aliases": ["x"]}},
            {},
            "lanes share the alias x",
        ),
        ({"a": {"priority": 0, "forced": {"priority": 3}}}, {}, "lanes.a.forced.priority has a place of its own"),
        (
            {"a": {"priority": 0, "reasoning_effort": "huge"}},
            {},
            "lanes.a.reasoning_effort is 'huge', wanted one of none, minimal",
        ),
        ({"a": {"prio": 0}}, {}, "lanes.a.prio is not a key of a recipe: did you mean priority?"),
        ({"a b": {"priority": 0}}, {}, "lanes.a b is not a name of letters"),
    ],
)
def test_lanes_that_cannot_work(lanes: dict[str, Any], more: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RecipeError) as error:
        glm(lanes, **more)
    assert str(error.value).startswith(sentence)


def test_keys_reach_a_node_as_hashes() -> None:
    secret = "sk-0123456789abcdef"
    digest = hashlib.sha256(secret.encode()).hexdigest()
    records = key_records(
        [{"name": "alice", "key": secret, "lanes": ["chat"]}, {"name": "bob", "sha256": digest.upper()}], ["chat"]
    )
    assert records == [{"name": "alice", "sha256": digest, "lanes": ["chat"]}, {"name": "bob", "sha256": digest}]


@pytest.mark.parametrize(
    ("key", "sentence"),
    [
        ({"name": "a", "key": "short"}, "gateway_keys, a: the key has 5 characters, wanted 16 or more."),
        ({"name": "a"}, "gateway_keys, a: give key (from a vault) or sha256, one of them."),
        ({"name": "a", "sha256": "12"}, "gateway_keys, a: sha256 is no sha256"),
        ({"name": "a b", "sha256": "0" * 64}, "gateway_keys[0].name is 'a b'"),
        (
            {"name": "a", "sha256": "0" * 64, "lanes": ["bulk"]},
            "gateway_keys, a: there is no lane bulk; this recipe has chat.",
        ),
        ({"name": "a", "sha256": "0" * 64, "lane": "chat"}, "gateway_keys, a: lane is not known"),
    ],
)
def test_a_key_that_cannot_be_used_is_named(key: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=r".") as error:
        key_records([key], ["chat"])
    assert str(error.value).startswith(sentence)
