"""The collection's recipes: what each starts, held against its source; options, layers, and what the engine's parser knows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from rendered import RECIPES, ROOT, SITE, engine_flags, recipe, spec

from ansible_collections.gb10.fleet.plugins.action.topology import load_recipe, resolve_recipe
from ansible_collections.gb10.fleet.plugins.module_utils import _rank_spec
from ansible_collections.gb10.fleet.plugins.module_utils._recipe import RecipeError
from ansible_collections.gb10.fleet.plugins.module_utils._recipe_layers import explain, resolve

sys.path.insert(0, str(ROOT / "roles/sandbox/files/engines/fake-engine"))
from fake_engine import arguments

HUB = "/var/tmp/models/hub"
DFLASH2 = f"{HUB}/models--incoai--GLM-5.3-Flash-DFlash2/snapshots/bf582e4eacc1810f76656d1811693ff6c6737d2a"


def folders(base: Path) -> Path:
    """The folders of mods that recipes name, as a user's clones would lie beside the inventory."""
    for name in RECIPES:
        for mod in recipe(name)["mods"]:
            (base / mod["folder"]).mkdir(parents=True, exist_ok=True)
            (base / mod["folder"] / "run.sh").write_text("echo patched\n")
    return base


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_of_the_collection_is_valid(name: str, tmp_path: Path) -> None:
    found = resolve_recipe(name, [], ("inventory", SITE.get(name)), beside=(folders(tmp_path),))
    assert found.recipe["name"] == name
    assert found.warnings == []
    for mod in found.recipe["mods"]:
        assert len(mod["digest"]) == 64


@pytest.mark.parametrize("name", RECIPES)
def test_the_recorded_parser_knows_every_flag(name: str) -> None:
    """fixture vllm-cli-flags-0.32-cpu.json; what only a fork knows is listed in the recipe."""
    for rank in range(recipe(name)["nodes"]):
        words = _rank_spec.engine_words(spec(name, rank))
        if words[:1] != ["vllm"]:
            continue
        forks = {f"--{flag}" for flag in recipe(name)["fork_args"]}
        assert arguments.parse([w for w in words[1:] if w not in forks])["served_model_name"]


# --- against the sources -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("rank", [0, 1])
def test_tensorfold_command(rank: int) -> None:
    """The kit's start.sh at 05f75fde: `launch()`, with its defaults of scripts/config.sh."""
    ours = spec("glm-5.3-flash-tensorfold", rank)
    model = f"{HUB}/models--Mia-AiLab--GLM-5.3-Flash-EXL3-4bpw-TensorFold/snapshots/078455ffe6472f9a52fbc1139f58b9db2881b25c"
    head = " --name GLM-5.3-Flash-EXL3 --host 0.0.0.0 --port 8888" if rank == 0 else ""
    wanted = (
        f"tensorfold serve {model} --tp 2 --rank {rank} --master 198.51.100.11 --master-port 29551{head} --drafter {DFLASH2} "
        "--context 1048576 --parallel 4 --max-tokens 32768 --thinking --vision"
    )
    assert ours["argv"] == wanted.split()
    assert ours["entrypoint"] == [], "the image's own entrypoint is kept"
    assert (ours["init"], ours["shm_size"], ours["name"]) == (False, "16g", "glm53-flash-tf")


def test_tensorfold_environment_is_the_same_on_both_ranks() -> None:
    """Facts of the recipe; identical on both ranks but for what a node's own fabric says."""
    wanted = (
        "TF_GLM_MTP=auto TF_GLM_KV=fp8 TF_GLM_DENSE=q4 TF_GLM_COMM=roce TF_ROCE_MAX_KB=512 TF_ROCE_WAIT_S=300 "
        "TF_GLM_COPY_DRAFTS=1 TENSORFOLD_MEMORY_RESERVE_GIB=14.5 TF_GLM_CACHE_GIB=12.5 TF_GLM_SHARED_PREFIX=1 "
        "TENSORFOLD_NO_UPDATE_CHECK=1 TENSORFOLD_PEER_TIMEOUT_S=120 TF_GLM_MULTI_WATCHDOG_S=300 TF_GLM_MULTI_WATCHDOG_EXIT=1 "
        "HF_HUB_OFFLINE=1"
    )
    ranks = [spec("glm-5.3-flash-tensorfold", r) for r in (0, 1)]
    _rank_spec.check_group(ranks)
    for ours in ranks:
        assert dict(pair.split("=") for pair in wanted.split()).items() <= ours["env"].items()


