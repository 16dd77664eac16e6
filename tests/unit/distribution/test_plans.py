"""Who copies from whom, and a checkpoint against its recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from ansible_collections.gb10.fleet.plugins.module_utils._checkpoint import (
    client_resumes,
    fan_out,
    manifest_from_json,
    orphans,
    progress_line,
    space_fault,
)
from ansible_collections.gb10.fleet.plugins.module_utils._checkpoint_lint import lint
from ansible_collections.gb10.fleet.plugins.module_utils._distribution import (
    checkpoint_plan,
    pinned,
    recipe_checkpoints,
)
from ansible_collections.gb10.fleet.plugins.module_utils._recipe_layers import resolve

ROOT = Path(__file__).parents[3]
CASES = ROOT / "tests/fixtures/cases"
GLM = resolve("glm", [("recipe", yaml.safe_load((ROOT / "recipes/glm-5.3-flash-nvfp4.yml").read_text()))]).recipe
MEMORY = int(121.69 * (1 << 30))


def steps(missing: dict[str, int | None], distribution: str = "peer") -> dict[str, tuple[str | None, tuple[str, ...]]]:
    return {name: (step.source, step.clients) for name, step in fan_out(missing, distribution).items()}


def test_one_asks_the_hub_and_the_others_form_a_chain() -> None:
    assert steps({"a": None, "b": None, "c": None, "d": None}) == {
        "a": ("hub", ("b",)),
        "b": ("a", ("c",)),
        "c": ("b", ("d",)),
        "d": ("c", ()),
    }


def test_who_has_all_is_a_source_and_who_has_most_asks() -> None:
    assert steps({"a": 10, "b": 0}) == {"a": ("b", ()), "b": (None, ("a",))}
    assert steps({"a": None, "b": 5, "c": 3}) == {"a": ("b", ()), "b": ("c", ("a",)), "c": ("hub", ("b",))}
    two = steps({"a": 0, "b": 0, "c": 9, "d": 9})
    assert two["c"] == ("a", ()) and two["d"] == ("b", ())
    assert steps({"a": 0, "b": 0}) == {"a": (None, ()), "b": (None, ())}


def test_each_asks_for_itself() -> None:
    assert steps({"a": 1, "b": 0, "c": None}, "each") == {"a": ("hub", ()), "b": (None, ()), "c": ("hub", ())}


def found(name: str, revision: str | None, missing: int | None = 0) -> dict[str, Any]:
    item = {"repo": "a/b", "revision": revision, "complete": missing == 0, "missing_bytes": missing}
    return {"inventory_hostname": name, "__checkpoint_found": {"checkpoints": [item]}}


def test_plan_of_two_ranks_with_different_commits() -> None:
    """The lower rank's commit is the cluster's; the other rank takes it from there, although its own copy is whole."""
    hosts = [found("spark-01", "1" * 40), found("spark-02", "2" * 40)]
    plan = checkpoint_plan(hosts, "spark-02", addresses={"spark-01": "198.51.100.11"})
    assert plan["peer"]["address"] == "198.51.100.11" and plan["revisions"] == {"a/b": "1" * 40}
    assert not checkpoint_plan([hosts[0], found("spark-02", "1" * 40)], "spark-02")["needed"]


def test_plan_says_who_did_not_answer() -> None:
    failed = {"inventory_hostname": "spark-02", "__checkpoint_found": {"failed": True}}
    assert checkpoint_plan([found("spark-01", None, None), failed], "spark-01")["failure"].startswith(
        "spark-02 did not say"
    )


def test_one_commit_for_the_fleet() -> None:
    """Recipe first, then what the ranks have, then the first answer of the hub in the whole run."""
    items = [{"repo": "a/b"}]
    answers = [
        {"checkpoints": [{"repo": "a/b", "revision": "3" * 40}]},
        {"checkpoints": [{"repo": "a/b", "revision": "4" * 40}]},
    ]
    assert pinned(items, {"a/b": None}, answers)[0]["revision"] == "3" * 40
    assert pinned(items, {"a/b": "5" * 40}, answers)[0]["revision"] == "5" * 40
    assert pinned([{"repo": "a/b", "revision": "6" * 40}], {}, answers)[0]["revision"] == "6" * 40
    assert "revision" not in pinned(items, {"a/b": None})[0]


def test_recipe_with_a_drafter_needs_two() -> None:
    recipe = {"checkpoint": {"repo": "a/b", "refused": []}, "drafter": {"repo": "c/d", "non_commercial": True}}
    assert [item["repo"] for item in recipe_checkpoints(recipe)] == ["a/b", "c/d"] and recipe_checkpoints({}) == []


# --- lint ---


def codes(
    config: dict[str, Any], tensors: dict[str, Any] | None = None, recipe: dict[str, Any] = GLM, severity: str = "error"
) -> list[str]:
    held = {"bytes": 172 << 30, "mtp": ["mtp.x"], "layers": 48, **(tensors or {})}
    return [f["code"] for f in lint(config, held, recipe, MEMORY) if f["severity"] == severity]


GOOD = {
    "num_attention_heads": 96,
    "num_hidden_layers": 47,
    "quantization_config": {"quant_method": "compressed-tensors"},
}


def test_good_checkpoint_has_no_errors() -> None:
    assert codes(GOOD) == []


def test_ckpt_modelopt_corrupt() -> None:
    """vllm#54150: the build that corrupts tokens is told by its quantization, with the reason and the right one."""
    assert 'quant_method: "modelopt"' in (CASES / "ckpt-modelopt-corrupt.txt").read_text()
    config = {**GOOD, "quantization_config": {"quant_method": "modelopt"}}
    text = next(f["text"] for f in lint(config, {}, GLM, MEMORY) if f["code"] == "quantization")
    assert (
        "quantized by modelopt (its ModelOpt quantization silently corrupts token ids (vllm-project/vllm#54150))"
        in text
    )
    assert "the recipe wants compressed-tensors" in text


