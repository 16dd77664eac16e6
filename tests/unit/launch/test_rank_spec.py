"""The rank spec against the seed's own `docker run`, and the rules that keep the ranks of a cluster alike."""

from __future__ import annotations

import json
import shlex

import pytest
from rendered import FABRIC, GOLDEN, RECIPES, ROOT, engine_flags, recipe, spec

from ansible_collections.gb10.fleet.plugins.filter.rank_spec import with_fabric
from ansible_collections.gb10.fleet.plugins.module_utils import _rank_spec

SEED = ROOT / "tests/fixtures/seeds/glm-5.3-flash-nvfp4.docker-run.txt"


def docker_options(words: list[str]) -> tuple[set[tuple[str, str]], dict[str, str]]:
    """Options of `docker run` as a set of (long name, value), and the environment as a mapping."""
    long = {"-d": "--detach", "-v": "--volume", "-e": "--env"}
    options, env, rest = set(), {}, list(words)
    while rest:
        name = long.get(rest.pop(0)) or words[len(words) - len(rest) - 1]
        value = ""
        if "=" in name:
            name, value = name.split("=", 1)
        elif rest and not rest[0].startswith("-"):
            value = rest.pop(0)
        if name == "--env":
            key, _, text = value.partition("=")
            env[key] = text
        else:
            options.add((name, value))
    return options, env


def seed_command() -> tuple[set[tuple[str, str]], dict[str, str], dict[str, object]]:
    text = SEED.read_text().split("\n", 1)[1].replace("\\ ", "").replace("<0 on head, 1 on worker>", "RANK")
    words = shlex.split(text)[2:]
    image = words.index("$IMAGE")
    options, env = docker_options(words[:image])
    return options, env, engine_flags(words[image + 2 :])


@pytest.mark.parametrize("rank", [0, 1])
def test_seed_command_is_reproduced_flag_for_flag(rank: int) -> None:
    """Seed "Running GLM-5.3-Flash on two DGX Sparks", step 5: the published command, and nothing that it does not have."""
    seed_options, seed_env, seed_flags = seed_command()
    ours = spec("glm-5.3-flash-nvfp4", rank, args={"kv-cache-memory": 1})
    words = _rank_spec.docker_run_argv(ours)[2:]
    image = words.index(ours["image"])
    options, env = docker_options(words[:image])

    # The engine: its own placeholders (empty in the published text) filled in, `--headless` on the worker only.
    flags = engine_flags(ours["argv"][1:])
    filled = {**seed_flags, "kv-cache-memory": "1", "node-rank": str(rank), "master-addr": "198.51.100.11"}
    assert flags == {**filled, **({"headless": True} if rank else {})}
    assert (ours["argv"][-1] == "--headless") is bool(rank)

    # The environment: every variable of the seed, the empty placeholders with the node's own value.
    own = {"VLLM_HOST_IP": f"198.51.100.{11 + rank}", **FABRIC}
    assert env == {name: value or own[name] for name, value in seed_env.items()}

    # The container: the seed's options, with the seed's own paths, and four additions, each with its reason.
    model = "/var/tmp/models/GLM-5.3-Flash-NVFP4-redhat"
    paths = {"$MODEL_PATH:$MODEL_PATH:ro": f"{model}:{model}:ro", "$CACHE_PATH:/cache": "/var/tmp/cache:/cache"}
    seed_options = {(name, paths.get(value, value)) for name, value in seed_options}
    added = {o for o in options - seed_options if o[0] != "--label"}
    assert seed_options <= options
    assert added == {
        ("--init", ""),  # zombies of Ray workers (case launch-no-init)
        ("--stop-timeout", "60"),  # a head in its rendezvous ignores SIGTERM
        ("--entrypoint", "vllm"),  # an api_server entrypoint ignores --headless (case launch-apiserver-entrypoint)
    }


def test_launch_headless() -> None:
    """Exactly one rank without --headless, and it is rank 0; a group that breaks this is refused."""
    ranks = [spec("glm-5.3-flash-nvfp4", r) for r in (0, 1)]
    _rank_spec.check_group(ranks)
    ranks[1]["argv"].remove("--headless")
    with pytest.raises(_rank_spec.RankSpecError, match="rank 1 has --headless 0 times"):
        _rank_spec.check_group(ranks)


