"""The collection's recipes rendered for an example cluster: what unit tests and the golden files share."""

from __future__ import annotations

import json
from pathlib import Path

from ansible_collections.gb10.fleet.plugins.action.topology import read_recipe
from ansible_collections.gb10.fleet.plugins.module_utils import _rank_spec
from ansible_collections.gb10.fleet.plugins.module_utils._recipe_layers import resolve

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests/fixtures/golden"
RECIPES = sorted(p.stem for p in (ROOT / "recipes").glob("*.yml"))
# What a fabric role finds on a node; the seed leaves these to the reader ("each node's own").
FABRIC = {
    "NCCL_SOCKET_IFNAME": "enp1s0f0np0",
    "GLOO_SOCKET_IFNAME": "enp1s0f0np0",
    "TP_SOCKET_IFNAME": "enp1s0f0np0",
    "MN_IF_NAME": "enp1s0f0np0",
    "NCCL_IB_HCA": "rocep1s0f0",
    "NCCL_IB_GID_INDEX": "3",
    "NCCL_IB_ADDR_RANGE": "198.51.100.0/24",
}


# What a recipe leaves to its site.
SITE = {"glm-5.2-reap-469b": {"image": {"reference": "registry.example.org/vllm-node-dsv4-cl:latest"}}}


def recipe(name: str, **overrides: object) -> dict:
    layers = [("recipe", read_recipe(name, [])[1]), ("inventory", SITE.get(name)), ("command line", overrides)]
    return resolve(name, layers).recipe


def spec(name: str, rank: int, fabric: dict | None = None, **overrides: object) -> dict:
    data = recipe(name, **overrides)
    topology = {
        "cluster": "alpha",
        "rank": rank,
        "size": data["nodes"],
        "address": f"198.51.100.{11 + rank}",
        "head_address": "198.51.100.11",
        "models_dir": "/var/tmp/models",
    }
    return _rank_spec.rank_spec(data, topology, {"env": FABRIC if fabric is None else fabric})


def engine_flags(words: list[str]) -> dict[str, object]:
    """Flags of `vllm serve` as a mapping; JSON values as what they mean."""
    flags: dict[str, object] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name = word[2:]
            flags[name] = True
        else:
            flags[name] = json.loads(word) if word.startswith("{") else word
    return flags