@pytest.mark.parametrize("rank", [0, 1])
def test_exl3_command(rank: int) -> None:
    """The kit's start.sh at 008ae945: the inner script's arguments with the kit's defaults."""
    ours = spec("glm-5.3-flash-exl3", rank)
    drafter = {
        "method": "dflash",
        "model": DFLASH2,
        "num_speculative_tokens": 7,
        "kv_cache_dtype": "auto",
        "draft_sample_method": "probabilistic",
        "rejection_sample_method": "standard",
        "draft_tensor_parallel_size": 2,
    }
    words = _rank_spec.engine_words(ours)
    flags = engine_flags(
        [w for w in words[3:] if not w.isdigit() or w in ("850000", "7168", "8888", "4", "2", "29521", str(rank))]
    )
    assert flags.pop("cudagraph-capture-sizes") is not None
    assert words[words.index("--cudagraph-capture-sizes") + 1 :][:7] == ["1", "2", "4", "8", "16", "24", "32"]
    assert flags == {
        "served-model-name": "GLM-5.3-Flash-EXL3",
        "host": "0.0.0.0",
        "port": "8888",
        "tensor-parallel-size": "2",
        "nnodes": "2",
        "node-rank": str(rank),
        "master-addr": "198.51.100.11",
        "master-port": "29521",
        "distributed-executor-backend": "mp",
        "tool-call-parser": "glm47",
        "enable-auto-tool-choice": True,
        "reasoning-parser": "glm45",
        "enable-prefix-caching": True,
        "no-enable-flashinfer-autotune": True,
        "quantization": "exl3",
        "max-model-len": "850000",
        "gpu-memory-utilization": "0.85",
        "max-num-seqs": "4",
        "max-num-batched-tokens": "7168",
        "kv-cache-dtype": "fp8",
        "speculative-config": drafter,
        "chat-template": "/opt/glm53/chat_template.jinja",
        "limit-mm-per-prompt": {"image": 100, "video": 1},
        "skip-mm-profiling": True,
        **({"headless": True} if rank else {}),
    }
    assert ours["env"]["GLM53_SPINWAIT_MS"] == "stock"
    assert ours["argv"][0].index("glm_video_placeholders") < ours["argv"][0].index("spinwait"), (
        "patches in the kit's order"
    )
    assert ours["argv"][0].endswith('exec "$@"')


def test_ray_head_serves_and_workers_join() -> None:
    """Seed "GLM-5.2 469B on 3× NVIDIA DGX Spark": its table of parameters, Ray first, vLLM on the head only."""
    ranks = [spec("glm-5.2-reap-469b", r) for r in range(3)]
    _rank_spec.check_group(ranks)
    words = _rank_spec.engine_words(ranks[0])
    flags = engine_flags(words[3:])
    table = {
        "pipeline-parallel-size": "3",
        "gpu-memory-utilization": "0.85",
        "max-model-len": "262144",
        "kv-cache-dtype": "fp8",
        "block-size": "128",
        "max-num-seqs": "1",
        "max-num-batched-tokens": "2048",
        "enforce-eager": True,
        "distributed-executor-backend": "ray",
    }
    assert table.items() <= flags.items()
    assert "nnodes" not in flags
    for rank in (1, 2):
        assert _rank_spec.engine_words(ranks[rank]) == []
        argv = ranks[rank]["argv"]
        assert argv[2:7] == ["ray", "start", "--block", "--address", "198.51.100.11:29519"]
        assert argv[argv.index("--node-ip-address") + 1] == f"198.51.100.{11 + rank}"
    for ours in ranks:
        wanted = {
            "VLLM_DISABLE_DSA": "1",
            "MALLOC_ARENA_MAX": "1",
            "RAY_health_check_failure_threshold": "600",
            "RAY_health_check_period_ms": "10000",
            "RAY_CGRAPH_get_timeout": "3600",
            "NCCL_IB_DISABLE": "1",
        }
        assert wanted.items() <= ours["env"].items()


