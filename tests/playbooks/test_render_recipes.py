"""render.yml with the recipes of the collection and of a user: nothing is contacted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fleet import run_playbook
from rendered import recipe

from ansible_collections.gb10.fleet.plugins.module_utils import _learned

FOLD = "glm-5.3-flash-tensorfold"


def render(*words: str, **variables: Any) -> str:
    done = run_playbook("render", "inventories/spark", "-e", json.dumps(variables), *words)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_explain_names_the_layer_of_each_value() -> None:
    told = render("--tags", "explain", recipe_overrides={"options": {"parallel": 4, "utilization": 0.87}})
    table = told.split("setting ", 1)[1].split("\n\n")[0]
    rows = {line.split()[0]: line.split()[1:] for line in table.splitlines()[1:]}
    assert rows["options.parallel"] == ["4", "command", "line"]
    assert rows["args.max-num-seqs"] == ["4", "option", "parallel"]
    assert rows["args.block-size"] == ["2304", "recipe"]
    assert rows["container.network"] == ["host", "default"]
    assert "docker run" not in told
    assert " ".join(told.split()).count("gpu-memory-utilization 0.87 is over 0.85") == 1


def test_a_window_that_was_named_is_taken_from_then_on(tmp_path: Path) -> None:
    """Only where it is asked for more; the user's smaller one stays."""
    _learned.keep_window(tmp_path, "alpha", recipe(FOLD), 524288)
    learned = {"recipe": FOLD, "readiness_learned_dir": str(tmp_path)}
    mirrored = recipe(FOLD)
    mirrored["image"]["reference"] = mirrored["image"]["reference"].replace("ghcr.io", "mirror.example.org")
    _learned.keep_window(tmp_path, "alpha", mirrored, 262144)
    assert render(**learned, image_registry="mirror.example.org").count("--context 262144") == 2
    assert render(**learned).count("--context 524288") == 2
    told = render("--tags", "explain", **learned)
    assert "this cluster's last start" in told
    assert render(**learned, recipe_overrides={"options": {"context": 4096}}).count("--context 4096") == 2
    assert render(recipe=FOLD, readiness_learned_dir=str(tmp_path / "none")).count("--context 1048576") == 2


def test_a_recipe_that_lacks_its_folder_or_image_says_so() -> None:
    done = run_playbook("render", "inventories/spark", "-e", json.dumps({"recipe": "glm-5.3-flash-nvfp4-dflash2"}))
    told = " ".join(done.stdout.split())
    assert done.returncode == 2
    assert "there is no folder GLM-5.3-Flash-NVFP4-DFlash2-2x-DGX-Spark/overlay-dflash2" in told
    assert "Get it: git clone https://github.com/tonyd2wild/" in told
