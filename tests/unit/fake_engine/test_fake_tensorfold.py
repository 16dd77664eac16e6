"""The stand-ins for TensorFold and for a kit check what they are started with, as a recipe renders it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rendered import ROOT, spec

from ansible_collections.gb10.fleet.plugins.module_utils._engine_parser import answer_of, program, refusal

ENGINE = ROOT / "roles/sandbox/files/engines/fake-engine"


@pytest.fixture
def start(tmp_path: Path, process: Callable[..., Any], free: Callable[[], int]) -> Iterator[Callable[..., Any]]:
    """One rank as the recipe renders it, on loopback, with folders of a checkpoint that exist."""
    (tmp_path / "config.json").write_text("{}")
    port, master = free(), free()

    def run(rank: int, env: dict[str, str | None] | None = None, **options: object) -> Any:
        ours = spec("glm-5.3-flash-tensorfold", rank, fabric={}, options=options)
        words = [
            str(tmp_path) if "/snapshots/" in w else "127.0.0.1" if w[:3] in ("198", "0.0") else w for w in ours["argv"]
        ]
        words = [{"8888": str(port), "29551": str(master)}.get(word, word) for word in words]
        merged = {**ours["env"], **(env or {})}
        return process(words[1:], {k: v for k, v in merged.items() if v is not None}, "tensorfold")

    run.port = port  # type: ignore[attr-defined]
    yield run


def test_two_ranks_serve_and_health_counts(start: Any) -> None:
    worker, head = start(1), start(0)
    head.wait_line(r"\[tensorfold\] serving GLM-5.3-Flash-EXL3, window 1048576")
    with urllib.request.urlopen(f"http://127.0.0.1:{start.port}/health", timeout=10) as answer:
        assert json.loads(answer.read())["pool_tokens"] == 2097152
    assert "vLLM" not in head.text + worker.text, "none of vLLM's lines"


def test_a_window_that_does_not_fit_ends_both_ranks(start: Any) -> None:
    worker, head = start(1), start(0, {"FAKE_ENGINE_WINDOW": "524288"})
    head.wait_line("largest fitting prompt-plus-reply window: 524288 tokens")
    assert head.wait() == 1
    worker.wait_line("rank 1 ends, since a rank that left cannot rejoin")
    assert worker.wait() == 1


@pytest.mark.parametrize(
    ("env", "sentence"),
    [
        ({"TF_GLM_KV": "int3"}, "TF_GLM_KV is 'int3', wanted fp8 or bf16"),
        ({"TENSORFOLD_MEMORY_RESERVE_GIB": None}, "TENSORFOLD_MEMORY_RESERVE_GIB is None, wanted a number"),
    ],
)
def test_its_environment_is_checked(start: Any, env: dict, sentence: str) -> None:
    rank = start(0, env)
    rank.wait_line(sentence)
    assert rank.wait() == 2


@pytest.mark.parametrize(("setting", "code"), [("stock", 0), ("16", 0), ("0", 1), ("fast", 1)])
def test_a_start_patch_of_the_kit_reads_its_setting(setting: str, code: int) -> None:
    done = subprocess.run(
        [sys.executable, str(ENGINE / "kit/patch_spinwait.py")],
        env={"GLM53_SPINWAIT_MS": setting},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == code
    assert (f"[kit] spin wait {setting}" in done.stdout) is (code == 0)


def test_an_image_without_words_makes_its_command_from_the_environment(tmp_path: Path) -> None:
    """A kit: entrypoint kept, settings as environment. `vllm` is what it would run."""
    (tmp_path / "vllm").write_text('#!/bin/sh\nprintf "%s " "$@"\n')
    (tmp_path / "vllm").chmod(0o755)
    kit = {
        "MODEL_DIR": "/m",
        "SERVED_MODEL_NAME": "x",
        "PORT": "1",
        "TP": "2",
        "MAX_MODEL_LEN": "8",
        "MAX_NUM_SEQS": "4",
    }
    kit |= {"NNODES": "2", "NODE_RANK": "1", "HEAD_IP": "198.51.100.11", "MASTER_PORT": "2"}
    path = f"{tmp_path}:{os.environ['PATH']}"
    said = subprocess.run(
        [str(ENGINE / "entrypoint")], env={**kit, "PATH": path}, capture_output=True, text=True, timeout=30, check=True
    ).stdout
    assert said.startswith("serve /m --served-model-name x --port 1 --tensor-parallel-size 2")
    assert said.strip().endswith("--headless")


def test_its_parsers_answer_as_an_engines_own_does() -> None:
    """Both are asked the way that a real image is, through the modules in which the engines keep their parsers."""

    def ask(engine: str, *words: str) -> dict[str, Any]:
        done = subprocess.run(
            [sys.executable, "-c", program(engine), "serve", *words],
            env={"PYTHONPATH": f"{ENGINE / 'shims'}:{ENGINE}"},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        answer = answer_of(done.stdout)
        assert answer, done.stderr
        return answer

    assert ask("vllm", "/m", "--max_model_len", "2k", "--enforce-eager") | {"flags": []} == {
        "error": None,
        "unchecked": None,
        "flags": [],
    }
    answer = ask("vllm", "/m", "--max-modl-len", "8")
    assert refusal(answer["error"], answer["flags"]).endswith("Did you mean --max-model-len?")
    words = spec("glm-5.3-flash-tensorfold", 1)["argv"]
    assert ask("tensorfold", *words[2:])["error"] is None
    answer = ask("tensorfold", "/m", "--contxt", "8")
    assert refusal(answer["error"], answer["flags"]).endswith("Did you mean --context?")