def test_a_kit_keeps_its_entrypoint_and_gets_its_settings_as_environment() -> None:
    """An image whose own start script builds the command: no words of ours, everything in the environment."""
    ours = spec(
        "glm-5.3-flash-exl3",
        1,
        engine="kit",
        args=dict.fromkeys(recipe("glm-5.3-flash-exl3")["args"]),
        start=[],
        env={"MODEL_DIR": "{model}", "NODE_RANK": "{rank}", "HEAD_IP": "{head_address}", "LIMIT_MM": '{"image":100}'},
    )
    assert (ours["entrypoint"], ours["argv"]) == ([], [])
    assert ours["env"]["MODEL_DIR"].endswith("/snapshots/25a44fdbf16862a46b7cc9921142c6c81350af2f")
    assert (ours["env"]["NODE_RANK"], ours["env"]["HEAD_IP"]) == ("1", "198.51.100.11")
    assert ours["env"]["LIMIT_MM"] == '{"image":100}', "braces that are no place are left alone"
    assert "--entrypoint" not in _rank_spec.docker_run_argv(ours)


# --- options -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "overrides", "sentence"),
    [
        (
            "glm-5.3-flash-tensorfold",
            {"options": {"drafter": "mtp", "parallel": 4}},
            "options.parallel is 4, but drafter mtp allows 1 at most: the checkpoint's own head serves one request at a time",
        ),
        (
            "glm-5.3-flash-tensorfold",
            {"options": {"context": 2000000}},
            "options.context is 2000000, wanted 1048576 or less (prompt and reply together).",
        ),
        ("glm-5.3-flash-tensorfold", {"options": {"kv": "int3"}}, "options.kv is int3, wanted one of fp8, bf16 ("),
        ("glm-5.3-flash-nvfp4", {"options": {"kv": "int3"}}, "options.kv is int3, wanted one of fp8_e4m3, fp8, auto ("),
        (
            "glm-5.3-flash-nvfp4",
            {"options": {"contxt": 1}},
            "options.contxt is not an option of this recipe: did you mean context?",
        ),
        (
            "glm-5.3-flash-nvfp4",
            {"option_rules": {"kv": {"cases": {"fp9": {"sets": {}}}}}},
            "option_rules.kv.cases.fp9.sets is not a key of a recipe: did you mean set?",
        ),
        ("glm-5.3-flash-nvfp4", {"options": {"parallel": "many"}}, "options.parallel is 'many', wanted a number ("),
        (
            "glm-5.3-flash-nvfp4",
            {"args": {"max-model-len": 300000}},
            "args.max-model-len is 300000, over the model's limit here of 262144 tokens.",
        ),
        (
            "glm-5.3-flash-nvfp4",
            {"args": {"max-num-batched-tokens": 2048}},
            "args.max-num-batched-tokens is 2048, under the block of 2304 tokens: no step could fill a block of the prefix cache.",
        ),
        (
            "glm-5.3-flash-nvfp4",
            {"args": {"block-size": None, "max-num-batched-tokens": 16, "max-num-seqs": 6}},
            "args.max-num-batched-tokens is 16, but max-num-seqs 6 with a drafter verifies 30 tokens a step. Wanted 30 or more.",
        ),
        (
            "glm-5.3-flash-tensorfold",
            {"parallel": {"backend": "ray"}},
            "parallel.backend is ray, which the engine tensorfold",
        ),
        (
            "glm-5.3-flash-tensorfold",
            {"args": {"rank": 1}},
            "args.rank is written by the rank spec: set the inventory variable rank",
        ),
        (
            "glm-5.3-flash-exl3",
            {"checkpoint": {"revision": None}},
            "checkpoint.revision is missing: the layout hub has a folder for",
        ),
    ],
)
def test_a_wrong_option_is_one_sentence_that_says_why(name: str, overrides: dict, sentence: str) -> None:
    with pytest.raises(RecipeError) as error:
        recipe(name, **overrides)
    assert str(error.value).startswith(sentence)


