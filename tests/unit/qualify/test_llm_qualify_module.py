"""The module: check mode, the key, what an interrupted run left, progress."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.testing import patch_module_args

from ansible_collections.gb10.fleet.plugins.module_utils import _qualify
from ansible_collections.gb10.fleet.plugins.modules import llm_qualify

from .conftest import ROOT, SMALL, recipe

PLAN = _qualify.plan(
    recipe(), "quick", None, {**SMALL, "repeats": 2, "short": 1, "decode_runs": 1, "checks": ["not_empty"]}
)


def run(capfd: Any, **args: Any) -> dict[str, Any]:
    with (
        patch_module_args({"url": "http://127.0.0.1:1", "model": "tiny", "plan": PLAN, **args}),
        pytest.raises(SystemExit),
    ):
        llm_qualify.main()
    return dict(json.loads(capfd.readouterr().out))


def test_check_mode_sends_nothing(capfd: Any) -> None:
    said = run(capfd, _ansible_check_mode=True)
    assert (said["changed"], said["measured"]) == (False, {})


def test_an_engine_that_is_gone_is_a_result(capfd: Any, tmp_path: Path) -> None:
    said = run(capfd, state_file=str(tmp_path / "state"))
    assert said["measured"]["ended_early"]["error"] == "nothing listens on 127.0.0.1:1"
    assert said["measured"]["engine_version"] is None and not (tmp_path / "state").exists()


def test_a_key_that_cannot_be_read(capfd: Any) -> None:
    assert (
        run(capfd, api_key_file="/nowhere/key")["msg"]
        == "api_key_file /nowhere/key cannot be read: No such file or directory."
    )


def test_a_run_without_its_controller_is_ended(tmp_path: Path) -> None:
    """It would go on sending requests beside ours."""
    code = (
        "import sys, time, pathlib\n"
        f"sys.path.insert(0, {str(ROOT / 'collections')!r})\n"
        "from ansible_collections.gb10.fleet.plugins.modules.llm_qualify import take_over\n"
        f"held = take_over(pathlib.Path({str(tmp_path / 'state')!r}))\nprint('held', flush=True)\ntime.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout and other.stdout.readline() == "held\n"
        llm_qualify.take_over(tmp_path / "state").close()
        assert other.wait(10) == -signal.SIGTERM


def test_a_run(capfd: Any, tmp_path: Path, engine: Callable[..., Any]) -> None:
    state, progress = tmp_path / "x/state", tmp_path / "progress"
    one = engine()
    args = {"url": one.url, "state_file": str(state), "progress_file": str(progress), "engine": "a"}
    said = run(capfd, **args)
    assert said["measured"]["ended_early"] is None and said["measured"]["engine_version"]
    assert json.loads(progress.read_text())["line"].endswith("check: not empty")
    # What another start of the engine left is not taken up; what this one left is.
    kept = {
        **said["measured"],
        "stages": [s for s in said["measured"]["stages"] if s["name"] != "checks"],
        "marked": True,
    }
    key = llm_qualify.identity({"url": one.url, "model": "tiny", "plan": PLAN, "engine": "a"})
    state.write_text(json.dumps({"key": "another", "measured": kept}))
    assert "marked" not in run(capfd, **args)["measured"]
    state.write_text(json.dumps({"key": key, "measured": kept}))
    again = run(capfd, **args)["measured"]
    assert again["marked"] and again["resumed"] and not state.exists()
    assert len([r for r in again["requests"] if r["stage"] == "cached"]) == 2