def test_shape_memory_and_speculation() -> None:
    assert codes({**GOOD, "num_attention_heads": 97}) == ["tensor-parallel"]
    assert codes({**GOOD, "text_config": {"num_attention_heads": 97}, "num_attention_heads": None}) == [
        "tensor-parallel"
    ]
    assert codes(GOOD, {"bytes": 260 << 30}) == ["memory"]
    assert codes({**GOOD, "num_nextn_predict_layers": 1}, {"mtp": [], "layers": 47}) == ["mtp-weights"]
    assert codes(GOOD, {"mtp": [], "layers": 47}) == ["mtp"]
    assert codes({}) == ["config-missing"]


def test_block_alignment_of_the_seed() -> None:
    """8192 is no multiple of 2304: 6912 are used, 9216 = 4 × 2304 aligns."""
    text = next(f["text"] for f in lint(GOOD, {"mtp": ["x"]}, GLM, MEMORY) if f["code"] == "block-alignment")
    assert "only 6912 of them are used" in text and "9216 = 4 × 2304 aligns" in text


# --- words and names ---


def test_ckpt_no_resume() -> None:
    """The public case's two files with a random part are swept; the resumable kind is kept while the client can continue it."""
    lines = (CASES / "ckpt-no-resume.txt").read_text().splitlines()[1:3]
    swept = [line.split()[0] for line in lines]
    manifest = manifest_from_json(
        {"version": 1, "repo": "a/b", "revision": "0" * 40, "files": {"m": [9, None, "abc123"]}}
    )
    keep = ".cache/huggingface/download/q8X.abc123.incomplete"
    assert orphans([*swept, keep], manifest, [], resumes=True) == swept
    assert orphans([keep], manifest, ["m"], resumes=True) == [keep]
    assert orphans([keep], manifest, [], resumes=False) == [keep]
    assert [client_resumes(v) for v in ("0.34.0", "1.16.4", "1.17.9", "1.18.0", "2.4.0")] == [
        True,
        True,
        True,
        False,
        False,
    ]


def test_ckpt_disk_xet() -> None:
    """The disk is looked at before the download, in numbers; the case's own words are the engine's errno 28."""
    assert "[Errno 28] No space left on device" in (CASES / "ckpt-disk-xet.txt").read_text()
    said = space_fault("/var/tmp/models", 185 << 30, 100 << 30)
    assert said is not None and said.startswith(
        "/var/tmp/models has 100.0 GiB free, 185.0 GiB are still to come. Free 87.8 GiB"
    )
    assert space_fault("/x", 10 << 30, 12 << 30) is None


@pytest.mark.parametrize(
    ("progress", "line"),
    [
        (
            {"what": "checkpoint", "done": 13_314_398_618, "total": 185_001_000_000, "rate": 612e6},
            "checkpoint: 12.4 GiB of 172.3 GiB, 612 MB/s, 4 min 41 s left",
        ),
        ({"what": "image", "done": 5, "total": 0, "note": "builds"}, "image: 5 B (builds)"),
    ],
)
def test_progress_line(progress: dict[str, Any], line: str) -> None:
    assert progress_line(progress) == line