def test_dflash2_without_acceptance() -> None:
    """Said before anything is fetched or stopped, by the checkpoint role; both ways out are named in the recipe."""
    from ansible_collections.gb10.fleet.plugins.module_utils._checkpoint import CheckpointError
    from ansible_collections.gb10.fleet.plugins.module_utils._checkpoint_job import items_of
    from ansible_collections.gb10.fleet.plugins.module_utils._distribution import recipe_checkpoints

    def plan(**overrides: object) -> list:
        defaults = {"include": [], "exclude": [], "licence": None, "non_commercial": False, "revision": None}
        checkpoints = [
            {**defaults, **c} for c in recipe_checkpoints(recipe("glm-5.3-flash-nvfp4-dflash2", **overrides))
        ]
        return items_of(
            {"checkpoints": checkpoints, "models_dir": "/m", "state_dir": "/s", "accept_non_commercial": False}
        )

    with pytest.raises(
        CheckpointError, match=r"DFlash2 may be used for non-commercial purposes only \(CC BY-NC-ND 4\.0\)"
    ):
        plan()
    assert len(plan(options={"drafter": "mtp"})) == 1, "the other drafter needs no second licence"


def test_mtp_serves_one_request_at_a_time() -> None:
    """What only the recipe says is lowered; what the user asked for is refused (above)."""
    ours = spec("glm-5.3-flash-tensorfold", 0, options={"drafter": "mtp"})
    words = ours["argv"]
    assert (words[words.index("--parallel") + 1], words[words.index("--drafter") + 1]) == ("1", "none")
    assert not any("DFlash2" in mount["source"] for mount in ours["mounts"])


def test_context_zero_fits_itself() -> None:
    words = spec("glm-5.3-flash-tensorfold", 0, options={"context": 0})["argv"]
    assert words[words.index("--context") + 1] == "0"
    words = spec("glm-5.3-flash-nvfp4", 0, options={"context": 0})["argv"]
    assert words[words.index("--max-model-len") + 1] == "auto"


def test_text_only_and_spin_wait() -> None:
    assert "--vision" not in spec("glm-5.3-flash-tensorfold", 0, options={"vision": False})["argv"]
    ours = spec("glm-5.3-flash-exl3", 0, options={"vision": False, "spin_wait_ms": 16, "reasoning_effort": "low"})
    assert "--language-model-only" in ours["argv"]
    assert ours["env"]["GLM53_SPINWAIT_MS"] == "16"
    assert '{"reasoning_effort": "low"}' in ours["argv"]
    ours = spec("glm-5.3-flash-tensorfold", 0, options={"shared_prefix": False})
    assert ours["env"]["TF_GLM_SHARED_PREFIX"] == "0"


def test_utilization_over_the_safe_value_warns() -> None:
    base = yaml.safe_load((ROOT / "recipes/glm-5.3-flash-nvfp4.yml").read_text())
    found = resolve("glm", [("recipe", base), ("command line", {"options": {"utilization": 0.87}})])
    assert found.warnings == [
        "recipe glm: gpu-memory-utilization 0.87 is over 0.85, the largest value that is known to be safe "
        "(0.87 has crashed heads). Keep the memory guard on."
    ]
    base = yaml.safe_load((ROOT / "recipes/glm-5.3-flash-exl3.yml").read_text())
    found = resolve("exl3", [("recipe", base), ("inventory", {"args": {"max-num-seqs": 6}})])
    assert "a full batch decodes 48 tokens a step, but cudagraph-capture-sizes end at 32" in found.warnings[0]


# --- layers --------------------------------------------------------------------------------------------------------------
def test_precedence_is_command_line_inventory_recipe_default() -> None:
    base = yaml.safe_load((ROOT / "recipes/glm-5.3-flash-nvfp4.yml").read_text())
    found = resolve(
        "glm",
        [
            ("recipe", base),
            ("inventory", {"options": {"context": 131072, "parallel": 5}, "args": {"max-num-batched-tokens": 9216}}),
            ("command line", {"options": {"parallel": 4}}),
        ],
    )
    args = found.recipe["args"]
    assert (args["max-model-len"], args["max-num-seqs"], args["max-num-batched-tokens"]) == (131072, 4, 9216)
    rows = {row["setting"]: (row["value"], row["from"]) for row in explain(found.recipe, found.origins)}
    assert rows["options.parallel"] == (4, "command line")
    assert rows["options.context"] == (131072, "inventory")
    assert rows["options.utilization"] == (0.85, "recipe")
    assert rows["options.reasoning_effort"] == (None, "default")
    assert rows["args.max-num-seqs"] == (4, "option parallel")
    assert rows["args.max-num-batched-tokens"] == (9216, "inventory")
    assert rows["args.block-size"] == (2304, "recipe")
    assert rows["container.network"] == ("host", "default")


