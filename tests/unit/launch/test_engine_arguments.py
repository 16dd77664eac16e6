"""The engine's own parser and the mods of a recipe, without an engine: stand-ins for its modules, files of the fake image."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.testing import patch_module_args

from ansible_collections.gb10.fleet.plugins.module_utils._engine_parser import answer_of, program, refusal
from ansible_collections.gb10.fleet.plugins.module_utils._mods import ModError, patched, sha256, silent
from ansible_collections.gb10.fleet.plugins.modules import engine_arguments

NEWER = {
    "vllm/utils/__init__.py": "",
    "vllm/utils/argparse_utils.py": "from argparse import ArgumentParser as FlexibleArgumentParser\n",
}
OLDER = {"vllm/utils/__init__.py": "from argparse import ArgumentParser as FlexibleArgumentParser\n"}
MAKE = """
def make_arg_parser(parser):
    parser.add_argument("model", nargs="?")
    parser.add_argument("--max-model-len", type=int)
    return parser
"""
TENSORFOLD = """
import argparse
def build_parser():
    parser = argparse.ArgumentParser(prog="tensorfold")
    serve = parser.add_subparsers(dest="command").add_parser("serve")
    serve.add_argument("model")
    serve.add_argument("--context", type=int)
    return parser
"""


def ask(base: Path, files: dict[str, str], engine: str, *words: str) -> dict:
    for name, text in files.items():
        path = base / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for package in {p.parent for p in base.rglob("*.py")}:
        (package / "__init__.py").touch()
    done = subprocess.run(
        [sys.executable, "-c", program(engine), "serve", *words],
        env={"PYTHONPATH": str(base)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    answer = answer_of(done.stdout)
    assert answer is not None, done.stderr
    return answer


@pytest.mark.parametrize(
    ("place", "utils"),
    [("vllm/entrypoints/launchers/cli_args.py", NEWER), ("vllm/entrypoints/openai/cli_args.py", OLDER)],
)
def test_both_places_of_vllms_parser(tmp_path: Path, place: str, utils: dict[str, str]) -> None:
    files = {place: MAKE, **utils}
    assert ask(tmp_path, files, "vllm", "/m", "--max-model-len", "4096")["error"] is None
    answer = ask(tmp_path, files, "vllm", "/m", "--max-modl-len", "4096")
    assert (
        refusal(answer["error"], answer["flags"])
        == "unrecognized arguments: --max-modl-len 4096. Did you mean --max-model-len?"
    )


def test_tensorfolds_parser(tmp_path: Path) -> None:
    files = {"tensorfold/cli.py": TENSORFOLD}
    assert ask(tmp_path, files, "tensorfold", "/m", "--context", "0")["error"] is None
    answer = ask(tmp_path, files, "tensorfold", "/m", "--contxt", "0")
    assert refusal(answer["error"], answer["flags"]).endswith("Did you mean --context?")
    answer = ask(tmp_path, files, "tensorfold", "/m", "--context", "many")
    assert refusal(answer["error"], answer["flags"]) == "argument --context: invalid int value: 'many'."


def test_a_parser_that_cannot_be_loaded_proves_nothing(tmp_path: Path) -> None:
    answer = ask(tmp_path, {"other.py": ""}, "vllm", "/m")
    assert answer["unchecked"] == "ModuleNotFoundError: No module named 'vllm'"
    assert answer_of("Killed") is None


# --- mods ----------------------------------------------------------------------------------------------------------------
ORIGINAL = "def wait():\n    return 5\n\n\ndef other():\n    return 6\n"
MOD = {
    "name": "longer-wait",
    "target": "/opt/engine/wait.py",
    "original_sha256": sha256(ORIGINAL),
    "replace": [{"anchor": "    return 5\n", "with": "    return 50\n"}],
    "log": ["[wait] 50 s"],
}


def test_a_mod_replaces_what_its_anchor_finds_once() -> None:
    assert patched(ORIGINAL, MOD, "engine:1") == ORIGINAL.replace("5", "50")


def test_an_image_that_moved_on_is_refused_with_both_checksums() -> None:
    moved = ORIGINAL + "# newer\n"
    with pytest.raises(ModError) as error:
        patched(moved, MOD, "engine:2")
    assert str(error.value).startswith(
        f"mods longer-wait: /opt/engine/wait.py in engine:2 has sha256 {sha256(moved)}, the mod was made for {sha256(ORIGINAL)}."
    )


@pytest.mark.parametrize(("anchor", "count"), [("return", 2), ("    return 7\n", 0)])
def test_an_anchor_has_to_match_exactly_once(anchor: str, count: int) -> None:
    mod = {**MOD, "original_sha256": None, "replace": [{"anchor": anchor, "with": ""}]}
    with pytest.raises(
        ModError, match=rf"is {count} times in /opt/engine/wait\.py of engine:1 \(sha256 [0-9a-f]{{64}}\), wanted once"
    ):
        patched(ORIGINAL, mod, "engine:1")


def test_a_mod_that_said_nothing_is_not_in_effect() -> None:
    assert silent("start\n[wait] 50 s\n", [MOD, {"name": "quiet", "log": []}]) == []
    assert silent("start\n", [MOD]) == ["mods longer-wait is not in effect: the container never said '[wait] 50 s'."]


# --- what passed is not asked again ---------------------------------------------------------------------------------------
def look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *words: str, check_mode: bool = False) -> dict:
    """The module, with a ``docker`` of ours that notes each run; the image's id stands in a file."""
    docker = tmp_path / "bin/docker"
    docker.parent.mkdir(exist_ok=True)
    docker.write_text(
        "#!/bin/sh\n"
        f'[ "$1 $2" = "image inspect" ] && exec cat {tmp_path}/id\n'
        f'echo "$@" | tail -n 1 >> {tmp_path}/runs\n'
        f"exec cat {tmp_path}/answer\n"
    )
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", str(docker.parent), prepend=":")
    arguments = {"image": "e:1", "words": ["vllm", "serve", *words], "record": str(tmp_path / "state/arguments.json")}
    said: list[dict] = []

    def leave(_module: AnsibleModule, **result: object) -> None:
        said.append(result)
        raise SystemExit

    monkeypatch.setattr(AnsibleModule, "exit_json", leave)
    monkeypatch.setattr(AnsibleModule, "fail_json", leave)
    with patch_module_args({**arguments, "_ansible_check_mode": check_mode}), pytest.raises(SystemExit):
        engine_arguments.main()
    return said[0]


def test_what_passed_is_asked_once_per_image_and_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs, image, answer = tmp_path / "runs", tmp_path / "id", tmp_path / "answer"
    image.write_text("sha256:1\n")
    answer.write_text('@answer {"error": null, "unchecked": null, "flags": []}\n')
    assert look(tmp_path, monkeypatch, "/m", check_mode=True)["checked"]
    assert not (tmp_path / "state").exists()
    for count, words in ((2, "/m"), (2, "/m"), (3, "/other"), (3, "/m")):
        assert look(tmp_path, monkeypatch, words)["checked"]
        assert len(runs.read_text().splitlines()) == count
    image.write_text("sha256:2\n")
    assert look(tmp_path, monkeypatch, "/m")["checked"]
    assert len(runs.read_text().splitlines()) == 4


def test_what_is_refused_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "id").write_text("sha256:1\n")
    (tmp_path / "answer").write_text('@answer {"error": "error: bad", "unchecked": null, "flags": []}\n')
    for count in (1, 2):
        assert look(tmp_path, monkeypatch, "/m")["msg"].startswith("vllm in e:1 refuses the arguments: bad.")
        assert len((tmp_path / "runs").read_text().splitlines()) == count
