"""The module that installs, starts and stops the guard, with a systemctl that a test controls."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.testing import patch_module_args

from ansible_collections.gb10.fleet.plugins.module_utils import _memory_guard
from ansible_collections.gb10.fleet.plugins.modules import memory_guard

SYSTEMCTL = """#!/usr/bin/env python3
import json, os, sys
folder, words = {folder!r}, sys.argv[1:]
state = json.load(open(folder + "/state"))
open(folder + "/calls", "a").write(" ".join(words) + "\\n")
if words[0] == "show":
    print("\\n".join(f"{{k}}={{v}}" for k, v in state.items()))
elif words[0] in ("restart", "stop"):
    if words[0] == "restart" and state.get("broken"):
        sys.exit("Job for the unit failed.")
    end = json.load(open({receipt!r})) if os.path.exists({receipt!r}) else {{}}
    if words[0] == "stop" and os.path.exists({marker!r}):
        end.update(state="ended", stopped_by=open({marker!r}).read())
        json.dump(end, open({receipt!r}, "w"))
    state["ActiveState"] = "active" if words[0] == "restart" else "inactive"
    json.dump(state, open(folder + "/state", "w"))
"""


class Host:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.receipt = folder / "var/alpha.json"
        self.marker = folder / "run/memory-guard-alpha.end"
        self.receipt.parent.mkdir()
        (folder / "bin").mkdir()
        script = folder / "bin/systemctl"
        text = SYSTEMCTL.format(folder=str(folder), receipt=str(self.receipt), marker=str(self.marker))
        script.write_text(text)
        script.chmod(0o755)
        (folder / "bin/journalctl").write_text("#!/bin/sh\necho 'memory_guard: --receipt is needed'\n")
        (folder / "bin/journalctl").chmod(0o755)
        self.set(ActiveState="inactive", NRestarts="0", Result="success", MainPID="0", Id="x.service")

    def set(self, **fields: Any) -> None:
        path = self.folder / "state"
        old = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**old, **fields}))

    def calls(self) -> list[str]:
        """What systemctl was told, questions left out; forgotten once asked."""
        path = self.folder / "calls"
        words = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return [word for word in words if not word.startswith("show")]


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    found = Host(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.setattr(memory_guard.os, "geteuid", lambda: 0)
    return found


@pytest.fixture
def run(host: Host, capfd: pytest.CaptureFixture[str], program: Path) -> Any:
    def call(check: bool = False, **options: Any) -> dict[str, Any]:
        folders = {
            "program_dir": "opt",
            "config_dir": "etc",
            "state_dir": "var",
            "runtime_dir": "run",
            "unit_dir": "units",
        }
        arguments = {
            "_ansible_check_mode": check,
            "cluster": "alpha",
            "program": program.read_text(),
            "python": os.sys.executable,  # type: ignore[attr-defined]
            **{name: str(host.folder / folder) for name, folder in folders.items()},
            **options,
        }
        with patch_module_args(arguments), pytest.raises(SystemExit):
            memory_guard.main()
        return dict(json.loads(capfd.readouterr().out.splitlines()[-1]))

    return call


def files(host: Host) -> list[str]:
    found = [p for folder in ("opt", "etc", "units") for p in (host.folder / folder).glob("*")]
    return sorted(str(p.relative_to(host.folder)) for p in found)


ALL = ["etc/memory-guard-alpha.json", "opt/memory_guard.py", "units/gb10-memory-guard@.service"]


def test_present_installs_and_is_idempotent(host: Host, run: Any) -> None:
    assert run(check=True, state="present")["changed"]
    assert files(host) == []
    first = run(state="present")
    assert first["changed"] and files(host) == ALL
    assert host.calls() == ["daemon-reload"]
    again = run(state="present")
    assert not again["changed"] and host.calls() == []
    assert not run(check=True, state="present")["changed"]


def test_started_starts_once(host: Host, run: Any) -> None:
    assert run(check=True)["changed"] and host.calls() == []
    first = run(checkpoint_globs=["/m"])
    assert first["changed"]
    unit = "gb10-memory-guard@alpha.service"
    assert host.calls() == ["daemon-reload", f"reset-failed {unit}", f"restart {unit}"]
    assert first["guard"]["active"] == "active" and first["guard"]["unit"] == unit
    again = run(checkpoint_globs=["/m"])
    assert not again["changed"] and host.calls() == []
    assert not run(check=True, checkpoint_globs=["/m"])["changed"]


def test_another_floor_begins_another_run(host: Host, run: Any) -> None:
    run(floor_gib=8)
    before = json.loads((host.folder / ALL[0]).read_text())
    host.calls()
    assert run(floor_gib=6)["changed"]
    assert host.calls()[-1] == "restart gb10-memory-guard@alpha.service"
    after = json.loads((host.folder / ALL[0]).read_text())
    assert (before["floor_mib"], after["floor_mib"]) == (8192, 6144)
    assert before["run"] != after["run"]


def test_stopped_says_why_and_returns_the_receipt(host: Host, run: Any) -> None:
    run()
    host.receipt.write_text(json.dumps({"state": "running", "min_free_kib": 9101312, "settings": {"floor_mib": 8192}}))
    assert run(check=True, state="stopped", reason="ready")["changed"]
    done = run(state="stopped", reason="ready")
    assert done["changed"] and done["receipt"]["stopped_by"] == "ready"
    assert done["summary"].startswith("lowest free 8.7 GiB (floor 8.0 GiB), never under the floor")
    assert not host.marker.exists()
    again = run(state="stopped", reason="failed")
    assert not again["changed"] and again["receipt"]["stopped_by"] == "ready"
    assert not again.get("warnings")


def test_stopped_where_nothing_was_ever_installed(host: Host, run: Any) -> None:
    done = run(state="stopped")
    assert not done["changed"] and done["receipt"] == {} and done["summary"] == "no receipt"


def test_a_guard_that_reached_its_deadline_is_reported(host: Host, run: Any) -> None:
    run()
    host.set(ActiveState="failed", Result="exit-code")
    host.receipt.write_text(
        json.dumps({"state": "ended", "stopped_by": "deadline", "settings": {"deadline_s": 2700.0}})
    )
    done = run(state="stopped", reason="ready")
    assert not done["changed"]
    assert done["guard"]["warnings"] == [
        "The memory guard reached its deadline of 45 min before the load ended, and stopped."
    ]


def test_absent_removes_everything_but_what_others_need(host: Host, run: Any) -> None:
    run()
    other = host.folder / "etc/memory-guard-beta.json"
    other.write_text("{}")
    assert run(state="absent")["changed"]
    assert files(host) == ["etc/memory-guard-beta.json", *ALL[1:]]
    other.unlink()
    run()
    assert run(check=True, state="absent")["changed"] and files(host) == ALL
    assert run(state="absent")["changed"] and files(host) == []
    assert host.calls()[-1] == "daemon-reload"
    assert not run(state="absent")["changed"]


def test_a_guard_that_does_not_start_says_its_last_words(host: Host, run: Any) -> None:
    host.set(broken=1)
    failed = run()
    assert failed["failed"]
    assert "Job for the unit failed." in failed["msg"]
    assert "Its last words: memory_guard: --receipt is needed" in failed["msg"]


@pytest.mark.parametrize("name", ["", "a/b", "a b", "-x", "a@b"])
def test_names_that_systemd_would_escape_are_refused(run: Any, name: str) -> None:
    assert "wanted letters, digits" in run(cluster=name)["msg"]


def test_without_root_it_says_so(host: Host, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_guard.os, "geteuid", lambda: 1000)
    assert run()["msg"] == "The memory guard is a system unit: set become: true, or log in as root."


def test_program_knows_every_setting_that_the_module_writes(host: Host, run: Any, guard: Any) -> None:
    run(settings={"lead_s": 0.5})
    options = guard.Options.parse(["--config", str(host.folder / ALL[0])])
    assert options.lead_s == 0.5 and options.receipt == str(host.receipt)


# --- what a receipt means ---


def test_guard_that_was_killed_is_never_hidden() -> None:
    cuts = [{"unseen_s": 3.2, "pid": 1, "at_s": 9}, {"unseen_s": 1.1, "pid": 2, "at_s": 20}]
    said = _memory_guard.warnings({"state": "ended", "interruptions": cuts}, {})
    assert said == [
        "The memory guard was killed 2 times during the load and started again by systemd; nobody watched memory for up to 4 s."
    ]


def test_guard_that_did_not_come_back_is_never_hidden() -> None:
    show = {"ActiveState": "failed", "Result": "signal", "Id": "gb10-memory-guard@alpha.service"}
    (said,) = _memory_guard.warnings({"state": "running", "seconds": 31.4}, show)
    assert "ended after 31 s without a word (systemd says: signal)" in said
    assert "journalctl -u gb10-memory-guard@alpha.service" in said
    assert _memory_guard.warnings({"state": "running"}, {"ActiveState": "active"}) == []


def test_guard_silent_wedge_names_the_container() -> None:
    receipt = {"stopped_by": "hard_floor", "hard_floor": {"container": "vllm_glm53", "result": "stopped"}}
    (said,) = _memory_guard.warnings({**receipt, "settings": {"hard_floor_mib": 4096}}, {})
    assert said.startswith(
        "Available memory stayed under the hard floor of 4.0 GiB: the memory guard stopped the container"
    )


def test_unit_hides_no_checkpoint_and_stays_stopped_after_its_deadline() -> None:
    """PrivateTmp would give the guard a /var/tmp of its own, and the checkpoints lie in /var/tmp/models."""
    text = _memory_guard.unit_text("/usr/bin/python3", "/opt/gb10-fleet/memory_guard.py", "/etc/gb10-fleet")
    settings = [line for line in text.splitlines() if not line.startswith("#")]
    assert not [line for line in settings if line.startswith(("PrivateTmp", "Protect", "MemoryMax"))]
    assert "RestartPreventExitStatus=3 4" in settings and "Type=notify" in settings
    watchdog = next(line for line in settings if line.startswith("WatchdogSec="))
    assert int(watchdog.split("=")[1]) >= 10
    assert "--config /etc/gb10-fleet/memory-guard-%i.json" in text


# --- what a recipe asks for ---


def test_folders_of_both_layouts() -> None:
    model = {"repo": "RedHatAI/GLM-5.3-Flash-NVFP4", "layout": "flat", "directory": "GLM-5.3-Flash-NVFP4-redhat"}
    drafter = {"repo": "org/drafter", "layout": "hub"}
    recipe = {"checkpoint": model, "drafter": drafter}
    assert _memory_guard.checkpoint_folders(recipe, "/var/tmp/models") == [
        "/var/tmp/models/GLM-5.3-Flash-NVFP4-redhat",
        "/var/tmp/models/hub/models--org--drafter",
    ]
    assert _memory_guard.checkpoint_folders({"checkpoint": {**model, "directory": None}}, "/m") == [
        "/m/GLM-5.3-Flash-NVFP4"
    ]
    assert _memory_guard.checkpoint_folders({}, "/m") == []


@pytest.mark.parametrize(
    ("recipe", "share"),
    [
        ({"args": {"gpu-memory-utilization": 0.85}}, 0.85),
        ({"args": {"kv-cache-memory-bytes": "64M"}}, 0.0),
        ({}, 0.0),
    ],
)
def test_share_of_memory(recipe: dict[str, Any], share: float) -> None:
    assert _memory_guard.memory_share(recipe) == share