def test_what_is_said_in_so_many_words_wins_over_an_option() -> None:
    assert recipe("glm-5.3-flash-nvfp4", args={"max-num-seqs": 3})["args"]["max-num-seqs"] == 3


def test_a_variant_says_only_what_differs(tmp_path: Path) -> None:
    (tmp_path / "mine.yml").write_text("extends: glm-5.3-flash-nvfp4\nserved_name: mine\nargs: {moe-backend: null}\n")
    mine = load_recipe("mine", [str(tmp_path)])
    assert (mine["name"], mine["served_name"]) == ("mine", "mine")
    assert "moe-backend" not in mine["args"]
    (tmp_path / "loop.yml").write_text("extends: loop\n")
    with pytest.raises(RecipeError, match=r"loop\.yml extends itself"):
        load_recipe("loop", [str(tmp_path)])


# --- mods ----------------------------------------------------------------------------------------------------------------
def test_a_missing_folder_of_a_mod_says_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as error:
        resolve_recipe("glm-5.2-reap-469b", [], ("inventory", SITE["glm-5.2-reap-469b"]), beside=(tmp_path,))
    assert "mods glm-5.2-patches: there is no folder GLM-spark/mods/glm-5.2-patches (looked in " in str(error.value)
    assert "Get it: git clone https://github.com/bird/GLM-spark beside your inventory" in str(error.value)


def test_a_changed_mod_is_a_changed_rank(tmp_path: Path) -> None:
    folders(tmp_path)
    site = ("inventory", SITE["glm-5.2-reap-469b"])

    def mount() -> str:
        mod = resolve_recipe("glm-5.2-reap-469b", [], site, beside=(tmp_path,)).recipe["mods"][0]
        return _rank_spec.mod_file(mod)

    before = mount()
    (tmp_path / "GLM-spark/mods/glm-5.2-patches/run.sh").write_text("echo other\n")
    assert mount() != before


@pytest.mark.parametrize("name", RECIPES)
def test_expectations_and_lanes_restart_nothing(name: str) -> None:
    before = _rank_spec.spec_hash(spec(name, 0))
    assert before == _rank_spec.spec_hash(spec(name, 0, expect={"decode_tokens_per_s": 1}, description="other"))
    if "batch" in recipe(name)["lanes"]:
        assert before == _rank_spec.spec_hash(spec(name, 0, lanes={"batch": {"max_concurrent": 2, "max_queued": 8}}))
    changed = [{"env": {"A": "1"}}, {"container": {"stop_timeout_s": 61}}]
    assert all(before != _rank_spec.spec_hash(spec(name, 0, **json.loads(json.dumps(c)))) for c in changed)


@pytest.mark.parametrize(("nodes", "served"), [(3, True), (2, False)])
def test_the_ray_head_starts_the_engine_when_all_nodes_are_in(
    nodes: int, served: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its start lines in a real shell; `ray status` as fixture launch-ray-pg has it. One node too few ends with a sentence."""
    monkeypatch.setattr(_rank_spec, "_RAY_TRIES", 1)
    case = (ROOT / "tests/fixtures/cases/launch-ray-pg.txt").read_text()
    status = case[case.index("======== Autoscaler") :].replace(
        " node_bbbb", " node_bbbb\n1 node_cccc"[: 10 if nodes < 3 else 99]
    )
    (tmp_path / "status").write_text(status)
    (tmp_path / "ray").write_text(
        f'#!/bin/sh\nif [ "$1" = status ]; then cat {tmp_path}/status; else echo "ray $*"; fi\n'
    )
    (tmp_path / "vllm").write_text('#!/bin/sh\necho "vllm $1 $2"\n')
    (tmp_path / "sleep").write_text("#!/bin/sh\n")
    for program in ("ray", "vllm", "sleep"):
        (tmp_path / program).chmod(0o755)
    ours = spec("glm-5.2-reap-469b", 0, mods=[])
    done = subprocess.run(
        [*ours["entrypoint"], *ours["argv"]],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.startswith("ray start --head --port 29519 --node-ip-address 198.51.100.11"), done.stdout
    assert ("vllm serve /var/tmp/models/GLM-5.2-NVFP4-REAP-469B" in done.stdout) is served
    assert ("[ray] only 2 of 3 nodes joined" in done.stdout) is not served
    assert done.returncode == (0 if served else 1)
