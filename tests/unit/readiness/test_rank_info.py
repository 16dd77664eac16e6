"""The module as Ansible runs it, with an engine behind a real socket."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.testing import patch_module_args

from ansible_collections.gb10.fleet.plugins.module_utils import _engine_log
from ansible_collections.gb10.fleet.plugins.modules import rank_info

LOGS = Path(__file__).parents[2] / "fixtures" / "engine_logs"


@pytest.fixture
def call(docker: Any, capfd: pytest.CaptureFixture[str]) -> Any:
    def run(**args: Any) -> dict[str, Any]:
        with (
            patch_module_args({"container": "x", "docker_socket": str(docker.path), **args}),
            pytest.raises(SystemExit),
        ):
            rank_info.main()
        return dict(json.loads(capfd.readouterr().out))

    return run


def messages(name: str) -> list[tuple[str, str]]:
    lines = [line for line in (LOGS / name).read_text().replace("\r", "").splitlines() if line]
    return [(f"2026-11-29T12:49:{i // 1000:02d}.{i % 1000:03d}000000Z", line) for i, line in enumerate(lines)]


def test_a_container_that_is_not_there_is_an_answer(call: Any) -> None:
    rank = call()["rank"]
    assert (rank["exists"], rank["running"], rank["status"]) == (False, False, "absent")
    assert rank["memory"]["total_kib"] > 0


def test_notes_to_the_watchdog_are_named(call: Any, tmp_path: Path) -> None:
    """serve.yml takes back only what is there."""
    folder = tmp_path / "hold"
    assert call(holds_dir=str(folder))["rank"]["holds"] == []
    folder.mkdir()
    (folder / "stopped").touch()
    assert call(holds_dir=str(folder))["rank"]["holds"] == ["stopped"]


def test_the_cheap_look_reads_no_log(call: Any, docker: Any) -> None:
    """The fast path of serve.yml: state, spec and processes, two questions to the engine."""
    docker.container()
    rank = call(expected_spec="abc")["rank"]
    assert (rank["running"], rank["spec_matches"], rank["engine_alive"], rank["restart_count"]) == (True, True, True, 0)
    assert (rank["stage"], rank["cursor"], rank["exit_code"]) == (None, None, None)
    assert [target.split("?")[0] for target in docker.asked] == ["/containers/x/json", "/containers/c0ffee/top"]


def test_stages_to_wait_for() -> None:
    assert [s for s in _engine_log.STAGES if s not in ("container", "stopped")] == rank_info.WAIT_FOR


def test_another_spec(call: Any, docker: Any) -> None:
    docker.container()
    assert call(expected_spec="def")["rank"]["spec_matches"] is False


def test_a_rank_that_ended(call: Any, docker: Any) -> None:
    docker.container(
        State={
            "Running": False,
            "Status": "exited",
            "ExitCode": 137,
            "OOMKilled": True,
            "FinishedAt": "2026-11-29T12:50:00Z",
        }
    )
    docker.messages = messages("load_error_worker.log")
    rank = call(log=True, log_lines=2)["rank"]
    assert (rank["running"], rank["exit_code"], rank["oom_killed"], rank["finished_at"]) == (
        False,
        137,
        True,
        "2026-11-29T12:50:00Z",
    )
    assert rank["fatal"]["id"] == "ckpt-missing-file"
    assert rank["first_error"]["time"].startswith("2026-11-29T12:49:00.0"), "Docker's time, not the engine's"
    assert len(rank["last_lines"]) == 2
    assert rank["engine_alive"] is None


def test_wait_for_a_stage_that_is_reached(call: Any, docker: Any) -> None:
    docker.container()
    docker.messages = messages("success_worker.log")[:36]
    rank = call(wait_for=["rendezvous"], timeout_s=30)["rank"]
    assert rank["stage"] in ("loaded", "kv_cache")


def test_wait_for_gives_up_after_its_time(call: Any, docker: Any) -> None:
    docker.container()
    rank = call(wait_for=["rendezvous"], timeout_s=0.4)["rank"]
    assert (rank["stage"], rank["running"]) == (None, True)


def test_wait_for_ends_with_the_rank(call: Any, docker: Any) -> None:
    docker.container(State={"Running": False, "Status": "exited", "ExitCode": 0})
    assert call(wait_for=["ready"], timeout_s=30)["rank"]["running"] is False


def test_a_paused_rank_does_not_run(call: Any, docker: Any) -> None:
    docker.container(State={"Paused": True, "Status": "paused"})
    assert call()["rank"]["running"] is False


def test_probe(call: Any, docker: Any, engine: Any) -> None:
    docker.container()
    probe = call(probe={"url": engine.url, "model": "tiny"})["rank"]["probe"]
    assert (probe["ok"], probe["text"]) == (True, "Hello there you")


def test_probe_with_a_key(call: Any, docker: Any, engine: Any, tmp_path: Path) -> None:
    docker.container()
    engine.key = "k-123456"
    (tmp_path / "key").write_text("k-123456\n")
    result = call(probe={"url": engine.url, "model": "tiny", "api_key_file": str(tmp_path / "key")})
    assert result["rank"]["probe"]["ok"]
    assert "k-123456" not in json.dumps(result)


def test_no_secret_in_what_it_says(call: Any, docker: Any) -> None:
    config = {"Image": "vllm:1", "Labels": {}, "Entrypoint": ["vllm"], "Cmd": ["serve", "/m", "--api-key", "s3cr3t-key-1"],
              "Env": ["VLLM_API_KEY=s3cr3t-key-2", "VLLM_HOST_IP=192.0.2.1"]}  # fmt: skip
    docker.container(Config=config)
    rank = call(log=True)["rank"]
    assert "s3cr3t" not in json.dumps(rank)
    assert rank["settings"]["env"] == {"VLLM_HOST_IP": "192.0.2.1"}


def test_activity(call: Any, docker: Any) -> None:
    docker.container()
    docker.cpu_s = 12.5
    assert call(activity=True)["rank"]["activity"] == {"cpu_s": 12.5, "read_bytes": 0}


def test_no_docker(call: Any) -> None:
    result = call(docker_socket="/nonexistent/docker.sock")
    assert result["failed"]
    assert "Docker does not run here. Run: systemctl start docker" in result["msg"]


@pytest.mark.parametrize(
    ("rows", "alive", "stopped"),
    [
        (
            [["1", "Ss", "/sbin/docker-init -- vllm serve"], ["7", "Sl", "/usr/bin/python3 /usr/bin/vllm serve /m"]],
            True,
            False,
        ),
        # A container whose init is left alone, and one with nothing but a zombie (case launch-no-init).
        ([["1", "Ss", "/sbin/docker-init -- vllm serve"]], False, False),
        ([["1", "Ss", "/sbin/docker-init --"], ["7", "Z", "[ray::RayWorkerP] <defunct>"]], False, False),
        ([["1", "Ss", "docker-init"], ["7", "Tl", "VLLM::EngineCore"], ["8", "T", "VLLM::Worker_TP1"]], False, True),
        ([["1", "Ss", "docker-init"], ["7", "Sl", "VLLM::EngineCore"], ["8", "T", "VLLM::Worker_TP1"]], False, True),
        ([], False, False),
    ],
)
def test_processes(rows: list[list[str]], alive: bool, stopped: bool) -> None:
    assert rank_info.processes_alive(rows) == (alive, stopped)