def test_launch_args_mismatch() -> None:
    """Any difference outside the allow-list is named, with both values."""
    ranks = [spec("glm-5.3-flash-nvfp4", 0), spec("glm-5.3-flash-nvfp4", 1, options={"parallel": 4})]
    with pytest.raises(_rank_spec.RankSpecError, match=r"rank 1 differs from rank 0 in argv"):
        _rank_spec.check_group(ranks)
    ranks = [spec("glm-5.3-flash-nvfp4", 0), spec("glm-5.3-flash-nvfp4", 1, env={"NCCL_NET": "Socket"})]
    with pytest.raises(_rank_spec.RankSpecError, match="NCCL_NET is 'IB' on rank 0 and 'Socket' here"):
        _rank_spec.check_group(ranks)


def test_net_gid_drift_never_renders_an_empty_value() -> None:
    """An empty NCCL_IB_GID_INDEX is index 0 (fe80::), so "automatic" is a variable that is absent."""
    ours = spec("glm-5.3-flash-nvfp4", 0, fabric={"NCCL_IB_GID_INDEX": "", "NCCL_IB_HCA": None})
    assert "NCCL_IB_GID_INDEX" not in ours["env"]
    assert "NCCL_IB_HCA" not in ours["env"]
    assert "" not in with_fabric(ours, {"NCCL_IB_GID_INDEX": ""})["env"].values()


def test_net_gid_drift_restarts_nothing() -> None:
    """The hash is that of what is declared: a GID index found anew at the next run is no reason to reload a model."""
    declared = spec("glm-5.3-flash-nvfp4", 0, fabric={})
    label = _rank_spec.spec_hash(declared)
    started = with_fabric(_rank_spec.labelled(declared, label), {"NCCL_IB_GID_INDEX": "4"})
    assert started["env"]["NCCL_IB_GID_INDEX"] == "4"
    assert (
        started["labels"][_rank_spec.LABEL_SPEC]
        == label
        == _rank_spec.spec_hash(spec("glm-5.3-flash-nvfp4", 0, fabric={}))
    )


def test_hash_follows_what_starts_a_container_and_nothing_else() -> None:
    base = _rank_spec.spec_hash(spec("glm-5.3-flash-nvfp4", 0))
    assert base != _rank_spec.spec_hash(spec("glm-5.3-flash-nvfp4", 0, options={"parallel": 4}))
    assert base == _rank_spec.spec_hash(spec("glm-5.3-flash-nvfp4", 0, expect={"decode_tokens_per_s": 1}))


def test_declared_fabric_wins_over_what_the_node_found() -> None:
    ours = with_fabric(spec("glm-5.3-flash-nvfp4", 0, fabric={"NCCL_IB_HCA": "mlx5_0"}), FABRIC)
    assert ours["env"]["NCCL_IB_HCA"] == "mlx5_0"
    assert ours["env"]["NCCL_SOCKET_IFNAME"] == "enp1s0f0np0"


@pytest.mark.parametrize(
    ("reference", "digest", "wanted"),
    [
        ("ghcr.io/a/b:tag", None, "ghcr.io/a/b:tag"),
        ("ghcr.io/a/b:tag", "sha256:" + "0" * 64, "ghcr.io/a/b@sha256:" + "0" * 64),
        ("198.18.0.2:5000/a/b", "sha256:" + "0" * 64, "198.18.0.2:5000/a/b@sha256:" + "0" * 64),
    ],
)
def test_image_is_pinned_by_digest_when_given(reference: str, digest: str | None, wanted: str) -> None:
    assert _rank_spec.image_name({"reference": reference, "digest": digest}) == wanted


def test_docker_run_text_is_what_the_argv_says() -> None:
    """What render.yml prints, read back by a shell, is the argv to the word (JSON values are quoted)."""
    ours = spec("glm-5.3-flash-nvfp4", 1)
    text = _rank_spec.docker_run_text(ours)
    assert shlex.split(text.replace("\\\n", " ")) == _rank_spec.docker_run_argv(ours)
    assert max(map(len, text.splitlines())) <= 120


@pytest.mark.parametrize("name", RECIPES)
def test_golden(name: str) -> None:
    """Every recipe, every rank, as recorded. After a wanted change: `python tests/utils/update_golden.py`, and read the diff."""
    for rank in range(recipe(name)["nodes"]):
        recorded = json.loads((GOLDEN / f"{name}.rank{rank}.json").read_text())
        assert spec(name, rank) == recorded
